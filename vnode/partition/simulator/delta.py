"""A timeline and a change of its graph -> the changed graph's timeline: FlexFlow's delta simulation.

Knows a change and the timeline before it. Must not know the purpose of the change.

FlexFlow (Jia et al., SysML 2019, section 5.3) keeps the timeline of the current strategy. It simulates again only the
tasks that a change affects, in order of time. Here a change affects most of a step, if only because everything after it
is later by the same time. But the *order* in which a resource serves its tasks rarely changes. So:

- nothing before the first effect of the change is simulated again;
- from there on tasks are taken in their old order, which needs no queue; only new tasks go through a queue;
- if a resource gets a task that it should have served before one that it has served, the served one is undone with all
  its successors, and served again from the queue.

In the end every resource has served its tasks in the right order. Only one timeline does that: its bits are the same.

A change may reverse much of the order. Example: an operator moves to other devices of a busy network, and every tenth
to sixth pair of neighbours on a resource is reversed. Then the timeline before the first doubtful task is kept, and the
rest is simulated in full.
"""

from __future__ import annotations

from vnode.errors import TaskGraphError
from vnode.partition.simulator.graph_builder import Change
from vnode.partition.simulator.simulate import circle
from vnode.partition.simulator.timeline import Timeline

PATIENCE = 0.05
"""The most undone tasks per served task; with more of them, simulating the rest in full is faster."""


def resimulate(timeline: Timeline, change: Change) -> Timeline:
    """The timeline of a changed graph: the same bits as `simulate`, in less time.

    Args:
      timeline: the timeline of the graph before the change.
      change: the change, from `Edit.build`.

    Returns:
      The timeline of ``change.graph``.

    Raises:
      TaskGraphError: the change belongs to another graph, or makes tasks wait for each other in a circle.

    Example:
      >>> from vnode.partition.simulator import Builder, Edit, simulate
      >>> builder = Builder(["gpu:0", "gpu:1"])
      >>> first = builder.add([10, 14], on=[[0], [1]])
      >>> then = builder.add([3, 3], on=[[0], [1]], after=first)
      >>> timeline = simulate(builder.build())
      >>> edit = Edit(timeline.graph)
      >>> edit.retime(first, 12)
      >>> timeline.makespan, resimulate(timeline, edit.build()).makespan
      (17, 15)
    """
    from vnode.partition.simulator.event_loops import events, replay

    if timeline.graph is not change.before:
        raise TaskGraphError("the change belongs to another graph than the timeline; edit timeline.graph")
    graph = change.graph
    *found, served = replay(
        *graph.arrays,
        len(graph.resources),
        timeline.ready,
        timeline.end,
        timeline.served,
        change.renumbered,
        change.removed,
        change.moved,
        change.retimed,
        PATIENCE,
    )
    if served < len(graph):
        served = events(*graph.arrays, len(graph.resources), *found, served)
    if served < len(graph):
        raise TaskGraphError(circle(graph, found[2][:served]))
    return Timeline(graph, *found)
