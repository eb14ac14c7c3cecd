"""What a user reads when something is wrong: vnode's refusals, and the errors of the user's own step.

Knows the public interface and messages. Must not know where an error is found. Every refusal must name the place in
this file, what met there, its shapes, and what to do; a mistake in the step must read as it does under `jax.jit`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import vnode
from tests.rounding import eighths

pytestmark = pytest.mark.quickly

NODES = 4
HERE = r"test_errors\.py:\d+"


def inputs() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(eighths(rng.standard_normal(3))), jnp.asarray(eighths(rng.standard_normal((8, 3))))


def refusal(kind: type[vnode.VnodeError], step: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The message with which a step is refused, which must be the same from `explain` and `lower` as from a call."""
    virtual = vnode.virtualize(step, **{"virtual_nodes": NODES, **options}).on(jax.devices()[:2])
    messages = []
    for run in (virtual, virtual.explain, virtual.lower):
        with pytest.raises(kind) as caught:
            run(*args)
        assert type(caught.value) is kind
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
    return messages[0]


def line_of(message: str, code: str) -> None:
    """Asserts that the first place of this file that `message` names is the line that reads `code`."""
    found = re.search(r"test_errors\.py:(\d+)", message)
    assert found, message
    with open(__file__) as file:
        assert file.readlines()[int(found[1]) - 1].strip() == code


def test_all_below_one_class() -> None:
    for kind in (vnode.BatchError, vnode.CouplingError, vnode.PlacementError, vnode.UnsupportedPrimitiveError):
        assert issubclass(kind, vnode.VnodeError)
    assert not issubclass(vnode.VnodeError, TypeError | ValueError)


# BatchError


def test_no_argument_is_batched() -> None:
    message = refusal(vnode.BatchError, lambda w, x: x.sum(), *inputs(), in_axes=(None, None))
    assert "no argument is batched" in message and "in_axes=(None, 0)" in message


class Tensor:
    """An array of another library, which jax does not take."""

    shape, dtype = (4,), "float32"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.ones(4, np.float32)


@pytest.mark.parametrize(("w", "x", "name"), [(0.0, {"x": Tensor()}, r"x\['x'\]"), (Tensor(), jnp.ones(4), "w")])
def test_arrays_of_other_libraries(w: Any, x: Any, name: str) -> None:
    """They are named, not taken for constants of the program, beside which no argument is batched."""
    message = refusal(vnode.VnodeError, lambda w, x: 0.0, w, x)
    assert re.match(rf"{name} is a .*Tensor, which jax does not take", message) and "x.numpy()" in message


def test_empty_batch() -> None:
    message = refusal(vnode.BatchError, lambda w, x: x.sum(), 0.0, jnp.zeros((0, 3)))
    assert "the batch is empty" in message and "shape (0, 3)" in message


@pytest.mark.parametrize("axis", [2, -3, "batch", 0.5])
def test_dimension_that_is_not_there(axis: Any) -> None:
    w, x = inputs()
    message = refusal(vnode.BatchError, lambda w, b: b["x"].sum(), w, {"x": x}, in_axes=(None, axis))
    assert f"dimension {axis!r}" in message and "shape (8, 3)" in message and "in_axes=(None, {'x': 0})" in message


def test_scalar_among_the_batch() -> None:
    message = refusal(vnode.BatchError, lambda w, b: b["x"].sum(), 0.0, {"x": jnp.zeros(8), "step": 3})
    assert "['step']: shape ()" in message and "None for arguments that are not split" in message
    assert "in_axes = (None, 0)" in message  # the default, which nobody wrote
    assert "in_axes=(None, {'step': None, 'x': 0})" in message


@pytest.mark.parametrize("in_axes", [(None, {"y": 0}), (None, [0, 0]), (None, {"x": 0, "z": None})])
def test_in_axes_that_are_no_prefix(in_axes: Any) -> None:
    message = refusal(vnode.BatchError, lambda w, b: b["x"].sum(), 0.0, {"x": jnp.zeros(8)}, in_axes=in_axes)
    assert message.startswith("in_axes[1] does not fit b: it is not a pytree prefix")
    assert repr(in_axes[1]) in message and "prefix" in message and "jax.vmap" in message


