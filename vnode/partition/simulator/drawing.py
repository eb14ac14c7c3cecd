"""A timeline -> an SVG picture: a row for each resource, a bar for each task.

Knows SVG, and how much one can see. Must not know how a timeline was found. Text and lines have the colour of the page,
and bars are translucent, so that the picture suits light and dark pages. It loads no other file.
"""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any

import numpy as np

from vnode.partition.simulator.graph import SECOND
from vnode.show.units import seconds, several

Timeline = Any
"""A `vnode.partition.simulator.timeline.Timeline`. That module imports this one, so it cannot be imported here."""

WIDTH, ROW, BAR, TOP, CHARACTER = 960, 24, 18, 34, 7.0
"""Pixels: the picture's width; the height of a row, of its bar, and of the space above the first row; a character's
width."""
LEAST = 720
"""Pixels: a picture is not scaled below this width, or its text would be too small to read."""
MOST_ROWS = 48
"""The most resources that are drawn."""
MOST_NAMED = 3000
"""The most bars that each have a tooltip."""
MOST_COLORS = 12
"""The number of labels that have colours of their own: those that take the most time."""
STYLE = (
    "svg.timeline .row{fill:currentColor;fill-opacity:.05}"
    "svg.timeline .critical{stroke:currentColor;stroke-width:2;stroke-opacity:.85;fill:none}"
)
UNITS = (("s", SECOND), ("ms", 10**9), ("µs", 10**6), ("ns", 10**3), ("ps", 1))


def draw(timeline: Timeline) -> str:
    """Draws a timeline, see `Timeline.svg`."""
    graph = timeline.graph
    used = np.flatnonzero(timeline.busy).tolist()
    shown, more = used[:MOST_ROWS], len(used) - MOST_ROWS
    rest = f"… and {several(more, 'more resource')}" if more > 0 else ""
    left = int(max([len(graph.resources[r]) for r in shown], default=0) * CHARACTER) + 12
    inner, total = max(WIDTH - left - 46, 100), max(timeline.makespan, 1)
    scale = inner / total
    ranks = colors(timeline)
    rows, bars, lines = [], [], []
    tasks: list[list[int]] = [[] for _ in graph.resources]
    for task, on in enumerate(graph.on):
        for resource in on:
            tasks[resource].append(task)
    named = sum(len(tasks[r]) for r in shown) <= MOST_NAMED
    for i, r in enumerate(shown):
        y = TOP + i * ROW
        rows.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(graph.resources[r])}</text>')
        rows.append(f'<rect class="row" x="{left}" y="{y}" width="{inner}" height="{BAR}" rx="2"/>')
        rows.append(f'<text class="quiet" x="{left + inner + 6}" y="{y + 14}">{timeline.utilization[r]:.0%}</text>')
        own = np.array(tasks[r])
        own = own[np.argsort(timeline.start[own], kind="stable")]
        bars += row(timeline, own, ranks, left, y, scale, named)
        for start, end in merged_bars(timeline, own[np.isin(own, timeline.critical_path)], scale):
            lines.append(
                f"M{left + start * scale:.1f} {y + BAR + 1.5}H{left + max(end * scale, start * scale + 1):.1f}"
            )
    bottom = TOP + len(shown) * ROW
    legend, height = key(ranks, left, bottom + 22, inner)
    note = f'<text class="quiet" x="{left}" y="{height + 16}">{escape(rest)}</text>' if rest else ""
    height += 24 if rest else 4
    count = f"{several(len(graph), 'task')} on {several(len(graph.resources), 'resource')}"
    body = f"{axis(timeline.makespan, left, bottom, scale)}{''.join(rows)}{''.join(bars)}"
    body += f'<path class="critical" d="{"".join(lines)}"/>{legend}{note}'
    return picture("timeline", f"Timeline of {duration(timeline.makespan)}: {count}", height, STYLE, body)


def picture(kind: str, title: str, height: int, style: str, body: str) -> str:
    """A picture that is drawn in the text's colour and loads no other file.

    Args:
      kind: its class.
      title: its title, as text.
      height: pixels.
      style: the styles of its own classes, beside ``quiet`` and ``grid``.
      body: the elements in it.
    """
    usual = (
        f"svg.{kind}{{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:currentColor;max-width:100%;"
        f"height:auto}}svg.{kind} .quiet{{opacity:.65}}svg.{kind} .grid{{stroke:currentColor;stroke-opacity:.16}}"
    )
    return (
        f'<svg class="{kind}" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" style="min-width:{LEAST}px" role="img">'
        f"<title>{escape(title)}</title><style>{usual}{style}</style>{body}</svg>"
    )


