"""Turns measured rows into tables: for the terminal (rich) and as markdown.

This file knows rows and how to show them. It must not measure anything, nor import JAX.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
HAND, VNODE, JITTED, PLAIN = "scan by hand", "vnode", "vnode in jax.jit", "whole batch"


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn: title, column heads, cells as text, and what the reader must know."""

    title: str
    heads: Sequence[str]
    rows: list[list[str]]
    note: str = ""

    def draw(self, console: Console) -> None:
        """Prints the table."""
        table = Table(title=self.title, caption=self.note, title_justify="left", caption_justify="left")
        for i, head in enumerate(self.heads):
            table.add_column(head, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*row, style="bold" if VNODE in row else None)
        console.print(table)

    def markdown(self) -> str:
        """The table as markdown."""
        lines = [f"### {self.title}", "", "| " + " | ".join(self.heads) + " |"]
        lines.append("|" + "|".join(":--" if i == 0 else "--:" for i in range(len(self.heads))) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.note, ""])


def steps(rows: list[Row]) -> Sheet:
    """Step time, memory, compile time and accumulators, one line per model, devices, V and contender."""
    cells = []
    hand: Row = {}
    for row in rows:
        if row["contender"] == HAND:
            hand = row
        temp, held = row["temp_bytes"], row["held_bytes"]
        cells.append(
            [
                row["model"],
                str(row["devices"]),
                str(row["nodes"]),
                row["contender"],
                f"{row['ms']:.2f}",
                f"{row['ratio']:.3f}",
                f"{row['busy_ratio']:.3f}",
                _bytes(temp) + (f" + {_bytes(held)}" if held else ""),
                f"{(temp + held) / hand['temp_bytes']:.3f}" if hand else "",
                f"{row['accumulators']} ({_bytes(row['accumulator_bytes'])})",
                f"{row['lower_seconds']:.2f}",
                f"{row['compile_seconds']:.2f}",
                f"{row['difference']:.0e}",
            ]
        )
    heads = ["model", "devices", "V", "contender", "ms/step", "ratio", "CPU ratio", "temp/device", "memory ratio"]
    heads += ["accumulators", "lower s", "compile s", "error"]
    note = (
        "Medians of interleaved rounds; ratios are to the scan by hand, whose second run shows the noise. "
        "CPU ratio: of the time of all cores together, which other programs on the machine disturb less. "
        "Error: relative difference of the gradient moments from the whole batch's. "
        "On several devices optax and the whole batch run under jit with the batch sharded; "
        "optax.MultiSteps is called V / devices times per step, its accumulators held in the state (after the +)."
    )
    return Sheet("Step time and memory on CPU devices", heads, cells, note)


def growth(rows: list[Row]) -> Sheet:
    """Temporary memory against V at a fixed node size, one line per model and contender."""
    nodes = sorted({r["nodes"] for r in rows})
    cells = []
    for model, contender in _unique((r["model"], r["contender"]) for r in rows):
        found = {r["nodes"]: r["temp_bytes"] for r in rows if (r["model"], r["contender"]) == (model, contender)}
        changes = [f"{100 * (found[nodes[-1]] / found[first] - 1):+.1f}%" for first in nodes[:2]]
        cells.append([model, contender, *(_bytes(found[v]) for v in nodes), *changes])
    heads = ["model", "contender", *(f"V={v}" for v in nodes), *(f"from V={first}" for first in nodes[:2])]
    note = (
        "Growth is up to the largest V. A loop of one turn is no loop to the compiler, and a gradient that is made "
        "once needs no accumulator: what is paid between V=1 and V=2 is the accumulators."
    )
    return Sheet("Temporary memory when only V grows (fixed node size, 1 device)", heads, cells, note)


def tracing(rows: list[Row]) -> Sheet:
    """Tracing time against the number of equations, one line per depth."""
    cells = []
    for model in _unique(r["model"] for r in rows):
        found = {r["contender"]: r for r in rows if r["model"] == model}
        plain = found[PLAIN]
        line = [model, str(plain["equations"]), f"{plain['ms']:.0f}", f"{found[HAND]['ms']:.0f}"]
        if VNODE in found:
            total = found[VNODE]["ms"]
            rewrite = total - plain["ms"]
            line += [f"{total:.0f}", f"{rewrite / plain['ms']:.2f}", f"{1e3 * rewrite / plain['equations']:.1f}"]
        else:
            line += ["", "", ""]
        cells.append(line)
    heads = ["model", "equations", "plain ms", "by hand ms", "vnode ms", "rewrite / plain", "rewrite µs per equation"]
    note = "Processor time to the jaxpr, caches cleared. vnode's includes tracing the plain step; rewrite is the rest."
    return Sheet("Trace and rewrite", heads, cells, note)


