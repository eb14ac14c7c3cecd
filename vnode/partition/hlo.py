"""Compiled HLO text -> its instructions, how often each runs, and its collectives.

Knows the text format. Must not know jax, devices, or what is being compiled.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?)(?<=[\s)])([a-z][a-z0-9\-]*)\((.*)$")
_CALLS = re.compile(r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CHAIN = re.compile(r'chain_id="(\d+)"')
_LAYOUT = re.compile(r"\{[^}]*\}")
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NAMES = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"\b(pred|bf16|f8\w*|[suf]\d+|c\d+)\[([\d,]*)\]")
_LAID_OUT = re.compile(_SHAPE.pattern + r"(\{[^}]*\})?")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: its name, result type, opcode, and the text after the opcode."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def sizes(self) -> list[int]:
        """Bytes of each array of the result."""
        return [_bytes(kind, dims) for kind, dims in _SHAPE.findall(self.type)]

    @property
    def cycles(self) -> int:
        """The compiler's estimate for this instruction; 0 where it gives none."""
        found = _CYCLES.search(self.rest)
        return int(found[1]) if found else 0

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return _NAMES.findall(self.rest.split(")")[0])

    def called(self) -> dict[str, list[str]]:
        """Names of the computations it calls, by role."""
        roles: dict[str, list[str]] = {}
        for role, name in _CALLS.findall(self.rest):
            roles.setdefault(role, []).append(name)
        for names in _BRANCHES.findall(self.rest):
            roles.setdefault("branch", []).extend(n.strip().lstrip("%") for n in names.split(","))
        return roles


OVER_NODES = {"nodes", "run", "lane"}
"""Names of the loops over a device's nodes; they may be nested (`vnode.runtime.node_loops`)."""


class Loop(NamedTuple):
    """A loop: its name, its trip count (None where the text does not tell), and its name in the traced program."""

    name: str
    trips: int | None
    scope: str


@dataclass(frozen=True)
class Visit:
    """An instruction as met on the way from the entry.

    Attributes:
        instruction: The instruction.
        loops: The loops around it, outermost first.
        fused: Whether it is inside a fusion. The cycle estimate of a fused instruction is at the fusion itself.
    """

    instruction: Instruction
    loops: tuple[Loop, ...]
    fused: bool

    def runs(self, over_nodes: int | None = None, unknown: int = 1) -> int:
        """How often the instruction runs.

        Args:
            over_nodes: Total trip count of the loops over a device's nodes (`OVER_NODES`), where the text lacks it.
            unknown: Trip count of other loops, where the text lacks it.
        """
        known = math.prod(loop.trips for loop in self.loops if loop.trips is not None)
        unknown_loops = [loop for loop in self.loops if loop.trips is None]
        if over_nodes is not None and any(loop.scope in OVER_NODES for loop in unknown_loops):
            known *= over_nodes
            unknown_loops = [loop for loop in unknown_loops if loop.scope not in OVER_NODES]
        return known * unknown if unknown_loops else known


@dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    entry: str
    computations: dict[str, list[Instruction]] = field(repr=False)

    def walk(self) -> Iterator[Visit]:
        """Every instruction reachable from the entry, once per call site."""
        yield from self._walk(self.entry, (), False)

    def _walk(self, name: str, loops: tuple[Loop, ...], fused: bool) -> Iterator[Visit]:
        for instruction in self.computations[name]:
            yield Visit(instruction, loops, fused)
            if instruction.opcode.endswith(("-done", "-update")):
                continue  # the walk has already followed its start
            for role, names in instruction.called().items():
                if role == "to_apply" and instruction.opcode != "call":
                    continue  # the scalar function of a reduction
                inner = loops
                if role in ("body", "condition"):
                    trips = self.trip_count(instruction)
                    if role == "condition" and trips is not None:
                        trips += 1  # evaluated once more than the body
                    inner = (*loops, Loop(instruction.name, trips, scope_of(instruction)))
                for called in names:
                    yield from self._walk(called, inner, fused or instruction.opcode == "fusion")

    def trip_count(self, loop: Instruction) -> int | None:
        """The trip count of a loop; None where the text does not tell."""
        known = _TRIPS.search(loop.rest)
        if known:
            return int(known[1])
        # A scan's condition is `counter < constant`, and its counter starts at 0; anything else is of unknown length.
        condition = self.computations[loop.called()["condition"][0]]
        constants = {i.name: i.rest for i in condition if i.opcode == "constant"}
        root = condition[-1]
        operands = root.operands
        if root.opcode == "compare" and "direction=LT" in root.rest and operands[-1] in constants:
            return int(constants[operands[-1]].split(")")[0])
        return None


