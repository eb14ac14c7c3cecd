"""The object that `vnode.virtualize` returns: its arguments, options, devices and compiled programs.

Knows vnode's public interface. Must not know how a step is analysed or emitted. Values are compared with the step as
written; which dimensions are split is read off `explain`, because a wrong one would give the same values.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vnode
from tests.rounding import assert_close, eighths

pytestmark = pytest.mark.quickly

BATCH = 8
NODES = 4


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(eighths(np.random.default_rng((seed, *shape)).standard_normal(shape)))


def update(state: dict[str, jax.Array], x: jax.Array) -> Any:
    """A small training step with a state, a metric and an output per example."""

    def loss_fn(w: jax.Array) -> jax.Array:
        return jnp.mean((x @ w) ** 2)

    loss, grad = jax.value_and_grad(loss_fn)(state["w"])
    return {"w": state["w"] - 0.1 * grad}, loss, x @ state["w"]


def two_devices(fun: Any, **options: Any) -> vnode.VirtualStep:
    return vnode.virtualize(fun, virtual_nodes=NODES, **options).on(jax.devices()[:2])


class Traced:
    """Counts how often a function is traced."""

    def __init__(self, fun: Any) -> None:
        self.fun = fun
        self.times = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self.fun(*args, **kwargs)


# How the step is given


def test_decorator_and_call_are_the_same() -> None:
    @vnode.virtualize(virtual_nodes=NODES)
    def decorated(w: jax.Array, x: jax.Array) -> jax.Array:
        """Adds the mean."""
        return w + x.mean(0)

    called = vnode.virtualize(decorated.__wrapped__, virtual_nodes=NODES)
    assert isinstance(decorated, vnode.VirtualStep) and isinstance(called, vnode.VirtualStep)
    assert decorated.__name__ == "decorated" and decorated.__doc__ == "Adds the mean."
    w, x = normal(3), normal(BATCH, 3)
    assert_close(decorated(w, x), w + np.mean(x, 0))
    assert_close(called(w, x), w + np.mean(x, 0))


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return self.factor * w + x.sum(0)

    def method(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return self.factor * w + x.sum(0)


def keyword_factor(w: jax.Array, x: jax.Array, factor: float) -> jax.Array:
    return factor * w + x.sum(0)


@pytest.mark.parametrize(
    "fun",
    [Scaled(3.0), Scaled(3.0).method, functools.partial(keyword_factor, factor=3.0), jax.jit(Scaled(3.0).method)],
    ids=["object", "method", "partial", "jitted"],
)
def test_any_callable_is_a_step(fun: Any) -> None:
    w, x = normal(3), normal(BATCH, 3)
    assert_close(two_devices(fun)(w, x), 3.0 * w + np.sum(x, 0))


@pytest.mark.parametrize(
    ("options", "error", "pattern"),
    [
        ({"virtual_nodes": 0}, vnode.PlacementError, "positive integer, not 0"),
        ({"virtual_nodes": -2}, vnode.PlacementError, "positive integer, not -2"),
        ({"virtual_nodes": 2.0}, vnode.PlacementError, "positive integer, not 2.0"),
        ({"virtual_nodes": "some"}, vnode.PlacementError, "positive integer or 'auto', not 'some'"),
        ({"virtual_nodes": 10**9}, vnode.PlacementError, "at most 1,048,576, not 1,000,000,000"),
        ({"virtual_nodes": True}, vnode.PlacementError, "positive integer, not True"),
        ({"coupling": "exactly"}, ValueError, "'exactly'"),
        ({"coupling": {"norm": "ghost"}}, ValueError, "ghost"),
        ({"reduction": "slow"}, ValueError, "invariant, fast, not 'slow'"),
        ({"recompute_budget": -0.1}, ValueError, "-0.1"),
        ({"recompute_budget": float("nan")}, ValueError, "nan"),
        ({"donate_argnums": 2}, ValueError, "donate_argnums=2: the step has 2 positional arguments"),
        ({"static_argnums": (0, -3)}, ValueError, r"static_argnums=\(0, -3\): the step has 2 positional arguments"),
        ({"static_argnames": "rate"}, ValueError, "static_argnames='rate': the step has no argument 'rate', only "),
        ({"placement": vnode.Placement(3)}, vnode.PlacementError, "for 3 nodes, the step has 4"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], error: type[Exception], pattern: str) -> None:
    with pytest.raises(error, match=pattern):
        vnode.virtualize(update, **{"virtual_nodes": NODES, **options})


def test_any_kind_of_integer_is_a_number_of_nodes() -> None:
    step = vnode.virtualize(update, virtual_nodes=np.int64(NODES))
    assert step.placement.virtual_nodes == NODES


def test_number_of_nodes_must_be_said() -> None:
    with pytest.raises(TypeError, match="virtual_nodes"):
        vnode.virtualize(update)


class Trainer:
    """A step that is a method."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    @functools.partial(vnode.virtualize, virtual_nodes=NODES, in_axes=(None, None, 0), static_argnums=0)
    def step(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return w - self.rate * x.sum(0)


def test_methods() -> None:
    w, x = normal(3), normal(BATCH, 3)
    for rate in (0.1, 0.2):
        assert_close(Trainer(rate).step(w, x), w - rate * x.sum(0))
    assert isinstance(Trainer.step, vnode.VirtualStep)


# Which dimensions are split

Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("in_axes", "batch", "dims"),
    [
        ((None, 0), normal(BATCH, 3), [0]),
        ((None, 1), normal(3, BATCH), [1]),
        ((None, -1), normal(3, 2, BATCH), [2]),
        ((None, -2), normal(3, BATCH, 2), [1]),
        ([None, 1], normal(3, BATCH), [1]),
        ((None, {"a": 0, "b": -1}), {"a": normal(BATCH), "b": normal(3, BATCH)}, [0, 1]),
        ((None, {"a": 0, "b": None}), {"a": normal(BATCH), "b": normal(3, BATCH)}, [0]),
        ((None, {"a": 1, "b": 0}), {"a": [normal(2, BATCH), normal(3, BATCH)], "b": normal(BATCH)}, [1, 1, 0]),
        ((None, {"a": [1, None]}), {"a": [normal(2, BATCH), normal(3, BATCH)]}, [1]),
        ((None, Pair(0, (1, 0))), Pair(normal(BATCH), (normal(2, BATCH), normal(BATCH, 2))), [0, 1, 0]),
        ((None, 0), {"a": normal(BATCH), "nothing": None, "empty": {}}, [0]),
    ],
)
def test_in_axes_are_prefixes_as_in_vmap(in_axes: Any, batch: Any, dims: list[int]) -> None:
    def step(scale: jax.Array, batch: Any) -> Any:
        return jax.tree.map(lambda x: (scale * x, jnp.sum(x**2)), batch)

    virtual = two_devices(step, in_axes=in_axes)
    scale = normal()
    report = virtual.explain(scale, batch)
    assert [line.where for line in report.inputs] == [f"batched(dim {d}: batch)" for d in dims]
    assert_close(virtual(scale, batch), step(scale, batch))


