"""`vnode run train.py --workers 3`: runs a script with several workers, and ends with its exit code.

Knows the terminal and signals. Must not know what a supervisor decides.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from typing import Any

from vnode.errors import WorkerError
from vnode.workers.messages import SHOWN_EVENTS, event_line
from vnode.workers.start_job import BACKENDS, Spec, script_command
from vnode.workers.supervisor import Supervisor


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "run",
        help="run a script that calls vnode.elastic.run with several workers",
        usage="vnode run SCRIPT --workers N [options] [-- arguments of the script]",
        description="Ctrl-C or SIGTERM ends the run with a checkpoint, a second one at once. SIGUSR1 asks for one "
        "worker more, SIGUSR2 for one less. The exit code is that of the script's lowest rank.",
    )
    parser.add_argument("script", help="an ordinary script that calls vnode.elastic.run")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="the number of workers that train")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="processes", help="what starts workers: processes (default) or ray"
    )
    parser.add_argument(
        "--resources", type=resources, metavar="CPU=N,...", help="with ray: what each worker needs; default: CPU=1"
    )
    parser.add_argument("--checkpoint", metavar="FOLDER", help="the folder of checkpoints, if the script names none")
    parser.add_argument(
        "--spares", type=int, default=0, metavar="N", help="the number of further workers that stand by: 0"
    )
    parser.add_argument("--max-workers", type=int, metavar="N", help="the most workers that may be asked for")
    parser.add_argument(
        "--start-timeout", type=float, default=300, metavar="SECONDS", help="the longest start of a worker: 300"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="the most restarts of each worker in ten minutes: 3"
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=10,
        metavar="SECONDS",
        help="a worker without a sign of life for so long is lost: 10",
    )
    parser.add_argument(
        "--rejoin",
        action="store_true",
        help="leave a generation before the next is made: less memory, slower",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="replace all workers at each change, from a checkpoint: for GPUs and TPUs",
    )
    parser.add_argument(
        "--env",
        action="append",
        type=variable,
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the workers; {worker} in it is the number of the worker",
    )
    parser.add_argument(
        "--interface", default="127.0.0.1", metavar="ADDRESS", help="where the supervisor listens: 127.0.0.1"
    )
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="of the supervisor; default: a free one")
    parser.set_defaults(execute=execute)


def resources(text: str) -> dict[str, float]:
    """The resources of Ray that a text names.

    >>> resources("CPU=2,TPU=4")
    {'CPU': 2.0, 'TPU': 4.0}
    """
    return {name: float(amount) for name, _, amount in (each.partition("=") for each in text.split(","))}


def variable(text: str) -> tuple[str, str]:
    """A variable and its value.

    >>> variable("CUDA_VISIBLE_DEVICES={worker}")
    ('CUDA_VISIBLE_DEVICES', '{worker}')
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def execute(chosen: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      The exit code of the job; 2 if it cannot be started.
    """
    try:
        spec = Spec(
            command=script_command(chosen.script, chosen.arguments),
            name=chosen.script,
            workers=chosen.workers,
            backend=chosen.backend,
            checkpoint=chosen.checkpoint,
            spares=chosen.spares,
            max_workers=chosen.max_workers,
            start_timeout=chosen.start_timeout,
            max_restarts=chosen.max_restarts,
            silence=chosen.silence,
            rejoin=chosen.rejoin,
            restart=chosen.restart,
            interface=chosen.interface,
            port=chosen.port,
            resources=chosen.resources,
            env=dict(chosen.env),
        )
        spec.check()
        if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            from vnode.workers.live_table import Table

            with Table(chosen.script) as table:
                supervisor = spec.supervisor(out=table.out, err=table.err, observe=table.observe)
                handle_signals(supervisor)
                return supervisor.run()
        supervisor = spec.supervisor(observe=print_event)
        handle_signals(supervisor)
        return supervisor.run()
    except WorkerError as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 2


def print_event(status: dict[str, Any], event: dict[str, Any] | None) -> None:
    """Prints an event of interest to users."""
    if event is not None and event["event"] in SHOWN_EVENTS:
        print(f"vnode: {event_line(event)}", file=sys.stderr, flush=True)


def handle_signals(supervisor: Supervisor) -> None:
    """Installs signal handlers that ask the supervisor to stop, or for one worker more or fewer."""

    def stop(number: int, frame: Any) -> None:
        supervisor.stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, 128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # nohup
            signal.signal(number, stop)
    signal.signal(signal.SIGUSR1, lambda number, frame: supervisor.grow(1))
    signal.signal(signal.SIGUSR2, lambda number, frame: supervisor.grow(-1))
