"""Page -> one HTML element with its own styles, for a notebook's output or any other HTML page.

Knows HTML and pages. Must not know a page's content. Nothing is loaded and no script runs. Text and background keep the
surrounding colours; other colours are translucent, so that light and dark themes look right.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from vnode.show.grid import Grid, Row
from vnode.show.page import Cell, Column, Fact, Facts, Page, Picture, Table
from vnode.show.units import several

GOLDEN = 137.508
"""Degrees between the hues of consecutive devices: the golden angle, so that neighbours differ and none repeat."""

# JupyterLab aligns all cells at the right, by a selector that outweighs `.vnode td`; `.vnode.vnode` outweighs that one.
# The clamp is 11em in windows narrower than 700px, else 0: there a table scrolls, and names in it stay whole.
STYLE = """
.vnode{font:13px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;color:inherit;max-width:72em;text-align:left}
.vnode h3{font-size:1.25em;font-weight:600;margin:.2em 0 .1em}
.vnode h4{font-size:1em;font-weight:600;margin:1.3em 0 .3em}
.vnode p{margin:.1em 0 .5em}
.vnode .note{opacity:.65;font-weight:400;margin-left:.35em}
.vnode p .note{margin-left:0}
.vnode .scroll{overflow-x:auto}
.vnode table{border-collapse:collapse;table-layout:auto;width:auto;margin:0;font-size:1em;border:0;background:none}
.vnode th,.vnode td{padding:.22em .8em .22em 0;border:0;
background:none;font-weight:400}
.vnode thead th{opacity:.65;border-bottom:1px solid rgba(128,128,128,.45);white-space:nowrap}
.vnode table tbody tr:nth-child(n),.vnode table thead tr:nth-child(n){background:none;border:0}
.vnode .rows tbody tr:nth-child(n){border-bottom:1px solid rgba(128,128,128,.18)}
.vnode .facts th{opacity:.65;white-space:nowrap;padding-right:1.4em}
.vnode th.right,.vnode td.right{font-variant-numeric:tabular-nums;white-space:nowrap}
.vnode td.code{font-family:ui-monospace,"SF Mono",Menlo,Consolas,monospace;font-size:.92em}
.vnode td:not(.wide),.vnode tbody th{white-space:nowrap}
.vnode .rows td.wide{min-width:clamp(0px,(700px - 100vw)*99,11em)}
.vnode .facts td{white-space:normal}
.vnode .strong{font-weight:600}
.vnode td.quiet{opacity:.65}
.vnode.vnode .rows td.hue{background:hsla(var(--hue),70%,50%,.28);background-clip:padding-box;
border-left:3px solid transparent;padding-left:.6em}
.vnode .grid{border-collapse:separate;border-spacing:2px}
.vnode .grid th{padding:.1em .7em .1em 0;white-space:nowrap;font-variant-numeric:tabular-nums;border:0}
.vnode .grid thead th{padding:0;font-size:.85em}
.vnode .grid td{min-width:1.9em;padding:.16em .3em;border-radius:3px;
font-variant-numeric:tabular-nums}
.vnode .grid td.node{background:hsla(var(--hue),70%,50%,.32)}
.vnode .grid td.padded{background:repeating-linear-gradient(135deg,hsla(var(--hue),70%,50%,.32) 0 5px,
hsla(var(--hue),70%,50%,.12) 5px 10px)}
.vnode .grid td.idle{box-shadow:inset 0 0 0 1px rgba(128,128,128,.35)}
.vnode .grid td.span{padding:.16em .3em;min-width:24em}
.vnode .bar{display:inline-block;vertical-align:middle;width:22em;height:1em;border-radius:3px;
background:rgba(128,128,128,.16);margin-right:.7em;overflow:hidden}
.vnode .bar i{display:block;height:100%;background:hsla(var(--hue),70%,50%,.55)}
.vnode .share{display:inline-block;vertical-align:middle;width:5em;height:.6em;border-radius:2px;
background:rgba(128,128,128,.18);margin-left:.6em;overflow:hidden}
.vnode .share i{display:block;height:100%;background:hsla(210,80%,55%,.75)}
.vnode.vnode table th,.vnode.vnode table td{text-align:left;vertical-align:baseline}
.vnode.vnode table .right{text-align:right}
.vnode.vnode .grid thead th,.vnode.vnode .grid td{text-align:center}
.vnode.vnode .grid td.span{text-align:left}
.vnode .part{border-left:2px solid rgba(128,128,128,.35);padding-left:1em;margin:1em 0}
"""


def draw(page: Page) -> str:
    """Renders a page.

    Args:
      page: the page.

    Returns:
      One ``<div>``, styles included.
    """
    return f'<div class="vnode"><style>{STYLE}</style>{"".join(page_elements(page))}</div>'


def page_elements(page: Page) -> Iterator[str]:
    """A page's elements, without styles."""
    yield f"<h3>{escape(page.title)}</h3>"
    if page.subtitle:
        yield f"<p>{escape(page.subtitle)}</p>"
    for block in page.blocks:
        match block:
            case Page():
                yield f'<div class="part">{"".join(page_elements(block))}</div>'
            case Facts():
                yield facts(block)
            case Picture():
                yield heading(block.title, block.note) + grid(block.grid)
            case Table():
                yield heading(block.title, block.note) + table(block)


