"""A search that found no plan that fits -> its error: how many bytes are missing, and changes that would fit.

Knows the search's results, and changes that may help. Must not know how they are predicted, nor how a mesh is searched.
"""

from __future__ import annotations

from vnode.errors import MemoryLimitError, layout_message
from vnode.partition.plan.candidates import Candidate
from vnode.partition.plan.mesh_search import MeshesSearch
from vnode.partition.plan.remedies import Remedies, plan_title
from vnode.partition.plan.search_subject import Subject
from vnode.show.units import several, size


def nothing_fits_error(search: MeshesSearch, subject: Subject, least: Candidate) -> MemoryLimitError:
    """The error for a step that no plan fits, with changes that would fit, as far as the budget for them allows.

    Args:
      search: the search over the meshes.
      subject: the step.
      least: the candidate with the least memory.
    """
    machine, limit, kept, devices = search.machine, search.limit, least.figures, len(search.machine.devices)
    away = least.all_on_host
    search.budget.extend()
    search.shown.update(1000, "nothing fits; what would?")

    until = search.budget.until
    tries = Remedies(subject, least, machine, limit, search.platform, search.times, search.divided, until)
    try:
        fits = tries.found()
    except KeyboardInterrupt:
        fits = None
    help_ = [f"what would fit: {fits.as_text(tries.nodes, devices)}"] if fits else []
    if not fits:
        untried = {tries.kind(change) for change in tries.left}
        if ("donated",) in untried:
            help_.append(f"the state given away, donate_argnums: about {size(min(kept.state, kept.results))} less")
        if ("nodes",) in untried:
            help_.append(f"more virtual nodes: there are {subject.virtual_nodes} for {subject.examples:,} examples")
        if ("lanes",) in untried:
            help_.append(f"fewer lanes, lanes={devices}: about {size(kept.pending)} less")
        if ("fast",) in untried:
            help_.append(f'sums in any order, reduction="fast": about {size(kept.pending)} less')
        if ("devices",) in untried and kept.state > 0:
            help_.append(f"about {-(-kept.memory // limit) * devices} devices")
    if search.budget.cut_short:
        help_.insert(0, f"more time: {several(len(search.budget.untried), 'thing')} not tried within the budget")
    failed = ", ".join(each.as_text(tries.nodes, devices) for each in tries.failed())
    only_batch = " ".join(search.undivided.split("What to do")[0].split())
    return MemoryLimitError(
        layout_message(
            f"no plan fits in {size(limit)} a device.",
            facts=[
                f"the smallest found takes {size(kept.memory)}, {size(kept.memory - limit)} too much: "
                + plan_title(least.name, least.mesh),
                f"of these {size(kept.state)} are state, {size(kept.pending)} pending sums",
                *[f"{size(away.memory)} with {away.on_host}"][: bool(away.on_host)],
                *[f"not enough, as predicted: {failed}"][: bool(failed)],
                *[f"only the batch was divided: {only_batch}"][: bool(only_batch)],
                f"machine: {machine.name}, {several(devices, 'device')}",
            ],
            remedies=help_ or ["devices with more memory"],
        )
    )
