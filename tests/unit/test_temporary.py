"""Temporary memory of compiled programs, beside what protocol buffers are, and what the TPU compiler lets pass.

The TPU compiler runs in a process of its own. It is the reference: it compiles what fits in a chip.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ahead import said
from vnode.placement.temporary import decode_varint, encode_varint, fields, heaps_in

numbers = st.integers(0, 2**63 - 1)


def message(*several: tuple[int, Any]) -> bytes:
    """A protocol buffer, as https://protobuf.dev/programming-guides/encoding writes it."""
    out = b""
    for number, value in several:
        body = value if isinstance(value, bytes) else None
        out += varint(number << 3 | (2 if body is not None else 0))
        out += varint(value) if body is None else varint(len(body)) + body
    return out


def varint(number: int) -> bytes:
    """Groups of seven bits, the lowest first, all but the last marked."""
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


@given(numbers, st.binary(max_size=5))
def test_numbers(number: int, after: bytes) -> None:
    assert encode_varint(number) == varint(number)
    assert decode_varint(varint(number) + after, 0) == (number, len(varint(number)))


@given(st.lists(st.tuples(st.integers(1, 100), numbers | st.binary(max_size=300)), max_size=6))
def test_fields(several: list[tuple[int, Any]]) -> None:
    fixed = varint(7 << 3 | 5) + struct.pack("<f", 1.5) + varint(9 << 3 | 1) + struct.pack("<d", 2.5)
    found = list(fields(message(*several) + fixed))
    assert found == [*several, (7, struct.pack("<f", 1.5)), (9, struct.pack("<d", 2.5))]


@given(st.binary(max_size=60))
def test_what_is_no_message_is_refused_or_read_to_its_end(text: bytes) -> None:
    try:
        list(fields(text))
    except ValueError as error:
        assert str(error)  # and no other error


@given(st.tuples(numbers, numbers, numbers), numbers, numbers, st.binary(max_size=200), st.binary(max_size=200))
def test_a_heap_is_found_wherever_its_table_is(
    borders: tuple[int, int, int], heap: int, again: int, before: bytes, after: bytes
) -> None:
    uses = [(3, message((1, 1), (2, 5))), (3, message((1, 3), (2, heap), (3, again), (4, b"fusion.1")))]
    ends = [*zip((5, 6, 7), borders, strict=True), (8, 270_536_704)]
    table = message((1, 0), (2, 7), *uses, (4, 16 << 30), *ends)
    chip = message((1, 1), (2, 7), (3, message((1, 3), (2, 1))), (4, 1 << 27), *ends)
    program = before + message((2, message((1, chip), (1, table)))) + after
    assert (heap, again) in set(heaps_in(program, borders))
    assert not list(heaps_in(before + after, tuple(border ^ 1 << 40 for border in borders)))  # type: ignore[arg-type]


@pytest.mark.tpu
def test_what_was_compiled_fits_by_what_is_said_of_it() -> None:
    """``memory_analysis`` says of the second program that it takes more than there is, and the compiler made it."""
    _, _, total, held, gaps = said("temporary_memory_on_tpus", str(32768), hasty=True)  # what fits easily
    limit, borders, most, held_then, gaps_then = said("temporary_memory_on_tpus", str(9 * 32768))  # what hardly does
    assert 0 < held < held + gaps < total
    assert borders + held_then + gaps_then <= limit < borders + most
    assert gaps_then * held < gaps * held_then  # there are fewer where memory is short
