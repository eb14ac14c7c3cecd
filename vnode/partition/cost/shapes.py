"""What equations look like to a compiler that fuses, and what the kernels are that it makes of them.

Knows descriptions and programs. Must not know platforms, nor which equations become one kernel.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive, Var

from vnode.analysis.program import Program
from vnode.operators import Algebra, OperatorDescription, Role, describe
from vnode.operators.control import region_of
from vnode.operators.cost import nbytes
from vnode.operators.spaces import crosses
from vnode.operators.splits import Free, LookedUp, Reduced, Shifted, Windowed
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.pieces import Piece
from vnode.partition.cost.tiles import in_tiles

BESIDE = Primitive("beside")
"""What a loop holds besides one of its results, from its first turn on: an array as large as that, and so many more."""

BESIDE.multiple_results = True


@BESIDE.def_abstract_eval
def _(value: Any, *, count: int) -> list[Any]:
    return [value, value.update(shape=(count, *value.shape))] if count else [value]


DEAR = 15
"""Operations per element from which an equation is not taken into what reads it: random bits, above all."""


class Shape(enum.Enum):
    """What an equation looks like to a compiler that fuses."""

    SAME = "same"
    """Elements stay in their order: the result is another name for the operand."""
    MOVED = "moved"
    """Elements change places, each once: a transposition."""
    EACH = "each"
    """Element by element, or elements that are repeated, cut out, looked up."""
    REDUCED = "reduced"
    CONTRACTED = "contracted"
    UPDATED = "updated"
    """The first operand with some elements replaced, in place where it can be."""
    COLLECTIVE = "collective"
    REGION = "region"
    AWAY = "away"
    """To the host's memory, or from there."""
    OTHER = "other"


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """Equations that run together.

    Attributes:
      piece: what they do; the variables that it reads and writes are in memory.
      shape: of the equation whose result it writes.
      root: that equation.
    """

    piece: Piece
    shape: Shape
    root: JaxprEqn


