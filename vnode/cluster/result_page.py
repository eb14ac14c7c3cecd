"""Turns results of simulations into a page: a table, the devices of each job over time, utilisation, completion times.

Knows results and pictures. Must not know how results came about.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from vnode.cluster.job_figures import Result
from vnode.cluster.svg import COLOURS, STYLE, Axes, legend

ROW = 16
"""Pixels of a job's row."""


def write(folder: Path, results: Mapping[str, Result], figures: str, seeds: Mapping[str, Sequence[float]]) -> Path:
    """Writes the page.

    Args:
      folder: where; it is made if it is not there.
      results: by policy.
      figures: the table, as text.
      seeds: by policy, the mean JCT of each seed in seconds; empty if there are none.

    Returns:
      The page's file.
    """
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(results)}
    title = f"{len(next(iter(results.values())).jobs)} jobs on {next(iter(results.values())).devices} devices"
    parts = [f"<h1>{title}</h1>", table(figures)]
    parts += ["<h2>Devices that train</h2>", legend(colours)]
    parts += [utilisation(result, longest(results), colours[name]) for name, result in results.items()]
    parts += ["<h2>Share of jobs that have ended within a time</h2>", completion(results, colours)]
    if seeds:
        parts += [f"<h2>Mean JCT over {len(next(iter(seeds.values())))} seeds</h2>", spread(seeds, colours)]
    for name, result in results.items():
        parts += [f"<h2>Devices of each job: {html.escape(name)}</h2>", gantt(result)]
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    page += f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(page + "".join(parts) + "</html>", encoding="utf-8")
    return path


def table(text: str) -> str:
    """A table of text, whose columns are two spaces apart at least, as HTML."""
    rows = [[html.escape(cell) for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    lines = [
        "".join(f"<{tag}>{cell}</{tag}>" for cell in row)
        for row, tag in zip(rows, ["th"] + ["td"] * len(rows), strict=False)
    ]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def utilisation(result: Result, until: float, colour: str) -> str:
    """Devices that train, over time."""
    axes = Axes(until, result.devices, "time, s", "devices", 120)
    start, total, now = 0.0, 0, [0] * len(result.jobs)
    for event in result.events:
        if event.kind in ("runs", "ended"):
            if total and event.time > start:
                axes.box(start, event.time, 0, total, colour)
            count = event.devices if event.kind == "runs" else 0
            start, total, now[event.job] = event.time, total + count - now[event.job], count
    return axes.svg()


def completion(results: Mapping[str, Result], colours: Mapping[str, str]) -> str:
    """The part of the jobs whose completion time is at most x."""
    every = {name: [job.jct for job in result.of_jobs()] for name, result in results.items()}
    times = {name: sorted(jct for jct in each if math.isfinite(jct)) for name, each in every.items()}
    axes = Axes(max(each[-1] for each in times.values()), 100, "from arrival to end, s", "% of jobs")
    for name, each in times.items():
        points = [(0.0, 0.0), *((time, 100 * (i + 1) / len(every[name])) for i, time in enumerate(each))]
        axes.line(points, colours[name], steps=True)
    return axes.svg()


def spread(seeds: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> str:
    """Mean completion times: a bar to the median of all seeds, a line from the least to the most."""
    height = 60 + 26 * len(seeds)
    axes = Axes(max(map(max, seeds.values())), len(seeds), "mean JCT, s", height=height, rows=list(seeds))
    for row, (name, values) in enumerate(seeds.items()):
        bottom, ordered = len(seeds) - row - 1, sorted(values)
        middle = ordered[len(ordered) // 2]
        axes.box(0, middle, bottom + 0.2, bottom + 0.8, colours[name], f"{name}: {middle:.0f} s")
        axes.line([(ordered[0], bottom + 0.5), (ordered[-1], bottom + 0.5)], "currentColor")
    return axes.svg()


def gantt(result: Result) -> str:
    """A row for each job: from its arrival on, as high as its share of what it demands."""
    count = len(result.jobs)
    names = [str(job.facts.get("name", job.id)) for job in result.jobs]
    axes = Axes(result.makespan, count, "time, s", height=60 + ROW * count, rows=names)
    priorities = sorted({job.priority for job in result.jobs})
    for row, (job, spans) in enumerate(zip(result.jobs, result.shares(), strict=True)):
        bottom = count - row - 1
        axes.line([(min(job.arrival, result.makespan), bottom + 0.05), (result.makespan, bottom + 0.05)], "#8884")
        for start, end, held in spans:
            top = bottom + 0.05 + 0.9 * min(held / job.demand, 1)
            colour = COLOURS[priorities.index(job.priority) % len(COLOURS)]
            axes.box(
                start, end, bottom + 0.05, top, colour, f"{job.id}: {held} of {job.demand}, {start:.0f} to {end:.0f} s"
            )
    return axes.svg() + legend({f"priority {p:g}": COLOURS[i % len(COLOURS)] for i, p in enumerate(priorities)})


def longest(results: Mapping[str, Result]) -> float:
    """The latest end."""
    return max(result.makespan for result in results.values())
