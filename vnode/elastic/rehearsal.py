"""Compiles the programs of a generation with one worker less, before a worker is lost.

Knows clients of JAX, and how a step is compiled. Must not know the supervisor, nor whether a loss comes.

Programs are kept by JAX's cache of compiled programs, by number of workers and rank, in a folder of this process. To
compile for a world of n workers one needs its client of JAX. This process plays all n of them for that, with a service
of its own, and none of them ever computes. When a worker is lost, the others then read their programs from the cache:
a fifth of a second in place of compiling.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.compat import carry_settings
from vnode.elastic.integrity import unchecked
from vnode.elastic.next_generation import FLAGS, MAKING, abstract_state, copy_groups
from vnode.elastic.process_agreement import vote_program
from vnode.elastic.state_boxes import Leaf
from vnode.placement.clients import Stage
from vnode.placement.placement import Placement
from vnode.placement.process_arrays import device_by_process
from vnode.placement.world import World, in_world
from vnode.threads import background
from vnode.workers import JOB

logger = logging.getLogger("vnode")


class Rehearsals:
    """The programs that this process has compiled, and those that it compiles in the background.

    Args:
      home: the step, wherever its devices are.
      like: the state as the script has it.

    Attributes:
      done: for which numbers of workers and ranks there are programs.
    """

    def __init__(self, home: Any, like: Any) -> None:
        self.home, self.like = home, like
        self.done: set[tuple[int, int]] = set()
        self.thread: threading.Thread | None = None
        self.current: tuple[int, int] | None = None
        self.closed = False

    @staticmethod
    def are_kept() -> bool:
        """Whether JAX keeps programs, so that a rehearsal is of use."""
        return bool(jax.config.jax_compilation_cache_dir) and JOB in os.environ

    def begin(self, count: int, rank: int, types: Sequence[Leaf], batch: Callable[[Placement], Any]) -> None:
        """Begins to compile for a generation with a worker less, of whatever rank that is.

        Args:
          count: of workers that train now.
          rank: of this one.
          types: the arrays of the state as training has them.
          batch: loads a batch for a placement, to see its types.
        """
        wanted = [(count - 1, each) for each in (rank, rank - 1) if 0 <= each < count - 1]
        wanted = [each for each in wanted if each not in self.done]
        busy = self.thread is not None and self.thread.is_alive()
        if not wanted or busy or not self.are_kept():
            return
        self.closed = False
        work = carry_settings(functools.partial(self.work, wanted, types, batch))
        self.thread = background(work, "vnode-rehearsal", awaited=True)

    def work(self, wanted: Sequence[tuple[int, int]], types: Sequence[Leaf], batch: Callable[[Placement], Any]) -> None:
        """The thread that compiles."""
        for count, rank in wanted:
            if self.closed:
                return
            self.current = count, rank
            try:
                self.compile(count, rank, types, batch)
            except Exception as error:  # then the programs are compiled after a loss
                logger.info("the programs of %d workers are not compiled ahead: %s", count, error)
            self.done.add((count, rank))
            self.current = None

    def give_way(self, count: int, rank: int) -> None:
        """Lets a generation be made: waits for its programs if they are being compiled, and begins no others."""
        self.closed = True
        while self.current == (count, rank):
            time.sleep(0.01)

    def compile(self, count: int, rank: int, types: Sequence[Leaf], batch: Callable[[Placement], Any]) -> None:
        """Compiles for one place in a generation."""
        with MAKING, Stage(count) as stage:
            if self.closed:
                return
            world = stage.world(rank)
            with in_world(world):
                step = self.home.on(world.devices)
                state = abstract_state(self.like, types, step.placement)
                args, kwargs = step.spec.bind_positional((state, batch(step.placement)), {})
                step.executor.compile_for(args, kwargs)
                if count > 1:
                    compile_vote(world, copy_groups(state))
                    step.forget()

    def close(self) -> None:
        """Begins nothing more."""
        self.closed = True


def compile_vote(world: World, groups: int) -> None:
    """Compiles the program by which the workers of a world vote.

    Args:
      world: theirs.
      groups: of arrays that have checksums in a vote.
    """
    mesh = Mesh(np.array(device_by_process(world.devices)), ("process",))
    words = 1 + len(unchecked(groups)) + FLAGS
    votes = jax.ShapeDtypeStruct(
        (world.count, words), np.uint32, sharding=NamedSharding(mesh, PartitionSpec("process"))
    )
    vote_program(NamedSharding(mesh, PartitionSpec())).lower(votes).compile()  # pyright: ignore[reportFunctionMemberAccess]
