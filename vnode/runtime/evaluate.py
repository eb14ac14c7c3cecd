"""Evaluates recipes: once on whole values, or as one node.

Knows recipes, and how to bind an equation's primitive again with other shapes. Must not know passes or devices, nor any
primitive by name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal

from vnode.analysis.forms import WHOLE, Form, Location, Partial, Slice, stands_in
from vnode.analysis.program import Atom, Program
from vnode.analysis.recipe import Conversion, Evaluation, Key, Recipe
from vnode.operators import Monoid, OperatorDescription
from vnode.operators import evaluate as evaluate_operator
from vnode.operators.control import Loop, While, bind_while
from vnode.runtime.node import Node, Once, leading, mask_dim

Env = dict[Key, Any]


def context_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """The user's source line and name stack, and the settings under which the equation was traced."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    source = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    if eqn.ctx.threefry_partitionable == jax.config.jax_threefry_partitionable:
        return source
    contexts = contextlib.ExitStack()
    contexts.enter_context(source)
    contexts.enter_context(jax.threefry_partitionable(eqn.ctx.threefry_partitionable))
    return contexts


def bind(eqn: JaxprEqn, description: OperatorDescription | None, platform: str, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation as it stands."""
    if description is not None and platform in description.replaced_on:
        return evaluate_operator(description, eqn, operands, description.sizes, {}, platform)
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


class Known:
    """What has been evaluated: an equation is not evaluated again for the same operands.

    Compilers find such equations too, but those for one device later than those for many, and what they make of the
    rest differs with that. For the same reason operands that an equation would spread are spread beforehand, once.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        # With the operands, or another could get the number of one.
        self._results: dict[Any, tuple[list[Any], list[Any]]] = {}

    def evaluate(
        self, eqn: JaxprEqn, operands: list[Any], run: Callable[[list[Any]], list[Any]], how: Any = None
    ) -> list[Any]:
        """What `run` makes of the operands of an equation, or made of them before.

        Args:
          eqn: the equation.
          operands: values of its operands.
          run: evaluates it.
          how: what else the results depend on.
        """
        if eqn.effects:
            return run(operands)
        description = self.describe(eqn)
        if description is not None and description.spreads:
            shape = np.broadcast_shapes(*[np.shape(value) for value in operands])
            operands = [self._spread(value, shape) for value in operands]
        settings = eqn.ctx.threefry_partitionable
        key = (eqn.primitive, how, settings, tuple(eqn.params.items()), *map(identity, operands))
        try:
            found = self._results.get(key)
        except TypeError:  # a parameter that cannot be hashed
            return run(operands)
        if found is None:
            found = self._results[key] = (run(list(operands)), operands)
        return found[0]

    def describe(self, eqn: JaxprEqn) -> OperatorDescription | None:
        """The description of an equation of the program."""
        return self._program.describe(eqn)

    def _spread(self, value: Any, shape: tuple[int, ...]) -> Any:
        """A value at another shape; jax would spread it where it is used, each use anew."""
        if np.shape(value) == shape or not isinstance(value, jax.Array):
            return value
        key = (id(value), shape)
        if key not in self._results:
            dims = range(len(shape))[len(shape) - np.ndim(value) :]
            self._results[key] = ([lax.broadcast_in_dim(value, shape, dims)], [value])
        return self._results[key][0][0]


SCALARS = (np.ndarray, np.generic, float, int)


def identity(value: Any) -> Any:
    """What tells a value from others: itself if it is a constant scalar."""
    if isinstance(value, SCALARS) and np.ndim(value) == 0:
        return (type(value), np.asarray(value).dtype.str, np.asarray(value).tobytes())
    return id(value)


def evaluate_once(action: Evaluation, read: Callable[[Atom], Any], known: Known, place: Once) -> list[Any]:
    """Evaluates an equation on whole values.

    Args:
      action: an evaluation all of whose forms are whole.
      read: gives the whole value of an atom.
      known: what has been evaluated so far.
      place: where.

    Returns:
      The results, those that nobody wants included.
    """
    eqn = action.step.eqn
    with context_of(eqn):
        if not action.bodies:
            operands = [read(atom) for atom in eqn.invars]
            return known.evaluate(eqn, operands, functools.partial(bind, eqn, known.describe(eqn), place.platform))
        return evaluate_region(action, place, lambda atom, form: read(atom))


def evaluate_recipe(recipe: Recipe, env: Env, node: Node | Once) -> list[Any]:
    """Evaluates a recipe.

    Args:
      recipe: what to evaluate.
      env: the leaves' values; extended in place.
      node: the node that evaluates, or where a recipe of whole values is evaluated.

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
        assert isinstance(node, Node)
        return node.convert(as_array(atom.val, atom), WHOLE, form, flow.state(atom).zero)

    known = Known(flow.program)
    for action in recipe.actions:
        if isinstance(action, Conversion):
            assert isinstance(node, Node)
            value = env[(action.var, action.source)]
            zero = flow.states[action.var].zero
            env[(action.var, action.target)] = node.convert(value, action.source, action.target, zero)
            continue
        for var, form, value in zip(
            action.step.eqn.outvars, action.results, evaluate_action(action, read, node, known), strict=True
        ):
            if form is not None:
                env[(var, form)] = value
    return [read(atom, form) for atom, form in recipe.requests]


def as_array(value: Any, like: Atom) -> Any:
    """Gives a Python or NumPy scalar the dtype of `like`, as an array."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value, dtype=like.aval.dtype)


def typed(values: Sequence[Any], atoms: Sequence[Atom]) -> list[Any]:
    """Values as weakly typed as the program's own: what the caller computes of them depends on it."""

    def as_weak_as(value: Any, aval: Any) -> Any:
        weak = getattr(aval, "weak_type", False)
        if getattr(jax.typeof(value), "weak_type", False) == weak:
            return value
        return lax.convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=weak, sharding=None)

    return [as_weak_as(value, atom.aval) for value, atom in zip(values, atoms, strict=True)]


