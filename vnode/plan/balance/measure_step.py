"""`profile`: measures a step on each kind of device.

Knows steps, placements and clocks. Must not know the model that is fitted to the times, but for one number: what an
exchange between kinds takes longer than the model says.

A few nodes are enough: a node is the same program whatever the number of nodes, so the step is cut to the first nodes
of the batch, with their size. One node is not measured unless it is all there is: one turn of a loop is no loop to the
compiler. All programs are compiled and run once before the first is timed; then they run in turn, round after round,
so that whatever else a machine does falls on all of them; medians are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from vnode.errors import MemoryLimitError, ProfileError
from vnode.placement.devices_by_kind import by_kind
from vnode.placement.placement import Placement
from vnode.placement.process_barrier import check_own
from vnode.plan.balance.profiles import Measurement, Profile, Profiles, Signature, signature_difference
from vnode.plan.nodes.device_memory import byte_count, program_memory, reported_bytes
from vnode.step.argument_checks import check_tuple, check_values
from vnode.step.explain import analyse_step
from vnode.step.protocol import Step
from vnode.step.resolved import Resolved
from vnode.step.virtual import VirtualStep, first_nodes
from vnode.tracebacks import api_boundary


@api_boundary
def profile(
    step: Step,
    args: Sequence[Any],
    devices: Mapping[str, Sequence[Any]] | Sequence[Any] | None = None,
    *,
    nodes: Sequence[int] | None = (2, 4, 8),
    steps: int = 3,
    memory: int | str | Mapping[str, int | str] | None = None,
    mixed: bool = True,
    path: str | os.PathLike[str] | None = None,
) -> Profiles:
    """Measures seconds per node and per step on each kind of device, with a few nodes and a few steps.

    One device of each kind runs the numbers of nodes asked for; then 2, 4, 8 ... devices, up to all of the kind, the
    largest number that the batch has enough nodes for. The result knows the times for any number of both, see
    `vnode.balance`.

    Args:
      step: made by `vnode.virtualize` or `vnode.nnx.virtualize`.
      args: its arguments. They are not changed, nor donated.
      devices: grouped by kind if they are a sequence; a mapping from names to devices says what the kinds are; all of
        ``jax.devices()`` by default.
      nodes: on a device. None leaves the step as it is, for steps that only take a batch of one size: it is measured
        on 1, 2, 4 ... devices, as far as they are there.
      steps: timed, for each number of nodes and devices, after one that is not.
      memory: bytes of a device, or a string such as ``"16GiB"``, of each or of each kind; by default what the devices
        say, if they do.
      mixed: whether also to measure one device of every kind together.
      path: of a file. If it is there the times are read from it instead, and compared with the step; otherwise they
        are written to it.

    Returns:
      The times.

    Raises:
      ProfileError: the file is of another step, other shapes, another version of jax, or lacks a kind of device.
      PlacementError: something is wrong with the devices.
      ProcessError: times are to be measured on devices of other processes. A file with times can be read in each.

    Example:
      >>> import jax, jax.numpy as jnp, vnode
      >>> @vnode.virtualize(virtual_nodes=4)
      ... def step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      >>> profiles = vnode.profile(step, (jnp.ones(3), jnp.ones((8, 3))), jax.devices()[:1])
      >>> profiles.kinds[0].node > 0
      True
    """
    if not isinstance(step, Step):
        raise TypeError(f"profile measures what vnode.virtualize returns, not {step!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive integer, not {steps!r}")
    check_tuple(args, "vnode.profile")
    groups = by_kind(devices)
    file = None if path is None else Path(path).expanduser()
    if file is None or not file.exists():
        check_own(
            "vnode.profile",
            (device for group in groups.values() for device in group),
            [
                "measure in a program of one process, with path='profile.json', and give all processes that file: "
                "vnode.profile(step, args, path='profile.json') then reads it",
                "or measure this process's devices alone: vnode.profile(step, args, jax.local_devices())",
            ],
        )
    with step.resolved(args, {}) as here:
        here.step.spec.check_positional(here.args, here.kwargs, "vnode.profile")
        check_values(here.args, here.kwargs, here.step.spec.positional)
        return measure_groups(here.step, here.args, groups, nodes, steps, memory, mixed, file)


def measure_groups(
    step: VirtualStep,
    args: tuple[Any, ...],
    groups: Mapping[str, Sequence[Any]],
    nodes: Sequence[int] | None,
    steps: int,
    memory: int | str | Mapping[str, int | str] | None,
    mixed: bool,
    path: Path | None,
) -> Profiles:
    """Measures a step on arrays, by kinds of devices; the body of `profile`."""
    shape = step_signature(step, args, None if nodes is None else 1)
    if path is not None and path.exists():
        return check_loaded(Profiles.load(path), shape, groups, path)

    total = step.options.virtual_nodes
    sizes = None if nodes is None else usable_sizes(nodes, total, step.options.lane)
    programs: dict[tuple[str, int, int], Callable[[], float]] = {}
    sizes_in_memory: dict[tuple[str, int, int], int | None] = {}
    for kind, group in groups.items():
        for count, each in configurations(len(group), total, step.options.lane, sizes):
            key = (kind, count, each)
            programs[key], sizes_in_memory[key] = compile_part(step, args, group[:count], [each] * count)
    if mixed and sizes is not None and len(groups) > 1 and (each := largest_size(sizes, total, len(groups))):
        first = [group[0] for group in groups.values()]
        programs["", len(first), each], _ = compile_part(step, args, first, [each] * len(first))
    for run in programs.values():
        run()
    times: dict[tuple[str, int, int], list[float]] = {key: [] for key in programs}
    for _ in range(steps):
        for key, run in programs.items():
            times[key].append(run())
    seconds = {key: statistics.median(found) for key, found in times.items()}

    kinds = tuple(
        Profile(
            kind,
            len(group),
            tuple(Measurement(k[1], k[2], seconds[k], sizes_in_memory[k]) for k in seconds if k[0] == kind),
            memory_limit(kind, group, memory),
        )
        for kind, group in groups.items()
    )
    result = Profiles(kinds, 0.0, step.options.lane, shape)
    for kind, _, each in seconds:
        if not kind:
            alone = result.seconds({kind: [each] for kind in groups})
            result = dataclasses.replace(result, between=max(0.0, seconds["", len(groups), each] - alone))
    if path is not None:
        result.save(path)
    return result


def configurations(available: int, total: int, lane: int, sizes: Sequence[int] | None) -> list[tuple[int, int]]:
    """The numbers of devices, and of nodes on each, to measure for a kind.

    >>> configurations(4, 32, 1, [2, 4, 8]), configurations(3, 32, 1, [2, 4, 16]), configurations(4, 6, 1, None)
    ([(1, 2), (1, 4), (1, 8), (2, 8), (4, 8)], [(1, 2), (1, 4), (1, 16), (2, 16), (3, 4)], [(1, 6), (2, 3)])
    """
    counts = sorted({available, *(2**i for i in range(available.bit_length()))})
    if sizes is None:
        return [(count, total // count) for count in counts if total % (count * lane) == 0]
    several = [(count, each) for count in counts[1:] if (each := largest_size(sizes, total, count))]
    return [(1, each) for each in sizes] + several


def largest_size(sizes: Sequence[int], total: int, devices: int) -> int:
    """The largest number of nodes that each device can have; 0 if there is none."""
    return max((each for each in sizes if each * devices <= total), default=0)


def usable_sizes(nodes: Sequence[int], total: int, lane: int) -> list[int]:
    """Numbers of nodes in whole lanes, as far as the batch has that many.

    >>> usable_sizes((2, 4, 8), 6, 1), usable_sizes((2, 4, 8), 1, 1), usable_sizes((2, 4), 32, 4)
    ([2, 4], [1], [4])
    """
    if not nodes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in nodes):
        raise ValueError(f"nodes must be positive integers, or None, not {nodes!r}")
    whole = sorted({-(-n // lane) * lane for n in nodes})
    return [n for n in whole if n <= total] or [total]


def compile_part(
    step: VirtualStep, args: tuple[Any, ...], devices: Sequence[Any], counts: Sequence[int]
) -> tuple[Callable[[], float], int | None]:
    """Compiles a step on the first nodes of the batch; returns a timed run, and the bytes that a device needs."""
    total = sum(counts)
    with note_part_of_batch(total, step.options.virtual_nodes):
        placement = Placement(total, devices, counts=counts)
        cut, inputs = first_nodes(step, total, placement, args)
        one = len(placement.groups) == 1
        compiled, inputs = cut.executor.compiled(inputs) if one else (cut, inputs)

    def run() -> float:
        mine = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, inputs)
        jax.block_until_ready(mine)  # the step may donate them
        began = time.perf_counter()
        jax.block_until_ready(compiled(*mine))
        return time.perf_counter() - began

    return run, needed_bytes(compiled) if one else None


@contextlib.contextmanager
def note_part_of_batch(nodes: int, virtual_nodes: int) -> Iterator[None]:
    """A context that adds a note to errors of the user's step: it was run on a part of the batch."""
    try:
        yield
    except Exception as error:
        if nodes < virtual_nodes:
            error.add_note(
                f"vnode.profile tried the step on {nodes} of {virtual_nodes} nodes; "
                "nodes=None measures steps that only take a batch of one size"
            )
        raise


