"""What the same bits cost in memory and time: by hand, in any order, in the order of the tree, and not virtualized.

    python -m benchmarks.bits_memory                    compiled for and timed on one CPU device
    python -m benchmarks.bits_memory --tpu v5e:2x4      compiled for one of its devices, which need not be there
    python -m benchmarks.bits_memory --tpu v5e:2x4 --models contrastive

A contrastive step of 1,024 pairs on 16 nodes, gradients of 50 MiB: by hand that is gradient caching (embed all nodes,
differentiate the loss by the embeddings, then differentiate node by node and add up). The transformer of the other
benchmarks, on 8 and on 64 nodes. And three models with one example for each node, few examples and many parameters:
twelve dense layers, the same stacked for a scan over them, and one matrix that is nearly all of the parameters. Memory
and cycles are the compiler's; times are those of the processor, of steps that take turns, relative to the step by hand
in the same round.

This file knows models, ways to compute a step, and compiled programs. It must not know how sums are formed.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vnode
from benchmarks import contenders, hlo, models, tpu
from vnode.placement.temporary import temporary_of
from vnode.runtime.device_reductions import ReductionPlan
from vnode.runtime.tree import Fold
from vnode.step.virtual import VirtualStep

HAND = "by hand"
FAST = "fast"
INVARIANT = "invariant"
LANES = "invariant in one lane"
HOSTED = "invariant on the host"
PLAIN = "not virtualized"
OPTIONS: dict[str, dict[str, Any]] = {
    FAST: {"reduction": "fast"},
    INVARIANT: {},
    LANES: {"lanes": 1},
    HOSTED: {},
}
NAMES = (HAND, *OPTIONS, PLAIN)
MODELS = ("contrastive", "transformer", "layers", "stacked", "matrix")

PAIRS, NODES, LAYERS, WIDTH, INPUT, EMBEDDING = 1024, 16, 11, 768, 256, 128
DENSE = 512


@dataclasses.dataclass(frozen=True)
class Case:
    """A step in one way.

    Attributes:
        function: With a `lower` method.
        state: What it is given first, arrays or shapes.
        batch: What it is given second, likewise.
        gradients: Bytes of the gradients.
        turns: Of loops of run-time length; see `contenders.Contender`.
    """

    function: Any
    state: Any
    batch: Any
    gradients: int
    turns: dict[tuple[str, ...], float]


def towers(key: jax.Array) -> dict[str, list[jax.Array]]:
    """Two towers of dense layers."""
    widths = [INPUT, *[WIDTH] * (LAYERS + 1), EMBEDDING]
    keys = jax.random.split(key, 2 * len(widths)).reshape(2, -1)
    return {
        name: [jax.random.normal(k, (i, o)) * i**-0.5 for k, i, o in zip(own, widths, widths[1:], strict=False)]
        for name, own in zip("ab", keys, strict=True)
    }


def embed(layers: list[jax.Array], x: jax.Array) -> jax.Array:
    """A unit vector for each example."""
    for w in layers[:-1]:
        x = jax.nn.gelu(x @ w)
    x = x @ layers[-1]
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def pair_loss(a: jax.Array, b: jax.Array) -> jax.Array:
    """Cross entropy in both directions; partners are on the diagonal."""
    logits = 10.0 * a @ b.T
    found = [jnp.diagonal(jax.nn.log_softmax(each)) for each in (logits, logits.T)]
    return -sum(map(jnp.mean, found)) / 2


def embed_both(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The embeddings of both sides of the pairs."""
    return embed(params["a"], batch["a"]), embed(params["b"], batch["b"])


def contrastive_step(params: Any, batch: Any) -> Any:
    """The step as a user writes it: its gradients leave it."""
    return jax.value_and_grad(lambda params: pair_loss(*embed_both(params, batch)))(params)


def cached_by_hand(params: Any, batch: Any) -> Any:
    """Gradient caching: the same, node by node."""
    nodes = jax.tree.map(lambda x: x.reshape(NODES, -1, *x.shape[1:]), batch)
    found = jax.lax.map(lambda node: embed_both(params, node), nodes)
    whole = [z.reshape(-1, EMBEDDING) for z in found]
    loss, slopes = jax.value_and_grad(pair_loss, argnums=(0, 1))(*whole)
    parts = tuple(slope.reshape(z.shape) for slope, z in zip(slopes, found, strict=True))

    def body(total: Any, given: Any) -> tuple[Any, None]:
        node, slope = given
        (grads,) = jax.vjp(lambda params: embed_both(params, node), params)[1](slope)
        return jax.tree.map(jnp.add, total, grads), None

    return loss, jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), (nodes, parts))[0]


