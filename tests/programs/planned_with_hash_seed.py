"""A plan that a search finds, printed; run with several seeds of Python's hash."""

import json
import tempfile
from pathlib import Path

from jax.extend.core import Var

met = {}  # a variable is hashed by its address, often the same in two processes: here the seed decides about it as well
Var.__hash__ = lambda var: hash(str(met.setdefault(id(var), (len(met), var))[0]))

from benchmarks.partition_models.lstm import lstm
from vnode.partition import Machine, search
from vnode.partition.plan.candidates import MeshSearch
from vnode.partition.plan.search_subject import on_nodes, subject_of

made = lstm("small", batch=32, length=6, vocabulary=256, units=128)
machine, small = Machine.tpu("v5e:2x4"), Machine.tpu("v5e:2x2")
subject = subject_of(on_nodes(made.step, 2, {}), (made.state, made.batch))
on = MeshSearch(subject, machine, {"vnode": 2, "x": 2, "y": 2}, "tpu", None)
experts = {name: chosen.tolist() for name, chosen in on.by_experts.items()}
plan = search(made.step, (made.state, made.batch), small, virtual_nodes=4, budget=1e4, progress=False)
with tempfile.TemporaryDirectory() as folder:
    plan.save(Path(folder) / "plan.json")
    content = json.loads((Path(folder) / "plan.json").read_text())
print(json.dumps([experts, *(content[name] for name in ("name", "mesh", "specs", "passes"))]))
