"""Item 1 of the zoo, continued: flax.nnx, whose steps take modules and optimizers and mutate them in place.

Knows flax.nnx. Must not know vnode. Because a step changes its arguments, objects are made anew around every call, and
their state afterwards is compared along with what the step returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from . import Program, case, kit

WIDTH = 5
CLASSES = 4


def _filled(model: Any) -> Any:
    """The model, its parameters and statistics replaced by values that no initializer would give."""
    nnx.update(model, kit.fill(nnx.state(model)))
    return model


def _program(
    make: Callable[[], tuple[Any, ...]], step: Callable[..., Any], *data: Any, in_axes: Any = None, **options: Any
) -> Program:
    """A step on objects that `make` builds, called with the data after them.

    Args:
      make: builds the objects.
      step: takes the objects, then the data.
      *data: the examples.
      in_axes: None for each object and 0 for the data unless given.
      **options: of `virtualize`.

    Returns:
      A program whose result is what the step returns, with the objects' states.
    """
    objects = len(make())

    def outer(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*data: Any) -> Any:
            objects = make()
            out = step(*objects, *data)
            states = [nnx.to_pure_dict(nnx.state(o)) for o in objects]
            return out, states

        return run

    axes = (None,) * objects + (0,) * len(data) if in_axes is None else in_axes
    return Program(step, data, {"in_axes": axes, **options}, outer=outer, jit=nnx.jit)


class Mlp(nnx.Module):
    """Dense layers, with normalization and dropout if asked for."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0, batch_norm: bool = False) -> None:
        self.first = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if batch_norm else nnx.LayerNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def _data(batch: int) -> dict[str, jax.Array]:
    return {"x": kit.normal(batch, WIDTH), "y": kit.integers(CLASSES, batch)}


def _loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return kit.cross_entropy(model(batch["x"]), batch["y"]).mean()


def _train(model: Any, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    loss, grads = nnx.value_and_grad(_loss)(model, batch)
    optimizer.update(model, grads)
    return loss


def _with_optimizer(model: Any, tx: optax.GradientTransformation) -> tuple[Any, nnx.Optimizer]:
    optimizer = nnx.Optimizer(_filled(model), tx, wrt=nnx.Param)
    nnx.update(optimizer, kit.warm(nnx.state(optimizer)))
    return model, optimizer


@case(item=1, nnx=True)
def nnx_adamw() -> Program:
    def make() -> tuple[Any, ...]:
        return _with_optimizer(Mlp(nnx.Rngs(0)), optax.adamw(1e-2))

    return _program(make, _train, _data(16))


@case(item=1, batch=12, nnx=True)
def nnx_clipping_and_schedule() -> Program:
    def make() -> tuple[Any, ...]:
        schedule = optax.cosine_decay_schedule(0.1, 10)
        tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(schedule, momentum=0.9))
        return _with_optimizer(Mlp(nnx.Rngs(0)), tx)

    return _program(make, _train, _data(12))


@case(item=1, nnx=True)
def nnx_dropout() -> Program:
    """The module holds the key and counts its draws."""

    def make() -> tuple[Any, ...]:
        return _with_optimizer(Mlp(nnx.Rngs(0, dropout=3), dropout=0.4), optax.adam(1e-2))

    return _program(make, _train, _data(16))


# nnx.metrics add up in float32.
@case(item=1, batch=12, nnx=True, float64=False)
def nnx_metrics_and_averages() -> Program:
    """Metric objects are updated in place, and an average of the parameters is kept in another module."""

    def step(
        model: Any, optimizer: nnx.Optimizer, average: Any, metrics: Any, batch: dict[str, jax.Array]
    ) -> jax.Array:
        def loss_fn(model: Any) -> tuple[jax.Array, jax.Array]:
            logits = model(batch["x"])
            return kit.cross_entropy(logits, batch["y"]).mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        metrics.update(loss=loss, logits=logits, labels=batch["y"])
        blend = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, nnx.state(average), nnx.state(model))
        nnx.update(average, blend)
        return logits

    def make() -> tuple[Any, ...]:
        model, optimizer = _with_optimizer(Small(nnx.Rngs(0)), optax.adamw(1e-2))
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        return model, optimizer, nnx.clone(model), metrics

    return _program(make, step, _data(12))


class Small(nnx.Module):
    """A model without anything but parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(WIDTH, 6, rngs=rngs), nnx.Linear(6, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


@case(item=1, nnx=True)
def nnx_evaluation() -> Program:
    """No update; the view of the model has dropout switched off."""

    def step(model: Any, batch: dict[str, jax.Array]) -> Any:
        logits = nnx.view(model, deterministic=True)(batch["x"])
        return logits, kit.cross_entropy(logits, batch["y"]).mean()

    def make() -> tuple[Any, ...]:
        return (_filled(Mlp(nnx.Rngs(0), dropout=0.5)),)

    return _program(make, step, _data(16))


class Tied(nnx.Module):
    """One table for input and output, shared by reference; layers stacked by vmap and run by scan."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(CLASSES, WIDTH, dtype=kit.real(), rngs=rngs)
        self.output = self.embed

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return x + jnp.tanh(layer(x))

        return self.output.attend(run(self.embed(tokens), self.layers))


@case(item=1, batch=12, nnx=True)
def nnx_tied_embeddings_and_scanned_layers() -> Program:
    def step(model: Any, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return kit.cross_entropy(model(tokens)[:, :-1], tokens[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def make() -> tuple[Any, ...]:
        return _with_optimizer(Tied(nnx.Rngs(0)), optax.adam(1e-2))

    return _program(make, step, kit.integers(CLASSES, 12, 5))


@case(item=7, nnx=True)
def nnx_batch_norm_exact() -> Program:
    """Running statistics change in place."""

    def make() -> tuple[Any, ...]:
        return _with_optimizer(Mlp(nnx.Rngs(0), batch_norm=True), optax.adam(1e-2))

    return _program(make, _train, _data(16), recompute_budget=10.0)
