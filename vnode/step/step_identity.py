"""What identifies a step and its program, so that several processes can tell whether they run the same.

Knows steps and fingerprints of programs. Must not know processes.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vnode.analysis.fingerprint import Fingerprint
from vnode.placement.placement import Placement

if TYPE_CHECKING:
    from vnode.step.spec import StepSpec

SHOWN = 6
"""Operations that differ, of which an error tells."""


@functools.cache
def versions() -> dict[str, str]:
    """The versions of what computes."""
    found = {}
    for name in ("jax", "jaxlib", "vnode"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # it was not installed, but lies in the path
            found[name] = "unknown"
    return found


def step_facts(options: Any) -> dict[str, Any]:
    """What was asked of `virtualize` that decides what a step computes, fit for JSON."""
    return {
        "virtual_nodes": options.virtual_nodes,
        "reduction": options.reduction,
        "nodes in a lane": options.lane,
        "coupling": options.coupling if isinstance(options.coupling, str) else dict(options.coupling),
        "accumulate_dtype": None if options.accumulate_dtype is None else str(options.accumulate_dtype),
    }


def identity_of(spec: StepSpec, placement: Placement, program: Fingerprint | None) -> dict[str, Any]:
    """What processes compare before they run a program for the first time.

    Args:
      spec: the step.
      placement: where it is to run.
      program: what it computes; None if that is not known.
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
    """What a program is known by: the structure of its arguments, and the types of the arrays in them."""
    return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)


def program_differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """How two programs differ, given as `Fingerprint.to_json` says them; a line each."""
    lines = Fingerprint.from_json(one).differences(Fingerprint.from_json(other))
    return [*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]
