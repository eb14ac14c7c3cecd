"""Several worlds in one process: each computes what one device does, and none hears of the others.

Knows `tests.worlds`, in which a process of a world is a thread with devices of its own. The reference is the same run
on one device of JAX's own world.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vnode
from tests.worlds import in_threads, in_worlds, joined, service
from vnode.errors import ProcessError
from vnode.placement.process_arrays import gather_from_all
from vnode.placement.world import World, in_world, world

WEIGHTS = np.linspace(-1, 1, 3, dtype=np.float32)
DATA = {"x": np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)}
BATCHES = vnode.data.Batches(DATA, batch_size=10, seed=0)


@vnode.virtualize(virtual_nodes=4)
def step(w: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    x = batch["x"]
    return w - 0.1 * jnp.mean(jnp.sin(x @ w)[:, None] * x, 0), {"loss": jnp.mean((x @ w) ** 2)}


def run(devices: Any, **options: Any) -> Any:
    return vnode.elastic.run(step.on(devices), WEIGHTS, BATCHES, steps=12, progress=False, stop_signals=(), **options)


def bits(array: jax.Array) -> bytes:
    return np.asarray(array.addressable_data(0)).tobytes()


def test_runs_in_two_worlds_at_once() -> None:
    """Of 2 and of 3 processes; in the middle of a run, each of them also asks the devices of JAX's own world."""
    one, own = run(jax.devices()[:1]), world()
    reference, alone = bits(one.state), step.on(jax.devices()[:1])
    first = bits(alone(WEIGHTS, BATCHES.batch(0))[0])
    both = threading.Barrier(5)

    def train(here: World) -> tuple[bytes, list[bytes]]:
        with in_world(own):  # where a step meets others, its devices say, not the context
            there = step.on(here.devices)
            firsts = [bits(there(there.put(WEIGHTS), BATCHES.batch(0))[0])]
        assert here.launches == {frozenset(range(here.count)): 1}

        def between(number: int, values: Any) -> None:
            if number == 6:
                both.wait(60)
                assert world() is here
                firsts.append(bits(alone(alone.put(WEIGHTS), BATCHES.batch(0))[0]))

        result = run(here.devices, callback=between)
        assert gather_from_all([here.index], "to end the test").tolist() == [[i] for i in range(here.count)]
        return bits(result.state), firsts

    found = in_threads(lambda i: in_worlds(train, i + 2, generation=i + 1), 2)
    assert [len(world) for world in found] == [2, 3]
    assert {result for world in found for result, _ in world} == {reference}
    assert all(firsts == [first, first] for world in found for _, firsts in world)
    assert world() is own and not own.has_others


def test_a_state_goes_from_one_world_to_the_next() -> None:
    """Each process's part of it is its copy there; a process that is not in the next world is not waited for."""

    def leave(here: World) -> bytes:
        state = step.on(here.devices).put({"w": WEIGHTS, "key": jax.random.key(3)})
        if here.index == 2:
            return WEIGHTS.tobytes()
        with joined(address, here.index, 2, generation=2) as there:
            moved = step.on(there.devices).put(state)
            assert moved["w"].sharding.device_set == moved["key"].sharding.device_set == {*there.devices}
            return bits(moved["w"])

    with service() as address:
        assert set(in_worlds(leave, 3)) == {WEIGHTS.tobytes()}


def test_no_program_begins_in_a_process_where_one_has_failed() -> None:
    """Its messages would be taken for those that others still wait for: they would compute wrong bits.

    The program that is launched after the failed one is of the two processes that are left, and could succeed.
    """
    with service() as address:
        command = [sys.executable, "-m", "tests.programs.after_a_loss", address]
        alone = {**os.environ, "XLA_FLAGS": ""}  # a device each
        three = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=alone) for rank in range(3)
        ]
        said = [each.communicate(timeout=300)[0].splitlines()[-1] for each in three]
    assert said[:2] == ["failed failed"] * 2, said


def test_an_error_is_told_in_its_world_only() -> None:
    """The others of the world learn of it; the run of another one goes on to its end."""
    failed = threading.Event()

    def train(here: World) -> str:
        def between(number: int, values: Any) -> None:
            if number == 4 and here.generation == 2:
                assert failed.wait(60)
            if number == 4 and (here.generation, here.index) == (1, 1):
                raise ValueError("no more")

        try:
            return f"step {run(here.devices, callback=between).step}"
        except (ProcessError, ValueError) as error:
            if here.index == 0:
                failed.set()
            return str(error).splitlines()[0]

    found = in_threads(lambda i: in_worlds(train, 2, generation=i + 1), 2)
    assert found[0] == ["process 1 has failed: ValueError: no more", "no more"]
    assert found[1] == ["step 12", "step 12"]