@dataclasses.dataclass(frozen=True, eq=False)
class Kernels:
    """A program as kernels.

    Attributes:
      program: whose.
      kernels: in the program's order.
      names: variables that are other names for something in memory, with that.
      narrow: variables that are in memory in half of their bytes.
      aligned: bytes of which everything in memory takes a multiple.
      tiles: whether arrays take whole tiles.
    """

    program: Program
    kernels: tuple[Kernel, ...]
    names: Mapping[Var, Var]
    narrow: frozenset[Var] = frozenset()
    aligned: int = 1
    tiles: bool = False

    @functools.cached_property
    def _needs(self) -> dict[Var, int]:
        """What `nbytes` said; it is asked of the same variables again and again."""
        return {}

    def nbytes(self, var: Var) -> int:
        """Bytes of a variable in memory."""
        if var not in self._needs:
            need = room_for(var.aval, self.tiles) // (2 if var in self.narrow else 1)
            self._needs[var] = -(-need // self.aligned) * self.aligned
        return self._needs[var]

    @functools.cached_property
    def writers(self) -> dict[Var, Kernel]:
        """The kernel that writes an array in memory; arguments have none."""
        return {self.memory_of(var): kernel for kernel in self.kernels for var in kernel.piece.writes}

    @functools.cached_property
    def reading(self) -> Counter[Var]:
        """How many kernels read an array in memory."""
        return Counter(var for kernel in self.kernels for var in {*map(self.memory_of, kernel.piece.reads)})

    def memory_of(self, var: Var) -> Var:
        """The variable whose memory a variable has."""
        while var in self.names:
            var = self.names[var]
        return var


def room_for(aval: Any, tiles: bool) -> int:
    """Bytes that an array takes on the device, in whole tiles or as they are."""
    need = nbytes(aval)
    return need // aval.size * in_tiles(aval.shape) if tiles and need else need


@functools.lru_cache(maxsize=16)  # whoever makes kernels asks for it several times
def shapes_of(program: Program) -> Mapping[int, Shape]:
    """What each equation of a program looks like, by its number as an object."""
    return {id(eqn): shape_of(eqn, program.describe(eqn)) for eqn in program.equations}


def shape_of(eqn: JaxprEqn, description: OperatorDescription | None) -> Shape:
    """What an equation looks like.

    >>> import jax, jax.numpy as jnp
    >>> from vnode.operators import describe
    >>> x = jnp.ones((4, 8))
    >>> functions = [lambda x: x.reshape(32), lambda x: x.T, jnp.tanh, lambda x: x.sum(0), lambda x: x @ x.T]
    >>> equations = [jax.make_jaxpr(f)(x).jaxpr.eqns[-1] for f in functions]
    >>> [shape_of(eqn, describe(eqn)).value for eqn in equations]
    ['same', 'moved', 'each', 'reduced', 'contracted']
    """
    if eqn.primitive.name in KINDS:
        return Shape.COLLECTIVE
    if region_of(eqn) is not None:
        return Shape.REGION
    if crosses(eqn):
        return Shape.AWAY
    if description is None or len(eqn.outvars) != 1:
        return Shape.OTHER
    if description.has(Algebra.CONTRACTS):
        return Shape.CONTRACTED
    splits = [factor.split for factor in description.factors]
    read = [atom for atom in eqn.invars if isinstance(atom, Var)]
    out = eqn.outvars[0].aval
    if any(isinstance(split, LookedUp) for split in splits):
        if read and read[0].aval.shape == out.shape and len(eqn.invars) > 1 and (read[0] is eqn.invars[0]):
            values = [i for i in range(1, len(eqn.invars)) if description.roles.get(i) is not Role.INDEX]
            return Shape.UPDATED if values else Shape.EACH
        return Shape.EACH if description.has(Algebra.MOVES) else Shape.OTHER
    if any(isinstance(split, Reduced) for split in splits):
        plain = all(isinstance(split, Free | Reduced) for split in splits)
        return Shape.REDUCED if plain else Shape.OTHER
    if not all(isinstance(split, Free | Shifted) for split in splits):
        return Shape.OTHER
    work = description.work
    if work is not None and work.operations >= DEAR:
        return Shape.OTHER
    moves = description.has(Algebra.MOVES) and len(eqn.invars) == 1 and len(read) == 1
    if moves and math.prod(read[0].aval.shape) == math.prod(out.shape) and read[0].aval.dtype == out.dtype:
        if not all(isinstance(split, Free) for split in splits):
            return Shape.EACH
        before, after = (
            [f for dim in dims for f in dim if description.sizes[f] > 1]
            for dims in (description.operands[0], description.results[0])
        )
        return Shape.SAME if before == after else Shape.MOVED
    return Shape.EACH


def chosen_in_each(eqn: JaxprEqn) -> bool:
    """Whether of an array at most one place is replaced in each row that has a value of its own: a choice by position.

    (The gradient of looking up one element in each row: the TPU compiler compares positions, and replaces nothing.)
    """
    of = describe(eqn)
    if of is None:
        return False
    whose = {f for dim in of.results[0] for f in dim}
    values = [dims for i, dims in enumerate(of.operands) if i and of.roles.get(i) is not Role.INDEX]
    several = [{f for dim in dims for f in dim if of.sizes[f] > 1} for dims in values]
    return all(factors <= whose for factors in several)


def puts_a_block(eqn: JaxprEqn) -> bool:
    """Whether an equation puts one block into an array."""
    of, (out,) = describe(eqn), eqn.outvars
    if of is None or len(eqn.invars) < 2 or of.roles.get(1) is Role.INDEX:
        return False
    if getattr(eqn.invars[1].aval, "ndim", -1) != out.aval.ndim:
        return False
    return all(getattr(atom.aval, "shape", ()) == () for atom in eqn.invars[2:])


def in_memory(kernel: Kernel, kernels: Kernels) -> Kernel:
    """A kernel that reads and writes in bfloat16 what is in memory so."""
    piece = kernel.piece
    narrow = frozenset(v for v in (*piece.reads, *piece.writes) if kernels.memory_of(v) in kernels.narrow)
    return dataclasses.replace(kernel, piece=dataclasses.replace(piece, narrow=narrow)) if narrow else kernel


def sums_last(of: OperatorDescription) -> bool:
    """Whether a contraction sums over the last dimension of its first operand, and perhaps over others."""
    *_, last = of.operands[0] or [()]
    return not of.reduced or bool(of.reduced.keys() & {*last})


def slides(eqn: JaxprEqn, program: Program) -> bool:
    """Whether an equation is a contraction over windows: a convolution."""
    of = program.describe(eqn)
    return of is not None and of.has(Algebra.CONTRACTS) and any(isinstance(f.split, Windowed) for f in of.factors)


def pools(of: OperatorDescription | None) -> bool:
    """Whether an equation reduces windows of one array."""
    ties = [] if of is None or of.has(Algebra.CONTRACTS) else [factor.split for factor in of.factors]
    return any(isinstance(tie, Windowed) and tie.monoid is not None and tie.back is None for tie in ties)


def stacked(eqn: JaxprEqn) -> Sequence[Var]:
    """What a loop stacks."""
    region = region_of(eqn)
    return eqn.outvars[len(region.carried) :] if region is not None and region.scanned else ()


def looks_up(of: OperatorDescription | None) -> bool:
    """Whether places are known at run time only: no product reads a slice from such a place, or such rows."""
    return of is not None and any(isinstance(factor.split, LookedUp) for factor in of.factors)


def only_sliced(
    eqn: JaxprEqn, shape: Shape, shapes: Mapping[int, Shape], users: Mapping[Var, Sequence[JaxprEqn]]
) -> bool:
    """Whether of an array with some elements replaced only a part is read, so that only that part need be made."""
    if shape is not Shape.UPDATED:
        return False
    size = eqn.outvars[0].aval.size
    while len(readers := users.get(eqn.outvars[0], ())) == 1:
        (eqn,) = readers
        if shapes[id(eqn)] is not Shape.SAME:
            return shapes[id(eqn)] is Shape.EACH and eqn.outvars[0].aval.size < size
    return False


def cuts(eqn: JaxprEqn) -> bool:
    """Whether an equation takes a part of its first operand: what makes that does not make a part alone."""
    of = describe(eqn) if eqn.invars else None
    return of is not None and of.has(Algebra.MOVES) and eqn.outvars[0].aval.size < eqn.invars[0].aval.size


CHEAP, DIVIDES = frozenset({"sin", "cos", "tan"}), frozenset({"div", "rem"})
"""What XLA takes for cheap although it is none of +, - and x, and for dear (``InstructionFusion::IsExpensive``)."""


def dear(program: Program, eqn: JaxprEqn) -> bool:
    """Whether it would be a loss to compute an equation once for each that reads it, as XLA sees that.

    >>> import jax
    >>> from vnode.analysis.program import inline
    >>> traced = jax.make_jaxpr(lambda x, y: jax.numpy.tanh(jax.numpy.sin(x / 3) / y))(1.0, 2.0)
    >>> program = inline(traced.jaxpr, traced.consts)
    >>> [(eqn.primitive.name, dear(program, eqn)) for eqn in program.equations]
    [('div', False), ('sin', False), ('div', True), ('tanh', True)]
    """
    description, name = program.describe(eqn), eqn.primitive.name
    if name in DIVIDES:  # by a number it is a product
        return not isinstance(eqn.invars[1], Literal) and np.issubdtype(eqn.outvars[0].aval.dtype, np.inexact)
    return description is not None and bool(description.operations.transcendental) and name not in CHEAP
