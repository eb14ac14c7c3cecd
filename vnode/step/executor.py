"""The programs of a step on one placement: traced, compiled, launched and forgotten.

Knows `jax.jit`, calls and where arrays live. Must not know jaxprs (the pipeline does), nor other placements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from vnode.analysis.fingerprint import Fingerprint, fingerprint_of
from vnode.analysis.program import Program
from vnode.errors import PlacementError, ProcessError, layout_message
from vnode.placement.context import NO_MESH, check_context, current_mesh, in_mesh, typed_mesh, with_jit, without_mesh
from vnode.placement.exchange import exchanged
from vnode.placement.gone import given_away, is_held
from vnode.placement.host import with_weak_type
from vnode.placement.leaves import is_number, shape_of, shapes_of
from vnode.placement.patterns import check_found
from vnode.placement.placement import Placement
from vnode.placement.records import check_same
from vnode.placement.sharded import ShardedBatch, abstract_batch, is_sharded_batch, whole_batches
from vnode.placement.transfer import (
    arriving,
    committed_to,
    lies_on,
    partition,
    stays,
    target_sharding,
    tracing,
    transferred,
    typed_sharding,
)
from vnode.placement.waiting import check_failed, interruptible, tell_failure, upcoming_meeting, watched
from vnode.placement.world import is_shared, world
from vnode.runtime.groups import GroupProgram
from vnode.step.call import Call, OutputTree, has_static, is_static, unwrap, with_static, wrap
from vnode.step.given import (
    check_arguments,
    check_donated_once,
    check_signature,
    positional_names,
    repeated,
    takes_any,
)
from vnode.step.identity import differences, form_of, identity_of
from vnode.step.layouts import (
    Restored,
    Specs,
    Surroundings,
    laid_out,
    replicated_specs,
    specs_after,
    specs_of,
    types_of,
)
from vnode.step.pipeline import SEEN, FlatStep, Options, evaluate, program_of_groups
from vnode.step.rooms import check_known, in_rooms, leaving, put_by_name


def compiler_options(placement: Placement) -> dict[str, Any]:
    """What is asked of XLA for a placement.

    CPU programs that jax finds in its persistent compilation cache have lost the order of their collectives (jaxlib
    0.10): a device may be in one while others are in another one of the same kind, so that all wait for good, or have
    values of the other. A program for several CPU devices therefore has an option with a value of this process, by
    which none is found there.
    """
    cached = bool(jax.config.jax_compilation_cache_dir)
    if placement.devices[0].platform == "cpu" and len(placement.devices) > 1 and cached:
        return {"xla_gpu_executable_warn_stuck_timeout_seconds": OF_THIS_PROCESS}
    return {}


OF_THIS_PROCESS = (time.time_ns() // 1000 + os.getpid()) % 2**31
"""The value of an option that says nothing to CPUs, by which jax knows programs apart."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepSpec:
    """What a step is on any devices: the user's function, and what was asked of `virtualize`.

    Attributes:
      fun: the function.
      options: how nodes are made and combined.
      in_axes: which dimension of each argument carries the examples.
      donate_argnums: arguments whose buffers may be re-used.
      static_argnums: positions of arguments that are compile-time constants.
      static_argnames: names of such, where they are given by keyword.
    """

    fun: Callable[..., Any]
    options: Options
    in_axes: Any
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the user calls the step."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        """A call with these arguments.

        Raises:
          TypeError: the function does not take so many, or wants more.
          BatchError: as `Call.of`.
        """
        in_order = isinstance(self.in_axes, tuple | list)
        if isinstance(self.in_axes, Mapping) or (in_order and len(self.in_axes) > len(args)):
            check_signature(self.fun, args, kwargs, self.name)
        static = self.with_static(args, kwargs)
        return Call.of(*static, self.in_axes, self.positional, self.options.virtual_nodes)

    @functools.cached_property
    def positional(self) -> tuple[str, ...]:
        """What the function calls the arguments that can be given by position; nothing if it does not tell."""
        return positional_names(self.fun)

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with a batch by position that is given by keyword, and what stands before it, if it can be.

        So there is one program however it is given. A loop that has a state and a batch gives both by position: a batch
        that can only be given by keyword is then given so.
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

    def with_static(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments, those that are compile-time constants as structure."""
        return with_static(args, kwargs, self.static_argnums, self.static_argnames, self.positional)

    def flat(self, call: Call, output: OutputTree, leaves: Sequence[Any] | None = None, specs: Specs = ()) -> FlatStep:
        """The step on the arrays of a call, or on others in their place; `output` is told what else it returns."""
        given = call.leaves if leaves is None else leaves
        rooms = in_rooms(call, output, self.options.patterns, self.wholes)
        after = functools.partial(self.specs_after, call, output, specs) if any(specs) else None
        function = call.flat(self.fun, output)
        return FlatStep(function, given, call.axes, call.size, self.options, specs, rooms, after, call.parts)

    @staticmethod
    def specs_after(call: Call, output: OutputTree, specs: Specs, types: Sequence[Any]) -> list[PartitionSpec | None]:
        """How the arrays that a call returns will be laid out, given their types; None where nobody says."""
        args, _ = jax.tree.unflatten(call.treedef, call.leaves)
        return specs_after(output.merge(types), args, specs)

    def splits(self, name: str) -> bool:
        """Whether an argument is split that is given by keyword."""
        if isinstance(self.in_axes, Mapping):
            return self.in_axes.get(name) is not None
        return name in self.positional and dict(zip(self.positional, self.axes, strict=False)).get(name) is not None

    @property
    def has_one_state(self) -> bool:
        """Whether nothing is split of one argument alone, as far as `in_axes` says."""
        count = len(self.positional) if isinstance(self.in_axes, Mapping) else len(self.axes)
        return count > 0 and len(self.wholes(count)) == 1

    @functools.cached_property
    def axes(self) -> Sequence[Any]:
        """What `in_axes` says of positional arguments, one after another; nothing if it says the same of all."""
        if isinstance(self.in_axes, Mapping):
            return [self.in_axes.get(name) for name in self.positional]
        return self.in_axes if isinstance(self.in_axes, tuple | list) else ()

    def wholes(self, count: int) -> list[int]:
        """Positions of the arguments of which nothing is split, of `count`."""
        axes = (self.in_axes,) * count if isinstance(self.in_axes, int) else self.axes
        return [i for i in range(count) if i not in self.static_argnums and (i >= len(axes) or axes[i] is None)]


