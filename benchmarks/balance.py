"""Are predicted step times right? `python -m benchmarks.balance` compares them with published and with measured ones.

CPU devices of one process share its threads, so none of them is faster than another. They are made unequal by extra
work: every example says how much, and the examples of nodes on a slow device ask for more. The step is the same.

  waiting    a node waits on the host, as it would for a device that is busy. Other programs hardly disturb it.
  computing  a node runs a loop of run-time length. One device of each kind, since the machine may have two cores only;
             other programs that use the cores show in the times.

The times of each kind are measured alone by `vnode.profile`, as far as the node numbers that it takes by default; the
model then predicts steps on both kinds together, which are measured afterwards, in turn, medians of several rounds.

This file knows steps, placements and clocks. It must not know how times are fitted.
"""

import argparse
import dataclasses
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import vnode
from benchmarks import published
from benchmarks.report import Sheet

WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Setting:
    """Unequal devices.

    Attributes:
        name: Of the kind of extra work.
        nodes: V; a node has one example.
        each: Devices of each kind.
        fast: Extra work of a node on a fast device: milliseconds, or turns of a loop.
        slow: The same on a slow one.
        placements: Nodes on each fast device, and on each slow one. What `balance` chooses is added.
    """

    name: str
    nodes: int
    each: int
    fast: int
    slow: int
    placements: Sequence[tuple[Sequence[int], Sequence[int]]]

    def devices(self) -> dict[str, list[jax.Device]]:
        found = jax.devices()
        return {"fast": found[: self.each], "slow": found[self.each : 2 * self.each]}

    def batch(self, counts: dict[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """A batch whose examples ask for the work of the devices that they are on."""
        work = [getattr(self, kind) for kind, nodes in counts.items() for n in nodes for _ in range(n)]
        x = np.random.default_rng(0).normal(size=(self.nodes, WIDTH)).astype(np.float32)
        return {"x": x, "work": np.array(work, np.int32)}


SETTINGS = (
    Setting("waiting", 24, 2, 15, 45, [((6, 6), (6, 6)), ((12, 12), ()), ((), (12, 12)), ((7, 7), (5, 5)),
        ((8, 8), (4, 4)), ((10, 10), (2, 2)), ((10, 9), (3, 2)), ((11, 11), (2,)), ((20,), (4,)), ((8, 8), (8,))]),
    Setting("computing", 24, 1, 100_000, 300_000, [((12,), (12,)), ((24,), ()), ((), (24,)), ((14,), (10,)),
        ((16,), (8,)), ((20,), (4,)), ((22,), (2,))]),
)  # fmt: skip


def wait(milliseconds: np.ndarray) -> np.ndarray:
    time.sleep(float(milliseconds) / 1000)
    return np.zeros((), np.float32)


def extra(kind: str, x: jax.Array, work: jax.Array) -> jax.Array:
    """Zero, after some work."""
    if kind == "waiting":
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), work, vmap_method="sequential")
    turned = jax.lax.fori_loop(0, work, lambda _, y: jnp.sin(y) * 1.0001, x)
    return 0 * turned.sum()


def make_step(setting: Setting) -> Any:
    def step(w, batch):
        works = jax.lax.map(lambda one: extra(setting.name, *one), (batch["x"], batch["work"]))

        def loss(w):
            return jnp.mean((batch["x"] @ w) ** 2 + works)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.01 * gradient, value

    return vnode.virtualize(step, virtual_nodes=setting.nodes)


def compare(setting: Setting, rounds: int) -> Sheet:
    """Predicts, then measures."""
    step, w, devices = make_step(setting), jnp.ones(WIDTH), setting.devices()
    alone = [
        vnode.profile(step, (w, setting.batch({kind: [setting.nodes]})), {kind: devices[kind]}, steps=rounds)
        for kind in devices
    ]
    profiles = alone[0] | alone[1]
    chosen = vnode.balance(profiles, setting.nodes)
    print(chosen, flush=True)
    wanted = [{"fast": tuple(fast), "slow": tuple(slow)} for fast, slow in setting.placements]
    best = {"fast": chosen.counts.get("fast", ()), "slow": chosen.counts.get("slow", ())}
    wanted = [best, *(counts for counts in wanted if counts != best)]

    running = []
    for counts in wanted:
        used = [d for kind, nodes in counts.items() for d in devices[kind][: len(nodes)]]
        placement = vnode.Placement(setting.nodes, used, counts=[n for nodes in counts.values() for n in nodes])
        running.append(step.on(placement).prepare(w, setting.batch(counts)))
    times: list[list[float]] = [[] for _ in running]
    for turn in range(rounds + 1):
        order = list(range(len(running)))
        random.Random(turn).shuffle(order)
        for i in order:
            compiled, inputs = running[i]
            began = time.perf_counter()
            jax.block_until_ready(compiled(*inputs))
            if turn:
                times[i].append(time.perf_counter() - began)
    rows, errors = [], []
    for counts, found in zip(wanted, times, strict=True):
        predicted, measured = profiles.seconds(counts), statistics.median(found)
        errors.append(abs(predicted / measured - 1))
        rows.append(
            [
                " : ".join(" ".join(map(str, nodes)) or "-" for nodes in counts.values()),
                f"{measured * 1000:.1f}",
                f"{predicted * 1000:.1f}",
                f"{predicted / measured - 1:+.1%}",
            ]
        )
    fastest = min(range(len(times)), key=lambda i: statistics.median(times[i]))
    return Sheet(
        f"{setting.name}: {setting.each} fast and {setting.each} slow devices, {setting.nodes} nodes",
        ["nodes, fast : slow", "measured, ms", "predicted, ms", "error"],
        rows,
        f"Mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}. The first row was chosen; "
        + ("it is the fastest." if fastest == 0 else f"row {fastest + 1} is faster."),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default="published,waiting,computing", help="what to compare with")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of every placement")
    options = parser.parse_args()
    wanted = options.sections.split(",")
    sheets = published.sheets() if "published" in wanted else []
    sheets += [compare(setting, options.rounds) for setting in SETTINGS if setting.name in wanted]
    for sheet in sheets:
        sheet.draw(Console())
    print("\n".join(sheet.markdown() for sheet in sheets))


if __name__ == "__main__":
    main()