@pytest.mark.parametrize("in_axes", [None, "01"])
def test_in_axes_of_the_wrong_kind(in_axes: Any) -> None:
    message = refusal(vnode.BatchError, lambda w, x: x.sum(), *inputs(), in_axes=in_axes)
    assert "in_axes must be an integer, a tuple" in message and repr(in_axes) in message


# CouplingError


def deep(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.tanh(x @ w)
        x = x - x.mean(0)
    return x.sum()


def test_exactness_over_the_budget_lists_couplings_and_remedies() -> None:
    _, x = inputs()
    message = refusal(vnode.CouplingError, deep, jnp.eye(3), x, recompute_budget=0.3)
    line_of(message, "x = x - x.mean(0)")
    cost = re.match(
        r"exactness would recompute (\d+)% of the step, about [\d.]+ forward passes \((\d+) passes in all\), ", message
    )
    assert cost and int(cost[2]) == 4
    assert "reduce_sum reads a sum over the batch" in message
    budget = re.search(r"recompute_budget=([\d.]+) to pay for it", message)
    assert budget and "coupling='local'" in message and "GroupNorm" in message
    vnode.virtualize(deep, virtual_nodes=NODES, recompute_budget=float(budget[1])).explain(jnp.eye(3), x)
    vnode.virtualize(deep, virtual_nodes=NODES).explain(jnp.eye(3), x)  # the default keeps what is cheap for its size


def centred(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("Centre"):
        mean = x.mean(0)
    return (x - mean).max()


@pytest.mark.parametrize("coupling", ["error", {"Centre": "error"}])
def test_forbidden_couplings(coupling: Any) -> None:
    message = refusal(vnode.CouplingError, centred, *inputs(), coupling=coupling)
    line_of(message, "mean = x.mean(0)")
    assert "coupling='error' forbids" in message and "in Centre" in message
    assert "coupling='exact'" in message and "from the data beforehand" in message
    assert "coupling='local'" not in message  # which leaves sums of the data alone as they are


def test_couplings_forbidden_elsewhere_do_not_matter() -> None:
    """A pattern that no name matches is told; names within loops and branches count."""
    w, x = inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def turn(_: Any, y: jax.Array) -> jax.Array:
            with jax.named_scope("Turn"):
                return y + w.sum()

        return jax.lax.fori_loop(0, 2, turn, centred(w, x))

    virtual = vnode.virtualize(step, virtual_nodes=NODES, coupling={"Other": "error", "Turn": "error"})
    with pytest.warns(vnode.VnodeWarning, match=r"coupling has the pattern 'Other', which(.|\n)*Centre") as told:
        result = virtual(w, x)
    assert sum("coupling" in str(each.message) for each in told) == 1
    np.testing.assert_array_equal(result, step(w, x))


def test_forbidden_sort_over_the_batch() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sort(x[:, 0])

    message = refusal(vnode.CouplingError, step, *inputs(), coupling="error")
    line_of(message, "return jnp.sort(x[:, 0])")
    assert "sort needs the whole batch" in message


def test_ordered_effect_of_examples() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x, ordered=True)
        return x.sum()

    message = refusal(vnode.CouplingError, step, *inputs())
    line_of(message, 'jax.debug.print("{}", x, ordered=True)')
    assert "ordered effect" in message and "f32[8,3]" in message
    assert "ordered=False" in message and "reduced over the batch" in message


# UnsupportedPrimitiveError


def unknown_primitive() -> Primitive:
    primitive = Primitive("a_kernel_of_mine")
    primitive.def_abstract_eval(lambda x: x)
    return primitive


def test_primitive_without_description_of_whole_values_is_none_of_our_business() -> None:
    kernel = unknown_primitive()
    step = vnode.virtualize(lambda w, x: kernel.bind(w) * x.sum(0), virtual_nodes=NODES)
    w, x = inputs()
    assert step.explain(w, x).passes
    with pytest.raises(NotImplementedError, match="a_kernel_of_mine"):  # it has no lowering, which is jax's to say
        step.lower(w, x)


# PlacementError


def test_placements_that_do_not_fit() -> None:
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("data",))
    mistakes: list[tuple[Callable[[], Any], str]] = [
        (lambda: vnode.Placement(0), "positive integer, not 0"),
        (lambda: vnode.Placement(4, []), "at least one device"),
        (lambda: vnode.Placement(4, [devices[0], devices[0]]), "only once"),
        (lambda: vnode.Placement(4, devices[:2], counts=[4]), "1 entry for 2 devices"),
        (lambda: vnode.Placement(4, devices[:2], counts=[1, 2]), r"add up to 4 nodes, not \[1, 2\]"),
        (lambda: vnode.Placement(4, devices[:2], counts=[5, -1]), r"at least 0 .* not \[5, -1\]"),
        (lambda: vnode.Placement(4, devices[:2], mesh=mesh), "one of devices, mesh and groups"),
        (lambda: vnode.Placement(4, mesh=mesh), "(?s)no axis 'vnode'.*its axes are 'data'.*axis='data'"),
        (lambda: vnode.virtualize(centred, virtual_nodes=4).on(vnode.Placement(5)), "for 5 nodes, the step has 4"),
        (lambda: vnode.virtualize(centred, virtual_nodes=4).on([]), "at least one device"),
        (lambda: vnode.virtualize(centred, virtual_nodes=4).on(mesh), "no axis 'vnode'"),
    ]
    for make, pattern in mistakes:
        with pytest.raises(vnode.PlacementError, match=pattern):
            make()


