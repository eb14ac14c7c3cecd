"""The loops: events in order, a repeated simulation of what a change concerns, graphs with rows taken out and added.

Knows arrays, and the rule of service (see `vnode.partition.simulator.simulate`). Must not know names, or who asks.

Compiled by numba: an event does little and depends on those before it, which is what NumPy and XLA are slow at (the
figures are in `benchmarks/simulator.py`). The machine code is cached next to this file, or in numba's folder for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    import numba
except ImportError as error:
    raise ImportError("simulating task graphs needs numba: pip install 'vnode[partition]'") from error

compiled: Any = numba.njit(cache=True, nogil=True)
"""Machine code that lets other threads run."""


@compiled
def before(time, task, other_time, other, priority):
    """Whether a task is served before another: ready earlier, or of smaller priority, or of smaller number."""
    if time != other_time:
        return time < other_time
    if priority[task] != priority[other]:
        return priority[task] < priority[other]
    return task < other


@compiled
def push(times, tasks, size, time, task, priority):
    """Adds to a binary heap of `size` entries."""
    i = size
    while i:
        above = (i - 1) >> 1
        if before(times[above], tasks[above], time, task, priority):
            break
        times[i], tasks[i] = times[above], tasks[above]
        i = above
    times[i], tasks[i] = time, task


@compiled
def drop(times, tasks, size, priority):
    """Takes the first away from a binary heap that has `size` entries afterwards."""
    time, task = times[size], tasks[size]
    i = 0
    while True:
        below = 2 * i + 1
        if below >= size:
            break
        if below + 1 < size and before(times[below + 1], tasks[below + 1], times[below], tasks[below], priority):
            below += 1
        if before(time, task, times[below], tasks[below], priority):
            break
        times[i], tasks[i] = times[below], tasks[below]
        i = below
    times[i], tasks[i] = time, task


@compiled
def events(duration, priority, resource_start, resource, dependency_start, dependency, resources):
    """Serves all tasks in order. Returns when each was ready, began and ended; the order; how many were served."""
    n = len(duration)
    follower_start = np.zeros(n + 1, np.int32)
    for e in range(len(dependency)):
        follower_start[dependency[e] + 1] += 1
    for t in range(n):
        follower_start[t + 1] += follower_start[t]
    at, follower = follower_start.copy(), np.empty(len(dependency), np.int32)
    for t in range(n):
        for e in range(dependency_start[t], dependency_start[t + 1]):
            d = dependency[e]
            follower[at[d]] = t
            at[d] += 1

    ready, start, end = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    order, missing, free = np.empty(n, np.int32), np.empty(n, np.int32), np.zeros(resources, np.int64)
    times, tasks, size, served = np.empty(n + 1, np.int64), np.empty(n + 1, np.int32), 0, 0
    for t in range(n):
        missing[t] = dependency_start[t + 1] - dependency_start[t]
        if not missing[t]:
            push(times, tasks, size, 0, t, priority)
            size += 1
    while size:
        time, t = times[0], tasks[0]
        size -= 1
        drop(times, tasks, size, priority)
        begin = time
        for j in range(resource_start[t], resource_start[t + 1]):
            begin = max(begin, free[resource[j]])
        done = begin + duration[t]
        for j in range(resource_start[t], resource_start[t + 1]):
            free[resource[j]] = done
        start[t], end[t], order[served] = begin, done, t
        served += 1
        for e in range(follower_start[t], follower_start[t + 1]):
            f = follower[e]
            ready[f] = max(ready[f], done)
            missing[f] -= 1
            if not missing[f]:
                push(times, tasks, size, ready[f], f, priority)
                size += 1
    return ready, start, end, order, served


@compiled
def since(ready, end, removed, moved, retimed, origin, dependency_start, dependency):
    """A time before which a change has no effect: every task whose times differ is ready then or later, before and now.

    A task that waits for others than before may be ready as soon as those are done that it still waits for and that
    were there; if one of them is later or earlier than it was, then that one is concerned, and ready before it.
    """
    first = np.int64(1) << 62
    for t in removed:
        first = min(first, ready[t])
    for t in retimed:
        first = min(first, ready[origin[t]])
    for t in moved:
        if origin[t] >= 0:
            first = min(first, ready[origin[t]])
        earliest = np.int64(0)
        for e in range(dependency_start[t], dependency_start[t + 1]):
            d = origin[dependency[e]]
            if d < 0:  # waits for one that was added, which is ready before it and counts itself
                earliest = np.int64(1) << 62
                break
            earliest = max(earliest, end[d])
        first = min(first, earliest)
    return first


@compiled
def examine(t, times, tasks, size, priority, ready, end, head, following, dependency_start, dependency):
    """Puts a task into the heap if it is ready, else on the list of one that it waits for. Returns the heap's size."""
    time = np.int64(0)
    for e in range(dependency_start[t], dependency_start[t + 1]):
        d = dependency[e]
        if end[d] < 0:
            following[t] = head[d]
            head[d] = t
            return size
        time = max(time, end[d])
    ready[t] = time
    push(times, tasks, size, time, t, priority)
    return size + 1


