"""Train steps with Pallas kernels: small ones of our own, and those that JAX comes with.

Knows `jax.experimental.pallas`. Must not know vnode: the reference of a step is the step itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

Attend = Callable[[Any, Any, Any], Any]


def normalize_forward(x: Any, o: Any) -> None:
    y = x[...].astype(jnp.float32)
    o[...] = (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(o.dtype)


def normalize_backward(x: Any, g: Any, o: Any) -> None:
    y, dz = x[...].astype(jnp.float32), g[...].astype(jnp.float32)
    r = lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    o[...] = (r * dz - y * r**3 * jnp.mean(y * dz, -1, keepdims=True)).astype(o.dtype)


def over_rows(kernel: Callable[..., None], block: int, interpret: bool, *operands: Any) -> Any:
    """A kernel of independent rows, of all examples and tokens ``[rows, width]``."""
    first, spec = operands[0], pl.BlockSpec((block, operands[0].shape[1]), lambda i: (i, 0))
    result = jax.ShapeDtypeStruct(first.shape, first.dtype)
    grid = (pl.cdiv(first.shape[0], block),)
    specs = [spec] * len(operands)
    run = pl.pallas_call(kernel, out_shape=result, grid=grid, in_specs=specs, out_specs=spec, interpret=interpret)
    return run(*operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def normalize(x: Any, block: int, interpret: bool) -> Any:
    return over_rows(normalize_forward, block, interpret, x)


normalize.defvjp(
    lambda x, block, interpret: (over_rows(normalize_forward, block, interpret, x), x),
    lambda block, interpret, x, g: (over_rows(normalize_backward, block, interpret, x, g),),
)


def attention_forward(q: Any, k: Any, v: Any, o: Any, most: Any, sums: Any, total: Any) -> None:
    """Blocks of keys one after another; what is needed of them is in scratch memory."""
    last = pl.program_id(3)

    @pl.when(last == 0)
    def _() -> None:
        most[...] = jnp.full_like(most, -jnp.inf)
        sums[...] = jnp.zeros_like(sums)
        total[...] = jnp.zeros_like(total)

    scores = q[...] @ k[...].T
    before, now = most[...], jnp.maximum(most[...], scores.max(-1, keepdims=True))
    weights, scale = jnp.exp(scores - now), jnp.exp(before - now)
    most[...] = now
    sums[...] = sums[...] * scale + weights.sum(-1, keepdims=True)
    total[...] = total[...] * scale + weights @ v[...]

    @pl.when(last == pl.num_programs(3) - 1)
    def _() -> None:
        o[...] = total[...] / sums[...]


def attention_backward(q: Any, k: Any, v: Any, g: Any, dq: Any, dk: Any, dv: Any) -> None:
    weights = jax.nn.softmax(q[...] @ k[...].T)
    dv[...] = weights.T @ g[...]
    dw = g[...] @ v[...].T
    ds = weights * (dw - (dw * weights).sum(-1, keepdims=True))
    dq[...] = ds @ k[...]
    dk[...] = ds.T @ q[...]


@jax.custom_vjp
def attend(q: Any, k: Any, v: Any) -> Any:
    """Attention over ``[examples, heads, length, width]``, interpreted."""
    b, h, t, d = q.shape
    query = pl.BlockSpec((None, None, 2, d), lambda b, h, i, j: (b, h, i, 0))
    key = pl.BlockSpec((None, None, 2, d), lambda b, h, i, j: (b, h, j, 0))
    scratch = [pltpu.VMEM((2, n), jnp.float32) for n in (1, 1, d)]
    return pl.pallas_call(
        attention_forward,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(b, h, t // 2, t // 2),
        in_specs=[query, key, key],
        out_specs=query,
        scratch_shapes=scratch,
        interpret=True,
    )(q, k, v)


def attend_backward(residuals: tuple[Any, ...], g: Any) -> Any:
    b, h, t, d = g.shape
    spec = pl.BlockSpec((None, None, t, d), lambda b, h: (b, h, 0, 0))
    result = jax.ShapeDtypeStruct(g.shape, g.dtype)
    run = pl.pallas_call(
        attention_backward,
        out_shape=[result] * 3,
        grid=(b, h),
        in_specs=[spec] * 4,
        out_specs=[spec] * 3,
        interpret=True,
    )
    return tuple(run(*residuals, g))


attend.defvjp(lambda q, k, v: (attend(q, k, v), (q, k, v)), attend_backward)


def transformer(attend: Attend, block: int, interpret: bool, *, layers: bool = True) -> Callable[..., Any]:
    """A step of a transformer; `layers`: a scan over several, whose parameters are stacked."""

    def layer(h: Any, w: dict[str, Any]) -> tuple[Any, None]:
        a = normalize(h.reshape(-1, h.shape[-1]), block, interpret).reshape(h.shape)
        q, k, v = (jnp.einsum("btd,dhe->bhte", a, w[name]) for name in "qkv")
        return h + jnp.einsum("bhte,hed->btd", attend(q, k, v), w["o"]), None

    def step(w: dict[str, Any], x: Any) -> tuple[Any, Any]:
        def loss(w: dict[str, Any]) -> Any:
            h, _ = lax.scan(layer, x, w) if layers else layer(x, w)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    return step


def weights(d: int, h: int, e: int, layers: int | None = None) -> dict[str, tuple[int, ...]]:
    """The shapes of a transformer's parameters."""
    more = () if layers is None else (layers,)
    return dict.fromkeys("qkv", (*more, d, h, e)) | {"o": (*more, h, e, d)}