# The user's own mistakes


def raising(error: Exception) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> Any:
        raise error

    return step


MISTAKES: dict[str, Callable[..., Any]] = {
    "shapes of a product": lambda w, x: x @ jnp.ones(4),
    "shapes of a sum": lambda w, x: x + jnp.ones(5),
    "shapes of a concatenation": lambda w, x: jnp.concatenate([x, jnp.ones((2, 4))]),
    "shape of a reshape": lambda w, x: x.reshape(5, 5),
    "sizes under vmap": lambda w, x: jax.vmap(jnp.add)(x, jnp.ones(9)),
    "branch on an example": lambda w, x: x if x.sum() > 0 else -x,
    "concrete value": lambda w, x: jnp.zeros(int(x.sum())),
    "item": lambda w, x: x.sum().item(),
    "numpy": lambda w, x: np.asarray(x).sum(),
    "boolean mask": lambda w, x: x[x > 0].sum(),
    "assignment": lambda w, x: x.__setitem__(0, 1.0),
    "indices": lambda w, x: x[0, 0, 0],
    "gradient of a vector": lambda w, x: jax.grad(lambda w: x @ w)(w),
    "gradient by integers": lambda w, x: jax.grad(lambda n: n.sum())(jnp.arange(3)),
    "carry of a scan": lambda w, x: jax.lax.scan(lambda c, _: (jnp.zeros(4), None), w, jnp.arange(3)),
    "branches of a cond": lambda w, x: jax.lax.cond(w[0] > 0, lambda: x, lambda: x[0]),
    "key": lambda w, x: jax.random.normal(3, (2,)),
    "number of arguments": lambda w: w,
    "attribute": lambda w, x: w.weight,
    "arithmetic": lambda w, x: 1 / 0,
    "TypeError": raising(TypeError("mine")),
    "ValueError": raising(ValueError("mine")),
    "RuntimeError": raising(RuntimeError("mine")),
    "KeyError": raising(KeyError("mine")),
}


