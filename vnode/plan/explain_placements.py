"""`explain`: what a step becomes, and what would change on other devices.

Knows steps, reports and layouts. Must not know schedules, nor how anything is drawn.

A step is analysed for its nodes, which do not know devices; so one analysis answers for any number of devices, whether
they are there or not.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from vnode.errors import PlacementError
from vnode.placement.node_layout import Layout
from vnode.placement.placement import Placement
from vnode.report.step_report import Report
from vnode.show.drawable import Drawn
from vnode.show.grid import Grid
from vnode.show.page import Cell, Column, Fact, Facts, Page, Picture, Table
from vnode.show.units import number, several, size, spread
from vnode.step.explain import even_layout, reports, temporary_bytes
from vnode.step.protocol import step_and_arguments
from vnode.step.resolved import Resolved
from vnode.tracebacks import api_boundary

MOST_DEVICES = 1 << 16
"""Beyond which a number of devices is taken for a mistake."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that may change with the devices.

    Attributes:
      name: of it.
      values: now, and on each of the others.
      note: what exactly it is.
    """

    name: str
    values: tuple[str, ...]
    note: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Drawn):
    """The changes of a step on other devices; print it.

    A notebook draws it by itself, `show` draws it in a terminal (with rich).

    Attributes:
      now: the step where it is.
      others: the same step elsewhere, in the order in which they were asked for.
    """

    now: Report
    others: tuple[Report, ...]

    @property
    def reports(self) -> tuple[Report, ...]:
        """Now, then the others; those that are alike once."""
        found = [self.now]
        for other in self.others:
            if all((one.counts, one.devices) != (other.counts, other.devices) for one in found):
                found.append(other)
        return tuple(found)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The figures that depend on the devices."""

        def row(name: str, say: Callable[[Report], str], note: str = "") -> Row:
            return Row(name, tuple(map(say, self.reports)), note)

        rows = [
            row("waves", lambda r: str(r.waves), "nodes that the fullest device computes one after another"),
            row(
                "step time", lambda r: f"{r.waves / self.now.waves:.2f}x", "by waves alone: no communication, no update"
            ),
            row("nodes per device", lambda r: spread(r.counts)),
            row("idle slots", idle_text, "turns in which a device waits for the fullest"),
            row("inputs per device", inputs_text, "the fullest device's share of the batched arguments"),
            row("accumulators per device", lambda r: size(r.accumulated), "in the pass that has most"),
            row("buffers per device", lambda r: size(r.buffered), "for adding in the order of the tree"),
        ]
        if self.now.kept:
            rows.append(row("kept per device", lambda r: size(r.of_device(r.kept)), "values kept of every node"))
        rows.append(row("sent per device", lambda r: size(r.sent), "in the reductions of one step"))
        if any(r.temporary is not None for r in self.reports):
            rows.append(
                row("temporary memory", lambda r: "-" if r.temporary is None else size(r.temporary), "as compiled")
            )
        return tuple(rows)

    @property
    def unchanged(self) -> tuple[Fact, ...]:
        """The facts that do not depend on the devices."""
        now = self.now
        bits = Fact("the result", "every bit of it, on devices of one kind", "reduction='invariant'")
        if not now.reduction.startswith("invariant"):
            bits = Fact("the result", "up to rounding", "reduction='invariant' would keep every bit")
        elif now.exceptions:
            bits = Fact("the result", f"every bit of it, but {'; '.join(now.exceptions)}")
        nodes = f"{several(now.virtual_nodes, 'node')} of {several(now.node_size, 'example')}"
        passes = f"{now.passes_in_words}, {number(now.flops)}flop in all, {now.repeated}"
        return (
            bits,
            Fact("the nodes", nodes, "what each computes, and the random numbers it draws"),
            Fact("the passes", passes),
            Fact("the state", "as it is: no part of it knows devices", "step.on(devices) moves it at the next call"),
        )

    @property
    def heads(self) -> tuple[str, ...]:
        """The columns' headings: the present devices, and all others."""
        return (f"now: {devices_text(self.now)}", *map(devices_text, self.reports[1:]))

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"{self.now.name}: what would change"

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        instead = f"instead of {self.now.devices:,}{self.now.in_rows}"
        others = self.reports[1:]
        if not others:
            return f"nothing: it is on {devices_text(self.now)} already"
        if len(others) > 1:
            numbers = [f"{r.devices:,}{r.in_rows}" for r in others]
            return f"on {', '.join(numbers[:-1])} or {numbers[-1]} {instead}"
        other = self.reports[-1]
        return (
            f"on {devices_text(other)} {instead}: {several(other.waves, 'wave')} instead of "
            f"{self.now.waves}, {other.waves / self.now.waves:.2f} of the step time by waves alone"
        )

    def page(self) -> Page:
        """The page that is drawn."""
        one = len(self.reports) == 2
        columns = (Column(""), *(Column(head, right=True) for head in self.heads), *([Column("", wide=True)] * one))
        rows = tuple(
            (
                Cell(row.name, row.note),
                *(Cell(value, strong=i > 0 and value != row.values[0]) for i, value in enumerate(row.values)),
                *([Cell(row.note, quiet=True)] * one),
            )
            for row in self.rows
        )
        pictures = [
            Picture(head, Grid.from_counts(r.counts, r.placement.names, r.batch, r.node_size, r.holder))
            for head, r in zip(self.heads, self.reports, strict=True)
        ]
        return Page(
            self.title,
            self.summary,
            (
                Table("", columns, rows, rest="" if one else "step time: by waves alone; bytes: of the fullest device"),
                Facts(self.unchanged, "What would not change"),
                *(pictures if one else ()),
            ),
        )


