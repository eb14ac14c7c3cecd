"""The kernel of a Pallas call -> whether the rows of its blocks are independent of each other.

Knows kernels, and the descriptions of the equations in them. Must not know grids, nor index maps.

A kernel sees a block of several rows at a time. Rows may be divided into blocks otherwise if they are independent: if
each row of the results depends on the same row of the operands, and on values that all rows share::

    o[...] = x[...] * jax.lax.rsqrt(jnp.mean(x[...] ** 2, -1, keepdims=True))     # rows are independent
    o[...] = x[...] - jnp.mean(x[...], 0)                                         # they are not
    o[...] = x[...] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)             # nor here
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from vnode.operators.description import OperatorDescription
from vnode.operators.pallas_kernel import PROGRAM_ID, bodies_of, has_program_id, is_all
from vnode.operators.registry import describe
from vnode.operators.splits import FREE

UNIFORM, SHARED = -2, -1
"""Kinds of values without rows: the same everywhere, or any values that all rows share. Any other number is the
dimension that numbers a value's rows."""


class Dependent(Exception):
    """Rows are not known to be independent."""


def rows_are_independent(kernel: Jaxpr, rows: Mapping[int, int], scratch: Sequence[int], axis: int) -> bool:
    """Whether the rows of blocks are independent of each other.

    Args:
      kernel: the kernel.
      rows: for each input whose blocks have rows, their dimension.
      scratch: inputs without initial values.
      axis: the axis of the grid that numbers these blocks, as the kernel counts axes.
    """
    held = {k: rows.get(k, UNIFORM if k in scratch else SHARED) for k in range(len(kernel.invars))}
    walk = RowWalk(held, frozenset(rows), axis)
    try:
        while True:
            before = dict(held)
            walk.body(kernel, [("ref", k) for k in range(len(kernel.invars))])
            if held == before:
                return True
    except Dependent:
        return False


T = TypeVar("T", int, "int | tuple[str, int]")

Value = int | tuple[str, int]
"""A variable's rows, or the number of a reference."""


