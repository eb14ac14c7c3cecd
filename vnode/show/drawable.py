"""Objects that draw themselves: as text, in a terminal or in a notebook, whichever asks.

Knows a page, and who draws it. Must not know what is on the page, nor colours or HTML.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vnode.show.page import Page

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


class Drawn:
    """An object with a `page` draws itself: as text, in a terminal by rich, and as HTML in notebooks."""

    def page(self) -> Page:
        """What there is to see."""
        raise NotImplementedError

    def __str__(self) -> str:
        from vnode.show import text

        return text.encodable(text.draw(self.page()), written_in())

    def __repr__(self) -> str:
        from vnode.show import text

        page = self.page()
        return text.encodable(f"{type(self).__name__}({page.title}: {page.subtitle})", written_in())

    def show(self) -> None:
        """Draws it in the terminal; without rich, prints it as text."""
        try:
            from rich import print as draw
        except ImportError:
            draw = print
        draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from vnode.show import terminal  # rich is there, it is asking

        yield from terminal.draw(self.page(), options.max_width, options.encoding)

    def _repr_html_(self) -> str:
        from vnode.show import html

        return html.draw(self.page())


def written_in() -> str | None:
    """The encoding of standard output, where texts end up; None if there is none."""
    return getattr(sys.stdout, "encoding", None)
