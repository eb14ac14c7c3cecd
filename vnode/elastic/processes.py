"""What the processes of a run agree about, so that all of them do the same thing between the same two steps.

Knows processes and flags. Must not know what is decided by them.

A signal reaches one process before another, and clocks differ. A process that stopped, or saved, one step before the
others would wait for them for ever, as they for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from vnode.errors import PlacementError, layout_message
from vnode.placement.exchange import everywhere, rows, whole_everywhere
from vnode.placement.placement import Placement
from vnode.placement.waiting import ready


class Agreement:
    """Flags that count in all processes once any has raised them, from the same step on.

    Args:
      delay: votes after which they count. They travel behind the steps under way, so that no device waits for them.
        In one process they count at once.
    """

    def __init__(self, delay: int) -> None:
        self.delay = delay if jax.process_count() > 1 else 0
        self.votes: deque[jax.Array] = deque()

    def vote(self, flags: Sequence[bool]) -> list[bool]:
        """Says which flags this process raises; all processes must call it, once for each step.

        Returns:
          The flags that any process raised `delay` calls before; none in the first calls.
        """
        if not self.delay:
            return list(flags)
        self.votes.append(whole_everywhere(rows(np.array(flags, np.uint32), jax.devices())))
        if len(self.votes) <= self.delay:
            return [False] * len(flags)
        vote = ready(self.votes.popleft(), "a vote on what is due")
        return [bool(flag) for flag in np.asarray(vote.addressable_data(0)).max(axis=0)]


def anywhere(flag: bool, what: str) -> bool:
    """Whether any process raises a flag; all processes must call it, and wait for one another.

    Args:
      flag: whether this one does.
      what: they do next; "to save a checkpoint", say.
    """
    return bool(everywhere([flag], what).any())


def check_present(placement: Placement) -> None:
    """Refuses a placement that leaves out some of the run's processes, which would see no metrics.

    Raises:
      PlacementError: it does.
    """
    there = {device.process_index for device in placement.devices}
    left_out = sorted(set(range(jax.process_count())) - there)
    if left_out:
        raise PlacementError(
            layout_message(
                "a run needs a device in each process.",
                facts=[f"{placement} has none in process {', '.join(map(str, left_out))}"],
                remedies=[
                    "leave at least one device of each process",
                    "or end the run, and start it with fewer processes: it resumes from its checkpoint",
                ],
            )
        )
