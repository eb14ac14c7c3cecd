"""What a user is told about couplings that are refused: what helps for their kind, and nothing else.

Knows the public interface and messages. Must not know how a kind is found. Remedies are followed here: the step that
they lead to must be accepted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vnode
from tests.rounding import assert_same

pytestmark = pytest.mark.quickly

NODES, BATCH, WIDTH = 4, 16, 6
Loss = Callable[[Any, jax.Array], jax.Array]


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


PARAMS, X = [draw(WIDTH, WIDTH) / 3 for _ in range(3)], draw(BATCH, WIDTH)


def model(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def train(loss: Loss) -> Callable[..., Any]:
    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return moved(params, grads), value

    return step


def normalized(params: Any, x: jax.Array) -> jax.Array:
    for i, w in enumerate(params):
        with jax.named_scope(f"Norm_{i}"):
            x = x @ w
            x = (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-3)
    return (x**3).mean()


def centred(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = x @ w
        x = x - x.mean(0)
    return (x**3).mean()


def pairs(z: jax.Array) -> jax.Array:
    return jax.nn.softplus(z @ z.T).mean()


def ranked(z: jax.Array) -> jax.Array:
    return (jnp.sort(z.sum(1)) * jnp.arange(z.shape[0])).mean()


def neighbours(z: jax.Array) -> jax.Array:
    return (z * z[(jnp.arange(z.shape[0]) * 3 + 1) % z.shape[0]]).mean()


def hardest(z: jax.Array) -> jax.Array:
    losses = (z**2).mean(1)
    return (losses * (losses > losses.mean())).mean()


def squared(z: jax.Array) -> jax.Array:
    return (z**2).mean()


def moved(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def evaluated_twice(params: Any, x: jax.Array) -> jax.Array:
    """The loss at parameters that its gradient has moved."""
    return of(squared)(moved(params, jax.grad(of(squared))(params, x)), x)


def settled(w: jax.Array, x: jax.Array) -> jax.Array:
    """A layer applied until all that it is given has settled."""

    def body(state: Any) -> Any:
        i, z, _ = state
        new = jnp.tanh(z @ w + x)
        return i + 1, new, jnp.abs(new - z).max()

    return lax.while_loop(lambda state: (state[0] < 20) & (state[2] > 1e-3), body, (0, x, jnp.float32(1)))[1]


def of(loss: Callable[[jax.Array], jax.Array]) -> Loss:
    return lambda params, x: loss(model(params, x))


def grouped(loss: Callable[[jax.Array], jax.Array]) -> Loss:
    return of(lambda z: jax.vmap(loss)(z.reshape(NODES, -1, *z.shape[1:])).mean())


def given(loss: Callable[[Any, jax.Array], jax.Array]) -> Loss:
    """A loss that reads something that is not batched, besides the parameters."""
    return lambda params, x: loss(jnp.float32(0.3), model(params, x))


NORMALIZE, GROUPS, BEFORE = "GroupNorm, LayerNorm", "within groups", "of the step before"
GHOST, LOCAL, QUEUE, INPUTS = "ghost batch", "coupling='local'", "a queue of earlier", "before the model is applied"
ONCE, BY_ITSELF, FIXED = "model once per step", "each stops by itself", "fixed number of times"
ALL = (NORMALIZE, GROUPS, BEFORE, GHOST, LOCAL, QUEUE, INPUTS, ONCE, BY_ITSELF, FIXED)
COUPLED: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[Callable[..., Any], ...]]] = {
    "normalization": (
        train(normalized),
        (GHOST, NORMALIZE),
        (train(lambda params, x: of(squared)(params, x - x.mean(1, keepdims=True))),),
    ),
    "normalization_without_a_name": (train(centred), (GHOST, LOCAL, NORMALIZE), ()),
    "contrastive": (
        train(of(pairs)),
        (GROUPS, QUEUE),
        (train(grouped(pairs)), train(lambda params, x: (model(params, x) @ params[0]).mean())),
    ),
    "sort": (train(of(ranked)), (GROUPS, BEFORE), (train(grouped(ranked)),)),
    "gather": (
        train(of(neighbours)),
        (GROUPS, INPUTS),
        (train(grouped(neighbours)), train(lambda params, x: (model(params, x * x[::-1])).mean())),
    ),
    "threshold": (
        train(of(hardest)),
        (LOCAL, BEFORE),
        (train(given(lambda limit, z: ((z**2).mean(1) * ((z**2).mean(1) > limit)).mean())),),
    ),
    "maximum": (
        train(of(lambda z: jax.nn.logsumexp((z**2).mean(1)))),
        (BEFORE,),
        (train(given(lambda greatest, z: jnp.exp((z**2).mean(1) - greatest).mean())),),
    ),
    "evaluated_twice": (train(evaluated_twice), (LOCAL, ONCE), (train(of(squared)),)),
}


@pytest.mark.parametrize("name", COUPLED)
def test_remedies_fit_the_cause_and_help(name: str) -> None:
    step, remedies, mended = COUPLED[name]
    with pytest.raises(vnode.CouplingError) as caught:
        vnode.virtualize(step, virtual_nodes=NODES, recompute_budget=0.1).explain(PARAMS, X)
    what, _, advice = str(caught.value).partition("What to do:")
    assert {remedy for remedy in ALL if remedy in advice} == set(remedies)
    assert "test_couplings.py" in what
    for change in re.findall(r"coupling=(\{.*\}|'local')", advice):
        options = {"coupling": ast.literal_eval(change), "recompute_budget": 0.1}
        report = vnode.virtualize(step, virtual_nodes=NODES, **options).explain(PARAMS, X)
        assert any("own estimate" in line.what for line in report.couplings)
    for other in mended:
        vnode.virtualize(other, virtual_nodes=NODES, recompute_budget=0.0).explain(PARAMS, X)


@pytest.mark.parametrize("name", ["contrastive", "sort", "gather"])
def test_within_groups_nothing_is_coupled(name: str) -> None:
    step, _, (mended, *_) = COUPLED[name]
    with pytest.raises(vnode.CouplingError) as caught:
        vnode.virtualize(step, virtual_nodes=NODES, coupling="error").explain(PARAMS, X)
    assert LOCAL not in str(caught.value) and NORMALIZE not in str(caught.value)
    vnode.virtualize(mended, virtual_nodes=NODES, coupling="error").explain(PARAMS, X)


def test_a_loop_that_ends_for_all_examples_together() -> None:
    with pytest.raises(vnode.CouplingError) as caught:
        vnode.virtualize(settled, virtual_nodes=NODES, coupling="error").explain(PARAMS[0], X)
    message = str(caught.value)
    assert {remedy for remedy in ALL if remedy in message} == {BY_ITSELF, FIXED}
    mended = jax.vmap(settled, (None, 0))
    got = vnode.virtualize(mended, virtual_nodes=NODES, coupling="error")(PARAMS[0], X)
    assert_same(got, mended, PARAMS[0], X)


def halved_if_large(grad: jax.Array) -> jax.Array:
    return lax.cond(jnp.max(jnp.abs(grad)) > 1e-3, lambda g: g / 2 - g**2, lambda g: g, grad)


def every_second_time(grad: jax.Array) -> jax.Array:
    return lax.cond(grad.size % 2 == 0, lambda g: jnp.tanh(g), jnp.zeros_like, grad)


def made_orthogonal(grad: jax.Array) -> jax.Array:
    """As Muon's iteration."""
    g = grad / jnp.linalg.norm(grad)
    return lax.fori_loop(0, 5, lambda _, g: 1.5 * g - 0.5 * g @ g.T @ g, g)


