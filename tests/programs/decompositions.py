"""Runs a step that decomposes matrices in a threaded host library, on one and on two devices; argument 1 says which.

The process may use two cores only, as many as it has devices. The bits on both numbers of devices are compared, and the
values with those of NumPy in float64.
"""

import os
import sys

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # before jax counts them

import jax
import jax.numpy as jnp
import numpy as np

import vnode

X = np.random.default_rng(0).standard_normal((6, 50, 50)).astype(np.float32)
WIDE = np.float64(X)


def on_one_and_two(step, *args, **options):
    """The step's results on two devices, which must be those on one."""
    virtual = vnode.virtualize(step, virtual_nodes=3, **options)
    one = jax.device_get(virtual.on(jax.devices()[:1])(*args))
    for _ in range(20):  # whether threads meet in a way that hangs is chance
        two = jax.device_get(virtual.on(jax.devices()[:2])(*args))
        jax.tree.map(np.testing.assert_array_equal, one, two)
    return two


def eigenvalues_per_example_and_summed():
    def step(x):
        values, vectors = jnp.linalg.eigh(x + x.mT)
        return values, vectors, values.sum(0), vectors.sum(0)

    values, _, total, _ = on_one_and_two(step, X, in_axes=0)
    want = np.linalg.eigvalsh(WIDE + WIDE.mT)
    np.testing.assert_allclose(values, want, atol=1e-3)
    np.testing.assert_allclose(total, want.sum(0), atol=1e-3)


def several_decompositions_at_once():
    def step(x, a):
        values = jnp.linalg.svd(x, compute_uv=False)
        upper = jnp.linalg.qr(x, mode="r")
        solved = jnp.linalg.solve(a, x)
        lower = jnp.linalg.cholesky(x @ x.mT + 50 * jnp.eye(50))
        return values.sum(0), jnp.abs(upper), jnp.abs(upper).sum(0), solved, solved.sum(0), lower, lower.sum(0)

    positive = np.eye(50, dtype=np.float32) * 50 + 0.1 * X
    values, upper, _, solved, _, lower, _ = on_one_and_two(step, X, positive, in_axes=0)
    np.testing.assert_allclose(values, np.linalg.svd(WIDE, compute_uv=False).sum(0), atol=1e-3)
    np.testing.assert_allclose(upper, np.abs(np.linalg.qr(WIDE, mode="r")), atol=1e-3)
    np.testing.assert_allclose(solved, np.linalg.solve(np.float64(positive), WIDE), atol=1e-3)
    np.testing.assert_allclose(lower, np.linalg.cholesky(WIDE @ WIDE.mT + 50 * np.eye(50)), atol=1e-3)


def preconditioners_computed_once_in_a_branch():
    def step(state, x):
        grams = state + (x @ x.mT).mean(0)
        roots = jax.lax.cond(x.sum() < 1e9, lambda: jnp.linalg.eigvalsh(grams), lambda: grams[..., 0])
        return grams, roots, jnp.linalg.svd(grams, compute_uv=False)

    state = np.stack([np.eye(50, dtype=np.float32) * k for k in range(1, 6)])
    _, roots, values = on_one_and_two(step, state, X)
    want = np.linalg.eigvalsh(np.float64(state) + (WIDE @ WIDE.mT).mean(0))
    np.testing.assert_allclose(roots, want, atol=1e-2)
    np.testing.assert_allclose(values[:, ::-1], want, atol=1e-2)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
