"""`vnode cluster simulate`: a trace of jobs, and what would become of them by one or several policies.

Knows the command line. Must not know how a policy decides.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vnode.errors import ClusterError

SHOWN = (
    ("makespan", "makespan", "{:.0f}"),
    ("jct_mean", "mean JCT", "{:.0f}"),
    ("jct_median", "median JCT", "{:.0f}"),
    ("jct_p99", "p99 JCT", "{:.0f}"),
    ("queueing_median", "queueing", "{:.0f}"),
    ("utilisation_allocated", "allocated", "{:.2f}"),
    ("utilisation_effective", "effective", "{:.2f}"),
    ("resizes", "resizes", "{}"),
)
"""Figures of the table: name, title, format."""

LEGEND = (
    "In seconds: JCT is a job's completion time, from its arrival to its end; queueing, the median wait for devices.\n"
    "allocated, effective: the share of the devices' time that jobs had, and that they used."
)


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser("simulate", help="simulate a trace of jobs by one or several policies")
    parser.add_argument("--trace", required=True, metavar="FILE", help="the jobs")
    parser.add_argument("--run", metavar="NAME", help="which of several traces in the file; default: the last")
    parser.add_argument("--throughputs", metavar="FILE", help="of Gavel's, for a trace of Gavel's")
    parser.add_argument("--devices", type=devices, metavar="N", help="or v100=4,p100=8; default: what the file says")
    parser.add_argument("--rounds", type=float, default=360, metavar="SECONDS", help="of Gavel's policies")
    parser.add_argument("--policy", action="append", metavar="NAME", help="may be repeated; default: goodput")
    parser.add_argument("--guarantee", type=float, default=1.1, metavar="C", help="of the policy guarantee")
    parser.add_argument("--inner", default="goodput", metavar="NAME", help="the policy inside of a guarantee")
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="draw N other traces from these jobs, too")
    parser.add_argument("--out", metavar="FOLDER", help="write a page with the table and pictures")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, by policy")
    parser.set_defaults(execute=execute)


def devices(text: str) -> int | dict[str, int]:
    """Devices that a text names.

    >>> devices("8"), devices("v100=4,p100=8")
    (8, {'v100': 4, 'p100': 8})
    """
    pairs = [each.partition("=") for each in text.split(",")] if "=" in text else [("", "", text)]
    found = {kind.strip(): int(count) for kind, _, count in pairs}
    if len(found) < len(pairs) or min(found.values()) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: each kind must have at least one device, and be named once")
    return found if "=" in text else found[""]


def execute(chosen: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      0; 2 if it cannot be done.
    """
    from vnode.cluster import read, simulate
    from vnode.cluster.result_page import write
    from vnode.cluster.traces.draw_traces import draw

    try:
        kinds = chosen.devices if isinstance(chosen.devices, dict) else {}
        if chosen.throughputs and not kinds:
            raise ClusterError("Gavel's throughputs are by kind of device; give --devices v100=4,p100=8")
        trace = read(chosen.trace, chosen.run, throughputs=chosen.throughputs, kinds=list(kinds))
        there = chosen.devices or trace.devices
        if not there:
            raise ClusterError("the file does not say how many devices there are; give --devices N")
        found, results, seeds = {}, {}, {}
        for policy in chosen.policy or ["goodput"]:
            options = {"costs": trace.costs, "factor": chosen.guarantee, "inner": chosen.inner}
            options["round_seconds"] = chosen.rounds
            results[policy] = simulate(trace.jobs_for(policy), there, policy, **options)
            found[policy] = results[policy].figures()
            drawn = (draw(trace.jobs, seed) for seed in range(chosen.seeds))
            seeds[policy] = [simulate(jobs, there, policy, **options).figures()["jct_mean"] for jobs in drawn]
        if chosen.out:
            drawn = seeds if chosen.seeds else {}
            print(f"written: {write(Path(chosen.out), results, table(found), drawn)}", file=sys.stderr)
    except (ClusterError, ValueError, OSError) as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(found, indent=1))
        return 0
    print(table(found))
    print(LEGEND)
    for policy, means in seeds.items() if chosen.seeds else ():
        middle = sorted(means)[len(means) // 2]
        print(f"{policy}, {chosen.seeds} seeds: mean JCT {middle:.0f} s (median), {min(means):.0f} to {max(means):.0f}")
    return 0


def table(found: dict[str, dict[str, Any]]) -> str:
    """The figures as text, a line for each policy.

    Example:
      >>> print(table({"fifo": {name: 3 for name, _, _ in SHOWN}}))
      policy  makespan  mean JCT  median JCT  p99 JCT  queueing  allocated  effective  resizes
      fifo           3         3           3        3         3       3.00       3.00        3
    """
    lines = [["policy", *(title for _, title, _ in SHOWN)]]
    lines += [[name, *(form.format(figures[key]) for key, _, form in SHOWN)] for name, figures in found.items()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = [[text.rjust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *row[1:]]) for line, row in zip(lines, rows, strict=True))
