"""Where a leaf of an argument goes: every row of the table in `vnode.placement.leaf_sharding`.

Knows shardings and placements. Must not know steps, nor arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import vnode
from vnode.placement.leaf_sharding import HOST, Role, leaf_sharding

P = PartitionSpec
SHAPE = (8, 4)


def mesh_of(devices: Any, *names: str, kind: AxisType = AxisType.Auto) -> Mesh:
    shape = (len(devices),) if len(names) == 1 else (2, len(devices) // 2)
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(kind,) * len(names))


def here() -> vnode.Placement:
    return vnode.Placement(4, mesh=mesh_of(jax.devices()[:4], "vnode", "model"))


def on(spec: PartitionSpec, *names: str, first: int = 0, **more: Any) -> NamedSharding:
    kind = more.pop("kind", AxisType.Auto)
    return NamedSharding(mesh_of(jax.devices()[first : first + 4], *names, kind=kind), spec, **more)


OWN = ("vnode", "model")

STAYS = "stays"

CASES: dict[str, tuple[Any, dict[Role, Any]]] = {
    "on no devices yet": (lambda: None, {Role.PUT: P(), Role.UNSPLIT: P(), Role.SPLIT: STAYS}),
    "on the mesh": (
        lambda: on(P("vnode"), *OWN),
        {Role.PUT: P("vnode"), Role.UNSPLIT: STAYS, Role.SPLIT: STAYS},
    ),
    "on the devices, with an axis of the name": (
        lambda: on(P(None, "model"), "model"),
        {Role.PUT: P(None, "model"), Role.UNSPLIT: P(None, "model"), Role.SPLIT: P(None, "model")},
    ),
    "on the devices, with an axis of another name": (
        lambda: on(P("data"), "data"),
        {Role.PUT: P(), Role.UNSPLIT: P(), Role.SPLIT: P("vnode")},
    ),
    "on the devices, whole": (
        lambda: on(P(), "data"),
        {Role.PUT: P(), Role.UNSPLIT: P(), Role.SPLIT: P()},
    ),
    "on other devices": (
        lambda: on(P("data"), "data", first=4),
        {Role.PUT: P(), Role.UNSPLIT: P(), Role.SPLIT: P()},
    ),
    "on other devices, with axes of the names": (
        lambda: on(P("vnode", "model"), *OWN, first=4),
        {Role.PUT: P("vnode", "model"), Role.UNSPLIT: P("vnode", "model"), Role.SPLIT: P("vnode", "model")},
    ),
    "on one of the devices": (
        lambda: SingleDeviceSharding(jax.devices()[0]),
        {Role.PUT: P(), Role.UNSPLIT: P(), Role.SPLIT: P()},
    ),
}


@pytest.mark.parametrize("role", [Role.PUT, Role.UNSPLIT, Role.SPLIT], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_where_a_leaf_goes(name: str, role: Role) -> None:
    present, expected = CASES[name]
    found = leaf_sharding(SHAPE, present(), here(), role)
    wanted = expected[role]
    assert (STAYS if found is None else found.spec) == wanted
    assert found is None or found.mesh == here().mesh


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_once_the_mesh_is_known_a_batch_stays_on_the_devices_unless_its_type_names_a_mesh(kind: AxisType) -> None:
    present = on(P("data"), "data", kind=kind)
    found = leaf_sharding(SHAPE, present, here(), Role.SPLIT, mesh_known=True)
    assert (found is None) == (kind is AxisType.Auto)
    assert leaf_sharding(SHAPE, present, here(), Role.UNSPLIT, mesh_known=True) is not None


@pytest.mark.parametrize(("role", "kind"), [(Role.PUT, None), (Role.UNSPLIT, HOST), (Role.SPLIT, HOST)], ids=str)
def test_an_argument_on_the_host_stays_there_and_what_is_put_does_not(role: Role, kind: str | None) -> None:
    default = here().sharding().memory_kind
    for first, wanted in ((0, kind), (4, None)):
        found = leaf_sharding(SHAPE, on(P("data"), "data", first=first, memory_kind=HOST), here(), role)
        assert found is not None and found.memory_kind == (wanted or default)


def test_a_pattern_decides_and_what_it_does_not_name_stays() -> None:
    def named(spec: PartitionSpec | None, **more: Any) -> Any:
        return leaf_sharding(SHAPE, None, here(), Role.NAMED, spec=spec, **more)

    found, away = named(P(("model", "pipe"), None)), named(None, host=True)
    assert found.spec == P(("model",), None) and found.memory_kind != HOST
    assert away.spec == P() and away.memory_kind == HOST
    assert named(None) is None and named(P(None, None, "model")) is None


def test_what_the_axes_do_not_divide_is_whole() -> None:
    found = leaf_sharding((3, 3), on(P(None, "model"), "model", first=4), here(), Role.UNSPLIT)
    assert found is not None and found.spec == P()
