"""Starts several processes that are one jax program, and waits for them no longer than a deadline.

Knows `jax.distributed`, processes and their output. Must not know what they compute: that is in `tests.process_cases`.

The processes meet on the loopback interface only. Each says in its standard error what it begins to wait for
(`waiting`), and one that is late is ended with a traceback of all its threads; the error that follows has both.

Process 0 has the service by which they find one another. Where it ends, jax ends the others with SIGABRT at once,
whatever they were about to say. So it ends last.
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MARK = "waiting for: "
FLAGS = "--xla_cpu_collective_timeout_seconds=5"
"""How long gloo may wait: a test in which processes do not meet by themselves is to fail soon."""

GRACE = 5.0
"""Seconds between a worker's own deadline, at which it tells where it is, and the one at which it is killed."""

AFTER = 30.0
"""Seconds within which the other workers must have ended once one has failed: they wait for what will not come."""


@dataclasses.dataclass
class Worker:
    """One process, and the files that its output goes to."""

    rank: int
    process: subprocess.Popen
    output: Path
    errors: Path

    def waited_for(self) -> str:
        """What it said last that it was waiting for."""
        said = [line for line in self.errors.read_text().splitlines() if line.startswith(MARK)]
        return said[-1].removeprefix(MARK) if said else "its imports"


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(case: str, folder: Path, *, processes: int, **options: Any) -> list:
    """Runs one function of `tests.process_cases` in several processes; as `run_all`, with arguments of the function."""
    settings = {name: options.pop(name) for name in ("devices", "deadline", "missing") if name in options}
    return [result for (result,) in run_all([(case, options)], folder, processes=processes, **settings)]


def run_all(
    cases: Sequence[tuple[str, dict[str, Any]]],
    folder: Path,
    *,
    processes: int,
    devices: int = 1,
    deadline: float = 300.0,
    missing: int = 0,
) -> list[list]:
    """Runs functions of `tests.process_cases` one after another in several processes at once.

    Args:
      cases: their names, and arguments fit for JSON.
      folder: an empty folder for the processes' output.
      processes: how many.
      devices: fake CPU devices of each.
      deadline: seconds that each process may take.
      missing: how many more processes they wait for, which never come.

    Returns:
      What the functions returned in each process, in their order.

    Raises:
      RuntimeError: one failed, or was late; it says what each of them was waiting for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    workers = []
    for rank in range(processes):
        said = {
            "cases": cases,
            "rank": rank,
            "processes": processes + missing,
            "port": port,
            "deadline": deadline,
        }
        output, errors = folder / f"{rank}.out", folder / f"{rank}.err"
        environment = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FLAGS}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        with output.open("w") as out, errors.open("w") as err:
            command = [sys.executable, "-m", "tests.processes", json.dumps(said)]
            workers.append(
                Worker(
                    rank,
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment),
                    output,
                    errors,
                )
            )
    end = time.monotonic() + deadline + GRACE
    try:
        while None in [worker.process.poll() for worker in workers] and time.monotonic() < end:
            if any(worker.process.returncode for worker in workers):
                end = min(end, time.monotonic() + AFTER + GRACE)
            if all(worker.process.returncode is not None for worker in workers[1:]):
                close_input(workers[0])
            time.sleep(0.02)
        if any(worker.process.poll() != 0 for worker in workers):
            raise RuntimeError(story(cases, workers))
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait()
            close_input(worker)
    return [json.loads(worker.output.read_text().splitlines()[-1]) for worker in workers]


def close_input(worker: Worker) -> None:
    """Tells a worker that the others have ended, if it is the one that waits for that."""
    assert worker.process.stdin is not None
    worker.process.stdin.close()


def story(cases: Sequence[Any], workers: list[Worker]) -> str:
    """What became of each process."""
    lines = [f"{', '.join(name for name, _ in cases)} in {len(workers)} processes:"]
    for worker in workers:
        code = worker.process.returncode
        ended = "did not end" if code is None else f"ended with status {code}"
        lines.append(f"process {worker.rank} {ended}; it waited for {worker.waited_for()}")
        lines += [f"  {line}" for line in worker.errors.read_text().splitlines()[-40:] if code != 0]
    return "\n".join(lines)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says what a worker is going to wait for, so that an error of the harness can."""
    print(f"{MARK}{what}", file=sys.stderr, flush=True)
    yield


def work(cases: Sequence[Any], rank: int, processes: int, port: int, deadline: float) -> None:
    """A worker: joins the others, and runs its functions."""
    faulthandler.dump_traceback_later(deadline, exit=True)
    import jax

    if processes > 1:
        with waiting(f"{processes} processes to meet at 127.0.0.1:{port}"):
            jax.distributed.initialize(
                f"127.0.0.1:{port}",
                processes,
                rank,
                coordinator_bind_address=f"127.0.0.1:{port}",
                initialization_timeout=int(deadline),
            )
    functions, results = importlib.import_module("tests.process_cases"), []
    for name, options in cases:
        with waiting(name):
            results.append(getattr(functions, name)(**options))
    print(json.dumps(results), flush=True)
    if processes > 1:
        with waiting("the others to end"):
            jax.distributed.shutdown()


if __name__ == "__main__":
    try:
        work(**json.loads(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if json.loads(sys.argv[1])["rank"] == 0:
            select.select([sys.stdin], [], [], AFTER)  # until it is closed
        os._exit(1)  # what jax does at exit would wait for the others to come there too
