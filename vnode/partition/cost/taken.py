"""What each kernel takes in memory: what it writes, what it writes over, and what it holds while it runs.

Knows kernels, loops and branches. Must not know arguments of a program, the order of kernels, nor machines.

A kernel that goes element by element may write over what nobody reads after it, if it is as large. A loop holds what
it carries and what it stacks once, and beside them what its body holds at most; branches the largest of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Program
from vnode.operators import Algebra
from vnode.operators.control import Region, region_of
from vnode.operators.cost import nbytes
from vnode.operators.spaces import on_host
from vnode.partition.cost.buffers import Buffers
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.device import bodies_of
from vnode.partition.cost.kernels import kernels_of
from vnode.partition.cost.narrow import multiplied_inside, rounded_ends
from vnode.partition.cost.shapes import BESIDE, Kernel, Kernels, Shape, shape_of, slides, sums_last
from vnode.partition.cost.sums import adds
from vnode.partition.cost.target import Target
from vnode.partition.cost.tiles import in_tiles

IN_PLACE = {Shape.EACH, Shape.UPDATED, Shape.SAME}
"""What may write over its operand."""


GOES_BY_EACH = {Shape.EACH, Shape.SAME, Shape.MOVED}
"""What goes element by element, so that it reads in any order; what is another name for its operand is no kernel."""


COMPUTES = {Shape.EACH, Shape.SAME, Shape.MOVED, Shape.REDUCED, Shape.CONTRACTED}
"""What makes the constants that it reads."""


SLICED = {Shape.EACH, Shape.REDUCED, Shape.UPDATED}
"""What reads a slice of an array that a loop goes through without a copy of it."""


def begun_empty(kernels: Kernels, passes: bool) -> set[Var]:
    """What loops add up, from constants: TPUs' compiler has room for it before gathers begin.

    Args:
      kernels: of a program.
      passes: whether loops are passes over nodes: those that read what others made have room only then
        (`vnode.runtime.loops.room`).
    """
    empty, found, late = made_of_nothing(kernels), set[Var](), set[Var]()
    for kernel in kernels.kernels:
        region = region_of(kernel.root) if kernel.shape is Shape.REGION else None
        waits = passes and not late.isdisjoint(kernel.piece.reads)
        if waits or region is not None:
            late.update(kernel.piece.writes)
        if waits or region is None or region.chooser is not None or region.tests:
            continue
        (body,) = bodies_of(kernel.root)
        makers = body.definitions
        for var, i, end in zip(kernel.root.outvars, region.carried, body.outputs, strict=False):
            total, begin = makers.get(end) if isinstance(end, Var) else None, kernel.root.invars[i]
            if total is None or not adds(total) or not isinstance(begin, Var) or begin not in empty:
                continue
            if any(atom is body.inputs[i] for atom in total.invars):
                found.add(var)
    return found


def buffers_of(
    kernels: Kernels,
    target: Target,
    *,
    elsewhere: Collection[Var],
    written_over: Collection[Var],
    kept: Collection[Var] = (),
) -> Buffers:
    """What kernels of a program write and read.

    Args:
      kernels: of the program.
      target: for bodies.
      elsewhere: variables whose memory is not counted here.
      written_over: those of them that may be written over after the last reader.
      kept: variables that are held to the end.
    """
    maker = {kernels.memory_of(var): k for k, each in enumerate(kernels.kernels) for var in each.piece.writes}
    written: list[tuple[tuple[Var, int], ...]] = []
    read: list[frozenset[Var]] = []
    inside, over = list[int](), list[tuple[tuple[Var, Var], ...]]()
    later: list[tuple[int, list[Var], list[tuple[tuple[Var, int], ...]]]] = []  # of kernels what else they do, in order
    counted = set(maker) - set(elsewhere) - (made_where_read(kernels) if target.sinks else set())
    readers: dict[Var, list[Shape]] = {}
    beside: dict[int, list[Var]] = {}  # for loops what they hold besides their results
    rounded: dict[Var, Var] = {}  # what loops read, as it is made in bfloat16 before the first of them
    for kernel in kernels.kernels:
        for var in kernel.piece.reads:
            readers.setdefault(kernels.memory_of(var), []).append(kernel.shape)
    for k, kernel in enumerate(kernels.kernels):
        if kernel.root.primitive is BESIDE:
            beside.setdefault(maker.get(kernels.memory_of(kernel.piece.reads[0]), k), []).extend(kernel.piece.writes)
    made = list[int]()
    for k, kernel in enumerate(kernels.kernels):
        made.append(sum(kernels.nbytes(var) for var in kernel.piece.writes))
        wrote = [] if kernel.root.primitive is BESIDE else kernel.piece.writes
        outs = [var for var in (*wrote, *beside.get(k, ())) if type(var) is Var]
        reads = dict.fromkeys(map(kernels.memory_of, kernel.piece.reads))  # in order, so that peaks do not vary
        region = region_of(kernel.root) if kernel.shape is Shape.REGION else None
        own = tuple((var, kernels.nbytes(var)) for var in outs if var in counted)
        more = (
            copied(kernel, readers, target, kernels)
            if region is None
            else inside_of(kernel.root, region, target, kernels)
        )
        if more and region is None and "scatter_dimension" not in kernel.root.params:
            pieces = [Var(outs[0].aval)]  # as they come; if there are others, also as they are sent
            if "split_axis" in kernel.root.params:
                pieces.append(Var(outs[0].aval))
            later.append((k, [*pieces], [*[((var, more),) for var in pieces[1:]], own]))
            own, more = ((pieces[0], more),), 0
        written.append(own)
        for var in multiplied_in(kernel, region, kernels) if target.contractions else ():
            if var not in rounded:
                rounded[var] = Var(var.aval)
                written[-1] += ((rounded[var], kernels.nbytes(var) // 2),)
            reads[rounded[var]] = None
        own_copies = {*rounded.values()}
        read.append(frozenset(v for v in reads if v in counted or v in written_over or v in own_copies))
        inside.append(more)
        moved = moved_within(kernel, kernels) if target.ordered else multiplied_within(kernel, kernels)
        pairs = overwritten(kernel, region, kernels, [var for var in reads if var not in moved], target)
        over.append(tuple(sorted(pairs, key=lambda pair: pair[1] not in written_over)))  # where it is wanted, if it can
    of = list(range(len(written)))
    before = list[int]()
    for k, pieces, results in later:
        for place, (var, own) in enumerate(zip(pieces, results, strict=True)):
            before.append(len(written) - 1 if place else k)
            made.append(sum(need for _, need in own))
            for entries, entry in ((written, own), (read, frozenset({var})), (inside, 0), (over, ()), (of, k)):
                entries.append(entry)  # type: ignore[arg-type]
        maker.update((var, len(written) - 1) for var, _ in results[-1])
    several = [
        [maker[v] for v in map(kernels.memory_of, each.piece.reads) if maker.get(v, k) != k]  # not for itself
        for k, each in enumerate(kernels.kernels)
    ]
    operands = [*(tuple(dict.fromkeys(each)) for each in several), *((k,) for k in before)]
    results = [kernels.memory_of(atom) for atom in kernels.program.outputs if isinstance(atom, Var)]
    there = [
        tuple((var, kernels.nbytes(var)) for var in each.piece.writes if var in results and var not in counted)
        for each in kernels.kernels
    ]
    after = [*map(frozenset, operands)]
    sent = [kernel for kernel in kernels.kernels if kernel.shape is Shape.AWAY and on_host(kernel.root.outvars[0].aval)]
    last_read = {var for kernel in sent for var in map(kernels.memory_of, kernel.piece.reads) if var in counted}
    ends = frozenset(kernels.memory_of(var) for var in kept) | last_read
    last = {k for k, kernel in enumerate(kernels.kernels) if target.library and by_itself(kernel, kernels.program)}
    fetches = [kernel.shape is Shape.AWAY and not on_host(kernel.root.outvars[0].aval) for kernel in kernels.kernels]
    first = {k for k, fetch in enumerate(fetches) if fetch and not after[k]}
    return Buffers(
        tuple(written),
        tuple(read),
        tuple(inside),
        tuple(over),
        ends,
        tuple(after),
        tuple(of),
        frozenset(last),
        frozenset(first),
        ends=tuple(dict.fromkeys(maker[var] for var in results if var in maker)),
        operands=tuple(operands),
        made=tuple(made),
        results=tuple(there),
    )


def multiplied_in(kernel: Kernel, region: Region | None, kernels: Kernels) -> list[Var]:
    """What a loop is given that is the same at every turn, in float32, and that it only multiplies, in bfloat16.

    (TPUs' compiler rounds it once, before the loop; seen of weights.)
    """
    if region is None or region.chooser is not None:
        return []
    found: dict[Var, bool] = {}
    for body, inputs in zip(bodies_of(kernel.root), region.inputs, strict=True):
        fit = multiplied_inside(body, rounded_ends(kernel.root, body, kernels))
        for i, var in zip(inputs, body.inputs, strict=True):
            atom = kernel.root.invars[i]
            if i in region.fixed and isinstance(atom, Var):
                held = kernels.memory_of(atom)
                found[held] = found.get(held, True) and var in fit
    return [var for var, fits in found.items() if fits and var not in kernels.narrow]


def by_itself(kernel: Kernel, program: Program) -> bool:
    """Whether a kernel is a product that sums over another dimension of its first operand than the last."""
    of = program.describe(kernel.root) if kernel.shape is Shape.CONTRACTED else None
    return of is not None and not slides(kernel.root, program) and not sums_last(of)


def made_of_nothing(kernels: Kernels) -> set[Var]:
    """What is made of constants alone."""
    nothing: set[Var] = set()
    for eqn in kernels.program.equations:
        read = {atom for atom in eqn.invars if isinstance(atom, Var)}
        if region_of(eqn) is None and not eqn.effects and read <= nothing:
            nothing.update(eqn.outvars)
    return nothing


def made_where_read(kernels: Kernels) -> set[Var]:
    """What is made of constants, and read by loops, and by what computes: compilers make it there, bit by bit.

    (``WhileLoopConstantSinking``, and fusions that have constants of their own; seen of broadcasts and masks in
    programs for TPUs.) What loops carry and begin with so is in the place of what they give.
    """
    found = {kernels.memory_of(var) for var in made_of_nothing(kernels)}
    found -= {kernels.memory_of(atom) for atom in kernels.program.outputs if isinstance(atom, Var)}
    for kernel in kernels.kernels:
        if kernel.shape in COMPUTES:
            continue
        region = region_of(kernel.root) if kernel.shape is Shape.REGION else None
        changing = region.scanned if region is not None else ()
        reads = kernel.piece.reads if region is None else [kernel.root.invars[i] for i in changing]
        found -= {kernels.memory_of(atom) for atom in reads if isinstance(atom, Var)}
    return found


def copied(kernel: Kernel, readers: Mapping[Var, Collection[Shape]], target: Target, kernels: Kernels) -> int:
    """The bytes that collectives copy where arrays are exchanged along their first dimension only, in pieces.

    On CPUs; what is gathered along another is put in order by those who read it, if these go element by element. On
    TPUs (`Target.turns`) only what everybody exchanges pieces of: the pieces are then outside of whole tiles.
    """
    if kernel.shape is not Shape.COLLECTIVE or not (target.ordered or target.turns):
        return 0
    total = 0
    for eqn in kernel.piece.equations:
        place = next((eqn.params[name] for name in ALONG if name in eqn.params), None)
        if place is None or ("split_axis" not in eqn.params and not target.ordered):
            continue
        held = max(sum(nbytes(var.aval) for var in several) for several in (eqn.invars, eqn.outvars))
        if target.tiles:
            held = sum(in_pieces(atom.aval, place) for atom in eqn.invars)
            held //= 2 if kernels.narrow.issuperset(eqn.outvars) else 1
        fused = "all_gather_dimension" in eqn.params and {*readers.get(eqn.outvars[0], ())} <= GOES_BY_EACH
        first = fused or math.prod(eqn.outvars[0].aval.shape[:place]) == 1
        total += held if "split_axis" in eqn.params or not first else 0
    return total


def in_pieces(aval: Any, place: int) -> int:
    """Bytes of an array in whole tiles of which none reaches over several indices of one dimension."""
    pieces, rest = aval.shape[place], (*aval.shape[:place], *aval.shape[place + 1 :])
    return pieces * in_tiles(rest) * (nbytes(aval) // max(aval.size, 1))


ALONG = "all_gather_dimension", "scatter_dimension", "split_axis"
"""How collectives call the dimension along which they exchange."""


def overwritten(
    kernel: Kernel, region: Region | None, kernels: Kernels, reads: Collection[Var], target: Target
) -> list[tuple[Var, Var]]:
    """Which results of a kernel may take the memory of which operands."""
    if region is not None:
        pairs = zip(kernel.root.outvars, [kernel.root.invars[i] for i in region.carried], strict=False)
        return [(out, kernels.memory_of(atom)) for out, atom in pairs if isinstance(atom, Var)]
    if kernel.shape is Shape.COLLECTIVE and target.adds_in_place and KINDS[kernel.root.primitive.name] == "all-reduce":
        several = [pair for eqn in kernel.piece.equations for pair in zip(eqn.outvars, eqn.invars, strict=True)]
        pairs = [(out, kernels.memory_of(atom)) for out, atom in several if isinstance(atom, Var)]
        return [(out, var) for out, var in pairs if var in reads and kernels.nbytes(var) == kernels.nbytes(out)]
    if kernel.shape not in IN_PLACE:
        return []
    by_size: dict[int, list[Var]] = {}
    for var in reads:
        by_size.setdefault(kernels.nbytes(var), []).append(var)
    return [(out, var) for out in kernel.piece.writes for var in by_size.get(kernels.nbytes(out), ())]


def moved_within(kernel: Kernel, kernels: Kernels) -> set[Var]:
    """What a kernel reads at other places than it writes to, so that it cannot write over it."""
    found = set[Var]()
    for eqn in reversed(kernel.piece.equations):
        of = kernels.program.describe(eqn)
        there = eqn is kernel.root and kernel.shape is Shape.UPDATED
        sizes = {atom.aval.size for atom in (*eqn.invars, *eqn.outvars)}
        moves = of is not None and of.has(Algebra.MOVES) and len(sizes) > 1
        turns = shape_of(eqn, of) is Shape.MOVED
        if not there and (moves or turns or found.intersection(eqn.outvars)):
            found.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return {kernels.memory_of(var) for var in found}


def multiplied_within(kernel: Kernel, kernels: Kernels) -> set[Var]:
    """What a kernel multiplies, all of it for each element that it writes, so that it cannot write over it."""
    found = set[Var]()
    for eqn in reversed(kernel.piece.equations):
        of = kernels.program.describe(eqn)
        if (of is not None and of.has(Algebra.CONTRACTS)) or found.intersection(eqn.outvars):
            found.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return {kernels.memory_of(var) for var in found}


def in_one_place(var: Var, kernels: Kernels, target: Target) -> set[Var]:
    """An array, and those that one after another it is written over: nothing else reads them."""
    found = {var}
    writers, reading = kernels.writers, kernels.reading
    while (kernel := writers.get(var)) is not None and kernel.shape in IN_PLACE:
        reads = [v for v in map(kernels.memory_of, kernel.piece.reads) if v in writers and reading[v] == 1]
        pairs = overwritten(kernel, None, kernels, reads, target)
        before = [v for out, v in pairs if kernels.memory_of(out) == var and v not in found]
        if not before:
            break
        var = before[0]
        found.add(var)
    return found


def inside_of(eqn: JaxprEqn, region: Region, target: Target, outer: Kernels) -> int:
    """The most bytes that the bodies of a loop or branch hold beside its operands and results."""
    peaks = [0]
    for k, (body, inputs) in enumerate(zip(bodies_of(eqn), region.inputs, strict=True)):
        rounded = rounded_ends(eqn, body, outer) if target.contractions else frozenset[Var]()
        _, buffers, slices = body_buffers(body, inputs, region, k < region.tests, target, rounded)
        peaks.append(buffers.peak(buffers.under(target)) + slices)
    return max(peaks)


def body_buffers(
    program: Program, inputs: Sequence[int], region: Region, tests: bool, target: Target, rounded: frozenset[Var]
) -> tuple[Kernels, Buffers, int]:
    """The kernels of a body, what they hold beside its loop or branch, and bytes of slices that it copies."""
    kernels = kernels_of(program, target, rounded)
    given: Mapping[int, Var] = dict(zip(inputs, program.inputs, strict=True))
    carried = [given[i] for i in region.carried if i in given]
    ends = [] if tests else program.outputs
    count = len(region.carried)
    elsewhere = {*program.inputs, *program.constants}
    if region.chooser is not None:  # a branch writes its results where they belong
        elsewhere |= {kernels.memory_of(atom) for atom in ends if isinstance(atom, Var)}
    else:
        shapes = {kernels.memory_of(var): each.shape for each in kernels.kernels for var in each.piece.writes}
        read = {var for each in kernels.kernels for var in map(kernels.memory_of, each.piece.reads)}
        read |= {atom for atom in ends if isinstance(atom, Var)}
        for var, atom in zip(carried, ends, strict=False):  # what nobody reads is written over at once
            if isinstance(atom, Var) and var not in read:
                elsewhere |= in_one_place(kernels.memory_of(atom), kernels, target)
        for atom in ends[count:]:  # stacked: what goes element by element is written in its place
            if isinstance(atom, Var) and shapes.get(kernels.memory_of(atom)) in IN_PLACE:
                elsewhere.add(kernels.memory_of(atom))
    kept = [atom for atom in ends if isinstance(atom, Var) and kernels.memory_of(atom) not in elsewhere]
    buffers = buffers_of(kernels, target, elsewhere=elsewhere, written_over=carried, kept=kept)
    slices = 0
    for i in region.scanned:
        readers = [each for each in kernels.kernels if given[i] in map(kernels.memory_of, each.piece.reads)]
        if any(each.shape not in SLICED for each in readers):
            slices += nbytes(given[i].aval)
    return kernels, buffers, slices
