"""One description per operator: `describe` reads them, `register` adds a user's own.

Knows jax only. Importing this package fills the registry from the families beside this file.
"""

from vnode.operators import (  # noqa: F401
    contraction,
    elementwise,
    host,
    indexing,
    linalg,
    order,
    random,
    reduce,
    shape,
    sharding,
    structure,
    windows,
)
from vnode.operators.description import (
    Factors,
    Monoid,
    OperatorDescription,
    advice,
    cast,
    describe,
    evaluate,
    evaluate_wide,
    kind,
    register,
)

__all__ = [
    "Factors",
    "Monoid",
    "OperatorDescription",
    "advice",
    "cast",
    "describe",
    "evaluate",
    "evaluate_wide",
    "kind",
    "register",
]
