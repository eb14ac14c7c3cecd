"""Runs one measuring task in a process of its own, because the number of CPU devices is fixed when JAX starts.

`run(task)` starts the process and yields its rows as they come; `python -m benchmarks.worker TASK` is that process. A
task is a JSON object with a `kind`; every row is a JSON object. This file knows processes, and must not know what
rows mean.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


def run(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Carries out a task in a new process with `task["devices"]` CPU devices.

    Raises:
        RuntimeError: If the process fails; its errors have gone to stderr.
    """
    flag = f"--xla_force_host_platform_device_count={task['devices']}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}"}
    yield from lines([sys.executable, "-m", "benchmarks.worker", json.dumps(task)], environment)


def lines(command: list[str], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Runs a command that prints JSON lines."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with status {process.returncode}")


def _main(task: dict[str, Any]) -> None:
    # JAX is imported here, not above, so that the process that starts workers stays free of it.
    from benchmarks import contenders, measure, models

    wanted = (task.get("contenders") or ",".join(contenders.NAMES)).split(",")
    names = [n for n in contenders.NAMES if n in wanted and contenders.available(n)]
    scans = [n for n in (contenders.HAND, contenders.VNODE, contenders.MICROBATCH) if n in names]

    def emit(**row):
        print(json.dumps(row), flush=True)

    if task["kind"] == "steps":
        for model in models.bench_models(task["quick"]):
            for nodes in task["nodes"]:
                if nodes >= task["devices"]:
                    found = measure.steps(model, nodes, names, task["budget"])
                    for name, row in found.items():
                        emit(model=model.name, devices=task["devices"], nodes=nodes, contender=name, **row)
    elif task["kind"] == "growth":
        for model in models.bench_models(task["quick"]):
            for name in scans:
                for row in measure.growth(model, task["nodes"], name):
                    emit(model=model.name, devices=task["devices"], contender=name, **row)
    elif task["kind"] == "tracing":
        for layers in task["layers"]:
            model = models.transformer(layers=layers)
            chosen = [contenders.PLAIN, *(n for n in scans if n != contenders.MICROBATCH)]
            for name, row in measure.tracing(model, 8, chosen, task["repeats"]).items():
                emit(model=model.name, layers=layers, contender=name, **row)
    elif task["kind"] == "resizing":
        for model in models.bench_models(task["quick"]):
            for warmed in (False, True):
                for row in measure.resizing(model, task["nodes"], task["route"], task["rounds"], warmed):
                    emit(model=model.name, **row)
    elif task["kind"] == "dispatch":
        chosen = [contenders.PLAIN, *(n for n in scans if n != contenders.MICROBATCH)]
        for leaves in task["leaves"]:
            found = measure.dispatch(chosen, leaves, task["calls"])
            for name, microseconds in found.items():
                emit(devices=task["devices"], leaves=leaves, contender=name, microseconds=microseconds)
    else:
        raise ValueError(f"no such kind of task: {task['kind']}")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