def colors(timeline: Timeline) -> dict[str, int]:
    """The colour of each label: its rank by time, longest first; all labels beyond the last colour share it."""
    graph, time = timeline.graph, Counter[str]()
    for label, duration, on in zip(graph.label, graph.duration, graph.on, strict=True):
        time[label] += duration * len(on)
    return {label: min(rank, MOST_COLORS) for rank, (label, _) in enumerate(time.most_common())}


def fill(rank: int) -> str:
    """The colour of a rank. Neighbours differ much in hue (the golden angle); ranks beyond the last are grey."""
    if rank >= MOST_COLORS:
        return "hsla(0,0%,50%,.5)"
    return f"hsla({(210 + 137.508 * rank) % 360:.0f},{70 if rank % 2 == 0 else 55}%,{55 if rank % 3 else 48}%,.72)"


def row(
    timeline: Timeline, tasks: np.ndarray, ranks: dict[str, int], left: int, y: int, scale: float, named: bool
) -> list[str]:
    """The bars of a resource: each with its name; many bars are one path for each colour."""
    graph, found = timeline.graph, []
    if named:
        for t in tasks.tolist():
            start, end = int(timeline.start[t]), int(timeline.end[t])
            x, wide = left + start * scale, (end - start) * scale
            place = f'x="{x:.2f}" y="{y}" width="{max(wide - 0.6, 0.4):.2f}" height="{BAR}" rx="{min(2, wide / 4):.1f}"'
            label = graph.label[t]
            about = (
                f"task {t}{label and f' ({label})'}: {duration(end - start)}, from {duration(start)} to {duration(end)}"
            )
            found.append(f'<rect {place} fill="{fill(ranks[label])}"><title>{escape(about)}</title></rect>')
            if label and wide > CHARACTER * len(label) + 6:
                found.append(
                    f'<text x="{x + wide / 2:.1f}" y="{y + 13}" text-anchor="middle" pointer-events="none">'
                    f"{escape(label)}</text>"
                )
        return found
    kinds = np.array([ranks[graph.label[t]] for t in tasks])
    for rank in np.unique(kinds).tolist():
        path = ""
        for start, end in merged_bars(timeline, tasks[kinds == rank], scale):
            wide = max((end - start) * scale, 0.2)
            path += f"M{left + start * scale:.2f} {y}h{wide:.2f}v{BAR}h-{wide:.2f}z"
        found.append(f'<path d="{path}" fill="{fill(rank)}"/>')
    return found


def merged_bars(timeline: Timeline, tasks: np.ndarray, scale: float) -> list[tuple[int, int]]:
    """The extents of tasks in order of time; tasks without a visible gap between them are merged."""
    if not len(tasks):
        return []
    start, end = timeline.start[tasks], timeline.end[tasks]
    breaks = np.flatnonzero((start[1:] - end[:-1]) * scale > 0.3)
    firsts, lasts = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [len(tasks) - 1]])
    return list(zip(start[firsts].tolist(), end[lasts].tolist(), strict=True))


def axis(makespan: int, left: int, bottom: int, scale: float) -> str:
    """The axis of times above the rows, with lines through them at round distances."""
    name, unit = next((name, unit) for name, unit in UNITS if makespan >= unit or unit == 1)
    rough = makespan / unit / 8
    power = 10.0 ** np.floor(np.log10(max(rough, 1e-9)))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    found = []
    for k in range(int(makespan / unit / step) + 1):
        x = left + k * step * unit * scale
        text = f"{k * step:.6g}" + (f" {name}" if k == 0 else "")
        found.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom - 4}"/>')
        found.append(f'<text class="quiet" x="{x:.1f}" y="{TOP - 12}" text-anchor="middle">{text}</text>')
    return "".join(found)


def key(ranks: dict[str, int], left: int, y: int, inner: int) -> tuple[str, int]:
    """The legend of the colours, and its lower end."""
    items = [(fill(rank), label) for label, rank in ranks.items() if label]
    if len(items) > MOST_COLORS:
        items = [*items[:MOST_COLORS], (fill(MOST_COLORS), several(len(items) - MOST_COLORS, "other"))]
    found, x = [], left
    for color, name in [*items, ("", "critical path")]:
        wide = int(CHARACTER * len(name)) + 32
        if x + wide > left + inner and x > left:
            x, y = left, y + 20
        mark = f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{color}"/>'
        line = f'<path class="critical" d="M{x} {y - 4}h14"/>'
        found.append(f'{mark if color else line}<text x="{x + 18}" y="{y}">{escape(name)}</text>')
        x += wide
    return "".join(found), y + 8


def duration(time: int) -> str:
    """A number of picoseconds for people.

    >>> duration(1_500_000), duration(42)
    ('1.5 µs', '42 ps')
    """
    return seconds(time / SECOND)
