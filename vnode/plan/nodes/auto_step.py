"""A step whose number of virtual nodes is found at its first call.

Knows calls, placements, and whom to ask for a number. Must not know how a step is compiled, or how the search goes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from vnode.errors import MemoryLimitError, PlacementError
from vnode.placement.leaves import shape_of
from vnode.placement.placement import Placement
from vnode.placement.process_arrays import gather_from_all
from vnode.placement.process_barrier import tell_failure
from vnode.placement.world import in_world, is_local, is_shared, world, world_of
from vnode.plan.nodes.device_memory import compiler_planned_bytes, device_memory, reported_bytes
from vnode.plan.nodes.node_search import Need, NodeSearch, search, with_lanes
from vnode.step.compile_ahead import Preparation
from vnode.step.protocol import P, R, Step
from vnode.step.resolved import Resolved
from vnode.step.virtual import VirtualStep, with_nodes
from vnode.tracebacks import remove_frames

REMEDIES = (
    "give activations away: jax.checkpoint (remat) around the layers",
    "donate the state, donate_argnums=0, so that it is there once",
    'fewer pending sums on a device: lanes="auto", or reduction="fast"',
    "shard the state over the devices (ZeRO), or over another axis of a mesh",
    "more devices: each then holds fewer examples, and fewer sums over nodes",
)

NO_LIMIT = 2**62
"""Bytes: no limit."""


class SharedChoice:
    """The number of nodes, once it is chosen; shared by the steps on all sets of devices.

    Attributes:
      search: how it was found.
      step: the step on that number of nodes.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.search: NodeSearch | None = None
        self.step: Any = None


