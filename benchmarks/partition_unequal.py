"""Plans for a host of which half of the GPUs are slower: what unequal shares are predicted to take beside even ones.

`python -m benchmarks.partition_unequal` prints a line for each ratio of speeds. Nothing is run or compiled: the GPUs
are those of a data sheet, and slower ones compute more slowly, with memory as fast.

This file knows machines and plans. It must not know how shares are found.
"""

import dataclasses
import fractions

import jax
import jax.numpy as jnp

import vnode
from vnode.partition import Machine, Plan, search

RATIOS = ("5/4", "3/2", "5/3", "2", "3")


def train_step(state, x):
    """A layer of a perceptron with momentum."""

    def loss_fn(params):
        return jnp.mean((jax.nn.gelu(x @ params["wi"]) @ params["wo"] - x) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
    params = jax.tree.map(lambda p, v: p - 0.1 * v, state["params"], velocity)
    return {"params": params, "velocity": velocity}, loss


def throttled(times: float, gpus: int = 4) -> Machine:
    """A host with as many GPUs, every other one slower."""
    host = Machine.gpus("a100-80gb", hosts=1, per_host=gpus)
    (fast,) = host.kinds
    rates = {dtype: rate / times for dtype, rate in fast.peak.items()}
    slow = dataclasses.replace(fast, name="throttled", peak=rates, vector=fast.vector / times)
    devices = (dataclasses.replace(d, kind=slow if i % 2 else fast) for i, d in enumerate(host.devices))
    return Machine("a host with throttled GPUs", tuple(devices), host.networks)


def plan_for(times: float) -> Plan:
    """The plan for float32 on 32,768 examples, in four nodes."""

    def shapes(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    weights = {"wi": shapes(4096, 16384), "wo": shapes(16384, 4096)}
    state = {"params": weights, "velocity": weights}
    args = state, shapes(32768, 4096)
    return search(train_step, args, throttled(times), virtual_nodes=4, donate_argnums=0, progress=False)


def main() -> None:
    for ratio in RATIOS:
        plan = plan_for(float(fractions.Fraction(ratio)))
        shares = {spec.blocks for spec in plan.specs.values() if isinstance(spec, vnode.UnevenSpec)}
        others = ", ".join(f"{name} {1e3 * each.seconds:.1f}" for name, each in plan.beside.items())
        mesh = " x ".join(f"{name} {n}" for name, n in plan.mesh.items())
        print(f"{ratio}: {1e3 * plan.figures.seconds:.1f} ms, {plan.name} on {mesh} {shares or ''}; beside: {others}")


if __name__ == "__main__":
    main()
