"""A task graph's arrays -> the times at which its tasks are ready and end: the inner loops of the simulator.

Knows arrays, and the order of service (see `vnode.partition.simulator.simulate`). Must not know names, nor the caller.

There are three: `events` simulates a graph, `replay` uses the order of another timeline, `rewrite` edits a graph. numba
compiles them if it is installed, since an event does little and depends on earlier ones; NumPy and XLA are slow at
that. The tasks simulated per second, of the same graphs (24 layers on 16 and 64 devices):

- numba: 12 to 35 million;
- lists and a heap in plain Python: 0.8 to 0.95 million;
- NumPy, on batches of independent tasks: 0.1 million (no two devices in step) to 1 million (all in step);
- a `lax.while_loop` on the CPU: 0.004 to 0.025 million.

numba caches the machine code beside this file, and compiles it again only if this file changes. So all loops are in one
file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import numba
except ImportError:  # without the extra `partition`, the same loops run as plain Python
    numba = None


def compiled(loop: Callable[..., Any]) -> Any:
    """Compiles a loop that releases the GIL, cached if a directory is writable; without numba, the loop itself."""
    if numba is None:
        return loop
    try:
        return numba.njit(cache=True, nogil=True)(loop)
    except RuntimeError:
        return numba.njit(nogil=True)(loop)


@compiled
def is_served_before(time, task, other_time, other, priority):
    """Whether a task is served before another: ready earlier, or of smaller priority, or of smaller number."""
    if time != other_time:
        return time < other_time
    if priority[task] != priority[other]:
        return priority[task] < priority[other]
    return task < other


@compiled
def heap_push(times, tasks, size, time, task, priority):
    """Adds to a binary heap of `size` entries."""
    i = size
    while i:
        above = (i - 1) >> 1
        if is_served_before(times[above], tasks[above], time, task, priority):
            break
        times[i], tasks[i] = times[above], tasks[above]
        i = above
    times[i], tasks[i] = time, task


@compiled
def heap_pop(times, tasks, size, priority):
    """Removes the first entry of a binary heap; `size` is the number of entries afterwards."""
    time, task = times[size], tasks[size]
    i = 0
    while True:
        below = 2 * i + 1
        if below >= size:
            break
        if below + 1 < size and is_served_before(
            times[below + 1], tasks[below + 1], times[below], tasks[below], priority
        ):
            below += 1
        if is_served_before(time, task, times[below], tasks[below], priority):
            break
        times[i], tasks[i] = times[below], tasks[below]
        i = below
    times[i], tasks[i] = time, task


@compiled
def readiness(t, end, dependency_start, dependency):
    """The time at which a task is ready, and -1; if it is not known yet, -1 and a task that it waits for."""
    time = np.int64(0)
    for e in range(dependency_start[t], dependency_start[t + 1]):
        done = end[dependency[e]]
        if done < 0:
            return np.int64(-1), dependency[e]
        time = max(time, done)
    return time, np.int32(-1)


@compiled
def followers(dependency_start, dependency):
    """The tasks that wait for each task: the start of each row, and the rows."""
    n = len(dependency_start) - 1
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
    return follower_start, follower


@compiled
def events(
    duration, priority, resource_start, resource, dependency_start, dependency, resources,
    ready, end, order, served,
):  # fmt: skip
    """Serves, in order, all tasks that are not served yet: those whose end is -1. Fills the arrays.

    Returns the number of served tasks: all of them, unless tasks wait for each other in a circle.
    """
    n = len(duration)
    follower_start, follower = followers(dependency_start, dependency)
    missing, free = np.empty(n, np.int32), np.zeros(resources, np.int64)
    times, tasks, size = np.empty(n + 1, np.int64), np.empty(n + 1, np.int32), 0
    for t in range(n):
        if served and end[t] >= 0:
            for j in range(resource_start[t], resource_start[t + 1]):
                free[resource[j]] = max(free[resource[j]], end[t])
            continue
        ready[t], missing[t] = 0, dependency_start[t + 1] - dependency_start[t]
        if served:
            for e in range(dependency_start[t], dependency_start[t + 1]):
                done = end[dependency[e]]
                if done >= 0:
                    missing[t] -= 1
                    ready[t] = max(ready[t], done)
        if not missing[t]:
            heap_push(times, tasks, size, ready[t], t, priority)
            size += 1
    while size:
        time, t = times[0], tasks[0]
        size -= 1
        heap_pop(times, tasks, size, priority)
        begin = time
        for j in range(resource_start[t], resource_start[t + 1]):
            begin = max(begin, free[resource[j]])
        done = begin + duration[t]
        for j in range(resource_start[t], resource_start[t + 1]):
            free[resource[j]] = done
        end[t], order[served] = done, t
        served += 1
        for e in range(follower_start[t], follower_start[t + 1]):
            f = follower[e]
            ready[f] = max(ready[f], done)
            missing[f] -= 1
            if not missing[f]:
                heap_push(times, tasks, size, ready[f], f, priority)
                size += 1
    return served


@compiled
def unaffected_until(ready, end, removed, moved, retimed, origin, dependency_start, dependency):
    """A time before which a change has no effect: each task with changed times is ready then or later, before and now.

    A task with changed dependencies may be ready when the last dependency that it keeps ends. If a kept dependency
    itself ends at another time than before, then that one is affected, and was ready before this task.
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
            if d < 0:  # waits for an added task, which is ready earlier and counts itself
                earliest = np.int64(1) << 62
                break
            earliest = max(earliest, end[d])
        first = min(first, earliest)
    return first


