"""`check`: whether a virtualized step gives what the plain one gives, and the same bits on several devices.

Knows steps and placements. Must not know schedules, how arrays are compared, nor how anything is drawn.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vnode.errors import PlacementError
from vnode.placement.placement import Placement
from vnode.placement.process_barrier import check_own
from vnode.placement.sharded import whole_batches
from vnode.plan.check.answer import Check
from vnode.plan.check.arrays import DIFFERENT, EQUAL, ROUNDING, UNKNOWN, compare_leaf, same_bits, to_host
from vnode.plan.check.plain import Reference
from vnode.show.progress import display
from vnode.show.units import several
from vnode.step.argument_checks import check_arguments, check_tuple, check_values
from vnode.step.protocol import step_and_arguments
from vnode.tracebacks import api_boundary


@api_boundary
def check(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Any = None,
    plain: bool = True,
    progress: bool | None = None,
) -> Check:
    """Runs a step as it was written, and virtualized on several devices; says what is equal, and which bits.

    For before a week of compute is trusted to it. The step is run on copies of the arguments, with their real values:
    once as it was written, a few times so with other roundings, twice on the first of the devices and once on each of
    the others. Nothing that is given is changed or donated; prints and callbacks of the step happen in each of the
    runs.

    Args:
      step: what `virtualize` returned.
      args: a tuple of the step's arguments, arrays; a batch as large as one device can take without virtual nodes, so
        that there is something to compare with.
      kwargs: keyword arguments of the step.
      devices: numbers of devices, e.g. ``[1, 2, 3]``, or what `VirtualStep.on` takes: placements, or lists of devices.
        By default one, two, three and all there are.
      plain: whether to run the step as written; without it only the bits on devices are compared.
      progress: whether to show a progress bar; by default in notebooks and on terminals. Most of the time is
        compilation, of a program for each number of devices.

    Returns:
      A `Check`; print it, or ask ``check(...).ok``. A plain step that does not fit in the device's memory is left out,
      which the answer says, and is then not `ok`.

    Raises:
      PlacementError: there are not so many devices.
      ProcessError: some of them are another process's.
      VnodeError: `step` is not a virtualized step, or arrays were donated.
      TypeError: `args` is no tuple or list.

    Example:
      >>> import jax.numpy as jnp, vnode
      >>> step = vnode.virtualize(lambda w, x: w - 0.1 * jnp.tanh(x @ w).mean(), virtual_nodes=4)
      >>> answer = vnode.check(step, (jnp.ones(3), jnp.linspace(0, 1, 24).reshape(8, 3)), devices=[1])
      >>> answer.ok, answer.leaves[0].kind
      (True, 'float32[3]')
    """
    check_tuple(args, "vnode.check")
    remedy = "vnode.check(vnode.virtualize(step, virtual_nodes=32), (state, batch))"
    step, args = step_and_arguments(step, args, "check", remedy)
    with step.resolved(args, kwargs or {}) as here:
        check_values(here.args, here.kwargs, here.step.spec.positional)
        check_arguments(dict(enumerate(here.args)), here.kwargs, names=here.step.spec.positional)
        virtual = here.step
        places = requested_places(virtual, devices)
        check_own(
            "vnode.check",
            {device for place in places for device in virtual.on(place).placement.devices},
            [
                "check in one process, without jax.distributed.initialize: the bits are the same in several",
                "or on this process's devices: vnode.check(step, args, devices=[jax.local_devices()])",
            ],
        )
        runs = 0

        with display(progress, 0, plain + 1 + len(places)) as bar:

            def run(place: Any) -> list[tuple[str, Any]]:
                nonlocal runs
                there = virtual.on(place)
                bar.update(plain + runs, f"on {placement_text(there.placement)}")
                runs += 1
                return named_results(virtual.get(there(*copy_arrays(here.args), **copy_arrays(here.kwargs))))

            bar.update(0, "as it was written")
            reference = Reference(here, virtual.on(places[0]).placement.devices[0]) if plain else None
            first = run(places[0])
            again = run(places[0])
            repeatable = all(same_bits(a, b) for (_, a), (_, b) in zip(first, again, strict=True))
            bits = [[True] for _ in first]
            for place in places[1:]:
                for held, (_, a), (_, b) in zip(bits, first, run(place), strict=True):
                    held.append(same_bits(a, b))
            bar.update(plain + runs, "")
    wants = reference.results(len(first)) if reference else [(None, None)] * len(first)
    known = reference is not None and reference.noisy
    found = [
        compare_leaf(path, got, want, spread, tuple(held), known)
        for (path, got), (want, spread), held in zip(first, wants, bits, strict=True)
    ]
    order = (DIFFERENT, UNKNOWN, ROUNDING, EQUAL)
    found.sort(key=lambda leaf: (all(leaf.bits), order.index(leaf.verdict), -leaf.rounding))
    return Check(
        virtual.spec.name,
        tuple(found),
        tuple(placement_text(virtual.on(place).placement) for place in places),
        virtual.options.reduction == "invariant",
        repeatable,
        "not asked for" if reference is None else reference.absent,
        virtual.options.coupling in ("exact", "error"),
    )


def copy_arrays(tree: Any) -> Any:
    """A tree with arrays of its own, which may be donated, on the same devices."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return (
                jax.device_put(leaf, leaf.sharding, may_alias=False) if leaf.committed else jnp.array(leaf, copy=True)
            )
        return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(copy, tree)


def named_results(tree: Any) -> list[tuple[str, Any]]:
    """The path and value of every array in a step's result."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/") or "the result", to_host(leaf))
        for path, leaf in jax.tree.leaves_with_path(whole_batches(tree))
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
    ]


def requested_places(step: Any, devices: Any) -> list[Any]:
    """The devices that the user requests, in forms that `on` takes.

    Raises:
      PlacementError: there are none, or not so many.
    """
    there = jax.devices()
    if devices is None:
        own = step.placement
        if len(own.groups) > 1 or own.mesh.size != own.size:  # devices of several kinds, or with other axes
            return [own]
        there = [device for device in there if device.platform == own.devices[0].platform]
        return [there[:n] for n in sorted({1, 2, 3, len(there)}) if n <= len(there)]
    if isinstance(devices, Placement | jax.sharding.Mesh | int | np.integer):
        devices = [devices]
    entries = list(devices)
    if entries and all(hasattr(entry, "platform") for entry in entries):
        entries = [entries]
    return [first_devices(there, entry) if isinstance(entry, int | np.integer) else entry for entry in entries] or [
        first_devices(there, 0)
    ]


def first_devices(there: Sequence[Any], number: Any) -> list[Any]:
    """The first so many devices.

    Raises:
      PlacementError: there are not so many.
    """
    count = 0 if isinstance(number, bool) else operator.index(number)
    if not 1 <= count <= len(there):
        several_cpus = f"jax.config.update('jax_num_cpu_devices', {max(count, 2)})"
        raise PlacementError(
            f"the step cannot be checked on {number!r} devices: there {'are' if len(there) > 1 else 'is'} "
            f"{len(there)}.",
            remedies=[
                f"devices={list(range(1, min(len(there), 3) + 1))}",
                f"CPUs count as several: {several_cpus}, before jax is used",
            ],
        )
    return list(there[:count])


def placement_text(placement: Placement) -> str:
    """A placement in a few words."""
    kinds = {device.platform for device in placement.devices}
    return several(len(placement.devices), f"{'/'.join(sorted(kinds))} device")
