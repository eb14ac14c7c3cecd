"""Steps that call multi-threaded host libraries, on as many devices as there are cores and on fewer: nothing waits for
ever, and the bits are the same.

Knows that XLA's CPU backend has a pool of as many threads as the process may use cores. A program that hangs cannot be
stopped from inside, so each runs in a process of its own with two cores, two devices and a time limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.thorough

LIMIT = 180.0
"""Seconds after which a program counts as hanging. It takes some five, most of them to compile."""

SETUP = """
    import jax, jax.numpy as jnp, numpy as np
    import vnode

    x = np.random.default_rng(0).standard_normal((6, 50, 50)).astype(np.float32)
    positive = np.eye(50, dtype=np.float32) * 50 + 0.1 * x

    def on_one_and_two(step, *args, **options):
        virtual = vnode.virtualize(step, virtual_nodes=3, **options)
        one = jax.device_get(virtual.on(jax.devices()[:1])(*args))
        for _ in range(20):  # whether threads meet in a way that hangs is chance
            two = jax.device_get(virtual.on(jax.devices()[:2])(*args))
            jax.tree.map(np.testing.assert_array_equal, one, two)
        return two
"""

PROGRAMS = {
    "eigenvalues_per_example_and_summed": """
        def step(x):
            values, vectors = jnp.linalg.eigh(x + x.mT)
            return values, vectors, values.sum(0), vectors.sum(0)

        values, _, total, _ = on_one_and_two(step, x, in_axes=0)
        want = np.linalg.eigvalsh(np.float64(x) + np.float64(x).mT)
        np.testing.assert_allclose(values, want, atol=1e-3)
        np.testing.assert_allclose(total, want.sum(0), atol=1e-3)
    """,
    "several_decompositions_at_once": """
        def step(x, a):
            values = jnp.linalg.svd(x, compute_uv=False)
            upper = jnp.linalg.qr(x, mode="r")
            solved = jnp.linalg.solve(a, x)
            lower = jnp.linalg.cholesky(x @ x.mT + 50 * jnp.eye(50))
            return values.sum(0), jnp.abs(upper), jnp.abs(upper).sum(0), solved, solved.sum(0), lower, lower.sum(0)

        values, upper, _, solved, _, lower, _ = on_one_and_two(step, x, positive, in_axes=0)
        wide = np.float64(x)
        np.testing.assert_allclose(values, np.linalg.svd(wide, compute_uv=False).sum(0), atol=1e-3)
        np.testing.assert_allclose(upper, np.abs(np.linalg.qr(wide, mode="r")), atol=1e-3)
        np.testing.assert_allclose(solved, np.linalg.solve(np.float64(positive), wide), atol=1e-3)
        np.testing.assert_allclose(lower, np.linalg.cholesky(wide @ wide.mT + 50 * np.eye(50)), atol=1e-3)
    """,
    "preconditioners_computed_once_in_a_branch": """
        def step(state, x):
            grams = state + (x @ x.mT).mean(0)
            roots = jax.lax.cond(x.sum() < 1e9, lambda: jnp.linalg.eigvalsh(grams), lambda: grams[..., 0])
            return grams, roots, jnp.linalg.svd(grams, compute_uv=False)

        state = np.stack([np.eye(50, dtype=np.float32) * k for k in range(1, 6)])
        _, roots, values = on_one_and_two(step, state, x)
        want = np.linalg.eigvalsh(np.float64(state) + (np.float64(x) @ np.float64(x).mT).mean(0))
        np.testing.assert_allclose(roots, want, atol=1e-2)
        np.testing.assert_allclose(values[:, ::-1], want, atol=1e-2)
    """,
}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot give a process fewer cores")
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_many_devices_as_cores(program: str) -> None:
    source = textwrap.dedent(SETUP) + textwrap.dedent(PROGRAMS[program])
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    cores = sorted(os.sched_getaffinity(0))[:2]
    pinned = f"import os; os.sched_setaffinity(0, {cores})\n"
    done = subprocess.run([sys.executable, "-c", pinned + source], env=environment, timeout=LIMIT, check=False)
    assert done.returncode == 0
