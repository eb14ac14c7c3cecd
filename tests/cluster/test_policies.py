"""Policies against brute force over all shares, and properties that every policy has."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.budget import examples
from tests.cluster import cases
from vnode.cluster import FREE, Costs, Job, Speeds, policies, simulate
from vnode.cluster.kind_jobs import mixed_table
from vnode.cluster.policies import gavel
from vnode.cluster.policies.increments import concave, top_up
from vnode.cluster.policies.wfs import fair_shares
from vnode.errors import ClusterError

NAMES = list(policies.POLICIES)
ELASTIC = ("wfs_any", "max_min", "goodput", "shortest_remaining")
COSTS = Costs(start=20, growth=10, growth_stall=1, shrink=0.5, release=3)


def vectors(table, devices: int):
    """All shares of jobs on some devices: at least one each."""
    for shares in itertools.product(*(range(1, int(demand) + 1) for demand in table.demand)):
        if sum(shares) <= devices:
            yield np.array(shares)


@settings(max_examples=examples(120), deadline=None)
@given(cases.jobs(most=4, devices=6), st.integers(4, 6))
def test_goodput_and_max_min_are_the_best_of_all_shares(jobs, devices) -> None:
    """The largest sum of logarithms; the largest least level, then the next one."""
    table = cases.table(jobs)
    found = policies.POLICIES["goodput"](0.0, table, devices)
    rate = lambda shares: table.speed[np.arange(len(table)), shares]  # noqa: E731
    best = max(np.log(rate(shares)).sum() for shares in vectors(table, devices))
    assert np.log(rate(found)).sum() == pytest.approx(best, abs=1e-9)

    full = table.speed[np.arange(len(table)), np.minimum(table.demand, devices)]
    levels = lambda shares: sorted((rate(shares) / full / table.priority).round(12).tolist())  # noqa: E731
    found = policies.POLICIES["max_min"](0.0, table, devices)
    assert levels(found)[0] == max(levels(shares)[0] for shares in vectors(table, devices))


@settings(max_examples=examples(120), deadline=None)
@given(cases.jobs(most=4, devices=6), st.integers(2, 6), st.lists(st.floats(0.05, 1), min_size=4, max_size=4))
def test_shortest_remaining_is_the_best_of_all_shares(jobs, devices, left) -> None:
    """The largest sum of relative speeds, weighted by how soon jobs would end; none has to have a device."""
    table = cases.table(jobs, remaining=left[: len(jobs)])
    most = np.minimum(table.demand, devices)
    full = table.speed[np.arange(len(table)), most]
    weight = 1 / (full * np.sqrt(table.remaining / full))
    value = lambda shares: (weight * table.speed[np.arange(len(table)), shares]).sum()  # noqa: E731
    every = itertools.product(*(range(int(demand) + 1) for demand in table.demand))
    best = max(value(np.array(shares)) for shares in every if sum(shares) <= devices)
    assert value(policies.POLICIES["shortest_remaining"](0.0, table, devices)) == pytest.approx(best)


@given(
    st.lists(st.tuples(st.sampled_from([1, 5, 10]), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=8),
    st.integers(0, 8),
)
def test_fair_shares_are_powers_of_two_that_fit(jobs, more) -> None:
    """A job of higher priority and no smaller demand never has less; devices are left over only if none can double."""
    priorities, demands = zip(*jobs, strict=True)
    devices = len(jobs) + more
    shares = fair_shares(priorities, demands, devices)
    assert sum(shares) <= devices and all(
        1 <= s <= n and s & (s - 1) == 0 for s, n in zip(shares, demands, strict=True)
    )
    left = devices - sum(shares)
    assert all(share > left or 2 * share > demand for share, demand in zip(shares, demands, strict=True))
    for i, j in itertools.permutations(range(len(jobs)), 2):
        if priorities[i] > priorities[j] and demands[i] >= demands[j]:
            assert 2 * shares[i] > shares[j] or shares[i] == demands[i]


def test_fair_shares_of_the_published_example() -> None:
    """Figure 4 of the rule: three jobs of priorities 1, 5 and 10 that demand 4 on 4 devices and then on 8."""
    assert fair_shares([1], [4], 4) == [4]
    assert fair_shares([1, 5], [4, 2], 4) == [2, 2]
    assert fair_shares([1, 5, 10], [4, 2, 4], 4) == [1, 1, 2]


@settings(max_examples=examples(60), deadline=None)
@given(cases.jobs(powers=True), st.sampled_from([*NAMES, "guarantee"]), st.sampled_from([FREE, COSTS]), st.data())
def test_properties_of_every_policy(jobs, name, costs, data) -> None:
    """All jobs end; shares fit; other names change nothing; a later arrival changes nothing before it."""
    result = simulate(jobs, 8, name, costs=costs)
    figures = {job.id: job for job in result.of_jobs()}
    assert all(math.isfinite(job.jct) and job.jct > 0 for job in figures.values())
    held = np.zeros(len(jobs), int)
    for event in result.events:
        if event.kind in ("holds", "ended"):
            held[event.job] = event.devices
            assert held.sum() <= 8
    for index, job in enumerate(result.jobs):  # the work that it has done is what it had to do
        runs = [(e.time, e.devices, e.stall) for e in result.events if e.job == index and e.kind == "runs"]
        ends = [*(time for time, _, _ in runs[1:]), job.arrival + figures[job.id].jct]
        done = sum(
            max(end - max(start + stall, 0), 0) * cases.speed(job, count)
            for (start, count, stall), end in zip(runs, ends, strict=True)
        )
        assert done >= job.work * (1 - 1e-6)
        if costs is FREE:
            assert done == pytest.approx(job.work)

    others = [Job(**{**vars(job), "id": f"1{job.id}"}) for job in jobs]  # in the same order
    again = simulate(others, 8, name, costs=costs)
    assert [job.jct for job in again.of_jobs()] == [job.jct for job in result.of_jobs()]

    at = data.draw(st.floats(0, result.makespan))
    later = Job(id="99", arrival=at, work=1.0, speeds=Speeds.linear(50.0, 8), demand=8, priority=10.0)
    more = simulate([*jobs, later], 8, name, costs=costs)
    before = lambda found: [  # noqa: E731
        (e.time, e.kind, found.jobs[e.job].id, e.devices) for e in found.events if e.time < at
    ]
    assert before(more) == before(result)


@settings(max_examples=examples(120), deadline=None)
@given(cases.jobs(minima=True), st.sampled_from([*NAMES, "guarantee"]), st.sampled_from([FREE, COSTS]))
def test_minima_are_respected_and_all_jobs_end(jobs, name, costs) -> None:
    """A job has nothing or what it needs at least; none starves; no device is idle beside one that would gain by it."""
    seen: list[str] = []

    def watched(now, table, devices):
        decided = policies.named(name, costs=costs)(now, table, devices)
        shares = getattr(decided, "shares", decided)
        if not ((shares == 0) | (shares >= np.minimum(table.minimum, table.demand))).all():
            seen.append(f"{shares} of at least {table.minimum}")
        faster = table.speed[np.arange(len(table)), shares] * (1 + 1e-12) < table.speed.max(1)
        if name in ELASTIC and shares.sum() < devices and (faster & (shares > 0)).any():
            seen.append(f"{shares} of {devices}, demanded {table.demand}")
        return decided

    result = simulate(jobs, 8, watched, costs=costs)
    assert not seen and all(math.isfinite(job.jct) for job in result.of_jobs())


@settings(max_examples=examples(60), deadline=None)
@given(cases.jobs(), st.sampled_from(ELASTIC))
def test_no_device_is_idle_while_a_job_would_gain_by_it(jobs, name) -> None:
    """Fair sharing admits no job at the cost of one of higher priority; the others leave none out."""
    table = cases.table(jobs)
    shares = policies.POLICIES[name](0.0, table, 8)
    if shares.sum() < 8:
        faster = [
            cases.speed(job, job.demand) > cases.speed(job, int(s)) * (1 + 1e-12) and (s > 0 or name != "wfs_any")
            for job, s in zip(sorted(jobs, key=lambda job: (job.arrival, int(job.id))), shares, strict=True)
        ]
        assert not any(faster)


@settings(max_examples=examples(100), deadline=None)
@given(cases.jobs(most=8), st.sampled_from(["goodput", "shortest_remaining", "static_backfill"]))
def test_a_guarantee_holds(jobs, inner) -> None:
    """Where resizes take no time, no job ends later than by static priority, or than a tenth later."""
    static = {job.id: job.jct for job in simulate(jobs, 8, "static").of_jobs()}
    for factor in (1.0, 1.1):
        found = simulate(jobs, 8, "guarantee", factor=factor, inner=inner).of_jobs()
        assert all(job.jct <= factor * static[job.id] * (1 + 1e-6) for job in found)


@given(
    st.lists(
        st.lists(st.integers(1, 20), min_size=5, max_size=5).map(lambda g: sorted(g, reverse=True)),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 16),
)
def test_top_up_hands_out_devices_one_by_one(gains, devices) -> None:
    table = np.array([[0, *each] for each in gains], float)
    shares = top_up(table, np.zeros(len(gains), int), np.full(len(gains), 5), devices, np.arange(len(gains)))
    slow = [0] * len(gains)
    for _ in range(min(devices, 5 * len(gains))):
        next_ = max((i for i in range(len(gains)) if slow[i] < 5), key=lambda i: (gains[i][slow[i]], -i))
        slow[next_] += 1
    assert shares.tolist() == slow


@given(st.lists(st.floats(0, 100), min_size=2, max_size=9))
def test_the_hull_is_concave_and_touches(values) -> None:
    row = np.array([[0.0, *values]])
    (hull,) = concave(row)
    assert (hull[1:] >= row[0, 1:] - 1e-9).all() and (np.diff(hull[1:], 2) <= 1e-9).all()
    for n in range(1, len(hull)):  # the least: each point is one of the values, or on a line between two of them
        lines = [values[n - 1]]
        lines += [
            values[i - 1] + (values[j - 1] - values[i - 1]) * (n - i) / (j - i)
            for i in range(1, n)
            for j in range(n + 1, len(hull))
        ]
        assert hull[n] == pytest.approx(max(lines), abs=1e-9)


def test_policies_that_decide_what_cannot_be_are_refused() -> None:
    jobs = [Job(id="a", arrival=0, work=1, speeds=Speeds.linear(10, 2), demand=2)]
    with pytest.raises(ClusterError, match=r"(?s)there is no policy 'best'.*use one of fifo, static"):
        simulate(jobs, 4, "best")
    with pytest.raises(ClusterError, match=r"(?s)together 3 of 4 devices.*job a: 3, it demands 2"):
        simulate(jobs, 4, lambda now, jobs, devices: [3])
    with pytest.raises(ClusterError, match="jobs that do not exist: b"):
        simulate(jobs, 4, lambda now, jobs, devices: {"b": 1})
    with pytest.raises(ClusterError, match="without devices for ever: a"):
        simulate(jobs, 4, lambda now, jobs, devices: {})
    with pytest.raises(ClusterError, match="two jobs are called 'a'"):
        simulate(jobs * 2, 4, "fifo")
    assert simulate(jobs, 4, lambda now, jobs, devices: {job.id: job.demand for job in jobs}).makespan == 10


def mixed(draw_speeds: list[list[float]], scales: list[int], priorities: list[float], devices: list[int]):
    """A table of jobs on three kinds."""
    kinds = dict(zip("abc", devices, strict=True))
    jobs = [
        Job(
            id=str(i),
            arrival=0,
            work=100.0 * (i + 1),
            demand=scale,
            minimum=scale,
            priority=priority,
            speeds={
                kind: Speeds((0.0,) * scale + (speed,)) for kind, speed in zip("abc", speeds, strict=True) if speed
            },
        )
        for i, (speeds, scale, priority) in enumerate(zip(draw_speeds, scales, priorities, strict=True))
    ]
    return mixed_table(jobs, kinds)


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.integers(1, 6), st.sampled_from(["gavel_max_min", "gavel_makespan", "gavel_ftf"]), st.booleans())
def test_time_shares_reach_the_optimum_of_the_whole_programme(data, count, name, aware) -> None:
    """Solved again by another method (simplex), with a row for every job and the formulas of the paper."""
    speed = st.sampled_from([0.0, 1.0, 2.0, 3.5, 10.0])
    speeds = data.draw(st.lists(st.tuples(speed, speed, speed), min_size=count, max_size=count))
    speeds = [[s or 1.0 if k == 0 else s for k, s in enumerate(each)] for each in speeds]
    scales = data.draw(st.lists(st.sampled_from([1, 2]), min_size=count, max_size=count))
    priorities = data.draw(st.lists(st.sampled_from([1.0, 5.0]), min_size=count, max_size=count))
    table = mixed(speeds, scales, priorities, data.draw(st.lists(st.integers(2, 4), min_size=3, max_size=3)))
    table.age[:] = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    allocate = gavel.allocation(name + "_aware" * aware)
    assert allocate is not None
    x = allocate(table)
    assert (x >= -1e-9).all() and (x.sum(1) <= 1 + 1e-6).all()
    assert (table.scale @ x <= table.devices * (1 + 1e-6)).all()
    flat = np.ones_like(table.speed) if name == "gavel_max_min" else np.repeat(table.speed.max(1)[:, None], 3, 1)
    known = table.speed if aware else flat

    def best(levels: np.ndarray) -> float:
        """The largest least level."""
        c, rows, bounds = np.zeros(3 * count + 1), [], []
        c[-1] = -1
        for j in range(count):
            row = np.zeros(3 * count + 1)
            row[3 * j : 3 * j + 3], row[-1] = -levels[j], 1
            total = np.zeros(3 * count + 1)
            total[3 * j : 3 * j + 3] = 1
            rows, bounds = [*rows, row, total], [*bounds, 0, 1]
        for k in range(3):
            row = np.zeros(3 * count + 1)
            row[k:-1:3] = table.scale
            rows, bounds = [*rows, row], [*bounds, table.devices[k]]
        return -linprog(c, A_ub=np.array(rows), b_ub=bounds, method="highs-ds").fun

    if name == "gavel_ftf":
        part = np.minimum(1 / (table.devices / count / table.scale[:, None]).sum(1), 1)
        alone = table.remaining / ((known * table.devices).sum(1) / count / table.scale * part)
        ratio = ((table.age + table.remaining / (known * x).sum(1)) / alone).max()
        for factor, good in ((1 + 1e-6, True), (1 - 1e-6, False)):  # no smaller ratio can be had
            slack = ratio * factor * alone - table.age
            reached = (slack > 0).all() and best(known * (slack / table.remaining)[:, None]) >= 1
            assert reached == good
        return
    weights = {
        "gavel_max_min": table.scale / table.priority / (known @ (table.devices / table.devices.sum())),
        "gavel_makespan": 1 / table.remaining,
    }[name]
    levels = known * weights[:, None]
    assert (levels * x).sum(1).min() == pytest.approx(best(levels), rel=1e-6)


def test_fifo_on_kinds_is_in_the_order_of_arrival() -> None:
    table = mixed([[1, 5, 0], [2, 4, 0], [9, 9, 9]], [2, 1, 1], [1, 1, 1], [2, 2, 1])
    aware, agnostic = (gavel.allocation(name) for name in ("gavel_fifo_aware", "gavel_fifo"))
    assert aware is not None and agnostic is not None
    assert aware(table).tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert agnostic(table).tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
