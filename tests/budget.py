"""How many examples of a property are drawn: all with VNODE_TEST_ALL=1, else a third of them.

Knows environment variables. For properties whose examples are programs to compile.
"""

import os


def examples(count: int) -> int:
    """The number to draw.

    Args:
      count: of a run of all tests.

    Returns:
      As many with VNODE_TEST_ALL=1, otherwise a third of them.
    """
    return count if os.environ.get("VNODE_TEST_ALL") == "1" else max(count // 3, 1)
