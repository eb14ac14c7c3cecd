"""A step on virtual nodes: called like the user's, on any devices.

Knows placements, and who runs a step on one of them. Must not know jaxprs, or how programs are made.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vnode.errors import BatchError, PlacementError
from vnode.placement.leaves import shapes_of
from vnode.placement.patterns import Exactly, Patterns, axes_of, check_axes, check_matched
from vnode.placement.placement import Placement, even_counts
from vnode.placement.process_arrays import put
from vnode.placement.sharded import whole_batches
from vnode.placement.trace_context import call_in_mesh, current_mesh, with_jit, without_mesh
from vnode.placement.transfer import tracing
from vnode.placement.world import world
from vnode.step.argument_checks import check_placed, check_values
from vnode.step.compile_ahead import Preparation, warm_up_tasks
from vnode.step.executor import Executor
from vnode.step.likely_mistakes import explain_failure, warn_of_typos, warn_of_unused, warn_of_waste
from vnode.step.pipeline import Options, outer_devices
from vnode.step.protocol import P, R, Step
from vnode.step.resolved import Resolved
from vnode.step.retraces import Retraces
from vnode.step.spec import StepSpec
from vnode.step.uneven_state import put_by_name, restore_for_placement, restore_shapes
from vnode.tracebacks import api_boundary, remove_frames

MAX_PLACEMENTS = 16
"""The number of placements whose programs are kept; the least recently used are dropped."""


class VirtualStep(Step[P, R]):
    """A step on virtual nodes; made by `virtualize`.

    Calling it runs the step. It composes with `jax.jit`, `jax.lax.scan`, `jax.eval_shape` and `jax.vmap`.

    Attributes:
      spec: the step on any devices.
      family: the step on all placements.
    """

    def __init__(self, spec: StepSpec, placement: Placement | None, family: StepFamily | None = None) -> None:
        world()  # from here on other processes learn of this process's end
        functools.update_wrapper(self, spec.fun)
        self.spec = spec
        self._placement = placement
        self._chosen = placement is not None  # by the user, and not by default
        self._executor: Executor | None = None
        self.family = StepFamily() if family is None else family
        self._preparation: Preparation | None = None
        if placement is not None:
            if placement.virtual_nodes != spec.options.virtual_nodes:
                raise PlacementError(
                    f"the placement is for {placement.virtual_nodes} nodes, the step has {spec.options.virtual_nodes}"
                )
            check_lanes(placement, spec.options.lane)
            self.family.add(self)

    @property
    def options(self) -> Options:
        """The options of `virtualize`."""
        return self.spec.options

    @property
    def placement(self) -> Placement:
        """Where the nodes live."""
        if self._placement is None:
            self._placement = Placement(self.options.virtual_nodes, counts=self._counts(len(world().devices)))
            self.family.add(self)
        return self._placement

    @property
    def executor(self) -> Executor:
        """The programs of the step on its placement."""
        if self._executor is None:
            self.family.check(self.placement)
            self._executor = Executor(self.spec, self.placement, self.family.retraces)
        return self._executor

    def on(self, devices: Any, *, counts: Sequence[int] | None = None) -> VirtualStep[P, R]:
        """The same step on other devices.

        Args:
          devices: a `Placement`, a `jax.sharding.Mesh` with the placement's axis, a sequence of devices, or a number n
            for the first n devices. On devices, the other axes of the placement's mesh keep their sizes.
          counts: nodes on each device; as even as possible by default.

        Returns:
          A `VirtualStep`. Asked twice for the same placement it returns the same object, with its compiled programs;
          those of the 16 placements that were asked for last are kept.

        Raises:
          PlacementError: the other axes do not divide the devices, or as for `Placement`.
        """
        if isinstance(devices, Placement):
            if counts is not None:
                raise PlacementError("a Placement has counts of its own: give counts with devices only")
            placement = devices
        else:
            place = self.placement.arrange_devices(devices)
            size = len(place) if isinstance(place, list) else place.shape.get(self.placement.axis, 1)
            placement = self.placement.resize(place, self._counts(size) if counts is None else counts)
        return self.family.member(placement) or VirtualStep(self.spec, placement, self.family)

    def forget(self) -> None:
        """Drops the programs on this placement, whose devices are lost; all other programs stay."""
        self.family.drop(self)
        self.family.forget_shapes(self.placement)

    @api_boundary
    def prepare(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """Compiles the step for other placements in a background thread, so that `on` them it starts at once.

        A call of the step on a placement whose program is being compiled waits for it. The program is compiled under
        the caller's settings of jax, those of its thread (``with jax.enable_x64(True)``) included.

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
          >>> import jax
          >>> import jax.numpy as jnp, vnode
          >>> step = vnode.virtualize(lambda w, x: w - (x @ w).mean(), virtual_nodes=4)
          >>> step(jnp.ones(3), jnp.ones((8, 3))).shape
          (3,)
          >>> step.prepare(step.placement.resize(jax.devices()[:1])).wait().done()
          True
        """
        steps = self.steps_on(placements)
        args, kwargs = self.arguments_or_last(args, kwargs)
        args, kwargs = shapes_of((args, kwargs), sharding="committed")
        mesh = current_mesh()
        return prepare_steps(
            steps, [functools.partial(call_in_mesh, mesh, step.executor.compile_for, args, kwargs) for step in steps]
        )

    @api_boundary
    def warm_up(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """As `prepare`, and runs each program once in the background, with a copy of the arguments.

        XLA leaves some work to a program's first run (kernels for matrix products on CPUs, loading on GPUs), which may
        take as long as a few steps. The results of the run are dropped. It takes the memory of another state on the
        devices in question, and their time; prints and callbacks of the step happen once more.

        Args:
          placements: what `on` takes, or several such; groups of devices too.
          *args: arguments of the step, arrays.
          **kwargs: keyword arguments of the step.

        Returns:
          As for `prepare`. In several processes it has run by then.

        Raises:
          BatchError: no arguments are given, or shapes only.
          PlacementError: as for `on`.

        Example:
          >>> import jax.numpy as jnp, vnode
          >>> step = vnode.virtualize(lambda w, x: w - (x @ w).mean(), virtual_nodes=4)
          >>> step.warm_up(1, jnp.ones(3), jnp.ones((8, 3))).wait().done()
          True
        """
        steps, mesh = self.steps_on(placements), current_mesh()
        args, kwargs = self.spec.bind_positional(args, kwargs)

        def run(step: VirtualStep, *args: Any, **kwargs: Any) -> Any:
            return call_in_mesh(mesh, step.executor.run_copy, args, kwargs)

        preparation = prepare_steps(
            steps, warm_up_tasks([functools.partial(run, step) for step in steps], args, kwargs)
        )
        if world().has_others:  # what runs beside it in one process would run before it in another
            preparation.wait()
        return preparation

    @with_jit
    def put(self, tree: Any) -> Any:
        """Places a state on the placement's devices, directly from those where it is.

        Args:
          tree: any pytree. Its arrays stay sharded over mesh axes that the placement has too, and are replicated
            otherwise, unless the step's `partition` has a pattern for them. Other leaves stay as they are. If there are
            several processes, those of the placement's devices must call it, and those that hold the arrays.

        Returns:
          The same tree.

        Raises:
          PlacementError: several processes have different trees, or put them on different devices; or the step has one
            state, and a pattern of its `partition` matches no leaf, or none with enough dimensions.
          ProcessError: another process did not call it in time.
          VnodeError: an array was donated, or the tree has shapes without values.
        """
        check_placed(tree)
        patterns, host = self.options.patterns, self.spec.plan.host
        self.family.check(self.placement)
        if self.spec.has_one_state:  # a plan's names cover all arguments, the batch too
            check_matched([tree], tuple(each for each in patterns if not isinstance(each[0], Exactly)))
        with without_mesh():
            placed = put(restore_for_placement(tree, patterns, self.placement), self.placement)
            return put_by_name(placed, patterns, self.placement, host) if patterns or host else placed

    def get(self, tree: Any) -> Any:
        """A state, or a part of one, in its own shapes: without the padding of unevenly sharded leaves.

        Args:
          tree: a pytree, as the step returns it. The patterns of the step's `partition` match the names of its leaves.

        Returns:
          The same tree; the tree itself if no leaf is sharded unevenly.

        Raises:
          PlacementError: a leaf has the padded size of the step's `partition`, but is not known to be sharded so.
        """
        with without_mesh():
            return restore_shapes(tree, self.options.patterns)

    @contextlib.contextmanager
    def resolved(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, choose: bool = True) -> Iterator[Resolved]:
        """Itself and the arguments as they are; without any, the shapes of the last ones.

        Raises:
          BatchError: no arguments are given, and the step has not been called.
        """
        yield Resolved(self, *self.arguments_or_last(args, kwargs))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step, on the placement's devices.

        Raises:
          VnodeError: the arguments or the step are refused; subclasses are `BatchError`, `CouplingError`,
            `PlacementError` and others. Errors of the step itself are raised as jax raises them.
        """
        try:
            if kwargs or isinstance(self.spec.in_axes, Mapping):
                return self._call(*self.spec.bind_positional(args, kwargs))
            return self._call(args, kwargs)
        except Exception as error:
            remove_frames(error)
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step, with arguments bound to their positions."""
        outer = outer_devices()
        if outer is not None:
            return self._call_inside(outer, args, kwargs)
        executor = self.executor
        if self._preparation is not None:
            self._wait_for_preparation()
        try:
            results = executor(args, kwargs)
        except (TypeError, ValueError, LookupError, AttributeError, BatchError) as error:
            check_values(args, kwargs, self.spec.positional)
            if not tracing():
                explain_failure(error, self.spec, args, kwargs)
            raise
        traced, executor.traced = executor.traced, None  # at once: another thread may call the step, too
        if traced is not None:
            programs, split = traced
            if not self.family.warned:
                self.family.warned = True
                warn_of_waste(self.placement, self.options.lane, self.spec.call(args, kwargs).size, self.spec.name)
                warn_of_unused(self.spec.name, programs, split)
                warn_of_typos(self.options.coupling, programs)
            if not tracing():
                self.family.last = shapes_of((args, kwargs), sharding="committed")
        return results

    def __repr__(self) -> str:
        return f"VirtualStep({self.spec.name}, {self._placement or f'{self.options.virtual_nodes} nodes'})"

    def _call_inside(self, outer: frozenset[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step inside of another virtualized step, whose nodes then divide this one too.

        Raises:
          PlacementError: this one is for other devices, or has a ``coupling`` that would not count.
        """
        devices = frozenset(self._placement.devices if self._placement and self._chosen else ())
        if devices and outer and devices != outer:
            raise PlacementError(
                f"the virtualized step {self.spec.name!r} is called inside another one, on other devices.",
                facts=[f"outside: {len(outer)} devices", f"inside: {len(devices)} devices"],
                remedies=[
                    f"call the function that was virtualized: {self.spec.name}.__wrapped__(...)",
                    "or put both on the same devices: step.on(devices)",
                ],
            )
        if self.options.coupling != "exact":
            raise PlacementError(
                f"the virtualized step {self.spec.name!r} is called inside another one, whose options decide about "
                f"couplings: its own coupling={self.options.coupling!r} would not count.",
                remedies=[f"call the function that was virtualized: {self.spec.name}.__wrapped__(...)"],
            )
        return self.spec.fun(*args, **kwargs)

    def steps_on(self, placements: Any) -> list[VirtualStep]:
        """The step on each of several placements, or on one."""
        single = isinstance(placements, Placement | jax.sharding.Mesh | int | np.integer)
        wanted = [placements] if single else list(placements)
        if any(hasattr(entry, "platform") for entry in wanted):
            wanted = [wanted]
        return [self.on(entry) for entry in wanted]

    def _counts(self, devices: int) -> list[int] | None:
        """The number of nodes of each device, in whole lanes; None if there are no devices."""
        return even_counts(self.options.virtual_nodes, devices, self.options.lane) if devices else None

    def arguments_or_last(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments; where there are none, the shapes of those for which the step was compiled last.

        Raises:
          BatchError: it was not compiled yet.
        """
        if args or kwargs:
            return self.spec.bind_positional(tuple(args), kwargs)
        if self.family.last is None:
            raise BatchError(
                f"the arguments of {self.spec.name!r} are not known: none were passed, and it was never called.",
                remedies=[
                    "give them, arrays or jax.ShapeDtypeStructs: step.explain(state, batch), "
                    "step.prepare(placements, state, batch)",
                    "or call the step once first: its shapes are then used",
                ],
            )
        return self.family.last

    def _wait_for_preparation(self) -> None:
        """Waits for the program that is being compiled; otherwise this call would compile it again."""
        preparation, self._preparation = self._preparation, None
        # The call itself will raise the error again.
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):
            assert preparation is not None
            preparation.wait(self.placement)


class StepFamily:
    """A step on all placements.

    A step may move to devices without some of its mesh's axes; leaves are then not divided over these. Axes that no
    placement has ever had are most likely a mistake.

    Args:
      patterns: the partition of leaves over mesh axes.

    Attributes:
      last: shapes of the arguments of the last trace.
      warned: whether idle devices and padding were checked, for the first batch.
      retraces: compares the programs of all placements.
    """

    def __init__(self, patterns: Patterns = ()) -> None:
        self.unmet_patterns = patterns
        self._members: collections.OrderedDict[Placement, VirtualStep] = collections.OrderedDict()
        self.warned = False
        self.retraces = Retraces()
        self.last: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def member(self, placement: Placement) -> VirtualStep | None:
        """The step on a placement, if it is remembered."""
        found = self._members.get(placement)
        if found is not None:
            self._members.move_to_end(placement)
        return found

    def note_axes(self, placement: Placement) -> None:
        """Notes the mesh axes of a placement that the step has."""
        if all(name in placement.mesh.shape for _, spec in self.unmet_patterns for name in axes_of(spec)):
            self.unmet_patterns = ()

    def check(self, placement: Placement) -> None:
        """Checks the patterns' mesh axes.

        Raises:
          PlacementError: neither this placement nor any other one has had the pattern's axes.
        """
        check_axes(self.unmet_patterns, placement.mesh.axis_names)

    def add(self, step: VirtualStep) -> None:
        """Remembers a step, and forgets the programs of the one that was asked for longest ago."""
        self.note_axes(step.placement)
        self._members[step.placement] = step
        while len(self._members) > MAX_PLACEMENTS:
            self.drop(next(iter(self._members.values())))

    def forget_shapes(self, placement: Placement) -> None:
        """Forgets the shapes of the last arguments, if they lie on a placement's devices."""
        devices = {*placement.devices}
        leaves = jax.tree.leaves(self.last)
        if any(devices & getattr(getattr(leaf, "sharding", None), "device_set", set()) for leaf in leaves):
            self.last = None

    def drop(self, step: VirtualStep) -> None:
        """Forgets a step on a placement, and its programs."""
        self._members.pop(step.placement, None)
        if step._executor is not None:
            step._executor.clear()


def with_nodes(step: VirtualStep, virtual_nodes: int, template: Placement) -> VirtualStep:
    """The same step on another number of nodes, which is another program with another result, by rounding.

    Args:
      step: the step.
      virtual_nodes: V.
      template: the devices, and in which proportions they hold nodes.

    Returns:
      A `VirtualStep` with programs of its own.
    """
    options = dataclasses.replace(step.options, virtual_nodes=virtual_nodes)
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
    return VirtualStep(
        dataclasses.replace(step.spec, options=options), placement, StepFamily(step.family.unmet_patterns)
    )


def first_nodes(
    step: VirtualStep, nodes: int, placement: Placement | None, args: Sequence[Any]
) -> tuple[VirtualStep, tuple[Any, ...]]:
    """A step for the first nodes of the batch only; their size stays.

    Args:
      step: the step.
      nodes: how many; at most the number of virtual nodes.
      placement: of these nodes; by default on all of ``jax.devices()``.
      args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The step, and its arguments: batched ones hold the examples of the first nodes, the others are whole.
    """
    spec = step.spec
    call = spec.call(whole_batches(tuple(args)), {})

    def first_examples(leaf: Any, axis: int | None, parts: int | None) -> Any:
        if axis is None or parts is None:
            return leaf
        stop = min(nodes * -(-parts // spec.options.virtual_nodes), parts)
        return leading_examples(leaf, axis, stop * leaf.shape[axis] // parts)

    leaves = list(map(first_examples, call.leaves, call.axes, call.parts))
    options = dataclasses.replace(spec.options, virtual_nodes=nodes)
    return VirtualStep(dataclasses.replace(spec, options=options), placement), call.arguments(leaves)[0]


def leading_examples(leaf: Any, axis: int, stop: int) -> Any:
    """The first `stop` examples of an array, or of a shape."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape = list(leaf.shape)
        shape[axis] = stop
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
    return leaf[(slice(None),) * (axis % len(leaf.shape)) + (slice(stop),)]


def prepare_steps(steps: Sequence[VirtualStep], tasks: Sequence[Callable[[], Any]]) -> Preparation:
    """Runs a task for each of several steps in the background; a call of a step waits for its task."""
    preparation = Preparation({step.placement: task for step, task in zip(steps, tasks, strict=True)})
    for step in steps:
        step._preparation = preparation
    return preparation


def check_lanes(placement: Placement, lane: int) -> None:
    """Checks that a placement divides no lane.

    Raises:
      PlacementError: it does.
    """
    if any(start % lane for start in placement.starts if start < placement.virtual_nodes):
        fitting = even_counts(placement.virtual_nodes, placement.size, lane)
        raise PlacementError(
            f"the placement divides a lane: each device must hold whole lanes of {lane} nodes.",
            facts=[f"counts = {list(placement.counts)}"],
            remedies=[f"counts={fitting}, as step.on(devices) chooses", "more lanes, or lanes=None"],
        )
