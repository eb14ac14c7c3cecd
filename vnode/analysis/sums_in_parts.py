"""A sum over nodes -> parts along one of its dimensions, by copies of its equations, joined into one array at the end.

Knows batch flow's steps and descriptions. Must not know passes or devices, nor which sums are divided.

Before and after, where ``x^T g`` is the gradient of a large matrix, divided along the second dimension::

    dw = x^T g

    dw_0 = x^T g[:, :n];  dw_1 = x^T g[:, n:]
    dw = pad(dw_0);  dw = dynamic_update_slice(dw, dw_1)

The joins write each part into one array in place. A concatenation would hold all parts beside the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.forms import WHOLE, Form, Partial, Slice, locate
from vnode.analysis.meshless import NO_MESH
from vnode.analysis.program import Atom
from vnode.analysis.recipe import Evaluation
from vnode.analysis.states import ZERO, Flow, State, Step
from vnode.operators import OperatorDescription
from vnode.operators.splits import FREE

TILE = 128
"""Parts of so many indices or more have a multiple of it: the size of registers and tiles."""

Makers = Mapping[Var, Evaluation]
"""The per-node evaluation that makes each partial value."""


class CannotDivide(Exception):
    """An equation that a sum is computed with cannot be copied for a part of the sum."""


@dataclasses.dataclass(frozen=True)
class DividedSum:
    """A sum in parts.

    Attributes:
      var: the sum.
      parts: its parts, in order.
      makers: the steps that make the parts, in order.
      joins: the steps that put the parts into one array, one for each part; the last one's result is `var`.
      states: of all values that these steps make.
      replaced: the steps that made the sum at once, the last one first.
    """

    var: Var
    parts: tuple[Var, ...]
    makers: tuple[Step, ...]
    joins: tuple[Step, ...]
    states: Mapping[Var, State]
    replaced: tuple[Step, ...]


def divide_sum(flow: Flow, makers: Makers, var: Var, count: int) -> DividedSum | None:
    """Divides a sum into about `count` parts, along the dimension that gives the most equal ones; None if it cannot be.

    Args:
      flow: batch flow of the program.
      makers: of the sum, and of the sums that it is made of.
      var: the sum.
      count: of parts, at most.
    """
    if len(makers[var].step.eqn.outvars) > 1:
        return None
    shape = var.aval.shape
    for dim in sorted(range(len(shape)), key=lambda d: largest_share(shape[d], count)):
        bounds = bounds_of(shape[dim], count)
        if len(bounds) < 2:
            break
        copies = StepCopies(flow, makers)
        try:
            parts = [copies.part(var, flow.states[var].form, dim, *each) for each in bounds]
        except CannotDivide:
            continue
        joins = join_steps(flow, makers[var].step.eqn, parts, dim, [start for start, _ in bounds])
        states = copies.states | {v: flow.states[var] for step in joins for v in step.eqn.outvars}
        replaced = dict.fromkeys(reversed([action.step for action in copies.copied]))
        return DividedSum(var, tuple(parts), tuple(copies.steps), joins, states, tuple(replaced))
    return None


def bounds_of(size: int, count: int) -> list[tuple[int, int]]:
    """The bounds of a dimension's parts, of equal size except for the last.

    >>> bounds_of(10, 4), bounds_of(1000, 3)
    ([(0, 3), (3, 6), (6, 9), (9, 10)], [(0, 384), (384, 768), (768, 1000)])
    """
    part = -(-size // count)
    part = -(-part // TILE) * TILE if part >= TILE else part
    return [(start, min(start + part, size)) for start in range(0, size, part)]


def largest_share(size: int, count: int) -> Fraction:
    """The largest part's share of a dimension."""
    return max(Fraction(stop - start, size) for start, stop in bounds_of(size, count))


class StepCopies:
    """Copies of the steps that make a sum, on parts of a dimension.

    Attributes:
      steps: the copies, and the slices that they read, in order.
      states: of the results of these steps.
      copied: the evaluations that were copied, in order.
    """

    def __init__(self, flow: Flow, makers: Makers) -> None:
        self.flow = flow
        self.makers = makers
        self.steps: list[Step] = []
        self.states: dict[Var, State] = {}
        self.copied: list[Evaluation] = []
        self._made: dict[tuple[Any, ...], Var] = {}

    def part(self, atom: Atom, form: Form, dim: int, start: int, stop: int) -> Var:
        """The variable that holds indices ``[start, stop)`` of a dimension of a value that nodes have in a form.

        Raises:
          CannotDivide: there is no such copy.
        """
        if not isinstance(atom, Var):
            raise CannotDivide
        key = (atom, form, dim, start, stop)
        if key not in self._made:
            if isinstance(form, Partial):
                self._made[key] = self.copy(self.makers[atom], atom, dim, start, stop)
            elif isinstance(form, Slice) and dim != form.dim:
                self._made[key] = self.slice_of(atom, form, dim, start, stop)
            elif self.flow.states[atom].zero:
                self._made[key] = self.zeros(atom, dim, stop - start)
            else:
                raise CannotDivide
        return self._made[key]

    def copy(self, action: Evaluation, var: Var, dim: int, start: int, stop: int) -> Var:
        """A copy of the equation that makes a sum."""
        step, description = action.step, action.description
        if description is None or len(step.eqn.outvars) > 1:
            raise CannotDivide
        factor = factor_of(description, dim)
        operands = []
        for atom, form, dims in zip(step.eqn.invars, action.operands, description.operands, strict=True):
            having = [d for d, each in enumerate(dims) if factor in each]
            if not having:
                operands.append(atom)
            elif len(having) > 1 or dims[having[0]] != (factor,) or form is None:
                raise CannotDivide
            else:
                operands.append(self.part(atom, form, having[0], start, stop))
        self.copied.append(action)
        sizes = tuple(stop - start if f == factor else n for f, n in enumerate(description.sizes))
        params = step.eqn.params if description.resize is None else description.resize(description, step.eqn, sizes)
        result = Var(var.aval.update(shape=description.result_shape(0, sizes)))
        made = step.eqn.replace(invars=operands, outvars=[result], params=params)
        copied = self.flow.program.describe(made)
        if copied is None or copied.sizes != sizes:
            raise CannotDivide
        return self.add(dataclasses.replace(step, eqn=made, description=copied), self.flow.states[var])

    def slice_of(self, var: Var, form: Slice, dim: int, start: int, stop: int) -> Var:
        """A slice of a batched value."""
        source = self.flow.steps[self.flow.position[var]].eqn if var in self.flow.position else None
        eqn = single_equation(lambda x: lax.slice_in_dim(x, start, stop, axis=dim), [var], source)
        state = self.flow.states[var]
        return self.add(make_step(self.flow, eqn, True, state.level, (form,), form), state)

    def zeros(self, var: Var, dim: int, size: int) -> Var:
        """Zeros in the shape of a part."""
        shape = tuple(size if d == dim else n for d, n in enumerate(var.aval.shape))
        eqn = single_equation(lambda: lax.full(shape, 0, var.aval.dtype), [], None)
        return self.add(make_step(self.flow, eqn, False, 0, (WHOLE,) * len(eqn.invars), WHOLE), ZERO)

    def add(self, step: Step, state: State) -> Var:
        self.steps.append(step)
        (var,) = step.eqn.outvars
        self.states[var] = state
        return var


