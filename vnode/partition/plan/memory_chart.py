"""The live bytes of one device, one fused op after another -> an SVG picture of memory over time.

Knows SVG, and bytes held while fused ops run. Must not know how these were found. Areas are translucent, so that the
picture suits light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from vnode.partition.cost.program_memory import Level
from vnode.partition.simulator.drawing import MOST_NAMED, WIDTH, picture
from vnode.show.units import several, size

LEFT, RIGHT, TOP, HEIGHT, BELOW = 76, 46, 26, 160, 12
"""Pixels: the margin beside, the margin above, the height, and the margin below the area in which bytes are drawn."""
STYLE = (
    "svg.levels .always{fill:currentColor;fill-opacity:.14}svg.levels .held{fill:hsla(210,70%,55%,.55)}"
    "svg.levels .over{fill:transparent}"
    "svg.levels .limit{stroke:hsl(0,70%,55%);stroke-width:1.5;stroke-dasharray:5 4;fill:none}"
)


def draw(levels: Sequence[Level], always: int, limit: int) -> str:
    """Draws live bytes over time.

    Args:
      levels: total bytes while each fused op runs, in order; at least one.
      always: bytes that are live all the time: arguments and results.
      limit: the device's memory, bytes; drawn if it is not far above the peak.

    Returns:
      An SVG picture that loads no other file.

    Example:
      >>> drawn = draw([Level(300, "dot_general"), Level(500, "tanh", 1)], 200, 600)
      >>> drawn.startswith("<svg") and "500 B at most" in drawn and "600 B" in drawn
      True
    """
    most = max(level.bytes for level in levels)
    shown = limit <= 2 * most
    ceiling = max(most, limit if shown else 0, 1) * 1.05
    inner, bottom = WIDTH - LEFT - RIGHT, TOP + HEIGHT

    def x(place: float) -> float:
        return LEFT + inner * place / len(levels)

    def y(count: float) -> float:
        return bottom - HEIGHT * count / ceiling

    steps = "".join(f"V{y(level.bytes):.1f}H{x(k + 1):.1f}" for k, level in enumerate(levels))
    parts = [f'<path class="held" d="M{x(0):.1f} {y(always):.1f}{steps}V{y(always):.1f}z"/>']
    place = f'x="{LEFT}" y="{y(always):.1f}" width="{inner}" height="{bottom - y(always):.1f}"'
    parts.append(f'<rect class="always" {place}/>')
    parts += rules(ceiling, y, inner)
    if shown:
        parts.append(f'<path class="limit" d="M{LEFT} {y(limit):.1f}h{inner}"/>')
        parts.append(f'<text x="{LEFT + inner}" y="{y(limit) - 4:.1f}" text-anchor="end">may hold {size(limit)}</text>')
    if len(levels) <= MOST_NAMED:
        for k, level in enumerate(levels):
            where = " in a loop or branch" if level.depth else ""
            about = f"{size(level.bytes)} while {level.label} runs{where}"
            parts.append(
                f'<rect class="over" x="{x(k):.2f}" y="{TOP}" width="{inner / len(levels):.2f}" height="{HEIGHT}">'
                f"<title>{escape(about)}</title></rect>"
            )
    at = next(k for k, level in enumerate(levels) if level.bytes == most)
    said = f"{size(most)} at most, {size(always)} of it all the time; {several(len(levels), 'fused op')} in order"
    parts.append(f'<text x="{LEFT}" y="{TOP - 10}">{escape(said)}</text>')
    place = f'cx="{x(at + 0.5):.1f}" cy="{y(most):.1f}"'
    parts.append(f'<circle {place} r="3"><title>{escape(levels[at].label)}</title></circle>')
    return picture("levels", f"Memory over time: {said}", bottom + BELOW, STYLE, "".join(parts))


def rules(ceiling: float, y: Callable[[float], float], inner: int) -> list[str]:
    """Lines at round numbers of bytes, in powers of two."""
    step = 1
    while ceiling / step > 5:
        step *= 2
    found = []
    for k in range(int(ceiling / step) + 1):
        at = y(k * step)
        found.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + inner}" y1="{at:.1f}" y2="{at:.1f}"/>')
        place = f'x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end"'
        found.append(f'<text class="quiet" {place}>{size(k * step)}</text>')
    return found
