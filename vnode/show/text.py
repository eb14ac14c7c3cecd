"""Page -> lines of text, plain for `print`, with named styles for a terminal.

Knows pages, and the width of a line in characters. Must not know a page's content, nor terminals: a segment has the
name of a style, which a renderer may use.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from vnode.show.grid import Grid
from vnode.show.page import Cell, Column, Facts, Page, Picture, Table
from vnode.show.units import several

WIDTH = 80
"""The default width of a line in characters."""

INDENT, GAP = 2, 2
"""Characters before a block, and between columns."""

NARROW = 12
"""The least width to which a column is narrowed."""

CUT = re.compile(r"/|[.](?!py:)|,(?!\d)")
"""The ends of parts after which a path or a name may be broken: not within ``block.py:12``, nor ``Block_0,1``."""

PLAIN, STRONG, QUIET = "", "strong", "quiet"
"""Styles of words; those of a device are ``node 3`` and ``bar 3``."""

PLAINER = str.maketrans({"…": "...", "µ": "u", "·": ".", "█": "#", "─": "-"})
"""Replacements for characters that an encoding lacks."""

Segment = tuple[str, str]
"""Characters, and the name of their style."""

Line = list[Segment]


def draw(page: Page, width: int = WIDTH) -> str:
    """Renders a page without colours.

    Args:
      page: the page.
      width: the width of a line in characters; unbreakable text may be longer.

    Returns:
      Lines; the last has no newline.

    Example:
      >>> from vnode.show.page import Fact
      >>> print(draw(Page("step", "on 2 devices", (Facts((Fact("work", "4 flop", "all of it"),)),))))
      step   on 2 devices
      <BLANKLINE>
        work  4 flop  all of it
    """
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines(page, width))


def encodable(drawn: str, encoding: str | None) -> str:
    """Replaces characters that an encoding lacks.

    Args:
      drawn: the text.
      encoding: the output's encoding; None if it has none.

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
    """A heading and its text, in one line if there is room."""
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
    """Facts, each with its name."""
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
    """Headings, a rule, and rows; wide entries are broken over lines.

    If the columns do not fit side by side, the table is drawn in parts, one below the other. Each begins with the first
    column.
    """
    texts = [[column.name for column in block.columns], *([cell.text for cell in row] for row in block.rows)]
    natural = [max(map(len, column)) for column in zip(*texts, strict=True)]
    least = [
        least_width(column, wide, entries, width)
        for column, wide, entries in zip(block.columns, natural, zip(*texts, strict=True), strict=True)
    ]
    for number, shown in enumerate(column_groups(least, width - INDENT)):
        if number:
            yield []
        columns, (head, *rest) = [block.columns[k] for k in shown], [[row[k] for k in shown] for row in texts]
        room = width - INDENT - GAP * (len(shown) - 1)
        whole = [natural[k] for k in shown]
        widths = narrow_columns(whole, [least[k] for k in shown], columns, room)
        if widths != whole:
            widths = share_width(widths, columns, [head, *rest])
        if any(head):
            yield from row_lines([Cell(name, quiet=True) for name in head], columns, widths)
            yield [(" " * INDENT + "─" * (sum(widths) + GAP * (len(widths) - 1)), QUIET)]
        for row in block.rows:
            yield from row_lines([row[k] for k in shown], columns, widths)


def least_width(column: Column, natural: int, texts: Sequence[str], width: int) -> int:
    """The width below which a column's numbers or names would be broken; long names are broken all the same."""
    if column.right:
        return natural
    longest = max((len(part) for text in texts for part in CUT.sub(r"\g<0> ", text).split()), default=0)
    return min(natural, max(NARROW, min(longest, width // 3)))


def column_groups(least: Sequence[int], room: int) -> list[list[int]]:
    """Columns that fit side by side; each group begins with the first column.

    >>> column_groups([4, 10, 10, 10], 40), column_groups([4, 10, 10, 10], 30), column_groups([4, 50], 30)
    ([[0, 1, 2, 3]], [[0, 1, 2], [0, 3]], [[0, 1]])
    """
    groups, used = [[0]], least[0]
    for k in range(1, len(least)):
        used += GAP + least[k]
        if used > room and len(groups[-1]) > 1:
            groups.append([0])
            used = least[0] + GAP + least[k]
        groups[-1].append(k)
    return groups


def narrow_columns(natural: Sequence[int], least: Sequence[int], columns: Sequence[Column], room: int) -> list[int]:
    """Widths of columns that fit into a line, if possible; columns that may be broken are narrowed first."""
    widths = list(natural)
    floors = (
        [bound if column.wide else wide for column, bound, wide in zip(columns, least, natural, strict=True)],
        least,
        [NARROW] * len(widths),
    )
    for floor in floors:
        while sum(widths) > room:
            fit = [i for i in range(len(widths)) if widths[i] > floor[i]]
            if not fit:
                break
            widths[max(fit, key=lambda i: widths[i])] -= 1
    return widths


def share_width(widths: Sequence[int], columns: Sequence[Column], texts: Sequence[Sequence[str]]) -> list[int]:
    """Shares the width between the first two breakable columns, so that names stay whole, in few lines."""
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
    """Breaks text into lines: at spaces, or after parts of a path, or else of a name.

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
    """All nodes by number."""
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
    """One bar per device; its length shows the number of nodes."""
    longest = max(4, min(32, room - max(len(row.nodes) for row in block.shown) - 2))
    for row in block.shown:
        length = -(-row.count * longest // block.waves)
        yield [
            (" " * INDENT + f"{row.name:<{names}}  ", PLAIN),
            ("█" * length, f"bar {row.device}"),
            ("·" * (longest - length), QUIET),
            (f"  {row.nodes}", PLAIN),
        ]
