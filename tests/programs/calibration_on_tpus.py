"""The calibration of a v5e: what its compiler says of small programs, beside the stored entry."""

import dataclasses
import json

from vnode.partition import Machine, calibrate
from vnode.partition.compiler.target import Topology
from vnode.partition.cost.calibration import Calibration
from vnode.partition.machine.known_kinds import kind_named

devices, kind = Topology("v5e:2x4").devices(), kind_named("v5e")
stored = Calibration.for_kind(kind)
fitted = calibrate.fit_entry(kind, calibrate.compiled_seconds(devices[0], kind), stored)
memory, time = calibrate.spread(Machine.tpu("v5e:2x4"), devices)
found = dataclasses.replace(fitted, memory=memory, time=time)
print(json.dumps([dataclasses.asdict(each) for each in (stored, found)]))
