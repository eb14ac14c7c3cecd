"""An equation -> its kind for a compiler that fuses; and the fused operations of a program, as data.

    x.T -> TRANSPOSED      tanh(x) -> ELEMENTWISE      x.sum(0) -> REDUCED      x @ y -> CONTRACTED

Knows descriptions and programs. Must not know platforms, nor which equations are fused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Primitive, Var

from vnode.analysis.program import Program
from vnode.operators import Algebra, OperatorDescription, Role
from vnode.operators.control_flow import region_of
from vnode.operators.memory_spaces import crosses_memories
from vnode.operators.splits import Free, LookedUp, Reduced, Shifted
from vnode.partition.cost.collective_cost import KINDS
from vnode.partition.cost.timed_pieces import TimedOp

LOOP_BUFFERS = Primitive("beside")
"""Arrays that a loop holds besides one of its results, from its first iteration on: one of its size, and `count`."""

LOOP_BUFFERS.multiple_results = True


@LOOP_BUFFERS.def_abstract_eval
def _(value: Any, *, count: int) -> list[Any]:
    return [value, value.update(shape=(count, *value.shape))] if count else [value]


EXPENSIVE_PER_ELEMENT = 15
"""Operations per element from which an equation is not fused into its readers: random bits, above all."""


class OpKind(enum.Enum):
    """The kind of an equation, for a compiler that fuses."""

    BITCAST = "same"
    """Elements keep their order: the result has the operand's buffer."""
    TRANSPOSED = "moved"
    """A transposition."""
    ELEMENTWISE = "each"
    """Element-wise; also broadcasts, slices and look-ups."""
    REDUCED = "reduced"
    CONTRACTED = "contracted"
    UPDATED = "updated"
    """The first operand with some elements replaced, in place where possible."""
    COLLECTIVE = "collective"
    REGION = "region"
    HOST_TRANSFER = "away"
    """A copy to the host's memory or back."""
    OTHER = "other"


@dataclasses.dataclass(frozen=True, eq=False)
class FusedOp:
    """A fused operation: equations that run together.

    Attributes:
      timed_op: the equations; the variables that it reads and writes are in memory.
      kind: the kind of `root`.
      root: the equation whose result it writes.
      bodies: of a loop or branch, the fused operations of its bodies, tests first.
    """

    timed_op: TimedOp
    kind: OpKind
    root: JaxprEqn
    bodies: tuple[FusedProgram, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class FusedProgram:
    """A program as fused operations.

    Attributes:
      program: the program.
      fused_ops: in an order in which they can run.
      names: variables that share the buffer of another variable, with that variable.
    """

    program: Program
    fused_ops: tuple[FusedOp, ...]
    names: Mapping[Var, Var]

    def buffer_of(self, var: Var) -> Var:
        """The variable whose buffer a variable has."""
        while var in self.names:
            var = self.names[var]
        return var

    @functools.cached_property
    def writers(self) -> dict[Var, int]:
        """The number of the fused op that writes each variable in memory."""
        return {self.buffer_of(var): k for k, op in enumerate(self.fused_ops) for var in op.timed_op.writes}

    @functools.cached_property
    def reads(self) -> tuple[tuple[Var, ...], ...]:
        """The variables in memory that each fused op reads, each once."""
        return tuple(tuple(dict.fromkeys(map(self.buffer_of, op.timed_op.reads))) for op in self.fused_ops)


def op_kind_of(eqn: JaxprEqn, description: OperatorDescription | None) -> OpKind:
    """The kind of an equation.

    >>> import jax, jax.numpy as jnp
    >>> from vnode.operators import describe
    >>> x = jnp.ones((4, 8))
    >>> functions = [lambda x: x.reshape(32), lambda x: x.T, jnp.tanh, lambda x: x.sum(0), lambda x: x @ x.T]
    >>> equations = [jax.make_jaxpr(f)(x).jaxpr.eqns[-1] for f in functions]
    >>> [op_kind_of(eqn, describe(eqn)).value for eqn in equations]
    ['same', 'moved', 'each', 'reduced', 'contracted']
    """
    if eqn.primitive.name in KINDS:
        return OpKind.COLLECTIVE
    if region_of(eqn) is not None:
        return OpKind.REGION
    if crosses_memories(eqn):
        return OpKind.HOST_TRANSFER
    if description is None or len(eqn.outvars) != 1:
        return OpKind.OTHER
    if description.has(Algebra.CONTRACTS):
        return OpKind.CONTRACTED
    splits = [factor.split for factor in description.factors]
    read = [atom for atom in eqn.invars if isinstance(atom, Var)]
    out = eqn.outvars[0].aval
    if any(isinstance(split, LookedUp) for split in splits):
        if read and read[0].aval.shape == out.shape and len(eqn.invars) > 1 and (read[0] is eqn.invars[0]):
            values = [i for i in range(1, len(eqn.invars)) if description.roles.get(i) is not Role.INDEX]
            return OpKind.UPDATED if values else OpKind.ELEMENTWISE
        return OpKind.ELEMENTWISE if description.has(Algebra.MOVES) else OpKind.OTHER
    if any(isinstance(split, Reduced) for split in splits):
        plain = all(isinstance(split, Free | Reduced) for split in splits)
        return OpKind.REDUCED if plain else OpKind.OTHER
    if not all(isinstance(split, Free | Shifted) for split in splits):
        return OpKind.OTHER
    work = description.work
    if work is not None and work.operations >= EXPENSIVE_PER_ELEMENT:
        return OpKind.OTHER
    moves = description.has(Algebra.MOVES) and len(eqn.invars) == 1 and len(read) == 1
    if moves and math.prod(read[0].aval.shape) == math.prod(out.shape) and read[0].aval.dtype == out.dtype:
        if not all(isinstance(split, Free) for split in splits):
            return OpKind.ELEMENTWISE
        before, after = (
            [f for dim in dims for f in dim if description.sizes[f] > 1]
            for dims in (description.operands[0], description.results[0])
        )
        return OpKind.BITCAST if before == after else OpKind.TRANSPOSED
    return OpKind.ELEMENTWISE