@compiled
def replay(
    duration, priority, resource_start, resource, dependency_start, dependency, resources,
    old_ready, old_start, old_end, old_order, renumbered, removed, moved, retimed, allowed,
):  # fmt: skip
    """Serves the tasks of a changed graph in their old order where that is right; see `delta`.

    Returns as `events` does, and how many were served again; fewer than all were served if the order was mended more
    than `allowed` times, or tasks wait for each other.
    """
    n, olds = len(duration), len(old_ready)
    origin = np.full(n, -1, np.int32)
    for t in range(olds):
        if renumbered[t] >= 0:
            origin[renumbered[t]] = t
    first = since(old_ready, old_end, removed, moved, retimed, origin, dependency_start, dependency)

    ready, start, end = np.empty(n, np.int64), np.empty(n, np.int64), np.full(n, -1, np.int64)
    order, last = np.empty(n, np.int32), np.full(resources, -1, np.int32)
    before_on = np.empty(len(resource), np.int32)  # of each place of a task on a resource, who was there before
    at = served = 0
    while at < olds and old_ready[old_order[at]] < first:
        o = old_order[at]
        t = renumbered[o]
        ready[t], start[t], end[t], order[at] = old_ready[o], old_start[o], old_end[o], t
        for j in range(resource_start[t], resource_start[t + 1]):
            last[resource[j]] = t
        at += 1
    served = at

    # Tasks outside the old order: in a heap when they are ready, or each on the list of one that it waits for.
    times, tasks, size = np.empty(n + 1, np.int64), np.empty(n + 1, np.int32), 0
    head, following, apart = np.full(n, -1, np.int32), np.empty(n, np.int32), np.zeros(n, np.bool_)
    for t in moved:
        apart[t] = True
        size = examine(t, times, tasks, size, priority, ready, end, head, following, dependency_start, dependency)
    next_time, following_one, again = np.int64(0), -1, 0  # the next of the old order, and when it is ready
    while True:
        while following_one < 0 and at < olds:
            t = renumbered[old_order[at]]
            at += 1
            if t < 0 or apart[t]:
                continue
            next_time = np.int64(0)
            following_one = t
            for e in range(dependency_start[t], dependency_start[t + 1]):
                done = end[dependency[e]]
                if done < 0:
                    following[t] = head[dependency[e]]
                    head[dependency[e]] = t
                    following_one = -1
                    break
                next_time = max(next_time, done)
        if size and (following_one < 0 or before(times[0], tasks[0], next_time, following_one, priority)):
            time, t = times[0], tasks[0]
            size -= 1
            drop(times, tasks, size, priority)
            now = np.int64(0)  # those it waits for may have been served again meanwhile
            for e in range(dependency_start[t], dependency_start[t + 1]):
                done = end[dependency[e]]
                if done < 0:
                    now = -1
                    break
                now = max(now, done)
            if now != time:
                size = examine(t, times, tasks, size, priority, ready, end, head, following, dependency_start, dependency)
                continue
        elif following_one >= 0:
            time, t = next_time, following_one
            following_one = -1
        else:
            break

        begin, wrong = time, False
        for j in range(resource_start[t], resource_start[t + 1]):
            other = last[resource[j]]
            if other >= 0:
                begin = max(begin, end[other])
                wrong |= before(time, t, ready[other], other, priority)
        if wrong:  # somebody was served before this one who should come after it: go back to where that was right
            top = served
            while wrong:
                served -= 1
                undone = order[served]
                end[undone] = -1
                for j in range(resource_start[undone], resource_start[undone + 1]):
                    last[resource[j]] = before_on[j]
                wrong = False
                for j in range(resource_start[t], resource_start[t + 1]):
                    other = last[resource[j]]
                    if other >= 0 and before(time, t, ready[other], other, priority):
                        wrong = True
            again += top - served
            if again > allowed:
                return ready, start, end, order, served, again
            for i in range(served, top):
                size = examine(
                    order[i], times, tasks, size, priority, ready, end, head, following, dependency_start, dependency
                )
            if following_one >= 0:
                size = examine(
                    following_one, times, tasks, size, priority, ready, end, head, following, dependency_start, dependency
                )
                following_one = -1
            size = examine(t, times, tasks, size, priority, ready, end, head, following, dependency_start, dependency)
            continue

        done = begin + duration[t]
        ready[t], start[t], end[t], order[served] = time, begin, done, t
        for j in range(resource_start[t], resource_start[t + 1]):
            before_on[j] = last[resource[j]]
            last[resource[j]] = t
        served += 1
        waiting = head[t]
        head[t] = -1
        while waiting >= 0:
            t = waiting
            waiting = following[t]
            size = examine(t, times, tasks, size, priority, ready, end, head, following, dependency_start, dependency)
    return ready, start, end, order, served, again


