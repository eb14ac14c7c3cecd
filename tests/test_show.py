"""What people see: reports, placements and comparisons in a terminal and as HTML.

Knows what is drawn. Must not know how. Numbers come from placements and from counting by hand; HTML is read by Python's
own parser.
"""

from __future__ import annotations

import html.parser
import inspect
import io
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from rich.console import Console

import vnode
from vnode.placement.placement import even_counts
from vnode.show import html as drawing
from vnode.show.drawable import Drawn
from vnode.show.grid import MOST_ROWS, Grid
from vnode.show.page import Cell, Column, Fact, Facts, Page, Picture, Table

VOID = {"br", "hr", "img", "input", "link", "meta"}
LARGE = {"recompute_budget": 10.0}


class Reader(html.parser.HTMLParser):
    """Reads HTML: every element with its attributes and text; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[dict[str, Any]] = []
        self.elements: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {[e['tag'] for e in self.open]}"

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        assert tag not in VOID
        if tag == "wbr":  # where a line may be broken
            return
        element = {"tag": tag, "text": "", **{k: v or "" for k, v in attributes}}
        self.elements.append(element)
        self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1]["tag"] == tag, f"</{tag}> closes {[e['tag'] for e in self.open]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data

    def of(self, tag: str, kind: str = "") -> list[dict[str, Any]]:
        """Elements of a tag that have a class."""
        return [e for e in self.elements if e["tag"] == tag and (not kind or kind in e.get("class", "").split())]


def notebook(thing: Any) -> Reader:
    return Reader(thing._repr_html_())


def terminal(thing: Any, width: int = 120) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(thing)
    return console.export_text()


def grid_rows(text: str) -> dict[str, list[str]]:
    """Of a drawn grid, the slots of every device."""
    return {m[1]: m[2].split() for m in re.finditer(r"^ *((?:cpu:|device )\d+) +([\d*· ]+)$", text, re.MULTILINE)}


class Shown(Drawn):
    """Anything with a page."""

    def __init__(self, *blocks: Any) -> None:
        self.blocks = blocks

    def page(self) -> Page:
        return Page("title", "subtitle", self.blocks)


def nodes_on(counts: list[int], **options: Any) -> Shown:
    return Shown(Picture("Nodes", Grid.from_counts(counts, [f"device {d}" for d in range(len(counts))], **options)))


def couple(params: Any, batch: Any) -> Any:
    """A masked mean, whose denominator takes a pass of its own, on two lines that are worth a look."""

    def loss_fn(params: Any) -> jax.Array:
        losses = ((batch["x"] @ params["w"]) ** 2).sum(-1)
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


B, IN, OUT = 14, 3, 5


def arguments() -> Any:
    return {"w": jnp.ones((IN, OUT))}, {"x": jnp.ones((B, IN)), "mask": jnp.ones(B)}


@pytest.fixture(scope="module")
def report() -> Any:
    """14 examples on 5 nodes of 3, of which the last has room for one more; on 3 devices."""
    step = vnode.virtualize(couple, virtual_nodes=5).on(jax.devices()[:3], counts=[3, 0, 2])
    return step.explain(*arguments())


# Grids


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any))
def test_grids_hold_every_node_once_where_it_lives(counts: list[int]) -> None:
    owners = np.repeat(np.arange(len(counts)), counts)
    grid = Grid.from_counts(counts, [str(d) for d in range(len(counts))])
    found = [(node, row.device) for row in grid.devices for node in grid.slots(row) if node is not None]
    assert found == list(enumerate(owners))
    assert grid.idle == sum(max(counts) - n for n in counts)
    assert sum(row.devices for row in grid.rows) == len(counts)


@pytest.mark.parametrize("counts", [[32], [8] * 4, [11, 11, 10], [10, 1, 0, 5], [3, 3, 2, 0, 0, 0, 0, 0]])
def test_placements_show_each_node_on_its_device(counts: list[int]) -> None:
    placement = vnode.Placement(sum(counts), jax.devices()[: len(counts)], counts=counts)
    cells = notebook(placement).of("td", "node")
    assert [int(cell["text"]) for cell in cells] == list(range(sum(counts)))
    owner = [f"cpu:{d}" for d, n in enumerate(counts) for _ in range(n)]
    assert [cell["title"].rsplit(" ", 1)[1] for cell in cells] == owner
    shown = grid_rows(terminal(placement, 200))
    for d, count in enumerate(counts):
        if count:
            first = sum(counts[:d])
            idle = ["·"] * (max(counts) - count)
            assert shown[f"cpu:{d}"] == [*map(str, range(first, first + count)), *idle]


def test_devices_have_colours_of_their_own() -> None:
    cells = notebook(nodes_on(even_counts(128, 64))).of("td", "node")
    assert Counter(cell["style"] for cell in cells) == {cell["style"]: 2 for cell in cells}


def test_placements_on_a_mesh_name_its_other_devices() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    names = vnode.Placement(6, mesh=mesh, axis="data").names
    assert names == ["cpu:0 +3", "cpu:4 +3"]
    assert vnode.Placement(8, mesh=mesh, axis="model").names == ["cpu:0 +1", "cpu:1 +1", "cpu:2 +1", "cpu:3 +1"]


def test_devices_without_nodes_are_one_row() -> None:
    text = terminal(nodes_on(even_counts(4, 64)))
    assert re.search(r"device 4 … device 63 +·", text)
    assert "60 idle slots" in text


@pytest.mark.parametrize(("nodes", "devices"), [(5000, 8), (3000, 512), (100_000, 4096)])
def test_many_nodes_are_bars(nodes: int, devices: int) -> None:
    """As many as anyone has, and few elements."""
    shown = nodes_on(even_counts(nodes, devices))
    page = notebook(shown)
    assert not page.of("td", "node")
    assert 1 <= len(page.of("span", "bar")) <= MOST_ROWS
    last = re.findall(r"nodes? (?:\d+-)?(\d+)", page.of("div", "vnode")[0]["text"])[-1]
    assert int(last) == nodes - 1
    assert f"-{nodes - 1}" in terminal(shown)


def test_many_unlike_devices_are_counted() -> None:
    counts = [1 + d % 2 for d in range(200)]
    text = terminal(nodes_on(counts))
    left = counts[MOST_ROWS - 1 :]
    assert f"… {len(left)} more devices with {sum(left)} nodes" in text
    assert len(notebook(nodes_on(counts)).of("span", "bar")) == MOST_ROWS - 1


def test_nodes_that_do_not_fit_the_terminal_are_bars() -> None:
    shown = nodes_on([16, 16])
    assert grid_rows(terminal(shown, 120))["device 1"] == [str(n) for n in range(16, 32)]
    narrow = terminal(shown, 60)
    assert "nodes 16-31" in narrow and max(map(len, narrow.splitlines())) <= 60
    assert len(notebook(shown).of("td", "node")) == 32


def test_padding_is_marked(report: Any) -> None:
    page = notebook(report)
    cells = page.of("td", "node")
    assert len(cells) == 5 and len(page.of("td", "idle")) == 3 * 3 - 5
    assert [cell["text"] for cell in page.of("td", "padded")] == ["4"]
    titles = [cell["title"] for cell in cells]
    assert titles[0] == "node 0: examples 0-2, on cpu:0"
    assert titles[3] == "node 3: examples 9-11, on cpu:2"
    assert titles[4] == "node 4: examples 12-13, 1 of padding, on cpu:2"
    assert grid_rows(terminal(report)) == {"cpu:0": ["0", "1", "2"], "cpu:1": ["·"] * 3, "cpu:2": ["3", "4*", "·"]}


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 300))
def test_examples_of_nodes_are_those_of_a_plain_division(nodes: int, size: int, batch: int) -> None:
    batch = min(batch, nodes * size)
    grid = Grid.from_counts([nodes], [""], batch, size)
    for node in range(nodes):
        real = [i for i in range(node * size, (node + 1) * size) if i < batch]
        assert grid.padded(node) == (len(real) < size)
        note = grid.note(node)
        assert [int(n) for n in re.findall(r"\d+", note.partition(": ")[2].partition(",")[0])] == sorted(
            {*real[:1], *real[-1:]}
        )
    assert grid.padded_nodes == sum(grid.padded(node) for node in range(nodes))


def test_several_padded_nodes_are_named() -> None:
    """9 examples on 5 nodes of 3: the first three are full, the others hold nothing."""
    full = nodes_on([2, 3], batch=9, node_size=3)
    assert "room for more examples than there are: node 3: padding only; node 4: padding only" in terminal(full)
    part = nodes_on([600] * 5, batch=5999, node_size=3)  # of 9000: node 1999 has two examples, then come 1000 more
    for text in (terminal(part, 160), notebook(part).of("div", "vnode")[0]["text"]):
        assert "than there are: node 1999: examples 5997-5998, 1 of padding; nodes 2000-2999: padding only" in text
        assert "striped" not in text and "*" not in text.rpartition("}")[2]


# Reports


@pytest.mark.parametrize("draw", [terminal, lambda thing: notebook(thing).of("div", "vnode")[0]["text"]])
def test_reports_show_what_they_hold(report: Any, draw: Any) -> None:
    text = draw(report)
    float32 = 4
    gradient = float32 * IN * OUT
    inputs = float32 * (B * IN + B)
    sums = gradient + float32  # the gradient and the loss; the count of the mask has a pass of its own
    assert "14 examples on 5 virtual nodes of 3, 3 devices, 3 waves" in text
    assert f"2 arguments, {inputs} B" in text
    assert f"f32[{B}], f32[{B},{IN}]" in text
    assert f"{sums} B of accumulators" in text
    assert f"sum f32[{IN},{OUT}]" in text and f"{gradient} B" in text
    assert "pass 1: reduce_sum reads a sum over the batch" in text
    lines, first = inspect.getsourcelines(couple)
    at = first + next(i for i, line in enumerate(lines) if '["mask"].sum()' in line)
    assert f"test_show.py:{at}" in text
    count, model = report.passes
    assert re.search(rf"0\s*{count.equations}\s*{B} flop", text)  # one addition per element of the mask
    assert re.search(rf"1\s*pass 0\s*{model.equations}\s*\d\.\d kflop\s*\d\d\.\d%\s*2, {sums} B", text)
    assert f"{sum(p.sent for p in report.passes)} B sent per device and step" in text
    assert "4 idle slots" in text and "masked" in text


def test_reports_show_themselves(report: Any, capsys: Any) -> None:
    """What `print` prints is what a terminal shows, without colours; what a prompt shows is one line."""
    assert str(report).startswith("couple   14 examples on 5 virtual nodes of 3")
    assert repr(report) == "Report(couple: 14 examples on 5 virtual nodes of 3, 3 devices, 3 waves)"
    assert terminal(report, 80).rstrip("\n") == str(report)
    report.show()
    assert "Nodes by device and wave" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_reports_are_printed_in_the_signs_that_there_are(
    report: Any, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`print` of one ended in UnicodeEncodeError where standard output is not in UTF-8."""
    for show in (print, lambda it: print(repr(it)), lambda it: it.show()):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", out)
            show(report)
            out.flush()
        shown = out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
        assert report.page().title in shown
        assert encoding != "utf-8" or show is not print or shown == f"{report}\n"