class RowWalk:
    """Follows rows through a kernel.

    Args:
      held: for each reference its contents; those of scratch are inferred.
      rows: references whose blocks have rows.
      axis: the axis that numbers the blocks.
    """

    def __init__(self, held: dict[int, int], rows: frozenset[int], axis: int) -> None:
        self._held, self._rows, self._axis = held, rows, axis

    def body(self, jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """The kinds of a program's results, given those of its inputs.

        Raises:
          Dependent: rows depend on each other, or may do so.
        """
        env: dict[Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update(dict.fromkeys(jaxpr.constvars, SHARED))

        def read(atom: Any) -> Value:
            return (UNIFORM if atom.aval.shape == () else SHARED) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """The kinds of an equation's results; raises as `body`."""
        name = eqn.primitive.name
        if name == PROGRAM_ID:
            if eqn.params["axis"] == self._axis:
                raise Dependent
            return [UNIFORM]
        region, bodies = bodies_of(eqn)
        if bodies:
            return self.follow_region(eqn, region, bodies, operands)
        if name == "get":
            return [self.read_rows(operands[0], *self.named_dims(eqn, operands[1:], eqn.invars[1:]))]
        if name in ("swap", "addupdate"):
            dims, cut = self.named_dims(eqn, operands[2:], eqn.invars[2:])
            self.put(operands[0], dims, cut, operands[1])
            return [self.read_rows(operands[0], dims, cut)] * len(eqn.outvars)
        if any(isinstance(value, tuple) for value in operands) or self._axis in has_program_id(eqn):
            raise Dependent
        values = [value for value in operands if isinstance(value, int)]
        description = describe(eqn)
        if eqn.effects or (description is None and any(value >= 0 for value in values)):
            raise Dependent
        if not any(value >= 0 for value in values):
            positional = description is None or any(factor.positional for factor in description.factors)
            uniform = not positional and all(value == UNIFORM for value in values)
            return [UNIFORM if uniform or var.aval.shape == () else SHARED for var in eqn.outvars]
        assert description is not None
        return [*row_dims(description, values)]

    @staticmethod
    def named_dims(eqn: JaxprEqn, indices: Sequence[Value], atoms: Sequence[Any]) -> tuple[list[int], frozenset[int]]:
        """The reference's dimensions that an accessed value has, and those that it has a part of."""
        if any(not isinstance(i, int) or i >= 0 for i in indices):
            raise Dependent
        shape = eqn.invars[0].aval.shape
        transforms = jax.tree.unflatten(eqn.params["tree"], atoms)
        if not transforms:
            return list(range(len(shape))), frozenset()
        if len(transforms) > 1 or not hasattr(transforms[0], "indices"):
            raise Dependent
        index = transforms[0].indices
        dims = [d for d, i in enumerate(index) if hasattr(i, "start")]
        single = [i for i in index if not hasattr(i, "start")]
        if any(getattr(getattr(i, "aval", i), "shape", ()) != () for i in single):
            raise Dependent  # several elements by index
        return dims, frozenset(d for d, i in enumerate(index) if not is_all(i, shape[d]))

    def read_rows(self, reference: Value, dims: list[int], cut: frozenset[int]) -> int:
        """The rows of a value that is read."""
        assert isinstance(reference, tuple)
        rows = self._held[reference[1]]
        if rows < 0:
            return rows
        if rows not in dims or rows in cut:
            raise Dependent
        return dims.index(rows)

    def put(self, reference: Value, dims: list[int], cut: frozenset[int], value: Value) -> None:
        """Writes a value."""
        assert isinstance(reference, tuple)
        number = reference[1]
        if not isinstance(value, int):
            raise Dependent
        if number in self._rows:
            if value != UNIFORM and value != self.read_rows(reference, dims, cut):
                raise Dependent
            self.read_rows(reference, dims, cut)
            return
        if value >= 0 and dims[value] in cut:
            raise Dependent
        held = dims[value] if value >= 0 else SHARED if cut and self._held[number] < 0 else value
        self._held[number] = merge_values(self._held[number], held)
        self.read_rows(reference, dims, cut)

    def follow_region(self, eqn: JaxprEqn, region: Any, bodies: Sequence[Any], operands: list[Value]) -> list[Value]:
        """Follows a call, loop or branch."""
        if region is None:
            ((body, given),) = bodies
            return self.body(body.jaxpr, [operands[k] for k in given])
        tests = region.tests + (region.chooser is not None)
        if region.chooser is not None and operands[region.chooser] not in (UNIFORM, SHARED):
            raise Dependent
        inputs = list(operands)
        for k in region.scanned:
            value = inputs[k]
            if not isinstance(value, int) or value == 0:
                raise Dependent
            inputs[k] = value - 1 if value > 0 else value
        results: list[Value] = [UNIFORM] * len(eqn.outvars)
        while True:
            for k, (body, given) in enumerate(bodies):
                made = self.body(body.jaxpr, [inputs[i] for i in given])
                if tests and k < region.tests:
                    if made[0] not in (UNIFORM, SHARED):
                        raise Dependent
                    continue
                carried = len(region.carried)
                stacked = [
                    value + 1 if region.stacks and j >= carried and isinstance(value, int) and value >= 0 else value
                    for j, value in enumerate(made)
                ]
                results = [merge_values(a, b) for a, b in zip(results, stacked, strict=True)]
            before = list(inputs)
            for i, k in enumerate(region.carried):
                inputs[k] = merge_values(inputs[k], results[i])
                results[i] = inputs[k]
            if inputs == before:
                return results


def row_dims(description: OperatorDescription, values: Sequence[int]) -> list[int]:
    """The dimension of rows of each result, given that of each operand."""
    found: set[int] = set()
    for dims, rows in zip(description.operands, values, strict=True):
        if rows >= 0:
            if len(dims[rows]) != 1:
                raise Dependent
            found.update(dims[rows])
    if len(found) != 1:
        raise Dependent
    (factor,) = found
    if description.factors[factor].split is not FREE or description.factors[factor].positional:
        raise Dependent
    for dims, rows in zip(description.operands, values, strict=True):
        places = [d for d, dim in enumerate(dims) if factor in dim]
        if rows != UNIFORM and places != ([rows] if rows >= 0 else []):
            raise Dependent
    made = []
    for dims in description.results:
        places = [d for d, dim in enumerate(dims) if factor in dim]
        if len(places) != 1 or dims[places[0]] != (factor,):
            raise Dependent
        made += places
    return made


def merge_values(a: T, b: T) -> T:
    """The kind of a value that is either of two."""
    if a == b or b == UNIFORM:
        return a
    if a == UNIFORM:
        return b
    raise Dependent
