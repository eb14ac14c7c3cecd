"""The cost of many small updates inside a step: a scan of six updates, with bodies from microseconds to milliseconds.

    python -m benchmarks.updates                      on one CPU device and on three
    python -m benchmarks.updates --devices 1 --seconds 20
    python -m benchmarks.updates --calls              what a call costs, by where its arguments lie

Each update is a gradient and a step of SGD, of all examples or of a sixth of them. The step is compiled as it is
(plain, on one device), virtualized, and written by hand: `shard_map`, a scan over the nodes of a device, and one `psum`
for each update, which is the least that devices can exchange. Compiled programs are called, so that dispatch is not
counted, in bursts that take turns; a burst's first call is left out, or the plain step would pay for the threads and
caches of what ran before it. Times are medians; a ratio is that of medians.

With `--calls` a step that computes next to nothing is called as users call it, and compared with `jax.jit`.

This file knows steps and clocks. It must not know how updates are emitted.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

UPDATES, NODES, BURST = 6, 9, 5
PLAIN, HAND, FAST, INVARIANT = "plain", "by hand", "fast", "invariant"
SIZES = ((4, 54), (16, 108), (64, 108), (64, 810), (256, 810))
"""Width of the layers, and examples."""

STATES = (4, 40, 400)
"""Arrays in the state of a step that is called."""


def loss(params: Any, batch: Any) -> Any:
    """Mean squared error of a perceptron of three layers."""
    import jax.numpy as jnp

    x, y = batch
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    (w, b) = params[-1]
    return jnp.mean((x @ w + b - y) ** 2)


def descend(params: Any, slope: Any) -> Any:
    """One step of SGD."""
    import jax

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, slope)


def sixths(batch: Any) -> Any:
    """The batch as minibatches, ``[updates, examples, ...]``."""
    import jax

    return jax.tree.map(lambda x: x.reshape(UPDATES, -1, *x.shape[1:]), batch)


def plain(minibatches: bool, params: Any, batch: Any) -> Any:
    """The step as a user writes it."""
    import jax

    def update(params: Any, own: Any) -> Any:
        value, slope = jax.value_and_grad(loss)(params, own if minibatches else batch)
        return descend(params, slope), value

    return jax.lax.scan(update, params, sixths(batch) if minibatches else None, length=UPDATES)


def by_hand(minibatches: bool, mesh: Any, params: Any, batch: Any) -> Any:
    """The same by `shard_map`: every device scans over its nodes, and gradients are added by one `psum`."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    devices = mesh.size

    def program(params: Any, batch: Any) -> Any:
        def update(params: Any, own: Any) -> Any:
            nodes = jax.tree.map(lambda x: x.reshape(NODES // devices, -1, *x.shape[1:]), own if minibatches else batch)

            def node(total: Any, given: Any) -> Any:
                return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, given)), None

            zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
            total, _ = jax.lax.scan(node, zeros, nodes)
            value, slope = jax.tree.map(lambda x: x / NODES, jax.lax.psum(total, "nodes") if devices > 1 else total)
            return descend(params, slope), value

        return jax.lax.scan(update, params, batch if minibatches else None, length=UPDATES)

    spec = P(None, "nodes") if minibatches else P("nodes")
    run = jax.shard_map(program, mesh=mesh, in_specs=(P(), spec), out_specs=P(), check_vma=False)
    return run(params, sixths(batch) if minibatches else batch)


