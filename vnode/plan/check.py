"""`check`: whether a virtualized step gives what the plain one gives, and the same bits on several devices.

Knows steps, and how to compare arrays. Must not know schedules, nor how anything is drawn.

What counts as equal is not a number somebody chose: the plain step is run again with its roundings changed
(`vnode.runtime.rounding`), and each element may differ by a small multiple of what it then moved by.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vnode.errors import PlacementError, layout_message
from vnode.placement.placement import Placement
from vnode.placement.sharded import is_sharded_batch, whole_batches
from vnode.placement.waiting import check_own
from vnode.plan.nodes.memory import planned, program_memory, refusal, reported
from vnode.runtime.rounding import rounded_otherwise
from vnode.show.page import Cell, Column, Drawn, Fact, Facts, Page, Table
from vnode.show.units import several, size
from vnode.step.call import OutputTree
from vnode.step.protocol import Resolved, step_and_arguments

SAMPLES = 4
"""Runs of the plain step with other roundings."""

MULTIPLE = 8.0
"""How many times as far as in those runs an element may be from the plain step's."""

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""How those runs are compiled for a CPU: they need not be fast, and compiling takes most of the time."""

SHOWN = 16
"""Leaves in the table, those that are furthest from the plain step's first."""

EQUAL, ROUNDING, DIFFERENT, UNKNOWN = "same bits", "rounding", "DIFFERENT", "not compared"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array that the step returns.

    Attributes:
      path: of it in what the step returns.
      kind: dtype and shape.
      verdict: beside the plain step's: ``"same bits"``, ``"rounding"`` (within the bound), ``"DIFFERENT"``, or ``"not
        compared"`` where there is no plain step to compare with, or its rounding is unknown.
      relative: the largest difference as a fraction of the leaf's largest value.
      ulps: the largest difference of an element in units in its own last place; large where terms cancel.
      rounding: the largest difference of an element as a multiple of what the plain step's own moves by when its
        roundings change. Up to `MULTIPLE` is rounding.
      wrong: elements that differ by more.
      size: elements.
      bits: for each place, whether the bits are those of the first.
      note: what else there is to say.
    """

    path: str
    kind: str
    verdict: str
    relative: float
    ulps: float
    rounding: float
    wrong: int
    size: int
    bits: tuple[bool, ...]
    note: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Check(Drawn):
    """What `check` found; print it.

    Attributes:
      name: of the step.
      leaves: what it returns, those that are furthest from the plain step's first.
      places: on which devices it ran, in words.
      promised: whether the step promises the same bits on all of them.
      repeatable: whether a second run on the first place gave the bits of the first.
      plain: why there is nothing to compare with; nothing if there is.
      exact: whether the step means to equal the plain one: couplings that are estimated do not.
    """

    name: str
    leaves: tuple[Leaf, ...]
    places: tuple[str, ...]
    promised: bool
    repeatable: bool
    plain: str = ""
    exact: bool = True

    @property
    def equal(self) -> bool:
        """Whether every element is the plain step's up to rounding. False where that could not be found out."""
        return all(leaf.verdict in (EQUAL, ROUNDING) for leaf in self.leaves)

    @property
    def same_bits(self) -> bool:
        """Whether every bit is the same on all of the devices."""
        return self.repeatable and all(all(leaf.bits) for leaf in self.leaves)

    @property
    def ok(self) -> bool:
        """Whether the step may be trusted: equal to the plain one, and with the same bits if it promises them."""
        return self.equal and (self.same_bits or not self.promised)

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        wrong = [leaf for leaf in self.leaves if leaf.verdict == DIFFERENT]
        if wrong:
            first = f"NOT equal to the plain step in {len(wrong)} of {several(len(self.leaves), 'array')}"
        elif self.equal:
            exact = all(leaf.verdict == EQUAL for leaf in self.leaves)
            first = "equal to the plain step, " + ("bit for bit" if exact else "up to rounding")
        else:
            first = "not compared with the plain step"
        where = listed(self.places)
        if not self.repeatable:
            return f"{first}; a second run on {self.places[0]} gave other bits"
        if len(self.places) == 1:
            return f"{first}; run on {where} only"
        return f"{first}; " + (f"the same bits on {where}" if self.same_bits else f"OTHER bits on {self.others}")

    @property
    def others(self) -> str:
        """The places whose bits are not those of the first."""
        differ = [p for i, p in enumerate(self.places) if not all(leaf.bits[i] for leaf in self.leaves)]
        return f"{listed(differ)} than on {self.places[0]}"

    def page(self) -> Page:
        """What there is to see."""
        facts = [
            Fact("plain step", self.plain or "as written, compiled whole, on one device"),
            Fact(
                "rounding", f"{SAMPLES} runs of it with changed roundings", f"allowed: {MULTIPLE:g} times their effect"
            ),
            Fact("ran on", listed(self.places), "and once more on the first"),
        ]
        if not self.promised:
            facts.append(Fact("", "reduction='fast' does not promise the same bits"))
        if not self.exact:
            facts.append(Fact("", "coupling='local' is not meant to equal the plain step"))
        columns = (
            Column("result", code=True, wide=True),
            Column("kind", code=True),
            Column("plain step"),
            Column("relative", right=True),
            Column("ulp", right=True),
            Column("bits"),
        )
        blocks: list[Any] = [Facts(tuple(facts))]
        rows = tuple(map(self._row, self.leaves[:SHOWN]))
        left = self.leaves[SHOWN:]
        rest = f"… and {several(len(left), 'array')} nearer to the plain step's" if left else ""
        note = "relative: largest difference over largest value; ulp: of each element"
        blocks.append(Table("What the step returns", columns, rows, note, rest))
        verdict = "ok" if self.ok else "NOT ok" if self.wrong else "not proven"
        return Page(f"{self.name}: {verdict}", self.summary, tuple(blocks))

    @property
    def wrong(self) -> bool:
        """Whether something is different that should not be."""
        return any(leaf.verdict == DIFFERENT for leaf in self.leaves) or (self.promised and not self.same_bits)

    def _row(self, leaf: Leaf) -> tuple[Cell, ...]:
        compared = leaf.verdict != UNKNOWN or leaf.ulps > 0
        verdict = leaf.verdict
        if leaf.verdict == ROUNDING:
            verdict = f"rounding x {leaf.rounding:.1f}"
        elif leaf.wrong:
            verdict += f" at {leaf.wrong:,} of {leaf.size:,}"
        differ = [p for p, same in zip(self.places, leaf.bits, strict=True) if not same]
        return (
            Cell(leaf.path),
            Cell(leaf.kind),
            Cell(verdict, leaf.note, strong=leaf.verdict == DIFFERENT, quiet=leaf.verdict == EQUAL),
            Cell(f"{leaf.relative:.0e}" if leaf.relative else "0" if compared else "-"),
            Cell(f"{leaf.ulps:,.0f}" if leaf.ulps < 1e6 else f"{leaf.ulps:.0e}") if compared else Cell("-"),
            Cell(f"DIFFERENT on {listed(differ)}" if differ else "same", strong=bool(differ), quiet=not differ),
        )


