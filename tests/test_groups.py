"""Devices of several programs: groups. On one machine they are groups of CPU devices.

Knows the zoo and placements with groups. The reference is the step as the user wrote it, or, for bits, the same step on
one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vnode
from tests.budget import examples
from tests.rounding import assert_same
from tests.test_invariance import digest, named
from tests.zoo import compare
from vnode.placement.placement import neighbours_of_one_kind

V = 8


def grouped(sizes: Sequence[int], counts: Sequence[int] | None = None, nodes: int = V) -> vnode.Placement:
    ends = np.cumsum([0, *sizes])
    groups = [jax.devices()[a:b] for a, b in itertools.pairwise(ends)]
    return vnode.Placement(nodes, groups=groups, counts=counts)


def test_a_drawing_says_how_many_groups_there_are() -> None:
    assert ", 2 groups" in grouped([2, 1])._repr_html_()
    assert "group" not in grouped([3])._repr_html_()


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)


@pytest.mark.quickly
@pytest.mark.sampled(1, thorough=2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("contrastive_clip", marks=pytest.mark.sweep),
        "ppo_epochs_and_minibatches",
        "views_that_are_centred_again_and_again",
        "training_on_a_batch_that_is_no_multiple",
        "loss_scaling_of_microbatches",
    ],
)
def test_equal_to_the_whole_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = named(name)
    nodes = V if case.nodes is None or V in case.nodes else case.nodes[-1]
    on = vnode.VirtualStep.on
    monkeypatch.setattr(vnode.VirtualStep, "on", lambda step, _: on(step, grouped([1, 2], nodes=nodes)))
    precision = "float64" if case.float64 else "float32"
    with compare.running_in(precision):
        program = compare.build(case, precision)
        compare.agrees(case, compare.call(case, program, nodes, 1), nodes, precision)


def masked(w: jax.Array, x: jax.Array, scale: jax.Array) -> Any:
    """Two passes, sums, a maximum, a count, what each example gets, and a sort of that."""

    def loss(w: jax.Array) -> Any:
        each = jnp.square(jnp.tanh(x @ w)) * scale
        mask = x[:, 0] > 0
        return jnp.sum(each * mask) / mask.sum(), each

    (value, each), grad = jax.value_and_grad(loss, has_aux=True)(w)
    return w - grad, {"value": value, "each": each, "sorted": jnp.sort(each), "max": each.max(), "n": (each > 0).sum()}


@settings(max_examples=examples(4), deadline=None)
@given(data=st.data())
def test_same_bits_however_nodes_are_grouped(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3).filter(lambda s: sum(s) <= 8))
    cuts = sorted(data.draw(st.lists(st.integers(0, V), min_size=sum(sizes) - 1, max_size=sum(sizes) - 1)))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, V], strict=True)]
    step = vnode.virtualize(masked, virtual_nodes=V, in_axes=(None, 0, None))
    w, x = normal(3), normal(21, 3)
    want = step.on(jax.devices()[:1])(w, x, jnp.float32(0.7))
    got = step.on(grouped(sizes, counts))(w, x, jnp.float32(0.7))
    assert digest(got) == digest(want), (sizes, counts)


@pytest.mark.sampled(0, thorough=1)
@pytest.mark.parametrize("name", ["batch_norm_exact_convolution", "equinox_adamw"])
def test_same_bits_of_what_is_computed_once(name: str) -> None:
    """What an update reads of an earlier piece is computed in the update's own, as in one program."""
    with compare.running_in("float32"):
        program = compare.build(named(name), "float32")
        step = vnode.virtualize(program.step, virtual_nodes=V, **program.options)
        want = program.outer(step.on(jax.devices()[:1]))(*program.args)
        assert digest(program.outer(step.on(grouped([1, 2])))(*program.args)) == digest(want)


@pytest.mark.thorough
@pytest.mark.quickly
def test_a_state_goes_to_groups_and_back() -> None:
    step = vnode.virtualize(masked, virtual_nodes=V, in_axes=(None, 0, None))
    places = [jax.devices()[:3], grouped([2, 1]), jax.devices()[:1], grouped([2, 1])]
    w = there = normal(3)
    for i, place in enumerate(places):
        x = normal(21 + i, 3)
        w, _ = step.on(jax.devices()[:1])(w, x, 1.0)
        there, _ = step.on(place)(there, x, 1.0)
    assert digest(there) == digest(w)
    assert there.sharding.device_set == set(jax.devices()[:2])  # of the first group


