"""The user's function, the options of `virtualize`, and a call's arguments -> a function of arrays for the pipeline.

    StepSpec(fun, options, in_axes=(None, 0), ...)
    spec.call((state, batch), {}).axes     ->  [None, None, 0]: which arrays carry examples, and along which dimension
    spec.flatten(call, output)             ->  the function of arrays that the pipeline traces

Knows the user's function, its signature and `in_axes`. Must not know devices, programs, or who runs them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from vnode.errors import VnodeError
from vnode.step.argument_checks import check_signature, positional_names, takes_any
from vnode.step.call import Call, OutputTree, with_static
from vnode.step.pipeline import NO_PLAN, FlatStep, Options, PlanChoices
from vnode.step.result_layouts import Specs, result_specs
from vnode.step.uneven_state import find_uneven_state


@dataclasses.dataclass(frozen=True, eq=False)
class StepSpec:
    """A step on any devices: the user's function, the options of `virtualize`, and the choices of a plan.

    Attributes:
      fun: the function.
      options: of `virtualize`.
      in_axes: which dimension of each argument carries the examples.
      donate_argnums: positions of donated arguments.
      static_argnums: positions of arguments that are compile-time constants.
      static_argnames: names of such, where they are given by keyword.
      plan: the choices of a plan.
    """

    fun: Callable[..., Any]
    options: Options
    in_axes: Any
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    plan: PlanChoices = NO_PLAN

    @property
    def name(self) -> str:
        """The name of the step, for messages."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        """A call with these arguments.

        Raises:
          TypeError: the function does not take so many, or wants more.
          BatchError: as `Call.from_arguments`.
        """
        in_order = isinstance(self.in_axes, tuple | list)
        if isinstance(self.in_axes, Mapping) or (in_order and len(self.in_axes) > len(args)):
            check_signature(self.fun, args, kwargs, self.name)
        static = self.with_static(args, kwargs)
        return Call.from_arguments(*static, self.in_axes, self.positional, self.options.virtual_nodes)

    @functools.cached_property
    def positional(self) -> tuple[str, ...]:
        """The names of the function's positional parameters; empty if it has no signature."""
        return positional_names(self.fun)

    def bind_positional(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Moves a batch that is passed by keyword to its position, with the arguments before it, if possible.

        So there is one program for both ways. If the batch is a keyword-only parameter, and a loop passes it by
        position, it becomes a keyword argument.
        """
        names, kwargs = self.positional, dict(kwargs)
        if isinstance(self.in_axes, Mapping):
            batched = [i for i, name in enumerate(names) if name in self.in_axes]
            keywords = [name for name in self.in_axes if name not in names and name not in kwargs]
            if len(args) == len(names) + 1 and len(keywords) == 1 and not takes_any(self.fun):
                args, kwargs = args[:-1], {**kwargs, keywords[0]: args[-1]}
        else:
            axes = self.in_axes if isinstance(self.in_axes, tuple | list) else ()
            batched = [i for i, entry in enumerate(axes) if entry is not None]
        for i in range(len(args), max(batched, default=-1) + 1):
            if i >= len(names) or names[i] not in kwargs:
                break
            args = (*args, kwargs.pop(names[i]))
        return args, kwargs

    def check_positional(self, args: Sequence[Any], kwargs: Mapping[str, Any], purpose: str) -> None:
        """Checks that all arguments are passed by position.

        Raises:
          VnodeError: some can be passed by keyword only.
        """
        _, named = self.bind_positional(tuple(args), kwargs)
        if named:
            raise VnodeError(
                f"{purpose} takes steps whose arguments are positional.",
                facts=[f"{self.name!r} takes {', '.join(named)} by keyword only"],
                remedies=["a function around it: vnode.virtualize(lambda state, batch: step(state, batch=batch), ...)"],
            )

    def with_static(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with compile-time constants as structure."""
        return with_static(args, kwargs, self.static_argnums, self.static_argnames, self.positional)

    def flatten(
        self, call: Call, output: OutputTree, leaves: Sequence[Any] | None = None, specs: Specs = ()
    ) -> FlatStep:
        """The step as a function of a call's arrays, or of `leaves`; `output` records the structure of the result."""
        given = call.leaves if leaves is None else leaves
        rooms = find_uneven_state(call, output, self.options.patterns, self.unsplit_positions)
        after = functools.partial(self.result_specs, call, output, specs) if any(specs) else None
        function = call.flat_function(self.fun, output)
        return FlatStep(function, given, call.axes, call.size, self.options, specs, rooms, after, call.parts, self.plan)

    @staticmethod
    def result_specs(call: Call, output: OutputTree, specs: Specs, types: Sequence[Any]) -> list[PartitionSpec | None]:
        """The specs of the arrays that a call returns, given their types; None where they are unknown."""
        args, _ = jax.tree.unflatten(call.treedef, call.leaves)
        return result_specs(output.unflatten(types), args, specs)

    def splits_keyword(self, name: str) -> bool:
        """Whether a keyword argument is split."""
        if isinstance(self.in_axes, Mapping):
            return self.in_axes.get(name) is not None
        return name in self.positional and dict(zip(self.positional, self.axes, strict=False)).get(name) is not None

    @property
    def has_one_state(self) -> bool:
        """Whether exactly one argument is not split, by `in_axes`."""
        count = len(self.positional) if isinstance(self.in_axes, Mapping) else len(self.axes)
        return count > 0 and len(self.unsplit_positions(count)) == 1

    @functools.cached_property
    def axes(self) -> Sequence[Any]:
        """The entries of `in_axes` for positional arguments; empty if it is one integer for all."""
        if isinstance(self.in_axes, Mapping):
            return [self.in_axes.get(name) for name in self.positional]
        return self.in_axes if isinstance(self.in_axes, tuple | list) else ()

    def unsplit_positions(self, count: int) -> list[int]:
        """The positions of the unsplit arguments, among `count` arguments."""
        axes = (self.in_axes,) * count if isinstance(self.in_axes, int) else self.axes
        return [i for i in range(count) if i not in self.static_argnums and (i >= len(axes) or axes[i] is None)]