def test_one_integer_splits_every_argument() -> None:
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x * y[:, None]).sum(0)

    virtual = two_devices(step, in_axes=0)
    x, y = normal(BATCH, 3), normal(BATCH)
    assert len(virtual.explain(x, y).inputs) == 2
    assert_close(virtual(x, y), step(x, y))


def test_arguments_beyond_in_axes_and_keyword_arguments_are_not_split() -> None:
    def step(w: jax.Array, x: jax.Array, table: jax.Array, *, other: jax.Array, power: int = 1) -> jax.Array:
        return (w * x.sum(0) + table.sum(0) + other.sum(0)) ** power

    virtual = two_devices(step)
    w, x, table, other = normal(3), normal(BATCH, 3), normal(BATCH, 3, seed=1), normal(BATCH, 3, seed=2)
    assert len(virtual.explain(w, x, table, other=other).inputs) == 1
    assert_close(virtual(w, x, table, other=other), step(w, x, table, other=other))
    assert_close(virtual(w, x, table, other=other, power=3), step(w, x, table, other=other, power=3))


def test_the_first_argument_may_be_the_batch() -> None:
    assert_close(
        two_devices(lambda x: (2.0 * x, x.sum()), in_axes=(0,))(normal(BATCH)),
        (2.0 * normal(BATCH), normal(BATCH).sum()),
    )


def test_the_same_array_may_be_several_arguments() -> None:
    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        return w * x, (x * y).sum(0), x - y

    x = normal(BATCH, 3)
    assert_close(two_devices(step, in_axes=(0, 0, 0))(x, x, x), step(x, x, x))


