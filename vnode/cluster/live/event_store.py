"""Turns records into rows of an SQLite file, and back. One scheduler has the file; whoever wants may read it.

Knows SQLite, locks, file systems, and the forms of records. Must not know what records mean.

A record is on the disk when `append` returns (WAL, full synchronisation). Records are only ever added: a trigger keeps
them as they are. The table `jobs` is for people with `sqlite3` at hand: it can be made again from the records.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vnode import files
from vnode.cluster.live.event_forms import Forms
from vnode.cluster.live.event_log import Record
from vnode.errors import ClusterError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

APPLICATION = 0x766E6F64  # "vnod"
VERSION = 1

NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "ocfs2", "gfs2",
    "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone",
}  # fmt: skip
"""File systems of several hosts, on which the shared memory of SQLite's log does not work."""

TRIES = 10
"""The number of attempts to get a lock."""

OWNER = "owner"
"""In the folder of jobs: the identity of the file that it belongs to."""

SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, kind TEXT NOT NULL, job TEXT, facts TEXT NOT NULL
);
CREATE TRIGGER events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events stay as they are'); END;
CREATE TRIGGER events_last BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events stay as they are'); END;
CREATE TABLE identity (id TEXT NOT NULL);
INSERT INTO identity VALUES (lower(hex(randomblob(16))));
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, name TEXT, state TEXT, priority REAL, share INTEGER, submitted REAL, ended REAL, code INTEGER
);
"""

UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""Errors of a damaged database; the second one is raised where SQLite's own message repeats damaged bytes."""

Row = tuple[str, str, str, float, int, float, float | None, int | None]
"""A row of the table `jobs`."""


