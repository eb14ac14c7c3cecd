"""Equations -> their costs: operations by kind and bytes; costs add up.

Knows descriptions, and the types of an equation's operands. Must not know regions, machines, nor how costs are used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from vnode.operators.description import Algebra, Dims, OperatorDescription, Role, Sizes
from vnode.operators.memory_spaces import is_on_host
from vnode.operators.splits import LookedUp


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a computation, on any machine.

    Attributes:
      matrix: scalar operations of contractions, which matrix units perform, by the operands' dtype.
      vector: all other scalar operations.
      transcendental: how many of those are exponentials, logarithms, roots and the like.
      read: bytes of operands.
      written: bytes of results.

    Example:
      >>> product = Cost(matrix={"bfloat16": 100}, read=60, written=20)
      >>> (2 * product + Cost(vector=10)).flops
      210
    """

    matrix: Mapping[str, int] = dataclasses.field(default_factory=dict)
    vector: int = 0
    transcendental: int = 0
    read: int = 0
    written: int = 0

    @property
    def flops(self) -> int:
        """Scalar operations of all kinds."""
        return sum(self.matrix.values()) + self.vector

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            {t: self.matrix.get(t, 0) + other.matrix.get(t, 0) for t in {**self.matrix, **other.matrix}},
            self.vector + other.vector,
            self.transcendental + other.transcendental,
            self.read + other.read,
            self.written + other.written,
        )

    def __mul__(self, times: int) -> Cost:
        if times == 0:
            return Cost()
        return Cost(
            {t: n * times for t, n in self.matrix.items()},
            self.vector * times,
            self.transcendental * times,
            self.read * times,
            self.written * times,
        )

    __rmul__ = __mul__


def described_cost(
    eqn: JaxprEqn, description: OperatorDescription, sizes: Sizes | None = None, share: float = 1
) -> Cost:
    """The cost of an equation, which reads each operand once and writes each result once.

    Only the selected elements of an operand that is indexed or sliced are read. Only the updates of a result that is
    updated at indices are written, since compilers update in place where they can.

    Args:
      eqn: no call, loop or branch.
      description: its description.
      sizes: the factor sizes of a copy; by default of the whole equation.
      share: the copy's share of the operations; exactly all by default.
    """
    counted = description.operations
    operations = round(counted.operations * share)
    contracts = description.has(Algebra.CONTRACTS)
    read, written = bytes_of(eqn, description, sizes)
    return Cost(
        matrix={str(eqn.invars[0].aval.dtype): operations} if contracts else {},
        vector=0 if contracts else operations,
        transcendental=round(counted.transcendental * share),
        read=read,
        written=written,
    )


def bytes_of(eqn: JaxprEqn, description: OperatorDescription, sizes: Sizes | None = None) -> tuple[int, int]:
    """The bytes that an equation reads and writes, as `described_cost` counts them.

    Args:
      eqn: no call, loop or branch.
      description: its description.
      sizes: the factor sizes of a copy; by default of the whole equation.
    """

    def bytes_held(atom: Any, shape: tuple[int, ...]) -> int:
        return (
            0 if is_on_host(atom.aval) else math.prod(shape) * getattr(getattr(atom.aval, "dtype", None), "itemsize", 0)
        )

    own: dict[Any, int] = {}  # a value that is read twice counts once
    operands = [bytes_held(atom, description.operand_shape(i, sizes)) for i, atom in enumerate(eqn.invars)]
    results = sum(bytes_held(var, description.result_shape(i, sizes)) for i, var in enumerate(eqn.outvars))
    places = {f for f, x in enumerate(description.factors) if isinstance(x.split, LookedUp) and x.split.monoid is None}
    put = [i for i, dims in enumerate(description.operands) if places and not has_any(dims, places)]
    terms = sum(operands[i] for i in put if description.roles.get(i) is not Role.INDEX)
    for i, (atom, dims) in enumerate(zip(eqn.invars, description.operands, strict=True)):
        looked_up = any(isinstance(description.factors[f].split, LookedUp) for dim in dims for f in dim)
        moved = description.has(Algebra.MOVES) and not places  # and then each element of a result is one of an operand
        found = terms if looked_up and places else results if looked_up or moved else operands[i]
        key = i if isinstance(atom, Literal) else atom
        own[key] = max(own.get(key, 0), min(found, operands[i]))
    return sum(own.values()), min(results, terms) if places else results


def has_any(dims: Dims, factors: Set[int]) -> bool:
    return any(f in factors for dim in dims for f in dim)


def nbytes(aval: Any) -> int:
    """Bytes of an array of a type in device memory: none if it is in host memory."""
    return 0 if is_on_host(aval) else all_bytes(aval)


def all_bytes(aval: Any) -> int:
    """Bytes of an array of a type, in any memory."""
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)
