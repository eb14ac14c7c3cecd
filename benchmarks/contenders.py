"""The same training step in several ways, behind one small interface.

Every contender computes the step of `models.plain_step` (same loss over all real tokens, same optimizer), so their
results are compared before they are timed. Given V nodes on D devices, each lets a device work on B / V examples at a
time.

This file knows how a step is split by each library. It must not know how anything is measured.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vnode
from benchmarks.models import Model, Tree, initial_state, optimizer, plain_step
from vnode.runtime.device_reductions import ReductionPlan

HAND = "scan by hand"
VNODE = "vnode"
JITTED = "vnode in jax.jit"
INVARIANT = "vnode invariant"
LANES = "vnode 8 lanes"
MICROBATCH = "optax.microbatch"
MULTISTEPS = "optax.MultiSteps"
PLAIN = "whole batch"
NAMES = (HAND, VNODE, INVARIANT, LANES, MICROBATCH, MULTISTEPS, PLAIN)


@dataclass(frozen=True)
class Contender:
    """One way to run a model's step.

    Attributes:
        name: One of `NAMES`.
        function: `(state, piece) -> (state, metrics)` with a `lower` method, jitted, state donated.
        state: The state before the first step, on the host.
        pieces: Cuts the host's global batch into what the successive calls of one step receive (mostly one piece).
        traceable: The same function before `jax.jit`, for looking at its jaxpr.
        held: Bytes of accumulators that live in the state between calls, so that they do not show as temporaries.
        turns: How often its loops of run-time length run, by their names and for each turn of the loops around them.
    """

    name: str
    function: Any
    state: Tree
    pieces: Callable[[Tree], list[Tree]]
    traceable: Callable
    held: int = 0
    turns: Callable[[], dict[tuple[str, ...], float]] = dict


def device_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of one axis, for the contenders that need one."""
    return Mesh(np.array(devices), ("data",))


def _whole(batch: Tree) -> list[Tree]:
    return [batch]


def _jit(step: Callable, devices: Sequence[jax.Device]) -> Any:
    mesh = device_mesh(devices)
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(step, in_shardings=(whole, split), out_shardings=whole, donate_argnums=0)


