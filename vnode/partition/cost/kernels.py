"""Which equations a compiler makes one kernel of, so that what passes between them never is in memory.

Knows descriptions and programs. Must not know machines, times, or how much memory there is.

The rules are those of XLA's fusion of producers into consumers (``instruction_fusion.cc``), in terms of descriptions:

- An equation whose factors are all free (element by element), or that shifts, repeats or looks up elements, is computed
  inside of each equation that reads it, if all of these can take it in; one that is dear (an exponential, a root) only
  if a single one reads it, since it would be computed again for each.
- A reduction takes in what it reads, and is computed once: its result is in memory.
- A contraction takes in rearrangements only, and on TPUs (`Fusing.contractions`) also element-wise producers; and there
  an element-wise equation that alone reads its result, of the same size, takes it in.
- A rearrangement that leaves the order of elements as it is (a reshape) is another name for the same memory; so is a
  transposition of a contraction's result that nobody else reads, which the contraction writes in that order.
- Everything else (scatters, sorts, windows, loops, collectives) reads from memory and writes to it.

What compilers do beyond that (several results from one kernel, reductions inside of one, libraries of fused attention)
is not modelled.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Program
from vnode.operators import Algebra, OperatorDescription, Role
from vnode.operators.control import region_of
from vnode.operators.splits import Free, LookedUp, Reduced, Shifted
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.pieces import Piece, piece_of

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
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Fusing:
    """What a compiler takes together.

    Attributes:
      contractions: whether element-wise producers and consumers are taken into contractions.
    """

    contractions: bool = True

    @staticmethod
    def on(platform: str) -> Fusing:
        """That of XLA for a platform, ``"tpu"``, ``"gpu"`` or ``"cpu"``."""
        return Fusing(contractions=platform == "tpu")


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
    """

    program: Program
    kernels: tuple[Kernel, ...]
    names: Mapping[Var, Var]

    def memory_of(self, var: Var) -> Var:
        """The variable whose memory a variable has."""
        while var in self.names:
            var = self.names[var]
        return var


def shape_of(eqn: JaxprEqn, description: OperatorDescription | None) -> Shape:
    """What an equation looks like.

    >>> import jax, jax.numpy as jnp
    >>> from vnode.operators import describe
    >>> x = jnp.ones((4, 8))
    >>> for f in (lambda x: x.reshape(32), lambda x: x.T, jnp.tanh, lambda x: x.sum(0), lambda x: x @ x.T):
    ...     eqn = jax.make_jaxpr(f)(x).jaxpr.eqns[-1]
    ...     print(shape_of(eqn, describe(eqn)).value, end=" ")
    same moved each reduced contracted
    """
    if eqn.primitive.name in KINDS:
        return Shape.COLLECTIVE
    if region_of(eqn) is not None:
        return Shape.REGION
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


TAKES = {Shape.EACH: 3, Shape.SAME: 3, Shape.MOVED: 3, Shape.REDUCED: 2, Shape.CONTRACTED: 1}
"""What equations take in as roots: 0 nothing, 1 rearrangements, 2 element-wise, 3 contractions too."""


def kernels_of(program: Program, fusing: Fusing) -> Kernels:
    """Takes equations together.

    Args:
      program: of one device.
      fusing: what the compiler takes together.

    Returns:
      The kernels, in an order in which they can run.
    """
    equations, definitions = program.equations, program.definitions
    shapes = {id(eqn): shape_of(eqn, program.describe(eqn)) for eqn in equations}
    users: dict[Var, list[JaxprEqn]] = {}
    for eqn in equations:
        for atom in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)):
            users.setdefault(atom, []).append(eqn)
    ends = {atom for atom in program.outputs if isinstance(atom, Var)}
    takes: dict[int, int] = {}
    inside: set[int] = set()
    contracted: set[int] = set()  # equations into whose kernel a contraction was taken
    for eqn in reversed(equations):
        shape = shapes[id(eqn)]
        own = TAKES.get(shape, 0)
        if shape is Shape.CONTRACTED and fusing.contractions:
            own = 2
        takes[id(eqn)] = own
        if own == 0 or len(eqn.outvars) != 1 or eqn.outvars[0] in ends or not users.get(eqn.outvars[0]):
            continue
        readers = users[eqn.outvars[0]]
        least = min(takes[id(reader)] for reader in readers)
        if shape is Shape.CONTRACTED:
            (reader, *others) = readers
            alone = not others and reader.outvars[0].aval.size == eqn.outvars[0].aval.size
            if fusing.contractions and least == 3 and alone and id(reader) not in contracted:
                inside.add(id(eqn))
                contracted.add(id(reader))
        elif shape is not Shape.REDUCED:
            wanted = 1 if shape in (Shape.SAME, Shape.MOVED) else 2
            if least >= wanted and (len(readers) == 1 or not dear(program, eqn)):
                inside.add(id(eqn))
                takes[id(eqn)] = least
                if any(id(reader) in contracted for reader in readers):
                    contracted.add(id(eqn))
    names: dict[Var, Var] = {}
    for eqn in equations:
        (source, *_) = eqn.invars or [None]
        maker = definitions.get(source) if isinstance(source, Var) else None
        if id(eqn) in inside or not isinstance(source, Var) or (maker is not None and id(maker) in inside):
            continue
        if shapes[id(eqn)] is Shape.SAME:
            names[eqn.outvars[0]] = source
        elif shapes[id(eqn)] is Shape.MOVED and maker is not None and shapes[id(maker)] is Shape.CONTRACTED:
            if len(users[source]) == 1 and source not in ends:
                names[eqn.outvars[0]] = source
    found = []
    for eqn in equations:
        if id(eqn) in inside or eqn.outvars[0] in names:
            continue
        members = gathered(eqn, definitions, inside)
        piece = piece_of(members, eqn.outvars)
        found.append(Kernel(piece, shapes[id(eqn)], eqn))
    return Kernels(program, tuple(found), names)


def gathered(root: JaxprEqn, definitions: Mapping[Var, JaxprEqn], inside: set[int]) -> list[JaxprEqn]:
    """An equation with all that is computed inside of it, in order."""
    order: dict[int, JaxprEqn] = {}
    pending = [(root, False)]
    while pending:
        eqn, ready = pending.pop()
        if ready:
            order[id(eqn)] = eqn
        elif id(eqn) not in order:
            pending.append((eqn, True))
            for atom in eqn.invars:
                maker = None if isinstance(atom, Literal) else definitions.get(atom)
                if maker is not None and id(maker) in inside and id(maker) not in order:
                    pending.append((maker, False))
    return list(order.values())


def dear(program: Program, eqn: JaxprEqn) -> bool:
    """Whether it would be a loss to compute an equation once for each that reads it."""
    description = program.describe(eqn)
    return description is not None and bool(description.operations.transcendental)
