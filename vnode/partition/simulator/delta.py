"""The timeline of a changed graph, from that of the graph before: FlexFlow's delta simulation.

Knows a change and the timeline before it. Must not know what was changed for which reason.

FlexFlow (Jia et al., SysML 2019, section 5.3) keeps the timeline of the current strategy, and repeats the simulation
only of tasks that a change concerns, in order of time. Here most of a changed step is concerned, if only because all of
it comes later by the same time. What rarely changes is the *order* in which each resource serves its tasks. So nothing
before the first effect of the change is looked at again; from there on tasks are taken in their old order, which needs
no queue, and the new ones from a queue between them. Whenever a resource gets a task that it should have served before
one that it has served already, that one is taken back with all that came of it, and served again out of the queue. In
the end every resource has served in the order of the rule, and there is one timeline only that does: the same bits.

Where devices do not wait for each other often, a change may reverse much of the order: an operator that is placed on
other devices of a busy network reverses every tenth to sixth pair of neighbours on a resource. Then what comes before
the first doubtful task is kept, and the rest simulated in full.
"""

from __future__ import annotations

from vnode.errors import TaskGraphError
from vnode.partition.simulator.graph_builder import Change
from vnode.partition.simulator.simulate import circle
from vnode.partition.simulator.timeline import Timeline

PATIENCE = 0.05
"""How many tasks may be taken back for each that is served, before simulating the rest in full is what takes less."""


def resimulate(timeline: Timeline, change: Change) -> Timeline:
    """The timeline of a changed graph: that of `simulate`, bit for bit, in less time.

    Args:
      timeline: of the graph that was changed.
      change: as `Edit.build` returned it.

    Returns:
      The timeline of ``change.graph``.

    Raises:
      TaskGraphError: the change is one of another graph, or makes tasks wait for each other in a circle.

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
        raise TaskGraphError("the change is one of another graph than the timeline's; edit timeline.graph")
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
