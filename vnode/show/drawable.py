"""Page of an object -> text, terminal output or HTML, whichever is requested.

Knows pages, and their renderers. Must not know a page's content, nor colours or HTML.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vnode.show.page import Page

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


class Drawn:
    """An object with a `page`: it is shown as text, in a terminal by rich, and as HTML in notebooks."""

    def page(self) -> Page:
        """The page that shows the object."""
        raise NotImplementedError

    def __str__(self) -> str:
        from vnode.show import text

        return text.encodable(text.draw(self.page()), written_in())

    def __repr__(self) -> str:
        from vnode.show import text

        page = self.page()
        return text.encodable(f"{type(self).__name__}({page.title}: {page.subtitle})", written_in())

    def show(self) -> None:
        """Shows it in the terminal; without rich, prints it as text."""
        try:
            from rich import print as draw
        except ImportError:
            draw = print
        draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from vnode.show import terminal  # rich is installed: it called this

        yield from terminal.draw(self.page(), options.max_width, options.encoding)

    def _repr_html_(self) -> str:
        from vnode.show import html

        return html.draw(self.page())


def written_in() -> str | None:
    """The encoding of standard output; None if there is none."""
    return getattr(sys.stdout, "encoding", None)
