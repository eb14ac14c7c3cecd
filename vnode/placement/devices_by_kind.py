"""Devices by kind.

Knows devices. Must not know steps or times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vnode.errors import PlacementError
from vnode.placement.placement import device_list
from vnode.placement.world import world
from vnode.show.units import several


def by_kind(devices: Mapping[str, Sequence[Any]] | Sequence[Any] | None = None) -> dict[str, list[Any]]:
    """Groups devices by kind, kinds and devices in order of appearance.

    Args:
      devices: a sequence (or a number: the first so many), grouped by ``device_kind``; a mapping from names of kinds to
        devices, which is taken as it is (devices of one model may differ in what else they do); all of
        ``jax.devices()`` by default.

    Returns:
      The devices of every kind.

    Raises:
      PlacementError: there are none, one is named twice, or something is no device.

    Example:
      >>> import jax
      >>> list(by_kind({"quiet": jax.devices()[:1]}))
      ['quiet']
    """
    devices = world().devices if devices is None else devices
    if isinstance(devices, Mapping):
        groups = {str(kind): list(group) for kind, group in devices.items()}
    else:
        groups = {}
        for device in device_list(devices):
            groups.setdefault(getattr(device, "device_kind", ""), []).append(device)
    named = [device for group in groups.values() for device in group]
    for device in named:
        if not hasattr(device, "platform"):
            raise PlacementError(f"{device!r} is not a device; jax.devices() lists this machine's")
    if not named or not all(groups.values()):
        raise PlacementError(
            "every kind needs at least one device.",
            facts=[f"{kind}: {several(len(group), 'device')}" for kind, group in groups.items()],
            remedies=["leave kinds without devices out"],
        )
    if len(set(named)) != len(named):
        raise PlacementError("a device may be named only once, and be of one kind only")
    return groups