def test_names_are_not_broken_within(report: Any) -> None:
    """A narrow page breaks paths behind slashes; breaking anywhere put a name's letters one below the other."""
    text = report._repr_html_()
    assert set(re.findall(r"(.)<wbr>", text)) == {"/"}
    assert "anywhere" not in text and "break-all" not in text


def test_folders_are_left_to_the_tooltip(report: Any) -> None:
    places = [cell for cell in notebook(report).of("td", "code") if "test_show.py" in cell["text"]]
    assert places and all(cell["text"].startswith("tests/test_show.py:") for cell in places)
    assert all(cell["title"].startswith(__file__) for cell in places)


def test_loops_around_passes_are_parts_of_their_own() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def epoch(w: jax.Array, _: None) -> Any:
            return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), None

        return jax.lax.scan(epoch, w, None, length=3)[0]

    report = (
        vnode.virtualize(step, virtual_nodes=8, **LARGE)
        .on(jax.devices()[:2])
        .explain(jnp.ones((IN, OUT)), jnp.ones((8, IN)))
    )
    (part,) = notebook(report).of("div", "part")
    assert "Around passes of its own" in part["text"] and f"sum f32[{IN},{OUT}]" in part["text"]
    assert f"{4 * IN * OUT} B of accumulators" in terminal(report)
    assert len(notebook(report).of("td", "node")) == 8


