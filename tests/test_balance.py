"""Profiles of devices, and the placement that is computed from them.

Knows published measurements, and how to try all placements. Must not know how the search works. The references are what
VirtualFlow measured on GPUs, and the least time over every assignment of nodes to devices, by the model's formula
written out again. Nothing here depends on how long anything takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from flax import nnx

import vnode
from benchmarks.published import BATCH, NODES, PUBLISHED, published_profiles
from tests.rounding import assert_same
from vnode import Measurement, Profile, Profiles


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: f"{published.counts}")
def test_published_rates_are_predicted(published: Any) -> None:
    """From the rates of either kind alone."""
    rate = BATCH / published_profiles(2, 8).seconds(published.counts)
    assert rate == pytest.approx(published.rate, rel=0.06)


@pytest.mark.parametrize(("p100", "counts"), [(4, ((6, 6), (1,) * 4)), (8, ((4, 4), (1,) * 8))], ids=["2+4", "2+8"])
def test_published_placements_are_chosen(p100: int, counts: tuple[Any, Any]) -> None:
    """3072:512 and 2048:512 are 6 and 4 nodes of 512 examples on a V100, and one on a P100."""
    found = vnode.balance(published_profiles(2, p100), NODES)
    assert (found.counts["V100"], found.counts["P100"]) == counts
    (published,) = [p for p in PUBLISHED if p.counts == found.counts]
    assert found.gain is not None and found.gain > 0
    assert found.rate(BATCH) == pytest.approx(published.rate, rel=0.06)
    assert not found.left_out


@pytest.mark.parametrize("nodes", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("p100", "counts"), [(4, (3072, 512)), (8, (2048, 512))])
def test_smaller_nodes_make_it_no_slower(nodes: int, p100: int, counts: tuple[int, int]) -> None:
    size = BATCH // nodes
    profiles = published_profiles(2, p100, nodes)
    as_published = {"V100": [counts[0] // size] * 2, "P100": [counts[1] // size] * p100}
    assert vnode.balance(profiles, nodes).seconds <= profiles.seconds(as_published) * (1 + 1e-12)


def test_slow_devices_that_do_not_help_are_left_out() -> None:
    """2 V100 and 2 P100 were measured to be slower together, at best 1745, than the 2 V100 alone, 1969."""
    found = vnode.balance(published_profiles(2, 2), NODES)
    assert found.counts == {"V100": (8, 8)}
    assert found.gain == 0 and found.rate(BATCH) == pytest.approx(1969)
    (left,) = found.left_out
    assert (left.kind, left.devices) == ("P100", 2)
    assert left.seconds is not None and left.seconds > found.seconds
    assert "left out: 2 x P100" in str(found)


@pytest.mark.parametrize("p100", [2, 4, 8])
def test_the_even_split_is_refused(p100: int) -> None:
    found = vnode.balance(published_profiles(2, p100), NODES)
    assert found.even is not None and found.counts != found.even.counts
    assert found.seconds < found.even.seconds


@st.composite
def instances(draw: st.DrawFn) -> tuple[Profiles, int]:
    """Profiles with known coefficients: three measurements without noise determine them. Up to 5 devices, 7 nodes."""
    seconds = st.integers(1, 12)  # whole numbers, so that equal times are common
    kinds, total = [], 0
    for name in "abc"[: draw(st.integers(1, 3))]:
        devices = draw(st.integers(1, min(3, 5 - total)) if total < 5 else st.nothing())
        total += devices
        node, fixed, peer = draw(seconds), draw(st.integers(0, 12)), draw(st.integers(0, 3))
        needs, memory = draw(st.integers(1, 4)), draw(st.none() | st.integers(1, 16))
        kinds.append(made(name, devices, node, fixed, peer, needs, memory))
        if total == 5:
            break
    return Profiles(tuple(kinds), float(draw(st.integers(0, 6)))), draw(st.integers(1, 7))


def made(
    name: str, devices: int, node: int, fixed: int, peer: int, needs: int = 1, memory: int | None = None
) -> Profile:
    points = ((1, 1), (1, 2), (3, 2))
    return Profile(
        name, devices, tuple(Measurement(d, n, node * n + fixed + peer * (d - 1), needs * n) for d, n in points), memory
    )


def assignments(nodes: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to put nodes on devices, each told apart."""
    for cuts in itertools.combinations(range(nodes + devices - 1), devices - 1):
        edges = (-1, *cuts, nodes + devices - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


def by_formula(profiles: Profiles, owner: list[Profile], counts: tuple[int, ...]) -> float:
    """The model's time, the coefficients read off the measurements; infinite where memory does not suffice."""
    slowest = rest = 0.0
    used = {id(p) for p, n in zip(owner, counts, strict=True) if n}
    devices = sum(n > 0 for n in counts)
    for p, n in zip(owner, counts, strict=True):
        one, two, apart = (m.seconds for m in p.measurements)
        assert p.measurements[0].bytes is not None
        if n and p.memory is not None and n * p.measurements[0].bytes > p.memory:
            return math.inf
        if n:
            slowest = max(slowest, n * (two - one))
            rest = max(rest, one - (two - one) + (apart - two) / 2 * (devices - 1))
    return slowest + rest + (profiles.between if len(used) > 1 else 0)


@hypothesis.settings(max_examples=300)
@hypothesis.given(instances())
def test_no_placement_is_better(instance: tuple[Profiles, int]) -> None:
    profiles, nodes = instance
    owner = [p for p in profiles.kinds for _ in range(p.devices)]
    least = min(by_formula(profiles, owner, counts) for counts in assignments(nodes, len(owner)))
    if math.isinf(least):
        with pytest.raises(vnode.PlacementError, match="memory"):
            vnode.balance(profiles, nodes)
        return
    found = vnode.balance(profiles, nodes)
    assert found.seconds == pytest.approx(least, rel=1e-9)
    assert sum(map(sum, found.counts.values())) == nodes
    counts = tuple(n for p in profiles.kinds for n in (*found.counts.get(p.kind, ()), *[0] * p.devices)[: p.devices])
    assert by_formula(profiles, owner, counts) == pytest.approx(least, rel=1e-9)
    for left in found.left_out:
        used = len(found.counts.get(left.kind, ()))
        assert left.devices == profiles[left.kind].devices - used
        more = min(
            (
                by_formula(profiles, owner, c)
                for c in assignments(nodes, len(owner))
                if sum(n > 0 for p, n in zip(owner, c, strict=True) if p.kind == left.kind) > used
            ),
            default=math.inf,
        )
        assert (math.inf if left.seconds is None else left.seconds) == pytest.approx(more, rel=1e-9)
    alone = [
        min(
            (by_formula(profiles, owner, c) for c in assignments(nodes, len(owner)) if only(p, owner, c)),
            default=math.inf,
        )
        for p in profiles.kinds
    ]
    if math.isinf(min(alone)):
        assert found.gain is None and not found.single
    else:
        assert found.gain == pytest.approx(min(alone) / least - 1, abs=1e-9)


def only(profile: Profile, owner: list[Profile], counts: tuple[int, ...]) -> bool:
    return all(p is profile for p, n in zip(owner, counts, strict=True) if n)


@hypothesis.given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9), st.integers(1, 99))
def test_a_device_that_costs_more_than_it_brings_is_not_used(fixed: int, peer: int, node: int, nodes: int) -> None:
    """Between devices of one kind the formula has one number to choose: by trying all of them."""
    found = vnode.balance(Profiles((made("a", 9, node, fixed, peer),)), nodes)
    least = min(math.ceil(nodes / d) * node + fixed + peer * (d - 1) for d in range(1, min(9, nodes) + 1))
    assert found.seconds == pytest.approx(least)