class Executor:
    """The programs of a step on one placement.

    Args:
      spec: the step.
      placement: where its nodes live.

    Attributes:
      traced: whether a program was traced since this was last set to False.
    """

    def __init__(self, spec: StepSpec, placement: Placement) -> None:
        self.spec = spec
        self.placement = placement
        self.traced = False
        self._across = is_shared()
        self._processes = frozenset(device.process_index for device in placement.devices)
        self._launched: set[Any] = set()
        self._fingerprints: dict[Any, Fingerprint] = {}
        self._wholes = functools.cache(spec.wholes)
        self._several = len(placement.devices) > 1
        self._in_place = InPlace(self._several)
        self._restored = Restored()
        self._unwraps = False
        self._sharded = len(placement.devices) > placement.size  # whether arguments may be, or have been
        self._ahead: list[jax.stages.Compiled] = []  # or jax would forget them
        self._groups: dict[Any, tuple[GroupProgram, OutputTree]] = {}
        jit = functools.partial(
            jax.jit,
            named(self._program, spec.name),
            static_argnums=0,
            donate_argnums=tuple(i + 1 for i in spec.donate_argnums),
        )
        options = compiler_options(placement)
        self._inside = jit()  # of other programs, which are compiled as their own options say
        self._jit = jit(compiler_options=options) if options else self._inside

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step. Of several processes the others learn of an error, so that they need not wait for this one."""
        if not self._across:
            return self._call(args, kwargs)
        try:
            return self._call(args, kwargs)
        except Exception as error:
            if not tracing():
                check_failed(f"to run {self.spec.name!r}", self._processes, cause=error)
                tell_failure(error, self._processes)
            raise

    @with_jit
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = current_mesh()
        if mesh is not None:
            with in_mesh(None):
                return self._run(mesh, args, kwargs)
        return self._run(None, args, kwargs)

    def _run(self, mesh: Mesh | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step as traced in a mesh context; itself called outside of any."""
        if len(self.placement.groups) > 1:
            return self._on_groups(mesh, args, kwargs)
        given = self._arguments(args, kwargs)
        around = self._surroundings(mesh, given[0])
        try:
            results = self._launch(around, *given)
        except ProcessError:
            raise
        except Exception as error:
            # What was taken to be in place may be another object with the same number.
            trusted = [i for i, arg in enumerate(args) if given[0][i] is arg]
            self._in_place.clear()
            if given_away((args, kwargs), ""):
                if type(error) is RuntimeError:  # so says jax that an array is no more, but of no failed program
                    check_arguments(dict(enumerate(args)), kwargs, self.spec.donate_argnums, self.spec.positional)
                raise  # given to this very call
            check_donated_once(args, kwargs, self.spec.donate_argnums, self.spec.positional)
            if self._across and all(self._is_there(args[i]) for i in trusted):
                raise  # the other processes may know of no error, and would not come to place arguments again
            again = self._arguments(args, kwargs)
            if all(again[0][i] is args[i] for i in trusted):
                raise
            around = self._surroundings(mesh, again[0])
            results = self._launch(around, *again)
        if around.specs:
            results = self._restored(results, given[0], self._wholes(len(args)))
        if self._unwraps:
            return unwrap(results)
        parts = results.values() if isinstance(results, dict) else results if isinstance(results, tuple) else ()
        kept = (i for i in range(len(args)) if i not in self.spec.donate_argnums)
        unchanged = [args[i] for i in kept if args[i] is given[0][i]]
        self._in_place.renew([results, *parts, *unchanged])
        return results

    def _is_there(self, tree: Any) -> bool:
        """Whether all arrays of an argument are on the placement's devices."""
        leaves = jax.tree.leaves(tree, is_leaf=is_sharded_batch)
        return all(
            leaf.placement == self.placement
            if isinstance(leaf, ShardedBatch)
            else isinstance(leaf, jax.Array) and leaf.committed and lies_on(leaf.sharding, self.placement.devices)
            for leaf in leaves
        )

    def _launch(self, around: Surroundings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program for arguments that are in place.

        Several processes compile a new one first, and meet before they run it: whoever is ready first would else wait
        for the others in its first exchange, which has a deadline of its own.
        """
        if tracing():
            return self._inside(around, *args, **kwargs)
        if not self._across:
            return self._jit(around, *args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        program = around, structure, tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        processes = self._processes
        if jax.process_index() not in processes:
            return self._jit(around, *args, **kwargs)
        launches = world().launches
        if program in self._launched:
            launches[processes] += 1
            return self._jit(around, *args, **kwargs)
        compiled = self._compile(lambda: self._jit.lower(around, *args, **kwargs))
        what = f"to run {self.spec.name!r} for the first time on {self.placement}"
        program_of = self._fingerprints.get(form_of(leaves, structure))
        check_same(what, identity_of(self.spec, self.placement, program_of), processes, shows={"program": differences})
        launches[processes] += 1
        results = self._jit(around, *args, **kwargs)
        del compiled  # until now, or the call would compile it again
        self._launched.add(program)
        return results

    def _compile(self, lower: Callable[[], Any]) -> jax.stages.Compiled:
        """Lowers and compiles a program before several processes meet; no longer than these are there."""
        others, name = self._processes - {jax.process_index()}, self.spec.name
        with upcoming_meeting(self._processes) as meeting:
            lowered = interruptible(lower, f"to trace {name!r}", others, scopes=(meeting,))
            return watched(lowered.compile, f"to compile {name!r}", others, scopes=(meeting,), patience=math.inf)

    @with_jit
    def lower(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Lowers the step for arguments as they are, or as a call moves them: arrays or `jax.ShapeDtypeStruct`s.

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
        args, kwargs = self.spec.with_static(args, kwargs)
        mesh, wholes = current_mesh(), self._wholes(len(args))
        wrapped = wrap(args, 0, names=self.spec.positional)
        led = [any(jax.tree.leaves(wrapped[k]) for k in wholes if k < i) for i in range(len(args) + 1)]
        given = tuple(
            jax.tree.map(
                functools.partial(self._moved, batch=i not in wholes, led=led[i]), arg, is_leaf=is_sharded_batch
            )
            for i, arg in enumerate(wrapped)
        )
        leaves = jax.tree.leaves([given[i] for i in wholes])
        patterns, host = self.spec.options.patterns, self.spec.options.host
        if patterns or host:
            given = tuple(
                put_by_name(shapes_of(arg, sharding="committed"), patterns, self.placement, host)
                if i in wholes
                else arg
                for i, arg in enumerate(given)
            )
        self._sharded |= bool(patterns) or any(partition(leaf) != PartitionSpec() for leaf in leaves)
        with without_mesh():
            move = functools.partial(self._moved, batch=True, led=led[-1])
            named_ones = jax.tree.map(move, wrap(kwargs, 1), is_leaf=is_sharded_batch)
            return self._jit.lower(self._surroundings(mesh, given), *given, **named_ones)

    def _moved(self, leaf: Any, batch: bool, led: bool) -> Any:
        """What stands for an array as a call moves it, if that does."""
        if isinstance(leaf, ShardedBatch):
            away = leaf.placement != self.placement
            return shape_of(leaf).update(sharding=self.placement.sharding()) if away else leaf
        if tracing() or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        shape = shape_of(leaf, sharding="committed")
        if shape.sharding is None or stays(shape.sharding, self.placement, batch and led):
            return leaf
        return shape.update(sharding=arriving(shape, self.placement, batch))

    def lower_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """As `lower`, for arguments that live elsewhere and will have been transferred here."""
        args, kwargs = shapes_of((tuple(args), kwargs), sharding="committed")
        wholes, patterns = self._wholes(len(args)), self.spec.options.patterns
        args = tuple(leaving(arg, patterns, self.placement) if i in wholes else arg for i, arg in enumerate(args))
        over_nodes = PartitionSpec(self.placement.axis)

        def arrive(leaf: Any, whole: bool, split: bool) -> Any:
            if isinstance(leaf, ShardedBatch) or (split and partition(leaf) == over_nodes):
                return abstract_batch(leaf.shape, leaf.dtype, self.placement)
            if (whole or self._across) and is_number(leaf):
                leaf = shape_of(leaf)
            led, whole = not whole, whole or self._across  # what each process has for itself is put on all devices
            if not isinstance(leaf, jax.ShapeDtypeStruct) or not (whole or leaf.sharding):
                return leaf
            if leaf.sharding and stays(leaf.sharding, self.placement, led):
                return leaf
            sharding = target_sharding(leaf, self.placement)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type, sharding=sharding)

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
                functools.partial(arrive, whole=False, split=self.spec.splits(name)),
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
        if together and self._across:
            return self.keep(self._compile(lambda: self.lower_for(args, kwargs)))
        return self.keep(self.lower_for(args, kwargs).compile())

    def trace_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Fingerprint | None:
        """Traces the step as it will be called; a call with such arguments then finds the trace.

        Args:
          args: as for `compile_for`.
          kwargs: likewise.

        Returns:
          What the step computes; None in one process, and where it was traced before.
        """
        before = len(self._fingerprints)
        self.lower_for(args, kwargs)
        return [*self._fingerprints.values()][-1] if len(self._fingerprints) > before else None

    def keep(self, compiled: jax.stages.Compiled) -> jax.stages.Compiled:
        """Keeps a program that was compiled ahead for the call that will want it."""
        self._ahead.append(compiled)
        return compiled

    @with_jit
    def compiled(self, args: Sequence[Any]) -> tuple[jax.stages.Compiled, tuple[Any, ...]]:
        """Compiles the step without running it, and brings arguments to where the compiled program wants them.

        Args:
          args: arguments of the step.

        Returns:
          The compiled program, and what to call it with. What the step donates is a copy.
        """
        mesh = current_mesh()
        with without_mesh():
            given, _ = self._arguments(whole_batches(tuple(args)), {})
            compiled = self._jit.lower(self._surroundings(mesh, given), *given).compile()
            leaves, treedef = jax.tree.flatten(given)
            shardings = jax.tree.leaves(compiled.input_shardings[0], is_leaf=lambda leaf: leaf is None)
            placed = [
                leaf if sharding is None else jax.device_put(leaf, sharding, may_alias=False)
                for leaf, sharding in zip(leaves, shardings, strict=True)
            ]
        return compiled, jax.tree.unflatten(treedef, placed)

    @with_jit
    def run_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step once with arguments of its own, which it may donate, beside what else it is called with."""
        mesh = current_mesh()
        if len(self.placement.groups) == 1:
            self.compile_for(args, kwargs)
        with without_mesh():
            if len(self.placement.groups) > 1:
                return self._on_groups(mesh, args, kwargs)
            placed, named_ones = self._arguments(args, kwargs)
            return self._launch(self._surroundings(mesh, placed), placed, named_ones)

    def clear(self) -> None:
        """Forgets all programs; the next call compiles again."""
        self._jit.clear_cache()
        self._inside.clear_cache()
        self._ahead.clear()
        self._launched.clear()
        self._groups.clear()
        self._in_place.clear()
        self._restored.clear()

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as programs take them: what is no array as structure, and all that is not split in its place.

        Or else a state that was never placed would meet another program than the state that the step returns.
        """
        args, kwargs = self.spec.with_static(args, kwargs)
        if tracing():
            check_known(args, self._wholes(len(args)), self.spec.options.patterns)
            return wrap(args, 0, names=self.spec.positional), wrap(kwargs, 1)
        wholes = self._wholes(len(args))
        moving = {i: arg for i, arg in enumerate(args) if not is_static(arg) and arg not in self._in_place}
        check_arguments(moving, kwargs, self.spec.donate_argnums, self.spec.positional)
        placed = tuple(self._in_turn(args, wholes, moving))
        named_ones = (
            self._placed(kwargs, False, self._leads(dict(enumerate(placed)), wholes, moving), 1) if kwargs else kwargs
        )
        donated = self.spec.donate_argnums if self._several else ()
        if donated and (not moving.keys().isdisjoint(donated) or repeated((placed, named_ones))):
            check_donated_once(placed, named_ones, donated, self.spec.positional)
        return placed, named_ones

    def _in_turn(self, args: Sequence[Any], wholes: Sequence[int], moving: Mapping[int, Any]) -> Iterator[Any]:
        """Arguments in their place, one after another, given those that are not known to be there."""
        led = False
        for i, arg in enumerate(args):
            placed = self._placed(arg, i in wholes, led, 0, i) if i in moving else arg
            led = led or self._leads({i: placed}, wholes, moving)
            yield placed

    @staticmethod
    def _leads(placed: Mapping[int, Any], wholes: Sequence[int], moving: Mapping[int, Any]) -> bool:
        """Whether one of some arguments lies on the placement's mesh, by which jax then reads how results lie."""
        there = ((i, arg) for i, arg in placed.items() if i in wholes and not is_static(arg))
        return any(i not in moving or first_leaf(arg) is not None for i, arg in there)

    def _placed(self, tree: Any, whole: bool, led: bool, *place: int) -> Any:
        """An argument, of which nothing is split or all may be, where programs want it; `led` as for `stays`."""
        wrapped = wrap(tree, *place, names=self.spec.positional)
        if whole and (self.spec.options.patterns or self.spec.options.host):
            wrapped = put_by_name(wrapped, self.spec.options.patterns, self.placement, self.spec.options.host)
        leaves, treedef = jax.tree.flatten(wrapped, is_leaf=is_sharded_batch)
        placed = (
            self._from_processes(wrapped, leaves, whole, led)
            if self._across
            else [self._leaf(leaf, whole, led) for leaf in leaves]
        )
        self._sharded |= whole and any(partition(leaf) != PartitionSpec() for leaf in placed)
        same = all(a is b for a, b in zip(leaves, placed, strict=True))
        return wrapped if same else jax.tree.unflatten(treedef, placed)

    def _leaf(self, leaf: Any, whole: bool, led: bool) -> Any:
        """An array where the program wants it: one that is not split on the devices, committed to them."""
        if isinstance(leaf, jax.Array | ShardedBatch):
            committed = getattr(leaf, "committed", True)
            leaf = transferred(leaf, self.placement, batch=not whole, led=led) if committed else leaf
        if not whole:
            return leaf
        if is_number(leaf):
            return with_weak_type(jnp.asarray(leaf), self.placement.sharding())
        return committed_to(leaf, self.placement)

    def _from_processes(self, tree: Any, leaves: list[Any], whole: bool, led: bool) -> list[Any]:
        """Arrays where the program of several processes wants them; those that each process has whole are compared."""
        here, placed = self.placement.devices, list(leaves)
        away = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, ShardedBatch):
                if leaf.placement == self.placement:
                    continue
                placed[i] = leaf = leaf.whole()
            there = isinstance(leaf, jax.Array) and leaf.committed and lies_on(leaf.sharding, here)
            if not there or typed_sharding(leaf):
                away.append(i)
            else:
                placed[i] = transferred(leaf, self.placement, batch=not whole, led=led)
        if away:
            paths = [path for path, _ in jax.tree.leaves_with_path(tree, is_leaf=is_sharded_batch)]
            names = [jax.tree_util.keystr(paths[i]) or "an argument" for i in away]
            arrived = exchanged([placed[i] for i in away], self.placement, names, batch=not whole)
            for i, leaf in zip(away, arrived, strict=True):
                placed[i] = leaf
        return placed

    def _surroundings(self, mesh: Mesh | None, args: Sequence[Any]) -> Surroundings:
        """What the program for arguments that are in place depends on besides their types."""
        if tracing():
            return Surroundings(mesh)
        specs = specs_of(args, self._wholes(len(args)), self.placement) if self._sharded else ()
        return Surroundings(mesh, specs, in_place=True)

    def _program(self, around: Surroundings, *args: Any, **kwargs: Any) -> Any:
        """What is compiled: from arguments to what the step returns, with what is no array as structure."""
        check_context(self.placement, jax.tree.leaves((args, kwargs)))
        self.traced = True
        spec, output = self.spec, OutputTree()
        call = spec.call(args, kwargs)
        check_found([args[i] for i in self._wholes(len(args))], spec.options.patterns)
        typed = typed_mesh(jax.tree.leaves((args, kwargs)))
        wholes = self._wholes(len(args))
        specs = around.specs if typed is None else types_of(args, wholes)
        seen: list[Program] | None = [] if self._across else None
        noted = SEEN.set(seen)
        try:
            with in_mesh(around.mesh) if around.mesh is not None else contextlib.nullcontext():
                arrays = evaluate(spec.flat(call, output, self._batches(call), specs), self.placement)
        finally:
            SEEN.reset(noted)
        if seen:
            self._fingerprints[form_of(*jax.tree.flatten((args, kwargs)))] = fingerprint_of(*seen)
        if around.in_place and self._several:
            specs = specs or replicated_specs(args, wholes)
        results = laid_out(output.merge(arrays), args, specs, typed or self.placement.mesh)
        self._unwraps |= has_static(results)
        return results

    def _batches(self, call: Call) -> list[Any]:
        """Arrays with sharded batches as one array, unless the shards are the nodes' of this placement."""

        def fits(leaf: Any, axis: int | None, parts: int | None) -> bool:
            one_run = axis == 0 and isinstance(leaf, ShardedBatch) and leaf.size == parts
            return one_run and leaf.size > 1 and leaf.placement == self.placement  # or nothing is split

        several = zip(call.leaves, call.axes, call.parts, strict=True)
        return [leaf if fits(leaf, axis, parts) else whole_batches(leaf) for leaf, axis, parts in several]

    def _on_groups(self, mesh: Mesh | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call on devices of several programs."""
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
        if any(device.process_index != jax.process_index() for device in self.placement.devices):
            raise PlacementError(
                layout_message(
                    "a step on groups of devices is several programs, which run in one process.",
                    facts=[repr(self.placement)],
                    remedies=["devices of one kind: step.on(devices)", "or this process's: jax.local_devices()"],
                )
            )
        spec = self.spec
        check_arguments(dict(enumerate(args)), kwargs, spec.donate_argnums, spec.positional)
        call = spec.call(args, kwargs)
        leaves = self._batches(call)
        key = (mesh, call.treedef, tuple((shape_of(leaf), getattr(leaf, "placement", None)) for leaf in leaves))
        if key not in self._groups:
            output = OutputTree()
            with in_mesh(mesh):
                made = program_of_groups(spec.flat(call, output, leaves), self.placement, spec.name)
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
        return unwrap(output.merge(arrays))


class InPlace:
    """Arguments all of whose leaves are known to be arrays on the placement's devices.

    They are known by the object's number, and by an array in it: as long as that is alive, so is most likely the
    object. Arrays are not kept alive.

    Args:
      several: whether there are several devices, where arrays that are gone must be found: jaxlib 0.10 crashes on them.
    """

    def __init__(self, several: bool) -> None:
        self._several = several
        self._known: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, tree: Any) -> bool:
        known = self._known.get(id(tree))
        array = None if known is None else known()
        if array is None or array.is_deleted():
            return False
        return not (self._several and given_away(tree, ""))

    def renew(self, trees: Iterable[Any]) -> None:
        """Forgets all trees but these."""
        known: dict[int, weakref.ref[Any]] = {}
        for tree in trees:
            array = self._known.get(id(tree))
            array = None if array is None or array() is None else array
            if array is None and (first := first_leaf(tree)) is not None:
                array = weakref.ref(first)
            if array is not None:
                known[id(tree)] = array
        self._known = known

    def clear(self) -> None:
        """Forgets all trees."""
        self._known = {}


def first_leaf(tree: Any) -> jax.Array | None:
    """The first leaf of a pytree if that is a jax array, found without visiting the others."""
    levels = [iter((tree,))]
    while levels:
        for child in levels[-1]:
            if is_held(type(child)):
                return child
            if child is not None:
                level = jax.tree_util.default_registry.flatten_one_level(child)
                if level is None:  # another leaf
                    return None
                levels.append(iter(level[0]))
                break
        else:
            levels.pop()
    return None


def named(program: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that compilers and profiles call by the name of the user's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)

    run.__name__ = run.__qualname__ = name
    return run
