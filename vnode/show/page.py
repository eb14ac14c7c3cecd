"""Pages: blocks of facts, grids and tables, as data.

Knows words and numbers. Must not know their meaning, nor colours, terminals or HTML.
"""

from __future__ import annotations

import dataclasses

from vnode.show.grid import Grid


@dataclasses.dataclass(frozen=True)
class Cell:
    """An entry of a table.

    Attributes:
      text: the text.
      note: a longer text, where there is room for it (a tooltip).
      share: a fraction, 0 to 1, drawn as a bar.
      strong: whether the entry is emphasized.
      quiet: whether the entry is secondary.
      hue: hue of the background in degrees, if it has one; entries of one kind share it.
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
      name: the heading.
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
      title: the title.
      columns: the columns.
      rows: the cells.
      note: one sentence for first-time readers.
      rest: the rows that were left out, in words.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    rest: str = ""


@dataclasses.dataclass(frozen=True)
class Fact:
    """A named fact."""

    name: str
    text: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Several facts."""

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
    """A page about one object.

    Attributes:
      title: the title.
      subtitle: the most important fact, in one line.
      blocks: the blocks in order; a page among them is a section.
    """

    title: str
    subtitle: str
    blocks: tuple[Facts | Picture | Table | Page, ...]
