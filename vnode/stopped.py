"""Whether a process of the same host is stopped, by SIGSTOP or a debugger, as the kernel says.

Knows Linux's ``/proc``. Must not know what the process does.

A process gives no sign of life while it is stopped, nor while a call of C holds Python's lock: to permute 60 million
numbers, or to write 100 MB of JSON, takes several seconds. The kernel tells one from the other.
"""

from __future__ import annotations

import os
from typing import NamedTuple

STOPPED = ("T", "t")
"""The states of a process that is stopped: by a signal, by a debugger."""


class Resident(NamedTuple):
    """Where a process is.

    Attributes:
      host: one start of one host's kernel, and the process numbers that are known there (containers have their own);
        empty if the system does not tell.
      pid: the process's number.
    """

    host: str
    pid: int

    @classmethod
    def this_process(cls) -> Resident:
        """Where this process is.

        Example:
          >>> Resident.this_process().is_stopped()
          False
        """
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                return cls(f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}", os.getpid())
        except OSError:
            return cls("", os.getpid())

    def is_stopped(self) -> bool:
        """Whether it is stopped, as far as this process can know: the other may be on another host."""
        if not self.host or self.host != Resident.this_process().host:
            return False
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in STOPPED
        except (OSError, IndexError):
            return False
