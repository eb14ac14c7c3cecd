"""Which equations a compiler makes one kernel of, so that what passes between them never is in memory.

Knows descriptions and programs. Must not know machines, times, or how much memory there is.

The rules are those of XLA's fusion of producers into consumers (``instruction_fusion.cc``), in terms of descriptions:

- An equation whose factors are all free (element by element), or that shifts, repeats or looks up elements, is computed
  inside of each equation that reads it, if all of these can take it in; one that is dear (an exponential, a root) only
  if a single one reads it, since it would be computed again for each. On TPUs (`Target.weighs`) bytes decide: what has
  several operands as large as itself is written once if all that read it would otherwise read more; anything else is
  computed in each of them. A maximum of rows is found in the kernel that goes on with it beside the rows.
- A reduction takes in what it reads, and is computed once: its result is in memory. On CPUs a library computes large
  ones (`Target.library`), together with what nobody else reads; what others read too is in memory for it.
- A contraction takes in rearrangements only, and on TPUs (`Target.contractions`) also element-wise producers; and there
  an element-wise equation that alone reads its result, of the same size, takes it in.
- A rearrangement that leaves the order of elements as it is (a reshape) is another name for the same memory; so is a
  transposition of a contraction's result that nobody else reads, which the contraction writes in that order.
- There, a product takes in no slice whose place is known at run time only; that is written first.
- There, what makes a block that is put into an array, in place, writes it there.
- There, an array with some elements replaced (a scatter) is made inside of what reads only a part of it.
- Everything else (other scatters, sorts, windows, loops, collectives) reads from memory and writes to it, and so does
  what moves a value to the host's memory, or back.

Collectives of one kind over the same axes that do not wait for each other are sent together (XLA's combiners), so that
what all of them send, and bring, is in memory at once.

What is element by element, or a reduction, becomes one kernel with others that read the same, or with the one that
writes it, if nothing else has to run between them (XLA's multi-output fusion; not on CPUs).

On TPUs a float32 array that only contractions read, in the default precision, is kept, and sent, in bfloat16.

What compilers do beyond that (reductions inside of a kernel, libraries of fused attention) is not modelled.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import heapq
import math
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive, Var

from vnode.analysis.program import Program, inline
from vnode.operators import Algebra, OperatorDescription, Role, describe
from vnode.operators.control import region_of
from vnode.operators.cost import nbytes
from vnode.operators.monoid import Monoid
from vnode.operators.spaces import crosses
from vnode.operators.splits import Free, LookedUp, Reduced, Shifted, Windowed
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.pieces import Piece, piece_of
from vnode.partition.cost.tiles import in_tiles

BESIDE = Primitive("beside")
"""What a loop holds besides one of its results, from its first turn on: an array as large as that, and so many more."""

BESIDE.multiple_results = True


@BESIDE.def_abstract_eval
def _(value: Any, *, count: int) -> list[Any]:
    return [value, value.update(shape=(count, *value.shape))] if count else [value]


DEAR = 15
"""Operations per element from which an equation is not taken into what reads it: random bits, above all."""


ON_CHIP = {"TPU v4": (16 + 128) << 20, "TPU v5e": 128 << 20, "TPU v5p": 64 << 20, "TPU v6e": 128 << 20}
"""Bytes of vector memory of a core (``jax.experimental.pallas.tpu.get_tpu_info``): the compiler moves arrays there.

