"""Computes how much of a job's time is useful work, from failure rates of hosts and the stall of each loss.

    python -m benchmarks.goodput
    python -m benchmarks.goodput --picture docs/pictures/goodput.png

A model: no job of such a size was run. Goodput is the work done, divided by that of as many hosts that never fail.
Three ways to go on after the loss of a host are compared:

    checkpoint-restart   waits for a replacement, starts all processes, loads the last checkpoint
    restart-all          starts all processes with the hosts that are left, and again when a replacement is there;
                         the state comes out of memory, so that no work is lost but the running steps
    survivors go on      processes stay; the nodes of the lost host move to the others, and back to its replacement

`benchmarks.goodput_simulation` is the check: it draws failures, and knows none of these formulas.
`docs/goodput.md` lists assumptions and sources. This file must not measure anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import goodput_simulation
from benchmarks.report import Sheet

DAY = 86400.0

RATES = {
    "Llama 3 405B": 419 / (16384 / 8 * 54),
    "RSC-1, all jobs": 6.50 / 1000,
    "RSC-1, 1,024 GPUs": 24 / (1024 / 8 * 7.9),
}
"""Losses a day and host of eight GPUs, from published studies; `docs/goodput.md` cites them."""
LOWEST, HIGHEST = min(RATES, key=RATES.__getitem__), max(RATES, key=RATES.__getitem__)
HOSTS = (1, 8, 64, 512, 1024, 2048, 4096)
BAND = 0.0, 60.0
"""Seconds of recovery that the picture's band covers."""
MANY = 2048
"""The hosts of Llama 3 405B, and of the table of assumptions."""

CHECKPOINT, RESTART, SURVIVORS = "checkpoint-restart", "restart-all", "survivors go on"
WAYS = (CHECKPOINT, RESTART, SURVIVORS)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds, but for the number of nodes; the defaults are those of the page.

    Attributes:
      detect: from a loss until the others know of it.
      replace: from a loss until another host is there.
      start: of a host's processes: import, connection, compilation, loading.
      save: for which a checkpoint holds training up.
      save_every: between checkpoints where they only guard against the loss of all hosts.
      recover: from the knowledge of a loss to the next generation of the survivors.
      join: for which a joining host holds the others up.
      slower: work lost to each compilation of a next generation while training goes on.
      repeat: of the steps that are made again.
      nodes: virtual nodes of each device while no host is missing.
    """

    detect: float = 10.0
    replace: float = 300.0
    start: float = 80.0
    save: float = 10.0
    save_every: float = 3600.0
    recover: float = 6.0
    join: float = 0.6
    slower: float = 22.5
    repeat: float = 10.0
    nodes: int = 8

    def stalls(self, way: str) -> tuple[float, float]:
        """The stall of a loss, and that of a replacement's arrival."""
        if way == RESTART:
            return self.detect + self.start + self.repeat, self.start
        if way == SURVIVORS:
            return self.detect + self.recover + self.repeat + self.slower, self.join + self.slower
        return self.detect + self.replace + self.start, 0.0


def interval(costs: Costs, rate: float) -> float:
    """Young's interval between checkpoints: the square root of twice the save times the mean time between losses."""
    return math.sqrt(2 * costs.save / rate)


def restarted(costs: Costs, rate: float) -> float:
    """The goodput of checkpoint-restart, by Daly's formula for exponential times between the job's losses.

    Args:
      costs: seconds of everything.
      rate: losses of any host, a second.

    Returns:
      Work divided by time. A loss during a restart begins the restart again.
    """
    if rate == 0:
        return 1.0
    every = interval(costs, rate)
    stall = costs.stalls(CHECKPOINT)[0]
    return rate * every * math.exp(-rate * stall) / math.expm1(rate * (every + costs.save))


def speed(hosts: int, missing: int, nodes: int) -> float:
    """The speed of a step with hosts missing: the slowest device's nodes decide."""
    left = hosts - missing
    return nodes / math.ceil(hosts * nodes / left) if left else 0.0


