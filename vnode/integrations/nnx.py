"""`virtualize` for `flax.nnx` steps, which take modules and optimizers and mutate them in place.

Knows how nnx turns objects into pytrees and back (as `nnx.jit` does). Must not know jaxprs or placements.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from flax import nnx
from flax.nnx import extract

from vnode.placement.placement import Placement
from vnode.step.ahead import Preparation, warm_ups
from vnode.step.executor import Executor
from vnode.step.protocol import P, R, Resolved, Step
from vnode.step.virtual import prepared
from vnode.transform import virtualize as virtualize_pure


class ObjectStep(Step[P, R]):
    """A virtualized nnx step; made by `virtualize`. Called like the step, it updates the objects in place."""

    def __init__(self, step: Step, tag: object) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._tag = tag

    @property
    def placement(self) -> Placement:
        """Where the nodes live."""
        return self._step.placement

    def on(self, devices: Any, *, counts: Sequence[int] | None = None) -> ObjectStep[P, R]:
        """The same step on other devices; see `VirtualStep.on`."""
        return ObjectStep(self._step.on(devices, counts=counts), self._tag)

    def put(self, tree: Any) -> Any:
        """Places a state; see `VirtualStep.put`."""
        return self._step.put(tree)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with nnx.update_context(self._tag):
            pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=self._tag)
            pure = self._step(*pure_args, **pure_kwargs)
            return nnx.from_tree(pure, ctxtag=self._tag, is_inner=False)[2]

    def __repr__(self) -> str:
        return f"ObjectStep({self._step!r})"

    def prepare(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """Compiles the step for other placements; it is traced at once, and compiled in a background thread.

        Args:
          placements: what `on` takes, or several such.
          *args: arguments of the step.
          **kwargs: keyword arguments of the step.

        Returns:
          A handle; see `VirtualStep.prepare`.
        """

        def compiler(executor: Executor, here: Resolved) -> Callable[[], Any]:
            lowered = executor.lower_for(here.args, here.kwargs)
            return lambda: executor.keep(lowered.compile())

        with self.resolved(args, kwargs) as here:
            steps = here.step.members(placements)
            return prepared(steps, [compiler(step.executor, here) for step in steps])

    def warm_up(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """As `prepare`, and runs the step there once with copies of the objects; see `VirtualStep.warm_up`.

        Args:
          placements: what `on` takes, or several such.
          *args: arguments of the step.
          **kwargs: keyword arguments of the step.

        Returns:
          A handle; see `VirtualStep.prepare`.
        """

        def run(executor: Executor, *args: Any, **kwargs: Any) -> Any:
            with nnx.update_context(self._tag):
                return executor.run_copy(args, kwargs)

        with self.resolved(args, kwargs) as here:
            steps = here.step.members(placements)
            runs = [functools.partial(run, step.executor) for step in steps]
            return prepared(steps, warm_ups(runs, here.args, here.kwargs))

    @contextlib.contextmanager
    def resolved(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, choose: bool = True) -> Iterator[Resolved]:
        """The step on pytrees of arrays, and what the arguments are as such; the objects stay as they are."""
        copies = nnx.clone((tuple(args), dict(kwargs)))
        with nnx.update_context(self._tag):
            pure_args, pure_kwargs = nnx.to_tree(copies, ctxtag=self._tag)
            with self._step.resolved(pure_args, pure_kwargs, choose=choose) as here:
                yield here


@overload
def virtualize(fun: Callable[P, R], **options: Any) -> ObjectStep[P, R]: ...


@overload
def virtualize(fun: None = None, **options: Any) -> Callable[[Callable[P, R]], ObjectStep[P, R]]: ...


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
