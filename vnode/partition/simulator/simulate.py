"""A task graph -> its timeline: the times at which every task begins and ends.

Knows the order of service, and the message for tasks that wait for each other. Must not know the loops themselves, how
a timeline was changed, or how one is shown.
"""

from __future__ import annotations

import numpy as np

from vnode.errors import TaskGraphError, layout_message
from vnode.partition.simulator.graph import TaskGraph
from vnode.partition.simulator.timeline import Timeline
from vnode.show.units import several

SHOWN = 8
"""The most tasks of a circle that the message names."""


def simulate(graph: TaskGraph) -> Timeline:
    """Simulates a task graph: the execution simulator of FlexFlow (Jia et al., SysML 2019, section 5.2).

    A task is *ready* when the last of its dependencies ends, or at time 0. Each resource serves its tasks one at a
    time, in the order in which they become ready. Tasks that become ready at the same time are ordered by priority,
    then by number. A task begins as soon as it is ready and all its resources have served every task before it in that
    order. It occupies all of them until it ends. Example: a collective occupies the links of all its members. Each of
    these links waits from the moment the collective's turn comes there, and no other task overtakes it.

    All resources use the same order, so the earliest task that has not begun can always begin: there is no deadlock. A
    task becomes ready later than its dependencies (durations are positive), so only one timeline obeys the rule.

    Args:
      graph: the task graph.

    Returns:
      The timeline, all times in picoseconds.

    Raises:
      TaskGraphError: tasks wait for each other in a circle.

    Example:
      >>> from vnode.partition.simulator import Builder
      >>> builder = Builder(["gpu:0", "gpu:1", "link"])
      >>> forward = builder.add([10, 14], on=[[0], [1]], label="forward")
      >>> reduce = builder.add(5, on=[2], after=forward, label="all-reduce")
      >>> update = builder.add(2, on=[[0], [1]], after=reduce, label="update")
      >>> timeline = simulate(builder.build())
      >>> timeline.start, timeline.makespan
      (array([ 0,  0, 14, 19, 19]), 21)
    """
    from vnode.partition.simulator.event_loops import events

    n = len(graph)
    found = np.empty(n, np.int64), np.full(n, -1, np.int64), np.empty(n, np.int32)
    served = events(*graph.arrays, len(graph.resources), *found, 0)
    if served < n:
        raise TaskGraphError(circle(graph, found[2][:served]))
    return Timeline(graph, *found)


def circle(graph: TaskGraph, served: np.ndarray) -> str:
    """A message that names a circle of dependencies, given the tasks outside of it."""
    left = np.ones(len(graph), bool)
    left[served] = False
    task, seen = int(np.flatnonzero(left)[0]), {}
    while task not in seen:
        seen[task] = len(seen)
        awaited = graph.after(task)
        task = int(awaited[left[awaited]][0])
    found = list(seen)[seen[task] :]
    names = [graph.name(t) for t in found[:SHOWN]] + ["..."] * (len(found) > SHOWN)
    return layout_message(
        f"{several(len(found), 'task')} wait for each other in a circle."
        if len(found) > 1
        else f"{graph.name(task)} waits for itself.",
        facts=[" waits for ".join([*names, graph.name(found[0])])] if len(found) > 1 else [],
        remedies=["leave out one of these dependencies"],
    )
