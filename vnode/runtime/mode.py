"""The guarantees that an emission can give.

Knows nothing else. Must not know how they are implemented.
"""

from __future__ import annotations

import enum


class Mode(enum.Enum):
    """The guarantee that an emission gives besides correct results."""

    INVARIANT = "the same bits on any devices"
    FAST = "sums in any order"
    DIFFERENTIABLE = "no loops of run-time length"