class AutoStep(Step[P, R]):
    """A step that chooses its number of virtual nodes; made by ``virtualize(..., virtual_nodes="auto")``.

    The first call, `explain`, `lower` or `prepare` with arguments chooses: it compiles the step for a few numbers of
    nodes and takes the smallest whose program fits in a device's memory; nothing runs on the devices. From then on it
    is the `VirtualStep` on that number, on whatever devices.

    Attributes:
      pattern: the step, to be asked for itself on a number of nodes.
    """

    def __init__(
        self,
        pattern: VirtualStep[P, R],
        template: Placement | None,
        memory: int | None,
        choice: SharedChoice | None = None,
        fewer_lanes: bool = False,
    ) -> None:
        functools.update_wrapper(self, pattern.spec.fun)
        self.pattern = pattern
        self._template = template
        if template is not None:
            pattern.family.note_axes(template)
        self._memory = memory
        self._fewer_lanes = fewer_lanes
        self._choice = choice or SharedChoice()
        self._step: Any = None

    @property
    def template(self) -> Placement:
        """The devices, and how many nodes each has in one wave; there is one before V is chosen."""
        if self._template is None:
            self._template = Placement(len(world().devices))
        return self._template

    @property
    def search(self) -> NodeSearch | None:
        """The search for V; None before it."""
        return self._choice.search

    @property
    def search_lines(self) -> tuple[str, ...]:
        """The search in lines; none before V is chosen."""
        return () if self.search is None else (self.search.verdict, *self.search.lines)

    @property
    def placement(self) -> Placement:
        """Where the nodes live.

        Raises:
          PlacementError: V is not chosen yet.
        """
        return self._chosen_for("placement").placement

    def on(self, devices: Any, *, counts: Sequence[int] | None = None) -> Step[P, R]:
        """The same step on other devices; the number of nodes stays, once it is chosen.

        Args:
          devices: as for `VirtualStep.on`. Before V is chosen, a `Placement` is for the fewest nodes there may be.
          counts: nodes on each device; before V is chosen, their proportions.

        Returns:
          A `VirtualStep`, or an `AutoStep` before V is chosen. Whichever of these is called first chooses for all.
        """
        if self._choice.step is not None:
            return self._choose().on(devices, counts=counts)
        if isinstance(devices, Placement):
            if counts is not None:
                raise PlacementError("a Placement has counts of its own: give counts with devices only")
            template = devices
        else:
            axis, place = self.template.axis, self.template.arrange_devices(devices)
            if isinstance(place, jax.sharding.Mesh):
                size = sum(counts) if counts is not None else place.shape.get(axis, 1)
                template = Placement(size, mesh=place, counts=counts, axis=axis)
            else:
                size = sum(counts) if counts is not None else max(len(place), 1)
                template = Placement(size, place, counts=counts, axis=axis)
        return AutoStep(self.pattern, template, self._memory, self._choice, self._fewer_lanes)

    def prepare(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """Compiles the step for other placements in the background; see `VirtualStep.prepare`. Chooses V at once.

        Raises:
          BatchError: no arguments are given, and the step has not been called.
        """
        args, kwargs = self._arguments_or_last(args, kwargs)
        return self._choose(args, kwargs).prepare(placements, *args, **kwargs)

    def warm_up(self, placements: Any, *args: Any, **kwargs: Any) -> Preparation:
        """As `prepare`, and runs the step there once; see `VirtualStep.warm_up`. Chooses V at once."""
        return self._choose(args, kwargs).warm_up(placements, *args, **kwargs)

    def put(self, tree: Any) -> Any:
        """Places a state on the devices; see `VirtualStep.put`. The number of nodes does not matter."""
        return self._smallest_step().put(tree)

    def get(self, tree: Any) -> Any:
        """A state in its own shapes; see `VirtualStep.get`."""
        return self._smallest_step().get(tree)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            step = self._step
            return (self._choose(args, kwargs) if step is None else step)(*args, **kwargs)
        except Exception as error:
            remove_frames(error)
            raise

    @contextlib.contextmanager
    def resolved(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, choose: bool = True) -> Iterator[Resolved]:
        """The step on the number of nodes that is chosen, or on the smallest there may be; arguments as they are."""
        args, kwargs = self._arguments_or_last(args, kwargs)
        if choose:
            step = self._choose(args, kwargs)  # before it is asked how it was found
            yield Resolved(step, args, kwargs, self.search_lines)
        else:
            yield Resolved(self._smallest_step(), args, kwargs, chosen=False)

    def __repr__(self) -> str:
        return (
            f"AutoStep({self.pattern.spec.name}, {'V not chosen yet' if self._choice.step is None else self._choose()})"
        )

    def chosen(self, *args: Any, **kwargs: Any) -> VirtualStep[P, R]:
        """The `VirtualStep` on the number of nodes that is chosen; chooses it for these arguments where none is."""
        return self._choose(args, kwargs)

    def restore_choice(self, virtual_nodes: int, lane: int) -> VirtualStep[P, R]:
        """The step as it was chosen before, on the devices of now.

        Args:
          virtual_nodes: V, as it was chosen.
          lane: nodes in a lane then; taken over if lanes are chosen, too.
        """
        chosen = self._fewer_lanes and lane > 1
        lanes = -(-virtual_nodes // lane) if chosen else self.pattern.options.lanes
        return with_nodes(with_lanes(self.pattern, lanes), virtual_nodes, self.template)

    def _smallest_step(self) -> VirtualStep[P, R]:
        """The step on the fewest nodes there may be."""
        return with_nodes(self.pattern, self.template.virtual_nodes, self.template)

    def _arguments_or_last(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments; where there are none, the shapes of those for which the step was compiled last."""
        return (self._choice.step or self.pattern).arguments_or_last(args, kwargs)

    def _chosen_for(self, what: str) -> Any:
        if self._choice.step is None:
            raise PlacementError(
                f"the step has no {what} yet: its number of virtual nodes is chosen by the first call.",
                remedies=[
                    "call it first, or step.explain(...) or step.lower(...) with shapes of its arguments",
                    "step.put(state) and step.on(devices) work already",
                ],
            )
        return self._choose()

    def _choose(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The step on the number of nodes that is chosen, on these devices; chooses where none is."""
        if self._step is not None:
            return self._step
        choice = self._choice
        with choice.lock, in_world(world_of(self.template.devices)):  # two threads must not choose two numbers
            if choice.step is None:
                if len(self.template.groups) > 1:
                    raise PlacementError(
                        "virtual_nodes='auto' does not work on groups of devices: they run several "
                        "programs, which wait for each other's results.",
                        facts=[repr(self.template)],
                        remedies=[
                            "choose it on devices of one kind first: "
                            "step.on(jax.devices()[:1]).chosen(state, batch).on(placement.devices)",
                            "or give a number: virtual_nodes=32",
                        ],
                    )
                self.pattern.family.check(self.template)
                shapes, named = jax.tree.map(abstract_tracer, (args, kwargs or {}))
                limit, fewer = self._limit(), self._fewer_lanes
                try:
                    found, step = search(self.pattern, self.template, limit, shapes, named, agree_on_need, fewer)
                except Exception as error:  # the other processes would wait for this one's answer
                    tell_failure(error, range(world().count))
                    raise
                if step is None:
                    raise MemoryLimitError(
                        f"{found.verdict}{found.floor and '; '}{found.floor}.",
                        facts=found.lines,
                        remedies=REMEDIES,
                    )
                choice.search, choice.step = found, step
        nodes = choice.step.placement.virtual_nodes
        self._step = choice.step.on(with_nodes(choice.step, nodes, self.template).placement)
        return self._step

    def _limit(self) -> int:
        devices = self.template.devices
        if is_shared():
            return common_limit(self._memory, devices)
        return device_memory(devices) if self._memory is None else self._memory


def common_limit(memory: int | None, devices: Sequence[Any]) -> int:
    """The memory of the smallest device of several processes, each of which knows only its own devices.

    Args:
      memory: what the user says.
      devices: of all processes.

    Raises:
      MemoryLimitError: some process does not know.
    """
    own = [device for device in devices if is_local(device)]
    mine = (
        min((reported_bytes(device) or compiler_planned_bytes(device) for device in own), default=NO_LIMIT)
        if memory is None
        else memory
    )
    limits = [
        join_words(*words)
        for words in gather_from_all(split_words(mine), "to agree about the memory of a device").tolist()
    ]
    if 0 in limits:
        raise MemoryLimitError(
            "the memory limit of a device is not known.",
            facts=[f"those of process {limits.index(0)} report none"],
            remedies=[
                "give the limit in all processes: memory='16GiB'",
                "choose the number of virtual nodes yourself",
            ],
        )
    return min(limits)


def agree_on_need(need: Need) -> Need:
    """The most that a program needs on the devices of any process; refused if any compiler refused it.

    Compilers of several processes might differ by a little, and then one process would go on with another number of
    nodes than the others.
    """
    refused, needed = need
    mine = (int(refused), int(needed is not None), *split_words(needed or 0))
    everyones = gather_from_all(mine, "to agree about the number of virtual nodes").tolist()
    known = [join_words(high, low) for _, there, high, low in everyones if there]
    return any(words[0] for words in everyones), max(known, default=None)


def split_words(number: int) -> tuple[int, int]:
    """The two words of 32 bits of a number."""
    return number >> 32, number % 2**32


def join_words(high: int, low: int) -> int:
    """The number that two words are.

    >>> join_words(*split_words(10**12))
    1000000000000
    """
    return (high << 32) + low


def abstract_tracer(leaf: Any) -> Any:
    """The shape of a tracer; any other leaf as it is."""
    return shape_of(leaf) if isinstance(leaf, jax.core.Tracer) else leaf
