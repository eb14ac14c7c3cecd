"""Runs a case of the zoo virtualized, and compares everything it returns with the step as the user wrote it.

Knows vnode's public interface and what counts as equal. Must not know any case.

Float64 is switched on around a run, so that both precisions can run in either order; jax keeps separate compiled
programs for them. It is switched for all threads: callbacks run in threads of XLA's. The error of a leaf is measured
in units of what rounding can do to that leaf: one unit in the last place of its greatest value, and what the step
itself makes of arguments that are moved by one unit each. What is zero in exact arithmetic, and is rounding noise in
both results, moves with the arguments as much as it differs; so no tolerance is fitted to a machine.

Compiling takes nearly all of the time, so the runs in float64, which are the most, are compiled without XLA's
expensive optimizations; those in float32 as users compile. References are always compiled without.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vnode

from . import Case, Program, unchanged

ROUNDINGS = 50
"""How many times what one rounding does a result may be off. The zoo's greatest sums have some thousand terms, whose
roundings add up like the square root of their number."""

FEW = 4
"""The same where a step rounds to 16 bits or fewer: nothing is added up in such types."""

MOVED = 3
"""How many times the arguments are moved, each element up or down by chance."""


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
        agrees(case, got, nodes, precision)


def agrees(case: Case, got: Any, nodes: int, precision: str) -> None:
    """Asserts that a result of a case's virtualized step is the reference's."""
    want, *moved = references(case, precision, nodes if build(case, precision).reference else 0)
    compare(got, want, moved, unit(case, precision))


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
def references(case: Case, precision: str, nodes: int) -> list[Any]:
    """The result of the step as the user wrote it, and those for arguments that are moved by a unit of rounding."""
    program = build(case, precision)
    step = program.reference(nodes) if program.reference else program.step
    plain = program.jit is jax.jit and program.outer is unchanged  # jax takes options of outermost functions only
    jit = functools.partial(jax.jit, compiler_options=QUICKLY) if plain else program.jit
    run = program.outer(jit(step))
    rng = np.random.default_rng(0)
    several = [program.args] + [moved_by(program.args, unit(case, precision), rng) for _ in range(MOVED)]
    return [jax.tree.map(host, run(*args)) for args in several]


def unit(case: Case, precision: str) -> float:
    """The unit of rounding of the coarsest type that a case computes in; zero if it rounds nothing."""
    return 0.0 if case.exact else float(jnp.finfo(case.coarsest or precision).eps)


def moved_by(args: Any, size: float, rng: np.random.Generator) -> Any:
    """Arguments whose fractions are moved by `size`, relatively; whole numbers (masks, counts) were never rounded."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        wide = np.asarray(x).astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)
        fraction = np.isfinite(wide) & (wide != np.rint(wide))
        signs = rng.choice([-1.0, 1.0], wide.shape)
        return jnp.asarray(np.multiply(wide, 1.0 + size * signs, out=wide, where=fraction).astype(x.dtype))

    return jax.tree.map(leaf, args)


def compare(got: Any, want: Any, moved: Sequence[Any], size: float) -> None:
    """Asserts that two trees are equal up to rounding, in structure, shapes, types and values.

    Args:
      got: the result.
      want: what it is compared with.
      moved: the same as `want` for arguments moved by a unit of rounding.
      size: that unit.

    Raises:
      AssertionError: they differ, with each leaf that does.
    """
    got_structure, want_structure = jax.tree.structure(got), jax.tree.structure(want)
    assert got_structure == want_structure, f"structure: {got_structure} instead of {want_structure}"
    problems = []
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), *map(jax.tree.leaves, moved), strict=True
    )
    for (path, w), g, *others in leaves:
        problem = difference(host(g), w, others, size)
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


def difference(got: Any, want: Any, moved: Sequence[Any], size: float) -> str | None:
    """What is different, in words, or None."""
    if not isinstance(want, np.ndarray):
        return None if got is want or got == want else f"{got!r} instead of {want!r}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = int(np.sum(got != want))
        return f"{wrong} of {want.size} elements differ: {_head(got)} instead of {_head(want)}" if wrong else None
    wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    size = max(size, float(jnp.finfo(want.dtype).eps)) if size else 0.0
    got, want, kind = got.astype(wide), want.astype(wide), want.dtype.name
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return f"NaN or infinity: {_head(got)} instead of {_head(want)}"
    got, want = np.where(finite, got, 0.0), np.where(finite, want, 0.0)
    error = np.max(np.abs(got - want)[finite], initial=0.0)
    shifts = [np.abs(other.astype(wide) - want)[finite] for other in moved]
    noise = size * np.max(np.abs(want[finite]), initial=0.0) + np.max(shifts, initial=0.0, where=np.isfinite(shifts))
    if error > (FEW if size > 1e-4 else ROUNDINGS) * noise:
        return f"off by {error:.1e}, {error / noise:.1f} roundings, in {kind}: {_head(got)} instead of {_head(want)}"
    return None


def _head(values: np.ndarray) -> str:
    return np.array2string(values.ravel()[:6], precision=6, separator=",")
