"""Reads compiled HLO text: which computations call which, how often they run, where the collectives are.

This file knows the text format only: nothing of JAX, of devices, or of what is being compiled.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
_ATTRIBUTES = re.compile(r", (metadata|backend_config|frontend_attributes)=\{.*")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SPACE = re.compile(r"S\(\d+\)")
_NAMES = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"\b(pred|bf16|f8\w*|[suf]\d+|c\d+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: its name, result type, opcode, and the whole rest of the line."""

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
        fused: Whether it is inside a fusion (whose estimate stands at the fusion itself).
    """

    instruction: Instruction
    loops: tuple[tuple[str, int | None], ...]
    fused: bool

    def times(self, turns: Mapping[str, float]) -> float:
        """How often it runs, given the turns of loops whose length the text does not tell, by name; else one."""
        return math.prod(turns.get(name, 1) if trips is None else trips for name, trips in self.loops)


@dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    entry: str
    computations: dict[str, list[Instruction]] = field(repr=False)

    def walk(self) -> Iterator[Visit]:
        """Every instruction reachable from the entry, once per call site."""
        yield from self._walk(self.entry, (), False)

    def _walk(self, name: str, loops: tuple[tuple[str, int | None], ...], fused: bool) -> Iterator[Visit]:
        for instruction in self.computations[name]:
            yield Visit(instruction, loops, fused)
            if instruction.opcode.endswith(("-done", "-update")):
                continue  # its start has been followed already
            for role, names in instruction.called().items():
                if role == "to_apply" and instruction.opcode != "call":
                    continue  # the scalar function of a reduction
                inner = loops
                if role == "body":
                    inner = (*loops, (instruction.name, self._trips(instruction)))
                elif role == "condition":
                    continue
                for called in names:
                    yield from self._walk(called, inner, fused or instruction.opcode == "fusion")

    def _trips(self, loop: Instruction) -> int | None:
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


@dataclass(frozen=True)
class Collective:
    """One collective: its opcode, the bytes that a device receives in it, and whether a loop is around it."""

    opcode: str
    bytes: int
    inside: bool


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


def collectives(module: Module) -> list[Collective]:
    """All collectives that the module runs."""
    found = []
    for visit in module.walk():
        opcode = visit.instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            found.append(Collective(opcode, _received(visit.instruction, opcode), bool(visit.loops)))
    return found


def _received(instruction: Instruction, opcode: str) -> int:
    """Bytes that each device receives from others, where every part travels once (all-reduce: twice, as in a ring)."""
    if opcode in ("collective-permute", "collective-broadcast"):
        return instruction.bytes
    members = _members(instruction)
    others = {"all-reduce": 2 * (members - 1) / members, "reduce-scatter": members - 1}
    return round(instruction.bytes * others.get(opcode, (members - 1) / members))


def _members(instruction: Instruction) -> int:
    """How many devices a group of a collective has: of three notations."""
    found = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|mesh\[(.*?)\] *\{(.*?)\})", instruction.rest)
    if found is None:
        raise ValueError(f"{instruction.name} does not say which devices take part: {instruction.rest[:200]}")
    listed, size, mesh, axes = found.groups()
    if mesh is None:
        return len(listed.split(",")) if listed else int(size)
    sizes = dict(axis.split("=") for axis in mesh.split(","))
    return math.prod(int(sizes[axis]) for axis in axes.split(","))


def cycles(module: Module, turns: Mapping[str, float], in_loops: bool = False) -> int:
    """The compiler's estimated cycles, each instruction as often as its loops run.

    Args:
        module: The module.
        turns: How often loops run whose length the text does not tell, by name.
        in_loops: Count only what is in a loop.
    """
    counted = (v for v in module.walk() if not v.fused and (v.loops or not in_loops))
    return round(sum(v.instruction.cycles * v.times(turns) for v in counted))


def named_loops(module: Module) -> dict[str, tuple[str, ...]]:
    """Of every loop the names that its program gives to it and to those around it."""
    found = {}
    for visit in module.walk():
        name = _OP_NAME.search(visit.instruction.rest)
        if visit.instruction.opcode == "while" and name:
            path = name[1].split("/")
            found[visit.instruction.name] = tuple(path[i - 1] for i in range(1, len(path)) if path[i] == "while")
    return found


def additions(module: Module, devices: int) -> list[str]:
    """In which order the blocks of all devices are added, wherever one sum of them all is complete.

    Blocks are brought by an all-to-all, by an all-gather of what is no sum yet, or added by reduce-scatters.

    Args:
        module: The module.
        devices: How many of them hold a block.

    Returns:
        Sums of numbers of blocks, such as ``((0 + 1) + (2 + 3))``.
    """
    passing = {"bitcast", "copy", "copy-start", "copy-done", "slice-done", "reshape", "reduce"}
    blocks_of_all = [str(k) for k in range(devices)]

    def scattered(held: list[str], groups: str) -> list[str]:
        sums = list(held)
        for members in [[int(d) for d in group.split(",")] for group in re.findall(r"{([\d,]+)}", groups)]:
            for d in members:
                sums[d] = f"({' + '.join(held[m] for m in members)})"
        return sums

    def values(computation: str, given: list[Any]) -> dict[str, Any]:
        """Blocks in arrays, sums of every device, lists of such for tuples, or None, by name, the result last."""
        here: dict[str, Any] = {}
        types = {i.name: i.type for i in module.computations[computation]}
        for instruction in module.computations[computation]:
            operands = [here[operand] for operand in instruction.operands if operand in here]
            here[instruction.name] = value(instruction, operands, types, given)
        return here

    def value(instruction: Instruction, operands: list[Any], types: dict[str, str], given: list[Any]) -> Any:
        match instruction.opcode:
            case "parameter" if given:
                return given[int(instruction.rest.split(")")[0])]
            case "all-to-all":
                return blocks_of_all
            case "reduce-scatter":
                groups = re.findall(r"replica_groups={(.*?})}", instruction.rest)[0]
                return scattered(operands[0] or blocks_of_all, groups)
            case "all-gather":
                return operands[0] or blocks_of_all
            case "fusion":
                return [*values(instruction.called()["calls"][0], operands).values()][-1]
            case "tuple":
                return operands
            case "get-tuple-element" if operands[0]:
                return operands[0][int(re.findall(r"index=(\d+)", instruction.rest)[0])]
            case "slice" | "slice-start" if operands[0]:
                bounds = re.findall(r"\[(\d+):(\d+)", instruction.rest.split("slice={")[1])
                start, stop = bounds[_dimensions(types[instruction.operands[0]]).index(len(operands[0]))]
                return operands[0][int(start) : int(stop)]
            case "add" if all(operands):
                return [f"({' + '.join(pair)})" for pair in zip(*operands, strict=True)]
            case "select":
                return operands[2]
            case "dynamic-update-slice":
                return operands[1]
            case opcode if opcode in passing:
                return operands[0]
            case _:
                return None

    sums = values(module.entry, [])

    def complete(name: str) -> set[str]:
        found = sums.get(name) or []
        return {s for s in found if isinstance(s, str) and len(re.findall(r"\d+", s)) == devices > 1}

    return [
        total
        for i in module.computations[module.entry]
        for total in sorted(complete(i.name))
        if not any(map(complete, i.operands))
    ]


def canonical(module: Module, name: str) -> str:
    """The text of a computation without names and layouts' memory spaces; what it calls stands in its place."""
    numbers: dict[str, str] = {}
    lines = []

    def known(match: re.Match[str]) -> str:
        called = match[1]
        return f"<{canonical(module, called)}>" if called in module.computations else numbers.get(called, called)

    for instruction in module.computations[name]:
        numbers[instruction.name] = f"v{len(numbers)}"
        rest = re.sub(r"%([\w.\-]+)", known, _ATTRIBUTES.sub("", instruction.rest))
        kind = _SPACE.sub("", instruction.type)
        lines.append(f"{numbers[instruction.name]} = {kind} {instruction.opcode}({rest}")
    return "\n".join(lines)


def loops(module: Module) -> list[int | None]:
    """Trip counts of the outermost loops in order; None where the text does not tell."""
    return [module._trips(v.instruction) for v in module.walk() if v.instruction.opcode == "while" and not v.loops]


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


def _dimensions(kind: str) -> list[int]:
    return [int(n) for n in _SHAPE.findall(kind)[0][1].split(",") if n]
