"""`vnode cluster serve`: the scheduler of a machine, and its status page.

Knows the command line, signals. Must not know how jobs are scheduled.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from pathlib import Path
from typing import Any

from vnode.cluster.live.arguments import counts, resources, variable
from vnode.errors import ClusterError


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "serve",
        help="run jobs that share the devices of this machine",
        description="Ctrl-C or SIGTERM ends the scheduler; jobs that run go on, and the next scheduler with the same "
        "file takes them over.",
    )
    parser.add_argument("--devices", required=True, metavar="N|NAME,...", help="how many there are, or their names")
    parser.add_argument(
        "--policy",
        default="goodput",
        metavar="NAME",
        help="who has how many: goodput (default), max_min, wfs, shortest_remaining, static, ...",
    )
    parser.add_argument("--guarantee", type=float, default=1.1, metavar="C", help="of the policy guarantee")
    parser.add_argument("--inner", default="goodput", metavar="NAME", help="the policy inside of a guarantee")
    parser.add_argument("--counts", type=counts, metavar="N,...", help="numbers of devices that a job may have; all")
    parser.add_argument("--state", default="cluster.db", metavar="FILE", help="what the scheduler knows: cluster.db")
    parser.add_argument("--backend", choices=("processes", "ray"), default="processes", help="what places workers")
    parser.add_argument("--resources", type=resources, metavar="CPU=N,...", help="with ray: what each worker needs")
    parser.add_argument("--restart", action="store_true", help="jobs replace all workers at each change (GPUs, TPUs)")
    parser.add_argument(
        "--env",
        action="append",
        type=variable,
        default=[],
        metavar="NAME=VALUE",
        help="a variable of all workers; {device} in it is the worker's device",
    )
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="of the status page; default: a free one")
    parser.add_argument("--no-page", action="store_true", help="no status page")
    parser.set_defaults(execute=execute)


def execute(chosen: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      0; 2 if it cannot begin.
    """
    from vnode.cluster.live.scheduler import Scheduler, Setup

    options: dict[str, Any] = {"factor": chosen.guarantee, "inner": chosen.inner}
    if chosen.counts:
        options["counts"] = chosen.counts
    page = scheduler = None
    try:
        setup = Setup(
            devices=names(chosen.devices),
            policy=chosen.policy,
            options=options,
            backend=chosen.backend,
            resources=chosen.resources,
            restart=chosen.restart,
            env=dict(chosen.env),
        )
        scheduler = Scheduler(Path(chosen.state), setup)
        if not chosen.no_page:
            page = page_of(scheduler, chosen.port)
    except (ClusterError, ValueError) as error:
        print(f"vnode: {error}", file=sys.stderr)
        if scheduler is not None:
            scheduler.close()
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: scheduler.stop())
    print(f"vnode: {len(setup.devices)} devices, policy {chosen.policy}, {scheduler.state.path}", file=sys.stderr)
    if page is not None:
        page.start()
        print(f"vnode: status page {page.url}", file=sys.stderr, flush=True)
    try:
        scheduler.run()
    finally:
        if page is not None:
            page.stop()
        running = sum(job.alive for job in scheduler.book.active())
        scheduler.close()
    there = "job goes" if running == 1 else "jobs go"
    print(f"vnode: the scheduler ends; {running} {there} on without it", file=sys.stderr)
    return 0


def page_of(scheduler: Any, port: int) -> Any:
    """The status page; None where its libraries are not installed.

    Raises:
      ClusterError: the port is in use.
    """
    import importlib.util

    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        print("vnode: no status page: it needs pip install 'vnode[cluster]'", file=sys.stderr)
        return None
    from vnode.cluster.live.status_page import Page

    state = scheduler.state.path
    return Page(lambda: scheduler.shown, port=port, token_file=state.with_name(f"{state.name}.token"))


def names(text: str) -> list[str]:
    """Names of devices.

    >>> names("3"), names("0,2,5"), names("gpu1")
    (['0', '1', '2'], ['0', '2', '5'], ['gpu1'])
    """
    if re.fullmatch("[0-9]{1,6}", text):
        return [str(number) for number in range(int(text))]
    found = [name.strip() for name in text.split(",") if name.strip()]
    if bad := [name for name in found if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.:/-]*", name)]:
        raise ClusterError(
            f"{bad[0]!r} is not a name of a device: give --devices a number, or names of letters and digits"
        )
    return found