def test_memory_moves_nodes_to_slower_devices() -> None:
    profiles = Profiles((made("fast", 1, 1, 0, 0, needs=10), made("slow", 1, 5, 0, 0, needs=10)))
    assert vnode.balance(profiles, 6).counts == {"fast": (5,), "slow": (1,)}
    assert vnode.balance(profiles, 6, memory={"fast": 39}).counts == {"fast": (3,), "slow": (3,)}
    assert vnode.balance(profiles, 6, memory={"fast": "39B"}).counts == {"fast": (3,), "slow": (3,)}
    found = vnode.balance(profiles, 6, memory=30)
    assert found.gain is None and not found.single
    with pytest.raises(vnode.PlacementError, match=r"7 virtual nodes.*\n.*fast: 1 device with room for 3 nodes"):
        vnode.balance(profiles, 7, memory=30)


def test_memory_is_never_thought_smaller_than_measured() -> None:
    profile = Profile("a", 1, tuple(Measurement(1, n, 1.0 * n, b) for n, b in ((2, 100), (4, 160), (8, 200))))
    assert [profile.bytes(n) for n in (1, 2, 3, 4, 8, 10)] == [100, 100, 160, 160, 200, 200 + 2 * 30]


def test_a_limit_without_measured_needs() -> None:
    with pytest.raises(vnode.ProfileError, match="V100 was not measured"):
        vnode.balance(published_profiles(2, 2), NODES, memory=16 * 2**30)


