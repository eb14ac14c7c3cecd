"""Where a program's results come to be, if that is where arguments are, and what becomes of these arguments before.

Knows kernels, and what they hold. Must not know times, nor when most is held.

XLA copies an argument if a result may be written where it is before all has been read of it. What is given away and
written later is room for other arrays in between, on CPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from jax.extend.core import Var

from vnode.analysis.program import Atom
from vnode.operators import Algebra, describe
from vnode.partition.cost.buffers import Buffers, Vacant
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.device import DeviceProgram
from vnode.partition.cost.kernels import kernels_of
from vnode.partition.cost.shapes import Kernel, Kernels, Shape, room_for, shape_of
from vnode.partition.cost.taken import buffers_of
from vnode.partition.cost.target import Target


@functools.lru_cache(maxsize=2)  # what is on the chip and what is held are asked for one after the other
def outer_buffers(device: DeviceProgram, target: Target) -> tuple[Kernels, Buffers, frozenset[Var], int]:
    """The kernels of a program, what they hold, which of it are results, and how many bytes take arguments' place."""
    program = device.program
    kernels = kernels_of(program, target)
    there = {*program.inputs, *program.constants}
    pairs = results_in_place(device)
    aliased = sum(room_for(given.aval, target.tiles) for _, given in pairs)
    matched = by_memory(pairs, kernels)
    moved = brought_in_place(kernels, matched, target)
    elsewhere = there | (matched.keys() - moved.keys())
    results = frozenset(kernels.memory_of(atom) for atom in program.outputs if isinstance(atom, Var))
    own = results - elsewhere - moved.keys()
    buffers = buffers_of(kernels, target, elsewhere=elsewhere, written_over=(), kept=own | moved.keys())
    buffers = with_copies(buffers, kernels, moved.values())
    if target.turns_updates:
        buffers = turned_first(buffers, kernels, matched)
    return kernels, vacated(buffers, kernels, matched) if target.lodges else buffers, own, aliased


def results_in_place(device: DeviceProgram) -> list[tuple[Atom, Var]]:
    """The results that take the place of arguments, with these, as jax matches them: in order, by type."""
    program, taken, found = device.program, set[int](), list[tuple[Atom, Var]]()
    for atom in program.outputs:
        fitting = (i for i in sorted(device.donated - taken) if type_of(program.inputs[i]) == type_of(atom))
        place = next(fitting, None)
        if place is not None:
            taken.add(place)
            found.append((atom, program.inputs[place]))
    return found


