"""Calls that leave XLA (host code, foreign kernels) -> descriptions of the dimensions that vmap added.

Knows the dimensions of such a call that jax added, and the user's promise about them. Must not know the call's purpose:
the equation does not state it, so without that promise the call has no description.

`jax.vmap` with ``vmap_method="expand_dims"`` or ``"broadcast_all"`` passes all examples to the code at once, along new
leading dimensions. With these words the user promises that the code treats these one by one. A call on a whole batch
looks the same in a jaxpr. The traceback tells them apart: jax's rule for such calls under vmap is in it once per added
dimension. If it is not (vmap of a traced function, such as a scan's body), the call stays undescribed, and the step is
refused.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import JaxprEqn

from vnode.operators.description import Factors, OperatorDescription, Sizes
from vnode.operators.registry import rule
from vnode.operators.splits import WHOLE

ADDS_DIMENSIONS = ("expand_dims", "broadcast_all")

VMAP_RULE = "ffi_batching_rule"
"""jax's function that adds a dimension to such a call. If jax renames it, mapped calls are refused again."""


def added_dimensions(eqn: JaxprEqn) -> int:
    """The number of leading dimensions of a call that vmap added; 0 if that is unknown."""
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