def scaled_in_turns(grad: jax.Array) -> jax.Array:
    return lax.scan(lambda scale, _: (scale * jnp.tanh(grad + scale), None), jnp.ones_like(grad), None, length=3)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("update", [halved_if_large, every_second_time, made_orthogonal, scaled_in_turns])
def test_a_loop_or_branch_that_reads_gradients_couples_nothing(update: Callable[[jax.Array], jax.Array]) -> None:
    """It is evaluated once, when they are complete, and has no passes of its own."""

    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(of(squared))(params, x)
        return [w - 0.1 * (update(g) if g.ndim == 2 else g) for w, g in zip(params, grads, strict=True)]

    virtual = vnode.virtualize(step, virtual_nodes=NODES, coupling="error")
    report = virtual.explain(PARAMS, X)
    assert not report.couplings and len(report.passes) == 1
    assert_same(virtual(PARAMS, X), step, PARAMS, X)


def test_a_mask_is_counted_once() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.where(x[:, 0] > 0, (model(params, x) ** 2).sum(1), 0.0).sum() / (x[:, 0] > 0).sum()

    with pytest.raises(vnode.CouplingError) as caught:
        vnode.virtualize(train(loss), virtual_nodes=NODES, coupling="error").explain(PARAMS, X)
    advice = str(caught.value).partition("What to do:")[2]
    assert not {remedy for remedy in ALL if remedy in advice} and "from the data beforehand" in advice


