"""Where metrics are written: lines of JSON, TensorBoard, or any function.

Knows files and formats. Must not know steps or devices.

A writer is called with a step number and the metrics by name, `{"loss": 0.25, "evaluate/accuracy": 0.9}`: numbers of
Python, or NumPy arrays where a metric has several. So a function is one: ``lambda step, metrics: wandb.log(metrics,
step=step)``.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np


class JsonLines:
    """Writes metrics into a text file, one JSON object in each line: ``{"step": 3, "loss": 0.25}``.

    Appends to a file that is there; a last line that was cut off by a crash is removed. Steps that are run again are
    written again, with equal values: of two lines for a step the last one counts. JSON has no numbers for these, so not
    a number and infinity are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` (as in the JSON of protocol
    buffers).

    Args:
      path: the file; folders are made.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from vnode.elastic import JsonLines
      >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> with JsonLines(path) as write:
      ...     write(3, {"loss": 0.25})
      >>> path.read_text()
      '{"step": 3, "loss": 0.25}\\n'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            file.seek(0)
            text = file.read()
            file.truncate(text.rfind(b"\n") + 1)
        # Line by line, so that what is written is in the file.
        self._file = io.TextIOWrapper(io.FileIO(self.path, "a"), encoding="utf-8", line_buffering=True)

    def __call__(self, step: int, metrics: dict[str, Any]) -> None:
        self._file.write(
            json.dumps({"step": step} | {name: json_value(value) for name, value in metrics.items()}) + "\n"
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def json_value(value: Any) -> Any:
    """A metric as JSON has it."""
    if isinstance(value, np.ndarray | np.generic):
        return json_value(value.astype(float).tolist() if value.dtype.kind == "V" else value.tolist())
    if isinstance(value, list):
        return [json_value(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, bool | int | float | str | None) else str(value)


class TensorBoard:
    """Writes metrics for TensorBoard: scalars as such, arrays as histograms. Needs ``vnode[tensorboard]``.

    Args:
      folder: where TensorBoard looks for them: ``tensorboard --logdir folder``.

    Raises:
      ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            tensorboard = importlib.import_module("tensorboardX")
        except ImportError as error:
            raise ImportError("TensorBoard needs tensorboardX: pip install 'vnode[tensorboard]'") from error
        self._writer = tensorboard.SummaryWriter(os.path.expanduser(folder))

    def __call__(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if np.ndim(value) == 0:
                self._writer.add_scalar(name, float(value), step)
            elif np.size(value) and np.isfinite(value).all():  # there are no histograms of anything else
                self._writer.add_histogram(name, np.asarray(value, np.float64), step)

    def flush(self) -> None:
        """Waits until everything is in the file."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
