"""A training killed, interrupted, damaged and moved ends where an undisturbed one does, bit by bit.

``python -m tests.chaos`` is the larger one. The undisturbed one runs here, compiled as users compile.
"""

from __future__ import annotations

import os

from tests import chaos


def test_chaos() -> None:
    chaos.chaos(4 if "VNODE_TEST_ALL" not in os.environ else 40, 0, chaos.undisturbed())
