"""Calls that leave XLA's hands: host code and kernels of a foreign function interface.

Knows which dimensions of such a call jax added, and under which promise. Must not know what the call does: nothing in
the equation says it, so without that promise the call has no description.

`jax.vmap` with ``vmap_method="expand_dims"`` or ``"broadcast_all"`` hands the code all examples at once, along new
leading dimensions; by these words the user promises that it treats what lies along them one by one. A call that was
given a whole batch from the start looks the same in a jaxpr. What tells them apart is who made the equation: jax's rule
for such calls under vmap stands in its traceback once for every dimension that it added. Where it does not (vmap of
something that was traced before, such as a scan), the call stays undescribed, and the step is refused.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import JaxprEqn

from vnode.operators.description import Factors, OperatorDescription, Sizes
from vnode.operators.registry import rule
from vnode.operators.splits import WHOLE

ADDS_DIMENSIONS = ("expand_dims", "broadcast_all")

VMAP_RULE = "ffi_batching_rule"
"""The function of jax that adds a dimension to such a call. If jax renames it, mapped calls are refused again."""


def added_dimensions(eqn: JaxprEqn) -> int:
    """How many leading dimensions of a call vmap added; 0 where that cannot be told."""
    traceback = eqn.source_info.traceback
    if eqn.params.get("vmap_method") not in ADDS_DIMENSIONS or traceback is None:
        return 0
    return sum(frame.function_name == VMAP_RULE for frame in traceback.frames)


@rule(
    "pure_callback",
    "ffi_call",
    alike=False,
    advice=(
        "call it for one example under jax.vmap, with vmap_method='expand_dims' or 'broadcast_all', "
        "and no jit, scan or checkpoint between the two",
        "or with vmap_method='sequential', which works anywhere",
    ),
)
def mapped_call(eqn: JaxprEqn) -> OperatorDescription | None:
    """The added dimensions are split freely; the code's own are whole."""
    added = added_dimensions(eqn)
    shapes = [atom.aval.shape for atom in eqn.invars]
    if not added or eqn.effects or any(len(shape) < added for shape in shapes):
        return None
    f = Factors()
    extents = tuple(eqn.outvars[0].aval.shape[:added])
    leading = f.dims(extents)

    def dims(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        own = f.dims(shape[added:], WHOLE)
        spread = ((() if n == 1 and m != 1 else dim) for n, m, dim in zip(shape, extents, leading, strict=False))
        return (*spread, *own)

    return OperatorDescription(
        operands=tuple(map(dims, shapes)),
        results=tuple(dims(atom.aval.shape) for atom in eqn.outvars),
        factors=f.all,
        resize=resize,
    )


def resize(description: OperatorDescription, eqn: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
    avals = tuple(atom.aval.update(shape=description.result_shape(i, sizes)) for i, atom in enumerate(eqn.outvars))
    return {**eqn.params, "result_avals": avals}