@compiled
def queue_again(t, graph, end, queue, size, lists):
    """Takes a task out of the old order: into the queue if it is ready, else into the list of one that it waits for.

    Returns the number of tasks in the queue.
    """
    priority, resource_start, resource, dependency_start, dependency = graph
    times, tasks, queued, contested = queue
    head, following, awaited = lists
    time, missing = readiness(t, end, dependency_start, dependency)
    if missing >= 0:
        following[t] = head[missing]
        head[missing] = t
        awaited[t] = missing
        return size
    queued[t] = True
    for j in range(resource_start[t], resource_start[t + 1]):
        contested[resource[j]] += 1
    heap_push(times, tasks, size, time, t, priority)
    return size + 1


@compiled
def resource_position(t, r, resource_start, resource):
    """The position of a resource in a task's row."""
    j = resource_start[t]
    while resource[j] != r:
        j += 1
    return j


@compiled
def undo_served(t, time, graph, ready, end, last, earlier, follower_start, follower, undone):
    """Undoes the tasks that were served too early, before a task that precedes them, and their successors.

    Successors wait for an undone task, or used a resource after one. Fills `undone`; returns the number of tasks in it.
    """
    priority, resource_start, resource, _, _ = graph
    count = 0
    for j in range(resource_start[t], resource_start[t + 1]):
        other = last[resource[j]]
        while other >= 0 and is_served_before(time, t, ready[other], other, priority):
            if end[other] >= 0:
                end[other], undone[count] = -1, other
                count += 1
            other = earlier[resource_position(other, resource[j], resource_start, resource)]
    i = 0
    while i < count:
        u = undone[i]
        i += 1
        for e in range(follower_start[u], follower_start[u + 1]):
            if end[follower[e]] >= 0:
                end[follower[e]], undone[count] = -1, follower[e]
                count += 1
        for j in range(resource_start[u], resource_start[u + 1]):
            other = last[resource[j]]
            while other != u:
                if end[other] >= 0:
                    end[other], undone[count] = -1, other
                    count += 1
                other = earlier[resource_position(other, resource[j], resource_start, resource)]
    for i in range(count):
        u = undone[i]
        for j in range(resource_start[u], resource_start[u + 1]):
            r = resource[j]
            while last[r] >= 0 and end[last[r]] < 0:
                last[r] = earlier[resource_position(last[r], r, resource_start, resource)]
    return count


@compiled
def drop_uncertain(graph, ready, end, order, served):
    """Keeps the tasks whose times are final. Some of the tasks were served repeatedly; the last service counts.

    If some tasks were not served, only the tasks before all of these are final.

    Returns the number of tasks kept.
    """
    priority, _, _, dependency_start, dependency = graph
    time, first = np.int64(0), -1
    for t in range(len(end)):
        if end[t] < 0:
            now, missing = readiness(t, end, dependency_start, dependency)
            if missing < 0 and (first < 0 or is_served_before(now, t, time, first, priority)):
                time, first = now, t
    seen = np.zeros(len(end), np.bool_)
    for i in range(served - 1, -1, -1):
        t = order[i]
        if end[t] < 0 or seen[t]:
            order[i] = -1
        elif first >= 0 and not is_served_before(ready[t], t, time, first, priority):
            order[i], end[t] = -1, -1
        seen[t] = True
    kept = 0
    for i in range(served):
        order[kept] = order[i]
        kept += order[i] >= 0
    return kept