def kept(costs: Costs, rate: float, hosts: int, way: str) -> float:
    """The goodput of a job that stays in memory, by the stationary state of hosts that fail independently.

    A host works for an exponential time, then is missing for `costs.replace`. The job makes steps where no host has
    been lost within the stall of a loss, and none has joined within that of a join. So every host must be in one of two
    states: missing for longer than the one, or there for longer than the other.

    Args:
      costs: seconds of everything.
      rate: losses of one host, a second of its work.
      hosts: at least two.
      way: `RESTART` or `SURVIVORS`.

    Returns:
      Work divided by time.
    """
    loss, join = costs.stalls(way)
    there = 1 / (1 + rate * costs.replace)
    away = rate * there * max(costs.replace - loss, 0.0)
    settled = there * math.exp(-rate * max(join, loss - costs.replace))
    total, missing = 0.0, 0
    while missing < hosts:
        log = math.lgamma(hosts + 1) - math.lgamma(missing + 1) - math.lgamma(hosts - missing + 1)
        if missing:
            log += missing * math.log(away) if away else -math.inf
        term = math.exp(log + (hosts - missing) * math.log(settled))
        total += term * speed(hosts, missing, costs.nodes)
        if term < 1e-15 and missing > hosts * away:
            break
        missing += 1
    return total * costs.save_every / (costs.save_every + costs.save)


def goodput(way: str, hosts: int, per_day: float, costs: Costs | None = None) -> float:
    """The goodput of a job; one host alone has nobody to go on, and restarts from its checkpoint.

    Args:
      way: one of `WAYS`.
      hosts: when none is missing.
      per_day: losses of one host a day.
      costs: those of the page if left out.

    Returns:
      Between zero and one.
    """
    costs = costs or Costs()
    if way == CHECKPOINT or hosts == 1:
        return restarted(costs, hosts * per_day / DAY)
    return kept(costs, per_day / DAY, hosts, way)


def simulated(
    way: str, hosts: int, per_day: float, costs: Costs | None = None, seed: int = 0, **failing: Any
) -> tuple[float, float]:
    """The mean goodput of simulated jobs and its standard error; `failing` as of `goodput_simulation.Hosts`."""
    costs = costs or Costs()
    rate = per_day / DAY
    if way == CHECKPOINT or hosts == 1:
        job = goodput_simulation.Restarted(costs.stalls(CHECKPOINT)[0], interval(costs, hosts * rate), costs.save)
        saving = 1.0
    else:
        job = goodput_simulation.Kept(*costs.stalls(way), [speed(hosts, m, costs.nodes) for m in range(hosts + 1)])
        saving = costs.save_every / (costs.save_every + costs.save)
    failures = goodput_simulation.Hosts(hosts, 1 / rate, costs.replace, **failing)
    mean, error = goodput_simulation.simulate(job, failures, seed=seed)
    return mean * saving, error * saving


def curves(hosts: Sequence[int] = HOSTS) -> Sheet:
    """Goodput over hosts, for the lowest and the highest rate."""
    rows = []
    for name in (LOWEST, HIGHEST):
        for n in hosts:
            cells = [f"{goodput(way, n, RATES[name]):.1%}" for way in WAYS]
            between = DAY / (n * RATES[name]) / 3600
            rows.append([name, f"{n:,}", f"{between:,.1f}", *cells])
    return Sheet("Goodput by the formulas", ["rate", "hosts", "hours between losses", *WAYS], rows)


VARIED = (
    ("as above", Costs()),
    ("a replacement is there at once", Costs(replace=0.0)),
    ("a replacement takes an hour", Costs(replace=3600.0)),
    ("losses noticed at once, survivors recover in 0.02 s", Costs(detect=0.0, recover=0.02)),
    ("survivors recover in 20 s", Costs(recover=20.0)),
    ("survivors recover in 60 s", Costs(recover=60.0)),
    ("no step slower while the next generation compiles", Costs(slower=0.0)),
    ("state donated: 100 steps of 5 s, half of them made again", Costs(repeat=250.0)),
    ("starting all processes takes 20 s", Costs(start=20.0)),
    ("starting all processes takes 600 s", Costs(start=600.0)),
    ("a checkpoint holds up for 0.34 s", Costs(save=0.34)),
    ("a checkpoint holds up for 60 s", Costs(save=60.0)),
    ("one node a device", Costs(nodes=1)),
    ("32 nodes a device", Costs(nodes=32)),
)