def test_unused_arguments() -> None:
    virtual = two_devices(lambda w, x: w["used"] * 2.0)
    assert_close(virtual({"used": normal(3), "other": normal(5)}, normal(BATCH)), 2.0 * normal(3))


# What is returned


@pytest.mark.parametrize(("batch", "nodes"), [(8, 4), (7, 3), (2, 5)])
def test_outputs_that_are_inputs_or_constants(batch: int, nodes: int) -> None:
    def step(state: Any, x: jax.Array) -> Any:
        y = 2.0 * x
        return {
            "state": state,
            "inputs": (x, x),
            "twice": [y, y, y.sum(), y.sum()],
            "scalars": (1, 2.5, True, jnp.float32(3.0)),
            "array": jnp.arange(4),
            "per example": jnp.arange(batch),
            "nothing": (None, {}, []),
        }

    virtual = vnode.virtualize(step, virtual_nodes=nodes).on(jax.devices()[:2])
    args = ({"w": normal(3), "n": jnp.int32(7), "key": jax.random.key_data(jax.random.key(1))}, normal(batch, 3))
    assert_close(virtual(*args), jax.jit(step)(*args))


def test_output_per_example_is_in_the_order_of_the_batch() -> None:
    x = jnp.arange(BATCH * 3.0).reshape(BATCH, 3)
    for nodes in (1, 3, BATCH):
        out = vnode.virtualize(lambda w, x: (x, x.T, x.reshape(-1)), virtual_nodes=nodes)(0.0, x)
        for got, want in zip(out, (x, x.T, x.reshape(-1)), strict=True):
            np.testing.assert_array_equal(got, want)


# Leaves that are not arrays