def contrastive(name: str, nodes: int, device: Any) -> Case:
    """The contrastive step in one way; its state is the parameters."""
    params = jax.eval_shape(towers, jax.random.key(0))
    batch = {side: jax.ShapeDtypeStruct((PAIRS, INPUT), jnp.float32) for side in "ab"}
    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    if name in OPTIONS:
        step = hosted(name, vnode.virtualize(contrastive_step, virtual_nodes=nodes, **OPTIONS[name]).on([device]))
    else:
        there = jax.sharding.SingleDeviceSharding(device)
        step = jax.jit({HAND: cached_by_hand, PLAIN: contrastive_step}[name], in_shardings=there, out_shardings=there)
    return Case(step, params, batch, gradients, turns_of(name, nodes))


def transformer(name: str, nodes: int, device: Any) -> Case:
    """The step of the transformer in one way, by `contenders`; its batch grows with the nodes."""
    on_tpu = device.platform == "tpu"
    size = {"width": 512, "heads": 8, "length": 256, "vocabulary": 8192, "dtype": jnp.bfloat16} if on_tpu else {}
    model = models.transformer(**size)
    factory: Callable[..., contenders.Contender] = {HAND: contenders.by_hand, PLAIN: contenders.plain}.get(
        name, contenders.virtualized
    )
    made = factory(model, nodes, [device], **({"reduction": "invariant"} | OPTIONS[name] if name in OPTIONS else {}))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((nodes * model.node, *x.shape[1:]), x.dtype), model.batch(1))
    gradients = sum(x.nbytes for x in jax.tree.leaves(made.state["params"]))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made.state)
    return Case(hosted(name, made.function), state, shapes, gradients, turns_of(name, nodes))


def layers_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Of dense layers without biases."""
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def stacked_loss(params: jax.Array, x: jax.Array) -> jax.Array:
    """Of the same, by a scan over the layers."""
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)


def matrix_loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Of a network whose last layer is large."""
    x = jnp.tanh(jnp.tanh(x @ params["in"]) @ params["hidden"])
    return jnp.mean(jax.nn.logsumexp(x @ params["out"], axis=-1))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """An array's type."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


FEW_EXAMPLES: dict[str, tuple[Callable[..., jax.Array], Any]] = {
    "layers": (layers_loss, [floats(DENSE, DENSE)] * 12),
    "stacked": (stacked_loss, floats(12, DENSE, DENSE)),
    "matrix": (matrix_loss, {"in": floats(DENSE, 64), "hidden": floats(64, 256), "out": floats(256, 8192)}),
}


def gradients_by_hand(loss: Callable[..., jax.Array], nodes: int, params: Any, x: jax.Array) -> Any:
    """A scan over the nodes."""

    def node(total: Any, x: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, x)), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    return jax.tree.map(lambda y: y / nodes, jax.lax.scan(node, zeros, x.reshape(nodes, -1, DENSE))[0])


def few_examples(model: str, name: str, nodes: int, device: Any) -> Case:
    """A step in one way, with an example for each node; its gradients leave it, so that all are there at its end."""
    loss, params = FEW_EXAMPLES[model]
    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))

    def step(params: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(loss)(params, x)

    if name in OPTIONS:
        made = hosted(name, vnode.virtualize(step, virtual_nodes=nodes, **OPTIONS[name]).on([device]))
    else:
        there = jax.sharding.SingleDeviceSharding(device)
        function = {HAND: functools.partial(gradients_by_hand, loss, nodes), PLAIN: step}[name]
        made = jax.jit(function, in_shardings=there, out_shardings=there)
    return Case(made, params, floats(nodes, DENSE), gradients, turns_of(name, nodes))


def hosted(name: str, step: Any) -> Any:
    """A step whose sums wait on the host, as a plan may have them, if that is the way."""
    if name != HOSTED:
        return step
    plan = dataclasses.replace(step.spec.plan, host_accumulators=step.options.virtual_nodes)
    return VirtualStep(dataclasses.replace(step.spec, plan=plan), step.placement)


def turns_of(name: str, nodes: int) -> dict[tuple[str, ...], float]:
    """How often the loops of run-time length run."""
    if name not in OPTIONS or name == FAST:
        return {}
    turns = contenders.turns_of_trees(nodes, 1, OPTIONS[name].get("lanes", nodes))
    if name == HOSTED:  # all sums are put away and come back, the first one too, large ones in pieces
        put, taken = crossings(nodes)
        runs = turns["nodes",]
        away = {"send": put / runs, "push": put / runs, "merge": taken / runs}
        turns |= {("nodes", loop): count for loop, count in away.items()}
    return turns


def crossings(nodes: int) -> tuple[int, int]:
    """How often a sum is put away in the order of the tree on one device, and how often one comes back."""
    fold = fold_of(nodes)
    return fold.count_crossings(fold.depth)


def fold_of(nodes: int) -> Fold:
    """How one device adds the runs of so many nodes."""
    (fold,) = ReductionPlan.from_counts((nodes,), 1, True).device_folds
    return fold


def cycles_of(program: Any, case: Case, nodes: int) -> int:
    """The compiler's estimate of all that a step computes."""
    module = hlo.parse(program.as_text())
    fold, turns = fold_of(nodes), {}
    for loop, names in hlo.named_loops(module).items():
        if names in case.turns:
            turns[loop] = case.turns[names]
        elif names == ("nodes", "fetch"):  # all parts of all sums that come back
            turns[loop] = crossings(nodes)[1] / len(fold.merges) * parts_of(module, loop, fold.depth)
    return hlo.cycles(module, turns)


