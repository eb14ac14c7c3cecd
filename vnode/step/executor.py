"""A step and a placement -> compiled programs for its calls: traced, cached, launched and cleared.

    Executor(spec, placement)((state, batch), {})  ->  what the step returns, by a program for such arguments

Knows `jax.jit`, calls and shardings. Must not know jaxprs (the pipeline does), how arguments get to their place
(`ArgumentPlacer` does), nor other placements.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from vnode.analysis.fingerprint import Fingerprint, fingerprint_of
from vnode.analysis.program import Program
from vnode.compat import trace_settings
from vnode.errors import PlacementError, ProcessError
from vnode.placement.agreement import check_same
from vnode.placement.donated import donated_leaves
from vnode.placement.leaf_sharding import Role, leaf_sharding, partition
from vnode.placement.leaves import is_number, shape_of, shapes_of
from vnode.placement.patterns import check_matched
from vnode.placement.placement import Placement
from vnode.placement.process_barrier import check_failed, interruptible, run_watched, tell_failure, upcoming_meeting
from vnode.placement.sharded import ShardedBatch, abstract_batch, is_sharded_batch, whole_batches
from vnode.placement.trace_context import (
    NO_MESH,
    check_context,
    current_mesh,
    typed_mesh,
    use_mesh,
    with_jit,
    without_mesh,
)
from vnode.placement.transfer import tracing
from vnode.placement.world import in_world, is_local, world, world_of
from vnode.runtime.device_groups import GroupProgram
from vnode.spmd.uneven_blocks import Share
from vnode.step.argument_checks import (
    check_arguments,
    check_donated_once,
)
from vnode.step.argument_placement import ArgumentPlacer
from vnode.step.call import Call, OutputTree, has_static, unwrap, wrap
from vnode.step.pipeline import TRACED_PROGRAMS, evaluate, program_of_groups
from vnode.step.result_layouts import (
    ProgramContext,
    ShardingRestorer,
    constrain_results,
    replicated_specs,
    specs_of,
    typed_specs,
)
from vnode.step.retraces import Retraces
from vnode.step.spec import StepSpec
from vnode.step.step_identity import argument_types, identity_of, program_differences
from vnode.step.uneven_state import put_by_name, remember_results, restore_for_placement, share_of


def compiler_options(placement: Placement) -> dict[str, Any]:
    """XLA's compiler options for a placement.

    CPU programs from jax's persistent compilation cache have lost the order of their collectives (jaxlib 0.10). Devices
    may then deadlock, or mix up values of two collectives. So a program for several CPU devices gets an option with a
    value unique to this process, and is never found in the cache.
    """
    cached = bool(jax.config.jax_compilation_cache_dir)
    if placement.devices[0].platform == "cpu" and len(placement.devices) > 1 and cached:
        return {"xla_gpu_executable_warn_stuck_timeout_seconds": PROCESS_NUMBER}
    return {}


PROCESS_NUMBER = (time.time_ns() // 1000 + os.getpid()) % 2**31
"""The value of an option that CPUs ignore; it makes cache keys unique to this process."""


class Executor:
    """The programs of a step on one placement.

    Args:
      spec: the step.
      placement: where its nodes live.
      retraces: compares programs with those of other placements.

    Attributes:
      arguments: places arguments.
      traced: the last trace since this was set to None: the programs, and the positions of their inputs that are split
        over the nodes.
    """

    def __init__(self, spec: StepSpec, placement: Placement, retraces: Retraces) -> None:
        self.spec = spec
        self.placement = placement
        self.retraces = retraces
        self.traced: tuple[Sequence[Program], Sequence[int]] | None = None
        self.arguments = ArgumentPlacer(spec, placement)
        self._processes = frozenset(device.process_index for device in placement.devices)
        self._launched: dict[Any, tuple[int | None, int | None]] = {}
        self._fingerprints: dict[Any, Fingerprint] = {}
        self._restored = ShardingRestorer()
        self._unwraps = False
        self._ahead: list[jax.stages.Compiled] = []  # keeps them in jax's cache
        self._groups: dict[Any, tuple[GroupProgram, OutputTree]] = {}
        jit = functools.partial(
            jax.jit,
            with_name(self._program, spec.name),
            static_argnums=0,
            donate_argnums=tuple(i + 1 for i in spec.donate_argnums),
        )
        options = compiler_options(placement)
        self._inside = jit()  # inside of other programs, which have compiler options of their own
        self._jit = jit(compiler_options=options) if options else self._inside

    @functools.cached_property
    def share(self) -> Share | None:
        """The blocks of unevenly sharded leaves; None if there are none."""
        return share_of(self.spec.options.patterns)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step. With several processes, reports an error to the others, so that they do not wait."""
        if not self.arguments.across:
            return self._call(args, kwargs)
        with self._world_context():
            try:
                return self._call(args, kwargs)
            except Exception as error:
                if not tracing():
                    check_failed(f"to run {self.spec.name!r}", self._processes, cause=error)
                    tell_failure(error, self._processes)
                raise

    def _world_context(self) -> contextlib.AbstractContextManager[None]:
        """A context in which barriers are among the processes of the placement's devices."""
        return in_world(world_of(self.placement.devices))

    @with_jit
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = current_mesh()
        if mesh is not None:
            with use_mesh(None):
                return self._run(mesh, args, kwargs)
        return self._run(None, args, kwargs)

    def _run(self, mesh: Mesh | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step, traced in a mesh context. The caller has left that context."""
        if len(self.placement.groups) > 1:
            return self._run_on_groups(mesh, args, kwargs)
        given = self.arguments(args, kwargs)
        context = self._surroundings(mesh, given[0])
        try:
            results = self._launch(context, *given)
        except ProcessError:
            raise
        except Exception as error:
            # An argument that was taken to be in place may be a new object with the same id.
            trusted = [i for i, arg in enumerate(args) if given[0][i] is arg]
            self.arguments.clear()
            if donated_leaves((args, kwargs), ""):
                if type(error) is RuntimeError:  # jax's error for a deleted array, not for a failed program
                    check_arguments(dict(enumerate(args)), kwargs, self.spec.donate_argnums, self.spec.positional)
                raise  # donated to this call
            check_donated_once(args, kwargs, self.spec.donate_argnums, self.spec.positional)
            if self.arguments.across and all(self.arguments.are_placed(args[i]) for i in trusted):
                raise  # other processes may have no error, and would not join another transfer
            again = self.arguments(args, kwargs)
            if all(again[0][i] is args[i] for i in trusted):
                raise
            context = self._surroundings(mesh, again[0])
            results = self._launch(context, *again)
        if context.specs:
            results = self._restored(results, given[0], self.arguments.wholes(len(args)))
        if self.share is not None and not tracing():
            remember_results(results, self.share)
        if self._unwraps:
            return unwrap(results)
        parts = results.values() if isinstance(results, dict) else results if isinstance(results, tuple) else ()
        kept = (i for i in range(len(args)) if i not in self.spec.donate_argnums)
        unchanged = [args[i] for i in kept if args[i] is given[0][i]]
        self.arguments.in_place.renew([results, *parts, *unchanged])
        return results

    def _launch(self, context: ProgramContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program for arguments that are in place.

        Several processes compile a new program and pass a barrier before they run it. Otherwise the first one would
        wait in a collective, which has a deadline.
        """
        if tracing():
            return self._inside(context, *args, **kwargs)
        if not self.arguments.across:
            return self._jit(context, *args, **kwargs)
        from vnode.placement.succession import record_last, smallest  # not needed by a single process

        leaves, structure = jax.tree.flatten((args, kwargs))
        program = context, structure, tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        processes = self._processes
        if world().index not in processes:
            return self._jit(context, *args, **kwargs)
        if program in self._launched:
            waits, waited_for = self._launched[program]
            results, made = self._run_after_previous(waits, context, leaves, structure)
            record_last(made, waited_for)
            return results
        compiled = self._compile(lambda: self._jit.lower(context, *args, **kwargs))
        what = f"to run {self.spec.name!r} for the first time on {self.placement}"
        program_of = self._fingerprints.get(argument_types(leaves, structure))
        check_same(
            what, identity_of(self.spec, self.placement, program_of), processes, shows={"program": program_differences}
        )
        donated = [i in self.spec.donate_argnums for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        kept = [k for k in range(len(leaves)) if k >= len(donated) or not donated[k]]
        waits = smallest(leaves, kept)
        waits = smallest(leaves) if waits is None else waits
        results, made = self._run_after_previous(waits, context, leaves, structure)
        self._launched[program] = waits, smallest(made)
        record_last(made, smallest(made))
        del compiled  # kept until now, or the call would compile it again
        return results

    def _run_after_previous(
        self, waits: int | None, context: ProgramContext, leaves: Sequence[Any], structure: Any
    ) -> tuple[Any, list[Any]]:
        """Runs a program of several processes after their previous one; returns its results, and their leaves."""
        from vnode.placement.succession import order_after_last

        world().launches[self._processes] += 1
        args, kwargs = jax.tree.unflatten(structure, order_after_last(leaves, waits))
        results = self._jit(context, *args, **kwargs)
        return results, jax.tree.leaves(results)

    def _compile(self, lower: Callable[[], Any]) -> jax.stages.Compiled:
        """Lowers and compiles a program before a barrier of several processes; stops if one of them fails."""
        with self._world_context(), upcoming_meeting(self._processes) as meeting:
            others, name = self._processes - {world().index}, self.spec.name
            lowered = interruptible(lower, f"to trace {name!r}", others, scopes=(meeting,))
            return run_watched(lowered.compile, f"to compile {name!r}", others, scopes=(meeting,), patience=math.inf)

    @with_jit
    def lower(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Lowers the step for arguments in the shardings that a call gives them: arrays or `jax.ShapeDtypeStruct`s.

        Raises:
          PlacementError: the placement has several groups, hence several programs.
        """
        if len(self.placement.groups) > 1:
            raise PlacementError(
                "a step on groups of devices is several programs, which use each other's results.",
                facts=[repr(self.placement)],
                remedies=["lower it on devices of one kind: step.on(jax.devices()[:1]).lower(...)"],
            )
        args, kwargs = self.spec.with_static(args, kwargs)
        mesh, wholes = current_mesh(), self.arguments.wholes(len(args))
        wrapped = wrap(args, 0, names=self.spec.positional)
        mesh_known = [any(jax.tree.leaves(wrapped[k]) for k in wholes if k < i) for i in range(len(args) + 1)]
        given = tuple(
            jax.tree.map(
                functools.partial(
                    self._shape_after_transfer,
                    role=Role.UNSPLIT if i in wholes else Role.SPLIT,
                    mesh_known=mesh_known[i],
                ),
                arg,
                is_leaf=is_sharded_batch,
            )
            for i, arg in enumerate(wrapped)
        )
        leaves = jax.tree.leaves([given[i] for i in wholes])
        patterns, host = self.spec.options.patterns, self.spec.plan.host
        if patterns or host:
            given = tuple(
                put_by_name(shapes_of(arg, sharding="committed"), patterns, self.placement, host)
                if i in wholes
                else arg
                for i, arg in enumerate(given)
            )
        self.arguments.sharded |= bool(patterns) or any(partition(leaf) != PartitionSpec() for leaf in leaves)
        with without_mesh():
            move = functools.partial(self._shape_after_transfer, role=Role.SPLIT, mesh_known=mesh_known[-1])
            named_ones = jax.tree.map(move, wrap(kwargs, 1), is_leaf=is_sharded_batch)
            return self._jit.lower(self._surroundings(mesh, given), *given, **named_ones)

    def _shape_after_transfer(self, leaf: Any, role: Role, mesh_known: bool) -> Any:
        """The shape of an array with the sharding to which a call moves it; the leaf itself if it stays.

        An array that is not committed to devices stays: `jax.jit` decides about its sharding.
        """
        if isinstance(leaf, ShardedBatch):
            away = leaf.placement != self.placement
            return self._shape_in_place(shape_of(leaf), Role.PUT) if away else leaf
        if tracing() or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        shape = shape_of(leaf, sharding="committed")
        placed = shape if shape.sharding is None else self._shape_in_place(shape, role, mesh_known)
        return leaf if placed is shape else placed

    def _shape_in_place(
        self, shape: jax.ShapeDtypeStruct, role: Role, mesh_known: bool = False
    ) -> jax.ShapeDtypeStruct:
        """A shape with its sharding on the placement; the same object if it stays as it is."""
        target = leaf_sharding(shape.shape, shape.sharding, self.placement, role, mesh_known=mesh_known)
        return shape if target is None else shape.update(sharding=target)

    def lower_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """As `lower`, for arguments on other devices that will be transferred to the placement."""
        args, kwargs = shapes_of((tuple(args), kwargs), sharding="committed")
        wholes, patterns = self.arguments.wholes(len(args)), self.spec.options.patterns
        args = tuple(
            restore_for_placement(arg, patterns, self.placement) if i in wholes else arg for i, arg in enumerate(args)
        )
        over_nodes = PartitionSpec(self.placement.axis)

        def arrive(leaf: Any, whole: bool, split: bool) -> Any:
            if isinstance(leaf, ShardedBatch) or (split and partition(leaf) == over_nodes):
                return abstract_batch(leaf.shape, leaf.dtype, self.placement)
            if (whole or self.arguments.across) and is_number(leaf):
                leaf = shape_of(leaf)
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            return self._shape_in_place(leaf, self.arguments.role(leaf.sharding, whole), mesh_known=True)

        args, kwargs = self.spec.with_static(args, kwargs)
        placed = [
            jax.tree.map(
                functools.partial(arrive, whole=i in wholes, split=i not in wholes),
                wrap(arg, 0, i, names=self.spec.positional),
                is_leaf=is_sharded_batch,
            )
            for i, arg in enumerate(args)
        ]
        kwargs = {
            name: jax.tree.map(
                functools.partial(arrive, whole=False, split=self.spec.splits_keyword(name)),
                wrap(arg, 1, name),
                is_leaf=is_sharded_batch,
            )
            for name, arg in kwargs.items()
        }
        return self.lower(placed, kwargs)

    def compile_for(self, args: Sequence[Any], kwargs: dict[str, Any], together: bool = False) -> jax.stages.Compiled:
        """Compiles the step as it will be called; a call with such arguments then finds the program.

        Args:
          args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s; those that live elsewhere will have been
            transferred.
          kwargs: keyword arguments of the step.
          together: whether the other processes do so too, and meet this one next.

        Returns:
          The program, of which `memory_analysis` can be asked.
        """
        if together and self.arguments.across:
            return self.keep_compiled(self._compile(lambda: self.lower_for(args, kwargs)))
        return self.keep_compiled(self.lower_for(args, kwargs).compile())

    def trace_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Fingerprint | None:
        """Traces the step as it will be called; a call with such arguments then finds the trace.

        Args:
          args: as for `compile_for`.
          kwargs: likewise.

        Returns:
          The step's fingerprint; None in one process, or if it was traced before.
        """
        before = len(self._fingerprints)
        self.lower_for(args, kwargs)
        return [*self._fingerprints.values()][-1] if len(self._fingerprints) > before else None

    def keep_compiled(self, compiled: jax.stages.Compiled) -> jax.stages.Compiled:
        """Keeps a program that was compiled ahead, so that jax's cache has it when the step is called."""
        self._ahead.append(compiled)
        return compiled

    @with_jit
    def compiled(self, args: Sequence[Any]) -> tuple[jax.stages.Compiled, tuple[Any, ...]]:
        """Compiles the step without running it, and brings arguments to where the compiled program wants them.

        Args:
          args: arguments of the step.

        Returns:
          The compiled program, and its arguments. Donated arguments are copies.
        """
        mesh = current_mesh()
        with without_mesh():
            given, _ = self.arguments(whole_batches(tuple(args)), {})
            compiled = self._jit.lower(self._surroundings(mesh, given), *given).compile()
            leaves, treedef = jax.tree.flatten(given, is_leaf=is_none)
            shardings = jax.tree.leaves(compiled.input_shardings[0], is_leaf=is_none)
            placed = [
                leaf if leaf is None or sharding is None else jax.device_put(leaf, sharding, may_alias=False)
                for leaf, sharding in zip(leaves, shardings, strict=True)
            ]
        return compiled, jax.tree.unflatten(treedef, placed)

    @with_jit
    def run_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step once with copies of arguments, which it may donate, while other calls go on."""
        mesh = current_mesh()
        if len(self.placement.groups) == 1:
            self.compile_for(args, kwargs)
        with without_mesh():
            if len(self.placement.groups) > 1:
                return self._run_on_groups(mesh, args, kwargs)
            placed, named_ones = self.arguments(args, kwargs)
            with self._world_context():
                return self._launch(self._surroundings(mesh, placed), placed, named_ones)

    def clear(self) -> None:
        """Drops all programs; the next call compiles again."""
        self._jit.clear_cache()
        self._inside.clear_cache()
        self._ahead.clear()
        self._launched.clear()
        self._groups.clear()
        self.arguments.clear()
        self._restored.clear()

    def _surroundings(self, mesh: Mesh | None, args: Sequence[Any]) -> ProgramContext:
        """The context on which the program for placed arguments depends, besides their types."""
        if tracing():
            return ProgramContext(mesh)
        specs = specs_of(args, self.arguments.wholes(len(args)), self.placement) if self.arguments.sharded else ()
        return ProgramContext(mesh, specs, in_place=True)

    def _program(self, context: ProgramContext, *args: Any, **kwargs: Any) -> Any:
        """The function that is compiled: from arguments to results, with leaves that are no arrays as structure."""
        check_context(self.placement, jax.tree.leaves((args, kwargs)))
        spec, output = self.spec, OutputTree()
        call = spec.call(args, kwargs)
        check_matched([args[i] for i in self.arguments.wholes(len(args))], spec.options.patterns)
        typed = typed_mesh(jax.tree.leaves((args, kwargs)))
        wholes = self.arguments.wholes(len(args))
        specs = context.specs if typed is None else typed_specs(args, wholes)
        with (
            self._tracing(call) as seen,
            use_mesh(context.mesh) if context.mesh is not None else contextlib.nullcontext(),
        ):
            arrays = evaluate(spec.flatten(call, output, self._batches(call), specs), self.placement)
        leaves, structure = jax.tree.flatten((args, kwargs))
        types = argument_types(leaves, structure)
        if self.arguments.across:
            self._fingerprints[types] = fingerprint_of(*seen)
        if context.in_place:
            weak = tuple(getattr(jax.typeof(leaf), "weak_type", False) for leaf in leaves)
            self.retraces.compare((types, weak, context.mesh), seen, spec.name)
        if context.in_place and self.arguments.several:
            specs = specs or replicated_specs(args, wholes)
        results = constrain_results(output.unflatten(arrays), args, specs, typed or self.placement.mesh)
        self._unwraps |= has_static(results)
        return results

    @contextlib.contextmanager
    def _tracing(self, call: Call) -> Iterator[list[Program]]:
        """A context that collects the programs of the step that are traced within it."""
        seen: list[Program] = []
        noted = TRACED_PROGRAMS.set(seen)
        try:
            yield seen
        finally:
            TRACED_PROGRAMS.reset(noted)
        self.traced = seen, [i for i, axis in enumerate(call.axes) if axis is not None]

    def _batches(self, call: Call) -> list[Any]:
        """The arrays of a call. A sharded batch becomes one array, unless its shards are this placement's."""

        def fits(leaf: Any, axis: int | None, parts: int | None) -> bool:
            one_run = axis == 0 and isinstance(leaf, ShardedBatch) and leaf.size == parts
            return one_run and leaf.size > 1 and leaf.placement == self.placement  # or nothing is split

        several = zip(call.leaves, call.axes, call.parts, strict=True)
        return [leaf if fits(leaf, axis, parts) else whole_batches(leaf) for leaf, axis, parts in several]

    def _run_on_groups(self, mesh: Mesh | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step on a placement with several groups of devices, by several programs."""
        if tracing():
            raise PlacementError(
                "a step on groups of devices is several programs, and cannot be part of another one.",
                facts=[repr(self.placement)],
                remedies=[
                    "call it outside of jax.jit, jax.grad, jax.vmap and lax.scan",
                    "or put it on devices of one kind: step.on(jax.devices()[:1])",
                ],
            )
        if not all(map(is_local, self.placement.devices)):
            raise PlacementError(
                "a step on groups of devices is several programs, which run in one process.",
                facts=[repr(self.placement)],
                remedies=["devices of one kind: step.on(devices)", "or this process's: jax.local_devices()"],
            )
        spec = self.spec
        check_arguments(dict(enumerate(args)), kwargs, spec.donate_argnums, spec.positional)
        call = spec.call(args, kwargs)
        leaves = self._batches(call)
        kinds = tuple((shape_of(leaf), getattr(leaf, "placement", None)) for leaf in leaves)
        key = (mesh, call.treedef, kinds, trace_settings())
        if key not in self._groups:
            output = OutputTree()
            with use_mesh(mesh), self._tracing(call):
                made = program_of_groups(spec.flatten(call, output, leaves), self.placement, spec.name)
            self._groups[key] = made, output
        program, output = self._groups[key]
        with jax.sharding.use_abstract_mesh(NO_MESH):
            arrays = program(leaves)
        given = spec.with_static(args, {})[0]
        counts = [len(jax.tree.leaves(wrap(arg), is_leaf=is_sharded_batch)) for arg in given]
        for i in (i for i in spec.donate_argnums if i < len(args)):
            start = sum(counts[:i])
            for k in range(start, start + counts[i]):
                for array in jax.tree.leaves(call.leaves[k]) if k not in program.returned else ():
                    if isinstance(array, jax.Array):
                        array.delete()
        return unwrap(output.unflatten(arrays))


def is_none(leaf: Any) -> bool:
    """Whether a leaf is None; for ``is_leaf``."""
    return leaf is None


def with_name(program: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps a function, so that compilers and profiles show the name of the user's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)

    run.__name__ = run.__qualname__ = name
    return run
