"""`python -m vnode.elastic.join_world SCRIPT ...`: has a worker join its world of JAX, and run its script there.

Knows `jax.distributed`, and who tells this process of its world. Must not know runs. After ``-m`` comes a module.

For workers that are replaced at each change (`vnode run --restart`): each is in one world of JAX, for all of its life.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import types

from vnode.elastic.membership import Membership

START = 600
"""Seconds to wait for all processes of a world to connect; the supervisor waits less long."""


def join(member: Membership) -> None:
    """Waits until all workers are there, and makes JAX's world of them; that of one worker needs nothing.

    Args:
      member: this process among the workers.
    """
    member.doing, member.waits = "to connect with the other workers", True
    if member.number == 0:
        member.send("leads", address=free_address(member.interface))
    member.wait(lambda: member.order)
    assert member.order is not None
    count, coordinator = member.order["count"], member.order["coordinator"]
    if count > 1:
        import jax

        jax.distributed.initialize(
            coordinator,
            num_processes=count,
            process_id=member.number,
            cluster_detection_method="deactivate",
            initialization_timeout=START,
            coordinator_bind_address=coordinator,
        )
    member.doing, member.waits = "to start", False


def free_address(interface: str) -> str:
    """An address at which nobody listens."""
    with socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET) as probe:
        probe.bind((interface, 0))
        port = probe.getsockname()[1]
    return f"[{interface}]:{port}" if ":" in interface else f"{interface}:{port}"


def main(arguments: list[str]) -> None:
    """Joins the world, and runs a script, or a module after ``-m``."""
    join(Membership.from_environment())
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        run_script(arguments[0])


def run_script(path: str) -> None:
    """Runs a script as Python would: it is the module ``__main__`` to the end, and finds modules beside it."""
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