def splash_attend(heads: int, length: int, interpret: bool = False) -> Attend:
    """JAX's splash attention of each example, with its causal mask."""
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    return jax.vmap(splash.make_splash_mha_single_device(mask=mask, interpret=interpret))


def flash_attend(q: Any, k: Any, v: Any) -> Any:
    """JAX's flash attention."""
    return flash_attention.flash_attention(q, k, v, causal=True)


# Attention to pages, which has no derivative of its own ---------------------------------------------------------------


def attend_to_pages(q: Any, keys: Any, values: Any, lengths: Any, pages: Any) -> Any:
    """JAX's paged attention, of each example ``q[heads, width]`` to its own pages of a cache that all share."""

    def of_one(q: Any, length: Any, pages: Any) -> Any:
        return paged_attention(q[None], keys, values, length[None], pages[None], pages_per_compute_block=4)[0]

    return jax.vmap(of_one)(q, lengths, pages)


def attend_to_gathered(q: Any, keys: Any, values: Any, lengths: Any, pages: Any) -> Any:
    """The same by `jax.numpy`."""
    b, (h, _, _size, e) = len(q), keys.shape
    k, v = (each[:, pages].transpose(1, 0, 2, 3, 4).reshape(b, h, -1, e) for each in (keys, values))
    scores = jnp.einsum("bhge,bhte->bhgt", q.reshape(b, h, -1, e), k)
    there = jnp.arange(k.shape[2]) < lengths[:, None, None, None]
    return jnp.einsum("bhgt,bhte->bhge", jax.nn.softmax(jnp.where(there, scores, -1e30)), v).reshape(q.shape)


@jax.custom_vjp
def attend_paged(q: Any, keys: Any, values: Any, lengths: Any, pages: Any) -> Any:
    return attend_to_pages(q, keys, values, lengths, pages)


def attend_paged_backward(residuals: tuple[Any, ...], g: Any) -> Any:
    q, keys, values, *rest = residuals
    _, back = jax.vjp(lambda q, k, v: attend_to_gathered(q, k, v, *rest), q, keys, values)
    return (*back(g), *(np.zeros(each.shape, jax.dtypes.float0) for each in rest))


attend_paged.defvjp(lambda *args: (attend_to_pages(*args), args), attend_paged_backward)


def paged_step(w: dict[str, Any], batch: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """A step of one layer that attends to pages of a cache that is learned."""
    x, lengths, pages = batch

    def loss(w: dict[str, Any]) -> Any:
        q = jnp.einsum("bd,dhe->bhe", x, w["q"])
        o = attend_paged(q, w["keys"], w["values"], lengths, pages)
        return jnp.mean((x + jnp.einsum("bhe,hed->bd", o, w["o"])) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value