A v4 chip has 128 MiB of another memory besides, to which its compiler moves them.
"""


AT_WORK = 16 << 20
"""Bytes of it that the compiler leaves to the kernel that runs (``xla_tpu_scoped_vmem_limit_kib`` is 16,384)."""


JOINED = 8
"""Arrays up to which XLA joins them on CPUs within another kernel."""


LEAST = 4096
"""Elements from which XLA leaves reductions on CPUs to a library."""


MUCH = 1.05
"""How often as many bytes several readers move on TPUs before what they read is written once."""


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


@dataclasses.dataclass(frozen=True)
class Target:
    """What XLA does when it compiles for a platform, as far as time and memory depend on it.

    Attributes:
      contractions: whether element-wise producers and consumers are taken into contractions.
      combines: kinds of collectives that are sent together where none waits for another.
      together: bytes of operands up to which they are.
      breadth: whether kernels run as soon as their operands are there, first come first served, for the sake of
        threads that run them at the same time; otherwise in an order in which little is held.
      siblings: whether element-wise kernels and reductions that read the same become one with several results.
      aligned: bytes of which everything in memory takes a multiple.
      hoists: whether what is the same at every turn of a loop is computed before it.
      hoists_growing: whether that is so also of what has larger results than operands.
      adds_after: whether sums over devices that a loop, or the program, adds up are done once, after it.
      ordered: whether convolutions read and write arrays in one order of dimensions only.
      on_chip: bytes of temporary arrays that are held on the chip, rather than in the device's memory.
      sinks: whether what is made of constants is made in loops, where these read it, rather than before them.
      weighs: whether what several read is computed in each of them, however dear, unless it has several large operands
        and these then read more bytes than are moved if it is written once; otherwise unless it is dear.
      copies_gathered: whether arguments whose place gathered results take are copied, and these results too.
      turns: whether what is exchanged in pieces of another dimension than the first is copied to that order, and back.
      turns_updates: whether an update in the order of a transposed gradient has a copy of what it updates.
      adds_in_place: whether sums over devices are written over what is summed.
      hides_gathers: whether what is gathered is gathered while devices compute, begun as early as it takes.
      tiles: whether arrays take whole tiles.
      packs: whether a comparison that is read later is kept in bits, or bytes, rather than what is compared.
      apart: whether programs have the host's memory beside the device's.
      library: whether a library computes reductions, and products that sum over the last dimension of their first
        operand: of products that could run as soon, others come later.
    """

    contractions: bool = True
    combines: frozenset[str] = frozenset({"all-reduce"})
    together: int = 1 << 62
    breadth: bool = False
    siblings: bool = True
    aligned: int = 1
    hoists: bool = False
    hoists_growing: bool = True
    adds_after: bool = False
    ordered: bool = False
    on_chip: int = 0
    sinks: bool = False
    weighs: bool = False
    copies_gathered: bool = False
    library: bool = False
    turns: bool = False
    turns_updates: bool = False
    adds_in_place: bool = False
    hides_gathers: bool = False
    tiles: bool = False
    packs: bool = False
    apart: bool = True

    @staticmethod
    def on(platform: str, kind: str = "") -> Target:
        """That of a platform, ``"tpu"``, ``"gpu"`` or ``"cpu"``, and of a kind of device by its name.

        The limit on GPUs is that of ``xla_gpu_all_reduce_combine_threshold_bytes`` and its like; on TPUs it is that of
        programs with more and more sums; the orders are those of what jaxlib 0.10 schedules.

        >>> Target.on("cpu").breadth, Target.on("tpu").contractions
        (True, True)
        """
        match platform:
            case "cpu":
                cpu = Target(contractions=False, breadth=True, siblings=False, aligned=64, hoists=True)
                return dataclasses.replace(cpu, ordered=True, library=True, apart=False)
            case "gpu":
                kinds = frozenset({"all-reduce", "all-gather", "reduce-scatter"})
                return Target(contractions=False, combines=kinds, together=30 << 20)
        on_chip = max(ON_CHIP.get(kind, 0) - AT_WORK, 0)
        tpu = Target(adds_after=True, together=120 << 20, on_chip=on_chip, sinks=True, weighs=True, turns=True)
        tpu = dataclasses.replace(tpu, hoists=True, hoists_growing=False, copies_gathered=True, tiles=True, packs=True)
        return dataclasses.replace(tpu, adds_in_place=True, hides_gathers=True, turns_updates=True)


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

    def nbytes(self, var: Var) -> int:
        """Bytes of a variable in memory."""
        need = room_for(var.aval, self.tiles) // (2 if var in self.narrow else 1)
        return -(-need // self.aligned) * self.aligned

    def memory_of(self, var: Var) -> Var:
        """The variable whose memory a variable has."""
        while var in self.names:
            var = self.names[var]
        return var


def room_for(aval: Any, tiles: bool) -> int:
    """Bytes that an array takes on the device, in whole tiles or as they are."""
    need = nbytes(aval)
    return need // aval.size * in_tiles(aval.shape) if tiles and need else need


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


TAKES = {Shape.EACH: 4, Shape.SAME: 4, Shape.MOVED: 4, Shape.REDUCED: 3, Shape.CONTRACTED: 1}
"""What equations take in as roots: 0 nothing, 1 rearrangements, 2 element-wise, 3 what is looked up, 4 contractions."""


@functools.lru_cache(maxsize=8)  # time and memory are asked for one after the other
def kernels_of(program: Program, target: Target, rounded: frozenset[Var] = frozenset()) -> Kernels:
    """Takes equations together.

    Args:
      program: of one device.
      target: what the compiler does.
      rounded: results that only contractions read, where they go.

    Returns:
      The kernels, in an order in which they can run.
    """
    equations, definitions = program.equations, program.definitions
    shapes = {id(eqn): shape_of(eqn, program.describe(eqn)) for eqn in equations}
    updates = [eqn for eqn in equations if target.weighs and shapes[id(eqn)] is Shape.UPDATED]
    chosen = {id(eqn): Shape.EACH for eqn in updates if chosen_in_each(eqn)}
    shapes.update(chosen)
    users: dict[Var, list[JaxprEqn]] = {}
    for eqn in equations:
        for atom in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)):
            users.setdefault(atom, []).append(eqn)
    ends = {atom for atom in program.outputs if isinstance(atom, Var)}
    rigid = {id(eqn) for eqn in equations if target.ordered and (slides(eqn, program) or joins_apart(eqn, program))}
    kept = worth_writing(program, shapes, users, ends) if target.weighs else frozenset[int]()
    rows = of_whole_rows(program, shapes, users, ends) if target.weighs else {}
    kept |= {*rows.values()}
    last = ends_of_contractions(program, shapes, users, ends) if target.contractions else frozenset[int]()
    masks = packed_masks(program, shapes, users, ends) if target.packs else frozenset[int]()
    takes: dict[int, int] = {}
    inside: set[int] = set()
    contracted: set[int] = set()  # equations into whose kernel a contraction was taken
    sums: dict[int, int] = {}  # equations that a library computes within a reduction, and that
    written: set[int] = set()  # those in memory for a library, however often they are computed elsewhere
    sinks: dict[int, frozenset[int]] = {}  # for each equation that is inside of others, whose kernels
    repeated: set[int] = set()  # equations that are computed in several kernels
    for eqn in reversed(equations):
        shape = shapes[id(eqn)]
        if target.library and shape is Shape.REDUCED and by_library(eqn, program):
            sums[id(eqn)] = id(eqn)
        own = 0 if id(eqn) in rigid else TAKES.get(shape, 0)
        if target.contractions and (shape is Shape.CONTRACTED or only_sliced(eqn, shape, shapes, users)):
            own = 2
        takes[id(eqn)] = own
        if own == 0 or len(eqn.outvars) != 1 or eqn.outvars[0] in ends or not users.get(eqn.outvars[0]):
            continue
        if id(eqn) in masks:
            continue
        readers = users[eqn.outvars[0]]
        if id(eqn) in rows:
            inside.add(id(eqn))
            sinks[id(eqn)] = frozenset({rows[id(eqn)]})
            continue
        into = {sums.get(id(reader), 0) for reader in readers}
        if into != {0} and shape in (Shape.EACH, Shape.SAME, Shape.MOVED, Shape.CONTRACTED):
            if len(into) == 1 and by_library(eqn, program):
                sums[id(eqn)] = into.pop()
                sinks[id(eqn)] = frozenset({sums[id(eqn)]})
                inside.add(id(eqn))
                takes[id(eqn)] = 2
                continue
            written.add(id(eqn))
            readers = [reader for reader in readers if id(reader) not in sums]
            if not readers or shape is Shape.CONTRACTED or reads_more(eqn):
                continue
        within = frozenset[int]().union(*(sinks.get(id(reader), {id(reader)}) for reader in readers))
        if target.ordered and len(within) > 1 and extends(eqn, program):
            continue
        least = min(takes[id(reader)] for reader in readers)
        if shape is Shape.CONTRACTED:
            same = all(reader.outvars[0].aval.size == eqn.outvars[0].aval.size for reader in readers)
            alone = same and len(within) == 1 and not any(id(reader) in repeated for reader in readers)
            if target.contractions and least == 4 and alone:
                path = up_to_root(readers, inside, users)  # what the readers are computed in, and what these are
                if contracted.isdisjoint(map(id, path)) and not any(map(cuts, path)):
                    inside.add(id(eqn))
                    contracted.update(map(id, path))
        elif shape is not Shape.REDUCED:
            far = id(eqn) not in chosen and looks_up(program.describe(eqn))
            near = shape is Shape.SAME or (shape is Shape.MOVED and multiplied_so(eqn, target))
            wanted = 1 if near else 3 if far else 2
            if shape is Shape.EACH and (least < 4 or len(readers) > 1) and id(eqn) in last:
                continue
            again = id(eqn) not in kept if target.weighs else not dear(program, eqn)
            if least >= wanted and (len(readers) == 1 or again):
                inside.add(id(eqn))
                sinks[id(eqn)] = within
                takes[id(eqn)] = min(least, 2) if shape is Shape.UPDATED else least
                if len(readers) > 1 or any(id(reader) in repeated for reader in readers):
                    repeated.add(id(eqn))
                if any(id(reader) in contracted for reader in readers):
                    contracted.add(id(eqn))
    names: dict[Var, Var] = {}
    for eqn in equations:
        (source, *_) = eqn.invars or [None]
        maker = definitions.get(source) if isinstance(source, Var) else None
        if id(eqn) in inside or not isinstance(source, Var) or (maker is not None and id(maker) in inside):
            continue
        of_contraction = maker is not None and shapes[id(maker)] is Shape.CONTRACTED and id(maker) not in rigid
        alone = of_contraction and len(users[source]) == 1 and source not in ends
        turned = shapes[id(eqn)] is Shape.MOVED and alone and multiplied_so(eqn, target)
        if shapes[id(eqn)] is Shape.SAME or turned:
            names[eqn.outvars[0]] = source
    found = []
    for eqn in equations:
        named = bool(eqn.outvars) and eqn.outvars[0] in names
        if (id(eqn) in inside and id(eqn) not in written) or named:
            continue
        members = gathered(eqn, definitions, inside, sums)
        piece = piece_of(members, eqn.outvars)
        found.append(Kernel(piece, shapes[id(eqn)], eqn))
    if target.contractions:
        found = put_in_place(found, ends)
    products = {id(eqn) for eqn in equations if shapes[id(eqn)] is Shape.CONTRACTED}
    plain = (Shape.EACH, Shape.CONTRACTED, Shape.COLLECTIVE)
    every = {var for kernel in found for var in kernel.piece.writes}
    wide = ends - rounded
    halved = {var for var in every if target.contractions and multiplied(var, program, shapes, users, wide, rounded)}
    made = combined(program, found, names, target, products, halved)
    fits = {id(kernel) for kernel in made if kernel.shape in plain or pools(program.describe(kernel.root))}
    narrow = {var for kernel in made for var in kernel.piece.writes if id(kernel) in fits} & halved
    narrow |= {var for kernel in made if kernel.shape is Shape.REGION for var in stacked(kernel.root)} & halved
    if target.packs:
        narrow |= rounded_beside(program, made, shapes, users, ends)
    found = Kernels(program, made, names, frozenset(narrow), target.aligned, target.tiles)
    return dataclasses.replace(found, kernels=tuple(in_memory(kernel, found) for kernel in made)) if narrow else found


def put_in_place(kernels: Sequence[Kernel], ends: Set[Var]) -> list[Kernel]:
    """The kernels, where one that makes a block writes it where it is put into an array, as TPUs' compiler has it."""
    found: list[Kernel | None] = [*kernels]
    maker = {var: k for k, kernel in enumerate(kernels) for var in kernel.piece.writes}
    readers: dict[Var, set[int]] = {}
    for k, kernel in enumerate(kernels):
        for var in kernel.piece.reads:
            readers.setdefault(var, set()).add(k)
    for k, kernel in enumerate(kernels):
        if kernel.shape is not Shape.UPDATED or len(kernel.piece.equations) > 1 or not puts_a_block(kernel.root):
            continue
        array, block, *places = kernel.root.invars
        if not isinstance(block, Var) or block not in maker:
            continue
        at = maker[block]
        before = found[at]
        if before is None or before.shape not in MAKES_BLOCKS or len(before.piece.writes) > 1:
            continue
        if any(maker.get(atom, -1) >= at for atom in (array, *places) if isinstance(atom, Var)):
            continue
        alone = block not in ends and readers.get(block) == {k}
        others = readers.get(array, set()) - {at, k} if isinstance(array, Var) else set[int]()
        writes = [*before.piece.writes[: not alone], *kernel.root.outvars]
        place = k if alone and others else at  # after the others that read what was there
        found[k] = found[at] = None
        found[place] = Kernel(piece_of([*before.piece.equations, kernel.root], writes), before.shape, before.root)
    return [kernel for kernel in found if kernel is not None]


