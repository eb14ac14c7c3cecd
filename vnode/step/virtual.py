"""A step on virtual nodes: called like the user's, compiled per placement.

Knows `jax.jit`, calls and devices. Must not know jaxprs: the pipeline does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vnode.analysis.schedule import Schedule
from vnode.errors import BatchError, PlacementError, layout_message
from vnode.placement.layout import Layout
from vnode.placement.leaves import is_array
from vnode.placement.placement import Placement, device_list, even_counts
from vnode.placement.sharded import ShardedBatch, abstract_batch, is_sharded_batch, whole_batches
from vnode.placement.transfer import (
    committed_to,
    partition,
    target_sharding,
    to_placement,
    tracing,
    transferred,
    typed_sharding,
)
from vnode.report.report import Reduction, Report, report
from vnode.runtime.groups import GroupProgram
from vnode.step.ahead import Preparation, warm_ups
from vnode.step.arguments import OutputTree, StaticLeaf, Statics, batch_axes, batch_size, unwrap
from vnode.step.pipeline import Analysis, Options, abstract, analyse, evaluate, program_of_groups

NO_MESH = jax.sharding.AbstractMesh((), ())


class VirtualStep:
    """A step on virtual nodes; made by `virtualize`.

    Calling it runs the step. It composes with `jax.jit`, `jax.lax.scan`, `jax.eval_shape` and `jax.vmap`.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Options,
        placement: Placement | None,
        in_axes: Any,
        donate_argnums: tuple[int, ...],
        static_argnums: tuple[int, ...],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._in_axes = in_axes
        self._donate_argnums = donate_argnums
        self._static_argnums = static_argnums
        self._fun = fun
        self._options = options
        self._placement = placement
        self._family = Family()
        self._has_statics = False
        self._moves = False
        self._seen: set[int] = set()
        self._traced = False
        self._group_programs: dict[Any, tuple[GroupProgram, Callable[..., list[Any]], OutputTree]] = {}
        self._preparation: Preparation | None = None
        self._prepared: list[Any] = []  # or jax would forget them
        self._whole_positions: dict[int, list[int]] = {}
        if placement is not None:
            if placement.virtual_nodes != options.virtual_nodes:
                raise PlacementError(
                    f"the placement is for {placement.virtual_nodes} nodes, the step has {options.virtual_nodes}"
                )
            check_lanes(placement, options.lane)
            self._family.members[placement] = self
        self._jit = jax.jit(named(self._whole, fun), donate_argnums=donate_argnums, static_argnums=static_argnums)
        self._static_jit = jax.jit(
            named(self._from_parts, fun), static_argnums=0, donate_argnums=tuple(i + 1 for i in donate_argnums)
        )

    @property
    def options(self) -> Options:
        """What was asked of `virtualize`."""
        return self._options

    @property
    def placement(self) -> Placement:
        """Where the nodes live."""
        if self._placement is None:
            self._placement = Placement(self._options.virtual_nodes, counts=self._counts(len(jax.devices())))
            self._family.members[self._placement] = self
        return self._placement

    def on(self, devices: Any, *, counts: Sequence[int] | None = None) -> VirtualStep:
        """The same step on other devices.

        Args:
          devices: a `Placement`, a `jax.sharding.Mesh` with the placement's axis, or a sequence of devices.
          counts: nodes on each device; as even as possible by default.

        Returns:
          A `VirtualStep`. Asked twice for the same placement it returns the same object, with its compiled programs.
        """
        if isinstance(devices, Placement):
            if counts is not None:
                raise PlacementError("a Placement has counts of its own: give counts with devices only")
            placement = devices
        else:
            mesh = isinstance(devices, jax.sharding.Mesh)
            devices = devices if mesh else device_list(devices)
            size = devices.shape.get(self.placement.axis, 1) if mesh else len(devices)
            placement = self.placement.resize(devices, self._counts(size) if counts is None else counts)
        members = self._family.members
        if placement not in members:
            sibling = VirtualStep(
                self._fun, self._options, placement, self._in_axes, self._donate_argnums, self._static_argnums
            )
            sibling._family = self._family
            members[placement] = sibling
        return members[placement]

    def with_nodes(self, virtual_nodes: int, template: Placement) -> VirtualStep:
        """The same step on another number of nodes, which is another program with another result, by rounding.

        Args:
          virtual_nodes: V.
          template: the devices, and in which proportions they hold nodes.

        Returns:
          A `VirtualStep` that knows nothing of this one.
        """
        options = dataclasses.replace(self._options, virtual_nodes=virtual_nodes)
        if template.even:
            counts = even_counts(virtual_nodes, template.size, options.lane)
        else:
            bounds = [virtual_nodes * start // template.virtual_nodes for start in template.starts]
            counts = [stop - start for start, stop in zip(bounds, [*bounds[1:], virtual_nodes], strict=True)]
        if len(template.groups) > 1:
            groups = [list(group.mesh.devices.flat) for group in template.groups]
            placement = Placement(virtual_nodes, groups=groups, counts=counts, axis=template.axis)
        else:
            placement = Placement(virtual_nodes, mesh=template.mesh, counts=counts, axis=template.axis)
        return VirtualStep(self._fun, options, placement, self._in_axes, self._donate_argnums, self._static_argnums)

    @property
    def least_nodes(self) -> int:
        """The fewest nodes that it can have: one for each lane."""
        return self._options.lanes or 1

    def prepare(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """Compiles the step for other placements in a background thread, so that `on` them it starts at once.

        A call of the step on a placement whose program is being compiled waits for it. Settings that jax keeps per
        thread (``with jax.enable_x64(True)``) do not reach the thread; those of `jax.config.update` do.

        Args:
          placements: what `on` takes, or several such.
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s; by default of the shapes of the last ones for
            which the step was compiled.
          **kwargs: keyword arguments of the step.

        Returns:
          A handle: to wait, to ask whether programs are there, and how long they took.

        Raises:
          BatchError: no arguments are given, and the step has not been called.
          PlacementError: as for `on`.

        Example:
          >>> import jax.numpy as jnp, vnode
          >>> step = vnode.virtualize(lambda w, x: w - (x @ w).mean(), virtual_nodes=4)
          >>> step(jnp.ones(3), jnp.ones((8, 3))).shape
          (3,)
          >>> step.prepare(step.placement.resize(jax.devices()[:1])).wait().done()
          True
        """
        steps = self._members(placements)
        if not args and not kwargs:
            if self._family.last is None:
                raise BatchError(
                    "prepare does not know the shapes of the step's arguments: call the step once before, "
                    "or give them, arrays or jax.ShapeDtypeStructs: step.prepare(placements, state, batch)"
                )
            args, kwargs = self._family.last
        args, kwargs = described((args, kwargs))
        return prepared(steps, [functools.partial(step.compile_for, *args, **kwargs) for step in steps])

    def warm_up(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """As `prepare`, and runs each program once in the background, with a copy of the arguments.

        XLA leaves some work to a program's first run (kernels for matrix products on CPUs, loading on GPUs), which may
        take as long as a few steps. What the run returns is thrown away. It takes the memory of another state on the
        devices in question, and their time; prints and callbacks of the step happen once more.

        Args:
          placements: what `on` takes, or several such; groups of devices too.
          *args: arguments of the step, arrays.
          **kwargs: keyword arguments of the step.

        Returns:
          As for `prepare`.

        Raises:
          BatchError: no arguments are given, or shapes only.
          PlacementError: as for `on`.

        Example:
          >>> import jax.numpy as jnp, vnode
          >>> step = vnode.virtualize(lambda w, x: w - (x @ w).mean(), virtual_nodes=4)
          >>> step.warm_up(jax.devices()[:1], jnp.ones(3), jnp.ones((8, 3))).wait().done()
          True
        """
        steps = self._members(placements)
        return prepared(steps, warm_ups([step.run_copy for step in steps], args, kwargs))

    def _members(self, placements: Any) -> list[VirtualStep]:
        """The step on each of several placements, or on one."""
        single = isinstance(placements, Placement | jax.sharding.Mesh)
        wanted = [placements] if single else list(placements)
        if any(hasattr(entry, "platform") for entry in wanted):
            wanted = [wanted]
        return [self.on(entry) for entry in wanted]

    def run_copy(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step once with arguments of its own, which it may donate, beside what else it is called with."""
        if len(self.placement.groups) > 1:
            return self._on_groups(args, kwargs)
        self.compile_for(*args, **kwargs)
        return self._call(self._placed(args), kwargs)

    def compile_for(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles the step as it will be called; a call with such arguments then finds the program.

        Args:
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s; those that live elsewhere will have been
            transferred.
          **kwargs: keyword arguments of the step.

        Returns:
          The program, of which `memory_analysis` can be asked.
        """
        self._prepared.append(self.lower_for(*args, **kwargs).compile())
        return self._prepared[-1]

    def lower_for(self, *args: Any, **kwargs: Any) -> Any:
        """As `lower`, for arguments that live elsewhere and will have been transferred here."""
        args, kwargs = described((args, kwargs))
        here, wholes = set(self.placement.devices), self._wholes(len(args))
        in_shares = PartitionSpec(self.placement.axis)

        def arrive(leaf: Any, whole: bool, split: bool) -> Any:
            if isinstance(leaf, ShardedBatch) or (split and partition(leaf) == in_shares):
                return abstract_batch(leaf.shape, leaf.dtype, self.placement)
            if not isinstance(leaf, jax.ShapeDtypeStruct) or not (whole or leaf.sharding):
                return leaf
            if leaf.sharding and leaf.sharding.device_set == here and not typed_sharding(leaf):
                return leaf
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, weak_type=leaf.weak_type, sharding=target_sharding(leaf, self.placement)
            )

        placed = [
            jax.tree.map(
                functools.partial(arrive, whole=i in wholes, split=i not in wholes), arg, is_leaf=is_sharded_batch
            )
            for i, arg in enumerate(args)
        ]
        kwargs = jax.tree.map(functools.partial(arrive, whole=False, split=False), kwargs, is_leaf=is_sharded_batch)
        return self.lower(*placed, **kwargs)

    def cut(self, nodes: int, placement: Placement | None, *args: Any) -> tuple[VirtualStep, tuple[Any, ...]]:
        """The step for the first nodes of the batch only; their size stays.

        Args:
          nodes: how many; at most the number of virtual nodes.
          placement: of these nodes; by default on all of ``jax.devices()``.
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s.

        Returns:
          The step, and its arguments: batched ones hold the examples of the first nodes, the others are whole.
        """
        args = whole_batches(args)
        static, parts = self._split(args, {})
        leaves = [leaf for part in parts for leaf in part]
        axes = static.dynamic(batch_axes(self._in_axes, args, {}))
        size = batch_size(leaves, axes, static.dynamic(jax.tree.leaves_with_path((args, {}))))
        stop = min(nodes * -(-size // self._options.virtual_nodes), size)
        first = iter(
            [leaf if axis is None else leading(leaf, axis, stop) for leaf, axis in zip(leaves, axes, strict=True)]
        )
        options = dataclasses.replace(self._options, virtual_nodes=nodes)
        step = VirtualStep(self._fun, options, placement, self._in_axes, self._donate_argnums, self._static_argnums)
        return step, static.merge_inputs([[next(first) for _ in part] for part in parts])[0]

    def compiled(self, *args: Any) -> tuple[jax.stages.Compiled, tuple[Any, ...]]:
        """Compiles the step without running it, and brings arguments to where the compiled program wants them.

        Args:
          *args: arguments of the step.

        Returns:
          The compiled program, and what to call it with. What the step donates is a copy.
        """
        args = transferred(self._placed(whole_batches(args)), self.placement)
        compiled = self.lower(*args).compile()
        dynamic = self._dynamic(args)
        inputs = dynamic if all(map(is_array, jax.tree.leaves(dynamic))) and not self._has_statics else None
        if inputs is None:
            inputs = self._split(args, {})[1]
        leaves, treedef = jax.tree.flatten(tuple(inputs))
        shardings = jax.tree.leaves(compiled.input_shardings[0], is_leaf=lambda leaf: leaf is None)
        placed = [
            leaf if sharding is None else jax.device_put(leaf, sharding, may_alias=False)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
        return compiled, jax.tree.unflatten(treedef, placed)

    def _counts(self, devices: int) -> list[int] | None:
        """Nodes of each device, in whole lanes."""
        return even_counts(self._options.virtual_nodes, devices, self._options.lane) if devices else None

    def put(self, tree: Any) -> Any:
        """Places a state on the placement's devices, directly from those where it is.

        Args:
          tree: any pytree. Its arrays stay sharded over mesh axes that the placement has too, and are replicated
            otherwise; leaves that are not arrays stay as they are.

        Returns:
          The same tree.
        """
        return jax.tree.map(lambda leaf: to_placement(leaf, self.placement) if is_array(leaf) else leaf, tree)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A step defined in a class is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.placement.groups) > 1:
            return self._on_groups(args, kwargs)
        for i in self._wholes(len(args)):
            if id(args[i]) not in self._seen:
                args = self._placed(args)
                break
        if self._preparation is not None:
            self._await()
        results = self._call(args, kwargs)
        if self._traced:
            self._traced = False
            if not tracing():
                self._family.last = described((args, kwargs))
        parts = results.values() if isinstance(results, dict) else results if isinstance(results, tuple | list) else ()
        self._seen = {id(results), *map(id, args), *map(id, parts)}
        return results

    def _on_groups(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call on devices of several programs."""
        static, parts = self._split(args, kwargs)
        leaves = [leaf for part in parts for leaf in part]
        if tracing():
            raise PlacementError(
                layout_message(
                    "a step on groups of devices is several programs, and cannot be part of another one.",
                    facts=[repr(self.placement)],
                    remedies=[
                        "call it outside of jax.jit, jax.grad, jax.vmap and lax.scan",
                        "or put it on devices of one kind: step.on(jax.devices()[:1])",
                    ],
                )
            )
        key = (static, tuple((abstract(leaf), getattr(leaf, "placement", None)) for leaf in leaves))
        if key not in self._group_programs:
            returned = OutputTree()
            fun, _, axes, size = self._flatten(static, parts, returned)
            understood = functools.partial(self._understood, axes=axes, size=size)
            made = program_of_groups(
                fun, understood(leaves), axes, size, self._options, self.placement, name_of(self._fun)
            )
            self._group_programs[key] = made, understood, returned
        program, understood, returned = self._group_programs[key]
        with jax.sharding.use_abstract_mesh(NO_MESH):
            arrays = program(understood(leaves))
        for i in self._donate_argnums:
            start = sum(map(len, parts[:i]))
            for k, leaf in enumerate(parts[i] if i < len(args) else ()):
                for array in jax.tree.leaves(leaf) if start + k not in program.returned else ():
                    if isinstance(array, jax.Array):
                        array.delete()
        return unwrap(returned.merge(arrays))

    def _await(self) -> None:
        """Waits for the program that is being compiled, or this call would compile it once more."""
        preparation, self._preparation = self._preparation, None
        # What it raised, the call itself will raise.
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):
            assert preparation is not None
            preparation.wait(self.placement)

    def _wholes(self, count: int) -> list[int]:
        """Positions of the arguments of which nothing is split, of `count`."""
        if count not in self._whole_positions:
            axes = self._in_axes if isinstance(self._in_axes, tuple | list) else (self._in_axes,) * count
            static = self._statics(count)
            self._whole_positions[count] = [
                i for i in range(count) if i not in static and (i >= len(axes) or axes[i] is None)
            ]
        return self._whole_positions[count]

    def _placed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Places arguments that are not split, so that a state that was never placed meets the same program as the
        state that the step returns. Arguments that were `_seen` in the last call are in place."""
        if tracing():
            return args
        placed = list(args)
        for i in self._wholes(len(args)):
            leaves, treedef = jax.tree.flatten(args[i])
            settled = [committed_to(leaf, self.placement) for leaf in leaves]
            if any(a is not b for a, b in zip(leaves, settled, strict=True)):
                placed[i] = jax.tree.unflatten(treedef, settled)
        return tuple(placed)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._moves:
            args, kwargs = transferred((args, kwargs), self.placement)
        if not self._has_statics:
            try:
                return self._jit(*args, **kwargs)
            except (TypeError, HasStatics):
                if all(map(is_array, jax.tree.leaves((self._dynamic(args), kwargs)))) and not self._has_statics:
                    raise
                self._has_statics = True
            except Exception:
                here = transferred((args, kwargs), self.placement)
                if not differs(here, (args, kwargs)):
                    raise
                self._moves |= any(map(typed_sharding, jax.tree.leaves((args, kwargs))))
                return self._call(*here)
        static, parts = self._split(args, kwargs)
        try:
            return unwrap(self._static_jit(static, *parts))
        except Exception:
            here = transferred((args, kwargs), self.placement)
            if not differs(here, (args, kwargs)):
                raise
            return self._call(*here)

    def _statics(self, count: int) -> set[int]:
        """Which of `count` arguments are compile-time constants."""
        return {i for i in self._static_argnums if i < count}

    def _dynamic(self, args: tuple[Any, ...]) -> list[Any]:
        static = self._statics(len(args))
        return [arg for i, arg in enumerate(args) if i not in static]

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Statics, list[list[Any]]]:
        """Separates arrays from the rest."""
        static = self._statics(len(args))
        parts: list[list[Any]] = []
        rest: list[tuple[Any, tuple[Any, ...]]] = []
        for i, arg in enumerate((*args, kwargs)):
            leaves, treedef = ([arg], None) if i in static else jax.tree.flatten(arg, is_leaf=is_sharded_batch)
            keep = [i not in static and is_array(leaf) for leaf in leaves]
            parts.append([leaf for leaf, k in zip(leaves, keep, strict=True) if k])
            rest.append((treedef, tuple(None if k else StaticLeaf(leaf) for leaf, k in zip(leaves, keep, strict=True))))
        return Statics(tuple(rest), len(args)), parts

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step without running it, as ``jax.jit(f).lower``; takes `jax.ShapeDtypeStruct`s too.

        Raises:
          PlacementError: the placement has several groups, hence several programs.
        """
        if len(self.placement.groups) > 1:
            raise PlacementError(
                layout_message(
                    "a step on groups of devices is several programs, which call for one another's results.",
                    facts=[repr(self.placement)],
                    remedies=["lower it on devices of one kind: step.on(jax.devices()[:1]).lower(...)"],
                )
            )
        if all(map(is_array, jax.tree.leaves((self._dynamic(args), kwargs)))):
            try:
                return self._jit.lower(*args, **kwargs)
            except HasStatics:
                pass
        static, parts = self._split(args, kwargs)
        return self._static_jit.lower(static, *parts)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Says what becomes of the step: what is split, hoisted and accumulated, its passes and couplings.

        Args:
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s.
          **kwargs: keyword arguments of the step.

        Returns:
          A report; print it.
        """
        return self.reports([self.placement], args, kwargs)[0]

    def reports(
        self, places: Sequence[Placement | Layout], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Report]:
        """What `explain` says for several placements, of devices that are there or not; the step is analysed once.

        Args:
          places: where its nodes would live.
          args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s.
          kwargs: keyword arguments of the step.

        Returns:
          A report for each.
        """
        made = self._analyse(tuple(args), dict(kwargs))
        reduction = Reduction(self._options.reduction, self._options.lane, self._sharded(tuple(args)))
        name = name_of(self._fun)
        return [report(made.schedule, place, name, made.couplings, reduction) for place in places]

    def layout(self, devices: int) -> Layout:
        """How `on` would spread the nodes over a number of devices, which need not be there."""
        return Layout(tuple(even_counts(self._options.virtual_nodes, devices, self._options.lane)))

    def temporary(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """Compiles the step and asks for the bytes of temporary memory that a device needs; None if jax cannot say."""
        static = self._statics(len(args))
        shapes = [arg if i in static else shapes_of(arg) for i, arg in enumerate(args)]
        analysis = self.lower(*shapes, **shapes_of(dict(kwargs))).compile().memory_analysis()
        return getattr(analysis, "temp_size_in_bytes", None)

    def _sharded(self, args: tuple[Any, ...]) -> tuple[str, ...]:
        """Leaves of arguments that are not split, but sharded over the axis of the nodes."""
        axis = self.placement.axis
        return tuple(
            f"argument {i}{jax.tree_util.keystr(path)}"
            for i in self._wholes(len(args))
            for path, leaf in jax.tree.leaves_with_path(args[i])
            if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding)
            and any(axis == name or (isinstance(name, tuple) and axis in name) for name in sharding.spec)
        )

    def batch(self, *args: Any, **kwargs: Any) -> int:
        """Examples that the arguments of a call carry (arrays or `jax.ShapeDtypeStruct`s).

        Raises:
          BatchError: they carry none, or disagree.
        """
        return self._flatten(*self._split(args, kwargs), OutputTree())[-1]

    def analyse(self, *args: Any, **kwargs: Any) -> Schedule:
        """The schedule of the step for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        return self._analyse(args, kwargs).schedule

    def _analyse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Analysis:
        return analyse(*self._flatten(*self._split(args, kwargs), OutputTree()), self._options)

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        return self._emitted(*self._split(args, kwargs), arrays_only=True)

    def _from_parts(self, static: Statics, *parts: list[Any]) -> Any:
        return self._emitted(static, parts)

    def _emitted(self, static: Statics, parts: Sequence[list[Any]], arrays_only: bool = False) -> Any:
        """What the step returns; leaves that are not arrays are `StaticLeaf`."""
        self._traced = True
        returned = OutputTree()
        fun, leaves, axes, size = self._flatten(static, parts, returned)
        leaves = self._understood(leaves, axes, size)
        with jax.sharding.use_abstract_mesh(NO_MESH):  # the placement's mesh, not the caller's, divides the step
            arrays = evaluate(fun, leaves, axes, size, self._options, self.placement)
        if arrays_only and returned.has_statics:
            self._has_statics = True
            raise HasStatics
        return returned.merge(arrays)

    def _understood(self, leaves: Sequence[Any], axes: Sequence[int | None], size: int) -> list[Any]:
        """Leaves with those in shares as one array, unless the shares are the nodes' of this placement."""
        fits = size > 1  # or nothing is split
        return [
            leaf if fits and axis == 0 and getattr(leaf, "placement", None) == self.placement else whole_batches(leaf)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]

    def _flatten(
        self, static: Statics, parts: Sequence[list[Any]], returned: OutputTree
    ) -> tuple[Callable[..., list[Any]], list[Any], list[int | None], int]:
        """The step as a function of flat arrays; its arguments, their batched dimensions, and the batch size."""
        args, kwargs = static.merge_inputs(parts)
        leaves = [leaf for part in parts for leaf in part]
        axes = static.dynamic(batch_axes(self._in_axes, args, kwargs))
        paths = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_sharded_batch)[0]

        @functools.wraps(self._fun)  # for jax's messages
        def flat(*values: Any) -> list[Any]:
            rest = iter(values)
            a, k = static.merge_inputs([[next(rest) for _ in part] for part in parts])
            return returned.split(self._fun(*a, **k))

        return flat, leaves, axes, batch_size(leaves, axes, static.dynamic(paths))


@dataclasses.dataclass
class Family:
    """A step on all placements.

    Attributes:
      members: by placement.
      last: shapes of the arguments for which one of them was traced last.
    """

    members: dict[Placement, VirtualStep] = dataclasses.field(default_factory=dict)
    last: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def prepared(steps: Sequence[VirtualStep], tasks: Sequence[Callable[[], Any]]) -> Preparation:
    """Does a task for each of several steps in the background; a call of one of them waits for its own."""
    preparation = Preparation({step.placement: task for step, task in zip(steps, tasks, strict=True)})
    for step in steps:
        step._preparation = preparation
    return preparation


def described(tree: Any) -> Any:
    """Shapes in place of arrays, with the shardings of those that are committed to devices."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=jax.typeof(leaf).weak_type, sharding=sharding)

    return jax.tree.map(describe, tree)


def leading(leaf: Any, axis: int, stop: int) -> Any:
    """The first `stop` examples of an array, or of what stands for one."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape = list(leaf.shape)
        shape[axis] = stop
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
    return leaf[(slice(None),) * (axis % len(leaf.shape)) + (slice(stop),)]


def check_lanes(placement: Placement, lane: int) -> None:
    """Refuses a placement that divides a lane.

    Raises:
      PlacementError: it does.
    """
    if any(start % lane for start in placement.starts if start < placement.virtual_nodes):
        fitting = even_counts(placement.virtual_nodes, placement.size, lane)
        raise PlacementError(
            layout_message(
                f"the placement divides a lane: each device must hold whole lanes of {lane} nodes.",
                facts=[f"counts = {list(placement.counts)}"],
                remedies=[f"counts={fitting}, as step.on(devices) chooses", "more lanes, or lanes=None"],
            )
        )


def named(program: Callable[..., Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compilers and profiles call by the name of the user's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)

    run.__name__ = run.__qualname__ = name_of(fun)
    return run


def name_of(fun: Callable[..., Any]) -> str:
    """What the user calls a step."""
    return getattr(fun, "__name__", type(fun).__name__)


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes in place of arrays, wherever these are."""

    def shape_of(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array | np.ndarray) else leaf

    return jax.tree.map(shape_of, tree)


def differs(a: Any, b: Any) -> bool:
    """Whether any leaf of two trees is another object."""
    mine, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(mine) != len(others) or any(x is not y for x, y in zip(mine, others, strict=True))


class HasStatics(Exception):
    """The step returned leaves that are not arrays; they are kept outside the compiled program."""