def test_a_state_that_comes_back_is_in_place() -> None:
    """Only the batch and partial sums move: the other group has a state of its own, from an update of its own."""
    step = vnode.virtualize(lambda w, x: w - x.mean(0), virtual_nodes=V).on(grouped([1, 1]))
    w, x = normal(5), normal(16, 5)
    for _ in range(3):
        w = step(w, x)
    ((program, *_),) = step.executor._groups.values()
    (_, (copy,)) = program._replicas._copies[id(w)]
    assert copy.sharding.device_set == {jax.devices()[1]}
    np.testing.assert_array_equal(copy, w)
    number = id(w)
    del w
    assert number not in program._replicas._copies  # kept no longer than the state


@pytest.mark.thorough
@pytest.mark.quickly
def test_kinds_that_may_differ_in_bits_take_the_state_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step they are given a copy of it, and what they made of it themselves is not kept."""
    monkeypatch.setattr(vnode.Placement, "kinds", property(lambda placement: f"kind {placement.first}"))
    step = vnode.virtualize(masked, virtual_nodes=V, in_axes=(None, 0, None))
    there, w = normal(3), normal(3)
    for i in range(3):
        w, _ = step.on(jax.devices()[:1])(w, normal(21 + i, 3), 1.0)
        there, _ = step.on(grouped([1, 2]))(there, normal(21 + i, 3), 1.0)
    assert digest(there) == digest(w)
    programs = [program for program, *_ in step.on(grouped([1, 2])).executor._groups.values()]
    assert len(programs) == 3  # one for each size of the batch
    assert not any(program._replicas._copies for program in programs)


def test_a_cpu_beside_an_accelerator() -> None:
    accelerators = [device for device in jax.devices() if device.platform != "cpu"]
    if not accelerators:
        pytest.skip("there is no accelerator")
    devices = [accelerators[0], jax.devices("cpu")[0]]
    step = vnode.virtualize(masked, virtual_nodes=V, in_axes=(None, 0, None)).on(devices, counts=[6, 2])
    assert [group.nodes for group in step.placement.groups] == [6, 2]
    w, x = normal(3), normal(21, 3)
    for _ in range(3):
        got, metrics = step(w, x, 1.0)
        want, expected = masked(w, x, jnp.float32(1))
        for a, b in zip(jax.tree.leaves((got, metrics)), jax.tree.leaves((want, expected)), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
        w = got


def test_constants_as_results_and_in_loops() -> None:
    c = np.arange(3, dtype=np.float32)

    def step(w: jax.Array, x: jax.Array) -> Any:
        def body(carry: jax.Array, scale: jax.Array) -> Any:
            rows = x * carry + c * scale
            return carry + rows.mean(0), (rows.sum(), c)

        return *jax.lax.scan(body, w, c), c

    args = normal(3), normal(4, 3)
    found = vnode.virtualize(step, virtual_nodes=2).on(grouped([1, 1], nodes=2))(*args)
    assert_same(found, jax.jit(step), *args)


def test_reduction_in_any_order() -> None:
    step = vnode.virtualize(masked, virtual_nodes=V, in_axes=(None, 0, None), reduction="fast")
    got = step.on(grouped([2, 3]))(normal(3), normal(21, 3), 1.0)
    assert_same(got, masked, normal(3), normal(21, 3), jnp.float32(1))


@pytest.mark.thorough
def test_lanes() -> None:
    step = vnode.virtualize(masked, virtual_nodes=V, in_axes=(None, 0, None), lanes=4)
    want = digest(step.on(jax.devices()[:1])(normal(3), normal(21, 3), 1.0))
    assert digest(step.on(grouped([1, 2], [4, 2, 2]))(normal(3), normal(21, 3), 1.0)) == want
    with pytest.raises(vnode.PlacementError, match="whole lanes of 2"):
        step.on(grouped([1, 2], [3, 3, 2]))


def test_donated_arguments_are_given_up() -> None:
    step = vnode.virtualize(lambda w, x: w - x.mean(0), virtual_nodes=V, donate_argnums=0).on(grouped([1, 1]))
    w = step.put(normal(5))
    step(w, normal(16, 5))
    assert w.is_deleted()


def test_what_is_returned_as_it_is_is_not_given_up() -> None:
    def train(state: Any, x: jax.Array) -> Any:
        return {**state, "w": state["w"] - x.mean(0)}

    step = vnode.virtualize(train, virtual_nodes=V, donate_argnums=0).on(grouped([1, 1]))
    state = step.put({"rate": jnp.float32(0.5), "w": normal(5)})
    for _ in range(3):
        state = step(state, normal(16, 5))
    assert state["rate"] == 0.5
    assert np.isfinite(np.asarray(state["w"])).all()


def test_what_explain_says() -> None:
    step = vnode.virtualize(masked, virtual_nodes=V, in_axes=(None, 0, None)).on(grouped([1, 2], [4, 3, 1]))
    text = " ".join(str(step.explain(normal(3), normal(21, 3), 1.0)).split())
    assert "not of what is computed once: on groups of devices" in text
    assert "not of what is computed once" not in str(step.on(jax.devices()).explain(normal(3), normal(21, 3), 1.0))
    assert all(name in str(step.placement.page()) for name in ("cpu:0", "cpu:1", "cpu:2"))


def test_groups_by_kind() -> None:
    class Device:
        def __init__(self, platform: str, kind: str) -> None:
            self.platform, self.device_kind = platform, kind

    a, b, c = Device("gpu", "V100"), Device("gpu", "P100"), Device("gpu", "P100")
    assert neighbours_of_one_kind([a, b, c]) == [[a], [b, c]]
    assert neighbours_of_one_kind([b, a, c]) == [[b], [a], [c]]
    with pytest.raises(vnode.PlacementError, match="devices of one kind"):
        vnode.Placement(V, groups=[[a, b]])


def test_what_a_placement_with_groups_says() -> None:
    placement = grouped([2, 1], [4, 3, 1])
    assert [(group.first, group.nodes, group.counts) for group in placement.groups] == [(0, 7, (4, 3)), (7, 1, (1,))]
    assert placement.starts == (0, 4, 7)
    assert placement.devices == jax.devices()[:3]
    assert str(placement) == "Placement(8 nodes on 2 x cpu: [4, 3], 1 x cpu: [1])"
    assert placement == grouped([2, 1], [4, 3, 1])
    assert placement != grouped([1, 2], [4, 3, 1])
    assert placement != vnode.Placement(8, jax.devices()[:3], counts=[4, 3, 1])


def test_what_groups_cannot_do() -> None:
    step = vnode.virtualize(lambda w, x: w - x.mean(0), virtual_nodes=V).on(grouped([1, 1]))
    for call in (jax.jit(step), lambda w, x: jax.grad(lambda w: step(w, x).sum())(w)):
        with pytest.raises(vnode.PlacementError, match=r"cannot be part of another one(.|\n)*step\.on"):
            call(normal(5), normal(16, 5))
    with pytest.raises(vnode.PlacementError, match="several programs"):
        step.lower(normal(5), normal(16, 5))

    def printing(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("{}", w.sum())
        return w - x.mean(0)

    with pytest.raises(vnode.PlacementError, match=r"debug(.|\n)*test_groups.py"):
        vnode.virtualize(printing, virtual_nodes=V).on(grouped([1, 1]))(normal(5), normal(16, 5))
    for groups in ([], [jax.devices()[:1], []]):
        with pytest.raises(vnode.PlacementError, match="at least one device"):
            vnode.Placement(V, groups=groups)
    with pytest.raises(vnode.PlacementError, match="only once"):
        vnode.Placement(V, groups=[jax.devices()[:2], jax.devices()[1:2]])
    with pytest.raises(vnode.PlacementError, match="one of devices, mesh and groups"):
        vnode.Placement(V, jax.devices(), groups=[jax.devices()])
    for wrong in (lambda x: x @ jnp.ones(4), lambda x: undefined):  # noqa: F821
        with pytest.raises((TypeError, NameError)):
            vnode.virtualize(lambda w, x, wrong=wrong: wrong(x), virtual_nodes=V).on(grouped([1, 1]))(
                normal(5), normal(16, 5)
            )
