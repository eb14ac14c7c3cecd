"""Compiled HLO text -> its instructions, how often each runs, and its collectives.

Knows the text format. Must not know jax, devices, or what is being compiled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

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
    def bytes(self) -> int:
        """Bytes of the result, tuples summed."""
        return sum(_width(kind) * _product(dims) for kind, dims in _SHAPE.findall(self.type)) // 8

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


@dataclass(frozen=True)
class Visit:
    """An instruction as met on the way from the entry.

    Attributes:
        instruction: The instruction.
        loops: Name and trip count of each loop around it, outermost first; None where the text does not tell.
        fused: Whether it is inside a fusion. The cycle estimate of a fused instruction is at the fusion itself.
    """

    instruction: Instruction
    loops: tuple[tuple[str, int | None], ...]
    fused: bool


@dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    entry: str
    computations: dict[str, list[Instruction]] = field(repr=False)

    def walk(self, conditions: bool = False) -> Iterator[Visit]:
        """Every instruction reachable from the entry, once per call site; with `conditions`, those of loops' too."""
        yield from self._walk(self.entry, (), False, conditions)

    def _walk(
        self, name: str, loops: tuple[tuple[str, int | None], ...], fused: bool, conditions: bool
    ) -> Iterator[Visit]:
        for instruction in self.computations[name]:
            yield Visit(instruction, loops, fused)
            if instruction.opcode.endswith(("-done", "-update")):
                continue  # the walk has already followed its start
            for role, names in instruction.called().items():
                if role == "to_apply" and instruction.opcode != "call":
                    continue  # the scalar function of a reduction
                inner = loops
                if role == "condition" and not conditions:
                    continue
                if role in ("body", "condition"):
                    trips = self.trip_count(instruction)
                    if role == "condition" and trips is not None:
                        trips += 1  # evaluated once more than the body
                    inner = (*loops, (instruction.name, trips))
                for called in names:
                    yield from self._walk(called, inner, fused or instruction.opcode == "fusion", conditions)

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


def array_bytes(instruction: Instruction) -> list[int]:
    """Bytes of each array of the result."""
    return [_width(kind) * _product(dims) // 8 for kind, dims in _SHAPE.findall(instruction.type)]


@dataclass(frozen=True)
class HloCollective:
    """A collective in a compiled program.

    Attributes:
        kind: Its opcode, without ``-start``.
        arrays: Bytes of each array that one device sends: the results of an all-gather, the operands of other kinds.
        devices: Size of a group; 0 where the text names pairs.
        runs: The number of runs; a loop whose trip count the text lacks counts once.
        open: Whether it is in such a loop.
        name: Its name in the text.
        type: The type of the result, as text.
        added: Whether it only moves elements to their place after a sum over padded arrays (`find_collectives`).
        groups: Numbers of the devices that exchange (`device_groups`).
    """

    kind: str
    arrays: tuple[int, ...]
    devices: int
    runs: int
    open: bool
    name: str
    type: str
    added: bool = False
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self.arrays)


OVER_NODES = {"nodes", "run", "lane"}
"""Names of the loops over a device's nodes; they may be nested (`vnode.runtime.node_loops`)."""


def scope_of(loop: Instruction) -> str:
    """The name of a loop in the traced program; empty if it has no name, or is no loop."""
    found = _OP_NAME.search(loop.rest) if loop.opcode == "while" else None
    path = found[1].split("/") if found else []
    return path[-2] if len(path) > 1 and path[-1] == "while" else ""


