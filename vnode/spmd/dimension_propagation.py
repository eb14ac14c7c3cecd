"""Dimension of some values -> all dimensions and factors of a program that are sharded together with it.

Knows programs, descriptions, loops and branches, and how many equal blocks there are. Must not know meshes, nor which
device has what.

    {w: dimension 1} in h = relu(x @ w);  y = h @ v   ->   w and h: dimension 1, v: dimension 0;  y is a sum over blocks

A block of a dimension is a range of consecutive indices. An equation that reads a value in such a range has the same
range of one of its factors, and so of every other value that the factor indexes. Hidden units, for example, are tied to
all weights, activations and gradients that have them; heads, channels and words likewise. Operands, carries and results
of a loop or branch are cut inside as outside.

An equation that would be cut along two factors, such as a product of hidden units with a recurrent weight, is cut along
the one that needs fewer bytes of communication. Operands and results with the other factor stay unsharded.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Atom, Program, message_about
from vnode.errors import PartitionError
from vnode.operators import Free, LookedUp, Monoid, OperatorDescription, Reduced
from vnode.operators.control_flow import Region, region_of
from vnode.operators.description import Dims
from vnode.spmd.op_sharding import itemsize

Place = tuple[Program, int]
"""An equation: its program, the outer one or a body, and its number there."""


@dataclasses.dataclass(frozen=True, eq=False)
class TiedDimensions:
    """Dimensions and factors that are cut together.

    Attributes:
      dims: for each value that is cut, its dimension, also in bodies.
      factors: for each equation that is cut, by number, its factor.
      bodies: for each loop or branch that is cut, by number, one entry for each of `Program.bodies`.
    """

    dims: Mapping[Var, int]
    factors: Mapping[int, int]
    bodies: Mapping[int, tuple[TiedDimensions, ...]]


def propagate_dimension(program: Program, dims: Mapping[Var, int], blocks: int) -> TiedDimensions:
    """Propagates a dimension through a program, forward and backward.

    Args:
      program: with calls inlined.
      dims: values, each with the dimension that is cut.
      blocks: number of equal blocks.

    Raises:
      PartitionError: an equation cannot be evaluated block by block; the message has the equation, its place and the
        reason.
    """
    decided = _Decisions({}, set())
    while True:
        try:
            return _Follower(program, blocks, decided).follow_all(dims)
        except _DecisionChanged:  # propagation starts again with the new decision
            continue


@dataclasses.dataclass(frozen=True, eq=False)
class _Decisions:
    """Decisions where two propagated dimensions meet.

    Attributes:
      dims: for values that loops and branches return, which of two dimensions is cut.
      excluded: for equations, factors that are not cut.
    """

    dims: dict[Var, int]
    excluded: set[tuple[Place, int]]


class _DecisionChanged(Exception):
    """A decision contradicts an earlier propagation."""


class _Follower:
    """Propagates one dimension; the result is in `dims` and `factors`.

    Args:
      program: the outer program.
      blocks: number of blocks.
      decided: decisions, extended in place.
    """

    def __init__(self, program: Program, blocks: int, decided: _Decisions) -> None:
        self.program, self.blocks, self.decided = program, blocks, decided
        self.dims: dict[Var, int] = {}
        self.factors: dict[Place, int] = {}
        self.entered: dict[Place, None] = {}
        self.waiting: collections.deque[Var] = collections.deque()  # nearest to the start first
        self.readers: dict[Var, list[Place]] = {}
        self.links: dict[Var, list[tuple[JaxprEqn, Var, int]]] = {}
        self.register(program)

    def follow_all(self, dims: Mapping[Var, int]) -> TiedDimensions:
        """Propagates the dimensions of values through the program."""
        self.dims.update(dims)
        self.waiting.extend(dims)
        while self.waiting:
            for place in self.readers.get(var := self.waiting.popleft(), ()):
                self.visit(place, var)
            for eqn, other, further in self.links.get(var, ()):
                self.link(eqn, var, other, self.dims[var] + further)
        return self.result(self.program)

    def result(self, program: Program) -> TiedDimensions:
        """The dimensions and factors that are cut in a program."""
        factors = {number: factor for (of, number), factor in self.factors.items() if of is program}
        inside = sorted(number for of, number in self.entered if of is program)
        bodies = {n: tuple(map(self.result, program.bodies(program.equations[n]))) for n in inside}
        return TiedDimensions(self.dims, dict(sorted(factors.items())), bodies)

    def register(self, program: Program) -> None:
        for number, eqn in enumerate(program.equations):
            for atom in dict.fromkeys(a for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var)):
                self.readers.setdefault(atom, []).append((program, number))

    def assign_dim(self, var: Var, dim: int) -> None:
        """Assigns a value the dimension in which it is stored in blocks; the first assignment holds.

        Equations that have another dimension convert the value.
        """
        if var not in self.dims:
            self.dims[var] = self.decided.dims.get(var, dim)
            self.waiting.append(var)

    def visit(self, place: Place, var: Var) -> None:
        """Propagates a cut value through one equation."""
        program, number = place
        eqn = program.equations[number]
        region = region_of(eqn)
        if region is not None:
            if place not in self.entered:
                self.enter(place, region)
            return
        description = self.described(place)
        found: dict[int, None] = {}
        for atoms, several in ((eqn.invars, description.operands), (eqn.outvars, description.results)):
            for atom, dims in zip(atoms, several, strict=True):
                if atom is var:
                    found[self.major_factor(eqn, description, dims, self.dims[var])] = None
        for factor in found:
            self.cut(place, description, factor)

    def cut(self, place: Place, description: OperatorDescription, factor: int) -> None:
        """Cuts an equation along a factor, unless another factor needs less communication."""
        program, number = place
        eqn = program.equations[number]
        if (place, factor) in self.decided.excluded:
            return
        before = self.factors.get(place, factor)
        if before != factor:
            worse = max((factor, before), key=lambda f: self.gathered_bytes(eqn, description, f))
            self.decided.excluded.add((place, worse))
            if worse == before:
                raise _DecisionChanged
            return
        self.factors[place] = factor
        self.check(eqn, description, factor)
        for atoms, several in ((eqn.invars, description.operands), (eqn.outvars, description.results)):
            for atom, dims in zip(atoms, several, strict=True):
                self.follow(eqn, description, factor, atom, dims)

    def gathered_bytes(self, eqn: JaxprEqn, description: OperatorDescription, factor: int) -> int:
        """Bytes that an equation cut along a factor communicates: gathered, or reduced."""
        gathered = 0
        for atoms, several in ((eqn.invars, description.operands), (eqn.outvars, description.results)):
            for atom, dims in zip(atoms, several, strict=True):
                if isinstance(atom, Var) and atom in self.dims and dim_of(factor, dims) != self.dims[atom]:
                    gathered += nbytes(atom)
        monoid = partial(description, factor)
        return gathered + (0 if monoid is None else sum(map(nbytes, eqn.outvars)))

    # Loops and branches

    def enter(self, place: Place, region: Region) -> None:
        """Ties operands and results of a loop or branch to the inputs and outputs of its bodies."""
        program, number = place
        eqn = program.equations[number]
        self.entered[place] = None
        if eqn.effects:
            refuse(eqn, "has an effect, which every device would repeat")
        for k, (body, inputs) in enumerate(zip(program.bodies(eqn), region.inputs, strict=True)):
            self.register(body)
            given = dict(zip(inputs, body.inputs, strict=True))
            for i, var in given.items():
                self.tie(eqn, eqn.invars[i], var, -1 if i in region.scanned else 0)
            if k < region.tests:
                continue
            for j, (atom, var) in enumerate(zip(body.outputs, eqn.outvars, strict=True)):
                if j < len(region.carried):
                    self.tie(eqn, given[region.carried[j]], atom, 0)
                    self.tie(eqn, var, atom, 0)
                else:
                    self.tie(eqn, var, atom, -1 if region.stacks else 0)

    def tie(self, eqn: JaxprEqn, outer: Atom, inner: Atom, further: int) -> None:
        if isinstance(outer, Var) and isinstance(inner, Var):
            for var, other, step in ((outer, inner, further), (inner, outer, -further)):
                self.links.setdefault(var, []).append((eqn, other, step))
                if var in self.dims:
                    self.waiting.append(var)

    def link(self, eqn: JaxprEqn, var: Var, other: Var, dim: int) -> None:
        """Cuts a body's value as the outer value."""
        if dim < 0:
            refuse(eqn, "goes along it, one index after the other", [f"a value of shape {var.aval.shape}"])
        self.assign_dim(other, dim)
        if self.dims[other] != dim:
            if other not in self.decided.dims:
                self.decided.dims[other] = dim
                raise _DecisionChanged
            facts = [f"a value of shape {other.aval.shape} is cut along dimensions {self.dims[other]} and {dim}"]
            refuse(eqn, "ties it to another dimension of the same value", facts)

    # Single equations

    def described(self, place: Place) -> OperatorDescription:
        """The description of an equation that is cut."""
        program, number = place
        eqn = program.equations[number]
        if region_of(eqn) is not None:
            refuse(eqn, "is a loop or a branch, and has no factors")
        description = program.describe(eqn)
        if description is None:
            refuse(eqn, "has no description, or is in blocks already")
        if eqn.effects:
            refuse(eqn, "has an effect, which every block would repeat")
        return description

    def major_factor(self, eqn: JaxprEqn, description: OperatorDescription, dims: Dims, dim: int) -> int:
        """The factor whose ranges are ranges of a dimension."""
        major = next((f for f in dims[dim] if description.sizes[f] > 1), None)
        if major is None or description.sizes[major] % self.blocks:
            size = 1 if major is None else description.sizes[major]
            refuse(eqn, f"has a factor of {size} there, which is not {self.blocks} equal blocks")
        return major

    def check(self, eqn: JaxprEqn, description: OperatorDescription, factor: int) -> None:
        """Checks that each range of a factor gives independent results, or partial ones."""
        split = description.factors[factor].split
        if isinstance(split, Free | Reduced | LookedUp):
            return
        why = {
            "Windowed": "slides a window along it: a block needs some of its neighbours",
            "Shifted": "moves elements along it, out of one block into another",
            "Prefix": "makes running values along it: a block needs those before",
        }.get(type(split).__name__, "needs all of its indices at once")
        refuse(eqn, why)

    def follow(self, eqn: JaxprEqn, description: OperatorDescription, factor: int, atom: Atom, dims: Dims) -> None:
        """Cuts another operand or result of an equation."""
        having = [d for d, dim in enumerate(dims) if factor in dim]
        if not having or not isinstance(atom, Var):
            return
        if len(having) > 1:
            refuse(eqn, "has it in two dimensions of one value")
        (dim,) = having
        if next(f for f in dims[dim] if description.sizes[f] > 1) != factor:
            shape = atom.aval.shape
            refuse(eqn, f"puts it behind other indices: blocks would lie apart in dimension {dim} of {shape}")
        self.assign_dim(atom, dim)


def refuse(eqn: JaxprEqn, why: str, facts: Sequence[str] = ()) -> NoReturn:
    """Raises an error that says why an equation cannot be evaluated block by block."""
    raise PartitionError(
        message_about(
            eqn,
            f"A dimension cannot be cut into blocks: {eqn.primitive.name!r} {why}.",
            facts=facts,
            remedies=["cut another dimension", "or divide the examples unevenly instead: step.on(devices, counts=...)"],
        )
    )


def partial(description: OperatorDescription, factor: int) -> Monoid | None:
    """The monoid that combines the results of an equation's blocks; None if each is a block of the result."""
    split = description.factors[factor].split
    return split.partial((factor,))


def dim_of(factor: int, dims: Dims) -> int | None:
    """The dimension of a value that has a factor."""
    return next((d for d, dim in enumerate(dims) if factor in dim), None)


def nbytes(atom: Atom) -> int:
    """Bytes of a whole value."""
    return math.prod(atom.aval.shape) * itemsize(atom.aval.dtype)
