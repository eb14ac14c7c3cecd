"""Which exported functions are proved to keep rows apart: each that is, does; none of those that do not, is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from vnode.analysis.fingerprint import fingerprint
from vnode.operators.exported import keeps_rows_apart

pytestmark = pytest.mark.quickly

MATRIX = np.arange(12.0, dtype=np.float32).reshape(3, 4)


def network(w: Any, x: Any) -> Any:
    h = jax.nn.gelu(x @ w)
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
    return jax.nn.softmax(jnp.concatenate([h, jnp.ones((x.shape[0], 1))], 1))


def attention(x: Any) -> Any:
    heads = x.reshape(*x.shape[:2], 2, -1)
    return jax.nn.dot_product_attention(heads, heads * 2, jnp.tanh(heads), is_causal=True)


def image(x: Any) -> Any:
    kernel = jnp.ones((2, 1, 3, 3))
    return lax.conv_general_dilated(x[:, None], kernel, (1, 1), "SAME").sum((2, 3))


APART: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "network": (network, (MATRIX, 3)),
    "attention": (attention, ((5, 8),)),
    "convolution": (image, ((6, 6),)),
    "embedding": (lambda w, i: jnp.asarray(w)[i].sum(1), (MATRIX, "2")),
    "one hot": (lambda i: jax.nn.one_hot(i, 5), ("",)),
    "first column": (lambda x: x * x[:, :1] + x[:, -1:], (3,)),
    "columns": (lambda x: jnp.concatenate(jnp.split(x, 3, 1)[::-1], 1)[:, ::-1], (3,)),
    "padded columns": (lambda x: jnp.pad(x, ((0, 0), (1, 1))), (3,)),
    "sorted columns": (lambda x: jnp.sort(x, 1) * jnp.arange(3) + jnp.argmax(x, 1)[:, None], (3,)),
    "merged": (lambda x: x.reshape(x.shape[0], -1) * 2.0, ((2, 3),)),
    "rows by rows": (lambda x, y: jnp.einsum("bi,bi->b", x, y), (3, 3)),
    "not read": (lambda w, x: x * 2.0, (MATRIX, 3)),
}
CROSSING: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mean": (lambda x: x - x.mean(0), (3,)),
    "softmax": (lambda x: jax.nn.softmax(x, 0), (3,)),
    "number of rows": (lambda x: x / x.shape[0], (3,)),
    "compared with the number": (lambda x: jnp.where(jnp.asarray(x.shape[0]) > 8, x, -x), (3,)),
    "position": (lambda x: x * jnp.arange(x.shape[0])[:, None], (3,)),
    "sorted": (lambda x: jnp.sort(x, 0), (3,)),
    "reversed": (lambda x: x[::-1], (3,)),
    "first row": (lambda x: x * x[0], (3,)),
    "all but the last": (lambda x: jnp.pad(x[:-1], ((0, 1), (0, 0))), (3,)),
    "moved": (lambda x: jnp.concatenate([x[1:], x[:1]]), (3,)),
    "moved by padding": (lambda x: jnp.pad(x, ((1, 0), (0, 0)))[1:], (3,)),
    "turned": (lambda x: x.reshape(3, -1).T * 2.0, (3,)),
    "pairs": (lambda x: x @ x.T @ x, (3,)),
    "every other": (lambda x: jnp.einsum("bi,cj->bij", x, x), (3,)),
    "picked": (lambda x, i: x[i], (3, "")),
    "running sum": (lambda x: jnp.cumsum(x, 0), (3,)),
    "drawn": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), (3,)),
    "sum beside rows": (lambda x: (x * 2.0, x.sum(0)), (3,)),
}


def exported(fun: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A function of some rows: of so many numbers, or, as a string, of so many indices; and of arrays."""
    (rows,) = export.symbolic_shape("b")

    def type_of(each: Any) -> Any:
        if isinstance(each, np.ndarray):
            return jax.ShapeDtypeStruct(each.shape, each.dtype)
        if isinstance(each, str):
            return jax.ShapeDtypeStruct((rows, *map(int, each)), jnp.int32)
        return jax.ShapeDtypeStruct((rows, *(each if isinstance(each, tuple) else (each,))), jnp.float32)

    return export.export(jax.jit(fun))(*map(type_of, arguments))


@pytest.mark.parametrize("name", APART)
def test_rows_that_are_apart(name: str) -> None:
    assert keeps_rows_apart(exported(*APART[name]))


@pytest.mark.parametrize("name", CROSSING)
def test_rows_that_meet(name: str) -> None:
    assert not keeps_rows_apart(exported(*CROSSING[name]))


def test_a_derivative_is_apart_where_it_sums_nothing() -> None:
    inner = exported(lambda x: jnp.tanh(x @ MATRIX), (3,))
    assert keeps_rows_apart(inner.vjp())
    assert not keeps_rows_apart(exported(lambda w, x: jnp.tanh(x @ w), (MATRIX, 3)).vjp())


def test_other_programs_are_other_steps() -> None:
    """The same program is the same step, wherever it was exported."""

    def digest(fun: Callable[..., Any]) -> str:
        return fingerprint(exported(fun, (3,)).call, jnp.ones((4, 3))).digest

    assert digest(jnp.tanh) == digest(jnp.tanh) != digest(jnp.sin)
