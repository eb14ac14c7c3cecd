"""Gradients of windows that are split over space: XLA's own partitioner computes wrong ones, ours right ones.

Knows the two programs in which the fault was found. XLA's results are asserted to be wrong *still*: a newer jaxlib in
which they are right fails here, and then `partition="xla"` need not refuse such splits any longer. The reference is
the program on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.analysis.program import inline
from vnode.operators import Windowed
from vnode.spmd.layout import from_spec
from vnode.spmd.sharded_program import flow_over_mesh, long_axes
from vnode.spmd.sharding_flow import follow

SPACE = PartitionSpec(None, "space")

MENDED = (
    "XLA's partitioner computes this gradient rightly now ({version}, off by {error:.1e}): its refusal of windows that "
    "are split over space may be lifted"
)


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, KERNEL, COTANGENT = numbers(4, 32, 32, 8, seed=0), numbers(3, 3, 8, 8, seed=1), numbers(4, 32, 32, 8, seed=2)


def convolved(x: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


def of_kernel(constrain: Callable[[Any], Any], x: Any, kernel: Any, cotangent: Any) -> Any:
    """A convolution's gradient with respect to its kernel."""
    return jax.vjp(lambda w: constrain(convolved(constrain(x), w)), kernel)[1](constrain(cotangent))[0]


def of_pool(constrain: Callable[[Any], Any], x: Any, cotangent: Any) -> Any:
    """A pool's gradient."""
    return constrain(jax.vjp(lambda x: constrain(pooled(x)), constrain(x))[1](constrain(cotangent))[0])


CASES = {
    "convolution, beside an idle axis": (of_kernel, (X, KERNEL, COTANGENT), {"idle": 2, "space": 4}),
    "pool, on two devices": (of_pool, (X, COTANGENT), {"space": 2}),
}


def error_of(got: Any, want: Any) -> float:
    """The greatest difference, relative to the greatest number."""
    return float(np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(np.asarray(want)).max())


def mesh_of(axes: dict[str, int]) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


@pytest.mark.parametrize("case", CASES)
def test_xla_is_wrong_still(case: str) -> None:
    gradient, operands, axes = CASES[case]
    sharding = NamedSharding(mesh_of(axes), SPACE)

    def constrain(x: Any) -> Any:
        return lax.with_sharding_constraint(x, sharding)

    got = jax.jit(lambda *given: gradient(constrain, *given))(*operands)
    error = error_of(got, jax.jit(lambda *given: gradient(lambda x: x, *given))(*operands))
    assert error > 0.1, MENDED.format(version=jax.__version__, error=error)


@pytest.mark.parametrize("case", CASES)
def test_ours_is_right(case: str) -> None:
    gradient, operands, axes = CASES[case]
    mesh = mesh_of(axes)

    def plain(*given: Any) -> Any:
        return gradient(lambda x: x, *given)

    closed = jax.make_jaxpr(plain)(*operands)
    program = inline(closed.jaxpr, closed.consts)
    layouts = [from_spec(SPACE if x.shape == X.shape else PartitionSpec(), x.shape, long_axes(mesh)) for x in operands]
    flow = follow(program, layouts, long_axes(mesh))
    ways = [way for step in flow.steps if step.choice is not None for way in step.choice.ways]
    assert any(isinstance(way.split, Windowed) and "space" in way.axes for way in ways)
    (got,) = jax.jit(flow_over_mesh(flow, mesh))(*operands)
    assert error_of(got, jax.jit(plain)(*operands)) < 1e-5