def check(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Any = None,
    plain: bool = True,
) -> Check:
    """Runs a step as it was written, and virtualized on several devices; says what is equal, and which bits.

    For before a week of compute is trusted to it. The step is run on copies of the arguments, with their real values:
    once as it was written, a few times so with other roundings, twice on the first of the devices and once on each of
    the others. Nothing that is given is changed or donated; prints and callbacks of the step happen in each of the
    runs.

    Args:
      step: what `virtualize` returned.
      args: a tuple of the step's arguments, arrays; a batch as large as one device can take without virtual nodes, so
        that there is something to compare with.
      kwargs: keyword arguments of the step.
      devices: numbers of devices, e.g. ``[1, 2, 3]``, or what `VirtualStep.on` takes: placements, or lists of devices.
        By default one, two, three and all there are.
      plain: whether to run the step as written; without it only the bits on devices are compared.

    Returns:
      A `Check`; print it, or ask ``check(...).ok``. A plain step that does not fit in the device's memory is left out,
      which the answer says, and is then not `ok`.

    Raises:
      PlacementError: there are not so many devices.
      ProcessError: some of them are another process's.
      VnodeError: `step` is not a virtualized step.
      TypeError: `args` is no tuple or list.

    Example:
      >>> import jax.numpy as jnp, vnode
      >>> step = vnode.virtualize(lambda w, x: w - 0.1 * jnp.tanh(x @ w).mean(), virtual_nodes=4)
      >>> answer = vnode.check(step, (jnp.ones(3), jnp.linspace(0, 1, 24).reshape(8, 3)), devices=[1])
      >>> answer.ok, answer.leaves[0].kind
      (True, 'float32[3]')
    """
    if not isinstance(args, tuple | list):
        raise TypeError(f"args must be a tuple of the step's arguments, not {type(args).__name__}")
    remedy = "vnode.check(vnode.virtualize(step, virtual_nodes=32), (state, batch))"
    step, args = step_and_arguments(step, args, "check", remedy)
    with step.resolved(args, kwargs or {}) as here:
        virtual = here.step
        places = places_of(virtual, devices)
        check_own(
            "vnode.check",
            {device for place in places for device in virtual.on(place).placement.devices},
            [
                "check in one process, without jax.distributed.initialize: the bits are the same in several",
                "or on this process's devices: vnode.check(step, args, devices=[jax.local_devices()])",
            ],
        )
        reference = Reference(here, virtual.on(places[0]).placement.devices[0]) if plain else None

        def run(place: Any) -> list[tuple[str, Any]]:
            return results(virtual.on(place)(*copied(here.args), **copied(here.kwargs)))

        first = run(places[0])
        again = run(places[0])
        repeatable = all(same(a, b) for (_, a), (_, b) in zip(first, again, strict=True))
        bits = [[True] for _ in first]
        for place in places[1:]:
            for held, (_, a), (_, b) in zip(bits, first, run(place), strict=True):
                held.append(same(a, b))
    wants = reference.results(len(first)) if reference else [(None, None)] * len(first)
    known = reference is not None and reference.noisy
    found = [
        compared(path, got, want, spread, tuple(held), known)
        for (path, got), (want, spread), held in zip(first, wants, bits, strict=True)
    ]
    order = (DIFFERENT, UNKNOWN, ROUNDING, EQUAL)
    found.sort(key=lambda leaf: (all(leaf.bits), order.index(leaf.verdict), -leaf.rounding))
    return Check(
        virtual.spec.name,
        tuple(found),
        tuple(words_of(virtual.on(place).placement) for place in places),
        virtual.options.reduction == "invariant",
        repeatable,
        "not asked for" if reference is None else reference.absent,
        virtual.options.coupling in ("exact", "error"),
    )


