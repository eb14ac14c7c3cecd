"""Frames of messages: what is sent arrives, in any pieces; damaged bytes are an error, and never another message.

Knows `vnode.workers.wire`.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vnode.workers.wire import HEADER, MAGIC, Channel, ClosedError, Frames, WireError, frame

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.builds(
    lambda kind, rest: {**rest, "kind": kind}, st.text(), st.dictionaries(st.text(), PLAIN, max_size=3)
)


@given(st.lists(MESSAGES, max_size=4), st.data())
def test_any_pieces_give_the_messages(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    sent = b"".join(map(frame, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=6)))
    frames, got = Frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        got += frames.feed(sent[start:end])
    assert got == messages and not frames.buffer


@given(MESSAGES, st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_byte_is_no_message(message: dict[str, Any], where: int, change: int) -> None:
    """It is an error, or (where the length says more) nothing yet."""
    damaged = bytearray(frame(message))
    damaged[where % len(damaged)] ^= change
    try:
        assert Frames().feed(bytes(damaged)) == []
        assert 4 <= where % len(damaged) < 8
    except WireError as error:
        assert "damaged data" in str(error)


@pytest.mark.parametrize("body", [b"[1]", b"{}", b'{"kind": 1}', b"{", b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_messages(body: bytes) -> None:
    import zlib

    with pytest.raises(WireError):
        Frames().feed(HEADER.pack(MAGIC, len(body), zlib.crc32(body)) + body)


def test_what_is_too_large_or_not_plain_is_not_sent() -> None:
    with pytest.raises(WireError, match="more than 16,777,216"):
        frame({"kind": "large", "text": "x" * (1 << 24)})
    with pytest.raises(WireError, match="not plain data"):
        frame({"kind": "object", "it": object()})
    with pytest.raises(WireError, match="1,000 bytes"):
        Frames(999).feed(HEADER.pack(MAGIC, 1000, 0))


def test_a_channel_of_several_senders() -> None:
    """Frames of threads are not mixed up; then the other side closes."""
    ours, theirs = map(Channel, socket.socketpair())
    senders = [
        threading.Thread(
            target=lambda i=i: [theirs.send({"kind": "n", "i": i, "j": j, "x": "x" * 999}) for j in range(50)]
        )
        for i in range(4)
    ]
    for sender in senders:
        sender.start()
    got = [ours.receive(10) for _ in range(200)]
    for i in range(4):
        assert [m["j"] for m in got if m["i"] == i] == list(range(50))
    with pytest.raises(TimeoutError):
        ours.receive(0.01)
    theirs.close()
    with pytest.raises(ClosedError):
        ours.receive()
    with pytest.raises(WireError):
        for _ in range(2):
            ours.send({"kind": "late"})
    ours.close()
    for sender in senders:
        sender.join()