MAKES_BLOCKS = {Shape.EACH, Shape.MOVED, Shape.CONTRACTED}
"""What writes its result into a part of an array."""


def puts_a_block(eqn: JaxprEqn) -> bool:
    """Whether an equation puts one block into an array."""
    of, (out,) = describe(eqn), eqn.outvars
    if of is None or len(eqn.invars) < 2 or of.roles.get(1) is Role.INDEX:
        return False
    if getattr(eqn.invars[1].aval, "ndim", -1) != out.aval.ndim:
        return False
    return all(getattr(atom.aval, "shape", ()) == () for atom in eqn.invars[2:])


def by_library(eqn: JaxprEqn, program: Program) -> bool:
    """Whether XLA's library for CPUs computes a reduction, or an equation within one (``ynn_support.cc``).

    It knows floating point numbers, functions of one array or two, and arrays that are repeated or turned; what is not
    large is not given to it.
    """
    of, (out,) = program.describe(eqn), eqn.outvars
    kinds = {atom.aval.dtype for atom in (*eqn.invars, out)}
    if of is None or not all(np.issubdtype(kind, np.floating) for kind in kinds) or len(eqn.invars) > 2:
        return False
    if of.has(Algebra.CONTRACTS):
        return not slides(eqn, program) and sums_last(of)
    if of.has(Algebra.MOVES):
        return len(eqn.invars) == 1 and out.aval.size >= eqn.invars[0].aval.size
    return max(atom.aval.size for atom in (*eqn.invars, out)) >= LEAST