def parts_of(module: hlo.Module, loop: str, depth: int) -> int:
    """In how many parts what waits on the host comes back in a loop, of which so many may wait."""
    (found,) = (v.instruction for v in module.walk() if v.instruction.name == loop)
    lengths = [int(n) for n in re.findall(r"\[(\d+),[\d,]*\]{[^}]*S\(5\)}", found.type)]
    return max(lengths) // depth


def rows(device: Any, names: list[str], makers: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """One row for each model, number of nodes and way.

    Args:
        device: For which is compiled.
        names: In which ways.
        makers: Of which models.
        seconds: For how long the ways of the contrastive step are timed; 0 for not at all.
    """
    several: list[tuple[str, Callable[..., Case], int]] = [("contrastive", contrastive, NODES)]
    several += [("transformer", transformer, nodes) for nodes in (8, 64)]
    several += [
        (model, functools.partial(few_examples, model), nodes) for model in FEW_EXAMPLES for nodes in (8, 16, 64)
    ]
    for model, make, nodes in several:
        if model not in makers:
            continue
        compiled = {}
        for name in names:
            if name == PLAIN and model == "transformer" and nodes > 8:
                continue  # of 512 examples at once
            if name == HOSTED and device.platform == "cpu":
                continue  # its memory is the host's
            case = make(name, nodes, device)
            compiled[name] = case, case.function.lower(case.state, case.batch).compile()
        times = timed(compiled, seconds) if seconds and model == "contrastive" else {}
        for name, (case, program) in compiled.items():
            memory, temporary = program.memory_analysis(), temporary_of(program)
            row = {
                "model": model,
                "nodes": nodes,
                "way": name,
                "gradients_mib": round(case.gradients / 2**20, 1),
                "temporary_mib": round(temporary.held / 2**20, 1),
                "gaps_mib": round(temporary.gaps / 2**20, 1),
            }
            if device.platform == "tpu":
                row["host_mib"] = round(memory.host_temp_size_in_bytes / 2**20, 1)
                row["cycles"] = cycles_of(program, case, nodes)
            if name == HOSTED:
                sent = sum(crossings(nodes)) * memory.host_temp_size_in_bytes / fold_of(nodes).depth
                row["transferred_mib"] = round(sent / 2**20, 1)
            if name in times:
                row["time"] = round(times[name], 3)
            yield row


def timed(compiled: dict[str, tuple[Case, Any]], seconds: float) -> dict[str, float]:
    """Processor time of each way relative to the first, the median over rounds; the first is run again as `again`."""
    case = next(iter(compiled.values()))[0]
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda x: jnp.asarray(0.05 * rng.standard_normal(x.shape), x.dtype), (case.state, case.batch))
    programs = [(name, program) for name, (_, program) in compiled.items()]
    programs.append(("again", programs[0][1]))
    taken: dict[str, list[float]] = {name: [] for name, _ in programs}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(taken["again"]) < 3:
        for name, program in programs:
            began = time.process_time()
            jax.block_until_ready(program(*args))
            taken[name].append(time.process_time() - began)
        programs = [*programs[1:], programs[0]]
    first = taken[next(iter(compiled))]
    print(json.dumps({"rounds": len(first), "again": round(statistics.median(ratios(taken["again"], first)), 3)}))
    return {name: statistics.median(ratios(taken[name], first)) for name in compiled}


def ratios(values: list[float], to: list[float]) -> list[float]:
    """Each value over that of the same round."""
    return [a / b for a, b in zip(values, to, strict=True)]


def main(argv: list[str] | None = None) -> None:
    """Prints one JSON line per row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tpu", help="a topology such as v5e:2x4, of which one device is compiled for")
    parser.add_argument("--ways", default=",".join(NAMES), help="some of these: %(default)s")
    parser.add_argument("--models", default=",".join(MODELS), help="some of these: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing, on CPU; 0 for none")
    options = parser.parse_args(argv)
    names = options.ways.split(",")
    if unknown := set(names) - set(NAMES):
        parser.error(f"no such way: {', '.join(sorted(unknown))}")
    makers = options.models.split(",")
    if unknown := set(makers) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    if options.tpu:
        os.environ.update(tpu.ENVIRONMENT)
    device = tpu.topology(options.tpu)[0] if options.tpu else jax.devices()[0]
    for row in rows(device, names, makers, 0.0 if options.tpu else options.seconds):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
