"""Compiled program -> the temporary memory that it takes on a device.

Knows what compilers report of a program. Must not know what the program computes, nor a device's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

HEAP = 3
"""The heap of temporary arrays in the TPU compiler's table of memory."""


@dataclasses.dataclass(frozen=True)
class Temporary:
    """The memory that a compiled program takes on each device besides its arguments and results.

    Attributes:
      held: bytes of temporary arrays at their peak.
      gaps: further bytes, lost to fragmentation. The TPU compiler leaves gaps where there is room, a third of the total
        or more, and closes them where memory is short.
    """

    held: int
    gaps: int = 0


def temporary_of(compiled: Any) -> Temporary:
    """The temporary memory that a program takes on each device while it runs.

    That is the ``temp_size_in_bytes`` of ``memory_analysis``, except on TPUs: there it is the size of the heap plus,
    once more, its gaps. The compiler's own table of memory, in the serialized program, has both figures. It is used if
    it agrees with ``memory_analysis`` in all other figures. The peak of temporary arrays is ``peak_memory_in_bytes``.

    Args:
      compiled: a `jax.stages.Compiled`, of a platform whose compiler reports memory.

    Returns:
      Bytes of temporary arrays and of gaps.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> temporary_of(jax.jit(lambda x: x @ x @ x).lower(shape).compile())
      Temporary(held=16384, gaps=0)
    """
    said = compiled.memory_analysis()
    total = said.temp_size_in_bytes
    if not total or not is_for_tpu(compiled):
        return Temporary(total)
    heap = heap_of(compiled, said)
    borders = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
    held = getattr(said, "peak_memory_in_bytes", 0) - borders
    return Temporary(held, heap - held) if 0 < held <= heap else Temporary(heap)


def heap_of(compiled: Any, said: Any) -> int:
    """Bytes of the heap of temporary arrays of a TPU program; the figure of `memory_analysis` if it has no table."""
    try:
        program = compiled.runtime_executable().serialize()
    except (NotImplementedError, jax.errors.JaxRuntimeError):  # the plugin cannot serialize
        return said.temp_size_in_bytes
    borders = said.argument_size_in_bytes, said.output_size_in_bytes, said.alias_size_in_bytes
    heaps = {heap for heap, again in heaps_in(program, borders) if heap + again == said.temp_size_in_bytes}
    return heaps.pop() if len(heaps) == 1 else said.temp_size_in_bytes


def is_for_tpu(compiled: Any) -> bool:
    """Whether a program was compiled for TPUs."""
    if hasattr(compiled, "tpu"):
        return bool(compiled.tpu)
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return any(device.platform == "tpu" for sharding in shardings[:1] for device in sharding.device_set)


def heaps_in(program: bytes, borders: tuple[int, int, int]) -> Iterator[tuple[int, int]]:
    """Heap sizes in a serialized program's tables of memory, and the bytes that `memory_analysis` adds to each.

    A table is a protocol buffer: memory space (1), total bytes (2), uses (3, several), capacity (4), bytes of arguments
      (5), results (6), results that alias arguments (7), and reserved bytes (8). A use has a number (1), bytes (2), and
      bytes that are counted once more (3).

    Args:
      program: the serialized program.
      borders: bytes of arguments, results, and results that alias arguments, by which the table is found.
    """
    border = b"".join(
        bytes([number << 3]) + encode_varint(size) for number, size in zip((5, 6, 7), borders, strict=True)
    )
    found = program.find(border)
    while found >= 0:
        for content in enclosing(program, found, found + len(border)):
            table = dict(content)
            if table.get(1) != 0:  # not the device's own memory
                continue
            uses = [dict(fields(value)) for number, value in content if number == 3 and isinstance(value, bytes)]
            heaps = [use for use in uses if use.get(1) == HEAP]
            if len(heaps) == 1:
                heap, again = heaps[0].get(2), heaps[0].get(3, 0)
                if isinstance(heap, int) and isinstance(again, int):
                    yield heap, again
        found = program.find(border, found + 1)


LONGEST = 1 << 22
"""Bytes before a table's last fields in which its start is searched: it names the largest arrays only."""


def enclosing(program: bytes, start: int, end: int) -> Iterator[list[tuple[int, int | bytes]]]:
    """Messages that contain a position, as fields number 1 of outer messages, and end soon after it."""
    tag = program.rfind(b"\x0a", max(0, start - LONGEST), start)
    while tag >= 0:
        try:
            size, begin = decode_varint(program, tag + 1)
            if begin <= start and end <= begin + size <= end + 2 * len(encode_varint(1 << 62)):
                yield list(fields(program[begin : begin + size]))
        except ValueError:
            pass
        tag = program.rfind(b"\x0a", max(0, start - LONGEST), tag)


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a protocol buffer's fields (https://protobuf.dev/programming-guides/encoding).

    Raises:
      ValueError: the message is none.

    Example:
      >>> numbers = [1 << 3, 300, 2 << 3 | 2, 2]
      >>> list(fields(b"".join(map(encode_varint, numbers)) + b"ab"))
      [(1, 300), (2, b'ab')]
    """
    at = 0
    while at < len(message):
        tag, at = decode_varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = decode_varint(message, at)
            yield tag >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = decode_varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError("no protocol buffer")
        yield tag >> 3, message[at : at + size]
        at += size


def encode_varint(number: int) -> bytes:
    """Encodes a number as a varint: seven bits a byte, the lowest first."""
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def decode_varint(message: bytes, at: int) -> tuple[int, int]:
    """Decodes a varint; returns the number, and the position after it.

    Raises:
      ValueError: it does not end.
    """
    number = 0
    for place, byte in enumerate(message[at : at + 10]):
        number |= (byte & 127) << 7 * place
        if byte < 128:
            return number, at + place + 1
    raise ValueError("no number")