@pytest.mark.parametrize("name", ["contrastive", "sort", "gather", "threshold", "maximum", "evaluated_twice"])
def test_one_repeated_forward_pass_is_accepted_by_default(name: str) -> None:
    report = vnode.virtualize(COUPLED[name][0], virtual_nodes=NODES).explain(PARAMS, X)
    assert 0 < report.recomputed <= report.flops / 2


@pytest.mark.parametrize("name", ["normalization", "normalization_without_a_name"])
def test_narrow_normalized_layers_are_kept_by_default(name: str) -> None:
    """So that less than a forward pass is repeated. A smaller budget is told the price, by forward passes too."""
    report = vnode.virtualize(COUPLED[name][0], virtual_nodes=NODES).explain(PARAMS, X)
    assert report.recomputed <= report.flops / 3 and report.between
    with pytest.raises(vnode.CouplingError, match=r"recompute \d+% of the step, about \d\.\d forward .*budget=0\.3"):
        vnode.virtualize(COUPLED[name][0], virtual_nodes=NODES, recompute_budget=0.3).explain(PARAMS, X)


def test_what_may_overflow_in_a_loop_is_named() -> None:
    """A gradient in float16 that is added up in a loop over microbatches."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def turn(total: jax.Array, part: jax.Array) -> Any:
            gradient = jax.grad(lambda w: (part @ w).astype(jnp.float32).sum())(w.astype(jnp.float16))
            return total + gradient.astype(jnp.float32), None  # here

        return lax.scan(turn, jnp.zeros(WIDTH), x)[0]

    x = jnp.ones((2, BATCH, WIDTH), jnp.float16)
    virtual = vnode.virtualize(step, virtual_nodes=NODES, in_axes=(None, 1))
    with pytest.raises(vnode.CouplingError) as error:
        vnode.virtualize(step, virtual_nodes=NODES, in_axes=(None, 1), coupling="error")(jnp.ones(WIDTH), x)
    here = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here"))
    what = r"scan has passes of its own: add computes with a sum over the batch in a type of small range"
    assert re.search(rf"{what} at \S*test_couplings.py:{here}", str(error.value))
    assert "bfloat16" in str(error.value)
    assert any(re.search(what, line.what) for line in virtual.explain(jnp.ones(WIDTH), x).couplings)


def test_a_refusal_names_the_directory_of_a_file_once() -> None:
    with pytest.raises(vnode.CouplingError) as caught:
        vnode.virtualize(train(normalized), virtual_nodes=NODES, recompute_budget=0.3).explain(PARAMS, X)
    message = str(caught.value)
    assert message.count(str(Path(__file__))) == 1 and message.count("test_couplings.py:") > 2
