"""Training that goes on when devices come and go."""

from vnode.elastic.devices import Devices, responds
from vnode.elastic.evaluation import Evaluation
from vnode.elastic.restore import restore
from vnode.elastic.result import Resize, Result
from vnode.elastic.run import run
from vnode.elastic.writers import JsonLines, TensorBoard
from vnode.errors import CheckpointError, DeviceLost, WorkerError
from vnode.workers.launch import Job, launch

__all__ = [
    "CheckpointError",
    "DeviceLost",
    "Devices",
    "Evaluation",
    "Job",
    "JsonLines",
    "Resize",
    "Result",
    "TensorBoard",
    "WorkerError",
    "launch",
    "responds",
    "restore",
    "run",
]


def __dir__() -> list[str]:
    return sorted(__all__)