def variations(hosts: int = MANY, name: str = LOWEST) -> Sheet:
    """Goodput with one assumption changed."""
    rows = [[what, *(f"{goodput(way, hosts, RATES[name], costs):.1%}" for way in WAYS)] for what, costs in VARIED]
    return Sheet(f"{hosts:,} hosts, {name}: one assumption changed", ["assumption", *WAYS], rows)


def break_even(hosts: int, name: str) -> float:
    """Seconds of recovery with which survivors that go on are as slow as restarting all, by bisection."""
    other = goodput(RESTART, hosts, RATES[name])
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        ahead = goodput(SURVIVORS, hosts, RATES[name], Costs(recover=middle)) > other
        low, high = (middle, high) if ahead else (low, middle)
    return low


def checked(hosts: Sequence[int], name: str, seed: int) -> Sheet:
    """Simulated goodput: exponential beside the formula, other failures without one."""
    rows = []
    for n in hosts:
        for way in WAYS:
            cells = [f"{n:,}", way, f"{goodput(way, n, RATES[name]):.2%}"]
            kinds: tuple[dict[str, Any], ...] = ({}, {"shape": 0.7}, {"together": 0.1, "rack": 8})
            for failing in kinds:
                mean, error = simulated(way, n, RATES[name], seed=seed, **failing)
                cells.append(f"{mean:.2%} ± {error:.3%}")
            rows.append(cells)
    heads = ["hosts", "way", "formula", "exponential", "Weibull, shape 0.7", "a tenth takes a rack of 8"]
    return Sheet(f"{name}: simulated, with standard errors", heads, rows)


def draw(path: Path, seed: int) -> None:
    """Draws goodput over hosts, lines by the formulas and points by simulation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hosts = sorted({round(2 ** (e / 4)) for e in range(49)})
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for panel, name in zip(panels, (LOWEST, HIGHEST), strict=True):
        for way, colour, mark in zip(WAYS, ("#b3541e", "#6c5aa8", "#1f7a5c"), "osD", strict=True):
            panel.plot(hosts, [100 * goodput(way, n, RATES[name]) for n in hosts], color=colour, label=way)
            for n in (1, 4, 16, 64, 256, 1024, 4096):
                mean, error = simulated(way, n, RATES[name], seed=seed)
                panel.errorbar(n, 100 * mean, 100 * error, fmt=mark, color=colour, markersize=4, capsize=2)
        band = [[100 * goodput(SURVIVORS, n, RATES[name], Costs(recover=s)) for n in hosts] for s in BAND]
        panel.fill_between(
            hosts, *band, color="#1f7a5c", alpha=0.2, linewidth=0, label=f"recovery in {BAND[0]:.0f} to {BAND[1]:.0f} s"
        )
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 4, 16, 64, 256, 1024, 4096], ["1", "4", "16", "64", "256", "1,024", "4,096"])
        panel.set_xlabel("hosts of 8 GPUs")
        panel.set_title(f"{name}: {1000 * RATES[name]:.1f} losses per 1,000 host-days", fontsize=10)
        panel.grid(alpha=0.3)
        panel.set_ylim(50, 101)
    panels[0].set_ylabel("goodput, % (model)")
    panels[0].legend(loc="lower left", frameon=False, title="lines: formulas; points: simulated")
    figure.savefig(path, dpi=144)
    plt.close(figure)


def main() -> None:
    """Prints the tables; draws the picture if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description="Goodput of jobs whose hosts fail: a model."
    )
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    parser.add_argument("--picture", type=Path, help="draw goodput over hosts into this file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    options = parser.parse_args()
    sheets = [curves(), variations(), checked((16, 256, 4096), HIGHEST, options.seed)]
    console = Console(width=None if sys.stdout.isatty() else 150)
    for sheet in sheets:
        if options.markdown:
            print(sheet.markdown())
        else:
            sheet.draw(console)
    for name in (LOWEST, HIGHEST):
        seconds = break_even(MANY, name)
        print(f"{MANY:,} hosts, {name}: survivors that recover in {seconds:.0f} s are as slow as restart-all")
    if options.picture:
        draw(options.picture, options.seed)


if __name__ == "__main__":
    main()
