"""Turns lines (``start 127.0.0.1``) into coordination services of jax that outlive the supervisor by a minute.

Knows `jaxlib`'s service. Must not know workers.

A client of jax ends its process at once, with whatever it holds, when its service goes. So the services are in a
process of their own, which nobody has a reason to kill:

    start 127.0.0.1      ->  127.0.0.1:41233
    end 127.0.0.1:41233
    (end of the input)       it ends a minute later, or at once if no service is left
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from typing import Any

from vnode.compat import coordination_service

LEAVE_SECONDS = 60
"""Seconds that services outlive the supervisor: long enough for workers to save."""

TRIES = 20


def start(host: str) -> tuple[str, Any]:
    """Starts a service for any number of workers, each of which connects as node 0 of one.

    Args:
      host: the address of the interface at which it listens.

    Returns:
      Its address, and the service.

    Raises:
      OSError: there is no free port.
    """
    why: Exception | None = None
    for _ in range(TRIES):  # another process may take the port in between
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            service = coordination_service(address, 1, heartbeat_timeout=10**6, shutdown_timeout=1, recoverable=True)
        except Exception as error:
            why = error
            continue
        return address, service
    raise OSError(f"no service of jax starts at {host}: {why}")


def main() -> None:
    """Serves the lines of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    services: dict[str, Any] = {}
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "start":
            try:
                address, services[address] = start(argument)
            except Exception as error:
                address = f"error {' '.join(str(error).split())}"
            print(address, flush=True)
        elif command == "end" and argument in services:
            services.pop(argument).shutdown()
    if services:
        time.sleep(LEAVE_SECONDS)


if __name__ == "__main__":
    main()
