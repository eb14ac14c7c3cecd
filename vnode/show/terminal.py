"""Pages in a terminal.

Knows rich, which has to be installed, and pages. Must not know what pages are about. Only the terminal's own colours
are used, so that its theme decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from vnode.show.grid import Grid
from vnode.show.page import Cell, Facts, Page, Picture, Table
from vnode.show.units import several

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
"""Of devices, in turn."""

INDENT = 2

Drawing = RichTable | Text | Padding


def draw(page: Page, width: int, depth: int = 0) -> Iterator[Drawing]:
    """Draws a page.

    Args:
      page: what to draw.
      width: of the terminal, characters.
      depth: how many pages it is part of.

    Yields:
      What rich can print, from top to bottom.
    """
    yield Text.assemble((page.title, "bold"), ("   " if page.subtitle else "", ""), page.subtitle)
    for block in page.blocks:
        yield Text()
        match block:
            case Page():
                for part in draw(block, width - INDENT, depth + 1):
                    yield Padding(part, (0, 0, 0, INDENT), expand=False)
            case Facts():
                yield from facts(block)
            case Picture():
                if block.title:
                    yield heading(block.title, block.note)
                yield from grid(block.grid, width)
            case Table():
                if block.title:
                    yield heading(block.title, block.note)
                yield table(block)
                if block.rest:
                    yield Text(f"  {block.rest}", style="dim")


def heading(title: str, note: str) -> Text:
    return Text.assemble((title, "bold"), (f"  {note}" if note else "", "dim"))


def facts(block: Facts) -> Iterator[Drawing]:
    """Names and what is to know of them."""
    if block.title:
        yield Text(block.title, style="bold")
    rows = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for fact in block.facts:
        rows.add_row(Text(fact.name), Text.assemble(fact.text, (f"  {fact.note}" if fact.note else "", "dim")))
    yield Padding(rows, (0, 0, 0, INDENT), expand=False)


def table(block: Table) -> Drawing:
    rows = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim", border_style="dim")
    for column in block.columns:
        justify = "right" if column.right else "left"
        rows.add_column(Text(column.name), justify=justify, no_wrap=not column.wide, overflow="fold")
    for row in block.rows:
        rows.add_row(*map(cell, row))
    return Padding(rows, (0, 0, 0, INDENT), expand=False)


def cell(entry: Cell) -> Text:
    return Text(entry.text, style="bold" if entry.strong else "dim" if entry.quiet else "")


def grid(block: Grid, width: int) -> Iterator[Drawing]:
    """Nodes by device and wave: one by one if that fits, or a bar for each device."""
    names = max(len(row.name) for row in block.shown)
    digits = len(str(max(block.virtual_nodes, block.waves) - 1))
    room = width - INDENT - names - 2
    single = block.cells and (digits + 3) * block.waves <= room
    yield from cells(block, names, digits) if single else bars(block, names, room)
    if block.rest:
        yield Text(" " * INDENT + block.rest, style="dim")
    said = [several(block.idle, "idle slot")] if block.idle else []
    if block.padding:
        said.append(("* " if single else "") + block.padding)
    for line in said:
        yield Text(" " * INDENT + line, style="dim")


def cells(block: Grid, names: int, digits: int) -> Iterator[Text]:
    """Every node by its number."""
    waves = "".join(f" {wave:>{digits}} " + " " for wave in range(block.waves))
    yield Text(" " * INDENT + f"{'wave':<{names}} {waves}".rstrip(), style="dim")
    for row in block.shown:
        line = Text(" " * INDENT + f"{row.name:<{names}} ")
        for node in block.slots(row):
            if node is None:
                line.append(f" {'·':>{digits}} ", style="dim")
            else:
                mark = "*" if block.padded(node) else " "
                line.append(f" {node:>{digits}}{mark}", style=f"black on {colour(row.device)}")
            line.append(" ")
        line.right_crop(1)
        yield line


def bars(block: Grid, names: int, room: int) -> Iterator[Text]:
    """A bar for each device, as long as its nodes are many."""
    longest = max(4, min(32, room - max(len(row.nodes) for row in block.shown) - 2))
    for row in block.shown:
        length = -(-row.count * longest // block.waves)
        line = Text(" " * INDENT + f"{row.name:<{names}}  ", no_wrap=True, overflow="ellipsis")
        line.append("█" * length, style=colour(row.device))
        line.append("·" * (longest - length), style="dim")
        line.append(f"  {row.nodes}")
        yield line


def colour(device: int) -> str:
    return COLOURS[device % len(COLOURS)]
