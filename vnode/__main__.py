"""`python -m vnode`: the command line.

Knows where the command line is. Must not know what it does.
"""

from vnode.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