def test_every_line_fits_the_terminal(report: Any) -> None:
    for width in (60, 80, 120):
        assert max(map(len, terminal(report, width).splitlines())) <= width


def test_columns_share_a_line_so_that_names_stay_whole() -> None:
    columns = Column("of", wide=True), Column("source line", wide=True)
    row = Cell("params/CheckpointBlock_0,1/kernel"), Cell("examples/bytes_lm.py:45 (Block)")
    words = terminal(Shown(Table("", columns, (row,))), 42).split()  # 19 characters for each, or 20 and 18
    assert "CheckpointBlock_0,1/" in words and "bytes_lm.py:45" in words


def test_a_narrow_terminal_shows_every_column_in_parts() -> None:
    """The right columns of a wide table were cut off, and names were broken within."""
    columns = (
        Column("pass", right=True),
        *(Column(f"number {i}", right=True) for i in range(8)),
        Column("name", wide=True),
    )
    rows = tuple((Cell(str(k)), *(Cell(f"{k}{i}0.5 MiB") for i in range(8)), Cell("[model*model2,")) for k in range(3))
    for width in (40, 60, 80, 160):
        shown = terminal(Shown(Table("table", columns, rows)), width)
        assert max(map(len, shown.splitlines())) <= width and "…" not in shown
        assert all(cell.text in shown for row in rows for cell in row)
        parts = shown.count("pass")
        assert len(re.findall(r"^ +2 ", shown, re.MULTILINE)) == parts and (parts > 1) == (width < 130)


