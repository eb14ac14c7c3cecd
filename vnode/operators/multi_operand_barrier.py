"""Parts of a multi-operand identity, which were separated to follow each operand -> one identity again.

Knows equations and descriptions. Must not know programs, nodes, devices, nor who evaluates.

    y, z = barrier(a, b)   ->   y = part(a);  z = part(b)   ->   y, z = barrier(a, b)        part: one `BarrierPart`

A barrier of several operands says that no result is available before all operands are. So `jax.checkpoint` keeps
compilers from recomputing before the backward pass begins. Barriers of one operand each do not (libtpu 0.0.42: six
layers under `jax.checkpoint` took 1,059 MiB with them, 481 as jax writes it).

The parts of one barrier share a primitive, which no other equation has. It stays with an equation whatever a pass
replaces in it: operands, results, source line. The evaluation joins parts again, so no traced jaxpr has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from jax import lax
from jax.extend.core import JaxprEqn, Primitive

from vnode.operators.description import OperatorDescription
from vnode.operators.equation_copies import evaluate

T = TypeVar("T")
Describe = Callable[[JaxprEqn], OperatorDescription | None]


class BarrierPart(Primitive):
    """The primitive of the parts of one barrier: of the equations that were separated from it, one per operand.

    Args:
      name: that of the barrier's own primitive, by which it is described.
    """

    multiple_results = True

    def bind(self, *operands: Any) -> list[Any]:
        """A barrier of jax on some operands."""
        return list(lax.optimization_barrier(operands))


def barrier_of(eqn: JaxprEqn | None) -> BarrierPart | None:
    """The primitive that the parts of a barrier share; None if an equation is no part of one."""
    return eqn.primitive if eqn is not None and isinstance(eqn.primitive, BarrierPart) else None


def group_barrier_parts(
    items: Iterable[T],
    equation: Callable[[T], JaxprEqn | None],
    needs: Callable[[T, Sequence[T]], bool],
) -> Iterator[list[T]]:
    """Groups items, in order: the parts of one barrier together, all others by themselves.

    Args:
      items: the items to evaluate.
      equation: returns an item's equation; None if it evaluates none.
      needs: returns whether an item without an equation reads results of others.

    Yields:
      One item, or several parts of one barrier.
    """
    pending: list[T] = []
    barrier: BarrierPart | None = None
    for item in items:
        eqn = equation(item)
        own = barrier_of(eqn)
        if own is not None:
            if pending and own is not barrier:
                yield pending
                pending = []
            barrier = own
            pending.append(item)
            continue
        if pending and (eqn is not None or needs(item, pending)):
            yield pending
            pending = []
        yield [item]
    if pending:
        yield pending


def evaluate_together(eqn: JaxprEqn, describe: Describe, operands: Sequence[Any], platform: str) -> list[Any]:
    """Evaluates an identity of several operands.

    Args:
      eqn: one of the parts.
      describe: returns an equation's description.
      operands: operands of all parts, in order.
      platform: the platform that the program is compiled for, such as ``"cpu"``.

    Returns:
      The results of all parts.
    """
    description = describe(eqn)
    assert description is not None
    return evaluate(description, eqn, operands, description.sizes, {}, platform)
