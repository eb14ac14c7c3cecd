"""Training that goes on when devices come and go."""

import importlib as _importlib
import typing as _typing

from vnode.elastic.evaluation import Evaluation
from vnode.elastic.restore import restore
from vnode.elastic.run import run
from vnode.elastic.run_devices import Devices, responds
from vnode.elastic.run_result import Resize, Result
from vnode.elastic.writers import JsonLines, TensorBoard
from vnode.errors import CheckpointError, DeviceLost, WorkerError

if _typing.TYPE_CHECKING:
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


if not _typing.TYPE_CHECKING:  # or type checkers would believe that any name is there

    def __getattr__(name: str) -> _typing.Any:
        if name not in ("Job", "launch"):  # a run needs neither them nor the supervisor behind them
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module("vnode.workers.launch"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