def needed_bytes(compiled: Any) -> int | None:
    """Bytes that a compiled program needs on a device; None if the compiler does not report them."""
    try:
        return program_memory(compiled)
    except MemoryLimitError:
        return None


def memory_limit(kind: str, group: Sequence[Any], memory: int | str | Mapping[str, int | str] | None) -> int | None:
    """The bytes of a device of a kind: the user's limit, or else the smallest that the devices report."""
    if memory is not None:
        given = memory.get(kind) if isinstance(memory, Mapping) else memory
        return None if given is None else byte_count(given)
    return min((n for n in map(reported_bytes, group) if n), default=None)


def step_signature(step: VirtualStep, args: tuple[Any, ...], nodes: int | None) -> Signature:
    """The signature of the measured program: the step cut to a number of nodes, or the whole step."""
    whole = step.options.virtual_nodes
    size = -(-step.spec.call(args, {}).size // whole)
    cut, few = first_nodes(step, nodes, None, args) if nodes else (step, args)
    with note_part_of_batch(nodes or whole, whole):
        made = analyse_step(Resolved(cut, few, {})).schedule
    content = hashlib.sha256(repr((dataclasses.replace(step.options, virtual_nodes=1), step.spec.plan)).encode())
    for var in made.flow.program.inputs:
        content.update(f"{var.aval}\n".encode())
    for eqn in made.flow.program.equations:
        atoms = [*eqn.invars, *eqn.outvars]
        content.update(f"{eqn.primitive.name} {' '.join(str(atom.aval) for atom in atoms)}\n".encode())
    content.update(str(made.flops).encode())
    return Signature(step.spec.name, nodes or whole, size, content.hexdigest()[:16], jax.__version__)


def check_loaded(found: Profiles, shape: Signature, groups: Mapping[str, Sequence[Any]], path: Path) -> Profiles:
    """Checks that profiles from a file are of this step and these kinds; returns them with these devices' numbers.

    Raises:
      ProfileError: they are not.
    """
    if found.signature != shape:
        raise ProfileError(f"{path}: {signature_difference(found.signature, shape)}")
    missing = [kind for kind in groups if kind not in [p.kind for p in found.kinds]]
    if missing:
        raise ProfileError(
            f"{path} has no times of {', '.join(missing)}.",
            facts=[f"it has {', '.join(p.kind for p in found.kinds)}"],
            remedies=["measure only these, and add them: profiles | vnode.profile(step, args, devices)"],
        )
    return dataclasses.replace(
        found, kinds=tuple(dataclasses.replace(found[kind], devices=len(group)) for kind, group in groups.items())
    )
