"""Which device each worker of a job has, and jobs that are no vnode programs.

Knows `Devices` and `Rigid`. Must not know sockets.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vnode.errors import WorkerError
from vnode.workers.actions import End, Kill, Record, Spawn, Terminate
from vnode.workers.fixed_command import Rigid
from vnode.workers.granted_devices import Devices


@given(st.lists(st.tuples(st.sampled_from(["take", "free", "grant", "trim"]), st.integers(0, 5)), max_size=40))
def test_no_device_has_two_workers_and_none_in_use_is_given_back(steps: list[tuple[str, int]]) -> None:
    """Against a plain dict of who has what."""
    devices, has = Devices(["0", "1"]), {}
    for what, number in steps:
        if what == "take" and number not in has:
            got = devices.allocate(number)
            assert (got is None) == (set(devices.granted) == set(has.values()))
            if got is not None:
                assert got not in has.values()
                has[number] = got
        elif what == "free":
            devices.free(number)
            has.pop(number, None)
        elif what == "grant":
            devices.grant([str(number)])
            assert str(number) in devices.granted
        elif what == "trim":
            before = list(devices.granted)
            devices.trim(number)
            assert set(has.values()) <= set(devices.granted) <= set(before)
            assert len(devices.granted) == min(max(number, len(has)), len(before))
        assert len(set(devices.granted)) == len(devices.granted)


def kinds(actions: list) -> list:
    return [action for action in actions if not isinstance(action, Record)]


def test_a_rigid_command_is_asked_to_end_and_then_killed() -> None:
    job = Rigid(2)
    assert kinds(job.begin(0.0)) == [Spawn(0)] and not kinds(job.tick(1.0))
    assert kinds(job.stop("cancelled", 143, 2.0)) == [Terminate(0)]
    assert not kinds(job.tick(11.0)) and kinds(job.tick(12.0)) == [Kill(0)]
    assert kinds(job.exited(0, -9, 13.0)) == [End(137, "Stopped: cancelled.")]


def test_a_rigid_command_has_its_exit_code_and_keeps_its_devices() -> None:
    job = Rigid(2)
    job.begin(0.0)
    job.resize(2, 1.0)
    with pytest.raises(WorkerError, match="keeps its 2 devices"):
        job.resize(3, 1.0)
    assert kinds(job.exited(0, 3, 2.0)) == [End(3, "")] and job.status()["step"] is None