def test_lanes_stay_whole() -> None:
    """Lanes of 4 nodes: 13 nodes are three lanes and a node. The faster device would take 7 without them."""
    profiles = Profiles((made("fast", 1, 1, 0, 0), made("slow", 2, 2, 0, 0)), lane=4)
    assert vnode.balance(profiles, 13).counts == {"fast": (8,), "slow": (4, 1)}


COEFFICIENTS = st.floats(0.01, 10)


@hypothesis.given(COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)
def test_the_fit_finds_what_made_the_times(node: float, fixed: float, peer: float) -> None:
    points = [(1, 2), (1, 4), (1, 8), (2, 8), (4, 8)]
    times = tuple(Measurement(d, n, node * n + fixed + peer * (d - 1)) for d, n in points)
    profile = Profile("a", 4, times)
    assert [profile.node, profile.fixed, profile.peer] == pytest.approx([node, fixed, peer], rel=1e-6, abs=1e-6)
    assert profile.error < 1e-6


@hypothesis.given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8), st.floats(0.1, 10)), min_size=3, max_size=6))
def test_no_other_fit_is_closer(points: list[tuple[int, int, float]]) -> None:
    """As close as scipy's, where that finds that nodes take time; measurements that say otherwise are overruled."""
    rows = np.array([(n / s, 1 / s, (d - 1) / s) for d, n, s in points])
    hypothesis.assume(np.linalg.matrix_rank(rows, tol=1e-3) == 3)
    reference, wrong = scipy.optimize.nnls(rows, np.ones(len(points)))
    profile = Profile("a", 4, tuple(Measurement(*p) for p in points))
    found = np.array([profile.node, profile.fixed, profile.peer])
    assert found[0] > 0 and (found >= 0).all()
    if reference[0] > 1e-6:
        np.testing.assert_allclose(found, reference, rtol=1e-5, atol=1e-7)
        assert np.linalg.norm(rows @ found - 1) == pytest.approx(wrong, abs=1e-7)


def test_what_cannot_be_told_apart_is_the_nodes() -> None:
    profile = Profile("a", 2, (Measurement(2, 8, 4.0),))
    assert (profile.node, profile.fixed, profile.peer) == (pytest.approx(0.5), 0, 0)


def test_files(tmp_path: Path) -> None:
    profiles = dataclasses.replace(published_profiles(2, 8), between=0.25, lane=2)
    profiles.save(tmp_path / "times.json")
    assert Profiles.load(tmp_path / "times.json") == profiles
    for content in ("{", "[]", '{"format": "vnode profiles", "version": 99}', '{"format": "other"}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(vnode.ProfileError, match=r"other\.json holds no profiles"):
            Profiles.load(tmp_path / "other.json")


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf, 1e30, "1", None, True])
def test_impossible_numbers(wrong: Any) -> None:
    """What no measurement can have given is refused, wherever it stands in a profile."""
    good = {"devices": 1, "nodes": 1, "seconds": 1.0}
    for name in good:
        with pytest.raises(vnode.ProfileError, match="positive time"):
            Measurement(**good | {name: wrong})
    times = (Measurement(**good),)
    for name in ("devices", *(["memory"] if wrong is not None else [])):
        with pytest.raises(vnode.ProfileError, match=r"memory of 'one'|needs a device"):
            Profile(**{"kind": "one", "devices": 1, "measurements": times} | {name: wrong})
    for name in ("lane", *(["between"] if wrong != 0 else [])):
        with pytest.raises(vnode.ProfileError, match=name):
            Profiles((Profile("one", 1, times),), **{name: wrong})


def regression(w: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def arguments(size: int = 15, width: int = 3) -> tuple[jax.Array, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(size, width)).astype(np.float32), "y": rng.normal(size=size).astype(np.float32)}
    return jnp.ones(width), batch


