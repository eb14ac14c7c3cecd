"""A search that found no plan that fits -> its error: how many bytes are missing, and changes that would fit.

Knows the search's results, and changes that may help. Must not know how they are predicted, nor how a mesh is searched.
"""

from __future__ import annotations

from vnode.errors import MemoryLimitError, layout_message
from vnode.partition.plan.candidates import Candidate
from vnode.partition.plan.mesh_search import MeshesSearch
from vnode.partition.plan.remedies import Remedies
from vnode.partition.plan.search_subject import Subject
from vnode.show.units import several, size


def nothing_fits_error(search: MeshesSearch, subject: Subject, least: Candidate) -> MemoryLimitError:
    """The error for a step that no plan fits, with changes that would fit, as far as the budget for them allows."""
    limit, kept, away = search.limit, least.figures, least.all_on_host
    search.budget.extend()
    search.shown.update(1000, "nothing fits; what would?")
    tries = Remedies(search, subject, least)
    try:
        fits = tries.found()
    except KeyboardInterrupt:
        fits = None
    help_ = [f"what would fit: {tries.in_words(fits)}"] if fits else []
    if not fits:
        about = {
            "donated": f"the state given away, donate_argnums: about {size(min(kept.state, kept.results))} less",
            "nodes": f"more virtual nodes: there are {subject.virtual_nodes} for {subject.examples:,} examples",
            "lanes": f"fewer lanes, lanes={tries.devices}: about {size(kept.pending)} less",
            "fast": f'sums in any order, reduction="fast": about {size(kept.pending)} less',
            "devices": f"about {-(-kept.memory // limit) * tries.devices} devices" * (kept.state > 0),
        }
        untried = [tuple(tries.parts(change)) for change in tries.left]
        help_ += [text for kind, text in about.items() if text and (kind,) in untried]
    if search.budget.untried:
        help_.insert(0, f"more time: {several(len(search.budget.untried), 'thing')} not tried within the budget")
    failed = ", ".join(tries.in_words(each) for each in tries.failed())
    only_batch = " ".join(search.undivided.split("What to do")[0].split())
    return MemoryLimitError(
        layout_message(
            f"no plan fits in {size(limit)} a device.",
            facts=[
                f"the smallest found takes {size(kept.memory)}, {size(kept.memory - limit)} too much: " + least.title,
                f"of these {size(kept.state)} are state, {size(kept.pending)} pending sums",
                *[f"{size(away.memory)} with {away.on_host}"][: bool(away.on_host)],
                *[f"not enough, as predicted: {failed}"][: bool(failed)],
                *[f"only the batch was divided: {only_batch}"][: bool(only_batch)],
                f"machine: {search.machine.name}, {several(tries.devices, 'device')}",
            ],
            remedies=help_ or ["devices with more memory"],
        )
    )
