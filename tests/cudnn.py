"""cuDNN's attention kernels on a machine without a GPU: found by jax, and on CPUs evaluated by what they compute.

Knows where jax keeps these primitives, and attention. Must not know vnode.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir

VERSION = 91300
"""Of cuDNN, as jax is told."""

FORWARD, BACKWARD = cudnn._dot_product_attention_fwd_p_wrapper, cudnn._dot_product_attention_bwd_p_wrapper


def forward(
    query: Any, key: Any, value: Any, bias: Any, query_lengths: Any, lengths: Any, *unused: Any, **params: Any
) -> list[Any]:
    """Attention, and the logarithms of its sums: ``[b, t, n, h]`` of keys ``[b, s, m, h]``."""
    if params["layout"] == cudnn.AttentionLayout.BNTH.value:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * params["scale"]
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    if params["variadic_args"][0]:
        scores += bias
    if params["mask_type"] == cudnn.MaskType.CAUSAL:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    if params["mask_type"] == cudnn.MaskType.PADDING:
        scores = jnp.where(jnp.arange(scores.shape[-1]) < lengths[:, None, None, None], scores, -1e30)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores).astype(value.dtype), value)
    if params["layout"] == cudnn.AttentionLayout.BNTH.value:
        out = jnp.swapaxes(out, 1, 2)
    return [out, jax.nn.logsumexp(scores, -1).astype(jnp.float32)][: 1 + params["is_training"]]


def backward(query: Any, key: Any, value: Any, bias: Any, *rest: Any, **params: Any) -> list[Any]:
    """Gradients of queries, keys and values, and of the bias if that is asked for."""
    *others, _, _, cotangent = rest

    def attended(*given: Any) -> Any:
        return forward(*given, *others, is_training=False, **params)[0]

    gradients = jax.vjp(attended, query, key, value, bias)[1](cotangent)
    return [*gradients[: 3 + params["variadic_args"][1]]]


for primitive, computes in (
    (cudnn._dot_product_attention_fwd_p, forward),
    (cudnn._dot_product_attention_bwd_p, backward),
):
    mlir.register_lowering(primitive, mlir.lower_fun(computes, multiple_results=True), platform="cpu")


@pytest.fixture
def with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax takes cuDNN to be there."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: VERSION)