def extends(eqn: JaxprEqn, program: Program) -> bool:
    """Whether an equation joins arrays, or pads one: XLA does that once on CPUs (``elemental_ir_emitter.cc``)."""
    of = program.describe(eqn)
    if of is None or not of.has(Algebra.MOVES) or len(eqn.invars) < 2 or Role.INDEX in of.roles.values():
        return False
    return eqn.outvars[0].aval.size > eqn.invars[0].aval.size


def joins_apart(eqn: JaxprEqn, program: Program) -> bool:
    """Whether an equation joins arrays in a kernel of its own: many, or along their last dimension.

    XLA does so on CPUs (``cpu_instruction_fusion.cc``).
    """
    of, (out, *_) = program.describe(eqn), eqn.outvars
    shapes = [getattr(atom.aval, "shape", ()) for atom in eqn.invars]
    if of is None or not of.has(Algebra.MOVES) or len(shapes) < 2 or {*map(len, shapes)} != {out.aval.ndim}:
        return False
    if out.aval.shape in shapes:  # element by element
        return False
    makers = [program.definitions.get(atom) if isinstance(atom, Var) else None for atom in eqn.invars]
    if len(shapes) == 2 and any(m is not None and {a.aval.size for a in m.invars} == {1} for m in makers):
        return False  # one value all over: what pads
    *rows, row = out.aval.shape or (1,)
    along = bool(rows) and list(shapes[0][:-1]) == rows and row * out.aval.dtype.itemsize >= 64
    return len(shapes) > JOINED or (along and nbytes(out.aval) >= 2048)


def reads_more(eqn: JaxprEqn) -> bool:
    """Whether an equation reads more bytes than it writes: then it is not computed again where it is in memory."""
    return sum(nbytes(atom.aval) for atom in eqn.invars if isinstance(atom, Var)) > nbytes(eqn.outvars[0].aval)


def worth_writing(
    program: Program, shapes: Mapping[int, Shape], users: Mapping[Var, Sequence[JaxprEqn]], ends: Set[Var]
) -> frozenset[int]:
    """Element-wise equations, by id, whose several readers would read more than is moved if the result is written once.

    Written, it costs the arrays that it is made of element by element, itself, and itself again for each kernel that
    reads it; computed in each, those arrays as often. That is settled from the results on, as compilers fuse, and only
    for what has several operands as large as itself: a function of one array is computed where it is read, however
    many arrays that one is made of, and a sum of two arrays that two products read (a residual) is written.
    """
    inner = (Shape.EACH, Shape.SAME, Shape.MOVED)
    borders: dict[Var, frozenset[Var]] = {}  # the arrays that element-wise results are made of

    @functools.cache
    def bytes_of(var: Var) -> int:
        return nbytes(var.aval) // (2 if multiplied(var, program, shapes, users, ends) else 1)

    def repeated(var: Var) -> bool:
        maker = program.definitions.get(var)
        return maker is not None and all(atom.aval.size < var.aval.size for atom in maker.invars)

    for eqn in program.equations:
        if shapes[id(eqn)] in inner:
            read = [a for a in eqn.invars if isinstance(a, Var)]
            borders[eqn.outvars[0]] = frozenset[Var]().union(*(borders.get(a, {a}) for a in read))
    sinks: dict[Var, frozenset[object]] = {}  # kernels that a result is computed in, or that read it
    found = set[int]()
    for eqn in reversed(program.equations):
        for var in eqn.outvars:
            into: set[object] = {var} if var in ends else set()
            for reader in users.get(var, ()):
                if shapes[id(reader)] in inner and id(reader) not in found:
                    into |= sinks[reader.outvars[0]]
                else:
                    into.add(id(reader))
            sinks[var] = frozenset(into)
        if shapes[id(eqn)] is not Shape.EACH:
            continue
        (out,) = eqn.outvars
        large = {a for a in eqn.invars if isinstance(a, Var) and a.aval.size >= out.aval.size and not repeated(a)}
        if len(large) < 2:
            continue
        times, own, operands = len(sinks[out]), bytes_of(out), sum(map(bytes_of, borders[out]))
        if times * operands > MUCH * (operands + own + times * own):
            found.add(id(eqn))
    return frozenset(found)