def kinds() -> dict[str, list[Any]]:
    return {"one": jax.devices()[:1], "two": jax.devices()[1:3]}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Profiles, Path]:
    """A step that donates its state, on 8 nodes of 2 examples, one of them padding."""
    step = vnode.virtualize(regression, virtual_nodes=8, donate_argnums=0)
    path = tmp_path_factory.mktemp("profiles") / "times.json"
    args = arguments()
    profiles = vnode.profile(step, args, kinds(), nodes=(2, 4), steps=2, path=path)
    assert np.array_equal(args[0], np.ones(3)), "the state was donated"
    return step, profiles, path


@pytest.mark.thorough
def test_a_measured_profile(measured: tuple[Any, Profiles, Path]) -> None:
    step, profiles, _ = measured
    assert [[(m.devices, m.nodes) for m in p.measurements] for p in profiles.kinds] == [
        [(1, 2), (1, 4)],
        [(1, 2), (1, 4), (2, 4)],
    ]
    for p in profiles.kinds:
        assert all(0 < m.seconds < math.inf and m.bytes for m in p.measurements)
        assert p.node > 0 and p.fixed >= 0 and p.peer >= 0
    found = vnode.balance(profiles, 8)
    placement = found.placement(kinds())
    assert placement.counts == tuple(n for nodes in found.counts.values() for n in nodes)
    state, loss = step.on(placement)(*arguments())
    assert_same((state, loss), regression, *arguments())


@pytest.mark.thorough
def test_the_memory_is_the_compilers(measured: tuple[Any, Profiles, Path]) -> None:
    """Of the whole batch on two devices: what they say of the same step on a batch of the same size."""
    step, profiles, _ = measured
    w, batch = arguments()
    stats = step.on(jax.devices()[1:3]).lower(step.on(jax.devices()[1:3]).put(w), batch).compile().memory_analysis()
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert profiles["two"].measurements[-1].bytes == held - stats.alias_size_in_bytes


def test_a_file_is_used_again(measured: tuple[Any, Profiles, Path]) -> None:
    step, profiles, path = measured
    assert vnode.profile(step, arguments(), kinds(), path=path) == profiles
    fewer = vnode.profile(step, arguments(), {"two": jax.devices()[:1]}, path=path)
    assert fewer.kinds == (dataclasses.replace(profiles["two"], devices=1),)


def test_of_another_number_of_nodes_of_the_same_size(measured: tuple[Any, Profiles, Path]) -> None:
    _, profiles, path = measured
    longer = vnode.virtualize(regression, virtual_nodes=20, donate_argnums=0)
    assert vnode.profile(longer, arguments(40), kinds(), path=path) == profiles


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"args": arguments(width=4)}, "program"),
        ({"args": arguments(40)}, "node_size"),
        ({"fun": lambda w, batch: (w, (batch["x"] @ w).sum())}, "step: regression and <lambda>"),
        ({"reduction": "fast"}, "program"),
        ({"jax": "0.0.1"}, "jax: 0.0.1"),
        ({"kind": "three"}, "no times of three"),
    ],
    ids=["shapes", "node size", "another step", "options", "version", "kind"],
)
def test_a_file_of_something_else(
    measured: tuple[Any, Profiles, Path], tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    content = json.loads(measured[2].read_text())
    content["signature"]["jax"] = change.get("jax", content["signature"]["jax"])
    (tmp_path / "times.json").write_text(json.dumps(content))
    step = vnode.virtualize(
        change.get("fun", regression), virtual_nodes=8, reduction=change.get("reduction", "invariant")
    )
    with pytest.raises(vnode.ProfileError, match=says):
        devices = {change.get("kind", "one"): jax.devices()[:1]}
        vnode.profile(step, change.get("args", arguments()), devices, path=tmp_path / "times.json")


def test_profiles_of_one_step_are_joined(measured: tuple[Any, Profiles, Path]) -> None:
    _, profiles, _ = measured
    one, two = (dataclasses.replace(profiles, kinds=(p,)) for p in profiles.kinds)
    assert one | two == profiles
    with pytest.raises(vnode.ProfileError, match="different"):
        _ = one | one
    with pytest.raises(vnode.ProfileError, match="different programs"):
        _ = one | dataclasses.replace(two, signature=None)


def test_a_step_for_one_size_only() -> None:
    def stubborn(w: jax.Array, x: jax.Array) -> jax.Array:
        assert len(x) == 6, "six examples, no others"
        return w + x.sum()

    step = vnode.virtualize(stubborn, virtual_nodes=6)
    args = jnp.zeros(()), jnp.ones(6)
    with pytest.raises(AssertionError, match="six examples") as info:
        vnode.profile(step, args, jax.devices()[:2])
    assert "nodes=None" in "".join(info.value.__notes__)
    profiles = vnode.profile(step, args, jax.devices()[:2], nodes=None, steps=1)
    assert [(m.devices, m.nodes) for m in profiles.kinds[0].measurements] == [(1, 6), (2, 3)]
    assert vnode.balance(profiles, 6).placement(jax.devices()[:2]).virtual_nodes == 6


def test_leaves_that_are_no_arrays() -> None:
    step = vnode.virtualize(lambda s, x: {"name": s["name"], "w": s["w"] + x.mean()}, virtual_nodes=2)
    profiles = vnode.profile(step, ({"name": "adam", "w": jnp.zeros(())}, jnp.ones(4)), jax.devices()[:1], steps=1)
    assert profiles.kinds[0].measurements[0].nodes == 2


@pytest.mark.parametrize(
    "devices",
    [{}, {"a": []}, {"a": jax.devices()[:1], "b": jax.devices()[:1]}, {"a": [3]}, "cpu", 2.5, 0],
    ids=["none", "none of a kind", "twice", "a number of a kind", "a name", "no sequence", "no device"],
)
def test_devices_that_are_none(devices: Any) -> None:
    step = vnode.virtualize(regression, virtual_nodes=8)
    with pytest.raises(vnode.PlacementError):
        vnode.profile(step, arguments(), devices)


def test_too_few_devices_for_a_placement() -> None:
    found = vnode.balance(published_profiles(2, 4), NODES)
    with pytest.raises(vnode.PlacementError, match=r"needs 4 devices of kind 'P100', not 1"):
        found.placement({"V100": jax.devices()[:2], "P100": jax.devices()[2:3]})
    placement = found.placement({"P100": jax.devices()[2:], "V100": jax.devices()[:2]})
    assert placement.counts == (6, 6, 1, 1, 1, 1)
    assert placement.devices == jax.devices()[:6]


@pytest.mark.parametrize("options", [{"nodes": ()}, {"nodes": (0,)}, {"steps": 0}])
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="positive integer"):
        vnode.profile(vnode.virtualize(regression, virtual_nodes=8), arguments(), **options)
    with pytest.raises(TypeError, match="virtualize"):
        vnode.profile(regression, arguments())


