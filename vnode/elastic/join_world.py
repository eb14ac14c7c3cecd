"""`python -m vnode.elastic.join_world SCRIPT ...`: has a worker join its world of JAX, and run its script there.

Knows `jax.distributed`, and who tells this process of its world. Must not know runs. After ``-m`` comes a module, and
after ``-c`` a program.

For workers that are replaced at each change (`vnode run --restart`): each is in one world of JAX, for all of its life.
The supervisor is told how the script ends: behind it, JAX has the process wait for all others of its world.
"""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import sys
import types

from vnode.elastic.membership import Membership
from vnode.placement.world import one_line

START = 600
"""Seconds to wait for all processes of a world to connect; the supervisor waits less long."""

UNWATCHED = 30 * 24 * 3600
"""Seconds that JAX waits for a silent process, and for the last one at the end of scripts. The supervisor watches the
processes, and knows the work that a script does behind its run; JAX would abort all of them after minutes."""


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

        jax.config.update("jax_enable_preemption_service", False)  # it swallows a SIGTERM before the run begins
        jax.distributed.initialize(
            coordinator,
            num_processes=count,
            process_id=member.number,
            cluster_detection_method="deactivate",
            initialization_timeout=START,
            heartbeat_timeout_seconds=UNWATCHED,
            shutdown_timeout_seconds=UNWATCHED,
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
    """Joins the world, and runs a script, a module after ``-m``, or a program after ``-c``."""
    member = Membership.from_environment()
    join(member)
    end: dict[str, object] = {"code": 0, "error": None}
    atexit.register(lambda: member.send("script_ended", **end))  # behind the traceback, before JAX waits for others
    try:
        run(arguments)
    except SystemExit as error:
        end["code"] = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except BaseException as error:
        end.update(code=1, error=one_line(error))
        raise


def run(arguments: list[str]) -> None:
    """Runs a script, a module or a program as Python would."""
    first, *rest = arguments
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), new_main().__dict__)
    else:
        sys.argv = arguments
        run_script(first)


def new_main() -> types.ModuleType:
    """An empty module ``__main__``."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    return module


def run_script(path: str) -> None:
    """Runs a script as Python would: it is the module ``__main__`` to the end, and finds modules beside it."""
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = new_main()
    module.__file__ = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
