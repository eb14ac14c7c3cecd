"""What is in memory in fewer bits than its type has: factors of products in bfloat16, and masks in single bits.

Knows programs and what kernels read. Must not know platforms beyond what is asked of them, nor how kernels are formed.

On TPUs a float32 array that only contractions read, in the default precision, is kept, and sent, in bfloat16.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set

import numpy as np
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Program, inline
from vnode.operators import Algebra
from vnode.operators.control import region_of
from vnode.operators.splits import Windowed
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.shapes import Kernel, Kernels, Shape, in_memory, shapes_of, slides
from vnode.partition.cost.target import Target


def with_narrow(kernels: Kernels, more: Set[Var]) -> Kernels:
    """The kernels, with some more variables that are in memory in bfloat16."""
    found = dataclasses.replace(kernels, narrow=kernels.narrow | more)
    return dataclasses.replace(found, kernels=tuple(in_memory(kernel, found) for kernel in kernels.kernels))


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
    if var in program.definitions and sums_parts(program.definitions[var]):
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
                if sums_parts(eqn) or not multiplied(eqn.outvars[0], program, shapes, users, ends, rounded):
                    return False
            case Shape.REGION:
                if not {i for i, atom in enumerate(eqn.invars) if atom is var} <= multiplied_places(eqn):
                    return False
            case _:
                return False
    return True


def sums_parts(eqn: JaxprEqn) -> bool:
    """Whether an equation is a sum over devices of which each keeps a part: TPUs' compiler leaves these as they are."""
    return KINDS.get(eqn.primitive.name) == "reduce-scatter"


@functools.lru_cache(maxsize=64)
def multiplied_places(eqn: JaxprEqn) -> frozenset[int]:
    """The operands of a loop, by number, that it does not carry, and that it only multiplies, in bfloat16."""
    region = region_of(eqn)
    if region is None or region.chooser is not None:
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
    if region is None or region.chooser is not None or region.tests:
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
    shapes, users = shapes_of(program), program.readers
    ends = {atom for atom in program.outputs if isinstance(atom, Var)} - rounded
    return {var for var in program.inputs if multiplied(var, program, shapes, users, ends, rounded)}
