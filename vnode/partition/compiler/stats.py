"""A compiled program -> its compiler's figures: bytes, cycles, collectives; as numbers that JSON can hold.

    compiled = jax.jit(step).lower(state, batch).compile()
    stats = compiled_stats(compiled)
    stats.memory, stats.cycles        # bytes of one device; 0 cycles where the compiler estimates none

Knows compiled programs and their text. Must not know plans, machines, or who compiled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vnode.partition.hlo import Module, find_collectives, find_fetches, loops_over_nodes, parse, visit_runs
from vnode.placement.temporary import temporary_of


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """Equal collectives of a compiled program.

    Attributes:
      kind: the opcode: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``,
        ``"collective-permute"``, or another.
      bytes: size of one device's array: the result of an all-gather, the operand of other kinds.
      devices: number of devices in a group; 0 for a permute.
      runs: how often they run in a step.
      groups: numbers of the devices that exchange with each other; of a permute, (sender, receiver) pairs; empty where
        the compiled text does not list them.
    """

    kind: str
    bytes: int
    devices: int
    runs: int
    groups: tuple[tuple[int, ...], ...] = ()


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
    collectives: tuple[CompiledCollective, ...] = ()

    @property
    def memory(self) -> int:
        """Peak bytes of one device, without gaps between arrays: a compiler closes these where it must."""
        return self.arguments + self.outputs - self.aliased + self.temporary

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(content: Any) -> CompiledStats:
        """The inverse of `to_json`.

        Raises:
          ValueError, KeyError or TypeError: it is not what that gives.
        """
        several = tuple(
            CompiledCollective(**{**each, "groups": tuple(tuple(map(int, group)) for group in each["groups"])})
            for each in content["collectives"]
        )
        numbers = {name: int(n) for name, n in content.items() if name != "collectives"}
        if any(n < 0 for n in numbers.values()):
            raise ValueError(f"negative: {numbers}")
        return CompiledStats(**numbers, collectives=several)


def compiled_stats(compiled: Any, over_nodes: int | None = None) -> CompiledStats:
    """Reads the compiler's figures for a program.

    Args:
      compiled: a `jax.stages.Compiled`.
      over_nodes: total trip count of loops over a device's nodes, where the text lacks it.

    Returns:
      The figures.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> stats = compiled_stats(jax.jit(lambda x: x @ x @ x).lower(shape).compile())
      >>> stats.arguments, stats.outputs, stats.memory
      (16384, 16384, 49152)
    """
    said, module, temporary = compiled.memory_analysis(), parse(compiled.as_text()), temporary_of(compiled)
    counted: dict[tuple[str, int, int, tuple[tuple[int, ...], ...]], int] = {}
    for each in find_collectives(module, over_nodes):
        key = each.kind, each.bytes, each.devices, each.groups
        counted[key] = counted.get(key, 0) + (0 if each.added else each.runs)
    return CompiledStats(
        arguments=said.argument_size_in_bytes,
        outputs=said.output_size_in_bytes,
        aliased=said.alias_size_in_bytes,
        temporary=temporary.held,
        gaps=temporary.gaps,
        host=getattr(said, "host_temp_size_in_bytes", 0),
        fetched=find_fetches(module, over_nodes),
        cycles=estimated_cycles(module, over_nodes),
        collectives=tuple(
            CompiledCollective(kind, size, devices, runs, groups)
            for (kind, size, devices, groups), runs in sorted(counted.items())
            if runs
        ),
    )


def estimated_cycles(module: Module, over_nodes: int | None = None) -> int:
    """The compiler's cycles of a step; other loops without a known trip count count once."""
    nodes = loops_over_nodes(module)
    visits = (visit for visit in module.walk() if not visit.fused and visit.instruction.cycles)
    return sum(visit.instruction.cycles * visit_runs(visit, nodes, over_nodes)[0] for visit in visits)