def mistake(run: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """The type and the message of what is raised, less the sentence that names the traced function."""
    with pytest.raises(Exception) as caught:
        run()
    return type(caught.value), re.sub(r"The error occurred while tracing the function .*", "", str(caught.value))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_step_read_as_under_jit(name: str, devices: int) -> None:
    step = MISTAKES[name]
    virtual = vnode.virtualize(step, virtual_nodes=NODES).on(jax.devices()[:devices])
    want = mistake(lambda: jax.jit(step)(*inputs()))
    assert mistake(lambda: virtual(*inputs())) == want
    assert mistake(lambda: virtual.lower(*inputs())) == want
    assert mistake(lambda: jax.jit(virtual)(*inputs())) == want


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_beside_static_leaves_read_as_under_jit(name: str) -> None:
    step = MISTAKES[name]
    virtual = vnode.virtualize(lambda state, x: step(state["w"], x), virtual_nodes=NODES).on(jax.devices()[:2])
    w, x = inputs()
    want = mistake(lambda: jax.jit(lambda w, x: step(w, x))(w, x))
    assert mistake(lambda: virtual({"w": w, "apply": jnp.sin}, x)) == want


def test_a_step_works_after_a_mistake() -> None:
    """A call that failed leaves nothing behind."""
    virtual = vnode.virtualize(lambda w, x: x @ w, virtual_nodes=NODES).on(jax.devices()[:2])
    w, x = inputs()
    with pytest.raises(TypeError, match="dot_general"):
        virtual(jnp.ones(4), x)
    np.testing.assert_array_equal(virtual(w, x), x @ w)


def regression(state: Any, batch: Any) -> Any:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad}, loss


def given(**changed: Any) -> tuple[Any, Any]:
    return {"w": changed.pop("w", jnp.ones(3))}, {"x": jnp.ones((8, 3)), "y": jnp.ones(8), **changed}


TWO = jax.devices()[:2]
WRONG_USE: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "forgotten argument": (
        lambda step: step(given()[0]),
        TypeError,
        r"^regression\(\) missing a required argument: 'batch'",
    ),
    "forgotten argument to explain": (lambda step: step.explain(given()[0]), TypeError, "argument: 'batch'"),
    "forgotten argument of those that are not split": (
        lambda step: vnode.virtualize(lambda w, x, y: x.sum() + y, virtual_nodes=NODES)(*inputs()),
        TypeError,
        "missing 1 required positional argument: 'y'",
    ),
    "too many arguments": (lambda step: step(*given(), 3), TypeError, "takes 2 positional arguments but 3 were given"),
    "unknown keyword": (lambda step: step(*given(), rate=3), TypeError, "unexpected keyword argument 'rate'"),
    "no function": (
        lambda step: vnode.virtualize({"w": 1}, virtual_nodes=NODES),  # pyright: ignore
        TypeError,
        "^virtualize takes a function, not a value of type dict",
    ),
    "array of objects": (
        lambda step: step(*given(x=np.array([[1, 2], [3]], object))),
        vnode.VnodeError,
        r"(?s)^batch\['x'\] is an array of dtype object, which jax does not have\..*padding for rows of unequal",
    ),
    "text": (
        lambda step: step(*given(w=np.array(["a"]))),
        vnode.VnodeError,
        r"^state\['w'\] is an array of dtype <U1",
    ),
    "list of lists": (
        lambda step: step(*given(x=[[1.0, 2.0], [3.0]])),
        vnode.BatchError,
        r"(?s)batch\['x'\]\[0\]\[0\]: shape \(\).*np\.asarray.*a list is a pytree",
    ),
    "nested counts": (
        lambda step: vnode.Placement(NODES, groups=[TWO[:1], TWO[1:]], counts=[[2], [2]]),  # pyright: ignore
        vnode.PlacementError,
        r"counts must have one integer for each device.* not \[\[2\], \[2\]\]",
    ),
    "nested devices": (
        lambda step: step.on([TWO]),
        vnode.PlacementError,
        r"give one list of devices, or groups=\[\.\.\.\]",
    ),
    "flat groups": (
        lambda step: vnode.Placement(NODES, groups=TWO),
        vnode.PlacementError,
        r"not .*CpuDevice.*groups=\[\.\.\.\] takes several such sequences",
    ),
}


@pytest.mark.parametrize("name", WRONG_USE)
def test_wrong_use_reads_well(name: str) -> None:
    use, kind, message = WRONG_USE[name]
    with pytest.raises(kind, match=message):
        use(vnode.virtualize(regression, virtual_nodes=NODES).on(TWO))


