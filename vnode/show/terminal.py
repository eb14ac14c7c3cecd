"""Page -> coloured terminal output.

Knows rich, which must be installed, and styles by name. Must not know pages: `text` lays them out. Only the terminal's
own colours are used, so that its theme decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from vnode.show.page import Page
from vnode.show.text import QUIET, STRONG, encodable, lines

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
"""The colours of devices, in turn."""

STYLES = {STRONG: "bold", QUIET: "dim"}


def draw(page: Page, width: int, encoding: str | None = None) -> Iterator[Text]:
    """Renders a page.

    Args:
      page: the page.
      width: the terminal's width in characters.
      encoding: the terminal's encoding.

    Yields:
      Objects that rich can print, from top to bottom.
    """
    for line in lines(page, width):
        drawn = Text(no_wrap=True, overflow="ellipsis")
        for text, style in line:
            drawn.append(encodable(text, encoding), style=rich_style(style))
        drawn.rstrip()
        yield drawn


def rich_style(name: str) -> str:
    """rich's name of a style."""
    kind, _, device = name.partition(" ")
    if not device:
        return STYLES.get(kind, "")
    colour = COLOURS[int(device) % len(COLOURS)]
    return f"black on {colour}" if kind == "node" else colour
