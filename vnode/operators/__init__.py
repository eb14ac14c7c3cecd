"""One description per operator: `describe` reads them, `register` adds a user's own.

Knows jax only. Importing this package fills the registry from the families beside this file, but for those in `RARE`.
"""

from vnode.operators import (  # noqa: F401
    contraction,
    elementwise,
    foreign_calls,
    host_transfer,
    indexing,
    linalg,
    ordering_barrier,
    random,
    reduce,
    shape,
    sharding,
    sorting,
    structure,
    windows,
)
from vnode.operators.description import (
    Algebra,
    Factor,
    Factors,
    OperatorDescription,
    Role,
    Work,
)
from vnode.operators.equation_copies import cast, evaluate, evaluate_wide
from vnode.operators.monoid import Monoid
from vnode.operators.registry import advice, describe, import_when_met, kind, kind_to_keep, register
from vnode.operators.splits import Free, LookedUp, Move, Prefix, Reduced, Shifted, Whole, Windowed

__all__ = [
    "Algebra",
    "Factor",
    "Factors",
    "Free",
    "LookedUp",
    "Monoid",
    "Move",
    "OperatorDescription",
    "Prefix",
    "Reduced",
    "Role",
    "Shifted",
    "Whole",
    "Windowed",
    "Work",
    "advice",
    "cast",
    "describe",
    "evaluate",
    "evaluate_wide",
    "kind",
    "kind_to_keep",
    "register",
]

RARE = {
    "jax._src.cudnn": "vnode.operators.attention",
    "jax._src.custom_partitioning": "vnode.operators.custom_partitioning",
    "jax._src.export": "vnode.operators.exported",
    "jax._src.pallas.pallas_call": "vnode.operators.pallas",
    "jax.experimental.sparse": "vnode.operators.sparse",
}
"""Families of kernels that few programs have, by the part of jax that makes their primitives."""

import_when_met(RARE)


def __dir__() -> list[str]:
    return sorted(__all__)
