"""Kills a scheduler again and again while jobs come, and looks whether any was lost or disturbed.

    python tests/programs/chaos_of_scheduler.py --kills 50 --seed 0

Jobs are commands that note in a file that they have begun, and elastic ones of workers that count steps by the clock.
Each id that was answered must be there in the end, its job must have ended well, a command must have begun once, and no
supervisor may have been replaced. All decisions of the log must come out of the policy again.

Knows the scheduler's commands and files. Must not know how it works.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from vnode.cluster.live.event_store import State, read_records
from vnode.cluster.live.job_book import Book
from vnode.cluster.live.policy_shares import replay
from vnode.cluster.live.socket_server import request
from vnode.cluster.live.submission import Submission
from vnode.errors import ClusterError
from vnode.workers.detached import OWN

WORKER = str(Path(__file__).with_name("fake_worker.py"))


def serve(folder: Path, policy: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "vnode", "cluster", "serve", "--no-page", "--devices", "6", "--policy", policy]
    with open(folder / "serve.log", "ab") as log:
        return subprocess.Popen([*command, "--state", str(folder / "cluster.db")], stdout=log, stderr=log)


def submissions(folder: Path, chance: random.Random, count: int):
    for index in range(count):
        if chance.random() < 0.5:
            note, seconds = folder / f"ran-{index}", chance.uniform(0, 3)
            command = ["sh", "-c", f"echo $$ $VNODE_DEVICE >> {note}; sleep {seconds:.2f}"]
            yield Submission(command=command, workers=chance.randint(1, 2), rigid=True, name=f"ran-{index}")
        else:
            options = {"steps": chance.randint(5, 200), "rate": 50, "nodes": 8}
            command = [sys.executable, WORKER, json.dumps(options)]
            yield Submission(command=command, workers=(1, chance.randint(1, 6)), priority=chance.choice([1, 2, 5]))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="goodput")
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    folder = Path(tempfile.mkdtemp(prefix="vnode-chaos-"))
    state = str(folder / "cluster.db")
    answered: list[str] = []

    def submit() -> None:
        own = random.Random(chosen.seed + 1)
        for job in submissions(folder, own, chosen.jobs):
            while True:
                try:
                    answered.append(request("submit", state, job=job.facts())["answer"])
                    break
                except ClusterError:  # the scheduler was just killed: whether the job is there, nobody knows
                    time.sleep(0.05)
            time.sleep(own.uniform(0, 1.2))

    scheduler = serve(folder, chosen.policy)
    thread = threading.Thread(target=submit)
    thread.start()
    kills = 0
    while kills < chosen.kills:
        time.sleep(chance.uniform(0.3, 2.5))
        scheduler.send_signal(signal.SIGKILL)
        scheduler.wait()
        kills += 1
        scheduler = serve(folder, chosen.policy)
    thread.join()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if all(job["ended"] for job in request("queue", state)["answer"]["jobs"]):
                break
        except ClusterError:
            pass
        time.sleep(0.2)
    scheduler.send_signal(signal.SIGTERM)
    scheduler.wait(30)
    records = read_records(Path(state))
    book = Book(records)
    faults = [f"job {name} is lost" for name in answered if name not in book.jobs]
    for job in book.jobs.values():
        if job.state != "succeeded":
            faults.append(f"{job.called} {job.state}: {job.why}")
        attempts = [folder / "cluster.db.jobs" / job.id / f"run-{k + 1}" / OWN for k in range(job.attempt)]
        if early := [path for path in attempts[:-1] if path.exists()]:  # a scheduler may die before it has started one
            faults.append(f"{job.called} had {len(early) + 1} supervisors")
    counts: dict[str, int] = {}
    for job in book.jobs.values():
        if job.submission.rigid:
            counts[job.submission.title] = counts.get(job.submission.title, 0) + 1
    for title, submitted in counts.items():
        note = folder / title
        began = len(note.read_text().splitlines()) if note.exists() else 0
        if began != submitted:
            faults.append(f"{title} was submitted {submitted} times and began {began} times")
    decisions = list(replay(records))
    for record, decided in decisions:
        if dict(decided.shares) != dict(record.facts["shares"]):
            faults.append(f"decided {dict(record.facts['shares'])}, and again {dict(decided.shares)}")
    used: dict[str, str] = {}  # no device has two jobs
    again = Book()
    for record in records:
        again.add(record)
        used = {}
        for job in again.active():
            for name in job.devices:
                if name in used:
                    faults.append(f"device {name} of jobs {used[name]} and {job.id}")
                used[name] = job.id
    opened = State(Path(state))  # the table of jobs comes out of the records
    before = opened.database.execute("SELECT * FROM jobs ORDER BY id").fetchall()
    opened.renew([job.row() for job in book.jobs.values()])
    if before != opened.database.execute("SELECT * FROM jobs ORDER BY id").fetchall():
        faults.append("the table of jobs differs from the records")
    opened.close()
    print(
        f"{kills} kills, {len(book.jobs)} jobs, {len(answered)} answered, {len(decisions)} decisions, faults: {faults}"
    )
    print(folder, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    raise SystemExit(main())
