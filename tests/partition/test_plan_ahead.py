"""Plans accepted ahead of time, by the real TPU compiler, for machines that are not there.

Knows how a plan is accepted on devices of a topology; in a process of its own because the compiler loads a
large library.
"""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("the TPU compiler is not installed (extra tpu-aot; x86-64 Linux only)", allow_module_level=True)

from tests.ahead import said

pytestmark = pytest.mark.thorough

ACCEPTED = """
import json, sys
import jax, jax.numpy as jnp
from benchmarks import tpu
from vnode.partition import Machine
from vnode.partition.plan.candidates import OnMesh
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.subject import on_nodes, subject_of

def step(w, x):
    grads = jax.grad(lambda w: jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2))(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads)

w = {"up": jax.ShapeDtypeStruct((1024, 4096), jnp.float32), "down": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
machine = Machine.tpu("v5e:2x4")
subject = subject_of(on_nodes(step, 8, {"reduction": sys.argv[1], "donate_argnums": (0,)}), (w, x))
on = OnMesh(subject, machine, {"vnode": 2, "model": 4}, "tpu", None)
plan = plan_of(subject, on.megatron()[0], machine, 2**34, {})
found = plan.accept(tpu.topology("v5e:2x4"))
print(json.dumps({"accepted": found.accepted, "found": found.found, "said": str(found), "error": found.memory_error}))
"""

WEIGHTS = 4 * 1024 * 4096 // 4
"""Bytes of one device's part of one weight."""


@pytest.mark.parametrize("reduction", ["fast", "invariant"])
def test_megatrons_split_is_accepted_for_a_tpu(reduction: str) -> None:
    """Gradients over two rows, once; in each of four turns the activations of 512 examples over four devices."""
    found = said(ACCEPTED, reduction)
    assert found["accepted"] and abs(found["error"]) <= 0.1, found["said"]
    activations = 4 * (4 * 512 * 1024)
    if reduction == "fast":
        assert found["found"]["all-reduce"] == pytest.approx(activations + 2 * WEIGHTS, rel=1e-3)
    else:  # of both sums that four nodes leave in a tree of two and four branches, half to each row; and back
        assert found["found"]["all-reduce"] == pytest.approx(activations, rel=1e-3)
        assert found["found"]["all-to-all"] == pytest.approx(4 * WEIGHTS, rel=1e-3)
        assert found["found"]["all-gather"] == pytest.approx(2 * WEIGHTS, rel=1e-3)


GATHERED = """
import json
import jax, jax.numpy as jnp
from benchmarks import tpu
from vnode.partition import Machine
from vnode.partition.plan.candidates import OnMesh
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.subject import on_nodes, subject_of

def normal(x):
    mean = jnp.mean(x, 0)
    return (x - mean) * jax.lax.rsqrt(jnp.mean((x - mean) ** 2, 0) + 1e-3)

def step(w, x):
    def loss(w):
        y = x
        for each in w:
            y = jax.nn.relu(normal(jnp.tanh(y) @ each))
        return jnp.mean(y**2)
    grads = jax.grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads)

w = [jax.ShapeDtypeStruct((8192, 8192), jnp.float32)] * 5
x = jax.ShapeDtypeStruct((2048, 8192), jnp.float32)
machine = Machine.tpu("v5e:2x2")
subject = subject_of(on_nodes(step, 8, {"donate_argnums": (0,)}), (w, x))
on = OnMesh(subject, machine, {"vnode": 4}, "tpu", None)
plan = plan_of(subject, on.candidate("FSDP", on.whole, over_rows=True), machine, 2**34, {})
found = plan.accept(tpu.topology("v5e:2x2"))
print(json.dumps({
    "gathered": found.found["all-gather"], "said": str(found), "memory": found.memory,
}))
"""


def test_what_passes_read_is_gathered_when_they_run() -> None:
    """Batch norms make many passes of a step. Forward and backward, where the first weight is not read, weights are
    gathered in bfloat16 for each pass that reads them; the compiler does so for one in float32. A device has a quarter
    of the state, and a quarter of the gradients, which is all there is in the end; with them, of the last layer, what
    nodes have summed of the gradient and what is exchanged of it, all of each, and what a quarter of that is added to.
    With what is sent of the gradients while others are computed there would be a weight more.
    """
    found, weight = said(GATHERED), 4 * 8192 * 8192
    assert found["gathered"] == pytest.approx((5 + 4 + 1) * weight / 2, rel=0.02), found["said"]
    examples = 4 * 2048 * 8192 // 4
    least = 5 * weight / 4 + examples + 5 * weight / 4 + 2 * weight
    assert found["memory"] <= least + weight / 4 + examples
