"""Steps that compute again what they do not keep (`jax.checkpoint`): by nodes too, compilers carry that out.

Knows steps, the program that jax is given, and the TPU compiler in a process of its own. Must not know how nodes are
evaluated. References are the step as it is written, and the memory that the compiler says it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import vnode
from tests.ahead import said
from tests.rounding import assert_same
from vnode.analysis.program import inline
from vnode.operators.multi_operand_barrier import barrier_of

P = PartitionSpec
LAYERS, WIDTH = 3, 8


def layer(h: jax.Array, w: Any) -> jax.Array:
    return h + jax.nn.gelu(h @ w["up"]) @ w["down"]


def step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        h = x
        for w in params:
            h = jax.checkpoint(layer)(h, w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def arguments() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS + 1)
    params = [
        {
            "up": jax.random.normal(keys[2 * i], (WIDTH, 4 * WIDTH)) / WIDTH,
            "down": jax.random.normal(keys[2 * i + 1], (4 * WIDTH, WIDTH)) / WIDTH,
        }
        for i in range(LAYERS)
    ]
    return params, jax.random.normal(keys[-1], (16, WIDTH))


def barriers(jaxpr: Any) -> Iterator[list[Any]]:
    """The operands of each barrier, of loops and calls too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is jax.lax.optimization_barrier_p:
            yield eqn.invars
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from barriers(inner)


def on(shape: tuple[int, ...]) -> Any:
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("vnode", "model")[: len(shape)])
    split = {"partition": {"up$": P(None, "model"), "down$": P("model")}} if len(shape) > 1 else {}
    return vnode.virtualize(step, virtual_nodes=4, reduction="fast", placement=vnode.Placement(4, mesh=mesh), **split)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 4)], ids=str)
def test_what_is_computed_again_waits_for_the_backward_pass(shape: tuple[int, ...]) -> None:
    """A barrier for each layer but the last, over what it is given and the gradient that comes to it, at least."""
    args, made = arguments(), on(shape)
    found = [operands for operands in barriers(jax.make_jaxpr(made)(*args).jaxpr) if operands[0].aval.ndim == 2]
    plain = [operands for operands in barriers(jax.make_jaxpr(step)(*args).jaxpr) if operands[0].aval.ndim == 2]
    assert not plain, "jax makes them when it lowers"
    examples = [[v for v in operands if v.aval.shape[1] == WIDTH and v.aval.shape[0] <= 16] for operands in found]
    assert sum(len(several) >= 2 for several in examples) >= LAYERS - 1
    assert_same(made(made.put(args[0]), args[1]), jax.jit(step), *args)


def test_the_parts_of_a_barrier_stay_together_in_a_jaxpr_that_a_pass_makes() -> None:
    """Two neighbouring barriers; then in a body that is rewritten, and inlined again within another equation."""

    def twice(x: jax.Array, y: jax.Array) -> Any:
        x, y = jax.lax.optimization_barrier((x, y))
        return jax.lax.optimization_barrier((x, y))

    closed = jax.make_jaxpr(twice)(1.0, 2.0)
    made = inline(closed.jaxpr, closed.consts)
    again = inline(made.to_closed_jaxpr(closed.jaxpr).jaxpr, (), closed.jaxpr.eqns[0])
    for program in (made, again):
        several = [barrier_of(eqn) for eqn in program.equations]
        assert None not in several and len({*several}) == 2
        assert several[0] is several[1] and several[2] is several[3]
    assert len(made.to_closed_jaxpr(closed.jaxpr).jaxpr.eqns) == 2


@pytest.mark.tpu
def test_a_tpu_holds_as_little_as_without_nodes() -> None:
    plain, again, kept = said("remat_on_tpus", hasty=True)
    assert again <= 1.05 * plain and again < 0.8 * kept