def row(devices: int, width: int, examples: int, minibatches: bool, seconds: float) -> dict[str, Any]:
    """Times of all ways for one size, in microseconds for each update, and relative to the plain step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    import vnode

    keys = jax.random.split(jax.random.key(0), 5)
    sizes = [(width, width), (width, width), (width, 1)]
    params = [(jax.random.normal(k, s) * width**-0.5, jnp.zeros(s[1])) for k, s in zip(keys, sizes, strict=False)]
    batch = (jax.random.normal(keys[3], (examples, width)), jax.random.normal(keys[4], (examples, 1)))
    on, step = jax.devices()[:devices], functools.partial(plain, minibatches)
    virtual = functools.partial(vnode.virtualize, step, virtual_nodes=NODES)
    steps = {
        PLAIN: jax.jit(step),
        HAND: jax.jit(functools.partial(by_hand, minibatches, Mesh(np.array(on), ("nodes",)))),
        FAST: virtual(reduction="fast").on(on),
        INVARIANT: virtual().on(on),
    }
    compiled = {name: each.lower(params, batch).compile() for name, each in steps.items()}
    given = {name: jax.device_put((params, batch), each.input_shardings[0]) for name, each in compiled.items()}
    taken: dict[str, list[float]] = {name: [] for name in compiled}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(taken[PLAIN]) < 3:
        for name, program in compiled.items():
            burst = []
            for _ in range(BURST):
                began = time.perf_counter()
                jax.block_until_ready(program(*given[name]))
                burst.append(time.perf_counter() - began)
            taken[name].append(statistics.median(burst[1:]))
    medians = {name: statistics.median(each) for name, each in taken.items()}
    report = virtual().on(on).explain(params, batch)
    return {
        "devices": devices,
        "width": width,
        "examples": examples,
        "of": "a sixth" if minibatches else "all",
        "us": {name: round(1e6 * each / UPDATES, 1) for name, each in medians.items()},
        "ratio": {name: round(each / medians[PLAIN], 2) for name, each in medians.items()},
        "to hand": round(medians[INVARIANT] / medians[HAND], 2),
        "predicted": round(report.evaluations(report.waves) / report.evaluations(1), 1),
        "exchanges": report.exchanges,
        "rounds": len(taken[PLAIN]),
    }


def calls(devices: int, leaves: int, seconds: float) -> dict[str, Any]:
    """Microseconds from a call to its results, for `jax.jit` with shardings and for vnode, by where arguments lie."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import vnode

    def step(state: Any, batch: Any) -> Any:
        mean = batch.mean()
        return jax.tree.map(lambda p: p - 0.1 * mean, state), mean

    def arguments(whole: Any, split: Any) -> dict[str, Any]:
        one, examples = [jnp.ones(2) for _ in range(leaves)], np.ones((6 * NODES, 2), np.float32)
        there, near = jax.device_put(one, whole), jnp.asarray(examples)
        return {
            "in place": lambda: (there, jax.device_put(examples, split)),
            "NumPy batch": lambda: (there, examples),
            "on one device": lambda: (one, near),
            "on one device, new": lambda: (list(map(jnp.copy, one)), near),
        }

    on = jax.devices()[:devices]
    mesh = Mesh(np.array(on), ("nodes",))
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("nodes"))
    jitted = jax.jit(step, in_shardings=shardings, out_shardings=shardings[0])
    contenders = {("jit", place): (jitted, given) for place, given in arguments(*shardings).items()}
    for place in list(arguments(*shardings)):  # each has a step of its own, as users have
        virtual = vnode.virtualize(step, virtual_nodes=NODES).on(on)
        own = virtual.placement.sharding(), virtual.placement.sharding(virtual.placement.axis)
        contenders["vnode", place] = virtual, arguments(*own)[place]
    taken: dict[Any, list[float]] = {key: [] for key in contenders}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(taken["jit", "in place"]) < 3:
        for key, (function, given) in contenders.items():
            burst = []
            for _ in range(BURST):
                args = jax.block_until_ready(given())
                began = time.perf_counter()
                jax.block_until_ready(function(*args))
                burst.append(time.perf_counter() - began)
            taken[key].append(statistics.median(burst[1:]))
    us = {key: round(1e6 * statistics.median(each)) for key, each in taken.items()}
    by_place = {place: {who: us[who, place] for who in ("jit", "vnode")} for _, place in us}
    return {"devices": devices, "leaves": leaves, "us": by_place, "rounds": len(taken["jit", "in place"])}


def main(argv: list[str] | None = None) -> None:
    """Prints one JSON line per row; each number of devices has a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="1,3", help="comma-separated, divisors of 9: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing for each row")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes, the smallest first")
    parser.add_argument("--calls", action="store_true", help="what a call costs, in place of what updates cost")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.worker:
        for devices in options.devices.split(","):
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
            command = [sys.executable, "-m", "benchmarks.updates", "--worker", "--devices", devices]
            command += ["--seconds", str(options.seconds), "--sizes", str(options.sizes)]
            command += ["--calls"] if options.calls else []
            subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}, check=True)
        return
    for leaves in STATES if options.calls else ():
        print(json.dumps(calls(int(options.devices), leaves, options.seconds)), flush=True)
    for width, examples in () if options.calls else SIZES[: options.sizes]:
        for minibatches in (False, True):
            print(json.dumps(row(int(options.devices), width, examples, minibatches, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
