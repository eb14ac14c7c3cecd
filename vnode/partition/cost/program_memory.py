"""The program of one device -> its memory: arguments, results, donated buffers, and temporary arrays at the peak.

    y = x @ x; z = y @ x, x donated  ->  arguments x, result z in x's buffer, temporary y

Knows fused operations, loops and branches. Must not know machines or times.

Constants are computed by their readers. Results have buffers of their own, or donated buffers. A loop holds its carry
and its stacked results once, and its body's peak besides; a branch holds the largest peak of its bodies. Arrays in the
host's memory are counted separately.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from jax.extend.core import Var

from vnode.operators.control_flow import Region, region_of
from vnode.operators.cost import all_bytes, nbytes
from vnode.operators.memory_spaces import is_on_host
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.fusion import fuse_program
from vnode.partition.cost.liveness import Moment, Operation, liveness_in_best_order, peak_bytes
from vnode.partition.cost.lower_to_device import DeviceProgram
from vnode.partition.cost.op_kinds import LOOP_BUFFERS, FusedOp, FusedProgram, OpKind
from vnode.show.units import size

IN_PLACE = {OpKind.ELEMENTWISE, OpKind.UPDATED, OpKind.BITCAST}
"""Kinds that may overwrite their operand."""


@dataclasses.dataclass(frozen=True)
class Level:
    """The temporary bytes that are live while a fused operation runs.

    Attributes:
      bytes: size of the live temporary arrays.
      label: the operation.
      depth: how many loops or branches contain it; of a branch, the body with the highest peak is shown.
    """

    bytes: int
    label: str
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of one device.

    Attributes:
      arguments: bytes of the inputs.
      outputs: bytes of the outputs.
      aliased: bytes of the outputs in donated buffers.
      temporaries: bytes of all other arrays at the peak.
      host: bytes of temporary arrays in the host's memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def __str__(self) -> str:
        return (
            f"{size(self.total)} a device: arguments {size(self.arguments)}, results {size(self.outputs)} "
            f"({size(self.aliased)} in place), temporary {size(self.temporaries)}"
            + (f", on the host {size(self.host)}" if self.host else "")
        )


def memory_of(device: DeviceProgram, calibration: Calibration, fused: FusedProgram | None = None) -> Memory:
    """The memory of one device's program at its peak.

    Args:
      device: the program.
      calibration: the constants of the compiler.
      fused: its fused operations, if they are known.
    """
    program, fused = device.program, fused or fuse_program(device.program, calibration.recomputes)
    moments = outer_moments(fused, calibration)
    arguments = sum(nbytes(var.aval) for var in program.inputs)
    outputs = sum(nbytes(atom.aval) for atom in program.outputs)
    return Memory(arguments, outputs, aliased_bytes(device), peak_bytes(moments), host_bytes(fused))


def levels_over_time(device: DeviceProgram, calibration: Calibration) -> list[Level]:
    """The temporary bytes of one device's program, operation by operation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.analysis.program import inline
      >>> traced = jax.make_jaxpr(lambda x: (jnp.tanh(x @ x) @ x).sum())(jnp.ones((8, 8)))
      >>> device = DeviceProgram(inline(traced.jaxpr, traced.consts), {})
      >>> [(each.label, each.bytes) for each in levels_over_time(device, Calibration())]
      [('dot_general', 256), ('tanh', 256), ('dot_general', 512), ('reduce_sum', 256)]
    """
    fused = fuse_program(device.program, calibration.recomputes)
    return levels_of(fused, outer_moments(fused, calibration), calibration)


def outer_moments(fused: FusedProgram, calibration: Calibration) -> list[Moment]:
    """The live values while each fused operation of a device's program runs."""
    ends = [fused.buffer_of(atom) for atom in fused.program.outputs if isinstance(atom, Var)]
    return liveness_in_best_order(memory_operations(fused, calibration, {*fused.program.inputs, *ends}))


def memory_operations(
    fused: FusedProgram,
    calibration: Calibration,
    elsewhere: Collection[Var],
    written_over: Collection[Var] = (),
) -> list[Operation]:
    """The memory effects of fused operations.

    The memory of variables `elsewhere` is not counted; those of them in `written_over` may be overwritten after their
    last reader.
    """
    beside: dict[int, list[Var]] = collections.defaultdict(list)  # buffers of loops besides their results
    for k, op in enumerate(fused.fused_ops):
        if op.root.primitive is LOOP_BUFFERS:
            beside[fused.writers.get(fused.reads[k][0], k)] += op.timed_op.writes
    constant = {k for k, reads in enumerate(fused.reads) if not reads and fused.fused_ops[k].kind is OpKind.ELEMENTWISE}
    found = list[Operation]()
    for k, op in enumerate(fused.fused_ops):
        nothing = op.root.primitive is LOOP_BUFFERS or k in constant
        own = [] if nothing else [*op.timed_op.writes]
        writes = {var: nbytes(var.aval) for var in (*own, *beside[k]) if var not in elsewhere}
        reads = frozenset(var for var in fused.reads[k] if var not in elsewhere or var in written_over)
        needs = frozenset(fused.writers[var] for var in fused.reads[k] if fused.writers.get(var, k) != k)
        inside = -calibration.on_chip
        if op.kind is OpKind.REGION:
            inside = max(peak_bytes(moments) for moments in inner_moments(op, calibration))
        over = [pair for pair in in_place_pairs(op, fused, k) if fused.writers.get(pair[1]) not in constant]
        found.append(Operation(writes, reads, inside, tuple(over), needs))
    return found