# HTML


def test_a_line_may_be_broken_before_a_note() -> None:
    """Without a space, the last word before a note and its first word were one."""
    assert re.sub("<[^>]*>", "", drawing.facts(Facts((Fact("", "240.0 KiB", "12 values"),)))) == "240.0 KiB 12 values"


NASTY = """<script>alert("1 & '2'")</script>"""


def test_text_of_the_user_is_escaped() -> None:
    column = (Column(NASTY, code=True), Column("b", right=True))
    rows = ((Cell(NASTY, NASTY, 0.5), Cell(NASTY, strong=True)),)
    grid = Grid.from_counts([2, 1], [NASTY, "b"])
    shown = Shown(
        Facts((Fact(NASTY, NASTY, NASTY),), NASTY),
        Picture(NASTY, grid, NASTY),
        Table(NASTY, column, rows, NASTY, NASTY),
        Page(NASTY, NASTY, ()),
    )
    page = notebook(shown)
    assert not page.of("script") and "<script" not in shown._repr_html_()
    assert (
        page.of("div", "vnode")[0]["text"].count(NASTY) == 4 + 3 + 6 + 2
    )  # of the facts, the picture with a device, the table, the page
    assert page.of("td", "code")[0]["title"] == NASTY
    assert NASTY in terminal(shown, 200)


def test_steps_with_strange_names_are_escaped() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("<b>&"):
            return w / x.sum() * (x / x.sum()).sum()

    step.__name__ = "<i>step</i>"
    report = vnode.virtualize(step, virtual_nodes=2).on(jax.devices()[:1]).explain(jnp.ones(3), jnp.ones(4))
    page = notebook(report)
    assert page.of("h3")[0]["text"] == "<i>step</i>"
    assert not page.of("b") and not [e for e in page.of("i") if e["text"]]


def test_html_needs_nothing_from_elsewhere(report: Any) -> None:
    text = report._repr_html_()
    assert not re.search(r"https?:|src=|url\(|@import|<script|<link|on\w+=", text)
    page = Reader(text)
    assert page.elements[0]["tag"] == "div" and page.elements[0]["class"] == "vnode"