class Reference:
    """The step as it was written, on one device, and how much of its results is rounding.

    Args:
      here: the step and its arguments.
      device: the device.

    Attributes:
      absent: why there are no results; nothing if there are.
      noisy: whether it is known how much of them is rounding.
    """

    def __init__(self, here: Resolved, device: Any) -> None:
        spec = here.step.spec
        call = spec.call(here.args, here.kwargs)
        fun, leaves = call.flat(spec.fun, OutputTree()), call.leaves
        self.absent, self.noisy = "", False
        self._wants: list[Any] = []
        self._spreads: list[Any] = []
        leaves = [leaf.whole() if is_sharded_batch(leaf) else leaf for leaf in leaves]
        with jax.default_device(device):
            try:
                placed = [jax.device_put(leaf, device) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
                compiled = fitting(jax.jit(fun), device, *placed)
                self._wants = list(map(host, compiled(*placed)))
            except TooLarge as error:
                self.absent = f"{error}; a smaller batch would fit, with as many nodes"
                return
            try:
                other = jax.jit(rounded_otherwise(fun), compiler_options=QUICKLY if device.platform == "cpu" else None)
                compiled = fitting(other, device, np.uint32(0), *placed)
                for seed in range(1, SAMPLES + 1):
                    others = map(host, compiled(np.uint32(seed), *placed))
                    moved = [distance(other, want) for other, want in zip(others, self._wants, strict=True)]
                    self._spreads = list(map(np.fmax, self._spreads, moved)) if self._spreads else moved
                self.noisy = True
            except TooLarge:
                pass

    def results(self, count: int) -> list[tuple[Any, Any]]:
        """What it returned, and how far each element moves with other roundings; None for what is not known."""
        wants = [None] * count if self.absent else self._wants
        return list(zip(wants, self._spreads if self.noisy else [None] * count, strict=True))


class TooLarge(Exception):
    """A program does not fit in a device's memory."""


def fitting(program: Any, device: Any, *args: Any) -> Any:
    """A function compiled for a device, that raises `TooLarge` where it does not fit."""
    room = reported(device) or planned(device) or free_memory()
    compiled = None

    def guarded(attempt: Any, *values: Any) -> Any:
        try:
            return jax.block_until_ready(attempt(*values))
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or refusal(error)[0]:
                raise TooLarge("does not fit in the device's memory") from None
            raise

    compiled = guarded(lambda: program.lower(*args).compile())
    needed = program_memory(compiled)
    if room and needed > room:
        raise TooLarge(f"takes {size(needed)}, there are {size(room)}")
    return lambda *values: guarded(compiled, *values)


def free_memory() -> int:
    """Bytes of the host's memory that are free, where the system says so (Linux); else 0."""
    try:
        entries = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(entries["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def copied(tree: Any) -> Any:
    """A tree with arrays of its own, which may be donated, on the same devices."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return (
                jax.device_put(leaf, leaf.sharding, may_alias=False) if leaf.committed else jnp.array(leaf, copy=True)
            )
        return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(copy, tree)


def results(tree: Any) -> list[tuple[str, Any]]:
    """Path and value of every array of what a step returned."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/") or "the result", host(leaf))
        for path, leaf in jax.tree.leaves_with_path(whole_batches(tree))
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
    ]


