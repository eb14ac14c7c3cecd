"""Which collectives are sent together, so that what all of them send, and bring, is in memory at once.

Knows kernels, and up to how many bytes a platform's compiler does so (XLA's combiners). Must not know machines, nor how
kernels are formed.

Those of one kind over the same axes are, that do not wait for each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType

from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Program
from vnode.operators import describe
from vnode.operators.cost import nbytes
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.pieces import piece_of
from vnode.partition.cost.shapes import Kernel, Shape, cuts, shape_of
from vnode.partition.cost.target import Target


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
    brought: list[int] = []  # and bytes of what they read
    offered: dict[object, list[int]] = {}
    for k, kernel in enumerate(kernels):
        above.append(0)
        for n in needs[k]:
            above[k] |= above[n] | 1 << n
        collective, size = kernel.shape is Shape.COLLECTIVE, sum(nbytes(var.aval) for var in kernel.piece.reads)
        wanted, offers = keys_of(kernel, reads[k], target, multiply[k], halved)
        chosen = None
        for g in dict.fromkeys(g for key in wanted for g in offered.get(key, [])):
            if collective and brought[g] + size > target.together:
                continue
            inside = needs[k] & {*groups[g]}
            if any(kernels[n].shape is not Shape.EACH and not multiply[n] for n in inside):
                continue
            written = {var for n in inside for var in kernels[n].piece.writes}
            if cut_out(kernel, written, memory_of):
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
            brought.append(0)
        brought[chosen] += size
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
    root: JaxprEqn,
    definitions: Mapping[Var, JaxprEqn],
    inside: set[int],
    sums: Mapping[int, int],
    only: Mapping[int, Set[int]],
) -> list[JaxprEqn]:
    """An equation with all that is computed inside of it, in order; of what a library computes, what is in there.

    Args:
      root: the equation.
      definitions: who makes what.
      inside: equations that are computed where they are read, by id.
      sums: equations that a library computes within others, with these.
      only: of some of the former the equations in which alone they are.
    """
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
                if id(root) not in only.get(id(maker), {id(root)}):
                    continue
                if sums.get(id(maker)) == sums.get(id(eqn)):
                    pending.append((maker, False))
    return list(order.values())
