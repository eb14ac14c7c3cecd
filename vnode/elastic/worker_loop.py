"""The loop of a run in one of several workers: generations of workers follow one another, and the state goes with them.

Knows the loop of a run, the supervisor's messages, and parts of states. Must not know sockets, nor
how a world is made.

A planned change: the next generation is made beside this one. Its members vote when all are ready, and every worker
switches before the same step. A loss: the supervisor says "leave". Each survivor says how far its state is. The
furthest wins, and whoever has less fetches it. Either way the next generation begins with the bits of an undisturbed
run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from vnode.elastic.driver import AHEAD, Driver, due
from vnode.elastic.integrity import OwnCopy
from vnode.elastic.membership import ORPHANED, WORD, Membership, Orphaned
from vnode.elastic.metrics import are_computed, pack_metrics, scalar_metrics, unpack_metrics
from vnode.elastic.next_generation import NextGeneration
from vnode.elastic.process_agreement import Agreement
from vnode.elastic.recovery import Recovery, is_intact
from vnode.elastic.rehearsal import Rehearsals
from vnode.elastic.run_identity import differing_lines, facts_of_run, script_checksum
from vnode.elastic.run_result import FormerPlacement, Resize, Result
from vnode.elastic.state_boxes import HeldState, IncompleteState, build_state, is_complete, plan_fetches, types_of
from vnode.elastic.state_handover import Handover, Source, fetch_boxes
from vnode.errors import CheckpointError, ProcessError, layout_message
from vnode.placement.agreement import check_same
from vnode.placement.clients import KEPT, MADE
from vnode.placement.device_cache import empty_device_caches
from vnode.placement.donated import donated_leaves
from vnode.placement.leaves import bytes_of, is_key
from vnode.placement.placement import Placement
from vnode.placement.process_arrays import replicate_in_processes
from vnode.placement.process_barrier import block_until_ready, exchange_words, is_runtime_error
from vnode.placement.succession import wait_for_last
from vnode.placement.world import ALONE, in_world, one_line, world
from vnode.workers.messages import is_out_of_memory

logger = logging.getLogger("vnode")

LEAVE = 5.0
"""Seconds to wait until a world is left, before the next one is made all the same."""

FORMER_CLIENTS = 8
"""Clients of JAX that this process may have, those of generations and rehearsals that are over included. Those of
generations that ended by a loss come on top."""

CHECK_AFTER = 8
"""Steps of a generation after which its copies of the state are compared for the first time."""


class WorkerDriver(Driver):
    """One run, as one of the workers of a job has part in it.

    Attributes:
      member: this process among the workers.
      generation: the number of the generation that it is in; 0 for none.
      coming: the generation to come, as far as it is made.
      made: the generation that it is in.
      recent: the states before the last steps, of which the last that is computed is what a loss leaves.
      given: the newest generation of others to which this worker has offered its parts of the state.
      held: the parts that this worker holds of the last complete state, between two generations.
      inherited: metrics of steps that other workers have seen, until this one knows their structure.
    """

    def __init__(self, member: Membership, *args: Any) -> None:
        self.member = member
        super().__init__(*args)

    def begin(self, step: Any, state: Any) -> None:
        """Comes to the run; the loop begins with the first generation."""
        self.home = self.step = step
        self.script_state = state
        self.recovery = HeldRecovery(self.recovery.alive, None, self.recovery.like)
        self.inherited: list[Any] = []
        self.handover = Handover(self.member.interface, self.member.token, self.past_metrics)
        self.context = contextlib.ExitStack()
        self.generation = 0
        self.coming: NextGeneration | None = None
        self.made: NextGeneration | None = None
        self.recent: deque[tuple[int, Any]] = deque(maxlen=2)
        self.held: HeldState | None = None
        self.offered, self.given = -1, 0
        self.ahead = 1
        self.members: list[dict[str, Any]] = []
        self.rehearsals = Rehearsals(step, state)
        self.said_divided = False
        self.donates = bool(step.spec.donate_argnums)
        self.saves = self.options.checkpoint is not None
        self.resumed: int | None = None
        self.best: tuple[int, float] | None = None
        self.number = self.first = self.told = self.options.start
        self.state: Any = None
        self.last_save = time.monotonic()
        self.call, self.member.calls = self.member.calls, self.member.calls + 1
        self.facts_of_run = facts_of_run(self.home, self.script_state, self.data, self.options)
        self.member.leaves = functools.partial(getattr, self.stop, "name")
        self.arrive()

    def arrive(self) -> None:
        """Tells the supervisor that this worker can be used."""
        self.member.doing, self.member.waits = "to join", True
        self.member.arrive(
            {"script": script_checksum(), **self.facts_of_run},
            self.home.options.virtual_nodes,
            self.options.checkpoint,
            self.options.steps,
            call=self.call,
            handover=self.handover.address,
        )

    def run(self) -> Result:
        """The loop, generation after generation.

        Raises:
          BaseException: the error that ended it; the supervisor is told.
        """
        enters = True
        try:
            while True:
                try:
                    if enters:
                        self.enter()
                        enters = False
                    while self.number < self.end and not self.stopping and self.diverged is None:
                        self.advance()
                    self.finish()
                    break
                except Exception as error:
                    self.give_up(error)
                    enters = True
        except SystemExit:
            raise
        except BaseException as error:
            self.member.send("error", text=one_line(error), step=self.number)
            self.rescue(error)
            raise
        result = self.result()
        self.member.doing = "the rest of the script"
        self.member.send("finished", generation=self.generation, step=self.number, reason=result.reason)
        if self.member.closed:
            logger.error("the supervisor has died; the run ends after %d steps", self.number)
            raise Orphaned(ORPHANED)
        return result

    def enter(self) -> None:
        """Waits for the next generation of which this worker is a member, and begins there.

        Raises:
          SystemExit: the supervisor has no use for this worker any longer.
        """
        self.member.waits = True
        while True:
            self.member.wait(self.has_orders)
            loss = self.member.loss()
            if loss is not None:
                self.say_left(loss)
                continue
            order = self.member.take_prepare()
            if order is not None:
                self.drop_coming()
                self.coming = self.prepare_generation(order, self.held)
                continue
            if self.member.take_release():
                self.stand_by()
            if (wanted := self.wanted()) and self.held is not None:  # a worker that is left out
                self.handover.offer(wanted, self.held)
                self.given = wanted
            coming = self.coming
            if coming is None:
                continue
            if coming.generation in self.member.cancelled:
                self.drop_coming()
            elif coming.generation in self.member.gone and self.await_generation(coming):
                self.begin_in(coming, self.member.gone[coming.generation])
                return

    def await_generation(self, coming: NextGeneration) -> bool:
        """Waits for a generation; if it is to be made after the one before, leaves that first.

        Returns:
          Whether it is made; otherwise a worker of it is lost.
        """
        if coming.rejoins:
            self.let_go()
            coming.let_begin()
        self.member.wait(lambda: coming.finished or self.member.loss() is not None)
        if coming.finished and coming.error is not None:
            raise coming.error
        return coming.finished

    def has_orders(self) -> bool:
        """Whether the supervisor has sent an order about the next generation, or a former one."""
        coming, member = self.coming, self.member
        if member.prepare is not None or member.released or member.loss() is not None or self.wanted():
            return True
        return coming is not None and (coming.generation in member.cancelled or coming.generation in member.gone)

    def prepare_generation(self, order: dict[str, Any], held: HeldState | None) -> NextGeneration:
        """Starts to prepare the next generation; returns it."""
        types = self.handover.types or (None if held is None else held.leaves) or None
        return NextGeneration(
            order,
            self.member,
            self.home,
            self.script_state,
            types,
            self.batch_loader(),
            self.rehearsals.give_way,
        )

    def drop_coming(self) -> None:
        """Gives up the generation to come, if there is one."""
        if self.coming is not None:
            self.coming.close()
        self.coming = None

    def begin_in(self, coming: NextGeneration, order: dict[str, Any]) -> None:
        """Begins in a generation that is made."""
        began = time.perf_counter()
        assert coming.world is not None
        self.coming = None
        self.retire()
        self.made = coming
        self.context.enter_context(in_world(coming.world))
        self.generation, self.members = coming.generation, coming.members
        self.rehearsals.done.add((len(coming.members), coming.rank))
        self.agreement, self.own = Agreement(AHEAD), None
        self.sums.clear()
        self.pending.clear()
        before, self.step = FormerPlacement.from_placement(self.step.placement), coming.step
        number = self.number
        if order["step"] == -1:
            self.begin_new()
        else:
            self.take_over(order)
        self.held = None
        self.back_to(self.number)
        self.inherited = [each for each in self.inherited if each[0] < self.number]
        self.first = self.number
        self.handover.types = types_of(self.state)
        self.recent.clear()
        self.copy_to_host()
        if self.agreement.delay:
            self.own = OwnCopy(self.state)
            self.agreement.holders = self.own.holders
        self.member.generation = self.generation
        self.member.nodes = self.step.placement.own_nodes
        self.tell_divided()
        self.report()
        self.member.send("switched", generation=self.generation, step=self.number)
        if order["step"] != -1:
            sizes = before, FormerPlacement.from_placement(self.step.placement)
            change = Resize(self.number, *sizes, repeated=max(0, number - self.number))
            change.move = time.perf_counter() - began
            self.record_resize(self.step, change)

    def identify(self, batch: Any) -> None:
        """As in any process; only rank 0 has the checkpoint, and speaks for all.

        Raises:
          CheckpointError: it is another run's.
        """
        with self.member.refusing(self.number):
            super().identify(batch)

    def tell_divided(self) -> None:
        """Says once, and beforehand, where a state that is divided over workers comes from after a loss."""
        if self.said_divided or world().index or not world().has_others:
            return
        self.said_divided = True
        held = HeldState.from_state(self.number, self.state)
        pairs = zip(held.leaves, held.parts, strict=True)
        names = [f"state{leaf.path}" for leaf, parts in pairs if not is_complete([leaf], [[parts]])]
        if not names:
            return
        facts = [f"{len(names)} of {len(held.leaves)} arrays: {', '.join(names[:4])}{', ...' if names[4:] else ''}"]
        if self.saves:
            back = f"a loss of a worker goes back to the newest checkpoint in {self.options.checkpoint}."
            logger.info(layout_message(f"the state is divided over the workers: {back}", facts=facts))
            return
        remedy = "checkpoint=..., or vnode run --checkpoint FOLDER: a loss then goes back to the newest checkpoint"
        text = "the state is divided over the workers, and has no checkpoint: the loss of a worker ends the job."
        logger.warning(layout_message(text, facts=facts, remedies=[remedy]))

    def retire(self) -> threading.Thread | None:
        """Leaves the generation that this worker was in.

        Returns:
          The thread that frees its world, if there was one.
        """
        self.context.close()
        made, self.made = self.made, None
        return None if made is None else made.close()

    def let_go(self) -> None:
        """Leaves the generation that it was in, and frees its client of JAX, unless a thread still waits there."""
        if self.held is not None:
            self.held = self.held.on_host()
        leaves = self.retire()
        self.step, self.state, self.batch = self.home, None, None
        self.agreement, self.own = Agreement(AHEAD), None
        for waiting in (self.recent, self.pending, self.sums):
            waiting.clear()
        self.feed.forget()
        if leaves is not None:
            leaves.join(LEAVE)
        empty_device_caches()

    def begin_new(self) -> None:
        """Begins with the state that the script made, or with the newest checkpoint."""
        check_same("to begin a run", self.facts_of_run, shows={"state": differing_lines})
        self.number, state = self.options.start, self.script_state
        if self.saves:
            with self.member.busy_with("to restore a checkpoint"):
                found = self.restore_newest() if world().index == 0 else None
            if found is not None:
                self.handover.offer(self.generation, HeldState.from_state(*found))
            number = int(exchange_words("to restore a checkpoint", str(-1 if found is None else found[0]))[0])
            if number >= 0:
                self.number = self.resumed = self.recovery.saved = number
                state = found[1] if found is not None else self.fetch_whole_state()
                logger.info("resumed from step %d", number)
        self.state = self.step.put(state)
        block_until_ready(self.state, "the state of a new run")

    def restore_newest(self) -> tuple[int, Any] | None:
        """Restores the newest checkpoint onto one device of this process; only rank 0 calls it."""
        from vnode.elastic.run_checks import check_start

        with in_world(ALONE):
            folder = self.folder()
            found = self.recovery.resume(lambda number: single_device_placement(self.home.placement))
            check_start(self.options.start if found is None else found[0], self.options, folder)
            return found

    def folder(self) -> Any:
        """The folder of checkpoints, which rank 0 alone opens."""
        if self.checkpoints is None:
            from vnode.elastic.checkpoints import Checkpoints
            from vnode.elastic.options import CHECKPOINTS_KEPT

            assert self.options.checkpoint is not None
            self.checkpoints = Checkpoints(self.options.checkpoint, self.options.checkpoints_kept or CHECKPOINTS_KEPT)
            self.recovery.checkpoints = self.checkpoints
        return self.checkpoints

    def fetch_whole_state(self) -> Any:
        """Fetches the state that rank 0 has restored, onto one device of this process."""
        with in_world(ALONE):
            return self.fetch_state(self.members[:1], None, single_device_placement(self.home.placement))[1]

    def take_over(self, order: dict[str, Any]) -> None:
        """Begins with the state that the holders have, of which this worker may be one."""
        others = [holder for holder in order["holders"] if holder["worker"] != self.member.number]
        held = self.held
        holds = any(holder["worker"] == self.member.number for holder in order["holders"])
        if held is not None and not (holds if order["step"] is None else held.step == order["step"]):
            held = None  # of a generation that is long over
        if held is not None:
            self.handover.offer(self.generation, held)
            self.offered = held.step
        try:
            if held is not None and is_complete(held.leaves, [held.parts]):
                self.number, self.state = (
                    held.step,
                    build_state(self.script_state, held.leaves, held, {}, self.step.placement),
                )
            else:
                self.number, self.state = self.fetch_state(others, held, self.step.placement)
        except IncompleteState as error:
            if not self.saves:
                raise
            logger.warning("%s", one_line(error))
            self.begin_new()
            return
        block_until_ready(self.state, "the state of a new generation")
        self.compare_beginnings()

    def compare_beginnings(self) -> None:
        """Compares the states with which the workers begin a generation.

        Raises:
          ProcessError: they are not the same.
        """
        held = HeldState.from_state(self.number, self.state)
        sums = [
            zlib.crc32(bytes_of(part))
            for leaf, parts in zip(held.leaves, held.parts, strict=True)
            for box, part in parts.items()
            if box == tuple((0, length) for length in leaf.shape)  # divided arrays have no copies
        ]
        check_same("to begin a generation", {"step": self.number, "state": sums})

    def fetch_state(
        self, holders: list[dict[str, Any]], held: HeldState | None, placement: Placement
    ) -> tuple[int, Any]:
        """Builds the state from the parts that this worker and the other holders have.

        Args:
          holders: the others, by worker and address.
          held: the parts that this worker holds.
          placement: where the state is to be.

        Raises:
          ProcessError: one of the others does not answer.
          IncompleteState: some part of the state is nowhere; then all workers of the generation raise it.
        """
        with contextlib.ExitStack() as stack:
            sources = {}
            for holder in holders:
                name = f"worker {holder['worker']}"
                sources[name] = Source(name, holder["handover"], self.member.token, self.generation)
                stack.callback(sources[name].close)
            manifests = {name: source.manifest() for name, source in sources.items()}
            steps = {name: step for name, (step, _, _) in manifests.items()}
            if held is not None:
                steps["this worker"] = held.step
            if len(set(steps.values())) != 1:
                raise ProcessError(f"the holders of the state are not at the same step: {steps}")
            known = [each for _, each, _ in manifests.values()] + ([] if held is None else [held.leaves])
            leaves, boxes = known[0], {name: boxes for name, (_, _, boxes) in manifests.items()}
            is_complete(leaves, [*boxes.values(), *([] if held is None else [held.parts])], needed=True)
            got = fetch_boxes(sources, leaves, plan_fetches(leaves, held, boxes, placement))
            step = next(iter(steps.values()))
            self.inherit(next(iter(sources.values())), step)
        return step, build_state(self.script_state, leaves, held, got, placement)

    def past_metrics(self) -> list[Any]:
        """The metrics of the steps so far, for a worker that has not seen them."""
        return [
            *self.inherited,
            *([number, pack_metrics(metrics)] for number, metrics, _ in list(self.history.entries)),
        ]

    def inherit(self, source: Source, step: int) -> None:
        """Asks a holder of the state for the metrics of the steps behind it that this worker has not seen."""
        seen = max([number for number, _ in [*self.inherited, *self.history]], default=-1)
        with contextlib.suppress(ProcessError):  # training does not need them
            past = {number: said for number, said in source.past_metrics() if seen < number < step}
            self.inherited += sorted(past.items())

    def agree(self) -> bool:
        """Votes on what is due before the next step: the end, a checkpoint, a switch to the next generation."""
        self.member.check_end()
        order = self.member.take_prepare()
        if order is not None:
            self.drop_coming()  # the supervisor has given it up
            self.coming = self.prepare_generation(order, None)
        self.report()
        self.begin_beside()
        self.withdraw_later()
        return super().agree()

    def flags(self) -> list[bool]:
        """The flags that this worker votes for."""
        closed = self.member.closed
        switch = max(self.member.gone, default=0) > self.generation  # perhaps without any worker of this one
        return [bool(self.member.stop), self.is_late(), switch, closed, not closed]

    def asked_to_stop(self) -> bool:
        """As in one process, by what the supervisor says: a signal to one worker ends its part in the run alone."""
        return (bool(self.member.stop) or self.member.closed) and not self.agreement.delay

    def take_flags(self, flags: list[bool]) -> bool:
        """Carries out the flags on which the workers have agreed."""
        asked, self.late, switch, closed, open_ = flags
        self.stopping = asked or (closed and not open_)  # one whose connection alone has broken stops nobody
        if self.stopping:
            self.reason = self.reason or self.member.stop or "the supervisor has died"
        if switch and not self.stopping:
            self.switch()
            return False  # the workers of the next generation vote, too
        self.recent.append((self.number, self.state))
        return not self.stopping

    def switch(self) -> None:
        """Goes on in the next generation, or leaves; every worker of this one does before the same step."""
        self.fetch(0)
        block_until_ready(self.state, f"step {self.number - 1}")
        block_until_ready(list(self.agreement.votes), "the last votes")  # then nothing of this generation is under way
        self.held = HeldState.from_state(self.number, self.state)
        known = self.member.wait(self.knows_switch, WORD)
        if not known:
            raise ProcessError("the supervisor did not name the generation to which the workers switch.")
        self.state = None
        self.recent.clear()
        if self.coming is None:
            self.member.doing, self.member.nodes = "to hand over its state", 0
        self.enter()

    def knows_switch(self) -> bool:
        """Whether the supervisor has said what comes next."""
        return max(self.member.gone, default=0) > self.generation or self.member.loss() is not None

    def wanted(self) -> int:
        """The generation of others that begins with what this worker holds, if it was not offered yet; 0 for none."""
        newest = max(self.member.gone, default=0)
        own = self.coming is not None and self.coming.generation == newest
        if own or self.held is None or newest <= max(self.generation, self.given):
            return 0
        holders = self.member.gone[newest]["holders"]
        return newest if any(holder["worker"] == self.member.number for holder in holders) else 0

    def stand_by(self) -> None:
        """Leaves the workers that train: they have what they need."""
        self.handover.withdraw()
        self.retire()
        self.generation = self.member.generation = self.member.nodes = 0
        self.held = None
        self.arrive()

    def give_up(self, error: Exception) -> None:
        """After an error: leaves the generation, if another worker is lost.

        Raises:
          Exception: the error, if it is this worker's own.
        """
        if not (isinstance(error, ProcessError) or is_runtime_error(error)):
            raise error  # of the script, whatever happens to others at the same time
        loss = self.member.loss()
        if loss is None and is_out_of_memory(one_line(error)):
            raise error  # no other worker is the cause
        if loss is None:
            vain = getattr(error, "process", None) is None  # it names no worker that is at fault
            self.member.send("lost_peer", generation=self.generation, text=one_line(error), vain=vain)
            loss = self.member.wait(self.member.loss, WORD)
        if loss is None:
            raise error
        logger.warning("step %d: %s", self.number, one_line(error))
        traceback.clear_frames(error.__traceback__)  # they hold the state
        self.held = self.last_held_state() or self.held
        self.state = None
        self.recent.clear()
        self.pending.clear()
        self.say_left(loss)

    def say_left(self, loss: dict[str, Any]) -> None:
        """Tells the supervisor which state this worker has after a loss."""
        self.member.doing, self.member.waits = "to go on without a worker that is lost", True
        step = -1 if self.held is None else self.held.step
        self.member.answered = loss["generation"]
        if self.coming is not None and self.coming.generation <= loss["generation"]:
            self.drop_coming()
        self.member.send("left", generation=loss["generation"], step=step)

    def last_held_state(self) -> HeldState | None:
        """The parts that this worker holds of the furthest computed state."""
        states = [*self.recent, (self.number, self.state)]
        for number, state in sorted(states, key=lambda each: -each[0]):
            if state is None or donated_leaves(state, "state"):
                continue
            arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
            if all(is_key(array) or array.is_ready() for array in arrays) and is_intact(state):
                self.tell_finished(number)
                return HeldState.from_state(number, state)
        kept = self.recovery.kept
        return kept[1].held if kept is not None else None  # pyright: ignore[reportAttributeAccessIssue]

    def tell_finished(self, number: int) -> None:
        """Tells the metrics of the steps behind a state that is computed."""
        while self.pending and self.pending[0][0] < number and are_computed(self.pending[0][1]):
            self.fetch(len(self.pending) - 1)

    def report(self) -> None:
        """Tells the supervisor where this worker is."""
        self.member.step, self.member.waits = self.number, False
        self.member.doing = f"step {self.number}"

    def report_metrics(self, number: int, values: Any) -> None:
        """As in one process; the supervisor is told the numbers, too."""
        for before, said in self.inherited:
            self.history.append(before, unpack_metrics(said, values))
        self.inherited = []
        self.member.metrics = scalar_metrics(values)
        with self.member.busy_with(f"the callbacks of step {number}"):
            super().report_metrics(number, values)

    def evaluate(self) -> None:
        """As in one process."""
        with self.member.busy_with(f"an evaluation after {self.number} steps"):
            super().evaluate()

    def batch_loader(self) -> Callable[[Placement], Any]:
        """Loads the batch of the step to come for any placement, to see its types."""
        number = self.number
        return lambda placement: self.feed.load_alone(number, placement)

    def begin_beside(self) -> None:
        """Begins background work some steps into a generation: compiles for a loss, compares copies of the state.

        Before that, frees the clients of JAX of former generations, if there are many.
        """
        if self.number != self.first + CHECK_AFTER:
            return
        if len(MADE) - len(KEPT) > FORMER_CLIENTS:
            empty_device_caches()
        if not self.agreement.delay:
            return
        if self.coming is None and not (self.made is not None and self.made.rejoins):
            self.rehearsals.begin(world().count, world().index, self.handover.types, self.batch_loader())
        if self.own is not None:
            self.own.prepare()

    def withdraw_later(self) -> None:
        """Withdraws an offered state once all others have fetched it: they have voted on later steps."""
        if self.offered >= 0 and self.number > self.offered + AHEAD + 1:
            self.handover.withdraw()
            self.offered = -1

    def follow(self, request: Any) -> None:
        """The supervisor alone says on which devices the run goes on."""

    def copy_to_host(self) -> None:
        """Copies the state, where the states before the last steps are not there to go back to."""
        if self.donates or self.options.on_nan == "stop":
            super().copy_to_host()

    def save_is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        late = self.late if self.agreement.delay else self.is_late()
        return self.saves and (late or due(self.number, self.options.checkpoint_every))

    def save(self) -> None:
        """Has rank 0 save the state, of which every worker gives its parts."""
        if not self.saves:
            return
        wait_for_last("a checkpoint")
        state = replicate_in_processes(self.state)
        self.last_save = time.monotonic()
        saved = self.recovery.saved
        if world().index or (saved is not None and self.number <= saved):
            return
        try:
            with self.member.busy_with(f"to save checkpoint {self.number}"), in_world(ALONE):
                self.folder()
                self.write_checkpoint(self.number, own_copy_of(state))
        except CheckpointError as error:
            if self.number >= self.end or self.stopping:
                raise
            self.log_message(f"the run goes on without a checkpoint of step {self.number}: {error}", logging.ERROR)

    def rescue(self, error: BaseException) -> None:
        """Saves the last good state before an error ends the run, if no other worker has it."""
        if self.saves and world().count == 1 and self.generation:
            super().rescue(error)
        elif self.generation and not isinstance(error, CheckpointError):
            error.add_note("The other workers go on without this one.")

    def close(self) -> None:
        """Ends this worker's server and background work."""
        super().close()
        self.handover.close()
        self.rehearsals.close()
        self.drop_coming()
        if self.checkpoints is not None:
            with in_world(ALONE):
                self.checkpoints.close()
        self.context.close()


