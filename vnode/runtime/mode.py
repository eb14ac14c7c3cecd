"""What is asked of an emission.

Knows nothing else. Must not know how it is carried out.
"""

from __future__ import annotations

import enum


class Mode(enum.Enum):
    """What is asked of an emission besides the right result."""

    INVARIANT = "the same bits on any devices"
    FAST = "sums in any order"
    DIFFERENTIABLE = "no loops of run-time length"
