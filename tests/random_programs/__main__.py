"""``python -m tests.random_programs``: checks many random programs and prints the failing ones, made small.

Knows processes: programs run in worker processes that are replaced often (compiled programs pile up) and whose death
is a finding. Must not know what a program or a failure looks like inside.

    python -m tests.random_programs --count 20000 --seed 0 --jobs 2    check many
    python -m tests.random_programs --count 500 --way plans            divided, as plans at random say; or "layouts"
    python -m tests.random_programs --count 500 --way batches          with batches of many sizes
    python -m tests.random_programs --show 17                          print a program
    python -m tests.random_programs --minimise 17                      make a failing program small
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.metadata
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from typing import Any

CHUNK = 150
"""Programs per worker process."""

PATIENCE = 300.0
"""Seconds for one program; a hanging one is killed and reported."""


FLAGS = {
    "xla_force_host_platform_device_count": "8",
    # Most of the time is compilation; the backend of XLA is not on trial.
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    **({"xla_cpu_use_fusion_emitters": "false"} if importlib.metadata.version("jaxlib") < "0.11" else {}),
    "xla_cpu_parallel_codegen_split_count": "1",
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
}
"""Of XLA, unless others are given."""


def prepare() -> None:
    """Sets what has to be set before jax is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{k}={v}" for k, v in FLAGS.items() if k not in given)]).strip()
    import jax

    jax.config.update("jax_enable_x64", True)


def work(start: int, count: int, way: str) -> None:
    """A worker: one line of JSON before and one after every program."""
    prepare()
    from tests.random_programs.check import check
    from tests.random_programs.generate import generate

    for seed in range(start, start + count):
        print(json.dumps({"seed": seed}), flush=True)
        outcome = check(generate(seed), way)
        print(json.dumps({"seed": seed, **dataclasses.asdict(outcome)}), flush=True)


def make_small(seed: int, way: str) -> None:
    """Prints a failing program's smallest form, its class and the failure."""
    prepare()
    from tests.random_programs.check import check
    from tests.random_programs.generate import generate
    from tests.random_programs.minimise import minimise, tidy

    program = generate(seed)
    outcome = check(program, way)
    if not outcome.failed:
        print(json.dumps({"kind": outcome.status, "text": f"{program}\n# {outcome.status}: {outcome.detail}"}))
        return

    def same(smaller: Any) -> bool:
        again = check(smaller, way)
        return again.status == outcome.status and (again.status == "wrong" or again.head == outcome.head)

    tidied = tidy(program)
    program = minimise(tidied if same(tidied) else program, same)
    final = check(program, way)
    kind = final.head
    if final.status == "wrong":
        body = [line.strip() for line in program.step_source().splitlines()[1:] if line.strip()]
        kind = "wrong: " + "; ".join(re.sub(r"\d+", "#", line) for line in body)
    details = "".join(f"# {line}\n" for line in final.detail.splitlines()[-12:])
    print(json.dumps({"kind": kind, "text": f"{program}{details}"}))


