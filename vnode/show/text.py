"""Pages as lines of text: what `print` prints, and what a terminal shows in colour.

Knows pages, and how many characters a line has. Must not know what pages are about, nor terminals: a part of a line
has the name of a style, which whoever draws it may heed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from vnode.show.grid import Grid
from vnode.show.page import Cell, Column, Facts, Page, Picture, Table
from vnode.show.units import several

WIDTH = 80
"""Characters of a line, where nobody says how many there are."""

INDENT, GAP = 2, 2
"""Characters before a block, and between columns."""

NARROW = 12
"""Characters below which a column is not narrowed."""

CUT = re.compile(r"/|[.](?!py:)|,(?!\d)")
"""After what a path or a name is broken over lines: not within ``block.py:12``, nor ``Block_0,1``."""

PLAIN, STRONG, QUIET = "", "strong", "quiet"
"""Styles of words; those of a device are ``node 3`` and ``bar 3``."""

PLAINER = str.maketrans({"…": "...", "µ": "u", "·": ".", "█": "#", "─": "-"})
"""What stands in the place of signs that an encoding does not have."""

Segment = tuple[str, str]
"""Characters, and the name of their style."""

Line = list[Segment]


def draw(page: Page, width: int = WIDTH) -> str:
    """Draws a page without colours.

    Args:
      page: what to draw.
      width: characters of a line; what cannot be broken may be longer.

    Returns:
      Lines, the last without an end.

    Example:
      >>> from vnode.show.page import Fact
      >>> print(draw(Page("step", "on 2 devices", (Facts((Fact("work", "4 flop", "all of it"),)),))))
      step   on 2 devices
      <BLANKLINE>
        work  4 flop  all of it
    """
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines(page, width))


def encodable(drawn: str, encoding: str | None) -> str:
    """A text in signs that an encoding has.

    Args:
      drawn: the text.
      encoding: of what it is written to; None if that does not say.

    Example:
      >>> encodable("12 µs ──", "utf-8"), encodable("12 µs ──", "ascii")
      ('12 µs ──', '12 us --')
    """
    if encoding is None:
        return drawn
    try:
        drawn.encode(encoding)
    except LookupError:
        return drawn
    except UnicodeEncodeError:
        return drawn.translate(PLAINER).encode(encoding, "backslashreplace").decode(encoding)
    return drawn


def lines(page: Page, width: int) -> Iterator[Line]:
    """The lines of a page, in styles."""
    yield from heading_line(page.title, STRONG, page.subtitle, PLAIN, width, 3)
    for block in page.blocks:
        yield []
        match block:
            case Page():
                for line in lines(block, width - INDENT):
                    yield [(" " * INDENT, PLAIN), *line] if line else line
            case Facts():
                if block.title:
                    yield [(block.title, STRONG)]
                yield from facts(block, width)
            case Picture():
                yield from heading_line(block.title, STRONG, block.note, QUIET, width)
                yield from grid(block.grid, width)
            case Table():
                yield from heading_line(block.title, STRONG, block.note, QUIET, width)
                yield from table(block, width)
                for part in wrap(block.rest, width - INDENT):
                    yield [(" " * INDENT + part, QUIET)]


def heading_line(head: str, style: str, more: str, quiet: str, width: int, gap: int = GAP) -> Iterator[Line]:
    """A heading and what is said of it, in one line if there is room."""
    if not head and not more:
        return
    if head and more and len(head) + gap + len(more) <= width:
        yield [(head, style), (" " * gap, PLAIN), (more, quiet)]
        return
    for part in wrap(head, width):
        yield [(part, style)]
    for part in wrap(more, width - INDENT):
        yield [(" " * INDENT + part, quiet)]


def facts(block: Facts, width: int) -> Iterator[Line]:
    """Names and what is to know of them."""
    names = max((len(fact.name) for fact in block.facts), default=0)
    start = INDENT + names + GAP
    for fact in block.facts:
        name = " " * INDENT + f"{fact.name:<{names}}" + " " * GAP
        said = [(part, PLAIN) for part in wrap(fact.text, width - start)] or [("", PLAIN)]
        if fact.note and len(said[-1][0]) + GAP + len(fact.note) <= width - start:
            *first, (last, _) = said
            rows: list[Line] = [*([part] for part in first), [(last, PLAIN), (" " * GAP, PLAIN), (fact.note, QUIET)]]
        else:
            rows = [[part] for part in said] + [[(part, QUIET)] for part in wrap(fact.note, width - start)]
        for i, row in enumerate(rows):
            yield [(name if i == 0 else " " * start, QUIET), *row]


def table(block: Table, width: int) -> Iterator[Line]:
    """Headings, a rule, and rows; what is wide is broken over lines."""
    texts = [[column.name for column in block.columns], *([cell.text for cell in row] for row in block.rows)]
    natural = [max(map(len, column)) for column in zip(*texts, strict=True)]
    widths = narrow_columns(natural, block.columns, width - INDENT - GAP * (len(natural) - 1))
    if widths != natural:
        widths = share_width(widths, block.columns, texts)
    heads = [Cell(column.name, quiet=True) for column in block.columns]
    if any(column.name for column in block.columns):
        yield from row_lines(heads, block.columns, widths)
        yield [(" " * INDENT + "─" * (sum(widths) + GAP * (len(widths) - 1)), QUIET)]
    for row in block.rows:
        yield from row_lines(row, block.columns, widths)


def narrow_columns(natural: Sequence[int], columns: Sequence[Column], room: int) -> list[int]:
    """Widths of columns that fit into a line, if they can: those that may be broken first."""
    widths = list(natural)
    for may in (lambda c: c.wide, lambda c: not c.right, lambda c: True):
        while sum(widths) > room:
            fit = [i for i, column in enumerate(columns) if may(column) and widths[i] > NARROW]
            if not fit:
                break
            widths[max(fit, key=lambda i: widths[i])] -= 1
    return widths


def share_width(widths: Sequence[int], columns: Sequence[Column], texts: Sequence[Sequence[str]]) -> list[int]:
    """Shares the width of the first two columns that may be broken, so that names stay whole, in few lines."""
    wide = [i for i, column in enumerate(columns) if column.wide][:2]
    if len(wide) < 2:
        return list(widths)
    first, second = wide
    both = widths[first] + widths[second]

    def cost(one: int) -> tuple[int, int, int]:
        broken = height = 0
        for row in texts:
            cells = (row[first], one), (row[second], both - one)
            broken += sum(len(name) > width for text, width in cells for name in CUT.sub(r"\g<0> ", text).split())
            height += max(len(wrap(text, width)) for text, width in cells)
        return broken, height, abs(one - widths[first])

    found = list(widths)
    found[first] = min(range(min(NARROW, widths[first]), both - min(NARROW, widths[second]) + 1), key=cost)
    found[second] = both - found[first]
    return found


def row_lines(row: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int]) -> Iterator[Line]:
    """The lines of one row."""
    parts = [wrap(cell.text, width) for cell, width in zip(row, widths, strict=True)]
    for i in range(max(map(len, parts), default=0)):
        line: Line = [(" " * INDENT, PLAIN)]
        for k, (cell, column, width, part) in enumerate(zip(row, columns, widths, parts, strict=True)):
            text = part[i] if i < len(part) else ""
            style = STRONG if cell.strong else QUIET if cell.quiet else PLAIN
            style = style if cell.hue is None else f"bar {cell.hue // 60}"
            line.append((" " * GAP * (k > 0), PLAIN))
            line.append((f"{text:>{width}}" if column.right else f"{text:<{width}}", style))
        yield line


def wrap(text: str, width: int) -> list[str]:
    """Text in lines: broken at spaces, or after what separates parts of a path, or else of a name.

    >>> wrap("models/transformer.py:12 (Block)", 24)
    ['models/transformer.py:12', '(Block)']
    >>> wrap("models/transformer/block.py", 20), wrap("models/vit.py:12", 12)
    (['models/transformer/', 'block.py'], ['models/', 'vit.py:12'])
    """
    width = max(width, 1)
    if len(text) <= width:
        return [text] if text else []
    found: list[str] = []
    for part in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        while len(part) > width:
            cuts = [m.end() for m in CUT.finditer(part) if m.end() <= width]
            at = max((cut for cut in cuts if part[cut - 1] == "/"), default=cuts[-1] if cuts else width)
            found.append(part[:at])
            part = part[at:]
        found.append(part)
    return found


def grid(block: Grid, width: int) -> Iterator[Line]:
    """Nodes by device and wave: one by one if that fits, or a bar for each device."""
    names = max(len(row.name) for row in block.shown)
    digits = len(str(max(block.virtual_nodes, block.waves) - 1))
    room = width - INDENT - names - 2
    single = block.cells and (digits + 3) * block.waves <= room
    yield from cells(block, names, digits) if single else bars(block, names, room)
    said = [block.rest] if block.rest else []
    said += [several(block.idle, "idle slot")] if block.idle else []
    if block.padding:
        said.append(("* " if single else "") + block.padding)
    for text in said:
        for part in wrap(text, width - INDENT):
            yield [(" " * INDENT + part, QUIET)]


def cells(block: Grid, names: int, digits: int) -> Iterator[Line]:
    """Every node by its number."""
    waves = "".join(f" {wave:>{digits}} " + " " for wave in range(block.waves))
    yield [(" " * INDENT + f"{'wave':<{names}} {waves}".rstrip(), QUIET)]
    for row in block.shown:
        line: Line = [(" " * INDENT + f"{row.name:<{names}} ", PLAIN)]
        for i, node in enumerate(block.slots(row)):
            if i:
                line.append((" ", PLAIN))
            if node is None:
                line.append((f" {'·':>{digits}} ", QUIET))
            else:
                mark = "*" if block.padded(node) else " "
                line.append((f" {node:>{digits}}{mark}", f"node {row.device}"))
        yield line


def bars(block: Grid, names: int, room: int) -> Iterator[Line]:
    """A bar for each device, as long as its nodes are many."""
    longest = max(4, min(32, room - max(len(row.nodes) for row in block.shown) - 2))
    for row in block.shown:
        length = -(-row.count * longest // block.waves)
        yield [
            (" " * INDENT + f"{row.name:<{names}}  ", PLAIN),
            ("█" * length, f"bar {row.device}"),
            ("·" * (longest - length), QUIET),
            (f"  {row.nodes}", PLAIN),
        ]