class HeldRecovery(Recovery):
    """Copies of the parts that a worker holds of a state; checkpoints are read when a run begins."""

    def copy_to_host(self, number: int, state: Any) -> None:
        """Copies the parts of the state that this worker holds to the host."""
        held = HeldState.from_state(number, block_until_ready(state, f"the state after {number} steps"), copy=True)
        self.kept = number, HeldCopy(held, self.like)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def good(self) -> int | None:
        """The step number of the copy to go back to."""
        return None if self.kept is None else self.kept[0]


@dataclasses.dataclass(frozen=True)
class HeldCopy:
    """A copy of the parts that a worker holds of a state, with the interface of a copy of a state.

    Attributes:
      held: the copy.
      like: a state of the same structure.
    """

    held: HeldState
    like: Any

    def on(self, placement: Placement) -> Any:
        """The state on a placement's devices, if this worker holds all that it needs there."""
        plan_fetches(self.held.leaves, self.held, {}, placement)
        return build_state(self.like, self.held.leaves, self.held, {}, placement)


def single_device_placement(placement: Placement) -> Placement:
    """A placement of the same nodes on one device of this process."""
    return Placement(placement.virtual_nodes, jax.local_devices()[:1], axis=placement.axis)


def own_copy_of(state: Any) -> Any:
    """A state that is whole in this process, on a device of its own client of JAX."""
    held = HeldState.from_state(0, state)
    return build_state(state, held.leaves, held, {}, Placement(1, jax.local_devices()[:1]))
