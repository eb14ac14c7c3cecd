"""Measured times of a step on kinds of devices -> the model that is fitted to them, and their file.

Knows numbers and JSON. Must not know steps, devices or jax.

The model is that of VirtualFlow (MLSys 2022, section 5): a step takes as long as the slowest device needs for its
nodes, and then the time of what follows the loop, for which everybody waits,

    seconds = max over devices (nodes * node) + max over kinds (fixed + peer * (devices - 1)) + between

`node` is the time of one node on a device of the kind; `fixed` that of everything else in a step (the reduction on the
device, the update, the start); `peer` what each further device adds to the exchange; `between` what an exchange takes
longer when the devices are of several kinds. The first three are fitted to the measurements of a kind alone by least
squares of relative errors, none of them negative. If the measurements do not determine them, the first of these gets
all: with one measurement, all time is the nodes'.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vnode import files
from vnode.errors import PlacementError, ProfileError, layout_message
from vnode.show.units import several

FORMAT = "vnode profiles"
VERSION = 1

MEASURE = "measure again: vnode.profile(step, args).save(path)"
LONGEST = 1e6
"""Seconds that a step may take; more is a mistake in a file."""
LARGEST = 1 << 50
"""Bytes, or devices, or nodes, that there may be."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One measured step on devices of one kind.

    Attributes:
      devices: how many.
      nodes: on each of them.
      seconds: of a step.
      bytes: of memory that the compiled program needs on a device; None where nobody knows.
    """

    devices: int
    nodes: int
    seconds: float
    bytes: int | None = None

    def __post_init__(self) -> None:
        if not (is_count(self.devices) and is_count(self.nodes) and is_time(self.seconds) and self.seconds):
            raise ProfileError(f"a measurement needs devices, nodes and a positive time below 1e6 s, not {self}")
        if not (self.bytes is None or is_count(self.bytes, least=0)):
            raise ProfileError(f"a measurement has a number of bytes, or None, not {self}")


@dataclasses.dataclass(frozen=True, repr=False)
class Profile:
    """The times of one kind of device.

    Attributes:
      kind: its name.
      devices: how many there are.
      measurements: at least one.
      memory: bytes of a device; None where it has no limit that it tells of.

    Example:
      >>> from vnode import Measurement, Profile
      >>> measured = Measurement(1, 2, 0.5), Measurement(1, 4, 0.9), Measurement(2, 4, 1.0)
      >>> profile = Profile("V100", 2, measured)
      >>> round(profile.node, 6), round(profile.fixed, 6), round(profile.peer, 6)
      (0.2, 0.1, 0.1)
    """

    kind: str
    devices: int
    measurements: tuple[Measurement, ...]
    memory: int | None = None

    def __post_init__(self) -> None:
        if not self.measurements or not is_count(self.devices):
            raise ProfileError(f"the profile of {self.kind!r} needs a device and a measurement, not {self.devices!r}")
        if not (self.memory is None or is_count(self.memory)):
            raise ProfileError(f"memory of {self.kind!r} must be a positive number of bytes, not {self.memory!r}")

    def __repr__(self) -> str:
        return f"Profile({self})"

    def __str__(self) -> str:
        return (
            f"{self.devices} x {self.kind}, {self.node:.3g} s a node, {several(len(self.measurements), 'measurement')}"
        )

    @functools.cached_property
    def _fitted(self) -> tuple[float, float, float]:
        seconds = np.array([m.seconds for m in self.measurements])
        columns = np.array([(m.nodes, 1, m.devices - 1) for m in self.measurements]) / seconds[:, None]
        return nonnegative_fit(columns)

    @property
    def node(self) -> float:
        """Seconds that one more node on a device takes."""
        return self._fitted[0]

    @property
    def fixed(self) -> float:
        """Seconds of a step on one device besides its nodes."""
        return self._fitted[1]

    @property
    def peer(self) -> float:
        """Seconds that each further device adds."""
        return self._fitted[2]

    def rest(self, devices: int) -> float:
        """Seconds of a step on so many devices besides the nodes."""
        return self.fixed + self.peer * (devices - 1)

    @property
    def error(self) -> float:
        """The largest relative deviation of the model from the measurements that it was fitted to."""
        return max(abs(m.nodes * self.node + self.rest(m.devices) - m.seconds) / m.seconds for m in self.measurements)

    def bytes(self, nodes: int) -> int | None:
        """Memory that so many nodes need on a device, never less than what the compiler said for fewer.

        Between measured numbers of nodes it is that of the next larger one; beyond them it grows as steeply as it did
        anywhere between them, and is proportional to the nodes if only one number was measured.
        """
        measured = sorted((m.nodes, m.bytes) for m in self.measurements if m.bytes is not None)
        if not measured:
            return None
        known: dict[int, int] = {}
        for size, need in measured:
            known[size] = max(need, *known.values(), 0)
        for size, need in known.items():
            if size >= nodes:
                return need
        slopes = [(known[b] - known[a]) / (b - a) for a, b in itertools.pairwise(known)]
        last, need = list(known.items())[-1]
        return math.ceil(need + (max(slopes) if slopes else need / last) * (nodes - last))


@dataclasses.dataclass(frozen=True)
class Signature:
    """The program whose times were measured.

    Attributes:
      step: its name, for people.
      nodes: for how many nodes the program below was looked at.
      node_size: examples per node.
      program: a hash of its operations and their shapes; values do not count.
      jax: the version that compiled it.
    """

    step: str
    nodes: int
    node_size: int
    program: str
    jax: str


@dataclasses.dataclass(frozen=True, repr=False)
class Profiles:
    """The times of a step on all kinds of devices; made by `vnode.profile`, or by hand from published ones.

    Attributes:
      kinds: a profile of each.
      between: seconds that a step takes longer when its devices are of several kinds.
      lane: nodes that must stay on one device, in groups (see ``lanes`` of `vnode.virtualize`).
      signature: of the measured program; None of times that come from elsewhere.

    Example:
      >>> from vnode import Measurement, Profile, Profiles
      >>> profiles = Profiles((Profile("V100", 2, (Measurement(2, 8, 8192 / 1969),)),))
      >>> round(8192 / profiles.seconds({"V100": (8, 8)}))
      1969
    """

    kinds: tuple[Profile, ...]
    between: float = 0.0
    lane: int = 1
    signature: Signature | None = None

    def __post_init__(self) -> None:
        names = [profile.kind for profile in self.kinds]
        if not names or len(set(names)) != len(names):
            raise ProfileError(f"profiles are of one or several different kinds of devices, not of {names}")
        if not is_time(self.between):
            raise ProfileError(f"between must be a time from 0 to 1e6 s, not {self.between!r}")
        if not is_count(self.lane):
            raise ProfileError(f"lane must be a whole number of nodes, at least 1, not {self.lane!r}")

    def __repr__(self) -> str:
        return f"Profiles({'; '.join(map(str, self.kinds))})"

    def __getitem__(self, kind: str) -> Profile:
        for profile in self.kinds:
            if profile.kind == kind:
                return profile
        raise PlacementError(f"no device of kind {kind!r} was measured, only {', '.join(p.kind for p in self.kinds)}")

    def __or__(self, other: Profiles) -> Profiles:
        """Profiles of kinds that were measured apart, of one step.

        Raises:
          ProfileError: they are of different programs, or of the same kind.
        """
        if self.signature != other.signature or self.lane != other.lane:
            raise ProfileError(signature_difference(self.signature, other.signature))
        return dataclasses.replace(self, kinds=self.kinds + other.kinds, between=max(self.between, other.between))

    def seconds(self, counts: Mapping[str, Sequence[int]]) -> float:
        """The time of a step as the model has it.

        Args:
          counts: of each kind, the nodes on each of its devices. Devices without nodes take no part.

        Returns:
          Seconds.

        Raises:
          PlacementError: a kind was not measured, or no device has nodes.
        """
        used = {self[kind]: [n for n in nodes if n] for kind, nodes in counts.items() if any(nodes)}
        if not used:
            raise PlacementError("no device has nodes")
        devices = sum(map(len, used.values()))
        return max(max(nodes) * profile.node for profile, nodes in used.items()) + self.rest(list(used), devices)

    def rest(self, kinds: Sequence[Profile], devices: int) -> float:
        """Seconds of a step besides the nodes, on so many devices of these kinds in all."""
        return max(profile.rest(devices) for profile in kinds) + (self.between if len(kinds) > 1 else 0.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file.

        Raises:
          ProfileError: it cannot be written there.
        """
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        files.write_text(path, json.dumps(content, indent=1) + "\n", ProfileError)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profiles:
        """Reads a file that `save` wrote. ``vnode.profile(..., path=path)`` also compares it with the step.

        Raises:
          ProfileError: the file is not there, is something else, or from another version of the format.
        """
        said = files.read_text(path, ProfileError, [MEASURE])
        try:
            content = json.loads(said)
            if content.get("format") != FORMAT or content.get("version") != VERSION:
                raise ValueError(f"format {content.get('format')!r}, version {content.get('version')!r}")
            kinds = tuple(
                Profile(**{**kind, "measurements": tuple(Measurement(**m) for m in kind["measurements"])})
                for kind in content["kinds"]
            )
            signature = None if content["signature"] is None else Signature(**content["signature"])
            return Profiles(kinds, content["between"], content["lane"], signature)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProfileError(
                f"{path} holds no profiles that this version of vnode reads.",
                facts=[f"expected format {FORMAT!r}, version {VERSION}", f"{type(error).__name__}: {error}"],
                remedies=[MEASURE],
            ) from None


