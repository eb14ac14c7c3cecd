"""What there is to see, in blocks: facts, grids, tables.

Knows words and numbers. Must not know what they are about, nor colours, terminals or HTML.
"""

from __future__ import annotations

import dataclasses

from vnode.show.grid import Grid


@dataclasses.dataclass(frozen=True)
class Cell:
    """An entry of a table.

    Attributes:
      text: what it says.
      note: more about it, where there is room for more (a tooltip).
      share: of a whole, 0 to 1, to be drawn as a bar.
      strong: it is what one should look at.
      quiet: it only says what the others are.
      hue: degrees of the colour behind it, if it has one: cells that are alike have the same.
    """

    text: str
    note: str = ""
    share: float | None = None
    strong: bool = False
    quiet: bool = False
    hue: int | None = None


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      name: its heading.
      right: whether it holds numbers, aligned at the right.
      code: whether it holds code or places in code.
      wide: whether its entries may be broken over lines.
    """

    name: str
    right: bool = False
    code: bool = False
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
      title: what it shows.
      columns: of every row.
      rows: the cells.
      note: one sentence for readers who see such a table for the first time.
      rest: what was left out, in words.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    rest: str = ""


@dataclasses.dataclass(frozen=True)
class Fact:
    """Something to know, by name."""

    name: str
    text: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Several of them."""

    facts: tuple[Fact, ...]
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A grid with its title."""

    title: str
    grid: Grid
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    """All there is to see of one thing.

    Attributes:
      title: what it is.
      subtitle: the most important of it in one line.
      blocks: in order; a page among them is a part of its own.
    """

    title: str
    subtitle: str
    blocks: tuple[Facts | Picture | Table | Page, ...]
