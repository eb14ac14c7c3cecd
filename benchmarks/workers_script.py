"""Turns a step, a state and data into the script of a job's workers, which notes when each step was done.

Shared by the benchmarks of workers. Must not know what they measure.

    job = launch(__file__, 2, ["--mb", "100"])        # in the process that measures
    train(step, state, data, steps, job_folder())     # in each worker; in a run alone, without a folder
    stamps(job.folder)                                # {"0": [(1790000000.25, 0), (1790000000.5, 1)], "1": [...]}

Files in the folder: `stamps-N` of worker N, the times and numbers of its steps; `hold`, the number of the step at which
all callbacks wait; `end`, the number of the step behind which the run is to end; `digest`, of the final state.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

WAIT = 300
"""Seconds to wait for a change."""

LATER = 20
"""Steps from the order to end a run to its end: more than workers can be apart."""


def job_folder() -> Path | None:
    """The folder of the job whose worker this process is; None if it is none."""
    return Path(os.environ["VNODE_JOB"]) if "VNODE_JOB" in os.environ else None


def launch(script: str, workers: int, arguments: Sequence[str], **options: Any) -> Any:
    """Starts a job on CPUs whose script may import `benchmarks`.

    Args:
      script: the path of the script.
      workers: how many.
      arguments: of the script.
      options: of `vnode.elastic.launch`.

    Returns:
      The job.
    """
    import vnode

    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return vnode.elastic.launch(script, workers=workers, arguments=arguments, env=env, **options)


def train(step: Any, state: Any, data: Any, steps: int, folder: Path | None) -> str:
    """Trains; in a folder it leaves times, waits, and ends as the folder's files say.

    Args:
      step: a virtualized step.
      state: before the first step; replicated.
      data: batches by step number.
      steps: how many at most.
      folder: of the files; None for a run that nobody observes.

    Returns:
      The SHA-256 of all bits of the final state.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import vnode

    times = None
    if folder is not None:
        times = (folder / f"stamps-{os.environ.get('VNODE_WORKER', 'alone')}").open("a", buffering=1)

    def callback(number: int, metrics: Any) -> bool:
        if folder is None or times is None:
            return False
        times.write(f"{time.time()} {number}\n")
        while (held := number_in(folder / "hold")) is not None and number >= held:
            time.sleep(0.02)
        end = number_in(folder / "end")
        return end is not None and number >= end

    result = vnode.elastic.run(
        step, jax.tree.map(jnp.asarray, state), data, steps=steps, callback=callback, progress=False
    )
    leaves = [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves(result.state)]
    digest = hashlib.sha256(b"".join(leaves)).hexdigest()
    if folder is not None:
        put(folder / "digest", f"{digest} {result.step}")
    return digest


def perceptron(widths: Sequence[int], examples: int, virtual_nodes: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """A network of dense layers with normalization, trained by SGD with momentum.

    Args:
      widths: of its layers; each that differs has to be compiled by itself.
      examples: in a batch.
      virtual_nodes: among which a batch is divided.
      seed: of parameters and data.

    Returns:
      The step, the state and the data.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import vnode

    @vnode.virtualize(virtual_nodes=virtual_nodes)
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            x = batch["x"]
            for matrix in params:
                x = x @ matrix
                x = jax.nn.gelu(x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, {"loss": loss}

    rng = np.random.default_rng(seed)
    shapes = list(itertools.pairwise(widths))
    params = [rng.standard_normal(shape, np.float32) / shape[0] ** 0.5 for shape in shapes]
    state = {"params": params, "momentum": [np.zeros_like(matrix) for matrix in params]}
    sides = {"x": widths[0], "y": widths[-1]}.items()
    data = {name: rng.standard_normal((2 * examples, n), np.float32) for name, n in sides}
    return step, state, vnode.data.Batches(data, examples, seed=seed)


def number_in(path: Path) -> int | None:
    """The number in a file; None if the file is not there."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None


def put(path: Path, text: object) -> None:
    """Writes a file, which others see whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(str(text))
    temporary.replace(path)


def wait(done: Callable[[], Any], seconds: float = WAIT) -> None:
    """Waits until something has happened.

    Raises:
      TimeoutError: it has not.
    """
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"waited for {seconds} s; what vnode says stands above")
        time.sleep(0.02)


def wait_steps(job: Any, workers: int, steps: int) -> None:
    """Waits until so many workers have trained for so many steps."""
    wait(lambda: len(job.workers) == workers)
    there = job.step or 0
    wait(lambda: (job.step or 0) >= there + steps)


def end(job: Any) -> int:
    """Ends the run of a job at a step; returns how many steps it had."""
    put(job.folder / "end", (job.step or 0) + LATER)
    job.wait(WAIT)
    return int((job.folder / "digest").read_text().split()[1])


def kill(job: Any) -> None:
    """Ends a job at once."""
    from vnode.errors import WorkerError

    job.kill()
    with contextlib.suppress(WorkerError):  # it was killed
        job.wait(WAIT)


def stamps(folder: Path) -> dict[str, list[tuple[float, int]]]:
    """When each worker had done its steps: times and the steps' numbers, by worker."""
    found = {}
    for path in folder.glob("stamps-*"):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[path.name.removeprefix("stamps-")] = [(float(line[0]), int(line[1])) for line in lines]
    return found


def percentile(values: Sequence[float]) -> float:
    """The 99th percentile, interpolated between the two nearest values."""
    return statistics.quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]


def machine() -> str:
    """A line on the machine: cores, versions, the load of the last minute."""
    import importlib.metadata

    version = importlib.metadata.version
    return f"{os.cpu_count()} cores, jax {version('jax')}, load {os.getloadavg()[0]:.1f} at the end"
