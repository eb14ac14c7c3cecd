"""What is cut together with a dimension: the dimensions and factors that it is tied to through a program.

Knows programs, descriptions, and how many equal blocks there are. Must not know meshes, nor which device has what.

A block of a dimension is a range of consecutive indices. An equation that reads a value by such a range has the same
range of one of its factors, and with it of every other value that the factor indexes. What that makes of a
program is hidden units with all weights, activations and gradients that have them; heads, channels, words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Atom, Program, message_about
from vnode.errors import PartitionError
from vnode.operators import Free, LookedUp, Monoid, OperatorDescription, Reduced
from vnode.operators.control import region_of
from vnode.operators.description import Dims


@dataclasses.dataclass(frozen=True, eq=False)
class Tied:
    """What is cut together.

    Attributes:
      dims: for each value that is cut, the dimension.
      factors: for each equation that is cut, by number, the factor.
    """

    dims: Mapping[Var, int]
    factors: Mapping[int, int]


def tied(program: Program, dims: Mapping[Var, int], blocks: int) -> Tied:
    """Follows a dimension through a program, forward and backward.

    Args:
      program: with calls inlined.
      dims: values, and the dimension of each that is cut.
      blocks: how many equal blocks.

    Raises:
      PartitionError: an equation cannot be evaluated block by block; the message says which, where, and why.
    """
    follower = _Follower(program, blocks)
    for var, dim in dims.items():
        follower.give(var, dim, None)
    while follower.waiting:
        for number in follower.readers.get(var := follower.waiting.pop(), ()):
            follower.look(number, var)
    return Tied(follower.dims, dict(sorted(follower.factors.items())))


def taken(program: Program, factors: Mapping[int, int], blocks: int) -> Tied:
    """What single equations cut, along given factors; others are left as they are.

    Args:
      program: with calls inlined.
      factors: for equations, by number, the factor.
      blocks: how many equal blocks.

    Raises:
      PartitionError: as `tied`.
    """
    follower = _Follower(program, blocks)
    for number, factor in factors.items():
        eqn = program.equations[number]
        description = follower.described(eqn)
        if description.sizes[factor] % blocks:
            refuse(eqn, f"has a factor of {description.sizes[factor]} there, which is not {blocks} equal blocks")
        follower.cut(number, eqn, description, factor)
    return Tied(follower.dims, dict(sorted(follower.factors.items())))


class _Follower:
    """Follows one dimension; `dims` and `factors` are what it finds."""

    def __init__(self, program: Program, blocks: int) -> None:
        self.program, self.blocks = program, blocks
        self.dims: dict[Var, int] = {}
        self.factors: dict[int, int] = {}
        self.waiting: list[Var] = []
        self.readers: dict[Var, list[int]] = {}
        for number, eqn in enumerate(program.equations):
            for atom in dict.fromkeys(a for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var)):
                self.readers.setdefault(atom, []).append(number)

    def give(self, var: Var, dim: int, eqn: JaxprEqn | None) -> None:
        """Says which dimension of a value is cut."""
        if var in self.dims:
            if self.dims[var] != dim:
                facts = [f"a value of shape {var.aval.shape} is cut along dimensions {self.dims[var]} and {dim}"]
                if eqn is None:
                    raise PartitionError(f"one value is given twice: {facts[0]}")
                refuse(eqn, "ties a dimension to another one of the same value", facts)
            return
        self.dims[var] = dim
        self.waiting.append(var)

    def look(self, number: int, var: Var) -> None:
        """Follows a value that is cut through one equation."""
        eqn = self.program.equations[number]
        description = self.described(eqn)
        found: dict[int, None] = {}
        for atoms, several in ((eqn.invars, description.operands), (eqn.outvars, description.results)):
            for atom, dims in zip(atoms, several, strict=True):
                if atom is var:
                    found[self.major(eqn, description, dims, self.dims[var])] = None
        for factor in found:
            self.cut(number, eqn, description, factor)

    def cut(self, number: int, eqn: JaxprEqn, description: OperatorDescription, factor: int) -> None:
        """Cuts an equation along one of its factors."""
        if self.factors.setdefault(number, factor) != factor:
            sizes = [description.sizes[f] for f in (self.factors[number], factor)]
            refuse(eqn, f"would be cut along two of its factors at once, of {sizes[0]} and of {sizes[1]}")
        self.check(eqn, description, factor)
        for atoms, several in ((eqn.invars, description.operands), (eqn.outvars, description.results)):
            for atom, dims in zip(atoms, several, strict=True):
                self.follow(eqn, description, factor, atom, dims)

    def described(self, eqn: JaxprEqn) -> OperatorDescription:
        """The description of an equation that is to be cut."""
        if region_of(eqn) is not None:
            refuse(eqn, "is a loop or a branch, whose body would have to be cut")
        description = self.program.describe(eqn)
        if description is None:
            refuse(eqn, "has no description, or is in blocks already")
        if eqn.effects:
            refuse(eqn, "has an effect, and would have it once a block")
        return description

    def major(self, eqn: JaxprEqn, description: OperatorDescription, dims: Dims, dim: int) -> int:
        """The factor whose ranges are ranges of a dimension."""
        major = next((f for f in dims[dim] if description.sizes[f] > 1), None)
        if major is None or description.sizes[major] % self.blocks:
            size = 1 if major is None else description.sizes[major]
            refuse(eqn, f"has a factor of {size} there, which is not {self.blocks} equal blocks")
        return major

    def check(self, eqn: JaxprEqn, description: OperatorDescription, factor: int) -> None:
        """Checks that an equation gives independent results, or pieces, for each range of a factor."""
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
        """Cuts another value of an equation."""
        having = [d for d, dim in enumerate(dims) if factor in dim]
        if not having or not isinstance(atom, Var):
            return
        if len(having) > 1:
            refuse(eqn, "has it as two dimensions of one value")
        (dim,) = having
        if next(f for f in dims[dim] if description.sizes[f] > 1) != factor:
            shape = atom.aval.shape
            refuse(eqn, f"puts it behind other indices: blocks would lie apart in dimension {dim} of {shape}")
        self.give(atom, dim, eqn)


def refuse(eqn: JaxprEqn, why: str, facts: Sequence[str] = ()) -> NoReturn:
    """Says why an equation cannot be evaluated block by block."""
    raise PartitionError(
        message_about(
            eqn,
            f"A dimension cannot be cut into blocks: {eqn.primitive.name!r} {why}.",
            facts=facts,
            remedies=["cut another dimension", "or share the samples unevenly instead: nodes in different numbers"],
        )
    )


def partial(description: OperatorDescription, factor: int) -> Monoid | None:
    """How the results of an equation's blocks combine; None if each is a block of the whole."""
    split = description.factors[factor].split
    return split.partial((factor,))