def by_hand(model: Model, nodes: int, devices: Sequence[jax.Device]) -> Contender:
    """What an expert writes: devices by `shard_map`, nodes by `lax.scan`, one accumulator, one `psum`, one update."""
    opt = optimizer()
    mesh = device_mesh(devices)
    waves, rest = divmod(nodes, len(devices))
    if rest:
        raise ValueError(f"{nodes} nodes do not fill {len(devices)} devices evenly")

    def device_sums(params, batch):
        # Without this cast the gradient of each node would be summed over the devices inside the loop.
        params = jax.lax.pcast(params, "data", to="varying")
        grad = jax.value_and_grad(lambda p, b: _with_aux(model.terms(p, b)), has_aux=True)

        def body(total, node):
            (loss, aux), grads = grad(params, node)
            return jax.tree.map(jnp.add, total, (loss, aux, grads)), None

        nodes_here = jax.tree.map(lambda x: x.reshape(waves, x.shape[0] // waves, *x.shape[1:]), batch)
        zero = jax.lax.pcast(jnp.zeros(()), "data", to="varying")
        total, _ = jax.lax.scan(body, (zero, (zero, zero), jax.tree.map(jnp.zeros_like, params)), nodes_here)
        return jax.lax.psum(total, "data")

    sums = jax.shard_map(
        device_sums, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec()
    )

    def step(state, batch):
        loss, (weight, correct), grads = sums(state["params"], batch)
        return _update(opt, state, grads, loss, weight, correct)

    return Contender(HAND, _jit(step, devices), initial_state(model), _whole, step)


def microbatch(model: Model, nodes: int, devices: Sequence[jax.Device]) -> Contender:
    """`optax.microbatch` around the sums and their gradient, jitted with the batch sharded over the devices.

    The partitioner splits each microbatch over the devices, so a microbatch has `D` nodes' examples.
    """
    opt = optimizer()

    def step(state, batch):
        def sums(params, batch):
            (loss, aux), grads = jax.value_and_grad(lambda p: _with_aux(model.terms(p, batch)), has_aux=True)(params)
            return loss, aux, grads

        examples = jax.tree.leaves(batch)[0].shape[0]
        split = optax.microbatch(sums, argnums=1, microbatch_size=examples * len(devices) // nodes)
        loss, (weight, correct), grads = split(state["params"], batch)
        return _update(opt, state, grads, loss, weight, correct)

    return Contender(MICROBATCH, _jit(step, devices), initial_state(model), _whole, step)


def multisteps(model: Model, nodes: int, devices: Sequence[jax.Device]) -> Contender:
    """`optax.MultiSteps` as its documentation shows it: one jitted call per minibatch, accumulators in the state.

    It averages the minibatches' gradients, which is wrong when they hold different numbers of real tokens. So each
    minibatch is given the token count of the global batch, which its user must know beforehand.
    """
    calls = max(1, nodes // len(devices))
    multi = optax.MultiSteps(optimizer(), every_k_schedule=calls)
    params = initial_state(model)["params"]

    def step(state, piece):
        batch, total = piece["batch"], piece["total"].mean()

        def loss_fn(params):
            loss, _, correct = model.terms(params, batch)
            return calls * loss / total, calls * correct / total

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = multi.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt_state}, {"loss": loss, "accuracy": accuracy}

    def pieces(batch):
        total = np.float32(batch["weights"].sum() if "weights" in batch else len(batch["x"]))
        sizes = [x.shape[0] // calls for x in jax.tree.leaves(batch)]
        return [
            {
                "batch": jax.tree.map(lambda x, i=i, n=sizes[0]: x[i * n : (i + 1) * n], batch),
                "total": np.full(len(devices), total),
            }
            for i in range(calls)
        ]

    state = {"params": params, "opt": multi.init(params)}
    held = sum(x.nbytes for x in jax.tree.leaves(params))
    return Contender(MULTISTEPS, _jit(step, devices), state, pieces, step, held)


def plain(model: Model, nodes: int, devices: Sequence[jax.Device]) -> Contender:
    """The whole batch at once, sharded over the devices by the partitioner; V plays no part."""
    step = plain_step(model)
    return Contender(PLAIN, _jit(step, devices), initial_state(model), _whole, step)


def virtualized(model: Model, nodes: int, devices: Sequence[jax.Device], **options: Any) -> Contender:
    """The plain step through `vnode.virtualize`."""
    options = {"reduction": "fast", **options}
    step = vnode.virtualize(plain_step(model), virtual_nodes=nodes, donate_argnums=0, **options).on(devices)
    return Contender(VNODE, step, initial_state(model), _whole, step)


def invariant(model: Model, nodes: int, devices: Sequence[jax.Device]) -> Contender:
    """The same, with sums in the order of a tree."""
    made = virtualized(model, nodes, devices, reduction="invariant")
    return replace(made, name=INVARIANT, turns=partial(turns_of_trees, nodes, len(devices), nodes))


def invariant_in_lanes(model: Model, nodes: int, devices: Sequence[jax.Device]) -> Contender:
    """The same, with the bits of up to eight devices only."""
    lanes = min(8, nodes)
    made = virtualized(model, nodes, devices, reduction="invariant", lanes=lanes)
    return replace(made, name=LANES, turns=partial(turns_of_trees, nodes, len(devices), lanes))


def turns_of_trees(nodes: int, devices: int, lanes: int) -> dict[tuple[str, ...], float]:
    """The turns of the loops that add in the order of a tree, on the device that adds most."""
    plan = ReductionPlan.from_counts((nodes // devices,) * devices, nodes // lanes, True)
    own = max(plan.device_folds, key=lambda fold: sum(fold.merges))
    turns: dict[tuple[str, ...], float] = {("nodes", "run"): nodes / devices / len(own.merges), ("materialized",): 1}
    for name, merges in (("nodes", own.merges), ("blocks", plan.cross_device_fold.merges)):
        found = Counter({f"{loop}_{level}": 0 for loop in ("push", "merge", "close") for level in range(len(merges))})
        height = 0
        for joined in merges:
            found[f"merge_{height - 1}" if joined else f"push_{height}"] += 1
            found.update(f"close_{level}" for level in range(height - joined + 1, height))
            height += 1 - joined
        turns[name,] = len(merges)
        heights = list(accumulate(merges, lambda height, gone: height + 1 - gone, initial=0))[1:]
        into_first = sum(height == 1 and gone > 0 for height, gone in zip(heights, merges, strict=True))
        found["merge"] = sum(merges) - into_first  # on TPUs, where what reaches the first block merges that
        found["merge_first"] = heights[:-1].count(1)
        found["push"] = sum(height > 1 for height in heights[:-1])
        turns |= {(name, loop): count / len(merges) for loop, count in found.items()}
    return turns | {("merge_first",): 1, ("push",): 0}  # on TPUs, after the loop


FACTORIES: dict[str, Callable[..., Contender]] = {
    HAND: by_hand,
    VNODE: virtualized,
    INVARIANT: invariant,
    LANES: invariant_in_lanes,
    MICROBATCH: microbatch,
    MULTISTEPS: multisteps,
    PLAIN: plain,
}


def available(name: str) -> bool:
    """False for vnode in a checkout that cannot virtualize yet."""
    return name != VNODE or hasattr(vnode, "virtualize")


def _with_aux(terms):
    loss, weight, correct = terms
    return loss, (weight, correct)


def _update(opt, state, grads, loss, weight, correct):
    grads = jax.tree.map(lambda g: g / weight, grads)
    updates, opt_state = opt.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt_state}, {"loss": loss / weight, "accuracy": correct / weight}
