"""Are predicted step times right? `python -m benchmarks.balance` compares them with published and with measured ones.

CPU devices of one process share its threads, so none of them is faster than another. They are made unequal in two ways:

  waiting    the nodes of slow devices have more to do: every example says how long its node waits on the host. The step
             is the same. Other programs hardly disturb it.
  busy       two processes with a device and a core each, of which one shares its core; see `benchmarks.busy`.

The times of each kind are measured alone by `vnode.profile`, on the few nodes that it takes by default; the model then
predicts steps on both kinds together, which are measured in turn, medians of several rounds.

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
from benchmarks import busy, published
from benchmarks.report import Sheet

WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Setting:
    """Unequal devices.

    Attributes:
        nodes: V; a node has one example.
        each: Devices of each kind.
        fast: Milliseconds that a node waits on a fast device.
        slow: The same on a slow one.
        placements: Nodes on each fast device, and on each slow one. What `balance` chooses is added.
    """

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


WAITING = Setting(24, 2, 15, 45, [((6, 6), (6, 6)), ((12, 12), ()), ((), (12, 12)), ((7, 7), (5, 5)), ((8, 8), (4, 4)),
    ((10, 10), (2, 2)), ((10, 9), (3, 2)), ((11, 11), (2,)), ((20,), (4,)), ((8, 8), (8,))])  # fmt: skip


def wait(milliseconds: np.ndarray) -> np.ndarray:
    time.sleep(float(milliseconds) / 1000)
    return np.zeros((), np.float32)


def make_step(setting: Setting) -> Any:
    def delay(work):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), work, vmap_method="sequential")

    def step(w, batch):
        works = jax.lax.map(delay, batch["work"])

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
        running.append(step.on(placement).executor.compiled((w, setting.batch(counts))))
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
    measured = [statistics.median(found) for found in times]
    found = [([*counts.values()], profiles.seconds(counts), m) for counts, m in zip(wanted, measured, strict=True)]
    return sheet(f"{setting.each} fast and {setting.each} slow devices, {setting.nodes} nodes", "fast : slow", found)


def beside_another(rounds: int) -> Sheet:
    """A device whose core is kept busy."""
    found = busy.rows(rounds)
    rows = [([[n] for n in counts], predicted, measured) for counts, predicted, measured in found["rows"]]
    each = " and ".join(f"{1000 * node:.0f} ms" for node in found["nodes"])
    return sheet(f"A device of its own core and one beside a busy process, {each} a node", "quiet : busy", rows)


def sheet(title: str, kinds: str, found: Sequence[tuple[Any, float, float]]) -> Sheet:
    """Nodes on each device, predicted and measured seconds; the placement that was chosen first."""
    errors = [abs(predicted / measured - 1) for _, predicted, measured in found]
    fastest = min(range(len(found)), key=lambda i: found[i][2])
    gap = found[0][2] / found[fastest][2] - 1
    return Sheet(
        title,
        [f"nodes, {kinds}", "measured, ms", "predicted, ms", "error"],
        [
            [
                " : ".join(" ".join(map(str, nodes)) or "-" for nodes in counts),
                f"{measured * 1000:.1f}",
                f"{predicted * 1000:.1f}",
                f"{predicted / measured - 1:+.1%}",
            ]
            for counts, predicted, measured in found
        ],
        f"Mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}. The first row was chosen; "
        + ("none was faster." if fastest == 0 else f"row {fastest + 1} was faster by {gap:.1%}."),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default="published,waiting,busy", help="what to compare with")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of every placement, half as many when busy")
    options = parser.parse_args()
    wanted = options.sections.split(",")
    sheets = published.sheets() if "published" in wanted else []
    sheets += [compare(WAITING, options.rounds)] if "waiting" in wanted else []
    sheets += [beside_another(-(-options.rounds // 2))] if "busy" in wanted else []
    for each in sheets:
        each.draw(Console())
    print("\n".join(each.markdown() for each in sheets))


if __name__ == "__main__":
    main()