def note(text: str) -> str:
    """A note; the space before it lets the line break there."""
    return f' <span class="note">{escape(text)}</span>' if text else ""


def heading(title: str, more: str = "") -> str:
    return f"<h4>{escape(title)}{note(more)}</h4>" if title else ""


def facts(block: Facts) -> str:
    def row(fact: Fact) -> str:
        return f'<tr><th scope="row">{escape(fact.name)}</th><td>{escape(fact.text)}{note(fact.note)}</td></tr>'

    rows = "".join(map(row, block.facts))
    return f'{heading(block.title)}<table class="facts"><tbody>{rows}</tbody></table>'


def table(block: Table) -> str:
    head = "".join(f'<th scope="col"{classes(column)}>{escape(column.name)}</th>' for column in block.columns)
    body = "".join(
        f"<tr>{''.join(cell(entry, column) for entry, column in zip(row, block.columns, strict=True))}</tr>"
        for row in block.rows
    )
    rest = f"<p>{note(block.rest)}</p>" if block.rest else ""
    return (
        f'<div class="scroll"><table class="rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{rest}"
    )


def classes(column: Column, *more: str) -> str:
    names = [name for name in ("right", "code", "wide") if getattr(column, name)] + list(more)
    return f' class="{" ".join(names)}"' if names else ""


def cell(entry: Cell, column: Column) -> str:
    share = "" if entry.share is None else f'<span class="share"><i style="width:{entry.share:.1%}"></i></span>'
    title = f' title="{escape(entry.note)}"' if entry.note else ""
    named = {"strong": entry.strong, "quiet": entry.quiet, "hue": entry.hue is not None}
    look = classes(column, *(name for name, there in named.items() if there))
    colour = "" if entry.hue is None else f' style="--hue:{entry.hue}"'
    return f"<td{look}{colour}{title}>{(breakable if column.wide else escape)(entry.text)}{share}</td>"


def breakable(text: str) -> str:
    """Text that may be broken between words and after slashes of a path, not within a name.

    >>> breakable("Block_0/kernel")
    'Block_0/<wbr>kernel'
    """
    return escape(text).replace("/", "/<wbr>")


def grid(block: Grid) -> str:
    """Nodes by device and wave: one by one if they are few, or a bar for each device."""
    if block.cells:
        head = "".join(f'<th scope="col">{wave}</th>' for wave in range(block.waves))
        head = f'<thead><tr><th scope="col" style="text-align:left">wave</th>{head}</tr></thead>'
        body = "".join(f"<tr>{name(row)}{slots(block, row)}</tr>" for row in block.shown)
    else:
        head, body = "", "".join(f"<tr>{name(row)}{bar(block, row)}</tr>" for row in block.shown)
    said = [block.rest] if block.rest else []
    said += [several(block.idle, "idle slot")] if block.idle else []
    if block.padding:
        said.append(("striped: " if block.cells else "") + block.padding)
    legend = f"<p>{note('; '.join(said))}</p>" if said else ""
    return f'<div class="scroll"><table class="grid">{head}<tbody>{body}</tbody></table></div>{legend}'


def name(row: Row) -> str:
    return f'<th scope="row" title="{escape(row.nodes)}">{escape(row.name)}</th>'


def slots(block: Grid, row: Row) -> str:
    """The cells of a device."""
    cells = []
    for node in block.slots(row):
        if node is None:
            cells.append('<td class="idle" title="idle"></td>')
        else:
            kind = "node padded" if block.padded(node) else "node"
            title = f"{block.note(node)}, on {row.name}"
            cells.append(f'<td class="{kind}" style="--hue:{hue(row)}" title="{escape(title)}">{node}</td>')
    return "".join(cells)


def bar(block: Grid, row: Row) -> str:
    """The bar of a device with too many nodes to show, or of several devices."""
    filled = f'<i style="width:{row.count / block.waves:.1%}"></i>'
    return f'<td class="span"><span class="bar" style="--hue:{hue(row)}">{filled}</span>{escape(row.nodes)}</td>'


def hue(row: Row) -> str:
    """Degrees on the colour wheel; the first device's is blue."""
    return f"{(210 + GOLDEN * row.device) % 360:.0f}"