def test_html_leaves_the_colours_of_text_and_ground_to_the_page() -> None:
    """Or it would be unreadable in either light or dark notebooks: what is coloured is translucent."""
    colours = re.findall(r"[:\s](#[0-9a-f]{3,8}\b|rgb\([^)]*\)|hsl\([^)]*\)|white\b|black\b)", drawing.STYLE)
    assert not colours
    for alpha in re.findall(r"(?:rgba|hsla)\((?:var\(--hue\)|[\d.]+),[\d.]+%?,[\d.]+%?,([\d.]+)\)", drawing.STYLE):
        assert 0 < float(alpha) < 1
    rules = re.findall(r"([^{}]+)\{", drawing.STYLE)
    assert rules and all(part.strip().startswith(".vnode") for rule in rules for part in rule.split(","))


def test_rich_is_not_needed(report: Any) -> None:
    """Text and HTML come without it: it is imported when rich asks."""
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "import jax.numpy as jnp, vnode\n"
        "step = vnode.virtualize(lambda w, x: w + x.sum(), virtual_nodes=2)\n"
        "said = step.explain(1.0, jnp.ones(4))\n"
        "assert 'virtual nodes' in str(said) and 'virtual node' in said._repr_html_()\n"
        "assert 'Placement' in step.placement._repr_html_()\n"
        "said.show()\n"
        "print(vnode.explain(step, 1.0, jnp.ones(4), devices=2))\n"
    )
    assert (
        "would change"
        in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wanted", [None, True])
@pytest.mark.parametrize("stream", ["broken", "closed", "none"])
def test_what_is_shown_of_a_run_does_not_end_it(wanted: bool | None, stream: str) -> None:
    """A terminal that was closed, a pipe whose reader has gone, no standard error at all."""
    code = (
        "import os, sys\n"
        "from vnode.show.progress import display\n"
        "class Broken:\n"
        "    encoding, isatty = 'utf-8', lambda self: True\n"
        "    def write(self, text): raise BrokenPipeError\n"
        "    def flush(self): raise OSError(5, 'Input/output error')\n"
        f"before, how = os.fdopen(os.dup(2), 'w'), {stream!r}\n"
        "if how == 'closed': sys.stderr.close()\n"
        "else: sys.stderr = Broken() if how == 'broken' else None\n"
        f"with display({wanted}, 0, 5) as shown:\n"
        "    for done in range(5):\n"
        "        shown.update(done, 'words')\n"
        "        shown.line('a line')\n"
        "sys.stderr = before\n"
        "print('done')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("done\n", "", 0)


@pytest.mark.thorough
def test_progress_in_a_notebook_needs_no_package() -> None:
    """One output that changes; without rich and ipywidgets, and without a warning. IPython's capture is the witness."""
    code = (
        "import sys; sys.modules['rich'] = sys.modules['ipywidgets'] = None\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from IPython.utils.capture import capture_output\n"
        "from vnode.show.progress import display\n"
        "shell = InteractiveShell.instance(); shell.kernel = object()\n"
        "with capture_output() as seen, display(None, 2, 5) as shown:\n"
        "    for done in (3, 4, 5):\n"
        "        shown.update(done, 'loss <b>')\n"
        "    shown.line('a line')\n"
        "print([o.data['text/html'].count('&lt;b&gt;') for o in seen.outputs])\n"
        "print([o.data['text/plain'].split()[0] for o in seen.outputs])\n"
        "print([o['update'] for o in seen._outputs], len({o['transient']['display_id'] for o in seen._outputs}))\n"
        "print(repr(seen.stdout), repr(seen.stderr))\n"
        "with capture_output() as seen, display(False, 0, 5) as shown:\n"
        "    shown.update(1, '')\n"
        "print(seen.outputs)\n"
    )
    command = [sys.executable, "-W", "error:::vnode", "-c", code]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == [
        "[0, 1, 1, 1]",
        "['2/5', '3/5', '4/5', '5/5']",
        "[False, True, True, True] 1",
        "'a line\\n' ''",
        "[]",
    ]