def of_whole_rows(
    program: Program, shapes: Mapping[int, Shape], users: Mapping[Var, Sequence[JaxprEqn]], ends: Set[Var]
) -> dict[int, int]:
    """Maxima of rows, by id, that one kernel finds and goes on with, with the equation, by id, whose result it writes.

    All that reads such a maximum puts it beside the row that it is of, as a softmax does; what becomes of that element
    by element is written (an exponential), so that no kernel after that one reads the row. Not so where a product makes
    the rows: its kernel gives the maxima with them.
    """
    inner = (Shape.EACH, Shape.SAME, Shape.MOVED)
    borders: dict[Var, frozenset[Var]] = {}  # the arrays that element-wise results are made of
    found: dict[int, int] = {}
    for eqn in program.equations:
        of = program.describe(eqn)
        if shapes[id(eqn)] in inner:
            read = [a for a in eqn.invars if isinstance(a, Var)]
            borders[eqn.outvars[0]] = frozenset[Var]().union(*(borders.get(a, {a}) for a in read))
        elif shapes[id(eqn)] is Shape.REDUCED and of is not None and isinstance(eqn.invars[0], Var):
            (row,) = (eqn.invars[0],)
            last = {*of.operands[0][-1]} == {*of.reduced} and {*of.reduced.values()} == {Monoid.MAX}
            makers = [program.definitions.get(var) for var in borders.get(row, {row})]
            products = any(maker is not None and shapes[id(maker)] is Shape.CONTRACTED for maker in makers)
            end = None if products or not last else beside_its_row(eqn, row, shapes, users, ends)
            if end is not None:
                found[id(eqn)] = id(end)
    return found


def beside_its_row(
    eqn: JaxprEqn, row: Var, shapes: Mapping[int, Shape], users: Mapping[Var, Sequence[JaxprEqn]], ends: Set[Var]
) -> JaxprEqn | None:
    """What becomes, element by element, of a row and of what it is reduced to, up to where several read it."""
    pending, together = [*eqn.outvars], dict[int, JaxprEqn]()
    while pending:
        var = pending.pop()
        if var in ends:
            return None
        for reader in users.get(var, ()):
            if shapes[id(reader)] not in (Shape.EACH, Shape.SAME):
                return None
            if row in reader.invars:
                together[id(reader)] = reader
            elif reader.outvars[0].aval.size <= row.aval.size:
                pending.append(reader.outvars[0])
    if len(together) != 1:
        return None
    (end,) = together.values()
    while end.outvars[0] not in ends and len(readers := users.get(end.outvars[0], ())) == 1:
        (reader,) = readers
        if shapes[id(reader)] not in (Shape.EACH, Shape.SAME) or reader.outvars[0].aval.size != row.aval.size:
            break
        end = reader
    return end if shapes[id(end)] is Shape.EACH else None


def with_narrow(kernels: Kernels, more: Set[Var]) -> Kernels:
    """The kernels, with some more variables that are in memory in bfloat16."""
    found = dataclasses.replace(kernels, narrow=kernels.narrow | more)
    return dataclasses.replace(found, kernels=tuple(in_memory(kernel, found) for kernel in kernels.kernels))


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


def multiplied_so(eqn: JaxprEqn, target: Target) -> bool:
    """Whether contractions read, and write, in the order that a transposition gives: on CPUs if it turns a matrix."""
    (x,), order = eqn.invars, eqn.params.get("permutation")
    longer = None if order is None else [d for d in order if x.aval.shape[d] > 1]
    return not target.ordered or longer is None or [*longer[:-2], *longer[:-3:-1]] == sorted(longer)


def packed_masks(
    program: Program, shapes: Mapping[int, Shape], users: Mapping[Var, Sequence[JaxprEqn]], ends: Set[Var]
) -> frozenset[int]:
    """Comparisons, by id, of what convolutions give, that TPUs' compiler keeps for later, packed, instead of that.

    It packs a dimension along which windows slide, of up to 32 places, in words. Not so one that is read at once, with
    nothing else that is as large.
    """
    inner = (Shape.EACH, Shape.SAME)
    found = set[int]()
    of: dict[Var, frozenset[Var]] = {}  # the large arrays that element-wise results are made of
    for eqn in program.equations:
        if shapes[id(eqn)] not in inner or len(eqn.outvars) != 1:
            continue
        (out,) = eqn.outvars
        large = [a for a in eqn.invars if isinstance(a, Var) and a.aval.size == out.aval.size]
        of[out] = frozenset[Var]().union(*(of.get(a, {a}) for a in large))
        if out.aval.dtype == np.bool_ and out not in ends:
            makers = [program.definitions.get(var) for var in of[out]]
            if any(maker is not None and slides_over_few(maker, program) for maker in makers):
                found.add(id(eqn))
    for eqn in program.equations:
        (out,) = eqn.outvars if id(eqn) in found else (None,)
        if out is not None and all(of.get(v, frozenset({v})) <= of[out] for v in beside(out, users)):
            found.discard(id(eqn))
    return frozenset(found)


def beside(var: Var, users: Mapping[Var, Sequence[JaxprEqn]]) -> list[Var]:
    """What is as large, and read by the same equations as a variable."""
    several = [atom for eqn in users.get(var, ()) for atom in eqn.invars]
    return [a for a in several if isinstance(a, Var) and a is not var and a.aval.size == var.aval.size]


def slides_over_few(eqn: JaxprEqn, program: Program) -> bool:
    """Whether an equation is a convolution of whose places along a dimension the bits fit in a word."""
    of = program.describe(eqn)
    if of is None or not slides(eqn, program):
        return False
    ties = [factor.split for factor in of.factors if isinstance(factor.split, Windowed)]
    return any(1 < of.sizes[tie.result] <= WORD for tie in ties)


