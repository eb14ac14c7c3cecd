"""Tests of `vnode.partition`."""
