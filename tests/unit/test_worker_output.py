"""The output of workers: their supervisor passes every line on once, whenever it looks.

Knows `vnode.workers.supervisor`. Must not know processes. The reference is the text that was written.
"""

from __future__ import annotations

import io
import pathlib
import tempfile
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from vnode.workers import supervisor


@given(st.lists(st.tuples(st.text("ab\né", max_size=30), st.integers(0, 3))))
def test_lines_are_passed_on_once_in_order(written: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(supervisor, "AT_ONCE", 7):
        path, found = pathlib.Path(folder) / "worker-0.out", list[str]()
        tail = supervisor.Tail(path, found.extend)
        for text, looks in written:
            with open(path, "ab") as file:
                file.write(text.encode())
            for _ in range(looks):
                tail.read_lines()
        tail.read_lines(whole=True)
    wanted = "".join(text for text, _ in written).split("\n")
    assert found == wanted[: -1 if wanted[-1] == "" else None]


def test_letters_that_a_stream_lacks_are_replaced_and_a_closed_one_takes_nothing() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    supervisor.write_lines(stream, ["a", "é", "b"])
    assert stream.detach().getvalue() == b"a\n?\nb\n"
    closed = io.StringIO()
    closed.close()
    supervisor.write_lines(closed, ["a"])
