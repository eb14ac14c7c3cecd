"""Makes the next generation of a worker: its world of JAX, the step on its devices, and the programs, ahead of time.

Knows orders to prepare, steps, and states as what is held of them. Must not know when the generation begins.

While this generation trains, a thread makes the next one: a second client of JAX, the step compiled for its devices,
and one vote, by which the connections between its workers are made. So a switch waits for the state alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vnode.elastic.handover import Source
from vnode.elastic.held import Leaf
from vnode.elastic.membership import Membership
from vnode.elastic.processes import Agreement
from vnode.errors import ProcessError
from vnode.placement.clients import join_world, leave_world
from vnode.placement.leaves import is_array
from vnode.placement.placement import Placement
from vnode.placement.records import DifferentProcess
from vnode.placement.world import World, in_world, one_line
from vnode.threads import background

logger = logging.getLogger("vnode")

MAKING = threading.Lock()
"""Held by whoever traces and compiles for a generation: two at once would take the processors from training."""

SCOPE = "run 0"
"""The name of a run to the workers of a generation, of which each has one run."""


class Coming:
    """The generation to come, as one of its workers makes it.

    Args:
      order: the supervisor's, ``{generation, members, service}``.
      member: this process among the workers.
      home: the step, wherever its devices are.
      like: the state as the script has it.
      types: the arrays of the state as training has them; None where that must be asked for.
      batch: loads a batch for a placement, to see its types.
      give_way: has what is compiled for other generations give way to this one, of so many workers and this rank.

    Attributes:
      world: its world, once it is made.
      step: the step on its devices.
      error: why it could not be made.
    """

    def __init__(
        self,
        order: dict[str, Any],
        member: Membership,
        home: Any,
        like: Any,
        types: Sequence[Leaf] | None,
        batch: Callable[[Placement], Any],
        give_way: Callable[[int, int], None],
    ) -> None:
        self.order, self.member = order, member
        self.home, self.like, self.types, self.batch = home, like, types, batch
        self.give_way = give_way
        self.generation: int = order["generation"]
        self.members: list[dict[str, Any]] = order["members"]
        self.rank = next(i for i, each in enumerate(self.members) if each["worker"] == member.number)
        self.world: World | None = None
        self.step: Any = None
        self.error: BaseException | None = None
        self.closed = False
        self.thread = background(self.make, "vnode-coming", awaited=True)

    def make(self) -> None:
        """The thread that makes it, and tells the supervisor."""
        began = time.monotonic()
        try:
            self.build()
        except BaseException as error:  # the supervisor decides what becomes of it
            self.error = error
            if self.closed:
                return
            if self.is_wanted:
                logger.exception("generation %d cannot be made", self.generation)
            odd = error.process if isinstance(error, DifferentProcess) else None
            differs = None if odd is None else self.members[odd]["worker"]
            self.member.send("unprepared", generation=self.generation, error=one_line(error), differs=differs)
            return
        self.member.send("prepared", generation=self.generation, seconds=time.monotonic() - began)

    def build(self) -> None:
        """Makes the world, and compiles for it."""
        self.give_way(len(self.members), self.rank)
        world = join_world(
            self.order["service"],
            self.rank,
            len(self.members),
            generation=self.generation,
            interface=self.member.interface,
            workers=tuple(each["worker"] for each in self.members),
        )
        world.scopes.append(SCOPE)
        self.world = world
        self.member.enter(world)
        with MAKING, in_world(world):
            if not self.is_wanted:
                raise ProcessError(f"generation {self.generation} is not wanted any longer.")
            self.step = self.home.on(world.devices)
            placement = self.step.placement
            types = self.types if self.types is not None else self.asked_types()
            args, kwargs = self.step.spec.bound(
                (abstract_state(self.like, types, placement), self.batch(placement)), {}
            )
            self.step.executor.compile_for(args, kwargs)
        with in_world(world):
            vote_once()

    def close(self) -> None:
        """Lets go of its world, which this process has no part in any longer, once it is made or has been given up."""
        self.closed = True
        if self.thread.is_alive():
            self.member.lose(self.generation, [{"rank": -1, "why": "this worker has given it up"}])

        def end() -> None:
            self.thread.join()
            if self.world is not None and self.world.board is not None:
                leave_world(self.world)
                self.member.send("disconnected", service=self.order["service"])
                if self.step is not None:
                    self.step.forget()
            self.world = self.step = None

        background(end, "vnode-leave", awaited=True)

    @property
    def is_wanted(self) -> bool:
        """Whether neither the supervisor nor this worker has given the generation up."""
        return not (self.closed or self.generation in self.member.cancelled or self.generation in self.member.left)

    def asked_types(self) -> list[Leaf] | None:
        """The arrays of the state as those that train have them; None if nobody trains yet."""
        for each in self.members:
            if each["worker"] != self.member.number:
                with contextlib.suppress(ProcessError):
                    source = Source(f"worker {each['worker']}", each["handover"], self.member.token, 0)
                    try:
                        found = source.types()
                    finally:
                        source.close()
                    if found:
                        return found
        return None


def vote_once() -> None:
    """One vote of all workers, so that its program is compiled, and the connections between them are made."""
    agreement = Agreement(1)
    for number in range(2 if agreement.delay else 0):
        agreement.vote(number, [False] * 3)


def abstract_state(like: Any, types: Sequence[Leaf] | None, placement: Placement) -> Any:
    """What stands for a state on a placement's devices.

    Args:
      like: a state of the same structure.
      types: its arrays, as training has them; None for those of `like`.
      placement: where it will be.
    """
    if types is None:
        return like
    rest = iter(types)
    return jax.tree.map(lambda leaf: abstract_leaf(next(rest), placement) if is_array(leaf) else leaf, like)


def abstract_leaf(leaf: Leaf, placement: Placement) -> jax.ShapeDtypeStruct:
    """What stands for one array."""
    sharding, dtype = leaf.sharding(placement), jnp.dtype(leaf.dtype)
    if not leaf.key:
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=leaf.weak)
    made = jax.eval_shape(
        lambda data: jax.random.wrap_key_data(data, impl=leaf.key), jax.ShapeDtypeStruct(leaf.shape, dtype)
    )
    return jax.ShapeDtypeStruct(
        made.shape, made.dtype, sharding=leaf.sharding(placement) if made.shape else placement.sharding()
    )
