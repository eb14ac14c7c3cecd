"""Benchmarks: vnode against the other ways of running a large batch in small pieces.

`python -m benchmarks` runs them and prints tables. Nothing in here is imported by vnode, and nothing in here is a test.
"""
