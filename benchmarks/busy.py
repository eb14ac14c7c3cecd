"""Two processes, each with a CPU device and a core of its own; another process keeps one of the cores busy.

`rows(rounds)` starts them and returns what the first of them measured: predicted and measured seconds of placements.
`python -m benchmarks.busy RANK PORT ROUNDS` is one of the two processes.

Each process measures its own device with `vnode.profile`, both at the same time, so that both cores have the load that
they have later; the first measurement chooses a placement. What an exchange between the two takes comes from one small
placement on both. Measuring the devices and measuring the placements alternate, because other programs come and go;
medians over all rounds are compared.

This file knows processes and clocks. It must not know how times are fitted.
"""

import dataclasses
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NODES = 24
TURNS = 60_000
NICE = 5
KINDS = ("quiet", "busy")
CALIBRATION = (4, 4)
ALONE = (2, 8)
PLACEMENTS = ((12, 12), (16, 8), (18, 6), (20, 4), (22, 2), (14, 10), (8, 16))
SPIN = "import os; os.sched_setaffinity(0, {1})\nwhile True: pass"


def rows(rounds: int) -> dict[str, Any]:
    """Runs the two processes beside one that keeps the second core busy."""
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("needs two cores")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    started = []
    try:
        # Sessions of their own: Linux shares out time by session first.
        started.append(subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True))
        for rank in (1, 0):
            command = [sys.executable, "-m", "benchmarks.busy", str(rank), str(port), str(rounds)]
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
            )
        printed, _ = started[-1].communicate()
        (line,) = [line for line in printed.splitlines() if line.startswith("{")]
        return json.loads(line)
    finally:
        for process in started:
            process.kill()
            process.wait()


def yield_to_others() -> None:
    """Lets other programs go first on this core, which they would otherwise leave for the other one."""
    os.nice(NICE)
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text(str(NICE))


def main(rank: int, port: int, rounds: int) -> None:
    os.sched_setaffinity(0, {rank})
    if rank:
        yield_to_others()
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    import vnode

    def step(w, batch):
        def work(x):
            return 0 * jax.lax.fori_loop(0, TURNS, lambda _, y: jnp.sin(y) * 1.0001, x).sum()

        works = jax.lax.map(work, batch)

        def loss(w):
            return jnp.mean((batch @ w) ** 2 + works)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.01 * gradient, value

    whole = vnode.virtualize(step, virtual_nodes=NODES)
    few = vnode.virtualize(step, virtual_nodes=sum(CALIBRATION))
    w, batch = np.ones(64, np.float32), np.ones((NODES, 64), np.float32)

    def measured() -> np.ndarray:
        """Seconds of each device with 2 and with 8 nodes."""
        mine = vnode.profile(whole, (w, batch), {KINDS[rank]: jax.local_devices()}, nodes=ALONE).kinds[0]
        return process_allgather(np.array([m.seconds for m in mine.measurements]))

    def profiles_of(seconds: np.ndarray) -> vnode.Profiles:
        return vnode.Profiles(
            tuple(
                vnode.Profile(
                    kind, 1, tuple(vnode.Measurement(1, n, float(s)) for n, s in zip(ALONE, row, strict=True))
                )
                for kind, row in zip(KINDS, seconds, strict=True)
            )
        )

    chosen = vnode.balance(profiles_of(measured()), NODES).counts
    best = tuple(sum(chosen.get(kind, ())) for kind in KINDS)
    running = {}
    for counts in dict.fromkeys((CALIBRATION, best, *PLACEMENTS)):
        program = whole if sum(counts) == NODES else few
        placement = vnode.Placement(sum(counts), jax.devices(), counts=counts)
        running[counts] = program.on(placement).executor.compiled((w, batch[: sum(counts)]))

    alone: list[Any] = []
    times: dict[tuple[int, ...], list[float]] = {counts: [] for counts in running}
    for turn in range(rounds):
        alone.append(measured())
        order = list(running)
        random.Random(turn).shuffle(order)
        for repeat in range(3):
            for counts in order:
                compiled, inputs = running[counts]
                began = time.perf_counter()
                jax.block_until_ready(compiled(*inputs))
                if repeat:
                    times[counts].append(time.perf_counter() - began)
    if rank:
        return
    profiles = profiles_of(np.median(alone, axis=0))
    took = {counts: statistics.median(found) for counts, found in times.items()}

    def of(counts: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {kind: (n,) for kind, n in zip(KINDS, counts, strict=True)}

    between = max(0.0, took.pop(CALIBRATION) - profiles.seconds(of(CALIBRATION)))
    profiles = dataclasses.replace(profiles, between=between)
    found = [(counts, profiles.seconds(of(counts)), seconds) for counts, seconds in took.items()]
    print(json.dumps({"rows": found, "nodes": [p.node for p in profiles.kinds]}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
