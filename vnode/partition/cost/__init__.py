"""An operator, a collective or a split program -> its time, bytes and memory."""

from vnode.partition.cost.cache import Cache
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.collective_cost import Transfer, transfer_of, transfers_of_route
from vnode.partition.cost.lower_to_device import DeviceProgram, device_program
from vnode.partition.cost.measured_times import Measured
from vnode.partition.cost.program_memory import Memory, memory_of
from vnode.partition.cost.split_cost import ProgramCost, program_cost
from vnode.partition.cost.time_sources import Roofline, Source, Time, Times
from vnode.partition.cost.timed_pieces import TimedOp, copy_of, timed_op_of

__all__ = [
    "Cache",
    "Calibration",
    "DeviceProgram",
    "Measured",
    "Memory",
    "ProgramCost",
    "Roofline",
    "Source",
    "Time",
    "TimedOp",
    "Times",
    "Transfer",
    "copy_of",
    "device_program",
    "memory_of",
    "program_cost",
    "timed_op_of",
    "transfer_of",
    "transfers_of_route",
]
