"""Attention by kernels of cuDNN, as `jax.nn.dot_product_attention` with ``implementation="cudnn"`` binds it.

Knows which dimension of each operand and result is which, by the kernel's parameters. Must not know how attention is
computed: examples and heads are apart, and all else is whole.

The call has no description where examples are not independent. That is so with dropout (random numbers by position),
with several sequences packed into one example (their lengths index the batch), with keys in pages, and with a user's
function of scores.
"""

from __future__ import annotations

import math

from jax.extend.core import JaxprEqn

from vnode.operators.description import Algebra, Dims, Factors, OperatorDescription, Work
from vnode.operators.registry import rule
from vnode.operators.splits import WHOLE

HEADS_FIRST = 1
"""The ``layout`` in which heads come before the sequence."""

PAGES = 4
"""The number of dimensions of a table of pages; without pages it has one."""


@rule("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
def attention(eqn: JaxprEqn) -> OperatorDescription | None:
    """Forward: the result and the residuals; backward: gradients of queries, keys, values and bias."""
    query, key, value, bias, *_ = shapes = [atom.aval.shape for atom in eqn.invars]
    has_bias, has_bias_gradient = eqn.params["variadic_args"]
    packed, paged = len(shapes[6]) > 1, len(shapes[8]) == PAGES
    if eqn.params["dropout_rate"] > 0 or packed or paged or len(query) != 4:
        return None
    if eqn.params.get("score_mod") is not None:  # a function of the user's, also of positions (since jax 0.12)
        return None
    heads_first = eqn.params["layout"] == HEADS_FIRST
    at = 1 if heads_first else 2  # the dimension of heads
    groups, ratio = key[at], query[at] // key[at]
    f = Factors()
    b, n, width, depth = f.new(query[0]), f.new(groups), f.new(query[3], WHOLE), f.new(value[3], WHOLE)
    t, s = f.new(query[3 - at], WHOLE), f.new(key[3 - at], WHOLE)
    shared = (f.new(ratio),) if ratio > 1 else ()  # heads of queries that read the same keys

    def array(sequence: int, heads: tuple[int, ...], last: int) -> Dims:
        return ((b,), heads, (sequence,), (last,)) if heads_first else ((b,), (sequence,), heads, (last,))

    def broadcast_dims(dims: Dims, shape: tuple[int, ...]) -> Dims:
        """Dimensions of size one, along which the kernel repeats an operand, have no factor."""
        return tuple(() if m == 1 and f_size(dim) != 1 else dim for dim, m in zip(dims, shape, strict=True))

    def f_size(dim: tuple[int, ...]) -> int:
        return math.prod(f.size(factor) for factor in dim)

    q, k, v = array(t, (n, *shared), width), array(s, (n,), width), array(s, (n,), depth)
    out, scores = array(t, (n, *shared), depth), ((b,), (n, *shared), (t,))
    biased = broadcast_dims(((b,), (n, *shared), (t,), (s,)), bias) if has_bias else f.dims(bias, WHOLE)
    lengths = [((b,),) if shape == query[:1] else f.dims(shape, WHOLE) for shape in shapes[4:6]]
    unused = [f.dims(shape, WHOLE) for shape in shapes[6:10]]
    operands = (q, k, v, biased, *lengths, *unused)
    if len(shapes) > 10:
        operands += (scores, out, out)
        results = (q, k, v, biased) if has_bias_gradient else (q, k, v)
    else:
        results = (out, scores)[: len(eqn.outvars)]
    empty = [i for i, factor in enumerate(f.all) if factor.size == 0]
    f.change(*empty, counted=False)
    products = 2 if len(shapes) <= 10 else 5
    return OperatorDescription(
        factors=f.all,
        operands=operands,
        results=results,
        linear=(frozenset({12}),) if len(shapes) > 10 else (),
        summed=dict.fromkeys(range(1, len(results)), frozenset({12})) if len(shapes) > 10 else {},
        algebra=Algebra.CONTINUOUS,
        own_types=True,
        work=Work(2 * products),
    )
