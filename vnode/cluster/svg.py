"""Turns numbers into pictures: lines, steps and bars over two axes, as SVG that follows light and dark pages.

Knows coordinates and text. Must not know jobs.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40
CHARACTER, LONGEST = 7, 25
"""Pixels of a character, and the characters of the longest name of a row."""
COLOURS = ("#3b6fb6", "#c8553d", "#4f8a4b", "#8a5fa8", "#b98a1d", "#3a9a9a", "#b34d84", "#6b6b6b")

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 880px; padding: 0 1em; }
.wide { overflow-x: auto; } .wide td, .wide th { white-space: nowrap; }
svg { display: block; width: 100%; min-width: 600px; height: auto; } svg rect { shape-rendering: crispEdges; }
svg text { font-size: 12px; fill: currentColor; }
svg .grid { stroke: currentColor; opacity: .15; } svg .axis { stroke: currentColor; opacity: .6; }
table { border-collapse: collapse; } td, th { padding: .2em .5em; text-align: right; }
td:first-child, th:first-child { text-align: left; } th { border-bottom: 1px solid; font-weight: 600; }
.key { display: inline-block; margin-right: 1em; white-space: nowrap; }
.key i { display: inline-block; width: .9em; height: .9em; margin-right: .3em; vertical-align: -.1em; }
"""
"""The style sheet of a page with pictures."""


class Axes:
    """A picture with two axes, into which shapes are drawn.

    Args:
      right: the largest x; both axes begin at 0.
      top: the largest y.
      x_name: what x is, with its unit.
      y_name: what y is.
      height: of the picture, in pixels.
      rows: names of rows from top to bottom, each one unit of y high; without them y has numbers and its name.
    """

    def __init__(
        self, right: float, top: float, x_name: str, y_name: str = "", height: int = HEIGHT, rows: Sequence[str] = ()
    ) -> None:
        self.right, self.top, self.height = right or 1.0, top or 1.0, height
        names = [shortened(name) for name in rows]
        self.left = max([LEFT, *(CHARACTER * len(name) + 8 for name in names)])
        self.parts: list[str] = []
        for value in ticks(self.right):
            x = self.x(value)
            self.parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - BOTTOM}"/>')
            self.text(x, height - BOTTOM + 15, f"{value:,g}", "middle")
        for row, name in enumerate(names):
            self.text(self.left - 6, self.y(len(names) - row - 0.5) + 4, name, "end")
        for value in () if rows else ticks(self.top):
            y = self.y(value)
            self.parts.append(f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
            self.text(self.left - 6, y + 4, f"{value:,g}", "end")
        base = height - BOTTOM
        self.parts.append(f'<line class="axis" x1="{self.left}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>')
        self.text(WIDTH - RIGHT, height - 8, x_name, "end")
        if y_name:
            middle = (TOP + base) / 2
            self.parts.append(
                f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
                f"{html.escape(y_name)}</text>"
            )

    def x(self, value: float) -> float:
        """The pixel of an x."""
        return self.left + (WIDTH - self.left - RIGHT) * value / self.right

    def y(self, value: float) -> float:
        """The pixel of a y."""
        return self.height - BOTTOM - (self.height - BOTTOM - TOP) * value / self.top

    def text(self, x: float, y: float, words: str, anchor: str = "start") -> None:
        """Words at a pixel."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>')

    def line(self, points: Sequence[tuple[float, float]], colour: str, steps: bool = False) -> None:
        """A line through points; with `steps` it goes on level to each next x."""
        path: list[str] = []
        for i, (x, y) in enumerate(points):
            if i and steps:
                path.append(f"H{self.x(x):.1f}")
            path.append(f"{'L' if i else 'M'}{self.x(x):.1f} {self.y(y):.1f}")
        self.parts.append(f'<path d="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')

    def box(self, left: float, right: float, bottom: float, top: float, colour: str, words: str = "") -> None:
        """A rectangle, with words to be shown when one points at it."""
        x, y = self.x(left), self.y(top)
        width, height = max(self.x(right) - x, 0.5), self.y(bottom) - y
        title = f"<title>{html.escape(words)}</title>" if words else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">{title}</rect>'
        )

    def svg(self) -> str:
        """The picture."""
        drawn = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img">{"".join(self.parts)}</svg>'
        return f'<div class="wide">{drawn}</div>'


def shortened(name: str) -> str:
    """A name that fits beside a row: long ones keep both ends, by which one tells them apart.

    >>> shortened("resnet"), shortened("a-long-name-of-an-experiment-7")
    ('resnet', 'a-long-name-o…xperiment-7')
    """
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2 + 1]}…{name[-(LONGEST // 2 - 1) :]}"


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to the largest: some four to eight.

    >>> ticks(7), ticks(950)
    ([0, 2, 4, 6], [0, 200, 400, 600, 800])
    """
    rough = most / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(i * step, 10) if step < 1 else int(i * step) for i in range(int(most / step + 1e-9) + 1)]


def legend(names: Mapping[str, str]) -> str:
    """Names with their colours."""
    keys = (
        f'<span class="key"><i style="background:{colour}"></i>{html.escape(name)}</span>'
        for name, colour in names.items()
    )
    return f"<p>{''.join(keys)}</p>"
