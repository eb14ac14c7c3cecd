"""Random programs: whole-batch functions that are checked virtualized against un-virtualized.

`program` is what a program is and how it reads as Python source, `generate` makes one from a seed, `check` runs it
both ways, `minimise` makes a failing one small, and ``python -m tests.random_programs`` does all of it many times.
"""
