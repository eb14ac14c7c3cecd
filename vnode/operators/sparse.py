"""Products of a sparse array with a dense one (`jax.experimental.sparse`), as one kernel.

Knows the layout of BCOO and BCSR arrays: batch dimensions, then stored elements by their places, then dense
dimensions. Must not know how the product is computed: on some platforms a library does it. All other primitives of
sparse arrays are what they are written in (`vnode.operators.control_flow.implementation_of`).

``data [b, nse, d]``, ``indices [b, nse, 2]`` and a dense ``[j, k]`` give ``[b, i, d, k]``, with ``i`` and ``j`` among
the places. Batch and dense dimensions are free, and so are those that only the dense array has. Terms are divided along
``nse`` where each comes with its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from vnode.operators.description import Dims, Factors, OperatorDescription, Role, Sizes, Work
from vnode.operators.monoid import Monoid
from vnode.operators.registry import rule
from vnode.operators.splits import FREE, WHOLE, Reduced

SUM = Reduced(Monoid.SUM)


@rule("bcoo_dot_general")
def coordinates(eqn: JaxprEqn) -> OperatorDescription | None:
    """Index arrays ``indices [b, nse, n_sparse]``: each row is an element's place."""
    indices = eqn.invars[1].aval.shape
    return product(eqn, len(indices) - 2, indices[-1], ((None, indices[-1]),))


@rule("bcsr_dot_general")
def compressed_rows(eqn: JaxprEqn) -> OperatorDescription | None:
    """Column indices ``indices [b, nse]``, and the start of each row, ``indptr [b, rows + 1]``."""
    starts = eqn.invars[2].aval.shape
    return product(eqn, len(starts) - 1, 2, ((None,), (starts[-1],)))


def product(
    eqn: JaxprEqn, n_batch: int, n_sparse: int, places: Sequence[Sequence[int | None]]
) -> OperatorDescription | None:
    """The description of a product.

    Args:
      eqn: the equation, of data, index arrays, and the dense array.
      n_batch: the number of the sparse array's batch dimensions.
      n_sparse: the number of its sparse dimensions.
      places: the dimensions of each index array, without batch dimensions; None for that of stored elements.

    Returns:
      The description; None if stored elements are broadcast along a summed dimension.
    """
    (contracted, dense_contracted), (shared, dense_shared) = eqn.params["dimension_numbers"]
    shape, dense = eqn.params["lhs_spinfo"].shape, eqn.invars[-1].aval.shape
    stored = [atom.aval.shape for atom in eqn.invars[:-1]]
    if any(d < n_batch and has[d] != shape[d] for has in stored for d in contracted):
        return None
    f = Factors()
    own = []
    for d, n in enumerate(shape):
        placed = n_batch <= d < n_batch + n_sparse
        own.append(f.new(n, WHOLE if placed else SUM if d in contracted else FREE, counted=not placed))
    divisible = all(None in dims for dims in places)  # some elements and their places are a sparse array
    elements = f.new(stored[0][n_batch], SUM if divisible else WHOLE)
    met = {**dict(zip(dense_contracted, contracted, strict=True)), **dict(zip(dense_shared, shared, strict=True))}
    others = [own[met[d]] if d in met else f.new(n) for d, n in enumerate(dense)]

    def behind_batch(has: Sequence[int], dims: Dims) -> Dims:
        """Batch dimensions of size one stand for all."""
        return (*((own[d],) if has[d] == shape[d] else () for d in range(n_batch)), *dims)

    blocks = tuple((own[d],) for d in range(n_batch + n_sparse, len(shape)))
    operands = [behind_batch(stored[0], ((elements,), *blocks))]
    for has, dims in zip(stored[1:], places, strict=True):
        factors = [elements if n is None else f.new(n, WHOLE, counted=False) for n in dims]
        operands.append(behind_batch(has, tuple((factor,) for factor in factors)))
    operands.append(tuple((factor,) for factor in others))
    kept = [own[d] for d in range(len(shape)) if d not in (*contracted, *shared)]
    alone = [factor for d, factor in enumerate(others) if d not in met]
    result = tuple((factor,) for factor in (*(own[d] for d in shared), *kept, *alone))

    def resize(description: OperatorDescription, eqn: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        info = eqn.params["lhs_spinfo"]
        return {**eqn.params, "lhs_spinfo": info._replace(shape=tuple(sizes[factor] for factor in own))}

    return OperatorDescription(
        factors=f.all,
        operands=tuple(operands),
        results=(result,),
        roles=dict.fromkeys(range(1, len(operands) - 1), Role.INDEX),
        linear=(frozenset({0}), frozenset({len(operands) - 1})),
        work=Work(2),
        widen=lambda params, dtype: {**params, "preferred_element_type": dtype},
        resize=resize,
    )
