"""How many examples of a property are drawn: as many as it says, or a third of them in the usual run.

Knows which run it is by what `tests.conftest` wrote down. For properties whose examples are programs to compile.
"""

import os

THOROUGH = "VNODE_TEST_THOROUGH"
"""The environment variable that is ``"1"`` in a run that does not leave out thorough tests."""


def examples(count: int) -> int:
    """The number to draw.

    Args:
      count: of a thorough run.

    Returns:
      As many, or a third in the usual run.
    """
    return count if os.environ.get(THOROUGH) == "1" else max(count // 3, 1)
