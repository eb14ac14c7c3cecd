"""The kinds of tables that a report has: of values by their bytes, of places in the user's code, of passes.

Knows lines, and what of them is shown. Must not know a report, nor how a table is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from vnode.report.lines import SHOWN, Line, PassReport
from vnode.report.names import summary
from vnode.report.sources import short_source
from vnode.show.page import Cell, Column, Fact, Table
from vnode.show.units import number, numbered, several, size


def memory_fact(what: str, total: int, lines: Sequence[Line]) -> Fact:
    """The fact of the memory that batched values take, with the largest value."""
    largest = max(lines, key=lambda line: line.bytes)
    text = (
        f"{several(len(lines), 'value')} of all examples, the largest {largest.what} at {short_source(largest.where)}"
    )
    return Fact(what, f"{size(total)} of memory on a device", text)


def places_table(title: str, note: str, lines: Sequence[Line]) -> Table:
    """A table of facts by the user's source lines."""
    columns = (Column("what"), Column("source line", code=True, wide=True))
    rows = tuple((Cell(line.what), Cell(short_source(line.where), line.where)) for line in lines)
    return Table(title, columns, rows, note)


def values_table(title: str, note: str, entries: Sequence[tuple[str, Line]]) -> Table:
    """A table of passes' values with their bytes, the largest first; equal ones of one source line share a row."""
    alike: dict[tuple[str, str, str], list[Line]] = {}
    for level, line in entries:
        alike.setdefault((level, line.what, line.where), []).append(line)
    ordered = sorted(alike.items(), key=lambda entry: -sum(line.bytes for line in entry[1]))
    total = max(sum(line.bytes for _, line in entries), 1)
    several_passes = any(level for level, _ in entries)
    named = any(line.name for _, line in entries)
    columns = (
        *((Column("pass", right=True),) * several_passes),
        Column("value", code=True),
        Column("bytes", right=True),
        *((Column("of", code=True, wide=True),) * named),
        Column("source line", code=True, wide=True),
    )
    rows = []
    shown = SHOWN if len(ordered) > SHOWN + 1 else len(ordered)  # one more takes no more room than to say so
    for (level, what, place), lines in ordered[:shown]:
        bytes_of_all = sum(line.bytes for line in lines)
        share = bytes_of_all / total
        rows.append(
            (
                *((Cell(level),) * several_passes),
                Cell(f"{len(lines)} x {what}" if len(lines) > 1 else what),
                Cell(size(bytes_of_all), f"{share:.1%} of this table's", share=share),
                *((Cell(summary([line.name for line in lines if line.name])),) * named),
                Cell(short_source(place), place),
            )
        )
    left = [line for _, lines in ordered[shown:] for line in lines]
    rest = f"… and {several(len(left), 'smaller one')}, {size(sum(line.bytes for line in left))}" if left else ""
    return Table(title, columns, tuple(rows), note, rest)


def passes_table(passes: Sequence[PassReport], once: int, flops: int, pass_flops: int, of: str) -> Table:
    """The passes with their cost, and what is done besides.

    Args:
      passes: in order.
      once: equations evaluated once.
      flops: of all work, what is computed again included.
      pass_flops: of these, those of all passes, in loops too.
      of: whose work it is.
    """

    def share_of(part: int) -> Cell:
        share = min(part / max(flops, 1), 1.0)
        return Cell(f"{share:.1%}", "of all work, what is computed again included", share=share)

    several_passes = len(passes) > 1
    names = ("pass", *(("reads",) * several_passes), "equations", "work", "share", "accumulators", "sent")
    columns = tuple(Column(name, right=True) for name in names)
    rows = []
    for p in passes:
        total = size(sum(line.bytes for line in p.accumulators))
        rows.append(
            (
                Cell(str(p.number), strong=True),
                *((Cell(numbered("pass", p.reads) if p.reads else "", "whose results it needs"),) * several_passes),
                Cell(f"{p.equations:,}", "of every node"),
                Cell(f"{number(p.flops)}flop", "of all nodes together"),
                share_of(p.flops),
                Cell(f"{len(p.accumulators)}, {total}" if p.accumulators else "none"),
                Cell(size(p.sent), "by each device"),
            )
        )
    others = max(flops - pass_flops, 0)
    empty = Cell("")
    figures = (Cell(f"{once:,}"), Cell(f"{number(others)}flop"), share_of(others))
    last = (Cell("once"), *((empty,) * several_passes), *figures, empty, empty)
    note = f"share: of {of}'s work; equations: of a node; sent: by each device"
    return Table("Passes", columns, (*rows, last), note, separate_sums_note([p for p in passes if p.adds_only]))


def separate_sums_note(adding: Sequence[PassReport]) -> str:
    """The passes that only form sums, and the reason."""
    if not adding:
        return ""
    kept = numbered("pass", sorted({each for p in adding for each in p.reads}))
    return (
        f"{numbered('pass', [p.number for p in adding])} only form{'s' * (len(adding) == 1)} large sums, of operands "
        f"that {kept} kept: so fewer pending sums are held at a time"
    )