WORD = 32
"""Bits of a word, into which the TPU compiler packs a dimension of a mask."""


def rounded_beside(
    program: Program,
    kernels: Sequence[Kernel],
    shapes: Mapping[int, Shape],
    users: Mapping[Var, Sequence[JaxprEqn]],
    ends: Set[Var],
) -> set[Var]:
    """What kernels of convolutions write in bfloat16 for others, which only multiply it, while they read it as it is.

    Not a convolution's own result: only one of several equations that read that is taken into its kernel.
    """
    times = collections.Counter(id(eqn) for kernel in kernels for eqn in kernel.piece.equations)
    found = set[Var]()
    for kernel in kernels:
        if not any(slides(eqn, program) for eqn in kernel.piece.equations):
            continue
        own = {id(eqn) for eqn in kernel.piece.equations if times[id(eqn)] == 1}
        makers = {var: eqn for eqn in kernel.piece.equations for var in eqn.outvars}
        several = [var for var in kernel.piece.writes if shapes[id(makers[var])] is Shape.EACH]
        found.update(var for var in several if multiplied(var, program, shapes, users, ends, own=own))
    return found


def multiplied(
    var: Var,
    program: Program,
    shapes: Mapping[int, Shape],
    users: Mapping[Var, Sequence[JaxprEqn]],
    ends: Set[Var],
    rounded: Set[Var] = frozenset(),
    own: Set[int] = frozenset(),
) -> bool:
    """Whether only contractions in bfloat16 read a float32 array, or parts of it, so that it may be kept so.

    Args:
      var: the array.
      program: whose.
      shapes: of its equations, by id.
      users: of its variables.
      ends: those of its results that are wanted in float32.
      rounded: those that are not.
      own: equations, by id, that read it before it is rounded.
    """
    readers = [eqn for eqn in users.get(var, ()) if id(eqn) not in own]
    if var.aval.dtype != np.float32 or var in ends or not (readers or var in rounded):
        return False
    for eqn in readers:
        match shapes[id(eqn)]:
            case Shape.CONTRACTED:
                if "HIGH" in str(eqn.params.get("precision")) or "F32" in str(eqn.params.get("precision")):
                    return False
            case Shape.SAME | Shape.MOVED | Shape.COLLECTIVE | Shape.EACH | Shape.OTHER if len(eqn.outvars) == 1:
                of = program.describe(eqn)
                chooses = of is not None and of.has(Algebra.MOVES | Algebra.CHOOSES)
                if shapes[id(eqn)] in (Shape.EACH, Shape.OTHER) and not chooses:
                    return False
                if not multiplied(eqn.outvars[0], program, shapes, users, ends, rounded):
                    return False
            case Shape.REGION:
                if not {i for i, atom in enumerate(eqn.invars) if atom is var} <= multiplied_places(eqn):
                    return False
            case _:
                return False
    return True


def pools(of: OperatorDescription | None) -> bool:
    """Whether an equation reduces windows of one array."""
    ties = [] if of is None or of.has(Algebra.CONTRACTS) else [factor.split for factor in of.factors]
    return any(isinstance(tie, Windowed) and tie.monoid is not None and tie.back is None for tie in ties)


def stacked(eqn: JaxprEqn) -> Sequence[Var]:
    """What a loop stacks."""
    region = region_of(eqn)
    return eqn.outvars[len(region.carried) :] if region is not None and region.scanned else ()


@functools.lru_cache(maxsize=64)
def multiplied_places(eqn: JaxprEqn) -> frozenset[int]:
    """The operands of a loop, by number, that it does not carry, and that it only multiplies, in bfloat16."""
    region = region_of(eqn)
    if region is None or not region.carried:
        return frozenset()
    found = {*region.fixed, *region.scanned}
    for body, inputs in zip(region.bodies, region.inputs, strict=True):
        program = inline(body.jaxpr, body.constants, eqn)
        fit = multiplied_inside(program)
        found -= {i for i, var in zip(inputs, program.inputs, strict=True) if var not in fit}
    return frozenset(found)


def rounded_ends(eqn: JaxprEqn, body: Program, kernels: Kernels) -> frozenset[Var]:
    """Of what a loop's body gives, that which is in bfloat16: it is stacked for contractions, or carried to them."""
    region = region_of(eqn)
    if region is None or not region.carried or region.tests:
        return frozenset()
    count = len(region.carried)
    pairs = [(out, end) for out, end in zip(eqn.outvars, body.outputs, strict=True) if isinstance(end, Var)]
    stacks = {*eqn.outvars[count:]}
    wide = {end for out, end in pairs if out in stacks and out not in kernels.narrow}
    found = {end for out, end in pairs if out in stacks} - wide
    read = {var for kernel in kernels.kernels for var in kernel.piece.reads}
    read |= {atom for atom in kernels.program.outputs if isinstance(atom, Var)}
    given = dict(zip(region.inputs[-1], body.inputs, strict=True))
    begin = dict(zip(eqn.outvars, region.carried, strict=False))  # what is carried out, with the number of the operand
    while True:  # what is carried may be stacked, and carried on under another name
        fit = multiplied_inside(body, found)
        more = {end for out, end in pairs if out in begin and given[begin[out]] in fit and out not in read}
        if more - wide <= found:
            return frozenset(found)
        found |= more - wide


def multiplied_inside(program: Program, rounded: Set[Var] = frozenset()) -> set[Var]:
    """The float32 inputs of a body that only contractions in bfloat16 read.

    Args:
      program: of the body.
      rounded: what it gives that only contractions read.
    """
    shapes = {id(eqn): shape_of(eqn, program.describe(eqn)) for eqn in program.equations}
    users: dict[Var, list[JaxprEqn]] = {}
    for eqn in program.equations:
        for atom in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)):
            users.setdefault(atom, []).append(eqn)
    ends = {atom for atom in program.outputs if isinstance(atom, Var)} - rounded
    return {var for var in program.inputs if multiplied(var, program, shapes, users, ends, rounded)}