def in_place_pairs(op: FusedOp, fused: FusedProgram, k: int) -> tuple[tuple[Var, Var], ...]:
    """The pairs of a result and an operand of the same size that the result may overwrite."""
    region = region_of(op.root) if op.kind is OpKind.REGION else None
    if region is not None:
        pairs = zip(op.root.outvars, [op.root.invars[i] for i in region.carried], strict=False)
        return tuple((out, fused.buffer_of(atom)) for out, atom in pairs if isinstance(atom, Var))
    if op.kind not in IN_PLACE:
        return ()
    return tuple(
        (out, var) for out in op.timed_op.writes for var in fused.reads[k] if nbytes(var.aval) == nbytes(out.aval)
    )


def inner_moments(op: FusedOp, calibration: Calibration) -> list[list[Moment]]:
    """For each body of a loop or branch the live values while each of its fused operations runs."""
    region = region_of(op.root)
    assert region is not None
    pairs = zip(op.bodies, region.inputs, strict=True)
    return [body_moments(body, inputs, region, k < region.tests, calibration) for k, (body, inputs) in enumerate(pairs)]


def body_moments(
    fused: FusedProgram, inputs: Sequence[int], region: Region, is_test: bool, calibration: Calibration
) -> list[Moment]:
    """One body: its new carry is live from its writer on; its stacked results are in the stack."""
    body = fused.program
    ends = [fused.buffer_of(atom) if isinstance(atom, Var) else None for atom in body.outputs]
    count = 0 if is_test or region.chooser is not None else len(region.carried)
    begins = {i: var for i, var in zip(inputs, body.inputs, strict=True) if i in region.carried}
    stacked = {var for var in ends[count:] if var is not None}
    kept = frozenset(var for var in ends[:count] if var is not None) - {*body.inputs}
    operations = memory_operations(fused, calibration, {*body.inputs, *(stacked - kept)}, {*begins.values()})
    return liveness_in_best_order(operations, kept)


def levels_of(fused: FusedProgram, moments: Sequence[Moment], calibration: Calibration) -> list[Level]:
    """The live bytes while each fused operation runs; a loop or branch is replaced by its body's operations."""
    found: list[Level] = []
    for k, now, sizes in moments:
        op = fused.fused_ops[k]
        inner = inner_moments(op, calibration) if op.kind is OpKind.REGION else []
        several = [levels_of(body, each, calibration) for body, each in zip(op.bodies, inner, strict=True)]
        below = max(several, key=highest_level, default=[])
        beside = sum(sizes.values())
        found += [Level(each.bytes + beside, each.label, each.depth + 1) for each in below]
        found += [] if below else [Level(now, str(op.timed_op))]
    return found


def highest_level(levels: Sequence[Level]) -> int:
    """The most bytes of several levels."""
    return max((each.bytes for each in levels), default=0)


def aliased_bytes(device: DeviceProgram) -> int:
    """Bytes of results in donated buffers: each takes one of its own shape and dtype."""
    given = [device.program.inputs[i].aval for i in device.donated]
    free = collections.Counter((getattr(aval, "shape", None), getattr(aval, "dtype", None)) for aval in given)
    found = 0
    for atom in device.program.outputs:
        kind = getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)
        if free[kind]:
            free[kind] -= 1
            found += nbytes(atom.aval)
    return found


def host_bytes(fused: FusedProgram) -> int:
    """Bytes that a program's loops stack in the host's memory, and the most that one of their bodies has there.

    >>> import jax, jax.numpy as jnp
    >>> from vnode.analysis.program import inline
    >>> turn = lambda c, x: (c, jax.device_put(c * x, jax.memory.Space.Host))
    >>> traced = jax.make_jaxpr(lambda x: jax.lax.scan(turn, x[0], x)[0])(jnp.ones((4, 3)))
    >>> host_bytes(fuse_program(inline(traced.jaxpr, traced.consts), recomputes=False))
    48
    """
    loops = [op for op in fused.fused_ops if op.kind is OpKind.REGION]
    own = sum(all_bytes(var.aval) for op in loops for var in op.root.outvars if is_on_host(var.aval))
    return own + max((host_bytes(body) for op in loops for body in op.bodies), default=0)
