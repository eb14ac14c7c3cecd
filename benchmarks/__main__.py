"""The command `python -m benchmarks`: runs the measurements and prints the tables.

This file knows the command line and the order of the tasks; the measuring is done by workers, the tables by `report`.
"""

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report, tpu, worker

SECTIONS = ("steps", "growth", "tracing", "dispatch", "resizing", "tpu")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _tasks(section: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"kind": section, "contenders": options.contenders, **task} for task in _choices(section, options)]


def _choices(section: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    quick = options.quick
    if section == "steps":
        return [
            {"devices": d, "nodes": options.nodes, "quick": quick, "budget": options.budget} for d in options.devices
        ]
    if section == "growth":
        nodes = [1, 2, 64] if quick else [1, 2, 4, 8, 16, 32, 64]
        return [{"devices": 1, "nodes": nodes, "quick": quick}]
    if section == "tracing":
        layers = [1, 2, 4] if quick else [3, 6, 12, 24, 48, 96]
        return [{"devices": 1, "layers": layers, "repeats": 3 if quick else 5}]
    if section == "resizing":
        return [{"devices": 8, "nodes": 8, "route": [8, 3, 5], "rounds": 2 if quick else 5, "quick": quick}]
    return [
        {"devices": d, "leaves": [4, 100], "calls": 250 if quick else 4000}
        for d in options.devices
        if d in (options.devices[0], options.devices[-1])
    ]


def _tpu_rows(options: argparse.Namespace):
    command = [sys.executable, "-m", "benchmarks.tpu", *tpu.TOPOLOGIES]
    if options.contenders:
        command += ["--contenders", options.contenders]
    if options.quick:
        command += ["--layers", "2", "--width", "128", "--length", "128"]
    yield from worker.lines(command, {**os.environ, **tpu.ENVIRONMENT})


def main() -> None:
    """Parses the command line, runs what is asked for, shows it and writes it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="vnode against its peers.")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated: %(default)s")
    parser.add_argument("--devices", type=_numbers, default="1,4,8", help="numbers of CPU devices")
    parser.add_argument("--nodes", type=_numbers, default="1,8,64", help="numbers of virtual nodes")
    parser.add_argument("--contenders", help="comma-separated; all of them if left out")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of timing per model, devices and V")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that everything runs")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--json", type=Path, help="also write the raw rows to this file")
    options = parser.parse_args()
    sections = options.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")

    console = Console(width=None if sys.stdout.isatty() else 170)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"jax {version('jax')}, optax {version('optax')}"
    )
    console.print(machine)
    found: dict[str, list[report.Row]] = {}
    pages = [machine, ""]
    for section in sections:
        if section == "tpu" and not tpu.installed():
            console.print("No TPU figures: the TPU compiler is not installed (extra tpu-aot).")
            continue
        rows = found.setdefault(section, [])
        sources = [_tpu_rows(options)] if section == "tpu" else map(worker.run, _tasks(section, options))
        with console.status(f"{section} ...") as status:
            for source in sources:
                for row in source:
                    rows.append(row)
                    where = " ".join(str(row[k]) for k in ("topology", "model", "contender") if k in row)
                    status.update(f"{section}: {len(rows)} rows, last {where}")
        sheet = getattr(report, section)(rows)
        sheet.draw(console)
        pages.append(sheet.markdown())
        # Written after each section, so that an interrupted run leaves what it has.
        if options.markdown:
            options.markdown.write_text("\n".join(pages))
        if options.json:
            options.json.write_text(json.dumps({"machine": machine, **found}, indent=1))


if __name__ == "__main__":
    main()
