"""How many examples of a property are drawn: all with VNODE_TEST_ALL=1, else half of them; a third in the usual run.

Knows which run it is by what `tests.conftest` wrote down. For properties whose examples are programs to compile.
"""

import os

THOROUGH = "VNODE_TEST_THOROUGH"
"""The environment variable that is ``"1"`` in a run that does not leave out thorough tests."""


def examples(count: int) -> int:
    """The number to draw.

    Args:
      count: of a run of all tests.

    Returns:
      As many, half of them in a thorough run, or a third in the usual run.
    """
    if os.environ.get("VNODE_TEST_ALL") == "1":
        return count
    return max(count // (2 if os.environ.get(THOROUGH) == "1" else 3), 1)
