"""What is put at places of a divided dimension by few indices, where the division is itself a slice in the program.

Knows scatters, layouts and a fault of XLA: of two slices, of which the second begins out of bounds, it makes one that
reads beyond what the first one cut off. Must not know how copies leave out what goes to others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.spmd.reference import mesh_of
from vnode.analysis.tracing import trace
from vnode.spmd.layout import Layout, cut_of, replicated
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_flow import follow

pytestmark = pytest.mark.quickly

ROWS = 8
KINDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "set": lambda v, i, u: v.at[i].set(u),
    "add": lambda v, i, u: v.at[i].add(u),
    "subtract": lambda v, i, u: v.at[i].subtract(u),
    "multiply": lambda v, i, u: v.at[i].multiply(u),
    "min": lambda v, i, u: v.at[i].min(u),
    "max": lambda v, i, u: v.at[i].max(u),
    "apply": lambda v, i, u: v.at[i].apply(jnp.square),
}


def values(dtype: Any) -> np.ndarray:
    """Rows that are unlike their neighbours, with both zeros among them."""
    rows = np.random.default_rng(0).integers(-9, 9, (ROWS, 3)).astype(dtype)
    rows[::2, 0], rows[1::2, 0] = 0.0, -dtype(0)
    return rows


@pytest.mark.sampled(12, thorough=40)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.complex64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("devices", "count"), [(2, 1), (3, 1), (4, 1), (3, 2), (3, 4)])
def test_a_slice_that_others_put_something_in_keeps_its_bits(kind: str, dtype: Any, devices: int, count: int) -> None:
    put = KINDS[kind]
    axes = {"x": devices}
    own, new = values(dtype), np.full((count, 3), 5, dtype)
    divided = Layout((cut_of(("x",), 1, ROWS, ROWS, axes), None))
    traced = trace(put, own, np.zeros(count, np.int32), new)
    layouts = [divided, replicated(1), replicated(2)][: len(traced.program.inputs)]
    flow = follow(traced.program, layouts, axes, outputs=[divided])
    assert [step.made for step in flow.steps if "scatter" in step.eqn.primitive.name] == [(divided,)]
    made = jax.jit(flow_over_mesh(flow, mesh_of(axes)))
    for index in (*range(ROWS), ROWS, -ROWS - 1):  # and places that there are not, where nothing is put
        several = [index, *[(index + 3 * k) % ROWS for k in range(1, count)]]
        args = own, np.array(several, np.int32), new
        (got,), want = made(*args), jax.jit(put)(*args)
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), index
        untouched = [row for row in range(ROWS) if row not in several]
        assert np.asarray(want)[untouched].tobytes() == own[untouched].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_only_one_index_costs_a_copy(kind: str) -> None:
    """What several indices put somewhere is neither extended nor cut, so that sums of it are found to be sums."""
    put, axes = KINDS[kind], {"x": 2}
    divided = Layout((cut_of(("x",), 1, ROWS, ROWS, axes), None))
    args = values(np.float32), np.arange(3, dtype=np.int32), np.ones((3, 3), np.float32)
    traced = trace(put, *args)
    layouts = [divided, replicated(1), replicated(2)][: len(traced.program.inputs)]
    flow = follow(traced.program, layouts, axes, outputs=[divided])
    made = jax.make_jaxpr(flow_over_mesh(flow, mesh_of(axes)))(*args).jaxpr.eqns[-1].params["jaxpr"]
    copied = [eqn for eqn in made.eqns if eqn.primitive.name in ("slice", "concatenate", "pad")]
    assert not [eqn for eqn in copied if eqn.outvars[0].aval.shape[1:] == (3,)]


def test_the_fault_is_there() -> None:
    """In jaxlib before 0.12. Once that is the lowest that is supported, `vnode.operators.clamped_slices` may go, and
    `vnode.operators.indexing` may drop updates again by an index out of bounds."""

    def twice(value: jax.Array, first: int, second: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(lax.dynamic_slice_in_dim(value, first, 3), second, 1)

    value = np.arange(9.0, dtype=np.float32)
    right = value[3:6][2:]  # a slice is moved into bounds
    assert twice(jnp.asarray(value), 3, 3) == right
    found = right if jax.__version_info__ >= (0, 12) else value[6:7]
    assert jax.jit(twice)(value, 3, 3) == found
