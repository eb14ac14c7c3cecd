"""A task graph -> its timeline: the times at which every task is ready and ends.

Knows the order of service. Must not know how a timeline is shown.

The loop is plain Python, with lists and a heap, since an event does little and depends on earlier ones: one to three
million tasks per second. NumPy and XLA are slower at that.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from vnode.errors import TaskGraphError
from vnode.partition.simulator.graph import LONGEST, SECOND, TaskGraph
from vnode.partition.simulator.timeline import Timeline


def simulate(graph: TaskGraph) -> Timeline:
    """Simulates a task graph: the execution simulator of FlexFlow (Jia et al., SysML 2019, section 5.2).

    A task is *ready* when the last of its dependencies ends, or at time 0. Each resource serves its tasks one at a
    time, in the order in which they become ready. Tasks that become ready at the same time are ordered by number. A
    task begins as soon as it is ready and all its resources have served every task before it in that order. It occupies
    all of them until it ends. Example: a collective occupies the links of all its members. Each of these links waits
    from the moment the collective's turn comes there, and no other task overtakes it.

    All resources use the same order, so the earliest task that has not begun can always begin: there is no deadlock. A
    task becomes ready later than its dependencies (durations are positive), so only one timeline obeys the rule.

    Args:
      graph: the task graph.

    Returns:
      The timeline, all times in picoseconds.

    Raises:
      TaskGraphError: the sum of all durations is too long.

    Example:
      >>> graph = TaskGraph(["gpu:0", "gpu:1", "link"])
      >>> forward = [graph.add(10, on=[0], label="forward"), graph.add(14, on=[1], label="forward")]
      >>> reduce = graph.add(5, on=[2], after=forward, label="all-reduce")
      >>> update = [graph.add(2, on=[device], after=[reduce], label="update") for device in (0, 1)]
      >>> timeline = simulate(graph)
      >>> timeline.start, timeline.makespan
      (array([ 0,  0, 14, 19, 19]), 21)
    """
    total = sum(graph.duration)
    if total >= LONGEST:
        raise TaskGraphError(f"all tasks take {total / SECOND:.3g} s, where at most {LONGEST / SECOND:.3g} s fit")
    ready, end = serve(graph.duration, graph.on, followers(graph.after), len(graph.resources))
    return Timeline(graph, np.array(ready, np.int64), np.array(end, np.int64))


def followers(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tasks that wait for each task."""
    found: list[list[int]] = [[] for _ in after]
    for task, awaited in enumerate(after):
        for other in awaited:
            found[other].append(task)
    return found


def serve(
    duration: Sequence[int],
    on: Sequence[Sequence[int]],
    followers: Sequence[Sequence[int]],
    resources: int,
    known: tuple[Sequence[int], Sequence[int]] = ((), ()),
    since: int = 0,
) -> tuple[list[int], list[int]]:
    """The times at which each task is ready and ends.

    With known times this is the delta simulation of FlexFlow (Jia et al., SysML 2019, section 5.3): tasks that were
    ready before the first changed task keep their times, and the others are served again. The times are the same.

    Args:
      duration: picoseconds of each task, at least 1.
      on: the resources that each task occupies.
      followers: the tasks that wait for each task.
      resources: the number of resources.
      known: the times of tasks with other durations or resources, if there are any.
      since: when the first task with another duration, or other resources, was ready there.

    Example:
      >>> tasks = [(0,), (0,), (1,)], [[2], [], []], 2
      >>> before = serve([5, 7, 2], *tasks)
      >>> serve([5, 7, 4], *tasks, before, since=before[0][2])
      ([0, 0, 5], [5, 12, 9])
    """
    ready, end, missing = ([0] * len(duration) for _ in range(3))
    free = [0] * resources
    for task, (begin, done) in enumerate(zip(*known, strict=True)):
        if begin < since:
            ready[task], end[task] = begin, done
            for resource in on[task]:
                if done > free[resource]:
                    free[resource] = done
    for waiting, done in zip(followers, end, strict=True):
        for task in waiting:
            if not done:
                missing[task] += 1
            elif done > ready[task]:
                ready[task] = done
    queue = [(ready[task], task) for task, count in enumerate(missing) if not count and not end[task]]
    heapify(queue)
    while queue:
        begin, task = heappop(queue)
        for resource in on[task]:
            if free[resource] > begin:
                begin = free[resource]
        end[task] = done = begin + duration[task]
        for resource in on[task]:
            free[resource] = done
        for follower in followers[task]:
            if done > ready[follower]:
                ready[follower] = done
            missing[follower] -= 1
            if not missing[follower]:
                heappush(queue, (ready[follower], follower))
    return ready, end