def test_callables_in_the_state_are_static() -> None:
    def step(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        return {**state, "w": state["apply"](state["w"]) + x.mean(0)}

    traced = Traced(step)
    virtual = two_devices(traced)
    w, x = normal(3), normal(BATCH, 3)
    first = virtual({"w": w, "apply": jnp.sin, "name": "sine"}, x)
    assert first["apply"] is jnp.sin and first["name"] == "sine"
    assert_close(first["w"], jnp.sin(w) + x.mean(0))
    assert_close(virtual({"w": w, "apply": jnp.cos, "name": "sine"}, x)["w"], jnp.cos(w) + x.mean(0))
    assert traced.times == 2
    assert_close(virtual({"w": w, "apply": jnp.sin, "name": "sine"}, x)["w"], jnp.sin(w) + x.mean(0))
    assert traced.times == 2


def test_equinox_modules() -> None:
    class Model(equinox.Module):
        linear: equinox.nn.Linear
        activation: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.activation(self.linear(x))

    def step(model: Model, x: jax.Array) -> tuple[Model, jax.Array]:
        loss, grads = equinox.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return equinox.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    linear = equinox.nn.Linear(3, 2, key=jax.random.key(0))
    x = normal(BATCH, 3)
    for activation in (jnp.tanh, jax.nn.relu):
        model = Model(linear, activation)
        got, loss = two_devices(step)(model, x)
        want, want_loss = step(model, x)
        assert got.activation is activation
        assert_close((got.linear.weight, got.linear.bias, loss), (want.linear.weight, want.linear.bias, want_loss))


def test_outputs_that_are_not_arrays() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return {"w": w + x.sum(0), "name": f"batch of {x.shape[0]}", "f": jnp.sin}

    virtual = two_devices(step)
    for batch in (8, 6, 4, 10, 12, 8, 4, 6, 12, 10, 6, 8):
        out = virtual(normal(3), normal(batch, 3))
        assert out["name"] == f"batch of {batch}" and out["f"] is jnp.sin
        assert_close(out["w"], normal(3) + normal(batch, 3).sum(0))


def test_static_leaf_that_does_not_hash_counts_as_itself() -> None:
    class Options:
        __hash__ = None

        def __init__(self, factor: float) -> None:
            self.factor = factor

    traced = Traced(lambda state, x: state["options"].factor * x.sum(0))
    virtual = two_devices(traced)
    options, x = Options(2.0), normal(BATCH, 3)
    assert_close(virtual({"options": options}, x), 2.0 * x.sum(0))
    assert_close(virtual({"options": options}, x), 2.0 * x.sum(0))
    assert traced.times == 1
    assert_close(virtual({"options": Options(3.0)}, x), 3.0 * x.sum(0))


def test_constants_that_change_in_place() -> None:
    """A dictionary or a dataclass that is not frozen does not hash: it counts as what it is at each call."""

    @dataclasses.dataclass
    class Options:
        factor: float

    def step(state: Any, settings: dict[str, Any], x: jax.Array) -> Any:
        w = state["options"].factor * x.sum(0) + settings["shift"][0]
        return {"w": w, "options": state["options"]}

    virtual = two_devices(step, in_axes=(None, None, 0), static_argnums=1)
    options, settings, x = Options(2.0), {"shift": [1.0]}, normal(BATCH, 3)
    for factor, shift in ((2.0, 1.0), (3.0, 1.0), (3.0, 4.0), (2.0, 1.0)):
        options.factor, settings["shift"][0] = factor, shift
        found = virtual({"options": options}, settings, x)
        assert_close(found["w"], factor * x.sum(0) + shift)
        assert found["options"].factor == factor
    other, options.factor = Options(2.0), 5.0
    assert virtual({"options": other}, settings, x)["options"].factor == 2.0
    with pytest.raises(vnode.VnodeError, match=r"(?s)^settings is .* neither hashes nor equals.*dict: .*not static"):
        virtual({"options": other}, {"shift": np.ones(3)}, x)


@pytest.mark.parametrize("constants", [((1,), (1.0,)), ([1.0], [1]), ([0.0], [-0.0]), (0.0, -0.0)], ids=repr)
def test_equal_constants_that_are_not_the_same(constants: Any) -> None:
    def step(w: jax.Array, constant: Any, x: jax.Array) -> Any:
        factor = constant if isinstance(constant, float) else next(iter(constant))
        return w * factor, jnp.copysign(1.0, factor) + x.sum()

    virtual = two_devices(step, in_axes=(None, None, 0), static_argnums=1)
    for constant in constants:
        for found, expected in zip(
            virtual(jnp.int32(3), constant, normal(BATCH)), step(jnp.int32(3), constant, normal(BATCH)), strict=True
        ):
            assert found.dtype == expected.dtype
            assert_close(found, expected)


def test_text_of_numpy() -> None:
    virtual = two_devices(lambda state, batch: state["w"] + batch["x"].sum(0) * (2 if state["name"] == "a" else 1))
    x = normal(BATCH, 3)
    for name, factor in (("a", 2), ("b", 1)):
        assert_close(virtual({"w": 0.0, "name": np.str_(name)}, {"x": x}), factor * x.sum(0))
    for names, dtype in ((["a"], "<U1"), ([None], "object")):
        with pytest.raises(
            vnode.VnodeError, match=rf"^batch\['names'\] is an array of dtype {dtype}, which jax does not have"
        ):
            virtual({"w": 0.0, "name": "a"}, {"x": x, "names": np.array(names * BATCH)})


@pytest.mark.parametrize(
    "static",
    [{"static_argnums": 2}, {"static_argnums": (-1,)}, {"static_argnames": "times"}, {"static_argnames": ["times"]}],
)
def test_static_arguments(static: dict[str, Any]) -> None:
    """Named in either way, and given in either way."""

    def step(w: jax.Array, x: jax.Array, times: int) -> jax.Array:
        for _ in range(times):
            w = w + x.mean(0)
        return w

    virtual = two_devices(step, **static)
    w, x = normal(3), normal(BATCH, 3)
    for times in (1, 3):
        assert_close(virtual(w, x, times), w + times * x.mean(0))
        assert_close(virtual(w, x, times=times), w + times * x.mean(0))
    virtual.explain(w, x, times=2)
    assert virtual.prepare([jax.devices()[:1]], w, x, times=2).wait().done()
    assert_close(virtual.on(jax.devices()[:1])(w, x, times=2), w + 2 * x.mean(0))


def test_static_arguments_that_are_named_in_both_ways_are_taken_as_they_are() -> None:
    """As by `jax.jit`: the one at position 0 may be traced if it is given by keyword."""
    step = two_devices(lambda a, b, *, c, x: a + b + c, static_argnums=0, static_argnames="c", in_axes=())
    assert step.spec.static_argnums == (0,) and step.spec.static_argnames == ("c",)


# Donation


def test_donated_argument_counted_from_the_end() -> None:
    virtual = two_devices(lambda state, x: {"w": state["w"] + x.sum(0)}, donate_argnums=-2)
    state = virtual.put({"w": normal(3)})
    virtual(state, normal(BATCH, 3))
    assert state["w"].is_deleted()


@pytest.mark.parametrize("extra", [{}, {"apply": jnp.sin}], ids=["arrays", "with callables"])
def test_donated_buffers_are_given_up_and_used_correctly(extra: dict[str, Any]) -> None:
    def step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        return {**state, "w": state["w"] - x.mean(0)}, (x @ state["w"]).sum()

    virtual = two_devices(step, donate_argnums=0)
    x = normal(BATCH, 3)
    state = virtual.put({"w": normal(3), **extra})
    want = np.asarray(normal(3))
    for _ in range(3):
        given = state
        state, total = virtual(given, x)
        assert given["w"].is_deleted()
        np.testing.assert_array_equal(total, np.sum(np.asarray(x) @ want))
        want = want - np.mean(x, 0)
    np.testing.assert_array_equal(state["w"], want)


def test_nothing_is_donated_unasked() -> None:
    virtual = two_devices(update)
    state = virtual.put({"w": normal(3)})
    virtual(state, normal(BATCH, 3))
    assert not state["w"].is_deleted()


def test_donation_beside_static_arguments() -> None:
    virtual = two_devices(
        lambda times, state, x: {"w": state["w"] + times * x.mean(0)},
        in_axes=(None, None, 0),
        static_argnums=0,
        donate_argnums=1,
    )
    state = virtual.put({"w": normal(3)})
    out = virtual(2, state, normal(BATCH, 3))
    assert state["w"].is_deleted()
    assert_close(out["w"], normal(3) + 2.0 * normal(BATCH, 3).mean(0))


def test_a_state_on_other_devices_is_copied_not_donated() -> None:
    virtual = two_devices(update, donate_argnums=0)
    state = {"w": jax.device_put(normal(3), jax.devices()[5])}
    out = virtual(state, normal(BATCH, 3))
    assert not state["w"].is_deleted()
    assert_close(out, update({"w": normal(3)}, normal(BATCH, 3)))


# Compiled programs


def test_one_trace_for_each_shape_and_placement() -> None:
    traced = Traced(update)
    step = vnode.virtualize(traced, virtual_nodes=NODES).on(jax.devices()[:2])
    other = step.on(jax.devices()[2:5])
    for virtual, batch, times in ((step, 8, 1), (step, 8, 1), (step, 6, 2), (step, 8, 2), (other, 8, 3), (step, 6, 3)):
        state = virtual.put({"w": normal(3)})
        for _ in range(2):
            state, *_ = virtual(state, normal(batch, 3))
        assert traced.times == times


@contextlib.contextmanager
def compilations(step: str) -> Iterator[list[str]]:
    """Collects one entry for each program of `step` that XLA compiles; jax has small ones of its own to move arrays."""
    names: list[str] = []

    def listen(name: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        if name == "/jax/core/compile/backend_compile_duration" and step in fun_name:
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("start", ["put", "fresh", "numpy", "elsewhere", "another mesh"])
def test_one_program_for_each_shape_and_placement(start: str, devices: int) -> None:
    """Also where the state that is returned lives elsewhere than the one that was given first."""
    virtual = vnode.virtualize(update, virtual_nodes=NODES).on(jax.devices()[:devices])
    places = {
        "put": virtual.put,
        "fresh": lambda state: state,
        "numpy": lambda state: jax.tree.map(np.asarray, state),
        "elsewhere": lambda state: jax.device_put(state, jax.devices()[5]),
        "another mesh": lambda state: jax.device_put(
            state, vnode.Placement(NODES, jax.devices()[:devices], axis="other").sharding()
        ),
    }
    state, x = places[start]({"w": normal(3)}), normal(BATCH, 3)
    with compilations("update") as compiled:
        for _ in range(4):
            state, *_ = virtual(state, x)
        jax.block_until_ready(state)
    assert len(compiled) == 1


@pytest.mark.parametrize("extra", [{}, {"apply": jnp.sin}], ids=["arrays", "with callables"])
def test_one_program_for_a_new_key_in_every_step(extra: dict[str, Any]) -> None:
    def step(state: Any, x: jax.Array, key: jax.Array) -> Any:
        return {**state, "w": state["w"] + jax.random.normal(key, x.shape).mean(0) * x.mean(0)}

    virtual = two_devices(step, in_axes=(None, 0, None))
    keys = list(jax.random.split(jax.random.key(0), 6))
    state, x = {"w": normal(3), **extra}, normal(BATCH, 3)
    with compilations("step") as compiled:
        for key in keys:
            state = virtual(state, x, key)
        jax.block_until_ready(state["w"])
    assert len(compiled) == 1


def test_lower_takes_shapes() -> None:
    virtual = two_devices(update)
    shapes = jax.eval_shape(lambda: ({"w": normal(3)}, normal(BATCH, 3)))
    compiled = virtual.lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= 0
    args = (virtual.put({"w": normal(3)}), normal(BATCH, 3))
    assert_close(compiled(*args), update(*args))


def test_lower_takes_callables() -> None:
    def step(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        return {**state, "w": state["apply"](state["w"]) + x.mean(0)}

    shapes = {"w": jax.ShapeDtypeStruct((3,), jnp.float32), "apply": jnp.sin}
    lowered = two_devices(step).lower(shapes, jax.ShapeDtypeStruct((BATCH, 3), jnp.float32))
    assert "sine" in lowered.as_text()


# Devices


def test_default_placement_is_all_devices() -> None:
    step = vnode.virtualize(update, virtual_nodes=NODES)
    assert step.placement == vnode.Placement(NODES)
    assert step.placement.devices == jax.devices()


def test_the_same_placement_is_the_same_step() -> None:
    step = vnode.virtualize(update, virtual_nodes=NODES)
    two = step.on(jax.devices()[:2])
    assert two is step.on(jax.devices()[:2])
    assert two is step.on(vnode.Placement(NODES, jax.devices()[:2]))
    assert two is step.on(jax.devices()[:2], counts=[2, 2])
    assert two is step.on(jax.sharding.Mesh(np.array(jax.devices()[:2]), (step.placement.axis,)))
    assert two.on(jax.devices()) is step
    assert two is not step.on(jax.devices()[:2], counts=[1, 3])
    assert two is not step.on(jax.devices()[1:3])
    assert two.placement.devices == jax.devices()[:2]


def test_a_placement_given_at_once() -> None:
    placement = vnode.Placement(NODES, jax.devices()[:2], counts=[3, 1])
    step = vnode.virtualize(update, virtual_nodes=NODES, placement=placement)
    assert step.placement is placement and step.on(placement) is step


@pytest.mark.parametrize("first", [slice(0, 2), slice(3, 8)])
def test_state_moves_with_the_step(first: slice) -> None:
    """Whatever devices the state lives on, it comes along."""
    step = vnode.virtualize(update, virtual_nodes=NODES)
    x = normal(BATCH, 3)
    state = {"w": normal(3)}
    for devices in (jax.devices()[first], jax.devices()[1:4], jax.devices()[:1], jax.devices()[first]):
        want = update(state, x)
        got = step.on(devices)(state, x)
        assert_close(got, want)
        assert got[0]["w"].devices() == set(devices)
        state = got[0]


def test_a_batch_on_another_device_is_moved() -> None:
    x = jax.device_put(normal(BATCH, 3), jax.devices()[7])
    assert_close(two_devices(update)({"w": normal(3)}, x), update({"w": normal(3)}, normal(BATCH, 3)))


def test_state_with_callables_moves_too() -> None:
    def step(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        return {**state, "w": state["apply"](state["w"]) + x.mean(0)}

    virtual = vnode.virtualize(step, virtual_nodes=NODES)
    state: dict[str, Any] = {"w": normal(3), "apply": jnp.sin}
    want = normal(3)
    for devices in (jax.devices()[:2], jax.devices()[4:7]):
        state = virtual.on(devices)(state, normal(BATCH, 3))
        want = jnp.sin(want) + normal(BATCH, 3).mean(0)
        assert state["w"].devices() == set(devices)
        assert_close(state["w"], want)


def test_put_places_arrays_and_leaves_the_rest() -> None:
    virtual = two_devices(update)
    state = virtual.put({"w": np.ones(3, np.float32), "n": 3, "apply": jnp.sin, "name": "x"})
    for leaf in (state["w"], state["n"]):
        assert leaf.sharding.is_fully_replicated and leaf.devices() == set(jax.devices()[:2])
    assert state["apply"] is jnp.sin and state["name"] == "x"


def test_numpy_and_python_arguments() -> None:
    def step(w: Any, x: jax.Array) -> Any:
        return w["a"] * x.sum(0) + w["b"], x * w["c"]

    args = ({"a": 2.0, "b": np.float32(3.0), "c": np.ones(3, np.float32)}, np.asarray(normal(BATCH, 3)))
    assert_close(two_devices(step)(*args), jax.jit(step)(*args))


def test_the_same_step_becomes_the_same_program() -> None:
    """In whatever order its values lie in memory, or a cache of compiled programs would not find it again."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        columns = [jnp.tanh(x[:, i] * w[i]) for i in range(8)]
        centred = [column - column.mean() for column in columns]
        return [(column, column.max()) for column in centred]

    w, x = jnp.ones(8), jnp.ones((16, 8))
    texts = set()
    for _ in range(4):
        jax.clear_caches()
        texts.add(vnode.virtualize(step, virtual_nodes=4, recompute_budget=9.0).lower(w, x).as_text())
    assert len(texts) == 1


@pytest.mark.parametrize("beside", [(optax.EmptyState(),), (None,), ([], {}), ({"a": (), "b": None},), ()], ids=str)
def test_a_state_that_comes_back_is_known_to_be_in_place(beside: Any) -> None:
    """Or each call would look at all of its leaves; also where parts without leaves come first."""
    step = vnode.virtualize(lambda state, x: ((*state[:-1], state[-1] - x.mean(0)), x.sum()), virtual_nodes=2)
    state = (*beside, jnp.ones(3))
    assert state not in step.executor.arguments.in_place
    for _ in range(2):
        state, _ = step(state, jnp.ones((4, 3)))
        assert state in step.executor.arguments.in_place
    assert (*beside, np.ones(3)) not in step.executor.arguments.in_place


def test_arguments_given_again_are_brought_once() -> None:
    """As parameters of an evaluation are: and not kept when others come, or when they are no more."""
    step = vnode.virtualize(
        lambda state, x: (state["w"] * state["rate"] * state["host"]).sum() + x.mean(), virtual_nodes=4
    )
    step = step.on(jax.devices()[:2])
    kept, x = step.executor.arguments._given_again._last, np.zeros((4, 3), np.float32)
    state = {"w": jnp.full(3, 2.0), "rate": 0.5, "host": jnp.ones(())}
    results = [step(state, x)]
    assert [copy for _, _, copy in kept.values()] == [None]  # a state that is given once is held once
    results.append(step(state, x))
    guards = jax.transfer_guard_device_to_device, jax.transfer_guard_host_to_device
    placed = step.executor.arguments((state, jnp.asarray(x)), {})
    with guards[0]("disallow_explicit"), guards[1]("disallow_explicit"):
        again = step.executor.arguments((state, placed[1]), {})
    assert again[0][0] is placed[0][0] and again[0][0]["w"].sharding.device_set == set(step.placement.devices)
    for other in ({"w": jnp.full(3, 4.0)}, {"rate": 1.0}, {"host": np.full((), 2.0, np.float32)}):
        before = dict(state)
        state.update(other)
        results.append(step(state, x))
        state.update(before)
    number = np.ones((), np.float32)
    for factor in (1.0, 2.0):  # numpy's arrays change in place
        number[...] = factor
        results.append(step({**state, "host": number}, x))
    np.testing.assert_allclose(results, [3, 3, 6, 6, 6, 3, 6])
    step(state, x), step(state, x)
    assert kept
    del state, before, again
    assert not kept


@pytest.mark.newest
def test_primitives_that_jax_lowers_by_itself() -> None:
    """Since jax 0.12 these are primitives that stand for others; before, and so here, they are those others."""

    def step(edges: Any, x: Any) -> Any:
        counts = jax.vmap(lambda row: jnp.histogram(row, bins=edges)[0])(x).sum(0)
        places = jnp.searchsorted(edges, x), jnp.searchsorted(jnp.sort(x, axis=None), edges)
        scaled = jnp.ldexp(x, 2).sum(0), jnp.frexp(x)[0], jax.grad(lambda x: (jnp.ldexp(x, 2) ** 2).sum())(x)
        return counts, places, scaled, jax.vmap(lambda row: jnp.nonzero(row > 3, size=4)[0])(x)

    edges, x = jnp.arange(6.0), eighths(np.random.default_rng(0).uniform(0, 6, (8, 6)))
    want = jax.jit(step)(edges, x)
    for nodes in (1, 4):
        virtual = vnode.virtualize(step, virtual_nodes=nodes, recompute_budget=1.0).on(jax.devices()[: min(nodes, 2)])
        jax.tree.map(np.testing.assert_array_equal, virtual(edges, x), want)