def up_to_root(
    several: Sequence[JaxprEqn], inside: Set[int], users: Mapping[Var, Sequence[JaxprEqn]]
) -> list[JaxprEqn]:
    """Equations, what they are computed in, what that is computed in, and so on."""
    found = {id(eqn): eqn for eqn in several}
    pending = [*several]
    while pending:
        eqn = pending.pop()
        for reader in users[eqn.outvars[0]] if id(eqn) in inside else ():
            if id(reader) not in found:
                found[id(reader)] = reader
                pending.append(reader)
    return [*found.values()]


def ends_of_contractions(
    program: Program, shapes: Mapping[int, Shape], users: Mapping[Var, Sequence[JaxprEqn]], ends: Set[Var]
) -> frozenset[int]:
    """Element-wise equations, by id, that all uses of some contraction's result go through, element by element.

    The contraction writes the result of such an equation, instead of its own: of an activation's derivative times what
    comes backward, however many products and sums make it.
    """
    place = {id(eqn): i for i, eqn in enumerate(program.equations)}
    found = set[int]()
    for eqn in program.equations:
        if shapes[id(eqn)] is not Shape.CONTRACTED:
            continue
        (out,) = eqn.outvars
        size, done, last = out.aval.size, set[int](), 0
        pending = [place[id(reader)] for reader in users.get(out, ())] if out not in ends else []
        heapq.heapify(pending)
        while pending:
            at = heapq.heappop(pending)
            if at in done:
                continue
            done.add(at)
            reader = program.equations[at]
            if shapes[id(reader)] not in (Shape.EACH, Shape.SAME) or reader.outvars[0].aval.size != size:
                break
            alone = all(other in done for other in pending) and shapes[id(reader)] is Shape.EACH
            if alone and not multiplied_once(reader, shapes, users, ends):
                last = id(reader)
            if reader.outvars[0] in ends:
                break
            for other in users.get(reader.outvars[0], ()):
                heapq.heappush(pending, place[id(other)])
        found.add(last)
    return frozenset(found)


def multiplied_once(
    eqn: JaxprEqn, shapes: Mapping[int, Shape], users: Mapping[Var, Sequence[JaxprEqn]], ends: Set[Var]
) -> bool:
    """Whether one product alone reads a result, perhaps in another order: that computes it, instead of what made it."""
    while eqn.outvars[0] not in ends and len(readers := users.get(eqn.outvars[0], ())) == 1:
        (eqn,) = readers
        if shapes[id(eqn)] is Shape.CONTRACTED:
            return True
        if shapes[id(eqn)] not in (Shape.SAME, Shape.MOVED):
            return False
    return False


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


def combined(
    program: Program,
    kernels: Sequence[Kernel],
    names: Mapping[Var, Var],
    target: Target,
    products: Set[int],
    halved: Set[Var],
) -> tuple[Kernel, ...]:
    """Kernels with those taken together that may be, in an order in which they can run.

    Args:
      program: whose.
      kernels: in the program's order.
      names: variables that are other names for something in memory, with that.
      target: what the compiler takes together.
      products: contractions, by id.
      halved: variables that may be sent in half of their bytes: not with others.
    """

    def memory_of(var: Var) -> Var:
        while var in names:
            var = names[var]
        return var

    maker = {var: k for k, kernel in enumerate(kernels) for var in kernel.piece.writes}
    reads = [list(dict.fromkeys(map(memory_of, kernel.piece.reads))) for kernel in kernels]
    needs = [{maker[var] for var in found if var in maker} for found in reads]
    multiply = [
        target.contractions and any(id(eqn) in products for eqn in kernel.piece.equations) for kernel in kernels
    ]
    above: list[int] = []  # for each kernel, as bits, all that it waits for in the end
    groups: list[list[int]] = []
    group_of: list[int] = []
    masks: list[int] = []  # for each group, as bits, its members
    waits: list[int] = []  # and what they wait for
    offered: dict[object, list[int]] = {}
    for k, kernel in enumerate(kernels):
        above.append(0)
        for n in needs[k]:
            above[k] |= above[n] | 1 << n
        collective, size = kernel.shape is Shape.COLLECTIVE, sum(nbytes(var.aval) for var in kernel.piece.reads)
        wanted, offers = keys_of(kernel, reads[k], target, multiply[k], halved)
        chosen = None
        for g in dict.fromkeys(g for key in wanted for g in offered.get(key, [])):
            inside = needs[k] & {*groups[g]}
            held = sum(nbytes(var.aval) for m in groups[g] for var in kernels[m].piece.reads) if collective else 0
            if any(kernels[n].shape is not Shape.EACH and not multiply[n] for n in inside):
                continue
            written = {var for n in inside if multiply[n] for var in kernels[n].piece.writes}
            if cut_out(kernel, written, memory_of):
                continue
            if held + size * collective > target.together:
                continue
            bits = 0
            for n in needs[k] - inside:
                bits |= above[n] | 1 << n
            if not reaches(bits, g, masks, group_of, waits):
                chosen = g
                break
        if chosen is None:
            chosen = len(groups)
            groups.append([])
            masks.append(0)
            waits.append(0)
        groups[chosen].append(k)
        masks[chosen] |= 1 << k
        waits[chosen] |= above[k]
        group_of.append(chosen)
        for key in offers:
            if chosen not in offered.setdefault(key, []):
                offered[key].append(chosen)
    place = {id(eqn): i for i, eqn in enumerate(program.equations)}
    outside = {memory_of(atom): {-1} for atom in program.outputs if isinstance(atom, Var)}  # who reads what
    for k, found in enumerate(reads):
        for var in found:
            outside.setdefault(var, set()).add(group_of[k])
    merged = []
    for g, members in enumerate(groups):
        own = [kernels[m] for m in members]
        within = {
            var
            for m in members
            for var in kernels[m].piece.writes
            if len(members) > 1 and outside.get(var) == {g} and kernels[m].shape is not Shape.COLLECTIVE
        }
        merged.append(together(own, place, within, names, program.definitions))
    following: list[set[int]] = [set() for _ in groups]
    missing = [0] * len(groups)
    for k, found in enumerate(needs):
        for n in found:
            if group_of[n] != group_of[k] and group_of[k] not in following[group_of[n]]:
                following[group_of[n]].add(group_of[k])
                missing[group_of[k]] += 1
    ready = [(members[-1], g) for g, members in enumerate(groups) if not missing[g]]
    heapq.heapify(ready)
    order = []
    while ready:  # as near to the program's order as can be
        _, g = heapq.heappop(ready)
        order.append(merged[g])
        for other in following[g]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (groups[other][-1], other))
    assert len(order) == len(groups), "kernels wait for each other in a circle"
    return tuple(order)