def factor_of(description: OperatorDescription, dim: int) -> int:
    """The factor of a dimension of an equation's single result, if copies may have a range of its indices.

    Raises:
      CannotDivide: there is no such factor.
    """
    factors = description.results[0][dim]
    if len(factors) != 1:
        raise CannotDivide
    factor = description.factors[factors[0]]
    fixed_size = description.emit is not None and description.resize is None
    if factor.split is not FREE or factor.positional or fixed_size or description.layout is not None:
        raise CannotDivide
    return factors[0]


def join_steps(flow: Flow, source: JaxprEqn, parts: Sequence[Var], dim: int, starts: Sequence[int]) -> tuple[Step, ...]:
    """The steps that put parts of a value into one array."""
    (var,) = source.outvars
    rank, rest = len(var.aval.shape), var.aval.shape[dim] - parts[0].aval.shape[dim]

    def pad_first(part: Any) -> Any:
        ends = [(0, rest if d == dim else 0, 0) for d in range(rank)]
        return lax.pad(part, jnp.zeros((), part.dtype), ends)

    equations = [single_equation(pad_first, [parts[0]], source)]
    for part, start in zip(parts[1:], starts[1:], strict=True):
        at = [start if d == dim else 0 for d in range(rank)]
        held = equations[-1].outvars[0]
        equations.append(single_equation(lambda x, y, at=at: lax.dynamic_update_slice(x, y, at), [held, part], source))
    equations[-1] = equations[-1].replace(outvars=[var])
    level = flow.states[var].level + 1
    return tuple(make_step(flow, eqn, False, level, (WHOLE,) * len(eqn.invars), WHOLE) for eqn in equations)


def single_equation(fun: Callable[..., Any], operands: Sequence[Var], source: JaxprEqn | None) -> JaxprEqn:
    """Traces a function of one equation; the equation gets the source line of `source`."""
    with jax.sharding.use_abstract_mesh(NO_MESH):
        shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in operands]
        jaxpr = jax.make_jaxpr(fun)(*shapes).jaxpr
    (eqn,) = jaxpr.eqns
    given = dict(zip(jaxpr.invars, operands, strict=True))
    eqn = eqn.replace(
        invars=[atom if isinstance(atom, Literal) else given[atom] for atom in eqn.invars],
        outvars=[Var(eqn.outvars[0].aval)],
    )
    return eqn if source is None else eqn.replace(source_info=source.source_info)


def make_step(flow: Flow, eqn: JaxprEqn, per_node: bool, level: int, operands: tuple[Form, ...], result: Form) -> Step:
    """The step of a new equation, per node or once.

    Args:
      flow: batch flow of the program.
      eqn: the equation.
      per_node: whether nodes evaluate it.
      level: of the step.
      operands: forms of the operands.
      result: form of the result.

    Raises:
      CannotDivide: the batch is not in one factor.
    """
    description = flow.program.describe(eqn)
    location = None
    if isinstance(result, Slice):
        assert description is not None
        location = locate(result, description.operands[0], description.sizes)
        if location is None:
            raise CannotDivide
    return Step(eqn, per_node, level, operands, (result,), description, location)


def replace_divided_sums(flow: Flow, several: Sequence[DividedSum]) -> Flow:
    """Batch flow of the program with some sums in parts, without the replaced steps that no output needs."""
    by_var = {each.var: each for each in several}
    replaced = {step for each in several for step in each.replaced}
    steps: list[Step] = []
    for step in flow.steps:
        divided = by_var.get(step.eqn.outvars[0]) if step in replaced else None
        steps += [step] if divided is None else [*divided.makers, *divided.joins]
    read = {atom for atom in flow.program.outputs if isinstance(atom, Var)}
    kept: list[Step] = []
    for step in reversed(steps):
        if step not in replaced or not read.isdisjoint(step.eqn.outvars):
            kept.append(step)
            read.update(atom for atom in step.eqn.invars if isinstance(atom, Var))
    kept.reverse()
    states = {**flow.states, **{var: state for each in several for var, state in each.states.items()}}
    program = flow.program.with_equations([step.eqn for step in kept])
    return dataclasses.replace(flow, program=program, states=states, steps=kept)