def evaluate_action(
    action: Evaluation, read: Callable[[Atom, Form], Any], node: Node | Once, known: Known
) -> list[Any]:
    """Evaluates one equation in the forms that `action` names."""
    eqn = action.step.eqn
    with context_of(eqn):
        if action.bodies:
            return evaluate_region(action, node, read)
        operands = [
            None if form is None else read(atom, form) for atom, form in zip(eqn.invars, action.operands, strict=True)
        ]
        if action.description is None or action.location is None or isinstance(node, Once):
            return known.evaluate(eqn, operands, functools.partial(bind, eqn, known.describe(eqn), node.platform))
        return known.evaluate(eqn, operands, lambda values: evaluate_split(action, values, node), action.location)


def evaluate_split(action: Evaluation, operands: list[Any], node: Node) -> list[Any]:
    """Evaluates a node's copy of an equation: masks padding out of reductions, enters once what enters once."""
    description, location = action.description, action.location
    assert description is not None and location is not None
    sizes = node.sizes(description.sizes, location)
    monoid = description.reduced.get(location.factor)
    if monoid is not None:
        for i in description.once:
            if not stands_in(location.factor, description.operands[i]):
                operands[i] = node.at_first(operands[i], monoid)
        if node.padded(location.batch):
            operands = mask(action, operands, sizes, monoid, node)
    positions = {location.factor: node.positions(location)}
    return evaluate_operator(description, action.step.eqn, operands, sizes, positions, node.platform)


def mask(action: Evaluation, operands: list[Any], sizes: Sequence[int], monoid: Monoid, node: Node) -> list[Any]:
    """Overwrites padding in every operand that has the reduced factor."""
    description, location = action.description, action.location
    assert description is not None and location is not None
    real = node.real(location)
    masked = list(operands)
    for i, dims in enumerate(description.operands):
        for d, dim in enumerate(dims):
            if location.factor in dim and i not in description.indices:
                fill = description.fill.get(location.factor, monoid.identity(operands[i].dtype))
                masked[i] = mask_dim(masked[i], real, d, leading(tuple(sizes), dim, location.factor), fill)
    return masked


# Loops and branches


def evaluate_region(action: Evaluation, node: Node | Once, read: Callable[[Atom, Form], Any]) -> list[Any]:
    eqn = action.step.eqn
    operands = [
        None if form is None else read(atom, form) for atom, form in zip(eqn.invars, action.operands, strict=True)
    ]
    match action.step.region:
        case Loop() as loop:
            return evaluate_loop(action, loop, operands, node)
        case While() as loop:
            return evaluate_while(action, loop, operands, node)
        case _:
            return evaluate_branches(action, operands, node)