def is_count(number: Any, least: int = 1) -> bool:
    """Whether this is a whole number that is neither too small nor absurdly large."""
    whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    return whole and bool(least <= number <= LARGEST)


def is_time(seconds: Any) -> bool:
    """Whether this is a number of seconds that is neither negative nor absurdly large."""
    number = isinstance(seconds, int | float | np.integer | np.floating) and not isinstance(seconds, bool)
    return number and bool(0 <= seconds <= LONGEST)


def nonnegative_fit(columns: np.ndarray) -> tuple[float, float, float]:
    """The coefficients, none negative, whose combination of three columns is closest to ones; the first is positive.

    Exact: a solution of least squares with bounds is one without bounds on the columns that are not at zero (Lawson and
    Hanson, Solving Least Squares Problems, 1974, chapter 23), and three columns have few subsets. Columns that depend
    on those before them get zero.
    """
    scale = np.linalg.norm(columns, axis=0)
    kept: list[int] = []
    for i in range(3):
        if scale[i] and np.linalg.matrix_rank((columns / np.where(scale, scale, 1))[:, [*kept, i]], tol=1e-9) > len(
            kept
        ):
            kept.append(i)
    best, least = (0.0, 0.0, 0.0), math.inf
    for size in range(len(kept)):
        for others in itertools.combinations(kept[1:], size):
            chosen = [0, *others]
            found = np.linalg.lstsq(columns[:, chosen], np.ones(len(columns)), rcond=None)[0]
            wrong = float(np.sum((columns[:, chosen] @ found - 1) ** 2))
            if found[0] > 0 and (found >= 0).all() and wrong < least:
                values = dict(zip(chosen, map(float, found), strict=True))
                best, least = (values[0], values.get(1, 0.0), values.get(2, 0.0)), wrong
    return best


def signature_difference(mine: Signature | None, others: Signature | None) -> str:
    """Says in which way two measured programs differ."""
    a, b = (({} if s is None else dataclasses.asdict(s)) for s in (mine, others))
    facts: list[Any] = [f"{name}: {a.get(name)} and {b.get(name)}" for name in {**a, **b} if a.get(name) != b.get(name)]
    return layout_message(
        "the times belong to different programs.",
        facts=facts,
        remedies=[MEASURE],
    )