class State:
    """The file of a scheduler.

    Args:
      path: of the file; made if it is not there.

    Raises:
      ClusterError: another scheduler has it, it is of another version or damaged, or on a network file system.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.lock: int | None = None
        self.log: dict[Path, int] = {}
        try:
            check_file_system(self.path.parent)
            self.lock = os.open(lock_of(self.path), os.O_RDWR | os.O_CREAT, 0o600)
            self.claim()
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))  # commands and environments are private
            self.inode = os.stat(self.path).st_ino
            self.database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self.prepare()
        except OSError as error:
            self.close()
            raise unusable(self.path, error.strerror or str(error)) from error
        except UNREADABLE as error:
            self.close()
            raise unusable(self.path, str(error)) from error
        except ClusterError:
            self.close()
            raise

    @property
    def jobs(self) -> Path:
        """The folder of what jobs leave: output, checkpoints."""
        return jobs_folder(self.path)

    def claim(self) -> None:
        """Makes this process the only scheduler of the file; the kernel ends that when the process ends."""
        if fcntl is None:
            raise ClusterError("a scheduler needs a system with flock: Linux or macOS.")
        assert self.lock is not None
        try:
            for _ in range(TRIES):  # who asks for a scheduler holds the lock for a moment
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.05)
            else:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            holder = said_in(lock_of(self.path).read_bytes()).get("pid", "?")
            raise ClusterError(
                f"another scheduler uses {self.path}.",
                facts=[f"process {holder}"],
                remedies=["submit to that one: vnode submit", "or give --state another file"],
            ) from error
        self.write_holder(pid=os.getpid())

    def write_holder(self, **facts: Any) -> None:
        """Writes this scheduler's process and address into the lock's file."""
        assert self.lock is not None
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps(facts).encode(), 0)

    def prepare(self) -> None:
        """Makes the tables of a new file, and looks at the version of an old one."""
        if self.database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            self.database.executescript(f"BEGIN IMMEDIATE;{SCHEMA}COMMIT;")
        check_version(self.database, self.path)
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.execute("PRAGMA synchronous = FULL")
        found = self.database.execute("SELECT id FROM identity").fetchone()
        if found is None or not isinstance(found[0], str):
            raise unusable(self.path, "its identity is missing")
        self.identity = found[0]
        self.check_folder()

    def check_folder(self) -> None:
        """Makes the folder of jobs, or looks whether it is that of this file: an older one has other jobs' results.

        Raises:
          ClusterError: it belongs to another file.
        """
        self.jobs.mkdir(mode=0o700, exist_ok=True)
        owner = self.jobs / OWNER
        if not owner.exists() and not any(self.jobs.iterdir()):
            files.write_text(owner, self.identity, ClusterError)  # whole or not at all, as on a full disk
        if not owner.exists() or owner.read_bytes() != self.identity.encode(errors="replace"):
            raise ClusterError(
                f"the folder {self.jobs} belongs to another scheduler's file than {self.path}.",
                remedies=["move it away, or delete it", "or give --state another file"],
            )

    def append(self, records: Sequence[Record], rows: Sequence[Row] = ()) -> None:
        """Writes records, and rows of the table of jobs, in one transaction.

        Raises:
          ClusterError: they cannot be written; none of them is then.
        """
        self.check_inodes()
        try:
            with transaction(self.database) as database:
                database.executemany(
                    "INSERT INTO events (time, kind, job, facts) VALUES (?, ?, ?, ?)",
                    [(r.time, r.kind, r.job, json.dumps(r.facts)) for r in records],
                )
                database.executemany("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            self.know_log()
        except (sqlite3.Error, OSError) as error:
            raise ClusterError(
                f"the scheduler's file {self.path} cannot be written.",
                facts=[str(error)],
                remedies=["make room on its disk; running jobs continue meanwhile, and none is lost"],
            ) from error
        except (ValueError, TypeError, OverflowError) as error:  # a text or number that SQLite or JSON does not take
            raise ClusterError(
                f"the scheduler's file {self.path} takes no such value.", facts=[f"{type(error).__name__}: {error}"]
            ) from error

    def know_log(self) -> None:
        """Takes note of SQLite's log, which is there after the first write."""
        log = self.path.with_name(f"{self.path.name}-wal")
        if not self.log and log.exists():
            self.log = {log: os.stat(log).st_ino}

    def check_inodes(self) -> None:
        """Looks whether the file and its lock are still those that were opened.

        Raises:
          ClusterError: one was deleted, or replaced by another: what was written would be lost.
        """
        assert self.lock is not None
        inodes = {self.path: self.inode, lock_of(self.path): os.fstat(self.lock).st_ino, **self.log}
        for path, inode in inodes.items():
            if not path.exists() or os.stat(path).st_ino != inode:
                raise ClusterError(
                    f"{path} was deleted, moved or replaced while the scheduler uses it: nothing can be written.",
                    facts=["jobs that run go on"],
                    remedies=["put it back where it was, or end this scheduler and its jobs"],
                )

    def records(self) -> list[Record]:
        """All records, in order.

        Raises:
          ClusterError: they cannot be read.
        """
        try:
            return list(rows_of(self.database, self.path))
        except UNREADABLE as error:
            raise unusable(self.path, str(error)) from error

    def renew(self, rows: Sequence[Row]) -> None:
        """Makes the table of jobs anew; where there is no room, it stays as it was: it is for people."""
        unwritable = (sqlite3.Error, ValueError, TypeError, OverflowError)
        with contextlib.suppress(*unwritable), transaction(self.database) as database:
            database.execute("DELETE FROM jobs")
            database.executemany("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def close(self) -> None:
        """Lets others have the file. Again does nothing."""
        if (database := getattr(self, "database", None)) is not None:
            database.close()
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def lock_of(path: Path) -> Path:
    """The file that a scheduler locks as long as it has another one."""
    return path.with_name(f"{path.name}.lock")


def said_in(lock: bytes) -> dict[str, Any]:
    """The facts that the holder of a lock has written into it."""
    try:
        found = json.loads(lock)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def holder(path: Path) -> dict[str, Any] | None:
    """The facts of the scheduler that has a file; None if none has it."""
    try:
        return said_in(lock_of(path).read_bytes()) if files.is_locked(lock_of(path)) else None
    except OSError:
        return None


def read_records(path: Path) -> list[Record]:
    """The records of a file, which a scheduler may have.

    Raises:
      ClusterError: there is no such file, or it is no scheduler's.
    """
    if not path.is_file():
        raise ClusterError(f"there is no file {str(path)!r}.", remedies=["name a scheduler's: --state"])
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            check_version(database, path)
            return list(rows_of(database, path))
    except UNREADABLE as error:
        raise unusable(path, str(error)) from error


def rows_of(database: sqlite3.Connection, path: Path) -> Iterator[Record]:
    """The records in a database.

    Raises:
      ClusterError: one is damaged.
    """
    forms = Forms()
    for seq, at, kind, job, facts in database.execute("SELECT seq, time, kind, job, facts FROM events ORDER BY seq"):
        try:
            record = Record(at, kind, job, json.loads(facts))
            forms.check(record)
        except (ValueError, TypeError, RecursionError) as error:  # TypeError: a number in the place of JSON
            raise unusable(path, f"event {seq} is damaged: {error}") from error
        yield record


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """A transaction of the database, which is rolled back on an exception."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


def check_version(database: sqlite3.Connection, path: Path) -> None:
    """Looks whether a database is a scheduler's, and of this version.

    Raises:
      ClusterError: it is not.
    """
    application = database.execute("PRAGMA application_id").fetchone()[0]
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION:
        raise unusable(path, "it is the database of another program")
    if version != VERSION:
        raise unusable(path, f"it is of version {version}, and this vnode writes version {VERSION}")


def check_file_system(folder: Path) -> None:
    """Refuses a folder of a network file system.

    Raises:
      ClusterError: it is on one.
    """
    kind = file_system_of(folder)
    if kind in NETWORK:
        raise ClusterError(
            f"the scheduler's file cannot be in {folder}.",
            facts=[f"it is on a network file system ({kind}), where SQLite's log does not work"],
            remedies=["give --state a file on a local disk"],
        )


def file_system_of(folder: Path, mounts: str = "/proc/self/mountinfo") -> str:
    """The kind of the file system of a folder, as Linux tells; "" where it does not."""
    try:
        lines = Path(mounts).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found, depth = "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        if folder.is_relative_to(mount) and len(mount.parts) >= depth:
            found, depth = after.split()[0], len(mount.parts)
    return found


def jobs_folder(path: Path) -> Path:
    """The folder beside a scheduler's file for what jobs leave.

    >>> jobs_folder(Path("/home/me/cluster.db")).as_posix()
    '/home/me/cluster.db.jobs'
    """
    return path.with_name(f"{path.name}.jobs")


def unusable(path: Path, why: str) -> ClusterError:
    """The error of a file that cannot be a scheduler's."""
    return ClusterError(
        f"{path} is not a scheduler's file.", facts=[why], remedies=["give --state another file, or a new one"]
    )
