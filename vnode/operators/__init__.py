"""One description per operator: `describe` reads them, `register` adds a user's own.

Knows jax only. Importing this package fills the registry from the families beside this file.
"""

from vnode.operators import (  # noqa: F401
    aside,
    attention,
    contraction,
    custom_partitioning,
    elementwise,
    exported,
    host,
    indexing,
    linalg,
    order,
    pallas,
    postponed,
    random,
    reduce,
    shape,
    sharding,
    sparse,
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
from vnode.operators.evaluate import cast, evaluate, evaluate_wide
from vnode.operators.monoid import Monoid
from vnode.operators.registry import advice, describe, kind, kind_to_keep, register
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


def __dir__() -> list[str]:
    return sorted(__all__)
