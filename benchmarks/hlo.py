"""What benchmarks and tests ask of compiled HLO text beyond its structure: bytes received, the order of additions.

This file knows the text format only: nothing of JAX, of devices, or of what is being compiled.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vnode.partition.hlo import COLLECTIVES, Instruction, Module, Visit, group_size, parse

__all__ = ["Module", "additions", "canonical", "collectives", "cycles", "named_loops", "parse", "runs", "trip_counts"]

_ATTRIBUTES = re.compile(r", (metadata|backend_config|frontend_attributes)=\{.*")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SPACE = re.compile(r"S\(\d+\)")
_DIMENSIONS = re.compile(r"\b(?:pred|bf16|f8\w*|[suf]\d+|c\d+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One collective: its opcode, the bytes that a device receives in it, and whether a loop is around it."""

    opcode: str
    bytes: int
    inside: bool


def runs(visit: Visit, turns: Mapping[str, float]) -> float:
    """The number of times an instruction runs; `turns` has the trip counts that the text lacks, 1 by default."""
    return math.prod(turns.get(loop.name, 1) if loop.trips is None else loop.trips for loop in visit.loops)


def cycles(module: Module, turns: Mapping[str, float], in_loops: bool = False) -> int:
    """The compiler's estimated cycles, of all instructions or of those in loops, each as often as its loops run."""
    counted = (v for v in module.walk() if not v.fused and (v.loops or not in_loops))
    return round(sum(v.instruction.cycles * runs(v, turns) for v in counted))


def trip_counts(module: Module) -> list[int | None]:
    """Trip counts of the outermost loops, in order; None where the text lacks them."""
    return [module.trip_count(v.instruction) for v in module.walk() if v.instruction.opcode == "while" and not v.loops]


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
        return sum(instruction.sizes)
    n = group_size(instruction)
    others = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}
    return round(sum(instruction.sizes) * others.get(opcode, (n - 1) / n))


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
      Sums of numbers of blocks, such as ``(((0 + 1) + 2) + 3)``.
    """
    passing = {"bitcast", "copy", "copy-start", "copy-done", "slice-done", "reshape", "reduce"}
    own = [[str(d)] for d in range(devices)]

    def groups(rest: str) -> dict[int, list[int]]:
        """Of every device those with which it exchanges."""
        found = re.findall(r"replica_groups={(.*?})}", rest)
        lists = [[int(d) for d in group.split(",")] for each in found[:1] for group in re.findall(r"{([\d,]+)}", each)]
        return {d: members for members in lists or [[*range(devices)]] for d in members}

    def values(computation: str, given: list[Any]) -> dict[str, Any]:
        """Of every device the blocks and sums in an array, lists of such for tuples, or None; the result last."""
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
            case "all-to-all" | "reduce-scatter":
                held, members = operands[0] or own, groups(instruction.rest)
                arrived = [[each for m in members[d] for each in held[m]] for d in range(devices)]
                if instruction.opcode == "all-to-all":
                    return arrived
                return [[f"({' + '.join(each)})"] for each in arrived]
            case "all-gather":
                return operands[0] or [[str(d) for d in range(devices)]] * devices
            case "fusion":
                return [*values(instruction.called()["calls"][0], operands).values()][-1]
            case "tuple":
                return operands
            case "get-tuple-element" if operands[0]:
                return operands[0][int(re.findall(r"index=(\d+)", instruction.rest)[0])]
            case "slice" | "slice-start" if operands[0]:
                bounds = re.findall(r"\[(\d+):(\d+)", instruction.rest.split("slice={")[1])
                shape, length = _dimensions(types[instruction.operands[0]]), len(operands[0][0])
                start, stop = map(int, bounds[shape.index(length)]) if length > 1 else (0, 1)
                return [each[start:stop] for each in operands[0]]
            case "add" if all(operands):
                pairs = zip(*operands, strict=True)
                return [[f"({a} + {b})" for a, b in zip(left, right, strict=True)] for left, right in pairs]
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
        found = [each for held in sums.get(name) or [] if held for each in held]
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


def _dimensions(kind: str) -> list[int]:
    return [int(n) for n in _DIMENSIONS.findall(kind)[0].split(",") if n]
