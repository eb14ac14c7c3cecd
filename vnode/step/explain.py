"""A step and its arguments -> its analysis, its report, and its temporary memory, without a run.

Knows steps, and which modules analyse and describe them. Must not know how any of it is found out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import NamedSharding

from vnode.analysis.forms import Slice
from vnode.analysis.passes import Schedule
from vnode.placement.leaves import shapes_of
from vnode.placement.node_layout import Layout
from vnode.placement.placement import Placement, even_counts
from vnode.placement.temporary import temporary_of
from vnode.report.describe import describe_schedule
from vnode.report.names import Names, argument_paths, paths_of
from vnode.report.reduction import Reduction
from vnode.report.step_report import Report
from vnode.step.call import OutputTree, positional_name
from vnode.step.pipeline import Analysis, analyse, emitted_schedule
from vnode.step.resolved import Resolved

Local = Mapping[Var, tuple[int, ...]]
"""The shapes of one device's parts of sums over nodes, by the variables that are summed."""


def analyse_step(here: Resolved) -> Analysis:
    """The step's program, schedule and couplings for these arguments."""
    return analyse_with_names(here)[0]


def analyse_with_names(here: Resolved) -> tuple[Analysis, Names]:
    """The step's program, schedule and couplings for these arguments, and the names of its values."""
    spec, output = here.step.spec, OutputTree()
    call = spec.call(here.args, here.kwargs)
    made = analyse(spec.flatten(call, output))
    arguments = argument_paths(*jax.tree.unflatten(call.treedef, call.leaves))
    results = paths_of(output.unflatten([0] * output.treedef.num_leaves))
    return made, Names(made.program, arguments, results)


def reports(
    here: Resolved, places: Sequence[Placement | Layout], local: Callable[[Schedule], Local] | None = None
) -> list[Report]:
    """The reports of a step for several placements, existing or hypothetical; the step is analysed once.

    Args:
      here: the step and its arguments.
      places: the placements.
      local: for a schedule, the shapes of one device's parts of sums over nodes, if they are divided further.
    """
    (made, names), spec = analyse_with_names(here), here.step.spec
    flow = made.schedule.flow
    forms = [form for var in flow.program.inputs if isinstance(form := flow.states[var].form, Slice)]
    batches = {form.outer * form.units: form.outer * flow.node_elements(form) for form in forms}
    several: dict[str, Any] = {"batches": tuple(sorted(batches.items()))} if len(batches) > 1 else {}
    divided_by_xla = sharded_over_nodes(here) if spec.options.automatic else ()

    def of_place(place: Placement | Layout) -> Report:
        emitted = emitted_schedule(made.schedule, spec.options, spec.plan, place.together)
        parts = {} if local is None else local(emitted)
        reduction = Reduction(spec.options.reduction, spec.options.lane, divided_by_xla, parts)
        found = describe_schedule(emitted, place, spec.name, made.couplings, reduction, names)
        return found.found_by(here.search_lines)

    return [dataclasses.replace(of_place(place), **several) for place in places]


def even_layout(here: Resolved, devices: int) -> Layout:
    """The layout of nodes that `on` would choose for a number of devices, which need not exist."""
    options = here.step.spec.options
    return Layout(tuple(even_counts(options.virtual_nodes, devices, options.lane)))


def temporary_bytes(here: Resolved, place: Placement | Layout) -> int | None:
    """Compiles the step for a placement, and reads how much temporary memory a device needs.

    Returns:
      Bytes; None if there are no such devices, or jax cannot say.
    """
    devices = place
    if isinstance(place, Layout):
        devices = jax.devices()[: len(place.counts)]
        if len(devices) < len(place.counts):
            return None
    args, kwargs = shapes_of((here.args, here.kwargs))
    compiled = here.step.on(devices).executor.lower(args, kwargs).compile()
    if compiled.memory_analysis() is None:
        return None
    found = temporary_of(compiled)
    return found.held + found.gaps


def sharded_over_nodes(here: Resolved) -> tuple[str, ...]:
    """The names of unsplit arguments' leaves that are sharded over the nodes' axis."""
    axis = here.step.placement.axis
    return tuple(
        f"{positional_name(i, here.step.spec.positional)}{jax.tree_util.keystr(path)}"
        for i in here.step.spec.unsplit_positions(len(here.args))
        for path, leaf in jax.tree.leaves_with_path(here.args[i])
        if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding)
        and any(axis == name or (isinstance(name, tuple) and axis in name) for name in sharding.spec)
    )
