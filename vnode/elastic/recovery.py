"""Finds the remaining devices and the last good copy of the state after a failure.

Knows steps as callables with placements, devices, copies of a state in the host's memory and in checkpoints. Must not
know batches, metrics, or the loop.

The copy to go back to is in the host's memory. The state on the devices cannot serve: a step that donates it has
overwritten it by the time that an error shows, and what lived on the lost device alone is gone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vnode.elastic.run_devices import Request, none_left, remaining_placement
from vnode.errors import DeviceLost, VnodeError
from vnode.placement.donated import donated_leaves
from vnode.placement.host_copy import HostCopy
from vnode.placement.placement import Placement
from vnode.placement.process_barrier import block_until_ready

if TYPE_CHECKING:
    from vnode.elastic.checkpoints import Checkpoints

logger = logging.getLogger("vnode")

STATUS = re.compile("(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|INTERNAL|UNAVAILABLE|DATA_LOSS): ")
"""Beginnings of a failed runtime's messages: the codes of ``absl::StatusCode`` that a device can cause."""


def may_be_a_device(error: BaseException) -> bool:
    """Whether an error may come from a failed device.

    Errors of the runtime are `JaxRuntimeError`s where a result is waited for, but plain `ValueError`s with a status
    code in front where jax's fast path launches a program.
    """
    if isinstance(error, ValueError):
        return STATUS.match(str(error)) is not None
    return isinstance(error, DeviceLost | jax.errors.JaxRuntimeError)


class Recovery:
    """The copies of a run's state, and the devices that it has lost.

    Args:
      alive: whether a device still works.
      checkpoints: where copies are saved, if they are.
      like: the structure of the state.

    Attributes:
      lost: devices that failed.
      kept: the last copy in the host's memory, with its step number.
      saved: the step number of the last checkpoint.
      blamed: the step number of the copy that was gone back to when an error named no device.
    """

    def __init__(self, alive: Callable[[Any], bool], checkpoints: Checkpoints | None, like: Any) -> None:
        self.alive = alive
        self.checkpoints = checkpoints
        self.like = like
        self.lost: set[Any] = set()
        self.kept: tuple[int, HostCopy] | None = None
        self.saved: int | None = None
        self.blamed: int | None = None

    @property
    def good(self) -> int | None:
        """The step number of the state to go back to; None if there is none."""
        return self.saved if self.kept is None else max(self.kept[0], self.saved or 0)

    def copy_to_host(self, number: int, state: Any) -> None:
        """Copies a state to the host; waits until it is computed."""
        self.kept = number, HostCopy.from_state(block_until_ready(state, f"the state after {number} steps"))

    def resume(self, place: Callable[[int], Placement]) -> tuple[int, Any] | None:
        """The newest checkpoint that is good.

        Args:
          place: says on which devices to restore the checkpoint of a step number.

        Returns:
          Its step number and the state; None if there is none.
        """
        checkpoints = self.checkpoints
        if checkpoints is None:
            return None
        found = checkpoints.newest(lambda number: checkpoints.restore(number, self.like, place(number)))
        self.saved = None if found is None else found[0]
        return found

    def go_back(self, placement: Placement) -> tuple[int, Any]:
        """The last state that is known to be good, with its step number, on a placement's devices."""
        if self.kept is not None and self.kept[0] == self.good:
            return self.kept[0], self.kept[1].place_on(placement)
        found = self.resume(lambda number: placement)
        assert found is not None
        return found

    def blame(self, error: Exception, number: int, devices: list[Any]) -> tuple[Any, ...]:
        """Finds out which devices failed.

        Args:
          error: what was raised.
          number: the step to come.
          devices: those of the step.

        Returns:
          Those that were not known to be lost.

        Raises:
          VnodeError: devices are lost, and there is no copy of the state.
          Exception: the error, if no device is to blame and it came before, or there is no copy.
        """
        named = error.devices if isinstance(error, DeviceLost) else [d for d in devices if not self.alive(d)]
        gone = tuple(device for device in named if device not in self.lost)
        self.lost |= set(gone)
        if self.good is None and gone:
            raise VnodeError(
                f"lost {', '.join(map(str, gone))} at step {number}, and there is no copy of the state.",
                remedies=["keep_every=100 to keep one in the host's memory", "checkpoint=... and checkpoint_every"],
            ) from error
        if not gone:
            if self.good is None or self.blamed == self.good:
                raise error
            self.blamed = self.good
        return gone

    def sibling(self, step: Any, request: Request) -> Any:
        """A step on the devices of a request, less those that were lost.

        Raises:
          PlacementError: there are none.
        """
        if isinstance(request.devices, Placement | Mesh) or step.placement.together > 1:  # whole slices are lost
            step = step.on(request.devices, counts=request.counts)
        else:
            left = tuple(device for device in request.devices if device not in self.lost)
            if request.devices and not left:
                raise none_left(self.lost)
            step = step.on(left, counts=request.counts if left == request.devices else None)
        return (
            step.on(remaining_placement(step.placement, self.lost)) if self.lost & set(step.placement.devices) else step
        )

    def last_state(self, number: int, state: Any, placement: Placement) -> tuple[int, Any] | None:
        """The furthest state that can still be saved when a run ends in an error; None if it has been.

        Args:
          number: the step to come.
          state: the state before it, if it is there.
          placement: where it lives.

        Returns:
          A state and its step number: this one, unless it was given away, or never was computed; else the copy in the
          host's memory.
        """
        if (self.saved is None or number > self.saved) and is_intact(state):
            return number, state
        if self.kept is None or (self.saved is not None and self.kept[0] <= self.saved):
            return None
        try:
            return self.kept[0], jax.block_until_ready(self.kept[1].place_on(placement))
        except Exception as failed:
            logger.warning("the copy of step %d is saved from the CPU: %s", self.kept[0], failed)
            cpu = Placement(placement.virtual_nodes, jax.local_devices(backend="cpu")[:1], axis=placement.axis)
            return self.kept[0], self.kept[1].place_on(cpu)


def is_intact(state: Any) -> bool:
    """Whether a state's arrays are neither donated nor failed."""
    if state is None or donated_leaves(state, "state"):
        return False
    try:
        jax.block_until_ready(state)
    except Exception:
        return False
    return True


@jax.jit
def any_nan(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isnan(leaf).any() for leaf in leaves]).any()


def has_nan(state: Any) -> bool:
    """Whether a state contains NaN."""
    leaves = [
        leaf
        for leaf in jax.tree.leaves(state)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return bool(leaves) and bool(block_until_ready(any_nan(leaves), "a look for numbers that are none"))
