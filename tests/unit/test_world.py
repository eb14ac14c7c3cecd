"""Which world a context is in, and how processes meet by a service that knows of one.

Knows threads, contexts, and a service of jax. The reference for contexts is a list of the worlds entered; for barriers,
what jax's own do: all pass, or none.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from tests import worlds
from tests.budget import examples
from vnode.data.prefetch import Prefetch
from vnode.errors import ProcessError
from vnode.placement.failure_board import Notice
from vnode.placement.placement import Placement, device_list
from vnode.placement.process_barrier import failure_error, meet, process_names, run_watched
from vnode.placement.rendezvous import Rendezvous
from vnode.placement.world import World, in_world, is_local, is_shared, own_index, world, world_of
from vnode.step.compile_ahead import Worker
from vnode.threads import background


def in_background() -> World:
    """The world of a thread that is started here."""
    found: list[World] = []
    background(lambda: found.append(world()), "vnode-test").join(10)
    return found[0]


ACTIONS = ("entering", "leaving", "looking", "starting a thread")


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.sampled_from(ACTIONS), max_size=8), min_size=2, max_size=3))
def test_contexts_do_not_mix(courses: list[list[str]]) -> None:
    """Threads that enter and leave worlds in turns each see their own, as do the threads that they start."""
    turns = max(map(len, courses))
    together, own = threading.Barrier(len(courses)), world()

    def follow(index: int) -> None:
        try:
            walk(index)
        except AssertionError:
            together.abort()  # nobody waits for this one
            raise

    def walk(index: int) -> None:
        stack, entered = [own], []
        for turn in range(turns):
            together.wait(10)
            action = courses[index][turn] if turn < len(courses[index]) else "looking"
            if action == "entering":
                stack.append(World(index=index, generation=turn))
                entered.append(in_world(stack[-1]))
                entered[-1].__enter__()
            elif action == "leaving" and entered:
                stack.pop()
                entered.pop().__exit__(None, None, None)
            elif action == "starting a thread":
                assert in_background() is stack[-1]
            assert world() is stack[-1]

    worlds.in_threads(follow, len(courses))
    assert world() is own


def test_a_thread_that_serves_several_worlds() -> None:
    """A task belongs to the world of who submits it, a load to that of who asks, whoever has started the thread."""
    first, second, go = World(index=1), World(index=2), threading.Event()
    worker = Worker()
    with in_world(first):
        worker.submit(functools.partial(go.wait, 10))
        tasks = [worker.submit(world)]
    with in_world(second):
        tasks.append(worker.submit(world))
    go.set()
    assert [task.result(10) for task in tasks] == [first, second]
    with Prefetch(lambda step, placement: world()) as loads:
        for step, here in enumerate([first, second, first]):
            with in_world(here):
                assert loads.get(step, here.index) is here
    with in_world(second):
        assert run_watched(world, "to look", []) is second


class Device(types.SimpleNamespace):
    """A device that is none; fit for a mesh."""

    __hash__, __eq__ = object.__hash__, object.__eq__


def a_world(index: int, count: int = 3) -> World:
    """A world with devices that a fake client has, two in each process."""
    client = types.SimpleNamespace(process_index=lambda: index)
    devices = [
        Device(id=i, process_index=i // 2, client=client, platform="cpu", device_kind="cpu") for i in range(2 * count)
    ]
    return World(count, index, own_devices=tuple(devices))


def test_devices_tell_their_world() -> None:
    """Also outside of its context; those of JAX, and devices that have no client, are of the world of JAX."""
    own, here, there = world(), a_world(1), a_world(2)
    for one in (here, there):
        assert world_of(one.devices) is world_of(one.devices[-1:]) is one
        assert {own_index(device) for device in one.devices} == {one.index}
        assert [is_local(device) for device in one.devices] == [i // 2 == one.index for i in range(6)]
    fake = types.SimpleNamespace(process_index=1)
    with in_world(there):
        assert device_list(None) == list(there.devices) and device_list(2) == list(there.devices[:2])
        assert world_of(jax.devices()) is world_of([fake]) is own and is_local(jax.devices()[0]) and not is_local(fake)
        assert not is_shared(own)
        with pytest.raises(ProcessError, match=r"3 processes, but no jax\.distributed service"):
            is_shared()
    assert world().devices == tuple(jax.devices())
    assert Placement(4, jax.devices()[:1]).local_examples(6).tolist() == [*range(6)]


def test_messages_name_workers_by_their_numbers() -> None:
    """Ranks change with each generation; people know the numbers."""
    with in_world(World(3, 1, workers=(4, 0, 7))):
        error = str(failure_error(Notice(2, "ended", text="was killed by SIGKILL"), "for step 7", 1))
        assert error.startswith("worker 7 has ended: was killed by SIGKILL\n") and "worker 0 waited for step 7" in error
        assert process_names([0, 2]) == "workers 4, 7" and "process" not in error
    assert process_names([0, 2]) == "processes 0, 2"


def test_a_worker_counts_a_node_once_however_many_devices_share_it() -> None:
    """Along a further axis of the mesh: of one worker's devices, or of those of several."""
    devices = np.array(a_world(1).devices)
    for rows, counted in ((devices.reshape(3, 2), [3, 3, 2]), (devices.reshape(2, 3), [4, 8, 4])):
        for index, count in enumerate(counted):
            placement = Placement(8, mesh=Mesh(rows, ("vnode", "model")))
            with in_world(a_world(index)):
                for device in devices:
                    device.client.process_index = lambda index=index: index
                assert placement.own_nodes == count