def test_steps_with_keyword_only_arguments_are_refused() -> None:
    def step(w: Any, *, batch: Any) -> Any:
        return w - (batch @ w).mean()

    virtual, args = vnode.virtualize(step, virtual_nodes=2, in_axes={"batch": 0}), (jnp.ones(3), jnp.ones((4, 3)))
    for refused in (
        lambda: vnode.profile(virtual, args),
        lambda: vnode.partition.search(virtual, args, "v5e:2x2", compiled_for=()),
    ):
        with pytest.raises(vnode.VnodeError, match="'step' takes batch by keyword only"):
            refused()


@pytest.mark.thorough
def test_a_step_on_objects() -> None:
    """A step that mutates nnx objects is measured as the same step on arrays would be; the objects stay as they are."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])

    @vnode.nnx.virtualize(virtual_nodes=8, in_axes=(None, None, 0))
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    profiles = vnode.profile(step, (model, optimizer, jnp.ones((16, 3))), jax.devices()[:2], steps=1)
    assert [(m.devices, m.nodes) for m in profiles.kinds[0].measurements] == [(1, 2), (1, 4), (1, 8), (2, 4)]
    assert all(m.seconds > 0 for m in profiles.kinds[0].measurements)
    np.testing.assert_array_equal(model.kernel[...], before)
    placement = vnode.balance(profiles, 8).placement(jax.devices()[:2])
    assert np.isfinite(step.on(placement)(model, optimizer, jnp.ones((16, 3))))


def test_a_step_that_finds_its_number_of_nodes() -> None:
    """Its state has a None, as optimizers of filtered modules have."""
    step = vnode.virtualize(lambda s, x: {**s, "w": s["w"] - (x @ s["w"]).mean()}, virtual_nodes="auto", memory="1GiB")
    state = {"w": jnp.ones(3), "average": None}
    profiles = vnode.profile(step, (state, jnp.ones((16, 3))), jax.devices()[:1], steps=1)
    chosen = step.placement.virtual_nodes
    assert [m.nodes for m in profiles.kinds[0].measurements] == [n for n in (2, 4, 8) if n <= chosen]
    assert chosen > 1