@pytest.mark.parametrize(
    "devices",
    [TWO, TWO[:1], vnode.Placement(NODES, groups=[TWO[:1], TWO[1:]])],
    ids=["two", "one", "groups"],
)
def test_use_after_donation(devices: Any) -> None:
    """What jaxlib answers to with a crash of the process, on several devices."""
    step = vnode.virtualize(regression, virtual_nodes=NODES, donate_argnums=0).on(devices)
    state, batch = given()
    other = {**state, "w": state["w"] + 1}
    after, _ = step(step.put(state) if devices is TWO else state, batch)
    placed = step.put(other)
    step(placed, batch)
    message = r"(?s)deleted.*\n  state\['w'\]\n  the step donates state: donate_argnums=\(0,\)\n.*use that call"
    for used in (lambda: step(placed, batch), lambda: step.on(TWO[:1])(placed, batch)):
        with pytest.raises(vnode.VnodeError, match=message):
            used()
    with pytest.raises(vnode.VnodeError, match=r"(?s)deleted.*\n  argument 0\['w'\]"):
        step.put(placed)
    list(after.values())[-1].delete()  # by another function; the step knew the state to be in place
    with pytest.raises(vnode.VnodeError, match=r"(?s)deleted.*\n  state\['"):
        step(after, batch)


def evaluation(step: Any) -> vnode.elastic.Evaluation:
    return vnode.elastic.Evaluation(step, [given()[1]])