@pytest.fixture(scope="module")
def clients() -> Iterator[list[Any]]:
    """Four clients of a service that knows of one."""
    with worlds.service() as address:
        made = [worlds.connected(address) for _ in range(4)]
        yield made
        for client in made:
            client.shutdown()


NAMES = map("number {}".format, itertools.count())


def ends(clients: list[Any], name: str, timeout_ms: int, delays: dict[int, float], **which: Any) -> dict[int, str]:
    """How a barrier ended, by process; empty if it was passed.

    Args:
      clients: of the service.
      name: of the barrier.
      timeout_ms: how long each waits.
      delays: seconds after which each process comes.
      which: those expected.
    """

    def come(index: int) -> str:
        time.sleep(delays[index])
        try:
            Rendezvous(clients[index], index, len(clients)).wait_at_barrier(name, timeout_ms, **which)
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return ""

    numbers = sorted(delays)
    return dict(zip(numbers, worlds.in_threads(lambda i: come(numbers[i]), len(numbers)), strict=True))


def test_a_barrier_of_keys(clients: list[Any]) -> None:
    """It waits for all that are expected, and no longer than it is told; who comes after that learns so at once."""
    assert ends(clients, "all", 10_000, {0: 0, 1: 0.2, 2: 0, 3: 0.1}) == {0: "", 1: "", 2: "", 3: ""}
    assert ends(clients, "all/of two", 10_000, {1: 0, 3: 0.1}, processes=[1, 3]) == {1: "", 3: ""}
    said = ends(clients, "missing", 200, {0: 0, 1: 0, 2: 0})
    assert len({*said.values()}) == 1
    assert said[0].startswith("DEADLINE_EXCEEDED: ") and said[0].endswith("missing: [3]")
    assert ends(clients, "missing", 10_000, {3: 0}) == {3: said[0]}
    assert ends(clients, "all", 10_000, {0: 0})[0].startswith("ALREADY_EXISTS")


@settings(max_examples=examples(30), deadline=None)
@given(delays=st.lists(st.integers(0, 8), min_size=2, max_size=4), timeout=st.integers(1, 8))
def test_all_pass_or_none(clients: list[Any], delays: list[int], timeout: int) -> None:
    """Also those that come just as another one gives up."""
    late = {i: delay / 100 for i, delay in enumerate(delays)}
    said = ends(clients, next(NAMES), 10 * timeout, late, processes=range(len(delays)))
    assert len({*said.values()}) == 1, said


def test_meetings_of_a_world(clients: list[Any]) -> None:
    """A meeting by keys; the error of one that does not come names it."""

    def come(index: int) -> str:
        here = World(2, index, Rendezvous(clients[index], index, 2), board=Quiet())
        with in_world(here):
            meet("to begin")
            if index:
                return ""
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("VNODE_PROCESS_TIMEOUT", "0.3")
                with pytest.raises(ProcessError) as caught:
                    meet("to go on")
        return str(caught.value)

    assert "waited 0 s for process 1" in worlds.in_threads(come, 2)[0]


class Quiet(types.SimpleNamespace):
    """A board on which nothing is written."""

    def find_failure(self, *_: Any) -> None:
        """Nobody has failed."""

    def await_failure(self, *_: Any) -> None:
        """Nor will anybody."""

    def post(self, notice: Any) -> None:
        """Nobody reads."""
