"""A program -> its fused operations; intermediate values inside a fused operation are never in memory.

    y = tanh(x * 2 + b); s = y.sum(0)   ->   one operation that reads x and b, and writes s

Knows descriptions and programs. Must not know machines, times, or how much memory there is. The rules are the
producer-consumer rules of any compiler:

- Element-wise equations, broadcasts, slices and rearrangements are fused into the equation that reads them. A result
  with several readers is written once, unless it is cheap: computed from one array, in at most `FEW` operations.
- Reductions fuse their operands, and write their result.
- Products fuse rearrangements and conversions of their operands, and write their result.
- Where arithmetic is cheaper than memory (`recomputes`), products fuse all element-wise operands, and one element-wise
  reader of the same size fuses the product. Every result computed from one array is cheap.
- Everything else (scatters, sorts, windows, loops, collectives) reads from memory and writes to it.
- Independent all-reduces are combined into one collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Program
from vnode.operators.cost import nbytes
from vnode.partition.cost.collective_cost import KINDS
from vnode.partition.cost.lower_to_device import body_programs
from vnode.partition.cost.op_kinds import FusedOp, FusedProgram, OpKind, op_kind_of
from vnode.partition.cost.timed_pieces import timed_op_of

FEW = 4
"""Operations per element up to which each reader recomputes a value instead of reading it."""

TAKES = {OpKind.ELEMENTWISE: 2, OpKind.BITCAST: 2, OpKind.TRANSPOSED: 2, OpKind.REDUCED: 2, OpKind.CONTRACTED: 1}
"""Operands that each kind fuses: 0 none, 1 rearrangements and conversions, 2 all element-wise ones."""

LIGHT = {OpKind.ELEMENTWISE, OpKind.BITCAST, OpKind.TRANSPOSED}
"""Kinds that may be fused into their readers."""


def fuse_program(program: Program, recomputes: bool) -> FusedProgram:
    """Fuses the equations of one device's program, and those in the bodies of its loops and branches.

    Args:
      program: the program.
      recomputes: whether arithmetic is cheaper than memory.
    """
    shapes = {id(eqn): op_kind_of(eqn, program.describe(eqn)) for eqn in program.equations}
    ends = {atom for atom in program.outputs if isinstance(atom, Var)}
    inside = inlined_equations(program, shapes, ends, recomputes)
    names: dict[Var, Var] = {}
    for eqn in program.equations:
        source = eqn.invars[0] if eqn.invars else None
        if shapes[id(eqn)] is OpKind.BITCAST and isinstance(source, Var):
            maker = program.definitions.get(source)
            if maker is None or id(maker) not in inside or source in names:
                names[eqn.outvars[0]] = source
    found = []
    for eqn in program.equations:
        if id(eqn) not in inside and not (eqn.outvars and eqn.outvars[0] in names):
            inner = body_programs(eqn) if shapes[id(eqn)] is OpKind.REGION else ()
            bodies = tuple(fuse_program(body, recomputes) for body in inner)
            piece = timed_op_of(fused_equations(eqn, program, inside), eqn.outvars)
            found.append(FusedOp(piece, shapes[id(eqn)], eqn, bodies))
    return combine_collectives(FusedProgram(program, tuple(found), names))


def inlined_equations(program: Program, shapes: Mapping[int, OpKind], ends: Set[Var], recomputes: bool) -> set[int]:
    """The ids of the equations that are fused into their readers."""
    cheap = recomputed_equations(program, shapes, recomputes)
    takes: dict[int, int] = {}
    roots: dict[int, frozenset[int]] = {}  # for each inlined equation, the operations that contain it
    multiplies: set[int] = set()  # operations that have fused a product
    for eqn in reversed(program.equations):
        shape = shapes[id(eqn)]
        takes[id(eqn)] = 2 if recomputes and shape is OpKind.CONTRACTED else TAKES.get(shape, 0)
        readers = program.readers.get(eqn.outvars[0], ()) if len(eqn.outvars) == 1 else ()
        if not readers or eqn.outvars[0] in ends:
            continue
        least = min(takes[id(reader)] for reader in readers)
        into = frozenset[int]().union(*(roots.get(id(reader), {id(reader)}) for reader in readers))
        if shape is OpKind.CONTRACTED and recomputes and len(into) == 1 and into.isdisjoint(multiplies):
            alike = all(reader.outvars[0].aval.size == eqn.outvars[0].aval.size for reader in readers)
            if alike and least == 2 and all(shapes[id(reader)] in LIGHT for reader in readers):
                roots[id(eqn)] = into
                multiplies |= into
        elif shape in LIGHT:
            rearranges = shape is not OpKind.ELEMENTWISE or eqn.primitive.name == "convert_element_type"
            if least >= (1 if rearranges else 2) and (len(into) == 1 or eqn.outvars[0] in cheap):
                roots[id(eqn)] = into
                takes[id(eqn)] = least
    return {*roots}


def recomputed_equations(program: Program, shapes: Mapping[int, OpKind], recomputes: bool) -> set[Var]:
    """Values that each reader should recompute: cheap to compute from one array, and not smaller than that array.

    A smaller result of a conversion is cheap if its operand stays in memory for other readers.
    """
    found: dict[Var, tuple[frozenset[Var], int]] = {}  # the arrays that it is computed from, and operations per element
    for eqn in program.equations:
        of = program.describe(eqn)
        if shapes[id(eqn)] not in LIGHT or of is None or (of.operations.transcendental and not recomputes):
            continue
        out = eqn.outvars[0]
        read = [atom for atom in eqn.invars if isinstance(atom, Var)]
        parts = [found.get(var, (frozenset({var}), 0)) for var in read]
        sources = frozenset[Var]().union(*(each for each, _ in parts))
        large = frozenset(var for var in sources if var.aval.size * 2 > out.aval.size)
        operations = of.operations.operations // max(out.aval.size, 1) + sum(n for _, n in parts)
        if len(large) > 1 or (operations > FEW and not recomputes):
            continue
        computed = [var for var in large if var in program.definitions and len(program.readers[var]) == 1]
        if not any(nbytes(var.aval) > nbytes(out.aval) for var in computed):
            found[out] = large, operations
    return {*found}


def fused_equations(root: JaxprEqn, program: Program, inside: Set[int]) -> list[JaxprEqn]:
    """An equation with the equations that are fused into it, in order."""
    order: dict[int, JaxprEqn] = {}
    pending = [(root, False)]
    while pending:
        eqn, ready = pending.pop()
        if ready:
            order[id(eqn)] = eqn
        elif id(eqn) not in order:
            pending.append((eqn, True))
            makers = (program.definitions.get(atom) for atom in eqn.invars if not isinstance(atom, Literal))
            pending += [(maker, False) for maker in makers if maker is not None and id(maker) in inside]
    return list(order.values())


def combine_collectives(fused: FusedProgram) -> FusedProgram:
    """Combines equal all-reduces that do not depend on each other into one collective.

    The level of a reduction is the longest chain of reductions before it. Equal reductions of one level are combined.
    """
    needs = [{fused.writers[var] for var in reads if var in fused.writers} - {k} for k, reads in enumerate(fused.reads)]
    levels: list[int] = []
    groups: dict[object, list[int]] = {}
    for k, op in enumerate(fused.fused_ops):
        reduces = op.kind is OpKind.COLLECTIVE and KINDS[op.root.primitive.name] == "all-reduce"
        level = max((levels[n] for n in needs[k]), default=0)
        levels.append(level + reduces)
        aval = op.root.invars[0].aval if reduces else None
        key = (op.root.primitive, repr(op.root.params), getattr(aval, "dtype", None), level) if reduces else k
        groups.setdefault(key, []).append(k)
    if len(groups) == len(levels):
        return fused
    waiting = sorted(groups.values(), key=max)
    found, ran = list[FusedOp](), set[int]()
    while waiting:
        several = next(ks for ks in waiting if all(needs[k] <= ran for k in ks))
        waiting.remove(several)
        found.append(combined_collective([fused.fused_ops[k] for k in several]))
        ran.update(several)
    return FusedProgram(fused.program, tuple(found), fused.names)


def combined_collective(ops: Sequence[FusedOp]) -> FusedOp:
    """Combines collectives into one."""
    equations = [eqn for op in ops for eqn in op.timed_op.equations]
    return FusedOp(timed_op_of(equations), ops[0].kind, ops[0].root) if len(ops) > 1 else ops[0]
