"""Measures what resizes leave in the processes of a job, how soon its supervisor listens, and where anything listens.

    python -m benchmarks.workers_resources

A job of two workers is asked for three, then for two, and so on, 25 times each. Every 10 resizes the kernel is asked
for the resident memory, the threads and the descriptors of the worker that stays from the start, of the supervisor,
and of the keeper (its child, which keeps jax's coordination services). Every half second it is asked at which addresses
the processes of the job listen (`/proc/net/tcp` and `tcp6`). It fails if one of them is not on loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import ipaddress
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import workers_script as script
from benchmarks.report import Sheet

SUPERVISOR, KEEPER = "supervisor", "keeper"
LISTENS = "0A"
"""The state of a socket that listens, in `/proc/net/tcp`."""
LOOK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Use:
    """The use of a process: MB of resident memory, threads, descriptors."""

    megabytes: float
    threads: int
    descriptors: int

    @classmethod
    def from_kernel(cls, pid: int) -> Use:
        """That of a process that runs."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        )
        kib = int(status["VmRSS"].split()[0])
        return cls(kib * 1024 / 1e6, int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))


def children(pid: int) -> Iterator[int]:
    """The processes that a process has started, and theirs."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread has ended
            for child in map(int, path.read_text().split()):
                yield child
                yield from children(child)


def keeper_of(supervisor: int) -> int | None:
    """The process of the keeper, once it is there."""
    for pid in children(supervisor):
        with contextlib.suppress(OSError):
            if b"vnode.workers.coordination_keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses and ports at which a process listens."""
    sockets = set()
    with contextlib.suppress(OSError):  # it has ended, or a descriptor is closed
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(path))
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets:
                    found.add(address_of(fields[1]))
    return found


def address_of(text: str) -> tuple[str, int]:
    """The address of a line of `/proc/net/tcp`, whose words of four bytes are in the machine's order.

    >>> address_of("0100007F:1F90") if sys.byteorder == "little" else ("127.0.0.1", 8080)
    ('127.0.0.1', 8080)
    """
    words, port = text.split(":")
    raw = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)


class Ports:
    """Looks at the ports of a job's processes from time to time, in a thread.

    Args:
      job: the job.

    Attributes:
      addresses: of each kind of process, all at which one of it has listened.
      most: of each kind of process, the most ports of one at a time.
    """

    def __init__(self, job) -> None:
        self.job = job
        self.addresses: dict[str, set[str]] = {}
        self.most: dict[str, int] = {}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        """The thread."""
        while not self.over.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Looks once."""
        keeper = keeper_of(self.job.pid)
        kinds = dict.fromkeys(children(self.job.pid), "worker") | {self.job.pid: SUPERVISOR}
        for pid, kind in kinds.items():
            found = listening(pid)
            kind = KEEPER if pid == keeper else kind
            self.addresses.setdefault(kind, set()).update(address for address, _ in found)
            self.most[kind] = max(self.most.get(kind, 0), len(found))

    def close(self) -> None:
        """Ends the thread."""
        self.over.set()
        self.thread.join()

    def table(self) -> Sheet:
        """Ports by kind of process."""
        rows = [
            [kind, str(self.most[kind]), ", ".join(sorted(self.addresses[kind])) or "none"]
            for kind in (SUPERVISOR, KEEPER, "worker")
        ]
        heads = ["process", "most TCP ports at a time", "addresses"]
        return Sheet("Ports listened on", heads, rows, f"Looked every {LOOK_SECONDS} s, through all resizes.")

    def elsewhere(self) -> set[str]:
        """Addresses that are not on loopback."""
        return {a for each in self.addresses.values() for a in each if not ipaddress.ip_address(a).is_loopback}


def started(job, began: float, returned: float) -> Sheet:
    """How long supervisor and keeper took until they listened."""
    keeper = None

    def listens() -> bool:
        nonlocal keeper
        keeper = keeper or keeper_of(job.pid)
        return keeper is not None and bool(listening(keeper))

    script.wait(listens)
    there = time.time()
    asked = next(event["time"] for event in job.events if event["event"] == "prepare")
    rows = [
        [SUPERVISOR, "`launch` was called", f"{returned - began:.2f}"],
        [KEEPER, "the first service was asked for", f"{there - asked:.2f}"],
    ]
    return Sheet("Until it listens", ["process", "since", "seconds"], rows, "Looked every 20 ms.")


def main() -> None:
    """Measures, and prints the tables; in a worker, trains."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workers_resources", description="What resizes leave in the processes of a job."
    )
    parser.add_argument("--resizes", type=int, default=50, help="half of them up, half of them down")
    parser.add_argument("--every", type=int, default=10, help="resizes between two looks")
    parser.add_argument("--width", type=int, default=64, help="of the network's two layers")
    options = parser.parse_args()
    if folder := script.job_folder():
        script.train(*script.perceptron([options.width] * 3, 120, 6), 10**9, folder)
        return
    importlib.import_module("vnode.workers.launch")  # or its import would be measured
    began = time.time()
    job = script.launch(__file__, 2, ["--width", str(options.width)])
    until_listening = started(job, began, time.time())
    ports = Ports(job)
    try:
        script.wait_steps(job, 2, 20)
        names = {"worker": job.workers[0]["pid"], SUPERVISOR: job.pid, KEEPER: keeper_of(job.pid)}
        used = {0: [Use.from_kernel(pid) for pid in names.values()]}
        for number in range(1, options.resizes + 1):
            workers = 3 if number % 2 else 2
            job.resize(workers)
            script.wait_steps(job, workers, 20)
            if number % options.every == 0 or number == options.resizes:
                used[number] = [Use.from_kernel(pid) for pid in names.values()]
                print(f"{number} resizes: {used[number]}", file=sys.stderr)
        assert job.workers[0]["pid"] == names["worker"], "the first worker was lost"
    finally:
        script.kill(job)
        ports.close()
    rows = [
        [str(number), *(f"{use.megabytes:.0f} MB, {use.threads}, {use.descriptors}" for use in uses)]
        for number, uses in used.items()
    ]
    heads = ["resizes", *(f"{name}: resident, threads, descriptors" for name in names)]
    for sheet in (Sheet("What resizes leave", heads, rows, growth(used)), until_listening, ports.table()):
        print(sheet.markdown())
    print(script.machine())
    if elsewhere := ports.elsewhere():
        sys.exit(f"not on loopback: {', '.join(sorted(elsewhere))}")


def growth(used: dict[int, list[Use]]) -> str:
    """The worker's growth for each resize, from the second look to the last."""
    looks = sorted(used)[1:]
    if len(looks) < 2:
        return ""
    first, last, resizes = used[looks[0]][0], used[looks[-1]][0], looks[-1] - looks[0]
    megabytes, threads, descriptors = (
        (b - a) / resizes for a, b in zip(dataclasses.astuple(first), dataclasses.astuple(last), strict=True)
    )
    return (
        f"From resize {looks[0]} to {looks[-1]} the worker has grown by {megabytes:.1f} MB, {threads:.1f} threads and "
        f"{descriptors:.1f} descriptors a resize."
    )


if __name__ == "__main__":
    main()
