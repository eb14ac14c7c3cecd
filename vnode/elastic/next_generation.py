"""Makes the next generation of a worker: its world of JAX, the step on its devices, and the programs, ahead of time.

Knows orders to prepare, steps, and states as what is held of them. Must not know when the generation begins.

While this generation trains, a thread makes the next one: a second client of JAX, the step compiled for its devices,
and one vote, by which the connections between its workers are made. So a switch waits for the state alone.

Where two clients have no room beside one another, the supervisor orders to *rejoin*: the thread waits until this
process has left the generation before, and lets go of its client; the programs come from JAX's cache if they were
compiled before. Then a switch waits for all of that.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vnode.compat import carry_settings
from vnode.elastic.integrity import copy_holders, unchecked
from vnode.elastic.membership import Membership
from vnode.elastic.process_agreement import Agreement
from vnode.elastic.state_boxes import Leaf
from vnode.elastic.state_handover import Source
from vnode.errors import ProcessError
from vnode.placement.agreement import DifferentProcess
from vnode.placement.clients import check_reachable, join_world, keep_client, leave_world
from vnode.placement.leaves import is_array
from vnode.placement.placement import Placement
from vnode.placement.process_barrier import meet
from vnode.placement.world import ALONE, World, in_world, one_line
from vnode.threads import background

logger = logging.getLogger("vnode")

MAKING = threading.Lock()
"""Held by whoever traces and compiles for a generation: two at once would take the processors from training."""

FLAGS = 5
"""The number of flags that workers vote on before each step (`vnode.elastic.worker_loop`)."""

SCOPE = "run 0"
"""The name of a run to the workers of a generation, of which each has one run."""


class NextGeneration:
    """The generation to come, as one of its workers makes it.

    Args:
      order: the supervisor's, ``{generation, members, service, rejoin}``.
      member: this process among the workers.
      home: the step, wherever its devices are.
      like: the state as the script has it.
      types: the arrays of the state as training has them; None where that must be asked for.
      batch: loads a batch for a placement, to see its types.
      give_way: has what is compiled for other generations give way to this one, of so many workers and this rank.

    Attributes:
      rejoins: whether it is made only after `let_begin`.
      world: its world, once it is made.
      step: the step on its devices.
      finished: whether it is made, or could not be.
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
        self.rejoins: bool = order.get("rejoin", False)
        self.may_begin = threading.Event()
        self.world: World | None = None
        self.step: Any = None
        self.finished = False
        self.error: BaseException | None = None
        self.closed = False
        with in_world(ALONE):  # or the thread would hold the world that it is called in
            self.thread = background(carry_settings(self.work), "vnode-coming", awaited=True)

    def work(self) -> None:
        """Runs in a thread: makes the generation, and tells the supervisor when this worker may switch to it."""
        began = time.monotonic()
        try:
            if self.rejoins:
                check_reachable(self.order["service"])
                self.say_prepared(began)
                self.may_begin.wait()
            self.build()
            if not self.rejoins:
                self.say_prepared(began)
        except BaseException as error:  # the supervisor decides what becomes of it
            self.error = error
            if self.is_wanted:
                logger.exception("generation %d cannot be made", self.generation)
            if not (self.closed or self.may_begin.is_set()):
                odd = error.process if isinstance(error, DifferentProcess) else None
                differs = None if odd is None else self.members[odd]["worker"]
                self.member.send("unprepared", generation=self.generation, error=one_line(error), differs=differs)
        with self.member.changed:
            self.finished = True
            self.member.changed.notify_all()

    def say_prepared(self, began: float) -> None:
        """Tells the supervisor that this worker may switch; `began` is when it started to prepare."""
        self.member.send("prepared", generation=self.generation, seconds=time.monotonic() - began)

    def let_begin(self) -> None:
        """Says that this process has left the previous generation."""
        self.may_begin.set()

    def build(self) -> None:
        """Makes the world, and compiles for it."""
        self.check_wanted()
        self.give_way(len(self.members), self.rank)
        world = contextvars.Context().run(  # its threads are of no other world, and hold none
            join_world,
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
            self.check_wanted()
            self.step = self.home.on(world.devices)
            placement = self.step.placement
            types = self.types if self.types is not None else self.fetch_types()
            state = abstract_state(self.like, types, placement)
            args, kwargs = self.step.spec.bind_positional((state, self.batch(placement)), {})
            self.step.executor.compile_for(args, kwargs)
        with in_world(world):
            meet("to connect with the other workers")  # gloo waits for half a minute only, and some compile for longer
            vote_once(copy_groups(state))

    def close(self) -> threading.Thread:
        """Frees the generation's world in a thread, once it is made or given up.

        Returns:
          The thread.
        """
        self.closed = True
        if self.thread.is_alive():
            self.member.lose(self.generation, [{"rank": -1, "why": "this worker has given it up"}])

        def end() -> None:
            self.let_begin()
            self.thread.join()
            if self.world is not None and self.world.board is not None:
                if self.error is not None or self.generation in {*self.member.left, *self.member.cancelled}:
                    keep_client(self.world.devices[0].client)  # a program may still wait for a worker there
                leave_world(self.world)
                self.member.forget(self.generation)
                self.member.send("disconnected", service=self.order["service"])
                if self.step is not None:
                    self.step.forget()
            self.world = self.step = None

        return background(end, "vnode-leave", awaited=True)

    @property
    def is_wanted(self) -> bool:
        """Whether neither the supervisor nor this worker has given the generation up."""
        return not (self.closed or self.generation in self.member.cancelled or self.generation in self.member.left)

    def check_wanted(self) -> None:
        """Stops the preparation if the supervisor has cancelled it.

        Raises:
          ProcessError: it has.
        """
        if not self.is_wanted:
            raise ProcessError(f"generation {self.generation} is no longer needed.")

    def fetch_types(self) -> list[Leaf] | None:
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


def copy_groups(state: Any) -> int:
    """The number of groups of a state's arrays with checksums in a vote; `state` may be abstract."""
    return len({copy_holders(leaf) for leaf in jax.tree.leaves(state)} - {None})


def vote_once(groups: int) -> None:
    """One vote of all workers, so that its program is compiled, and the connections between them are made.

    Args:
      groups: of arrays that have checksums in it.
    """
    agreement = Agreement(1)
    for number in range(2 if agreement.delay else 0):
        agreement.vote(number, [False] * FLAGS, unchecked(groups))


def abstract_state(like: Any, types: Sequence[Leaf] | None, placement: Placement) -> Any:
    """The abstract state (`jax.ShapeDtypeStruct`s) on a placement's devices.

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
    """The abstract value of one array."""
    sharding, dtype = leaf.sharding(placement), jnp.dtype(leaf.dtype)
    if not leaf.key:
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=leaf.weak)
    made = jax.eval_shape(
        lambda data: jax.random.wrap_key_data(data, impl=leaf.key), jax.ShapeDtypeStruct(leaf.shape, dtype)
    )
    return jax.ShapeDtypeStruct(
        made.shape, made.dtype, sharding=leaf.sharding(placement) if made.shape else placement.sharding()
    )
