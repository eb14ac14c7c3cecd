"""The interface of every virtualized step: on arrays or a framework's objects, with V given or to be found.

Knows the names of the methods. Must not know how any of them is done.
"""

from __future__ import annotations

import abc
import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from vnode.errors import Bound, VnodeError
from vnode.placement.placement import Placement
from vnode.step.resolved import Resolved
from vnode.tracebacks import api_boundary

if TYPE_CHECKING:
    from vnode.report.step_report import Report
    from vnode.step.compile_ahead import Preparation

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class Step(Bound, abc.ABC, Generic[P, R]):
    """A virtualized step."""

    @property
    @abc.abstractmethod
    def placement(self) -> Placement:
        """Where the nodes live."""

    @abc.abstractmethod
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step."""

    @abc.abstractmethod
    def on(self, devices: Any, *, counts: Sequence[int] | None = None) -> Step[P, R]:
        """The same step on other devices."""

    @abc.abstractmethod
    def put(self, tree: Any) -> Any:
        """Places a state on the placement's devices."""

    @abc.abstractmethod
    def prepare(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """Compiles the step for other placements in the background."""

    @abc.abstractmethod
    def warm_up(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """As `prepare`, and runs each program once in the background, with a copy of the arguments."""

    @abc.abstractmethod
    def resolved(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, choose: bool = True
    ) -> contextlib.AbstractContextManager[Resolved]:
        """A context with the step on arrays, with a number of nodes, and its arguments.

        Args:
          args: arguments of a call, arrays or `jax.ShapeDtypeStruct`s; they are not changed. Without any arguments,
            those of the last call.
          kwargs: keyword arguments.
          choose: whether a step without a number of nodes chooses it for these arguments.
        """

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step without running it, as ``jax.jit(f).lower``.

        Args:
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s; by default of the shapes of the last ones for
            which the step was compiled.
          **kwargs: keyword arguments of the step.

        Raises:
          BatchError: no arguments are given, and the step has not been called.
          PlacementError: the placement has several groups, hence several programs.
        """
        with self.resolved(args, kwargs) as here:
            executor = here.step.executor
            lower = executor.lower if args or kwargs else executor.lower_for  # the last ones may live elsewhere
            return lower(here.args, here.kwargs)

    @api_boundary
    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Describes the virtualized step: its split arguments, hoisted equations, accumulators, passes and couplings.

        Args:
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s; by default of the shapes of the last ones for
            which the step was compiled.
          **kwargs: keyword arguments of the step.

        Returns:
          A report; print it.

        Raises:
          BatchError: no arguments are given, and the step has not been called.
        """
        from vnode.step.explain import reports

        with self.resolved(args, kwargs) as here:
            (found,) = reports(here, [here.step.placement])
            return found

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(self: Step[Concatenate[Any, Q], R], instance: object, owner: Any = None) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A step defined in a class is a method."""
        return self if instance is None else types.MethodType(self, instance)


def step_and_arguments(step: Any, args: Sequence[Any], asks: str, remedy: str) -> tuple[Step, tuple[Any, ...]]:
    """A virtualized step and its arguments; the instance is one of them where the step is a method of a class.

    Args:
      step: the user's step, maybe a bound method.
      args: the user's arguments.
      asks: the name of the function that takes the step.
      remedy: an example of its call.

    Raises:
      VnodeError: it is no virtualized step.
    """
    if isinstance(step, types.MethodType):
        step, args = step.__func__, (step.__self__, *args)
    if not isinstance(step, Step):
        raise VnodeError(f"{asks} takes a virtualized step, not {step!r:.80}.", remedies=[remedy])
    return step, tuple(args)
