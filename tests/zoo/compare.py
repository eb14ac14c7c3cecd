"""Runs a case of the zoo virtualized, and compares everything it returns with the step as the user wrote it.

Knows vnode's public interface and what counts as equal. Must not know any case.

Float64 is switched on around a run, so that both precisions can run in either order; jax keeps separate compiled
programs for them. It is switched for all threads: callbacks run in threads of XLA's. The error of a leaf is measured
against the greatest absolute value of that leaf, with a floor far below anything a step computes with: what is zero
in exact arithmetic is rounding noise in both.

Compiling takes nearly all of the time, so the runs in float64, which are the most, are compiled without XLA's
expensive optimizations; those in float32 as users compile. References are always compiled without.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vnode

from . import Case, Program, unchanged

HALF = 2e-2
"""Error allowed in values of 16 bits or fewer."""


QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""How references are compiled. Before jax 0.11 there was another choice that takes two thirds of the time."""
if jax.__version_info__ < (0, 11):
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


@contextlib.contextmanager
def running_in(precision: str) -> Iterator[None]:
    """Switches float64, and with it quick compilation, on or off in every thread (as a context jax does so in one)."""
    names = ("jax_enable_x64", "jax_disable_most_optimizations")
    before = {name: jax.config.read(name) for name in names}
    try:
        for name in names:
            jax.config.update(name, precision == "float64")
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def check(case: Case, nodes: int, devices: int, precision: str) -> None:
    """Asserts that a case gives the reference's results on so many nodes and devices, or is refused as it should be.

    Args:
      case: the case.
      nodes: V.
      devices: how many of the machine's devices, from the first.
      precision: ``"float64"`` or ``"float32"``.

    Raises:
      AssertionError: results differ, or the step was (or was not) refused.
    """
    with running_in(precision):
        program = build(case, precision)
        if case.expect is not None:
            refusal(case, program, nodes, devices)
            return
        try:
            got = call(case, program, nodes, devices)
        except vnode.VnodeError:
            if case.may_refuse:
                return
            raise
        want = reference(case, precision, nodes if program.reference else 0)
        compare(got, want, {"float64": case.float64 or 0.0, "float32": case.float32})


def call(case: Case, program: Program, nodes: int, devices: int) -> Any:
    """The result of the virtualized step."""
    virtualize = vnode.nnx.virtualize if case.nnx else vnode.virtualize
    step = virtualize(program.step, virtual_nodes=nodes, **program.options)
    return program.outer(step.on(jax.devices()[:devices]))(*program.args)


def refusal(case: Case, program: Program, nodes: int, devices: int) -> None:
    """Asserts that the virtualized step raises the right error."""
    name, pattern = case.expect or ("", "")
    import pytest

    with pytest.raises(getattr(vnode, name), match=pattern):
        call(case, program, nodes, devices)


@functools.lru_cache(maxsize=8)
def build(case: Case, precision: str) -> Program:
    """The program of a case in a precision."""
    assert jax.config.jax_enable_x64 == (precision == "float64")
    return case.make()


@functools.lru_cache(maxsize=8)
def reference(case: Case, precision: str, nodes: int) -> Any:
    """The result of the step as the user wrote it."""
    program = build(case, precision)
    step = program.reference(nodes) if program.reference else program.step
    plain = program.jit is jax.jit and program.outer is unchanged  # jax takes options of outermost functions only
    jit = functools.partial(jax.jit, compiler_options=QUICKLY) if plain else program.jit
    return jax.tree.map(host, program.outer(jit(step))(*program.args))


def compare(got: Any, want: Any, tolerances: dict[str, float]) -> None:
    """Asserts that two trees are equal up to rounding, in structure, shapes, types and values."""
    got_structure, want_structure = jax.tree.structure(got), jax.tree.structure(want)
    assert got_structure == want_structure, f"structure: {got_structure} instead of {want_structure}"
    problems = []
    for (path, w), g in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        problem = difference(host(g), w, tolerances)
        if problem:
            problems.append(f"{jax.tree_util.keystr(path) or 'result'}: {problem}")
    assert not problems, "\n".join(problems)


def host(leaf: Any) -> Any:
    """A numpy array of a leaf, key data for keys; leaves that are no arrays stay as they are."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int):
        return leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def difference(got: Any, want: Any, tolerances: dict[str, float]) -> str | None:
    """What is different, in words, or None."""
    if not isinstance(want, np.ndarray):
        return None if got is want or got == want else f"{got!r} instead of {want!r}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = int(np.sum(got != want))
        return f"{wrong} of {want.size} elements differ: {_head(got)} instead of {_head(want)}" if wrong else None
    wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    got, want, kind = got.astype(wide), want.astype(wide), want.dtype.name
    special = ~np.isfinite(want)
    if not np.array_equal(got[special], want[special], equal_nan=True) or not np.isfinite(got[~special]).all():
        return f"NaN or infinity: {_head(got)} instead of {_head(want)}"
    tolerance = tolerances.get(kind.replace("complex128", "float64").replace("complex64", "float32"), HALF)
    scale = np.max(np.abs(want[~special]), initial=0.0)
    floor = 1e-5 if kind in ("float64", "complex128") else 1e-3
    error = np.max(np.abs(got - want)[~special], initial=0.0)
    if error > tolerance * max(scale, floor):
        return f"relative error {error / max(scale, floor):.1e} in {kind}: {_head(got)} instead of {_head(want)}"
    return None


def _head(values: np.ndarray) -> str:
    return np.array2string(values.ravel()[:6], precision=6, separator=",")
