"""The search for a plan: meshes, and on each the best way to divide a node's computation.

Knows candidates, budgets and memory limits. Must not know how one candidate is found, or shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from vnode.errors import MemoryLimitError, PartitionError, layout_message
from vnode.partition.cost.time import Times
from vnode.partition.machine import Machine
from vnode.partition.plan.candidates import Candidate, Interrupted, OnMesh, fitting
from vnode.partition.plan.meshes import meshes
from vnode.partition.plan.plan import Figures, Plan
from vnode.partition.plan.predict import NODES
from vnode.partition.plan.subject import Subject, on_nodes, subject_of
from vnode.plan.nodes.memory import byte_count
from vnode.show.progress import display
from vnode.show.units import several, size
from vnode.step.virtual import VirtualStep

GAP = 0.01
"""How far above the best a search on one mesh may end."""

TRIES = 3
"""How often a search is repeated with less memory where the prediction is above what was searched for."""


def search(
    step: Callable[..., Any],
    args: Sequence[Any],
    machine: Machine,
    *,
    virtual_nodes: int | str = "auto",
    memory: int | str | None = None,
    budget: float = 60.0,
    times: Times | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Plan:
    """Finds how a step runs fastest on a machine, within its memory.

    Every mesh of the machine's devices is tried whose first axis is that of the nodes: on each, an integer programme
    (`vnode.partition.searches.exact`) divides what a node computes, and the state, over the other axes. Data parallel,
    with the state on every device or sharded over all (FSDP, ZeRO), and Megatron's splits are candidates in any case.
    Ctrl-C ends the search with the best so far.

    Args:
      step: a train step as `vnode.virtualize` takes it, or a `VirtualStep`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      machine: what it shall run on.
      virtual_nodes: V; ``"auto"`` for the fewest nodes with which something fits. Of a `VirtualStep`, its own.
      memory: what one device may hold: bytes, or a string such as ``"12GiB"``; by default what its kind has.
      budget: seconds after which it ends.
      times: of kernels, from measurements or the TPU compiler (`vnode.partition.Times`); by default a roofline.
      progress: a bar; by default in notebooks and on terminals.
      **options: of `vnode.virtualize`, if the step is not virtualized yet.

    Returns:
      The plan.

    Raises:
      MemoryLimitError: nothing fits: by how much, and what would help.
      PartitionError: the machine or the options are not what they should be.
      VnodeError: the step cannot be virtualized.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.partition import Machine, search
      >>> def train_step(state, x):
      ...     loss = lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
      ...     return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))
      >>> state = {"up": jnp.ones((64, 512)), "down": jnp.ones((512, 64))}
      >>> plan = search(train_step, (state, jnp.ones((32, 64))), Machine.tpu("v5e:2x2"), virtual_nodes=8)
      >>> plan.figures.memory <= plan.memory, sorted(plan.specs)
      (True, ['down', 'up'])
    """
    if not isinstance(machine, Machine):
        raise PartitionError(f"a plan is searched for a vnode.partition.Machine, not {machine!r}")
    if not budget > 0:
        raise PartitionError(f"budget: expected seconds, not {budget!r}")
    if not isinstance(args, tuple | list):
        raise PartitionError(f"args are the arguments of the step, in a tuple, not {type(args).__name__}")
    limit = min(kind.memory for kind in machine.kinds) if memory is None else byte_count(memory)
    run = _Search(step, args, machine, limit, time.monotonic() + budget, budget, times, options)
    with display(progress, 0, 1000) as shown:
        run.shown = shown
        return run.plan(virtual_nodes)


class _Search:
    """One search."""

    def __init__(
        self,
        step: Any,
        args: Sequence[Any],
        machine: Machine,
        limit: int,
        until: float,
        budget: float,
        times: Times | None,
        options: dict[str, Any],
    ) -> None:
        self.given, self.args, self.machine, self.limit = step, args, machine, limit
        self.until, self.budget, self.times, self.options = until, budget, times, options
        self.platform = platform_of(machine)
        self.shown: Any = None
        self.smallest: Candidate | None = None

    def plan(self, virtual_nodes: int | str) -> Plan:
        own = isinstance(self.given, VirtualStep)
        if own and self.options:
            raise PartitionError(f"the step is virtualized already: options {', '.join(self.options)} come too late")
        if own or virtual_nodes != "auto":
            step = self.given if own else on_nodes(self.given, virtual_nodes, self.options)
            subject = subject_of(step, self.args)
            found = self.candidates(subject)
            chosen = fitting(found, self.limit)
            if not chosen:
                raise self.nothing_fits(subject)
            return self.made(subject, chosen[0], found)
        nodes, most = len(self.machine.devices), None
        while True:  # fewer nodes are fewer turns, each of more examples
            subject = subject_of(on_nodes(self.given, nodes, self.options), self.args)
            most = subject.examples
            found = self.candidates(subject)
            chosen = fitting(found, self.limit)
            if chosen:
                return self.made(subject, chosen[0], found)
            if 2 * nodes > most or time.monotonic() > self.until:
                raise self.nothing_fits(subject)
            nodes *= 2

    def candidates(self, subject: Subject) -> list[Candidate]:
        """All that were found in time."""
        found: list[Candidate] = []
        took = 0.0
        try:
            for sizes in meshes(len(self.machine.devices), subject.virtual_nodes, NODES):
                began = time.monotonic()
                inner = len(sizes) - 1
                if found and (self.until - began < took or self.until <= began):
                    break
                self.say(sizes, found)
                on = OnMesh(subject, self.machine, sizes, self.platform, self.times)
                if inner == 0:
                    found.append(on.candidate("data parallel", on.whole))
                    if on.rows > 1:
                        found.append(on.candidate("FSDP", on.whole, over_rows=True))
                else:
                    found += self.searched(on)
                took = time.monotonic() - began if inner else 0.0
        except Interrupted as stopped:
            found += stopped.found
        except KeyboardInterrupt:
            if not found:
                raise
        least = min(found, key=lambda c: c.prediction.memory)
        if self.smallest is None or least.prediction.memory < self.smallest.prediction.memory:
            self.smallest = least
        return found

    def searched(self, on: OnMesh) -> list[Candidate]:
        """The best on one mesh, searched again with less memory where its prediction is above the limit."""
        found: list[Candidate] = []
        allowed = float(self.limit)
        for _ in range(TRIES):
            left = max(self.until - time.monotonic(), 1.0)
            try:
                several = on.searched(allowed, left, GAP, False)
            except MemoryLimitError:
                break
            found = [*found, *(c for c in several if c.name != "Megatron-style" or not found)]
            over = several[-1].prediction.memory - self.limit
            if over <= 0 or allowed <= over:
                break
            allowed -= 1.05 * over
        return found

    def say(self, sizes: Any, found: Sequence[Candidate]) -> None:
        """Shows how far the search is."""
        done = 1 - max(self.until - time.monotonic(), 0.0) / self.budget
        best = fitting(found, self.limit)
        mesh = " x ".join(f"{name} {n}" for name, n in sizes.items())
        self.shown.update(round(1000 * done), f"{mesh}; best {best[0].prediction.seconds:.3g} s" if best else mesh)

    def made(self, subject: Subject, chosen: Candidate, found: Sequence[Candidate]) -> Plan:
        """The plan."""
        beside: dict[str, Figures] = {}
        for name in ("data parallel", "FSDP", "Megatron-style"):
            alike = sorted((c for c in found if c.name == name), key=lambda c: c.prediction.seconds)
            fits = fitting(alike, self.limit) or alike
            if fits and fits[0] is not chosen:
                beside[name] = Figures.of(fits[0].prediction)
        return Plan(
            subject.step,
            subject.fingerprint,
            self.machine,
            self.limit,
            subject.virtual_nodes,
            chosen.name,
            chosen.mesh,
            chosen.specs,
            chosen.records,
            Figures.of(chosen.prediction),
            beside,
            chosen.gap,
            chosen.divisions,
            chosen.prediction.timeline,
        )

    def nothing_fits(self, subject: Subject) -> MemoryLimitError:
        """The error for when nothing fits."""
        least = self.smallest
        assert least is not None
        over = least.prediction.memory - self.limit
        kept = least.prediction
        help_: list[str] = []
        if subject.virtual_nodes < subject.examples:
            help_.append(f"more virtual nodes: there are {subject.virtual_nodes} for {subject.examples:,} examples")
        if kept.pending > 0:
            help_.append(f'sums in any order, reduction="fast": {size(kept.pending)} less')
        if kept.state > 0:
            times = -(-kept.memory // self.limit)
            help_.append(f"about {times * len(self.machine.devices)} devices")
        return MemoryLimitError(
            layout_message(
                f"no plan fits in {size(self.limit)} a device.",
                facts=[
                    f"the smallest found takes {size(kept.memory)}, {size(over)} too much: {least.name} on "
                    + " x ".join(f"{name} {n}" for name, n in least.mesh.items()),
                    f"of that {size(kept.state)} are state, {size(kept.pending)} sums that wait for others",
                    f"machine: {self.machine.name}, {several(len(self.machine.devices), 'device')}",
                ],
                remedies=help_ or ["devices with more memory"],
            )
        )


def platform_of(machine: Machine) -> str:
    """What is compiled for, by the kinds of a machine.

    >>> platform_of(Machine.tpu("v5e:2x2")), platform_of(Machine.gpus("P100", hosts=1, per_host=2))
    ('tpu', 'gpu')
    """
    names = {kind.name for kind in machine.kinds}
    if all(name.startswith("TPU") for name in names):
        return "tpu"
    return "cpu" if any("cpu" in name.lower() for name in names) else "gpu"