def parse(text: str) -> Module:
    """Parses the text of a compiled module."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header[2]
            computations[current] = []
            if header[1]:
                entry = current
            continue
        found = _INSTRUCTION.match(line)
        if found and current is not None:
            computations[current].append(Instruction(found[2], found[3], found[4], found[5]))
    if entry is None:
        raise ValueError("no ENTRY computation in this text")
    return Module(entry, computations)


_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESHED = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\)(?= \{))?\s*\{(.*?)\}")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")


def device_groups(instruction: Instruction) -> tuple[tuple[int, ...], ...]:
    """The numbers of the devices of each group of a collective; a permute's pairs; empty where the text names none.

    XLA lists the numbers, or counts along the axes of an array, or names axes of a mesh. ``"x:(2)4"`` is a part of axis
    ``x``: if ``x`` has size 2 x 4 x rest, the part is the 4.

    >>> def made(rest):
    ...     return Instruction("all-reduce.1", "f32[8]", "all-reduce", f"%x), {rest}")
    >>> device_groups(made("replica_groups={{0,2},{1,3}}")), device_groups(made("source_target_pairs={{0,1},{1,0}}"))
    (((0, 2), (1, 3)), ((0, 1), (1, 0)))
    >>> device_groups(made("replica_groups=[2,2]<=[2,2]T(1,0)"))
    ((0, 2), (1, 3))
    >>> device_groups(made("replica_groups=mesh['a'=2,'b'=2] {'a'}"))
    ((0, 2), (1, 3))
    """
    rest = instruction.rest
    if listed := _LISTED.search(rest) or _PAIRS.search(rest):
        return tuple(tuple(map(int, each.split(","))) for each in re.findall(r"\{([\d,]+)\}", listed[1]))
    if found := _COUNTED.search(rest):
        rows = _counted(found[3]).reshape(-1, int(found[2]))
    elif found := _MESHED.search(rest):
        sizes = {name.strip("'"): int(n) for name, n in (each.split("=") for each in found[1].split(","))}
        ids = _counted(found[2]) if found[2] else np.arange(math.prod(sizes.values()))
        wanted, split = list[int](), list[int]()
        parts = [re.fullmatch(r"'?([^':]*)'?(?::\((\d+)\)(\d+))?", each) for each in found[3].split(",")]
        for name, n in sizes.items():
            own = sorted((int(p[2] or 1), int(p[3] or n)) for p in parts if p is not None and p[1] == name)
            before = 1
            for start, size in own:
                split += [start // before, size]
                wanted.append(len(split) - 1)
                before = start * size
            split.append(n // before)
        cut = np.moveaxis(ids.reshape(split), wanted, range(-len(wanted), 0))
        rows = cut.reshape(-1, math.prod(split[i] for i in wanted))
    else:
        return ()
    return tuple(tuple(map(int, row)) for row in rows)


def _counted(said: str) -> np.ndarray:
    """The numbers of a reshaped and transposed iota: ``"[2,4]T(1,0)"``."""
    shape, _, order = said.partition("T")
    sizes = [*map(int, shape.strip("[]").split(","))]
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return (numbers.transpose([*map(int, order.strip("()").split(","))]) if order else numbers).ravel()


def group_size(instruction: Instruction) -> int:
    """The number of devices in a group of a collective."""
    groups = device_groups(instruction)
    if not groups:
        raise ValueError(f"{instruction.name} does not say which devices take part: {instruction.rest[:200]}")
    return len(groups[0])


def scope_of(loop: Instruction) -> str:
    """The name of a loop in the traced program; empty if it has none."""
    found = _OP_NAME.search(loop.rest)
    path = found[1].split("/") if found else []
    return path[-2] if len(path) > 1 and path[-1] == "while" else ""


@dataclass(frozen=True, order=True)
class Collective:
    """Equal collectives of a program.

    Attributes:
        kind: The opcode of HLO, or ``"permute"``.
        bytes: Size of one device's array: the result of an all-gather, the operand of other kinds.
        devices: Number of devices in a group; 0 for a permute.
        runs: How often they run in a step.
        groups: Numbers of the devices that exchange with each other; of a permute, (sender, receiver) pairs; empty if
            nobody says which.
    """

    kind: str
    bytes: int
    devices: int
    runs: int
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step; see `bytes_sent`."""
        return self.runs * bytes_sent(self.kind, self.bytes, self.devices)

    @staticmethod
    def from_json(content: Any) -> Collective:
        """The collectives from their fields as plain data.

        Raises:
            ValueError, KeyError or TypeError: The data are not such.
        """
        groups = tuple(tuple(map(int, group)) for group in content.get("groups", ()))
        numbers = {name: int(content[name]) for name in ("bytes", "devices", "runs")}
        return Collective(str(content["kind"]), **numbers, groups=groups)


