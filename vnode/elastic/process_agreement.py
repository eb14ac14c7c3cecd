"""Turns flags of single processes into flags that all processes see before the same step.

Knows processes and flags. Must not know what is decided by them.

A signal reaches one process before another, and clocks differ. A process that stopped, or saved, one step before the
others would wait for them for ever, as they for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vnode.errors import PlacementError, ProcessError, layout_message
from vnode.placement.device_cache import device_cache
from vnode.placement.placement import Placement
from vnode.placement.process_arrays import stack_by_process
from vnode.placement.process_barrier import block_until_ready, exchange_words, process_names
from vnode.placement.succession import order_after_last, record_last
from vnode.placement.world import is_shared, one_line, world

Checked = Sequence[int]
"""After how many steps a process looked at its copies of the state (0: it did not), and their checksums, two words for
each group of arrays."""


class Agreement:
    """Flags that take effect in all processes, from the same step on, once any process has raised them.

    Votes also find out processes that are not at the same step, and copies of the state that are not the same.

    Args:
      delay: votes after which they count. They travel behind the steps under way, so that no device waits for them.
        In one process they count at once.

    Attributes:
      holders: for each group of arrays, which processes have the same parts of them; as `OwnCopy.holders`.
    """

    def __init__(self, delay: int) -> None:
        self.holders: Sequence[Sequence[int]] = ()
        self.delay = delay if is_shared() else 0
        self.votes: deque[jax.Array] = deque()

    def vote(self, number: int, flags: Sequence[bool], checked: Checked = ()) -> list[bool]:
        """Says which flags this process raises; all processes must call it, once for each step.

        Args:
          number: the step to come.
          flags: which of them it raises.
          checked: checksums of its copies of the state at some step.

        Returns:
          The flags that any process raised `delay` calls before; none in the first calls.

        Raises:
          ProcessError: `delay` calls before, another process came to another step, or had another copy of the state.
        """
        if not self.delay:
            return list(flags)
        here = world()
        here.launches[frozenset(range(here.count))] += 1
        mine = np.array([number, *checked, *flags], np.uint32)
        votes = order_after_last([stack_by_process(mine, here.devices)], 0)[0]
        self.votes.append(exchange_votes(votes))
        record_last(self.votes, -1)
        if len(self.votes) <= self.delay:
            return [False] * len(flags)
        votes = np.asarray(block_until_ready(self.votes.popleft(), "a vote on what is due").addressable_data(0))
        check_numbers(votes[:, 0])
        check_copies(votes[:, 1 : 1 + len(checked)].tolist(), self.holders)
        return [bool(flag) for flag in votes[:, 1 + len(checked) :].max(axis=0)]


def exchange_votes(votes: jax.Array) -> jax.Array:
    """The votes of all processes, in each of them.

    On CPUs jax runs programs of less than 1,000 operations in the thread that calls them, which could then not see that
    another process has failed. So this one has more.
    """
    return vote_program(NamedSharding(votes.sharding.mesh, PartitionSpec()))(votes)[0]  # pyright: ignore


@device_cache(maxsize=4)
def vote_program(target: NamedSharding) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """A program that sends votes to all processes."""

    def count(votes: jax.Array) -> tuple[jax.Array, jax.Array]:
        return votes, (jax.lax.iota(votes.dtype, 2048) ^ votes[0, 0]).max()

    return jax.jit(count, out_shardings=target)


def check_numbers(numbers: np.ndarray) -> None:
    """Refuses processes that are at different steps.

    Raises:
      ProcessError: some are.
    """
    if (numbers != numbers[0]).any():
        odd = int(np.argmax(numbers != numbers[0]))
        raise ProcessError(
            layout_message(
                "the processes of this run are not at the same step.",
                facts=[
                    f"{process_names([0])} came to step {numbers[0]}, {process_names([odd])} to step {numbers[odd]}"
                ],
                remedies=[
                    "did one of them return to a copy of its state, after an error that the others did not have?"
                ],
            ),
            process=odd,
            told=True,
        )


def check_copies(checked: Sequence[Checked], holders: Sequence[Sequence[int]]) -> None:
    """Refuses copies of a state, or of parts of it, that are not the same in all processes that have them.

    Args:
      checked: by process.
      holders: for each group of arrays, by process: the lowest process that has the same parts of them.

    Raises:
      ProcessError: some differ.
    """
    for number in {number for number, *_ in filter(None, checked)} - {0}:
        there = [process for process, (of_state, *_) in enumerate(checked) if of_state == number]
        for group, first in enumerate(holders):
            sums = {process: tuple(checked[process][1 + 2 * group :][:2]) for process in there}
            for holder in set(first):
                check_equal(number, {process: sums[process] for process in there if first[process] == holder})


def check_equal(number: int, sums: Mapping[int, tuple[int, ...]]) -> None:
    """Refuses checksums of the state after so many steps that are not the same.

    Raises:
      ProcessError: some differ.
    """
    most = Counter(sums.values()).most_common(1)[0][0] if sums else ()
    odd = [process for process in sums if sums[process] != most]
    if odd:
        raise ProcessError(
            layout_message(
                f"the state of {process_names(odd)} differs from the others' after {number} steps.",
                facts=[
                    f"{process_names([process])}: {first:08x}{second:08x}" for process, (first, second) in sums.items()
                ],
                remedies=[
                    "does the step compute something that depends on the process: a callback's result, say?",
                    "or is memory or a device of that process at fault? Restart from the last good checkpoint",
                ],
            ),
            process=odd[0],
            told=True,
        )


def errors_anywhere(error: BaseException | None, what: str) -> dict[int, str]:
    """The errors of all processes, by process. All must call it: it is a barrier.

    Args:
      error: of this one, if it has one.
      what: the processes do next; "to save a checkpoint", say.
    """
    words = exchange_words(what, "-" if error is None else f"+{one_line(error)}")
    return {process: word[1:] for process, word in sorted(words.items()) if word.startswith("+")}


def check_present(placement: Placement) -> None:
    """Refuses a placement that leaves out some of the run's processes, which would see no metrics.

    Raises:
      PlacementError: it does.
    """
    there = {device.process_index for device in placement.devices}
    left_out = sorted({device.process_index for device in world().devices} - there)
    if left_out:
        raise PlacementError(
            "a run needs a device in each process.",
            facts=[f"{placement} has none in process {', '.join(map(str, left_out))}"],
            remedies=[
                "leave at least one device of each process",
                "or end the run, and start it with fewer processes: it resumes from its checkpoint",
            ],
        )
