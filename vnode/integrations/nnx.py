"""`virtualize` for `flax.nnx` steps, which take modules and optimizers and mutate them in place.

Knows how nnx turns objects into pytrees and back (as `nnx.jit` does). Must not know jaxprs or placements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx
from flax.nnx import extract

from vnode.placement.layout import Layout
from vnode.placement.placement import Placement
from vnode.plan.nodes.auto import AutoStep
from vnode.report.report import Report
from vnode.step.ahead import Preparation, warm_ups
from vnode.step.virtual import VirtualStep
from vnode.transform import virtualize as virtualize_pure


class ObjectStep:
    """A virtualized nnx step; made by `virtualize`. Called like the step, it updates the objects in place."""

    def __init__(self, step: VirtualStep | AutoStep, tag: object) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._tag = tag
        self._prepared: list[Any] = []  # or jax would forget them

    @property
    def placement(self) -> Placement:
        """Where the nodes live."""
        return self._step.placement

    def on(self, devices: Any, **options: Any) -> ObjectStep:
        """The same step on other devices; see `VirtualStep.on`."""
        return ObjectStep(self._step.on(devices, **options), self._tag)

    def put(self, tree: Any) -> Any:
        """Places a state; see `VirtualStep.put`."""
        return self._step.put(tree)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(self._tag):
            pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=self._tag)
            pure = self._step(*pure_args, **pure_kwargs)
            return nnx.from_tree(pure, ctxtag=self._tag, is_inner=False)[2]

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Says what becomes of the step; see `VirtualStep.explain`."""
        return self.inspect(self._step.explain, args, kwargs)

    def reports(self, places: Sequence[Placement | Layout], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `explain` says for several placements; see `VirtualStep.reports`."""
        return self.inspect(lambda *a, **k: self._step.reports(places, a, k), tuple(args), dict(kwargs))

    def layout(self, devices: int) -> Layout:
        """How nodes would be spread; see `VirtualStep.layout`."""
        return self._step.layout(devices)

    def temporary(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """Temporary memory as compiled; see `VirtualStep.temporary`."""
        return self.inspect(lambda *a, **k: self._step.temporary(a, k), tuple(args), dict(kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step without running it; see `VirtualStep.lower`."""
        return self.inspect(self._step.lower, args, kwargs)

    def prepare(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """Compiles the step for other placements; it is traced at once, and compiled in a background thread.

        Args:
          placements: a list of what `on` takes.
          *args: arguments of the step.
          **kwargs: keyword arguments of the step.

        Returns:
          A handle; see `VirtualStep.prepare`.
        """
        steps = [self.on(entry) for entry in placements]

        def compiler(step: ObjectStep) -> Callable[[], Any]:
            lowered = self.inspect(step._step.lower_for, args, kwargs)
            return lambda: step._prepared.append(lowered.compile())

        compilers = [compiler(step) for step in steps]  # which chooses a number of nodes, where there is none
        return Preparation({step.placement: compile for step, compile in zip(steps, compilers, strict=True)})

    def warm_up(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """As `prepare`, and runs the step there once with copies of the objects; see `VirtualStep.warm_up`.

        Args:
          placements: a list of what `on` takes.
          *args: arguments of the step.
          **kwargs: keyword arguments of the step.

        Returns:
          A handle; see `VirtualStep.prepare`.
        """

        def run(step: ObjectStep, *pure_args: Any, **pure_kwargs: Any) -> Any:
            with nnx.update_context(self._tag):
                return step._step.run_copy(*pure_args, **pure_kwargs)

        steps = [self.on(entry) for entry in placements]
        runs = [functools.partial(run, step) for step in steps]
        tasks = self.inspect(lambda *a, **k: warm_ups(runs, a, k), args, kwargs)
        return Preparation({step.placement: task for step, task in zip(steps, tasks, strict=True)})

    @property
    def pure(self) -> VirtualStep | AutoStep:
        """The step on pytrees of arrays."""
        return self._step

    def inspect(self, look: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a function with what the step's arguments are as pytrees of arrays; the objects stay as they are."""
        args, kwargs = nnx.clone((args, kwargs))
        with nnx.update_context(self._tag):
            pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=self._tag)
            return look(*pure_args, **pure_kwargs)


def virtualize(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`vnode.virtualize` for a step that takes and mutates nnx objects.

    Args:
      fun: the step; without it a decorator is returned.
      **options: as for `vnode.virtualize`. `in_axes` names the arguments that carry examples, with None for modules,
        optimizers and metrics: ``(None, None, 0)`` for ``step(model, optimizer, batch)``.

    Returns:
      A callable like `fun` that updates the objects in place.

    Example:
      >>> import jax.numpy as jnp, optax, vnode
      >>> from flax import nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> @vnode.nnx.virtualize(virtual_nodes=4, in_axes=(None, None, 0))
      ... def step(model, optimizer, x):
      ...     loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
      ...     optimizer.update(model, grads)
      ...     return loss
      >>> step(model, optimizer, jnp.ones((8, 3))).shape
      ()
    """
    if fun is None:
        return functools.partial(virtualize, **options)
    tag = object()

    @functools.wraps(fun)
    def pure(*pure_args: Any, **pure_kwargs: Any) -> Any:
        args, kwargs = nnx.from_tree((pure_args, pure_kwargs), ctxtag=tag, is_inner=True)
        out = fun(*args, **kwargs)
        kept_args, kept_kwargs = extract.clear_non_graph_nodes((args, kwargs))
        return nnx.to_tree((kept_args, kept_kwargs, out), ctxtag=tag)

    return ObjectStep(virtualize_pure(pure, **options), tag)