def bytes_sent(kind: str, size: int, devices: int) -> float:
    """Bytes that each device sends in a collective, by the algorithms that send least, as rings do.

    Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience"
    (2007), section 4.

    Args:
        kind: The kind of collective, as of `Collective`.
        size: Bytes of one device's array, as of `Collective`.
        devices: Number of devices in a group; a permute has none.
    """
    if kind.endswith("permute"):
        return size
    return size * (2 if kind == "all-reduce" else 1) * (devices - 1) / devices


def merge(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Equal collectives as one, in order."""
    runs: Counter[Collective] = Counter()
    for each in collectives:
        runs[replace(each, runs=0)] += each.runs
    return tuple(replace(each, runs=n) for each, n in sorted(runs.items()))


def bytes_by_kind(collectives: Iterable[Collective]) -> dict[str, int]:
    """Bytes of one device's arrays in a step, by kind of collective."""
    found: Counter[str] = Counter()
    for each in collectives:
        found[each.kind.removeprefix("collective-")] += each.bytes * each.runs
    return dict(found)


def find_collectives(module: Module, over_nodes: int | None = None) -> list[Collective]:
    """All collectives of more than one device that a module runs; a loop of unknown length counts once.

    An asynchronous collective has its operands and its results in the type of its start. A collective may be spread
    over a chain of fusions that compute meanwhile. Each of these fusions names the whole collective, which counts once.
    An all-reduce in a fusion that takes only a slice of the sum counts as a reduce-scatter.

    Args:
        module: The module.
        over_nodes: Total trip count of the loops over a device's nodes (`OVER_NODES`), where the text lacks it.
    """
    found, chains, sliced = [], set[tuple[str, ...]](), _sliced_sums(module)
    for visit in module.walk():
        instruction = visit.instruction
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        devices = 0 if kind in ("collective-permute", "collective-broadcast") else group_size(instruction)
        if devices == 1:
            continue
        chain = _CHAIN.search(instruction.rest) if visit.fused else None
        if chain is not None:
            link = chain[1], kind, _LAYOUT.sub("", instruction.type)
            if link in chains:
                continue
            chains.add(link)
        sizes = instruction.sizes
        if instruction.opcode == "collective-permute-start":
            sizes = sizes[1:2]
        elif instruction.opcode == "all-gather-start":
            sizes = sizes[len(sizes) // 2 :]
        elif kind == "reduce-scatter":
            sizes = [n * devices for n in sizes]
        elif visit.fused and instruction.name in sliced:
            kind = "reduce-scatter"
        groups = device_groups(instruction)
        found.append(Collective(kind, sum(sizes), devices, visit.runs(over_nodes), groups))
    return found


def _sliced_sums(module: Module) -> set[str]:
    """Names of the all-reduces of which only a slice is used."""
    found = set[str]()
    for instructions in module.computations.values():
        sums = {each.name: list[str]() for each in instructions if each.opcode == "all-reduce"}
        for each in instructions if sums else ():
            for name in sums.keys() & set(each.operands):
                sums[name].append(each.opcode)
        found |= {name for name, users in sums.items() if users == ["dynamic-slice"]}
    return found


def estimated_cycles(module: Module, over_nodes: int | None = None) -> int:
    """The compiler's cycles of a step; a loop of unknown length counts once."""
    return sum(visit.instruction.cycles * visit.runs(over_nodes) for visit in module.walk() if not visit.fused)


def find_fetches(module: Module, over_nodes: int | None = None) -> int:
    """Bytes of slices that a module fetches from the host's memory in a run.

    Other loops of unknown length are left out: partial sums on the host come back in such loops.

    Args:
        module: The module.
        over_nodes: Total trip count of the loops over a device's nodes (`OVER_NODES`), where the text lacks it.
    """
    total = 0
    for visit in module.walk():
        if visit.instruction.opcode == "dynamic-slice-start":
            (_, _, layout), *others = _LAID_OUT.findall(visit.instruction.type)
            if HOST in layout:
                sizes = [_bytes(kind, dims) for kind, dims, where in others if HOST not in where]
                total += max(sizes, default=0) * visit.runs(over_nodes, unknown=0)
    return total


HOST = "S(5)"
"""The mark of a layout in the host's memory."""


def _bytes(kind: str, dims: str) -> int:
    """Bytes of an array of a type and dimensions, as they are written: ``"f32"``, ``"8,128"``."""
    bits = 8 if kind == "pred" or kind.startswith("f8") else int(re.sub(r"\D", "", kind))
    return bits * math.prod(int(d) for d in dims.split(",") if d) // 8