def type_of(atom: Atom) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype."""
    return getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None)


def by_memory(pairs: Collection[tuple[Atom, Var]], kernels: Kernels) -> dict[Var, Var]:
    """The results in place of arguments, as what is in memory, with these."""
    return {kernels.memory_of(atom): given for atom, given in pairs if isinstance(atom, Var)}


def copied(device: DeviceProgram, target: Target) -> list[Var]:
    """What is copied because of where results shall be: these, once they are made, and arguments that are read."""
    kernels = kernels_of(device.program, target)
    moved = brought_in_place(kernels, by_memory(results_in_place(device), kernels), target)
    return [*moved, *(var for var, readers in readers_of(kernels, moved.values()).items() if readers)]


def vacated(buffers: Buffers, kernels: Kernels, matched: Mapping[Var, Var]) -> Buffers:
    """The buffers, with what may be where arguments were, in whose place results come, and with copies of these.

    XLA (``copy_insertion.cc``) leaves an argument where it is if whatever reads it comes before the result by what
    each kernel needs; an order of kernels that happens to be so is not enough. It copies others before all else. From
    the last that reads an argument, or from the copy on, other arrays may be there (``buffer_assignment.cc``), up to
    the kernel that writes the result.

    Args:
      buffers: of the kernels.
      kernels: of the program.
      matched: the results in place of arguments, with these.
    """
    order = buffers.breadth_first()
    before = [0] * len(order)  # for each kernel those that it needs, one bit for each
    for k in order:
        for n in buffers.after[k]:
            before[k] |= before[n] | 1 << n
    readers = readers_of(kernels, matched.values())
    writers = {kernels.memory_of(var): k for k, kernel in enumerate(kernels.kernels) for var in kernel.piece.writes}
    written, read, vacant, early = [*buffers.written], [*buffers.read], [*buffers.vacant], [*buffers.early]
    for result, given in matched.items():
        end = writers.get(result)
        if end is None or kernels.kernels[end].shape is Shape.REGION:  # what a loop begins with is there already
            continue
        reads, need = readers[given], kernels.nbytes(given)
        if all(k == end or before[end] >> k & 1 for k in reads):
            if end not in reads:
                vacant.append(Vacant(need, frozenset(reads), end))
            continue
        copy = Var(given.aval)
        written[order[0]] += ((copy, need),)
        for k in reads:
            read[k] |= {copy}
        early.append(copy)
        vacant.append(Vacant(need, frozenset(), end, copy))
    return dataclasses.replace(
        buffers, written=tuple(written), read=tuple(read), vacant=tuple(vacant), early=tuple(early)
    )


def readers_of(kernels: Kernels, given: Collection[Var]) -> dict[Var, list[int]]:
    """For each of some arguments the kernels that read it, in order."""
    found: dict[Var, list[int]] = {var: [] for var in given}
    for k, kernel in enumerate(kernels.kernels):
        for var in found.keys() & map(kernels.memory_of, kernel.piece.reads):
            found[var].append(k)
    return found


def turned_first(buffers: Buffers, kernels: Kernels, matched: Mapping[Var, Var]) -> Buffers:
    """The buffers, with copies of arguments that an update reads in the order of their gradients.

    Where an update reads a gradient that was transposed, and does not compute it, TPUs' compiler turns the argument
    before anything else runs, updates the copy, and turns that back.

    Args:
      buffers: of the kernels.
      kernels: of the program.
      matched: the results in place of arguments, with these.
    """
    written, read, vacant = [*buffers.written], [*buffers.read], [*buffers.vacant]
    everyone, early = readers_of(kernels, matched.values()), list[Var]()
    for k, kernel in enumerate(kernels.kernels):
        results = [matched.get(kernels.memory_of(var)) for var in kernel.piece.writes]
        given = results[0] if len(results) == 1 else None
        if given is None or given not in kernel.piece.reads or not turns_another(kernel, given):
            continue
        others = frozenset(everyone[given]) - {k}
        copy = Var(given.aval)
        written[min(others, default=k)] += ((copy, kernels.nbytes(given)),)
        read[k] |= {copy}
        early.append(copy)
        vacant.append(Vacant(kernels.nbytes(given), others, k))
    return dataclasses.replace(
        buffers, written=tuple(written), read=tuple(read), vacant=tuple(vacant), early=tuple(early)
    )


def turns_another(kernel: Kernel, given: Var) -> bool:
    """Whether a kernel that multiplies nothing turns something as large as an argument that it reads as it is."""
    several = [describe(eqn) for eqn in kernel.piece.equations]
    if any(of is not None and of.has(Algebra.CONTRACTS) for of in several):
        return False
    turned = [eqn for eqn, of in zip(kernel.piece.equations, several, strict=True) if shape_of(eqn, of) is Shape.MOVED]
    sizes = {eqn.invars[0].aval.size for eqn in turned if eqn.params["permutation"][-1] != eqn.invars[0].aval.ndim - 1}
    return given.aval.size in sizes


def brought_in_place(kernels: Kernels, matched: Mapping[Var, Var], target: Target) -> dict[Var, Var]:
    """The results in place of arguments that are gathered, with these arguments: TPUs' compiler copies both.

    A gather does not write where an argument is; what is brought there in the end is copied, and so is the argument
    before it is read, as long as it is read.
    """
    if not target.copies_gathered:
        return {}
    gathers = {var for kernel in kernels.kernels if is_gather(kernel) for var in kernel.piece.writes}
    return {result: given for result, given in matched.items() if kernels.memory_of(result) in gathers}


def with_copies(buffers: Buffers, kernels: Kernels, given: Collection[Var]) -> Buffers:
    """The buffers, with copies of some arguments from the first kernel that reads them to the last."""
    written, read, vacant = [*buffers.written], [*buffers.read], [*buffers.vacant]
    for var, readers in readers_of(kernels, given).items():
        copy = Var(var.aval)
        for place, k in enumerate(readers):
            if not place:
                written[k] += ((copy, kernels.nbytes(var)),)
                vacant.append(Vacant(kernels.nbytes(var), frozenset({k})))
            read[k] |= {copy}
    return dataclasses.replace(buffers, written=tuple(written), read=tuple(read), vacant=tuple(vacant))


def is_gather(kernel: Kernel) -> bool:
    """Whether a kernel gathers over devices."""
    return kernel.shape is Shape.COLLECTIVE and KINDS[kernel.root.primitive.name] == "all-gather"