def cuts(eqn: JaxprEqn) -> bool:
    """Whether an equation takes a part of its first operand: what makes that does not make a part alone."""
    of = describe(eqn) if eqn.invars else None
    return of is not None and of.has(Algebra.MOVES) and eqn.outvars[0].aval.size < eqn.invars[0].aval.size


def cut_out(kernel: Kernel, whole: Set[Var], memory_of: Callable[[Var], Var]) -> bool:
    """Whether a kernel takes a part of something that another writes, perhaps in another shape."""
    found = {*whole}
    for eqn in kernel.piece.equations:
        if not eqn.invars or not isinstance(eqn.invars[0], Var) or memory_of(eqn.invars[0]) not in found:
            continue
        if cuts(eqn):
            return True
        if shape_of(eqn, describe(eqn)) is Shape.SAME:
            found.update(eqn.outvars)
    return False


def keys_of(
    kernel: Kernel, reads: Sequence[Var], target: Target, multiplies: bool, halved: Set[Var]
) -> tuple[list[object], list[object]]:
    """With what a kernel may be taken together, and what others may have in common with it.

    Collectives must be alike; others must read the same, where it is the largest that they read, or what one writes.
    What has a product in it begins a kernel: what reads its result may join it, and it joins no other.
    """
    eqn = kernel.root
    if kernel.shape is Shape.COLLECTIVE:
        if KINDS[eqn.primitive.name] not in target.combines:
            return [], []
        dtype = eqn.invars[0].aval.dtype, eqn.outvars[0] in halved
        key = eqn.primitive.name, repr(sorted(eqn.params.items())), dtype
        return [key], [key]
    if not target.siblings or not reads:
        return [], []
    if multiplies:
        return [], [*kernel.piece.writes]
    if kernel.shape not in (Shape.EACH, Shape.REDUCED):
        return [], []
    most = max(nbytes(var.aval) for var in reads)
    largest = [var for var in reads if nbytes(var.aval) == most]
    written = kernel.piece.writes if kernel.shape is Shape.EACH else ()
    return [*largest], [*largest, *(var for var in written if nbytes(var.aval) >= most)]


def reaches(bits: int, group: int, masks: Sequence[int], group_of: Sequence[int], waits: Sequence[int]) -> bool:
    """Whether some of these kernels are in a group, or wait for one of it."""
    pending = bits
    done = 0
    while pending:
        if pending & masks[group]:
            return True
        g = group_of[pending.bit_length() - 1]
        done |= masks[g]
        if masks[g].bit_count() > 1:  # of a single one, all is there already
            pending |= waits[g]
        pending &= ~done
    return False


def together(
    members: Sequence[Kernel],
    place: Mapping[int, int],
    within: Set[Var] = frozenset(),
    names: Mapping[Var, Var] = MappingProxyType({}),
    definitions: Mapping[Var, JaxprEqn] = MappingProxyType({}),
) -> Kernel:
    """Several kernels as one.

    Args:
      members: in order.
      place: of each equation in the program, by id.
      within: what only they read, so that it need not be written.
      names: variables that are other names for something.
      definitions: the equations that make these.
    """
    if len(members) == 1:
        return members[0]
    found = {id(eqn): eqn for kernel in members for eqn in kernel.piece.equations}
    for var in [var for kernel in members for var in kernel.piece.reads] if within else ():
        chain = list[JaxprEqn]()
        while var not in within and var in names:
            chain.append(definitions[var])
            var = names[var]
        if var in within:
            found.update({id(eqn): eqn for eqn in chain})
    equations = [found[key] for key in sorted(found, key=lambda key: place[key])]
    shape = Shape.EACH if any(kernel.shape is Shape.EACH for kernel in members) else members[0].shape
    root = next(kernel.root for kernel in members if kernel.shape is shape)
    return Kernel(piece_of(equations, [v for k in members for v in k.piece.writes if v not in within]), shape, root)


def gathered(
    root: JaxprEqn, definitions: Mapping[Var, JaxprEqn], inside: set[int], sums: Mapping[int, int]
) -> list[JaxprEqn]:
    """An equation with all that is computed inside of it, in order; of what a library computes, what is in there."""
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
                if maker is None or id(maker) not in inside or id(maker) in order:
                    continue
                if sums.get(id(maker)) == sums.get(id(eqn)):
                    pending.append((maker, False))
    return list(order.values())


def dear(program: Program, eqn: JaxprEqn) -> bool:
    """Whether it would be a loss to compute an equation once for each that reads it."""
    description = program.describe(eqn)
    return description is not None and bool(description.operations.transcendental)