def find_collectives(module: Module, over_nodes: int | None = None) -> list[HloCollective]:
    """All collectives of more than one device that a module runs.

    An asynchronous collective has its operands and its results in the type of its start. The TPU compiler spreads some
    collectives over a chain of fusions that compute meanwhile. Each of these fusions names the whole collective, which
    counts once. Some reduce-scatters are fusions of an all-reduce and a slice. They count as reduce-scatters, with the
    bytes before padding. Their padded parts lie at other offsets, and a permute (`HloCollective.added`) moves the
    elements beyond the border to the neighbour.

    Args:
        module: The module.
        over_nodes: Total trip count of the loops over a device's nodes (`OVER_NODES`), where the text lacks it.
    """
    nodes = loops_over_nodes(module)
    found, chains = [], set[tuple[str, ...]]()
    scattered = _sliced_sums(module)
    moved = _border_permutes(module, scattered)
    for visit in module.walk(conditions=True):
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
        own = array_bytes(instruction)
        if instruction.opcode == "collective-permute-start":
            own = own[1:2]
        elif instruction.opcode == "all-gather-start":
            own = own[len(own) // 2 :]
        if kind == "reduce-scatter":
            own = [n * devices for n in own]
        if instruction.name in scattered:
            kind, own = "reduce-scatter", [scattered[instruction.name]]
        runs, open_ = visit_runs(visit, nodes, over_nodes)
        added = instruction.name in moved
        said = instruction.name, instruction.type, added, device_groups(instruction)
        found.append(HloCollective(kind, tuple(own), devices, runs, open_, *said))
    return found


def loops_over_nodes(module: Module) -> set[str]:
    """The names of loops over the nodes of a device (`OVER_NODES`)."""
    return {v.instruction.name for v in module.walk() if scope_of(v.instruction) in OVER_NODES}


def visit_runs(visit: Visit, nodes: Set[str], over_nodes: int | None) -> tuple[int, bool]:
    """The number of runs of an instruction, and whether a loop around it has no known trip count and so counts once.

    Args:
        visit: The instruction.
        nodes: The loops over a device's nodes, by name.
        over_nodes: Total trip count of these loops, where the text lacks it.
    """
    runs = math.prod(trip for _, trip in visit.loops if trip is not None)
    unknown = {name for name, trip in visit.loops if trip is None}
    if over_nodes is not None and unknown & nodes:
        runs, unknown = runs * over_nodes, unknown - nodes
    return runs, bool(unknown)


def find_fetches(module: Module, over_nodes: int | None = None) -> int:
    """Bytes of slices that a module fetches from the host's memory in a run.

    Other loops without a known trip count are left out: partial sums on the host come back in such loops.

    Args:
        module: The module.
        over_nodes: Total trip count of the loops over a device's nodes (`OVER_NODES`), where the text lacks it.
    """
    nodes, total = loops_over_nodes(module), 0
    for visit in module.walk():
        if visit.instruction.opcode != "dynamic-slice-start":
            continue
        (_, _, layout), *others = _LAID_OUT.findall(visit.instruction.type)
        if HOST in layout:
            sizes = [_width(kind) * _product(dims) // 8 for kind, dims, where in others if HOST not in where]
            runs, open_ = visit_runs(visit, nodes, over_nodes)
            total += 0 if open_ else max(sizes, default=0) * runs
    return total


HOST = "S(5)"
"""The mark of a layout in the host's memory."""


def _sliced_sums(module: Module) -> dict[str, int]:
    """All-reduces in fusions that use only a slice of the sum: the summed bytes, without padding, by name."""
    found = {}
    fusions = (each for instructions in module.computations.values() for each in instructions)
    called = (name for each in fusions if each.opcode == "fusion" for name in each.called().get("calls", ()))
    for name in dict.fromkeys(called):
        named = {each.name: each for each in module.computations[name]}
        for each in named.values():
            if each.opcode != "all-reduce":
                continue
            users = [other.opcode for other in named.values() if each.name in other.operands]
            if users == ["dynamic-slice"] and len(each.operands) == 1:
                summed = named[each.operands[0]]
                found[each.name] = named[summed.operands[0]].bytes if summed.opcode == "pad" else each.bytes
    return found


def _border_permutes(module: Module, scattered: Mapping[str, int]) -> set[str]:
    """The permutes of slices of the results of such fusions (`_sliced_sums`)."""
    found = set()
    for instructions in module.computations.values():
        named = {each.name: each for each in instructions}
        for each in instructions:
            if each.opcode not in ("collective-permute", "collective-permute-start"):
                continue
            source = named.get(each.operands[0])
            while source is not None and source.opcode in ("slice", "bitcast", "copy"):
                source = named.get(source.operands[0])
            if source is not None and source.opcode == "fusion":
                inner = [other for name in source.called().get("calls", ()) for other in module.computations[name]]
                if any(other.name in scattered for other in inner):
                    found.add(each.name)
    return found


def _width(kind: str) -> int:
    if kind == "pred":
        return 8
    if kind.startswith("f8"):
        return 8
    return int(re.sub(r"\D", "", kind))


def _product(dims: str) -> int:
    product = 1
    for d in filter(None, dims.split(",")):
        product *= int(d)
    return product