@compiled
def rewrite(arrays, label, new_duration, gone, added, waiting, awaited):
    """A graph without some tasks and with others at its end, and with more dependencies.

    Args: those of the old graph; durations of all, and who goes; what is added; new dependencies by who waits.

    Returns: the new graph's arrays, the number of each old or added task in it, and who waits for others than before.
    """
    _, priority, resource_start, resource, dependency_start, dependency = arrays
    new_priority, new_label, added_on_start, added_on, added_after_start, added_after = added
    olds, total = len(priority), len(new_duration)
    renumbered, n = np.empty(total, np.int32), 0
    for t in range(total):
        renumbered[t] = -1 if gone[t] else n
        n += not gone[t]
    durations, priorities, labels = np.empty(n, np.int64), np.empty(n, np.int32), np.empty(n, np.int32)
    on_start, on = np.zeros(n + 1, np.int32), np.empty(len(resource) + len(added_on), np.int32)
    after_start = np.zeros(n + 1, np.int32)
    after = np.empty(len(dependency) + len(added_after) + len(waiting), np.int32)
    moved, k, m, w, t, place = np.empty(n, np.int32), 0, 0, 0, 0, 0
    for o in range(total):
        if gone[o]:
            continue
        durations[t] = new_duration[o]
        other = o >= olds
        if o < olds:
            priorities[t], labels[t] = priority[o], label[o]
            for j in range(resource_start[o], resource_start[o + 1]):
                on[k] = resource[j]
                k += 1
            for e in range(dependency_start[o], dependency_start[o + 1]):
                d = renumbered[dependency[e]]
                after[m] = d
                m += d >= 0
                other |= d < 0
        else:
            a = o - olds
            priorities[t], labels[t] = new_priority[a], new_label[a]
            for j in range(added_on_start[a], added_on_start[a + 1]):
                on[k] = added_on[j]
                k += 1
            for e in range(added_after_start[a], added_after_start[a + 1]):
                after[m] = renumbered[added_after[e]]
                m += 1
        while w < len(waiting) and waiting[w] == o:
            after[m] = renumbered[awaited[w]]
            m += 1
            w += 1
            other = True
        if other:
            moved[place] = t
            place += 1
        t += 1
        on_start[t], after_start[t] = k, m
    fields = durations, priorities, labels, on_start, on[:k].copy(), after_start, after[:m].copy()
    return fields, renumbered, moved[:place].copy()