def objects_of(state: Any) -> Any:
    """An nnx object with the arrays of a state."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    model.kernel.set_value(state["w"])
    return model


def of_objects(step: Any) -> Any:
    return vnode.nnx.virtualize(lambda model, batch: model(batch["x"]).mean(), virtual_nodes=NODES).on(TWO)


GIVEN_TO = {
    "a call": lambda step, auto, state, batch: step(state, batch),
    "put": lambda step, auto, state, batch: step.put(state),
    "warm_up": lambda step, auto, state, batch: step.warm_up([TWO], state, batch),
    "a call, auto": lambda step, auto, state, batch: auto(state, batch),
    "put, auto": lambda step, auto, state, batch: auto.put(state),
    "warm_up, auto": lambda step, auto, state, batch: auto.warm_up([TWO], state, batch),
    "put on groups": lambda step, auto, state, batch: step.on(vnode.Placement(NODES, groups=[TWO[:1], TWO[1:]])).put(
        state
    ),
    "a call with objects": lambda step, auto, state, batch: of_objects(step)(objects_of(state), batch),
    "put of objects": lambda step, auto, state, batch: of_objects(step).put(objects_of(state)),
    "warm_up with objects": lambda step, auto, state, batch: of_objects(step).warm_up([TWO], objects_of(state), batch),
    "check": lambda step, auto, state, batch: vnode.check(step, (state, batch)),
    "profile": lambda step, auto, state, batch: vnode.profile(step, (state, batch), TWO[:1]),
    "evaluation": lambda step, auto, state, batch: evaluation(step)(state, step.placement),
    "run": lambda step, auto, state, batch: vnode.elastic.run(step, state, [batch], steps=1),
    "run with objects": lambda step, auto, state, batch: vnode.elastic.run(
        of_objects(step), objects_of(state), [batch], steps=1
    ),
}


@pytest.mark.parametrize("use", GIVEN_TO)
def test_an_array_that_is_gone_is_named_by_whoever_is_given_it(use: str) -> None:
    step = vnode.virtualize(regression, virtual_nodes=NODES).on(TWO)
    auto = vnode.virtualize(regression, virtual_nodes="auto", memory="1GiB").on(TWO)
    state, batch = given()
    state["w"].delete()
    name = "kernel" if "objects" in use else "w"
    message = rf"(?s)some of the given arrays are deleted.*\n  (argument 0|state|model).*{name}.*use that call"
    with pytest.raises(vnode.VnodeError, match=message):
        GIVEN_TO[use](step, auto, state, batch)


@pytest.mark.parametrize("devices", [TWO, TWO[:1]], ids=["two", "one"])
@pytest.mark.parametrize("donated", [(), 0])
def test_a_part_of_a_state_that_is_gone(devices: Any, donated: Any) -> None:
    """Also of one that the step returned itself, and knew to be in place."""

    def update(state: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf - x.mean(0), state)

    step = vnode.virtualize(update, virtual_nodes=NODES, donate_argnums=donated).on(devices)
    x = jnp.ones((8, 3))
    after = step(step({"b": jnp.ones(3), "w": jnp.ones(3)}, x), x)
    after["w"].delete()
    with pytest.raises(vnode.VnodeError, match=r"arrays are deleted.*\n  state\['w'\]\n"):
        step(after, x)
    np.testing.assert_array_equal(step({**after, "w": jnp.ones(3)}, x)["b"], -2 * np.ones(3))


@pytest.mark.parametrize("devices", [TWO, TWO[:1]], ids=["two", "one"])
def test_an_array_that_is_donated_twice(devices: Any) -> None:
    """As the average of parameters that starts as these; jaxlib answers with a crash of the process on two devices."""

    def update(state: Any, x: jax.Array, shift: Any = 0.0) -> Any:
        return {name: leaf - x.mean(0) - shift for name, leaf in state.items()}

    step = vnode.virtualize(update, virtual_nodes=NODES, donate_argnums=0).on(devices)
    x = jnp.ones((8, 3))
    after = step({"w": jnp.ones(3), "average": jnp.ones(3)}, x)
    kept = step.put({"w": jnp.ones(3), "average": jnp.ones(3)})
    message = r"(?s)two places.*\n  state\['average'\] is state\['w'\]\n  donate_argnums=\(0,\)\n.*jnp.copy"
    tied = {"w": jnp.ones(3)}
    tied["average"] = tied["w"]
    after["average"] = after["w"]  # in an object that the step knew to be in place
    for state in (tied, step.put(tied), after):
        with pytest.raises(vnode.VnodeError, match=message):
            step(state, x)
    with pytest.raises(vnode.VnodeError, match=r"(?s)state\['w'\] is shift\n"):
        step(kept, x, kept["w"])
    np.testing.assert_array_equal(step({**after, "average": jnp.ones(3)}, x)["w"], -np.ones(3))


def test_an_error_of_a_step_that_donates_is_its_own() -> None:
    """Not that the arrays are gone which were donated to the call that failed."""

    def refuse(x: Any) -> Any:
        raise ArithmeticError("five is right out")

    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] + jax.pure_callback(refuse, jax.ShapeDtypeStruct((), x.dtype), x.sum())}

    virtual = vnode.virtualize(step, virtual_nodes=NODES, donate_argnums=0).on(TWO[:1])
    state = virtual.put({"w": jnp.ones(3)})
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="five is right out"):
        jax.block_until_ready(virtual(state, jnp.ones((8, 3))))


def test_looking_at_a_step_without_arguments() -> None:
    """The shapes of the last call are taken; there must be one."""
    step = vnode.virtualize(regression, virtual_nodes=NODES).on(TWO)
    for look in (step.explain, step.lower, lambda: step.prepare([TWO])):
        with pytest.raises(vnode.BatchError, match=r"(?s)arguments of 'regression' are not known.*call the step once"):
            look()
    step(*given())
    for used in (step, step.on(TWO[:1])):
        assert str(used.explain()) == str(used.explain(*given()))
        assert used.lower().compile().memory_analysis() is not None


def test_shapes_without_values_are_refused_where_a_step_is_run() -> None:
    """`explain` and `lower` take them; a call needs numbers."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    virtual = vnode.virtualize(step, virtual_nodes=4)
    args: Any = (jnp.ones(3), jax.ShapeDtypeStruct((8, 3), jnp.float32))
    for run in (lambda: virtual(*args), lambda: vnode.check(virtual, args), lambda: vnode.profile(virtual, args)):
        with pytest.raises(vnode.VnodeError, match=r"shapes without values[\s\S]*x: ShapeDtypeStruct"):
            run()
    auto = vnode.virtualize(step, virtual_nodes="auto", memory="1GiB")
    for put in (virtual.put, auto.put):
        with pytest.raises(vnode.VnodeError, match=r"shapes without values[\s\S]*\['w'\]: ShapeDtypeStruct"):
            put({"w": args[1], "n": 3})
    assert len(virtual.explain(*args).passes) == 1
