"""One of three processes, of which the third dies: what the others launch after the program that fails with it.

    after_a_loss.py ADDRESS RANK      # of a service as in `vnode.workers.coordination_keeper`

Prints, for a program of the two that are left: "failed", "succeeded" or "waits".
"""

import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vnode
from vnode.placement.clients import join_world
from vnode.placement.process_arrays import gather_from_all
from vnode.placement.world import in_world


@vnode.virtualize(virtual_nodes=6)
def step(w: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    return w - 0.1 * jnp.mean(batch[:, None] * w, 0), jnp.mean(batch)


def main(address: str, rank: int) -> None:
    here, batches = join_world(address, rank, 3), vnode.data.Batches(np.arange(6, dtype=np.float32), batch_size=6)
    three, two = step.on(here.devices), step.on(here.devices[:2])
    with in_world(here):
        given = [(each.put(np.ones(4096, np.float32)), batches.load(0, each.placement)) for each in (three, two)]
        before = [each(*arguments) for each, arguments in zip((three, two), given, strict=True)]
        jax.block_until_ready(before[: 2 if rank < 2 else 1])
        gather_from_all([rank], "to lose one")
        if rank == 2:
            os._exit(0)
        time.sleep(0.5)
        fails = three(*given[0])[0]
        later = two(*given[1])[0]
        end = time.monotonic() + 20
        while time.monotonic() < end and not (fails.is_ready() and later.is_ready()):
            time.sleep(0.01)
        said = ["waits" if not array.is_ready() else outcome(array) for array in (fails, later)]
    print(*said, flush=True)
    os._exit(0)  # not to wait for the one that is gone


def outcome(array: jax.Array) -> str:
    """Whether the program of an array has succeeded or failed."""
    try:
        jax.block_until_ready(array)
    except Exception:
        return "failed"
    return "succeeded"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