def devices_text(report: Report) -> str:
    return several(report.devices, "device") + report.in_rows


def idle_text(report: Report) -> str:
    slots = report.waves * len(report.counts)
    return f"{report.idle:,}" + (f" ({report.idle / slots:.0%})" if report.idle else "")


def inputs_text(report: Report) -> str:
    return size(report.of_device(report.inputs))


@api_boundary
def explain(
    step: Any, args: Any = (), *others: Any, devices: Any = None, compile: bool = False, **kwargs: Any
) -> Report | Comparison:
    """Says what becomes of a step, or what would change on other devices.

    Args:
      step: a virtualized step.
      args: a tuple of its arguments, arrays or `jax.ShapeDtypeStruct`s; by default of the shapes of the last ones for
        which the step was compiled.
      *others: arguments one by one, of which `args` is the first, as `step.explain` takes them.
      devices: where the step might run: a number of devices, a sequence of such numbers (an answer for each), devices,
        a mesh, or a `Placement`. More devices than there are may be asked for. Without it, the step where it is.
      compile: also compile the step and say how much temporary memory a device needs, where there are such devices.
      **kwargs: keyword arguments of the step; one called `devices` or `compile` can be passed to `step.explain` only.

    Returns:
      The `Report` of `step.explain`, or a `Comparison`. Print either; a notebook draws them, and so does
      their `show` in a terminal.

    Raises:
      VnodeError: `step` is not a virtualized step.
      PlacementError: `devices` are none.

    Example:
      >>> import jax, jax.numpy as jnp, vnode
      >>> @vnode.virtualize(virtual_nodes=64)
      ... def step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      >>> here = step.on(jax.devices()[:1])
      >>> answer = vnode.explain(here, (jnp.ones(3), jnp.ones((128, 3))), devices=[24, 64])
      >>> [report.waves for report in answer.reports]
      [64, 3, 1]
    """
    remedy = "vnode.explain(vnode.virtualize(step, virtual_nodes=32), (state, batch))"
    given = tuple(args) if not others and isinstance(args, tuple | list) else (args, *others)
    step, given = step_and_arguments(step, given, "explain", remedy)
    with step.resolved(given, kwargs) as here:
        places = [here.step.placement, *([] if devices is None else requested_placements(here, devices))]
        found = reports(here, places)
        if compile:
            found = [
                dataclasses.replace(report, temporary=temporary_bytes(here, place))
                for report, place in zip(found, places, strict=True)
            ]
    return found[0] if devices is None else Comparison(found[0], tuple(found[1:]))


def requested_placements(here: Resolved, devices: Any) -> list[Placement | Layout]:
    """The placements and layouts that the user requests.

    Raises:
      PlacementError: `devices` is neither a number of devices, nor devices, a mesh or a placement.
    """
    if isinstance(devices, Placement | jax.sharding.Mesh):
        return [here.step.on(devices).placement]
    if isinstance(devices, int | np.integer):
        return [hypothetical_layout(here, devices)]
    if isinstance(devices, Sequence | np.ndarray | range) and not isinstance(devices, str | bytes) and len(devices):
        if all(isinstance(one, Placement | int | np.integer) for one in devices):
            return [place for one in devices for place in requested_placements(here, one)]
        return [here.step.on(devices).placement]
    raise PlacementError(
        f"devices must say on how many devices, or on which: not {devices!r:.80}.",
        remedies=["devices=8", "devices=[1, 8, 64]", "devices=jax.devices()[:2]", "devices=vnode.Placement(...)"],
    )


def hypothetical_layout(here: Resolved, devices: Any) -> Layout:
    """The layout on a number of devices.

    Raises:
      PlacementError: it is no such number.
    """
    number = 0 if isinstance(devices, bool) else operator.index(devices)
    if not 1 <= number <= MOST_DEVICES:
        raise PlacementError(
            f"a step cannot run on {devices!r} devices.",
            remedies=[f"a number of devices from 1 to {MOST_DEVICES:,}: devices=8"],
        )
    return even_layout(here, number)
