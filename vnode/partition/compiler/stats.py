"""A compiled program -> its compiler's figures: bytes, cycles, collectives; as numbers that JSON can hold.

    compiled = jax.jit(step).lower(state, batch).compile()
    stats = compiled_stats(compiled)
    stats.memory, stats.cycles        # bytes of one device; 0 cycles where the compiler estimates none

Knows compiled programs and their text. Must not know plans, machines, or who compiled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vnode.errors import ProfileError
from vnode.partition.hlo import Collective, estimated_cycles, find_collectives, find_fetches, merge, parse
from vnode.placement.temporary import temporary_of


@dataclasses.dataclass(frozen=True)
class CompiledStats:
    """A compiler's figures for a program.

    Attributes:
      arguments: bytes of one device's arguments.
      outputs: bytes of its results.
      aliased: bytes of results in donated buffers.
      temporary: bytes of all other arrays at the peak.
      gaps: bytes of fragmentation between temporary arrays.
      host: bytes of temporary arrays in the host's memory.
      fetched: bytes fetched from the host's memory in a step.
      cycles: estimated cycles of computation of a step; 0 where the compiler estimates none.
      collectives: the collectives of a step.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    gaps: int = 0
    host: int = 0
    fetched: int = 0
    cycles: int = 0
    collectives: tuple[Collective, ...] = ()

    @property
    def memory(self) -> int:
        """Peak bytes of one device, without gaps between arrays: a compiler closes these where it must."""
        return self.arguments + self.outputs - self.aliased + self.temporary

    @staticmethod
    def from_json(content: Any) -> CompiledStats:
        """The figures from their fields as plain data, as `dataclasses.asdict` gives them.

        Raises:
          ValueError, KeyError or TypeError: the data are not such.
        """
        numbers = {name: int(n) for name, n in content.items() if name != "collectives"}
        if any(n < 0 for n in numbers.values()):
            raise ValueError(f"negative: {numbers}")
        return CompiledStats(**numbers, collectives=tuple(map(Collective.from_json, content["collectives"])))


def compiled_stats(compiled: Any, over_nodes: int | None = None) -> CompiledStats:
    """Reads the compiler's figures for a program.

    Args:
      compiled: a `jax.stages.Compiled`.
      over_nodes: total trip count of loops over a device's nodes, where the text lacks it.

    Returns:
      The figures.

    Raises:
      ProfileError: the compiler reports no memory for the program, or no text.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> stats = compiled_stats(jax.jit(lambda x: x @ x @ x).lower(shape).compile())
      >>> stats.arguments, stats.outputs, stats.memory
      (16384, 16384, 49152)
    """
    said, text = compiled.memory_analysis(), compiled.as_text()
    if said is None or not text:
        raise ProfileError(
            "the compiler reports no memory, or no text, for the program.",
            facts=[f"memory analysis: {said}", f"text: {len(text or '')} characters"],
            remedies=["compile for a platform that reports both: CPU, GPU or TPU"],
        )
    module, temporary = parse(text), temporary_of(compiled)
    return CompiledStats(
        arguments=said.argument_size_in_bytes,
        outputs=said.output_size_in_bytes,
        aliased=said.alias_size_in_bytes,
        temporary=temporary.held,
        gaps=temporary.gaps,
        host=getattr(said, "host_temp_size_in_bytes", 0),
        fetched=find_fetches(module, over_nodes),
        cycles=estimated_cycles(module, over_nodes),
        collectives=merge(find_collectives(module, over_nodes)),
    )