def outputs(recipe: Recipe, values: dict[int, Any], node: Node | Once) -> list[Any]:
    """What a body's recipe returns, given the values of its inputs by position."""
    positions = {var: i for i, var in enumerate(recipe.flow.program.inputs)}
    env = {(var, form): values[positions[var]] for var, form in recipe.leaves if var in positions}
    results = evaluate_recipe(recipe, env, node)
    return [as_array(value, atom) for value, (atom, _) in zip(results, recipe.requests, strict=True)]


def evaluate_loop(action: Evaluation, loop: Loop, operands: list[Any], node: Node | Once) -> list[Any]:
    (body,) = action.bodies
    carried = action.carried
    first, split = loop.constants, loop.constants + loop.carries
    results: list[Any] = [None] * len(action.results)
    wanted = [i for i in range(loop.carries, len(results)) if action.results[i] is not None]
    scanned = {i: operands[i] for i in range(split, len(operands)) if operands[i] is not None}
    constants = {i: operands[i] for i in range(first) if operands[i] is not None}
    length, real = loop.length, None
    if action.step.over_batch and isinstance(node, Node):
        form = next(f for f in action.step.operands[split:] if isinstance(f, Slice))
        length = node.local(form.ratio)
        if node.padded(form.batch):
            real = node.real(Location(form.batch, 0, form.outer, form.ratio))

    def iteration(carry: list[Any], xs: tuple[dict[int, Any], Any]) -> tuple[list[Any], list[Any]]:
        values = {**constants, **{first + i: c for i, c in zip(carried, carry, strict=True)}, **xs[0]}
        out = outputs(body, values, node)
        kept = out[: len(carried)]
        if real is not None:  # padding adds nothing
            kept = [jnp.where(xs[1], new, old) for new, old in zip(kept, carry, strict=True)]
        return kept, out[len(carried) :]

    init = [as_array(operands[first + i], action.step.eqn.invars[first + i]) for i in carried]
    carry, ys = lax.scan(iteration, init, (scanned, real), length, loop.reverse, loop.unroll)
    for i, value in zip(carried, carry, strict=True):
        results[i] = value
    for i, value in zip(wanted, ys, strict=True):
        results[i] = value
    return results


def evaluate_while(action: Evaluation, loop: While, operands: list[Any], node: Node | Once) -> list[Any]:
    test, body = action.bodies
    carried = action.carried
    split = loop.condition_constants
    first = split + loop.body_constants
    outer = {i: value for i, value in enumerate(operands[:first]) if value is not None}

    def condition(constants: dict[int, Any], carry: list[Any]) -> Any:
        values = {**constants, **{split + i: c for i, c in zip(carried, carry, strict=True)}}
        return outputs(test, values, node)[0]

    def iterate(constants: dict[int, Any], carry: list[Any]) -> list[Any]:
        values = {i - split: value for i, value in constants.items()}
        values |= {loop.body_constants + i: c for i, c in zip(carried, carry, strict=True)}
        return outputs(body, values, node)

    tested = {i: value for i, value in outer.items() if i < split}
    used = {i: value for i, value in outer.items() if i >= split}
    init = [as_array(operands[first + i], action.step.eqn.invars[first + i]) for i in carried]
    final = run_while(action.step.eqn, condition, iterate, tested, used, init)
    results: list[Any] = [None] * len(action.results)
    for i, value in zip(carried, final, strict=True):
        results[i] = value
    return results


def run_while(
    eqn: JaxprEqn,
    condition: Callable[[Any, list[Any]], Any],
    body: Callable[[Any, list[Any]], list[Any]],
    condition_constants: Any,
    constants: Any,
    init: list[Any],
) -> list[Any]:
    """Runs a ``while`` whose condition and body are Python functions of (pytree of constants, carries)."""
    return bind_while(
        eqn,
        jax.make_jaxpr(condition)(condition_constants, init),
        jax.make_jaxpr(body)(constants, init),
        jax.tree.leaves(condition_constants),
        jax.tree.leaves(constants),
        init,
    )


def evaluate_branches(action: Evaluation, operands: list[Any], node: Node | Once) -> list[Any]:
    passed = {i - 1: value for i, value in enumerate(operands) if i > 0 and value is not None}

    def branch(recipe: Recipe) -> Callable[[dict[int, Any]], list[Any]]:
        return lambda values: outputs(recipe, values, node)

    out = iter(lax.switch(operands[0], [branch(recipe) for recipe in action.bodies], passed))
    return [None if form is None else next(out) for form in action.results]
