"""A step and its program -> its identity, as JSON, by which several processes check that they run the same.

Knows steps and fingerprints of programs. Must not know processes.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vnode.analysis.fingerprint import Fingerprint
from vnode.errors import limit_lines
from vnode.placement.placement import Placement

if TYPE_CHECKING:
    from vnode.step.spec import StepSpec

SHOWN = 6
"""The number of differing operations that an error shows."""


@functools.cache
def versions() -> dict[str, str]:
    """The versions of jax, jaxlib and vnode."""
    found = {}
    for name in ("jax", "jaxlib", "vnode"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # it was not installed, but lies in the path
            found[name] = "unknown"
    return found


def step_facts(options: Any) -> dict[str, Any]:
    """The options of `virtualize` that affect a step's result, for JSON."""
    return {
        "virtual_nodes": options.virtual_nodes,
        "reduction": options.reduction,
        "nodes in a lane": options.lane,
        "coupling": options.coupling if isinstance(options.coupling, str) else dict(options.coupling),
        "accumulate_dtype": None if options.accumulate_dtype is None else str(options.accumulate_dtype),
    }


def identity_of(spec: StepSpec, placement: Placement, program: Fingerprint | None) -> dict[str, Any]:
    """The facts that processes compare before they run a program for the first time.

    Args:
      spec: the step.
      placement: where it will run.
      program: its fingerprint; None if it is unknown.
    """
    return {
        "versions": versions(),
        "step": step_facts(spec.options),
        "order of sums": list(spec.options.order),
        "donate_argnums": list(spec.donate_argnums),
        "devices": [list(placement.counts), [device.id for device in placement.devices]],
        "program": None if program is None else program.to_json(),
    }


def argument_types(leaves: Sequence[Any], structure: Any) -> Any:
    """The key of a program: the structure of its arguments, and the shapes and dtypes of their arrays."""
    return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)


def program_differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The differences of two programs, given as `Fingerprint.to_json`; a line each."""
    lines = Fingerprint.from_json(one).differences(Fingerprint.from_json(other))
    return limit_lines(lines, SHOWN)
