"""`virtualize` for `flax.nnx` steps, which take modules and optimizers and mutate them in place.

Knows how nnx turns objects into pytrees and back (as `nnx.jit` does). Must not know jaxprs or placements.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from vnode.errors import VnodeError
from vnode.placement.placement import Placement
from vnode.step.compile_ahead import Preparation, warm_up_tasks
from vnode.step.executor import Executor
from vnode.step.protocol import P, R, Step
from vnode.step.resolved import Resolved
from vnode.step.virtual import VirtualStep, prepare_steps
from vnode.tracebacks import remove_frames
from vnode.transform import virtualize as virtualize_pure

try:
    from flax import nnx
    from flax.nnx import extract
except ImportError as error:
    raise ImportError("vnode.nnx needs flax: pip install 'vnode[flax]'") from error

__all__ = ["ObjectStep", "virtualize"]


def __dir__() -> list[str]:
    return __all__


class ObjectStep(Step[P, R]):
    """A virtualized nnx step; made by `virtualize`. Called like the step, it updates the objects in place."""

    def __init__(self, step: Step, tag: object, fun: Callable[..., Any], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._tag = tag
        self._fun = fun
        self._options = options

    @property
    def placement(self) -> Placement:
        """The placement of the nodes."""
        return self._step.placement

    def on(self, devices: Any, *, counts: Sequence[int] | None = None) -> ObjectStep[P, R]:
        """The same step on other devices; see `VirtualStep.on`."""
        return ObjectStep(self._step.on(devices, counts=counts), self._tag, self._fun, self._options)

    def put(self, tree: Any) -> Any:
        """Places a state; see `VirtualStep.put`."""
        return self._step.put(tree)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with nnx.update_context(self._tag):
                pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=self._tag)
                pure = self._step(*pure_args, **pure_kwargs)
                return nnx.from_tree(pure, ctxtag=self._tag, is_inner=False)[2]
        except Exception as error:
            remove_frames(error)
            raise

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
            return lambda: executor.keep_compiled(lowered.compile())

        with self.resolved(args, kwargs) as here:
            steps = here.step.steps_on(placements)
            return prepare_steps(steps, [compiler(step.executor, here) for step in steps])

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
            steps = here.step.steps_on(placements)
            runs = [functools.partial(run, step.executor) for step in steps]
            return prepare_steps(steps, warm_up_tasks(runs, here.args, here.kwargs))

    def functional(self, objects: Any) -> tuple[Step, Any, Callable[[Any], Any]]:
        """The same step on the objects' arrays, for a loop that keeps, copies and saves a state.

        Args:
          objects: the step's arguments before the batch: a tuple of them, or the only one.

        Returns:
          The step as ``(arrays, batch) -> (arrays, metrics)``; the arrays, a nested dictionary; and a function that
          puts arrays into the objects and returns these.
        """
        given = objects if isinstance(objects, tuple) else (objects,)
        structure, state = nnx.split(given)
        axes = self._options.get("in_axes", (*(None for _ in given), 0))
        name = named_batch(axes) if isinstance(axes, Mapping) else None

        @functools.wraps(self._fun)
        def on_arrays(arrays: Any, batch: Any) -> tuple[Any, Any]:
            own = nnx.merge(structure, restored(state, arrays))
            metrics = self._fun(*own, batch) if name is None else self._fun(*own, **{name: batch})
            after, arrays = nnx.split(own)
            if after != structure:
                raise VnodeError(
                    "the step changed the structure of its objects, not only their values.",
                    remedies=["create all of their variables before the run: one call of the step does that"],
                )
            return nnx.to_pure_dict(arrays), metrics

        def update(arrays: Any) -> Any:
            nnx.update(given, restored(state, arrays))
            return objects

        donates = {"donate_argnums": 0} if self._options.get("donate_argnums", ()) != () else {}
        entry = axes if isinstance(axes, int) else axes[len(given) if name is None else name]
        options = {**self._options, "in_axes": (None, entry), **donates}
        step = virtualize_pure(on_arrays, **options)
        known = isinstance(self._step, VirtualStep)  # otherwise the number of nodes is still to be found
        return step.on(self._step.placement) if known else step, nnx.to_pure_dict(state), update

    @contextlib.contextmanager
    def resolved(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, choose: bool = True) -> Iterator[Resolved]:
        """The step on pytrees of arrays, and its arguments as pytrees; the objects stay as they are."""
        copies = nnx.clone((tuple(args), dict(kwargs)))
        with nnx.update_context(self._tag):
            pure_args, pure_kwargs = nnx.to_tree(copies, ctxtag=self._tag)
            with self._step.resolved(pure_args, pure_kwargs, choose=choose) as here:
                yield here


def named_batch(axes: Mapping[str, Any]) -> str:
    """The only argument that `in_axes` names.

    Raises:
      VnodeError: it names several.
    """
    if len(axes) != 1:
        raise VnodeError(
            "a loop passes the step one batch, but in_axes names several.",
            facts=[f"in_axes = {dict(axes)!r}"],
            remedies=["take one argument that is a dictionary of batches: in_axes={'batch': 0}"],
        )
    (name,) = axes
    return name


def restored(like: Any, arrays: Any) -> Any:
    """The state of objects with other arrays in it."""
    state = nnx.merge_state(like)  # a copy, whose variables may be written to
    nnx.replace_by_pure_dict(state, arrays)
    return state


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

    return ObjectStep(virtualize_pure(pure, **options), tag, fun, options)