@compiled
def replay(
    duration, priority, resource_start, resource, dependency_start, dependency, resources,
    old_ready, old_end, old_order, renumbered, removed, moved, retimed, patience,
):  # fmt: skip
    """Serves the tasks of a changed graph in their old order as far as that is right; see `delta`.

    Returns the times at which tasks were ready and ended, their order, and the number of served tasks. It is less than
    all if too many tasks had to be undone, or tasks wait for each other. The others have the end -1; `events` serves
    them.
    """
    n, olds = len(duration), len(old_ready)
    origin = np.full(n, -1, np.int32)
    for o in range(olds):
        if renumbered[o] >= 0:
            origin[renumbered[o]] = o
    first = unaffected_until(old_ready, old_end, removed, moved, retimed, origin, dependency_start, dependency)

    ready, end = np.empty(n, np.int64), np.full(n, -1, np.int64)
    order, last = np.empty(2 * n + 1, np.int32), np.full(resources, -1, np.int32)
    earlier = np.empty(len(resource), np.int32)  # for each place of a task on a resource, the task served before it
    at = 0
    while at < olds and old_ready[old_order[at]] < first:
        o = old_order[at]
        t = renumbered[o]
        ready[t], end[t], order[at] = old_ready[o], old_end[o], t
        for j in range(resource_start[t], resource_start[t + 1]):
            last[resource[j]] = t
        at += 1

    # Tasks outside the old order: in a queue by time if they are ready, else each in the list of one it waits for.
    graph = priority, resource_start, resource, dependency_start, dependency
    times, tasks, size = np.empty(n + 1, np.int64), np.empty(n + 1, np.int32), 0
    queued, contested = np.zeros(n, np.bool_), np.zeros(resources, np.int32)
    queue = times, tasks, queued, contested
    head, following, awaited = np.full(n, -1, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    lists, apart = (head, following, awaited), np.zeros(n, np.bool_)
    for t in moved:
        apart[t] = True
        size = queue_again(t, graph, end, queue, size, lists)
    undone, follower_start, follower = np.empty(n, np.int32), np.empty(0, np.int32), np.empty(0, np.int32)
    kept, served, again, steps = at, at, 0, 0
    # The least delay of the old order, judged by its last few hundred tasks.
    lag, least, counted = np.int64(0), np.int64(0), 0
    while True:
        from_queue, t, time = False, np.int32(-1), np.int64(0)
        while at < olds:
            t = renumbered[old_order[at]]
            if t >= 0 and not apart[t]:
                break
            at += 1
        if at == olds:
            if not size:
                break
            from_queue = True
        else:
            time, missing = readiness(t, end, dependency_start, dependency)
            if missing >= 0:
                while apart[missing] and not queued[missing] and steps < 4 * n:
                    missing = awaited[missing]
                    steps += 1
                if steps == 4 * n:
                    break
                if not queued[missing]:  # comes later in the old order
                    apart[t] = True
                    size = queue_again(t, graph, end, queue, size, lists)
                    at += 1
                    continue
                from_queue = True
            elif size:  # the queue is next when its time has come, or when both need one resource
                from_queue = times[0] < old_ready[old_order[at]] + min(lag, least)
                for j in range(resource_start[t], resource_start[t + 1]):
                    if contested[resource[j]]:
                        from_queue |= is_served_before(times[0], tasks[0], time, t, priority)
                        break
        if from_queue:
            time, t = times[0], tasks[0]
            size -= 1
            heap_pop(times, tasks, size, priority)
            queued[t] = False
            for j in range(resource_start[t], resource_start[t + 1]):
                contested[resource[j]] -= 1
            now, missing = readiness(t, end, dependency_start, dependency)
            if now != time:  # a task that it waits for was undone
                size = queue_again(t, graph, end, queue, size, lists)
                continue

        begin, wrong = time, False
        for j in range(resource_start[t], resource_start[t + 1]):
            other = last[resource[j]]
            if other >= 0:
                begin = max(begin, end[other])
                wrong |= is_served_before(time, t, ready[other], other, priority)
        if wrong:
            if not len(follower_start):
                follower_start, follower = followers(dependency_start, dependency)
            count = undo_served(t, time, graph, ready, end, last, earlier, follower_start, follower, undone)
            again += count
            if again > min(n, patience * (served - kept + n // 10)):
                break
            for i in range(count):
                apart[undone[i]] = True
                size = queue_again(undone[i], graph, end, queue, size, lists)
            apart[t] = True
            size = queue_again(t, graph, end, queue, size, lists)
            continue

        if not from_queue:
            later = time - old_ready[old_order[at]]
            at += 1
            least = min(least, later)
            counted += 1
            if counted == 256:
                lag, least, counted = least, later, 0
        done = begin + duration[t]
        ready[t], end[t], order[served] = time, done, t
        for j in range(resource_start[t], resource_start[t + 1]):
            earlier[j] = last[resource[j]]
            last[resource[j]] = t
        served += 1
        waiting = head[t]
        head[t] = -1
        while waiting >= 0:
            t = waiting
            waiting = following[t]
            size = queue_again(t, graph, end, queue, size, lists)
    if again or served < n:
        served = drop_uncertain(graph, ready, end, order, served)
    return ready, end, order[:n], served


@compiled
def rewrite(arrays, label, new_duration, gone, added, waiting, awaited):
    """A graph without some of its tasks, with new tasks at its end, and with more dependencies.

    Args: the old graph's arrays; durations of all tasks, and which are removed; the new tasks; new dependencies by the
    waiting task.

    Returns: the new graph's arrays, the number of each old or added task in it, and the tasks with new dependencies.
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
            begin = m
            for e in range(dependency_start[o], dependency_start[o + 1]):
                d = renumbered[dependency[e]]
                after[m] = d
                m += 1
                other |= d < 0
            if other:
                count, m = m, begin
                for e in range(begin, count):
                    after[m] = after[e]
                    m += after[e] >= 0
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
    return (durations, priorities, labels, on_start, on[:k], after_start, after[:m]), renumbered, moved[:place]