class Campaign:
    """Many programs on a few workers, and what became of them."""

    def __init__(self, start: int, count: int, limit: int, verbose: bool, way: str) -> None:
        self.chunks: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        for first in range(start, start + count, CHUNK):
            self.chunks.put((first, min(CHUNK, start + count - first)))
        self.total, self.limit, self.verbose, self.way = count, limit, verbose, way
        self.statuses: collections.Counter[str] = collections.Counter()
        self.heads: dict[str, list[int]] = collections.defaultdict(list)
        self.refused: collections.Counter[str] = collections.Counter()
        self.example: dict[str, int] = {}
        self.kinds: dict[str, list[int]] = collections.defaultdict(list)
        self.lock = threading.Lock()
        self.began = time.monotonic()

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tests.random_programs", "--way", self.way, *arguments]

    def run(self, jobs: int) -> None:
        threads = [threading.Thread(target=self.serve, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def serve(self) -> None:
        while True:
            try:
                start, count = self.chunks.get_nowait()
            except queue.Empty:
                return
            while count:
                done = self.chunk(start, count)
                start, count = start + done, count - done
            with self.lock:
                seconds, done = time.monotonic() - self.began, sum(self.statuses.values())
                print(f"[{seconds:6.0f} s] {done}/{self.total} {dict(self.statuses)}", flush=True)

    def chunk(self, start: int, count: int) -> int:
        """Runs one worker; returns how many programs it got through, the one that killed it included."""
        worker = subprocess.Popen(
            self.command("--work", str(start), str(count)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert worker.stdout is not None
        current, done = start, 0
        watchdog = threading.Timer(PATIENCE, worker.kill)
        watchdog.start()
        for line in worker.stdout:
            watchdog.cancel()
            watchdog = threading.Timer(PATIENCE, worker.kill)
            watchdog.start()
            if not line.startswith("{"):
                continue
            record = json.loads(line)
            current = record["seed"]
            if "status" in record:
                done += 1
                self.record(**record)
        watchdog.cancel()
        if worker.wait() and done < count:
            self.record(current, "error", f"the process ended with {worker.returncode}", "")
            done += 1
        return done

    def record(self, seed: int, status: str, head: str, detail: str) -> None:
        with self.lock:
            self.statuses[status] += 1
            if status == "refused":
                self.refused[head] += 1
                self.example.setdefault(f"refused {head}", seed)
            if status in ("invalid", "unsteady"):
                self.refused[f"({status}) {head}"] += 1
                self.example.setdefault(f"refused ({status}) {head}", seed)
            if status not in ("wrong", "error"):
                return
            known = self.heads[head]
            known.append(seed)
            look = (len(known) == 1 or (status == "wrong" and len(known) <= self.limit)) and "process" not in head
        if self.verbose:
            print(f"seed {seed}: {status}: {head}", flush=True)
        if not look:
            return
        result = subprocess.run(self.command("--minimise", str(seed)), capture_output=True, text=True)
        lines = [line for line in result.stdout.splitlines() if line.startswith('{"kind"')]
        found = json.loads(lines[-1]) if lines else {"kind": head, "text": result.stderr[-2000:]}
        with self.lock:
            new = found["kind"] not in self.kinds
            self.kinds[found["kind"]].append(seed)
            if new:
                print(f"\n=== seed {seed}: {found['kind']}\n{found['text']}", flush=True)

    def summary(self) -> bool:
        """Prints the totals; whether nothing failed."""
        print(f"\n{sum(self.statuses.values())} programs: {dict(self.statuses)}")
        for title, table in (("refused, invalid or unsteady", self.refused), ("failed", self.heads)):
            if table:
                print(f"\n{title}:")
        for head, n in self.refused.most_common():
            print(f"{n:6d}  {head}  (seed {self.example[f'refused {head}']})")
        for head, seeds in sorted(self.heads.items(), key=lambda item: -len(item[1])):
            print(f"{len(seeds):6d}  FAILED {head}  (seeds {', '.join(map(str, seeds[:8]))})")
        return not self.heads


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description="Checks random programs.")
    parser.add_argument("--count", type=int, default=200, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--limit", type=int, default=20, help="how many programs with wrong numbers are made small")
    parser.add_argument(
        "--way",
        choices=["nodes", "batches", "layouts", "plans", "training", "searches"],
        default="nodes",
        help="to carry them out",
    )
    parser.add_argument("--verbose", action="store_true", help="print every failing seed")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one program and stop")
    parser.add_argument("--minimise", type=int, metavar="SEED", help="make one failing program small and stop")
    parser.add_argument("--work", type=int, nargs=2, metavar=("START", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work, options.way)
    elif options.minimise is not None:
        make_small(options.minimise, options.way)
    elif options.show is not None:
        prepare()
        from tests.random_programs.generate import generate

        print(generate(options.show))
    else:
        campaign = Campaign(options.seed, options.count, options.limit, options.verbose, options.way)
        campaign.run(options.jobs)
        return 0 if campaign.summary() else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