def host(leaf: Any) -> np.ndarray:
    """An array on the host; of random keys their data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have the same type, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How far elements are apart, float64: 0 where both are the same infinity or NaN, infinity where one is."""
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    with np.errstate(all="ignore"):
        x, y = a.astype(wide), b.astype(wide)
        apart = np.abs(x - y)
        alike = (a == b) | (np.isnan(x) & np.isnan(y))
        return np.where(alike, 0.0, np.where(np.isfinite(apart), apart, np.inf))


def compared(path: str, got: np.ndarray, want: Any, spread: Any, bits: tuple[bool, ...], known: bool) -> Leaf:
    """What there is to say of an array.

    Args:
      path: of it.
      got: the virtualized step's.
      want: the plain step's, or None.
      spread: how far its elements move with other roundings, or None.
      bits: on each place, whether they are the first's.
      known: whether `spread` is.
    """
    leaf = Leaf(path, f"{got.dtype}{list(got.shape)}".replace(" ", ""), UNKNOWN, 0.0, 0.0, 0.0, 0, got.size, bits)
    if want is None:
        return leaf
    if got.dtype != want.dtype or got.shape != want.shape:
        note = f"{want.dtype}{list(want.shape)} in the plain step"
        return dataclasses.replace(leaf, verdict=DIFFERENT, wrong=got.size, note=note)
    apart = distance(got, want)
    if same(got, want) or not apart.any():
        return dataclasses.replace(leaf, verdict=EQUAL if same(got, want) else ROUNDING)
    magnitude = np.abs(want.astype(np.complex128 if np.iscomplexobj(want) else np.float64))
    finite = np.isfinite(magnitude)
    relative = float(apart.max() / max(magnitude[finite].max(initial=0.0), np.finfo(np.float64).tiny))
    inexact = jnp.issubdtype(want.dtype, jnp.inexact)
    last = 1.0
    if inexact:
        info = jnp.finfo(want.dtype)
        last = np.ldexp(float(info.eps), np.frexp(np.fmax(np.where(finite, magnitude, 1.0), float(info.tiny)))[1] - 1)
    ulps = float((apart / last).max())
    if not known:
        return dataclasses.replace(leaf, relative=relative, ulps=ulps, note="its rounding is unknown: too large")
    allowed = bound(spread, last) if inexact else spread
    with np.errstate(all="ignore"):
        ratio = np.where(apart > 0, apart / allowed, 0.0)
    wrong = int((ratio > MULTIPLE).sum())
    verdict = DIFFERENT if wrong else ROUNDING
    return dataclasses.replace(
        leaf, verdict=verdict, relative=relative, ulps=ulps, rounding=float(ratio.max()), wrong=wrong
    )


