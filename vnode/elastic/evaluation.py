"""An evaluation of the state while it is trained: a virtualized step over data of its own.

Knows steps as callables with placements, and batches by number. Must not know the training.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence, Sized
from typing import Any

import jax
import numpy as np

from vnode.data.source import loader
from vnode.elastic.options import check_integer
from vnode.elastic.run_checks import check_step, form, name_of
from vnode.errors import BatchError, VnodeError, layout_message
from vnode.placement.host_copy import to_numpy
from vnode.placement.placement import Placement
from vnode.placement.process_barrier import block_until_ready
from vnode.placement.sharded import is_sharded_batch
from vnode.step.protocol import Step
from vnode.tracebacks import api_boundary


class Evaluation:
    """Evaluates a state on some batches, on the devices on which it is trained. For ``run(..., evaluate=...)``.

    Args:
      step: a virtualized ``(state, batch) -> metrics``, a pytree of arrays; as many virtual nodes as the training step
        has is best, but any number does.
      data: as for `vnode.elastic.run`.
      batches: how many, from number 0 on; by default one epoch of `vnode.data.Batches`, or ``len(data)`` of batches by
        number.
      combine: makes one value of the metrics of all batches and the number of examples in each; by default the mean,
        weighted by examples, in float64. So metrics should be means over examples, or `combine` must be given.

    Raises:
      VnodeError: the step is not virtualized, or takes nnx objects; it is not known how many batches there are, or
        these would not hold each example once.

    Example:
      >>> import jax.numpy as jnp, numpy as np, vnode
      >>> from vnode.elastic import Evaluation
      >>> distance = lambda w, batch: {"error": jnp.mean(jnp.abs(batch["x"] - w))}
      >>> error = vnode.virtualize(distance, virtual_nodes=2)
      >>> held_out = vnode.data.Batches({"x": np.arange(5.0)}, batch_size=2, shuffle=False, last="keep")
      >>> evaluation = Evaluation(error, held_out)
      >>> float(evaluation(jnp.float32(1), error.placement)["error"])
      1.4
    """

    def __init__(
        self,
        step: Any,
        data: Any,
        *,
        batches: int | None = None,
        combine: Callable[[Sequence[Any], Sequence[int]], Any] | None = None,
    ) -> None:
        check_evaluating_step(step)
        self.step = step
        self.batches = batches_in(data) if batches is None else check_integer("batches", batches, 1)
        self.load = loader(data, self.batches)
        self.combine = combine or weighted_mean

    @api_boundary
    def __call__(self, state: Any, placement: Placement) -> Any:
        """The metrics of a state, on the host.

        Args:
          state: as the training step returns it; stays as it is.
          placement: the training step's.
        """
        step = self.on(placement)
        metrics, examples = [], []
        for number in range(self.batches):
            batch = self.load(number, step.placement)
            examples.append(size_of(batch))
            metrics.append(step(state, batch))  # all are under way before the first is waited for
            check_metrics(metrics[-1], state)
        return self.combine(
            [jax.tree.map(to_numpy, block_until_ready(each, "an evaluation")) for each in metrics], examples
        )

    def on(self, placement: Placement) -> Any:
        """The step on the devices of a placement."""
        if self.step.options.virtual_nodes == placement.virtual_nodes:
            return self.step.on(placement)
        return self.step.on(placement.devices if len(placement.groups) > 1 else placement.mesh)


def batches_in(data: Any) -> int:
    """The number of batches that hold each example once.

    Raises:
      VnodeError: the number is not known, or no number does.
    """
    order = getattr(data, "order", None)
    if order is not None:
        if order.last == "wrap" and order.examples % order.batch_size:
            raise BatchError(
                "the last batch of an epoch holds examples of the next one, which would count twice.",
                facts=[f"{order.examples} examples in batches of {order.batch_size}"],
                remedies=['vnode.data.Batches(..., last="keep"): its last batch is smaller', "batches=..."],
            )
        return math.ceil(order.steps_per_epoch)
    by_number = hasattr(data, "__getitem__") and not hasattr(data, "load") and not callable(data)
    count = None
    if by_number and isinstance(data, Sized):
        with contextlib.suppress(TypeError, OverflowError):  # of endless data
            count = len(data)
    if count == 0:
        raise VnodeError(f"{type(data).__name__} has no batch to evaluate on.", remedies=["give one batch or more"])
    if count is not None and count < sys.maxsize:
        return count
    raise VnodeError(f"{type(data).__name__} does not say how many batches it has: give Evaluation(..., batches=...)")


def size_of(batch: Any) -> int:
    """The number of examples of a batch, by dimension 0 of its arrays."""
    leaves = [leaf for leaf in jax.tree.leaves(batch, is_leaf=is_sharded_batch) if np.ndim(leaf)]
    return np.shape(leaves[0])[0] if leaves else 1


def weighted_mean(metrics: Sequence[Any], examples: Sequence[int]) -> Any:
    """The mean of the metrics of several batches, weighted by their examples, in float64."""
    return jax.tree.map(lambda *leaves: np.average(np.stack(leaves).astype(np.float64), 0, examples), *metrics)


def check_evaluation(evaluate: Any) -> None:
    """Refuses an `evaluate` that the run cannot call, before its first step.

    Args:
      evaluate: an option of a run: takes the state alone, or is an `Evaluation`.

    Raises:
      VnodeError: it is a virtualized step.
      ValueError: it cannot be called with the state alone.
    """
    if evaluate is None or isinstance(evaluate, Evaluation):
        return
    if isinstance(evaluate, Step):
        raise VnodeError(
            f"evaluate={name_of(evaluate)} is a virtualized step, which has no batches to evaluate the state on.",
            remedies=["evaluate=vnode.elastic.Evaluation(step, held_out_data)"],
        )
    try:
        inspect.signature(evaluate).bind(None)
    except ValueError:  # a built-in that does not tell
        return
    except TypeError as error:
        raise ValueError(
            layout_message(
                f"evaluate={name_of(evaluate)} cannot be called with the state alone: {error}.",
                remedies=[
                    "evaluate=lambda state: ..., which returns metrics",
                    "evaluate=vnode.elastic.Evaluation(step, held_out_data) for a step that takes (state, batch)",
                ],
            )
        ) from None


def check_evaluating_step(step: Any) -> None:
    """Refuses a step that an `Evaluation` cannot run.

    Raises:
      VnodeError: it is not virtualized, or takes objects of a framework.
    """
    check_step(step)
    if hasattr(step, "functional"):
        raise VnodeError(
            f"an Evaluation takes a step on arrays, and {name_of(step)} takes objects of flax.nnx.",
            remedies=["a step on the state of the run: vnode.virtualize(step, virtual_nodes=8), with (state, batch)"],
        )


def check_metrics(results: Any, state: Any) -> None:
    """Refuses a training step in the place of one that evaluates.

    Args:
      results: what an evaluating step returned.
      state: that it was given.

    Raises:
      VnodeError: the results hold a state.
    """
    if isinstance(results, tuple) and results and jax.tree.leaves(state) and form(results[0]) == form(state):
        raise VnodeError(
            "the step of an Evaluation must return only metrics; this one returns a state first, as in training.",
            remedies=[
                "a step that returns metrics: vnode.virtualize(lambda state, batch: {'loss': ...}, virtual_nodes=8)"
            ],
        )
