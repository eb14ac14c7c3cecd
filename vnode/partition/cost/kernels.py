"""Which equations a compiler makes one kernel of, so that what passes between them never is in memory.

Knows descriptions and programs. Must not know machines, times, or how much memory there is.

The rules are those of XLA's fusion of producers into consumers (``instruction_fusion.cc``), in terms of descriptions:

- An equation whose factors are all free (element by element), or that shifts, repeats or looks up elements, is computed
  inside of each equation that reads it, if all of these can take it in; one that is dear (an exponential, a root) only
  if a single one reads it, since it would be computed again for each. On TPUs (`Target.weighs`) bytes decide: what has
  several operands as large as itself is written once if all that read it would otherwise read more; anything else is
  computed in each of them. A maximum of rows is found in the kernel that goes on with it beside the rows.
  On CPUs (`Target.repeats`) what reads one large array is computed in those that can, and written for the others.
- A reduction takes in what it reads, and is computed once: its result is in memory. On CPUs a library computes large
  ones (`Target.library`), together with what nobody else reads; what others read too is in memory for it.
- A contraction takes in rearrangements only, and on TPUs (`Target.contractions`) also element-wise producers; and there
  an element-wise equation that alone reads its result, of the same size, takes it in.
- A rearrangement that leaves the order of elements as it is (a reshape) is another name for the same memory; so is a
  transposition of a contraction's result that nobody else reads, which the contraction writes in that order.
- There, a product takes in a slice whose place is known at run time only if it is of whole tiles, and keeps them;
  others are written first. What such a slice is cut out of is written if others read it too, and so is what is computed
  element by element for the slice and for others; these compute it again if they read what it is made of anyway.
- There, a slice of what is gathered over devices is written: it is in no kernel with others.
- There, what makes a block that is put into an array, in place, writes it there.
- There, an array with some elements replaced (a scatter) is made inside of what reads only a part of it.
- Everything else (other scatters, sorts, windows, loops, collectives) reads from memory and writes to it, and so does
  what moves a value to the host's memory, or back.

What is element by element, or a reduction, becomes one kernel with others that read the same, or with the one that
writes it, if nothing else has to run between them (XLA's multi-output fusion; not on CPUs).

What compilers do beyond that (reductions inside of a kernel, libraries of fused attention) is not modelled.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Mapping, Sequence, Set

import numpy as np
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Program
from vnode.operators import Algebra, Role, describe
from vnode.operators.cost import nbytes
from vnode.operators.monoid import Monoid
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.narrow import multiplied, multiplied_so, packed_masks, rounded_beside
from vnode.partition.cost.pieces import piece_of
from vnode.partition.cost.sent import combined, gathered
from vnode.partition.cost.shapes import (
    Kernel,
    Kernels,
    Shape,
    chosen_in_each,
    cuts,
    dear,
    in_memory,
    looks_up,
    only_sliced,
    pools,
    puts_a_block,
    shape_of,
    shapes_of,
    slides,
    stacked,
    sums_last,
)
from vnode.partition.cost.target import Target
from vnode.partition.cost.tiles import SUBLANES

JOINED = 8
"""Arrays up to which XLA joins them on CPUs within another kernel."""


LEAST = 4096
"""Elements from which XLA leaves reductions on CPUs to a library."""


MUCH = 1.05
"""How often as many bytes several readers move on TPUs before what they read is written once."""


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
    shapes = {**shapes_of(program)}
    updates = [eqn for eqn in equations if target.weighs and shapes[id(eqn)] is Shape.UPDATED]
    chosen = {id(eqn): Shape.EACH for eqn in updates if chosen_in_each(eqn)}
    shapes.update(chosen)
    users = program.readers
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
    only: dict[int, frozenset[int]] = {}  # for each that some kernels compute and others read, the former
    cut: set[int] = set()  # slices whose places are known at run time only, and what is computed for one of them only

    def compute_again(eqn: JaxprEqn, roots: frozenset[int]) -> None:
        """Has an equation computed in some kernels, and written for the others that read it."""
        only[id(eqn)] = sinks[id(eqn)] = roots
        takes[id(eqn)] = min(takes[root] for root in roots)
        inside.add(id(eqn))
        written.add(id(eqn))
        repeated.add(id(eqn))

    for eqn in reversed(equations):
        shape = shapes[id(eqn)]
        if target.library and shape is Shape.REDUCED and by_library(eqn, program):
            sums[id(eqn)] = id(eqn)
        own = 0 if id(eqn) in rigid else TAKES.get(shape, 0)
        if target.contractions and (shape is Shape.CONTRACTED or only_sliced(eqn, shape, shapes, users)):
            own = 2
        takes[id(eqn)] = own
        if target.weighs and cuts_anywhere(eqn):
            cut.add(id(eqn))
        if own == 0 or len(eqn.outvars) != 1 or eqn.outvars[0] in ends or not users.get(eqn.outvars[0]):
            continue
        if id(eqn) in masks or (target.weighs and slices_gathered(eqn, program, shapes)):
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
            if not readers or shape is Shape.CONTRACTED or reads_more(eqn, program):
                continue
        within = frozenset[int]().union(*(sinks.get(id(reader), {id(reader)}) for reader in readers))
        if target.ordered and len(within) > 1 and extends(eqn, program):
            continue
        least = min(takes[id(reader)] for reader in readers)
        in_cut = any(id(reader) in cut for reader in readers)
        if in_cut and len(within) > 1 and shape is not Shape.SAME:
            others = [sinks.get(id(reader), {id(reader)}) for reader in readers if id(reader) not in cut]
            roots = {root for several in others for root in several if takes[root] >= 2}
            able = {root for root in roots if reads_all_of(root, eqn, program, shapes, users, sinks)}
            if able and shape is Shape.EACH and id(eqn) not in kept:
                compute_again(eqn, frozenset(able))
            continue
        if shape is Shape.CONTRACTED:
            same = all(reader.outvars[0].aval.size == eqn.outvars[0].aval.size for reader in readers)
            alone = same and len(within) == 1 and not any(id(reader) in repeated for reader in readers)
            if target.contractions and least == 4 and alone:
                path = up_to_root(readers, inside, users)  # what the readers are computed in, and what these are
                if contracted.isdisjoint(map(id, path)) and not any(map(cuts, path)):
                    inside.add(id(eqn))
                    contracted.update(map(id, path))
        elif shape is not Shape.REDUCED:
            far = id(eqn) not in chosen and looks_up(program.describe(eqn)) and not keeps_tiles(eqn, users)
            near = shape is Shape.SAME or (shape is Shape.MOVED and multiplied_so(eqn, target))
            wanted = 1 if near else 3 if far else 2
            if shape is Shape.EACH and (least < 4 or len(readers) > 1) and id(eqn) in last:
                continue
            again = id(eqn) not in kept if target.weighs else not dear(program, eqn)
            if least < wanted and again and target.repeats and not reads_more(eqn, program):
                able = frozenset(root for root in within if takes[root] >= wanted)
                if able:
                    compute_again(eqn, able)
            elif least >= wanted and (len(readers) == 1 or again):
                inside.add(id(eqn))
                sinks[id(eqn)] = within
                if in_cut:
                    cut.add(id(eqn))
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
        members = gathered(eqn, definitions, inside, sums, only)
        piece = piece_of(members, eqn.outvars)
        found.append(Kernel(piece, shapes[id(eqn)], eqn))
    if target.contractions:
        found = put_in_place(found, ends)
    products = {id(eqn) for eqn in equations if shapes[id(eqn)] is Shape.CONTRACTED}
    plain = (Shape.EACH, Shape.SAME, Shape.CONTRACTED, Shape.COLLECTIVE)
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


def reads_all_of(
    root: int,
    eqn: JaxprEqn,
    program: Program,
    shapes: Mapping[int, Shape],
    users: Mapping[Var, Sequence[JaxprEqn]],
    sinks: Mapping[int, Set[int]],
) -> bool:
    """Whether a kernel reads from memory all arrays from which something is computed element by element, whatever else.

    Args:
      root: the kernel's last equation, by its number as an object.
      eqn: what computes it.
      program: of both.
      shapes: of its equations.
      users: who reads what.
      sinks: for equations that are computed in kernels, in which.
    """
    pending, seen = [atom for atom in eqn.invars if isinstance(atom, Var)], set[Var]()
    found = False
    while pending:
        var = pending.pop()
        if var in seen or var.aval.size < eqn.outvars[0].aval.size:
            continue
        seen.add(var)
        maker = program.definitions.get(var)
        if any(each is not eqn and root in sinks.get(id(each), {id(each)}) for each in users[var]):
            found = True
        elif maker is None or shapes[id(maker)] not in (Shape.EACH, Shape.SAME):
            return False
        else:
            pending += [atom for atom in maker.invars if isinstance(atom, Var)]
    return found


def slices_gathered(eqn: JaxprEqn, program: Program, shapes: Mapping[int, Shape]) -> bool:
    """Whether an equation takes a slice of what is gathered over devices, that is in many places in memory.

    Seen of slices whose places are written down, and that keep the first dimension.
    """
    if not cuts(eqn) or len(eqn.invars) > 1:
        return False
    (source,), shape = eqn.invars, eqn.outvars[0].aval.shape
    first = next((d for d, n in enumerate(source.aval.shape) if n > 1), 0)
    if len(shape) != source.aval.ndim or shape[first] != source.aval.shape[first]:
        return False
    maker = program.definitions.get(source) if isinstance(source, Var) else None
    while maker is not None and shapes[id(maker)] is Shape.SAME:
        source = maker.invars[0]
        maker = program.definitions.get(source) if isinstance(source, Var) else None
    return maker is not None and KINDS.get(maker.primitive.name) == "all-gather"


def cuts_anywhere(eqn: JaxprEqn) -> bool:
    """Whether an equation takes a slice whose place is known at run time only."""
    return cuts(eqn) and looks_up(describe(eqn)) and not any(getattr(a.aval, "shape", ()) for a in eqn.invars[1:])


def keeps_tiles(eqn: JaxprEqn, users: Mapping[Var, Sequence[JaxprEqn]]) -> bool:
    """Whether an equation takes a slice of whole tiles, and all readers have the same, so that products read it."""
    if not cuts_anywhere(eqn):
        return False
    long = [d for d, n in enumerate(eqn.invars[0].aval.shape) if n > 1][-2:]
    rows = tuple(eqn.outvars[0].aval.shape[d] for d in long)
    if not long or any(n % SUBLANES for n in (eqn.invars[0].aval.shape[long[0]], rows[0])):
        return False
    pending = [eqn.outvars[0]]
    while pending:
        for reader in users.get(pending.pop(), ()):
            if shape_of(reader, describe(reader)) is Shape.SAME:
                (out,) = reader.outvars
                if tuple(n for n in out.aval.shape if n > 1)[-2:] != rows:
                    return False
                pending.append(out)
    return True


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


def reads_more(eqn: JaxprEqn, program: Program) -> bool:
    """Whether an equation reads more bytes than it writes: then it is not computed again where it is in memory.

    One array of as many dimensions may be larger (``InstructionFusion::ComputeGloballyUnfusible``).
    """
    (out,) = eqn.outvars
    several = dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, Var))
    large = [atom for atom in several if atom.aval.ndim >= out.aval.ndim > 0]
    makers = [program.definitions.get(atom) for atom in large]
    repeats = [m is not None and all(a.aval.size < m.outvars[0].aval.size for a in m.invars) for m in makers]
    return repeats.count(False) > 1 and sum(nbytes(atom.aval) for atom in several) > nbytes(out.aval)


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