def bound(spread: np.ndarray, last: Any) -> np.ndarray:
    """How far elements move with other roundings, given a few runs.

    An element may have moved little in all of them by chance. So it counts as moved by at least one unit in the last
    place, and by as much as the median of the array.
    """
    finite = spread[np.isfinite(spread)]
    typical = float(np.median(finite)) if finite.size else 0.0
    return np.fmax(np.where(np.isfinite(spread), spread, typical), np.fmax(typical, last))


def places_of(step: Any, devices: Any) -> list[Any]:
    """What the user means by devices, as `on` takes it.

    Raises:
      PlacementError: there are none, or not so many.
    """
    there = jax.devices()
    if devices is None:
        own = step.placement
        if len(own.groups) > 1 or own.mesh.size != own.size:  # devices of several kinds, or with other axes
            return [own]
        there = [device for device in there if device.platform == own.devices[0].platform]
        return [there[:n] for n in sorted({1, 2, 3, len(there)}) if n <= len(there)]
    if isinstance(devices, Placement | jax.sharding.Mesh | int | np.integer):
        devices = [devices]
    entries = list(devices)
    if entries and all(hasattr(entry, "platform") for entry in entries):
        entries = [entries]
    return [some(there, entry) if isinstance(entry, int | np.integer) else entry for entry in entries] or [
        some(there, 0)
    ]


def some(there: Sequence[Any], number: Any) -> list[Any]:
    """The first so many devices.

    Raises:
      PlacementError: there are not so many.
    """
    count = 0 if isinstance(number, bool) else operator.index(number)
    if not 1 <= count <= len(there):
        several_cpus = f"jax.config.update('jax_num_cpu_devices', {max(count, 2)})"
        raise PlacementError(
            layout_message(
                f"the step cannot be checked on {number!r} devices: there {'are' if len(there) > 1 else 'is'} "
                f"{len(there)}.",
                remedies=[
                    f"devices={list(range(1, min(len(there), 3) + 1))}",
                    f"CPUs count as several: {several_cpus}, before jax is used",
                ],
            )
        )
    return list(there[:count])


def words_of(placement: Placement) -> str:
    """A placement in a few words."""
    kinds = {device.platform for device in placement.devices}
    return several(len(placement.devices), f"{'/'.join(sorted(kinds))} device")


def listed(names: Sequence[str]) -> str:
    """Names in a row.

    >>> listed(["1 cpu device", "2 cpu devices", "3 cpu devices"])
    '1, 2 and 3 cpu devices'
    """
    parts = [name.partition(" ") for name in names]
    if len({rest.removesuffix("s") for _, _, rest in parts}) == 1:
        numbers = [number for number, _, _ in parts]
        joined = ", ".join(numbers[:-1]) + (" and " if len(numbers) > 1 else "") + numbers[-1]
        return f"{joined} {parts[-1][2]}"
    return ", ".join(names)
