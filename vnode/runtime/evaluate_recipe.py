"""Recipe and leaf values -> the requested values, on whole values once or as one node.

Knows recipes, and how to bind a primitive again with other shapes. Must not know passes, devices or any primitive's
name.

    y = x * w;  want y: slice      leaves x: slice, w: whole      ->      node 3 of 4:  x[6:8] * w       for 8 examples
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from vnode.analysis.forms import WHOLE, Form, Location, Partial, Slice, contains_factor
from vnode.analysis.independent_subgraphs import Subgraph, split_subgraphs
from vnode.analysis.low_precision_sums import is_narrow
from vnode.analysis.program import Atom, Program, bind, context_of
from vnode.analysis.recipe import Conversion, Evaluation, Key, Recipe
from vnode.operators import Algebra, OperatorDescription, Role, cast, evaluate_wide
from vnode.operators import evaluate as evaluate_operator
from vnode.operators.control_flow import Region, Run, region_of
from vnode.operators.in_program import InProgram, as_array
from vnode.operators.multi_operand_barrier import evaluate_together, group_barrier_parts
from vnode.operators.ordering_barrier import ready_value
from vnode.operators.separate_rounding import Broadcast, Rounding
from vnode.runtime.node import Node, WholeEvaluator, leading_size, mask_dim

Env = dict[Key, Any]


def evaluate_whole(
    eqn: JaxprEqn,
    description: OperatorDescription | None,
    place: Node | WholeEvaluator,
    operands: Sequence[Any],
    broadcast: Broadcast = lax.broadcast,
) -> list[Any]:
    """Evaluates an equation at its full size; `broadcast` broadcasts scalars."""
    if description is not None and (place.platform in description.replaced_on or description.layout is not None):
        results = evaluate_operator(description, eqn, operands, description.sizes, {}, place.platform)
    else:
        results = bind(eqn, operands)
    rounding = place.rounding if isinstance(place, WholeEvaluator) else None
    return results if rounding is None else rounding.round_results(eqn, description, results, broadcast)


class EvaluationMemo:
    """Evaluated equations: an equation is not evaluated twice for the same operands.

    Compilers merge such equations too, but for one device later than for many, which changes how they compile the rest.
    For the same reason, operands that an equation would broadcast are broadcast beforehand, once.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.describe, self.bodies = program, program.describe, program.bodies
        # keeps the operands, or another object could get the id of one
        self._results: dict[Any, tuple[list[Any], list[Any]]] = {}

    def evaluate(
        self,
        eqn: JaxprEqn,
        operands: list[Any],
        run: Callable[[list[Any]], list[Any]],
        variant: Any = None,
        rounding: Rounding | None = None,
        in_memory: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """The results of `run` on an equation's operands, evaluated at most once.

        Args:
          eqn: the equation.
          operands: values of its operands.
          run: evaluates it.
          variant: identifies a way of evaluation, if `run` evaluates the equation in one of several ways; hashable.
          rounding: hides from compilers how a divisor is computed; None if they may know.
          in_memory: materializes the summands of a sum, which is then added in the order of a sharded array's; None if
            compilers may choose the order.
        """
        if eqn.effects:
            return run(operands)
        description, broadcast = self.describe(eqn), set[int]()  # positions of operands that were broadcast
        if description is not None and description.has(Algebra.SPREADS):
            shape = np.broadcast_shapes(*[np.shape(value) for value in operands])
            given, operands = operands, [self.broadcast(value, shape) for value in operands]
            broadcast = {i for i in description.nonlinear if operands[i] is not given[i]}
        if description is not None and rounding is not None:
            hidden = description.divisors | broadcast
            operands = [self.hide(value, rounding) if i in hidden else value for i, value in enumerate(operands)]
        if description is not None and in_memory is not None and description.order_is_open:
            operands = [self.store(value, in_memory) for value in operands]
        settings = eqn.ctx.threefry_partitionable
        key = (eqn.primitive, variant, settings, tuple(eqn.params.items()), *map(value_key, operands))
        try:
            found = self._results.get(key)
        except TypeError:  # a parameter that cannot be hashed
            return run(operands)
        if found is None:
            found = self._results[key] = (run(list(operands)), operands)
        return found[0]

    def convert(self, value: Any, kind: Any, run: Callable[[], Any]) -> Any:
        """The result of `run`, a conversion of a value; each value is converted at most once for each `kind`."""
        key = ("converted", kind, value_key(value))
        if key not in self._results:
            self._results[key] = ([run()], [value])
        return self._results[key][0][0]

    def rounding_in(self, node: Node) -> Rounding:
        """A rounding from a zero that compilers do not know: a node's number is never negative."""
        return self.convert(node.index, "rounding", lambda: Rounding((node.index < 0).astype(jnp.uint32)))

    def hide(self, value: Any, rounding: Rounding) -> Any:
        """Hides from compilers how a value is computed; constants are left as they are.

        XLA divides by a root, or multiplies by the reciprocal of the root, depending on how many others read the root.
        It multiplies by the reciprocal if two quotients have one broadcast divisor. It finds two divisors to be equal
        (``p * p`` and ``p**2``) later for one device than for many.
        """
        if not isinstance(value, jax.core.Tracer):
            return value
        return self.convert(value, "hidden", lambda: rounding.hide_origin(value))

    def store(self, value: Any, in_memory: Callable[[Any], Any]) -> Any:
        """Materializes an array of several numbers, once."""
        several = isinstance(value, jax.Array) and value.size > 1 and jnp.issubdtype(value.dtype, np.inexact)
        return self.convert(value, "in memory", lambda: in_memory(value)) if several else value

    def broadcast(self, value: Any, shape: tuple[int, ...]) -> Any:
        """Broadcasts a value once per shape; jax would broadcast it at each use."""
        if np.shape(value) == shape or not isinstance(value, jax.Array):
            return value
        dims = range(len(shape))[len(shape) - np.ndim(value) :]
        return self.convert(value, shape, lambda: lax.broadcast_in_dim(value, shape, dims))


SCALARS = (np.ndarray, np.generic, float, int)


def value_key(value: Any) -> Any:
    """A key that identifies a value; a constant scalar is its own key."""
    if isinstance(value, SCALARS) and np.ndim(value) == 0:
        return (type(value), np.asarray(value).dtype.str, np.asarray(value).tobytes())
    return id(value)


def evaluate_once(
    action: Evaluation, read: Callable[[Atom], Any], known: EvaluationMemo, place: WholeEvaluator
) -> list[Any]:
    """Evaluates an equation on whole values.

    Args:
      action: an evaluation whose forms are all whole.
      read: gives the whole value of an atom.
      known: equations evaluated so far.
      place: evaluates whole values.

    Returns:
      All results, unused ones included.
    """
    eqn = action.step.eqn
    with context_of(eqn):
        if not action.bodies:
            return evaluate_equation(eqn, [read(atom) for atom in eqn.invars], known, place)
        return evaluate_region(action, place, lambda atom, form: read(atom))


def evaluate_equation(eqn: JaxprEqn, operands: list[Any], known: EvaluationMemo, place: WholeEvaluator) -> list[Any]:
    """Evaluates an equation, and the bodies of a loop or branch, on whole values."""
    region = None if eqn.effects else region_of(eqn)
    if region is None:
        run = functools.partial(evaluate_whole, eqn, known.describe(eqn), place, broadcast=known.broadcast)
        return known.evaluate(eqn, operands, run, rounding=place.rounding, in_memory=place.in_memory)
    bodies = [functools.partial(evaluate_program, program, place) for program in known.bodies(eqn)]
    operands = [as_array(value, atom) for value, atom in zip(operands, eqn.invars, strict=True)]
    return known.evaluate(eqn, operands, functools.partial(region.run, InProgram(eqn), bodies))


def evaluate_program(program: Program, place: WholeEvaluator, values: Sequence[Any]) -> list[Any]:
    """Evaluates a program on whole values of its inputs."""
    known, rounding = EvaluationMemo(program), place.rounding
    held = dict(zip(program.inputs, values, strict=True))
    for var, value in program.constants.items():
        held[var] = value if rounding is None else rounding.opaque_constant(value)

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else held[atom]

    for eqn in program.equations:
        with context_of(eqn):
            results = evaluate_equation(eqn, [read(atom) for atom in eqn.invars], known, place)
        held.update(zip(eqn.outvars, results, strict=True))
    return [as_array(read(atom), atom) for atom in program.outputs]


def evaluate_recipe(recipe: Recipe, env: Env, node: Node | WholeEvaluator, one_by_one: bool = False) -> list[Any]:
    """Evaluates a recipe.

    Args:
      recipe: the steps.
      env: the leaves' values, by variable and form; extended in place by the values of all results.
      node: the evaluating node, or the evaluator of whole values.
      one_by_one: whether independent subgraphs wait for one another; otherwise the compiler orders them.

    Returns:
      The requested values, in order.
    """
    flow = recipe.flow
    for var, value in flow.program.constants.items():
        env.setdefault((var, WHOLE), value)

    def read(atom: Atom, form: Form) -> Any:
        if not isinstance(atom, Literal):
            return env[(atom, form)]
        if not isinstance(form, Slice | Partial):
            return atom.val
        return converted(atom.val, atom, WHOLE, form)

    def converted(value: Any, atom: Atom, source: Form, target: Form) -> Any:
        assert isinstance(node, Node)
        dtype, zero = atom.aval.dtype, flow.state(atom).zero

        def convert() -> Any:
            piece = as_array(value, atom) if isinstance(atom, Literal) else value
            piece = cast(piece, target.dtype(dtype)) if isinstance(target, Partial) else piece
            piece = node.convert(piece, source, target, zero)
            return cast(piece, dtype) if isinstance(source, Partial) else piece

        return known.convert(value, (source, target, dtype, zero), convert)

    known = EvaluationMemo(flow.program)
    latest: Any = None
    for part in split_subgraphs(recipe) if one_by_one else [Subgraph(tuple(recipe.actions))]:
        for key in part.batched_leaves if latest is not None else ():
            env[key] = ready_value(env[key], latest)
        for action, *others in group_barrier_parts(part.actions, equation_of, is_made_by):
            if isinstance(action, Conversion):
                value = env[(action.var, action.source)]
                env[(action.var, action.target)] = converted(value, action.var, action.source, action.target)
                continue
            parts = [action, *(other for other in others if isinstance(other, Evaluation))]
            values = evaluate_parts(parts, read, known, node) if others else evaluate_action(action, read, node, known)
            wanted = [key for each in parts for key in zip(each.step.eqn.outvars, each.results, strict=True)]
            for (var, form), value in zip(wanted, values, strict=True):
                if form is not None:
                    env[(var, form)] = value
        latest = next((env[key] for key in reversed(part.requests) if can_order_after(env[key])), latest)
    return [read(atom, form) for atom, form in recipe.requests]


def can_order_after(value: Any) -> bool:
    """Whether a barrier can order other computations after a value: it has floating-point numbers."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating) and value.size > 0


def equation_of(action: Conversion | Evaluation) -> JaxprEqn | None:
    """The equation that an action evaluates, if it does."""
    return action.step.eqn if isinstance(action, Evaluation) else None


def is_made_by(action: Conversion | Evaluation, others: Sequence[Conversion | Evaluation]) -> bool:
    """Whether a converted value is a result of one of several evaluations."""
    made = {var for other in others if isinstance(other, Evaluation) for var in other.step.eqn.outvars}
    return isinstance(action, Conversion) and action.var in made


def evaluate_parts(
    parts: Sequence[Evaluation], read: Callable[[Atom, Form], Any], known: EvaluationMemo, node: Node | WholeEvaluator
) -> list[Any]:
    """Evaluates the parts of a multi-operand identity together, in any forms."""
    eqn = parts[0].step.eqn
    operands = [
        read(atom, form)
        for part in parts
        for atom, form in zip(part.step.eqn.invars, part.operands, strict=True)
        if form is not None
    ]
    with context_of(eqn):
        return evaluate_together(eqn, known.describe, operands, node.platform)


def restore_weak_types(values: Sequence[Any], atoms: Sequence[Atom]) -> list[Any]:
    """Makes values weakly typed where the program's outputs are: the caller's type promotion depends on that."""

    def as_weak_as(value: Any, aval: Any) -> Any:
        weak = getattr(aval, "weak_type", False)
        if getattr(jax.typeof(value), "weak_type", False) == weak:
            return value
        return lax.convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=weak, sharding=None)

    return [as_weak_as(value, atom.aval) for value, atom in zip(values, atoms, strict=True)]


def evaluate_action(
    action: Evaluation, read: Callable[[Atom, Form], Any], node: Node | WholeEvaluator, known: EvaluationMemo
) -> list[Any]:
    """Evaluates one equation in the forms that `action` names."""
    eqn = action.step.eqn
    with context_of(eqn):
        if action.bodies:
            return evaluate_region(action, node, read)
        operands = [
            None if form is None else read(atom, form) for atom, form in zip(eqn.invars, action.operands, strict=True)
        ]
        description, location, wide = known.describe(eqn), action.location, wide_type(action)
        if isinstance(node, WholeEvaluator) or description is None:
            return known.evaluate(eqn, operands, functools.partial(evaluate_whole, eqn, description, node))
        variant = None if location is None and wide is None else (location, wide)
        if variant is None:
            run = functools.partial(evaluate_whole, eqn, description, node)
        elif location is None:
            run = functools.partial(evaluate_wide, description, eqn, platform=node.platform, dtype=wide)
        else:
            run = functools.partial(evaluate_split, action, node=node, wide=wide)
        rounding = known.rounding_in(node) if node.hides_divisors and description.divisors else None
        return known.evaluate(eqn, operands, run, variant, rounding)


def wide_type(action: Evaluation) -> Any:
    """The dtype of a node's pieces of an equation's results, if it has more bits than theirs; else None."""
    for var, form in zip(action.step.eqn.outvars, action.results, strict=True):
        if isinstance(form, Partial) and is_narrow(var, form):
            return form.dtype(var.aval.dtype)
    return None


def evaluate_split(action: Evaluation, operands: list[Any], node: Node, wide: Any) -> list[Any]:
    """Evaluates a node's copy of an equation: masks padding out of reductions, and adds unsplit terms in node 0 only.

    Args:
      action: an evaluation with a description and a location.
      operands: their values in the forms of `action.operands`; overwritten.
      node: the node.
      wide: the floating-point dtype of the results; None for that of the equation.
    """
    description, location = action.description, action.location
    assert description is not None and location is not None
    sizes = node.sizes(description.sizes, location)
    monoid = description.reduced.get(location.factor)
    if monoid is not None:
        for i in description.role(Role.ONCE):
            if not contains_factor(location.factor, description.operands[i]):
                operands[i] = node.keep_in_first_node(operands[i], monoid)
        if node.has_padding(location.batch):
            operands = mask(action, operands, sizes, node)
    elif node.has_padding(location.batch):
        operands = mask_terms(action, operands, sizes, node)
    positions = {location.factor: node.factor_positions(location)}
    eqn, platform = action.step.eqn, node.platform
    if wide is not None:
        return evaluate_wide(description, eqn, operands, sizes, positions, platform, wide)
    return evaluate_operator(description, eqn, operands, sizes, positions, platform)


def mask(action: Evaluation, operands: list[Any], sizes: Sequence[int], node: Node) -> list[Any]:
    """Overwrites padding in every operand that has the reduced factor."""
    description, location = action.description, action.location
    assert description is not None and location is not None
    having = {i for i, dims in enumerate(description.operands) if contains_factor(location.factor, dims)}
    fills = {i: description.fill(location.factor, operands[i].dtype) for i in having - description.role(Role.INDEX)}
    return fill_padding(action, operands, sizes, node, fills)


def mask_terms(action: Evaluation, operands: list[Any], sizes: Sequence[int], node: Node) -> list[Any]:
    """Overwrites padding with zeros where a result that lacks the factor would add it up."""
    description, location = action.description, action.location
    assert description is not None and location is not None
    concerned = description.adds_along(location.factor)
    return fill_padding(action, operands, sizes, node, {i: np.zeros((), operands[i].dtype) for i in concerned})


def fill_padding(
    action: Evaluation, operands: list[Any], sizes: Sequence[int], node: Node, fills: Mapping[int, Any]
) -> list[Any]:
    """Overwrites padding in the operands with a fill, along the split factor."""
    description, location = action.description, action.location
    assert description is not None and location is not None
    real = node.real_mask(location)
    results = list(operands)
    for i, fill in fills.items():
        for d, dim in enumerate(description.operands[i]):
            if location.factor in dim:
                results[i] = mask_dim(results[i], real, d, leading_size(tuple(sizes), dim, location.factor), fill)
    return results


# Loops and branches


def evaluate_region(action: Evaluation, node: Node | WholeEvaluator, read: Callable[[Atom, Form], Any]) -> list[Any]:
    """Evaluates the requested results of a loop or branch, in the forms that `action` names; None for the others."""
    eqn, region = action.step.eqn, action.step.region
    assert region is not None
    operands = [
        None if form is None else read(atom, form) for atom, form in zip(eqn.invars, action.operands, strict=True)
    ]
    for i in region.carried:
        if (form := action.operands[i]) is not None:
            operands[i] = as_piece(operands[i], eqn.invars[i], form)
    bodies = [
        functools.partial(run_body, made, None if k < region.tests else action, node)
        for k, made in enumerate(action.bodies)
    ]
    if action.step.over_batch and isinstance(node, Node):
        return run_over_batch(action, region, bodies[0], operands, node)
    return region.run(InProgram(eqn), bodies, operands)


def as_piece(value: Any, atom: Atom, form: Form) -> jax.Array:
    """A value that a body takes or returns, as an array; a partial one in the dtype of a node's piece."""
    array = as_array(value, atom)
    return array.astype(form.dtype(array.dtype)) if isinstance(form, Partial) else array


def run_body(
    recipe: Recipe, action: Evaluation | None, node: Node | WholeEvaluator, values: Sequence[Any]
) -> list[Any]:
    """Evaluates a body's recipe on its inputs; the results have the forms of `action`'s results, if it is given."""
    inputs = dict(zip(recipe.flow.program.inputs, values, strict=True))
    env = {(var, form): inputs[var] for var, form in recipe.leaves if var in inputs}
    made = evaluate_recipe(recipe, env, node)
    made = [as_piece(value, *request) for value, request in zip(made, recipe.requests, strict=True)]
    if action is None:
        return made
    results: list[Any] = [None] * len(action.results)
    for i, value in zip(action.returned_results, made, strict=True):
        results[i] = value
    return results


def run_over_batch(action: Evaluation, region: Region, body: Run, operands: list[Any], node: Node) -> list[Any]:
    """Runs a loop over a node's own examples; padding leaves the carry unchanged."""
    form = next(action.step.operands[i] for i in region.scanned if isinstance(action.step.operands[i], Slice))
    assert isinstance(form, Slice)
    real = node.real_mask(Location(form.batch, 0, form.outer, form.ratio)) if node.has_padding(form.batch) else None

    def run_if_real(is_real: jax.Array, values: list[Any]) -> list[Any]:
        """Runs the body, which calls host code, for real examples only."""
        shapes = jax.eval_shape(body, values)
        return lax.cond(is_real, body, lambda _: jax.tree.map(lambda s: lax.empty(s.shape, s.dtype), shapes), values)

    def masked(values: list[Any]) -> list[Any]:
        *values, is_real = values
        out = run_if_real(is_real, values) if is_real is not None and action.step.eqn.effects else body(values)
        if is_real is not None:
            for k, i in enumerate(region.carried):
                out[k] = None if out[k] is None else jnp.where(is_real, out[k], values[i])
        return out

    own = dataclasses.replace(region, length=node.local_size(form.batch, form.ratio), operands=region.operands + 1)
    return own.run(InProgram(action.step.eqn), [masked], [*operands, real])
