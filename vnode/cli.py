"""The command line: `vnode doctor` says what there is, and whether the same bits come out of it; others run workers.

Knows what the packages and devices say of themselves, and `vnode.check`. Must not know how steps work, nor import jax
before it is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import vnode
from vnode.cluster import command_simulate
from vnode.cluster.live import command_history, command_job, command_queue, command_serve, command_submit
from vnode.workers import command_run, command_runs, command_workers

TAKE_ARGUMENTS = {"run", "submit"}
"""Commands with more behind ``--``."""

REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9._-]+)\s*(\[[^]]*\])?\s*([^;]*?)\s*(?:;(.*))?$")
"""The parts of a requirement: a name, its extras, its versions, and a condition."""

EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: of the command; by default those of the process.

    Returns:
      The exit status: 0; 1 where the self-test or a command failed; of `vnode run` that of the script.
    """
    parser = argparse.ArgumentParser("vnode", description="Training steps on virtual nodes.")
    parser.add_argument("--version", action="version", version=f"vnode {vnode.__version__}")
    commands = parser.add_subparsers(dest="command")
    about = "versions, devices, extras, and a self-test of the same bits"
    doctor = commands.add_parser("doctor", help=about, description=f"Prints {about}. `vnode` alone does so, too.")
    doctor.add_argument(
        "--cpu-devices", type=count, metavar="N", help="let the CPU count as N devices, on the CPU only"
    )
    doctor.add_argument("--no-test", action="store_true", help="leave out the self-test")
    for command in (command_run, command_workers, command_runs, command_submit, command_queue, command_job):
        command.add_parser(commands)
    cluster = commands.add_parser("cluster", help="jobs that share devices: scheduler and simulator")
    inner = cluster.add_subparsers(dest="cluster_command", required=True)
    for command in (command_serve, command_simulate, command_history):
        command.add_parser(inner)
    given = list(arguments or sys.argv[1:] or ["doctor"])
    end = given.index("--") if "--" in given else len(given)
    chosen = parser.parse_args(given[:end])
    if chosen.command is None:
        parser.print_help()
        return 2
    if chosen.command == "doctor":
        return examine(chosen.cpu_devices, not chosen.no_test)
    if end < len(given) and chosen.command not in TAKE_ARGUMENTS:
        parser.error(f"vnode {chosen.command} takes no arguments after --")
    chosen.arguments = given[end + 1 :]  # of the script; the command of a job
    try:
        code = chosen.execute(chosen)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if chosen.command == "run":
            raise
        with contextlib.suppress(OSError):
            print(f"vnode: {error}", file=sys.stderr)
        return 1


def count(text: str) -> int:
    """A number of devices.

    Raises:
      ValueError: it is no positive integer.
    """
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def examine(cpu_devices: int | None, test: bool) -> int:
    """Prints what there is, and tests it.

    Args:
      cpu_devices: how many devices the CPU counts as; None for what jax finds.
      test: whether to run the self-test.

    Returns:
      0, or 1 where the test failed.
    """
    import jax

    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    from vnode.show.drawable import written_in
    from vnode.show.text import draw, encodable

    print(encodable(draw(page()), written_in()), flush=True)
    if not test:
        return 0
    print("\nSelf-test: a small training step, plain and on several devices ...", flush=True)
    start = time.monotonic()
    answer = self_test()
    print(encodable(f"\n{answer}\n", written_in()))
    print(f"{time.monotonic() - start:.1f} s")
    if len(answer.places) == 1:
        print("One device: whether bits agree cannot be seen. On a CPU: vnode doctor --cpu-devices 4")
    return 0 if answer.ok else 1


def page() -> Any:
    """Versions, devices and extras."""
    import jax

    from vnode.plan.nodes.device_memory import compiler_planned_bytes, reported_bytes
    from vnode.show.page import Cell, Column, Fact, Facts, Page, Table
    from vnode.show.units import several, size

    versions = [Fact(name, version(name)) for name in ("jax", "jaxlib", "numpy")]
    python = Fact("Python", platform.python_version(), platform.platform(terse=True))
    kinds: dict[tuple[str, str, str], int] = {}
    for device in jax.devices():
        memory = reported_bytes(device) or compiler_planned_bytes(device)
        kind = device.platform, device.device_kind, size(memory) if memory else "reports none"
        kinds[kind] = kinds.get(kind, 0) + 1
    processes = len({device.process_index for device in jax.devices()})
    devices = Table(
        "Devices",
        (Column("platform"), Column("kind"), Column("devices", right=True), Column("memory of each", right=True)),
        tuple((Cell(p), Cell(k), Cell(str(n)), Cell(m)) for (p, k, m), n in kinds.items()),
        f"{several(processes, 'process', 'processes')}, jax.default_backend() is {jax.default_backend()!r}",
    )
    columns = (Column("extra"), Column("library"), Column("wanted"), Column("there"))
    rows = []
    for extra, needed in extras().items():
        for i, (name, wanted) in enumerate(needed):
            found = version(name)
            there = (
                Cell(found, quiet=True) if found != MISSING else Cell(f"no: pip install 'vnode[{extra}]'", strong=True)
            )
            rows.append((Cell(extra if i == 0 else ""), Cell(name), Cell(wanted or "any", quiet=True), there))
    blocks: list[Any] = [Facts((*versions, python)), devices]
    if rows:
        blocks.append(
            Table("Extras", columns, tuple(rows), "libraries for parts of vnode; none is needed for the core")
        )
    return Page(f"vnode {vnode.__version__}", "", tuple(blocks))


MISSING = "not installed"
HIDDEN = {"test", "thorough", "notebook", "examples", "docs"}
"""Extras that are for developers or documents only."""


def version(package: str) -> str:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def extras() -> dict[str, list[tuple[str, str]]]:
    """For each extra the libraries that it brings, with the versions that it wants; from the package's metadata."""
    try:
        required = importlib.metadata.requires("vnode") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree
        return {}
    found: dict[str, list[tuple[str, str]]] = {}
    for line in required:
        match = REQUIREMENT.match(line)
        extra = EXTRA.search(match[4] or "") if match else None
        if match and extra and extra[1] not in HIDDEN and match[1] != "vnode":
            found.setdefault(extra[1], []).append((match[1], match[3].strip("() ")))
    return dict(sorted(found.items()))


def self_test() -> Any:
    """Checks a training step with what makes bits differ: products, uneven counts of examples, clipping, Adam."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ params["in"])
            losses = ((hidden @ params["out"])[:, 0] - batch["y"]) ** 2
            return (losses * batch["weight"]).sum() / batch["weight"].sum()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, state["square"], grads)
        params = jax.tree.map(lambda p, g, s: p - 0.01 * g / (jnp.sqrt(s) + 1e-8), state["params"], grads, square)
        return {"params": params, "square": square}, {"loss": loss, "norm": norm}

    draw = np.random.default_rng(0).standard_normal  # on the host: every operation of jax would be compiled
    params = {"in": draw((24, 64), np.float32), "out": draw((64, 1), np.float32)}
    batch = {"x": draw((90, 24), np.float32), "y": draw(90, np.float32), "weight": np.float32(np.arange(90) % 7 > 1)}
    step = vnode.virtualize(train_step, virtual_nodes=8)
    count = len(step.placement.devices)
    devices = sorted({1, min(3, count), min(count, 8)})  # 3 devices do not hold equally many
    return vnode.check(
        step, ({"params": params, "square": jax.tree.map(np.zeros_like, params)}, batch), devices=devices
    )