def dispatch(rows: list[Row]) -> Sheet:
    """Time per call of a step that computes next to nothing."""
    cells = []
    for devices, leaves in _unique((r["devices"], r["leaves"]) for r in rows):
        found = {r["contender"]: r["microseconds"] for r in rows if (r["devices"], r["leaves"]) == (devices, leaves)}
        line = [str(devices), str(leaves), f"{found[PLAIN]:.0f}", f"{found[HAND]:.0f}"]
        if VNODE in found:
            line += [f"{found[JITTED]:.0f}", f"{found[VNODE]:.0f}", f"{found[VNODE] - found[JITTED]:+.1f}"]
        else:
            line += ["", "", ""]
        cells.append(line)
    heads = ["devices", "parameter arrays", "plain µs", "by hand µs", f"{JITTED} µs", "vnode µs", "vnode - in jit µs"]
    note = "From call to return, one node per device, arguments in place; the first three are called through jax.jit."
    return Sheet("Dispatch", heads, cells, note)


def resizing(rows: list[Row]) -> Sheet:
    """What a move to other devices costs."""
    cells = []
    for model, move in _unique((r["model"], r["move"]) for r in rows):
        found = [r for r in rows if (r["model"], r["move"]) == (model, move)]
        ratios = {k: [r["first_ms"] / r["step_ms"] for r in found if r["warmed up"] == k] for k in (False, True)}
        compiling = found[0]["compile_seconds"]
        cells.append(
            [
                model,
                move,
                f"{statistics.median(r['moving_ms'] for r in found):.1f}",
                _bytes(found[0]["bytes"]),
                f"{statistics.median(r['step_ms'] for r in found):.1f}",
                f"{ratios[False][0]:.2f}",
                f"{ratios[True][0]:.2f}" if ratios[True] else "",
                f"{statistics.median([*ratios[False], *ratios[True]]):.2f}",
                "" if compiling is None else f"{compiling:.1f}",
            ]
        )
    heads = ["model", "devices", "moving ms", "state", "step ms", "prepared", "warmed up", "again", "compiled ahead s"]
    note = (
        "The first step after a move, in steps that follow it there: the first time with a program that was prepared "
        "and never run, the same where it was warmed up, and the median of all rounds. Moving the state comes on top. "
        "The scan by hand stays where it is: compiled ahead, and run for the first time."
    )
    return Sheet("Resizing", heads, cells, note)


def tpu(rows: list[Row]) -> Sheet:
    """What the TPU compiler says, one line per topology and contender."""
    cells = []
    hand: Row = {}
    for row in rows:
        if row["contender"] == HAND:
            hand = row
        temp, held = row["temp_bytes"], row["held_bytes"]
        cells.append(
            [
                row["topology"],
                str(row["nodes"]),
                row["contender"],
                f"{row['cycles'] / 1e6:.2f}",
                f"{row['cycles'] / hand['cycles']:.3f}" if hand else "",
                _bytes(temp) + (f" + {_bytes(held)}" if held else ""),
                f"{(temp + held) / hand['temp_bytes']:.3f}" if hand else "",
                f"{row['inside']} ({_bytes(row['inside_bytes'])})",
                f"{row['outside']} ({_bytes(row['outside_bytes'])})",
                f"{row['compile_seconds']:.0f}",
            ]
        )
    heads = ["topology", "V", "contender", "Mcycles/step", "ratio", "temp/device", "ratio", "collectives in loop"]
    heads += ["outside", "compile s"]
    note = (
        "The compiler's own estimates, nothing is run: cycles are compute only, as often as the loops turn "
        "(for optax.MultiSteps, as often as it is called); bytes of collectives are what a device receives, "
        "in a loop per turn."
    )
    return Sheet("12-layer transformer on Cloud TPU, compiled without a TPU", heads, cells, note)


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} GiB"
