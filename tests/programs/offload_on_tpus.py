"""Memory of a v5e and its host whose residuals are offloaded; argument 1 is the reduction."""

import json
import sys

from benchmarks import tpu
from tests.partition.test_away import ONE, shapes, train
from vnode.partition.plan.candidates import MeshSearch
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of, with_recomputation
from vnode.remat.offload import offloadable_residuals

args = shapes(8, 512, 16384)
step = on_nodes(train, 2, {"reduction": sys.argv[1], "donate_argnums": (0,)})
plain = subject_of(step, args)
begin = [(k, n) for k, _ in [min(plain.kept)] for n in (0,)]
found = []
choices = [
    ((), ()),
    (tuple(plain.kept), ()),
    (tuple(plain.kept), begin),
    ((), offloadable_residuals(plain.schedule.flow.program)),
]
for again, away in choices if sys.argv[1] == "fast" else choices[1:3]:
    subject = subject_of(with_recomputation(step, again, away), args)
    on = MeshSearch(subject, ONE, {"vnode": 1}, "tpu", None)
    plan = plan_of(on.candidate("data parallel", on.undivided), 2**34)
    report = plan.accept(tpu.topology("v5e:2x4")[:1])
    said = report.memory_error, report.exchange_accepted and report.host_accepted
    stats = report.compiled
    found.append([stats.temporary, stats.host, plan.figures.aside, plan.figures.back, stats.fetched, *said])
print(json.dumps(found))
