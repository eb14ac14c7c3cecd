"""Parts of a multi-operand identity, which were separated to follow each operand -> one identity again.

Knows equations and descriptions. Must not know programs, nodes, devices, nor who evaluates.

A barrier of several operands says that no result is available before all operands are. So `jax.checkpoint` keeps
compilers from recomputing before the backward pass begins. Barriers of one operand each do not (libtpu 0.0.42: six
layers under `jax.checkpoint` took 1,059 MiB with them, 481 as jax writes it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from jax.extend.core import JaxprEqn

from vnode.operators.description import OperatorDescription
from vnode.operators.equation_copies import evaluate

T = TypeVar("T")
Describe = Callable[[JaxprEqn], OperatorDescription | None]


def is_part(eqn: JaxprEqn, description: OperatorDescription | None) -> bool:
    """Whether an equation is one operand's part of an identity, which can be evaluated with the others."""
    several = eqn.primitive.multiple_results and not eqn.params and len(eqn.invars) == 1
    return several and description is not None and description.part is not None


def group_barrier_parts(
    items: Iterable[T],
    equation: Callable[[T], JaxprEqn | None],
    describe: Describe,
    needs: Callable[[T, Sequence[T]], bool],
) -> Iterator[list[T]]:
    """Groups items, in order: the parts of one original equation together, all others by themselves.

    Args:
      items: the items to evaluate.
      equation: returns an item's equation; None if it evaluates none.
      describe: returns an equation's description.
      needs: returns whether an item without an equation reads results of others.

    Yields:
      One item, or several parts of one equation.
    """
    pending: list[T] = []
    first: Any = None
    for item in items:
        eqn = equation(item)
        if eqn is not None and is_part(eqn, describe(eqn)):
            if pending and (eqn.source_info is not first.source_info or eqn.primitive is not first.primitive):
                yield pending
                pending = []
            first = eqn
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
