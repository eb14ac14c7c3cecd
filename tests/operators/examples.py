"""Example programs, small, whose equations exercise every operator description.

Knows jax's public functions and the primitives that they trace to. Arguments are NumPy arrays: nothing here touches a
device when it is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import sparse
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives as extend_primitives
from jax.extend.random import threefry_2x32
from jax.lax import linalg as ll


@dataclasses.dataclass(frozen=True)
class Example:
    """A program, its arguments, and the primitives that it is an example of."""

    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    of: frozenset[str]


def array(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape).astype(dtype)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    """Strictly between zero and one."""
    return np.random.RandomState(seed).rand(*shape) * 0.8 + 0.1


def integers(*shape: int, seed: int = 0, dtype: Any = np.int64, low: int = 1, high: int = 7) -> np.ndarray:
    return np.random.RandomState(seed).randint(low, high, shape).astype(dtype)


def booleans(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).rand(*shape) > 0.5


def weighted(fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0) -> Callable[..., Any]:
    """The gradient of `fun`, with a different cotangent for every element of its results."""

    def loss(*args: Any) -> Any:
        total = 0.0
        for y in jax.tree.leaves(fun(*args)):
            y = jnp.asarray(y)
            total += (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))).sum()
        return total

    return jax.grad(loss, argnums)


def primitive(name: str) -> Any:
    """A primitive by its name, wherever this jax keeps it; None if it has none of that name."""
    for module in (lax, extend_primitives, ll):
        for attribute in dir(module):
            value = getattr(module, attribute)
            if attribute.endswith("_p") and value.name == name:
                return value
    return None


# Elementwise ---------------------------------------------------------------------------------------------------------

# fmt: off
FLOAT = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "cos",
    "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "is_finite", "lgamma", "log",
    "log1p", "log2", "logistic", "neg", "one_minus_square", "round", "rsqrt", "sign", "sin", "sinh",
    "sqrt", "square", "tan", "tanh",
)
FLOATS = (
    "add", "add_any", "atan2", "complex", "div", "eq", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "le", "lt",
    "max", "min", "mul", "ne", "nextafter", "polygamma", "pow", "rem", "sub", "zeta", "eq_to", "le_to", "lt_to",
)
INTEGERS = (
    "and", "or", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical", "rem", "div", "add", "mul",
)
# fmt: on

SHIFTED = {"acosh": 1.5, "zeta": 1.5}
"""Where the domain is not the unit interval."""

SLOW = {"igamma", "igamma_grad_a", "igammac", "polygamma", "zeta"}
"""Slow to compile: one factor has to do."""


def elementwise() -> Iterator[Example]:
    def one(name: str, *args: Any, suffix: str = "") -> Iterator[Example]:
        p = primitive(name)
        if p is not None:
            yield Example(name + suffix, p.bind, args, frozenset({name}))

    for name in FLOAT:
        if hasattr(lax, name):  # some are newer than the lowest supported jax
            yield Example(name, getattr(lax, name), (positive(4, 3) + SHIFTED.get(name, 0),), frozenset({name}))
    for number, name in enumerate(FLOATS):
        x, y = positive(4, 3) + SHIFTED.get(name, 0), positive(4, 3, seed=1)
        if name == "polygamma":
            x = integers(4, 3).astype(np.float64)
        if name in SLOW or name == "add_any":
            x, y = x[:, 0], y[:, 0]
        else:  # each form of implicit broadcasting, but not each for every primitive
            x, y = [(x, y[:1]), (x[:, :1], y), (x[:, :1], y[:1]), (x, y)][number % 4]
        yield from one(name, x, y)
    for name in ("clz", "population_count", "not"):
        yield from one(name, integers(4, 3))
    for name in INTEGERS:
        yield from one(name, integers(4, 3), integers(1, 3, seed=1), suffix="_of_integers")
    yield from one("not", booleans(4, 3), suffix="_of_booleans")
    yield from one("mulhi", integers(4, 3, dtype=np.uint32) << 28, integers(4, 3, dtype=np.uint32, seed=1) << 27)
    yield from one("conj", array(4, 3) + 1j * array(4, 3, seed=1))
    yield from one("real", array(4, 3) + 1j * array(4, 3, seed=1))
    yield from one("imag", array(4, 3) + 1j * array(4, 3, seed=1))
    yield from one("mul", array(4, 3) + 1j, array(1, 3) - 2j, suffix="_of_complex")
    yield from one("regularized_incomplete_beta", positive(4), positive(4), positive(4, seed=2))
    yield from one("stop_gradient", array(4, 3))
    yield Example("copy", lambda x: jnp.array(x, copy=True), (array(4, 3),), frozenset({"copy"}))
    yield Example("name", lambda x: checkpoint_name(x, "here"), (array(4, 3),), frozenset({"name"}))
    yield Example("integer_pow", lambda x: x**3, (array(4, 3),), frozenset({"integer_pow"}))
    yield Example(
        "reduce_precision", lambda x: lax.reduce_precision(x, 5, 4), (array(4, 3),), frozenset({"reduce_precision"})
    )
    if hasattr(lax, "polynomial"):
        args = (array(4, 3), array(4, 3, seed=1), array(4, 3, seed=2))
        yield Example("polynomial", lambda x, a, b: lax.polynomial(x, [a, b]), args, frozenset({"polynomial"}))
    yield Example("clamp", lambda x: jnp.clip(x, -0.5, 0.5), (array(4, 3),), frozenset({"min", "max"}))
    yield Example("clamp_scalars", lambda x: lax.clamp(-0.5, x, 0.5), (array(4, 3),), frozenset({"clamp"}))
    yield Example(
        "clamp_arrays", lax.clamp, (array(4, 3) - 1, array(4, 3, seed=1), array(4, 3) + 1), frozenset({"clamp"})
    )
    cases = (array(4, 3), array(4, 3, seed=1))
    yield Example("select_n", lax.select_n, (booleans(4, 3), *cases), frozenset({"select_n"}))
    yield Example("select_n_scalar", lax.select_n, (booleans(), *cases), frozenset({"select_n"}))
    which = integers(4, 3, low=0, high=3, dtype=np.int32)
    yield Example("select_n_of_three", lax.select_n, (which, *cases, array(4, 3, seed=2)), frozenset({"select_n"}))
    if importlib.util.find_spec("jax.experimental.shard_alike"):
        from jax.experimental.shard_alike import shard_alike

        yield Example("shard_alike", shard_alike, cases, frozenset({"shard_alike"}))
    metadata = {"xla_metadata_value"}
    yield Example("xla_metadata", lambda x: set_xla_metadata(x, a="b"), (array(4, 3),), frozenset(metadata))
    yield Example(
        "threefry",
        lambda x: threefry_2x32(jnp.array([1, 2], jnp.uint32), x),
        (integers(6, dtype=np.uint32),),
        frozenset({"threefry2x32"}),
    )
    for old, new in [
        ("float64", "float32"),
        ("float32", "bfloat16"),
        ("float64", "int32"),
        ("int32", "float64"),
        ("int64", "int8"),
        ("int8", "int32"),
        ("int8", "uint8"),
        ("int4", "int8"),
        ("int8", "int4"),
        ("bool", "float64"),
        ("float64", "complex128"),
    ]:
        x = (array(4, 3) * 3).astype(jnp.dtype(old))
        yield Example(
            f"convert_{old}_{new}", lambda x, new=new: x.astype(new), (x,), frozenset({"convert_element_type"})
        )


# Shapes --------------------------------------------------------------------------------------------------------------


def shapes() -> Iterator[Example]:
    def one(name: str, fun: Callable[..., Any], *args: Any, of: str = "") -> Example:
        return Example(name, fun, args, frozenset({of or name}))

    x = array(4, 3, 2)
    yield one("broadcast_new", lambda x: jnp.broadcast_to(x, (5, 4, 3, 2)), x, of="broadcast_in_dim")
    yield one("broadcast_one", lambda x: lax.broadcast_in_dim(x, (4, 3, 5), (0, 2)), x[:, :1, 0], of="broadcast_in_dim")
    yield one("broadcast_scalar", lambda x: lax.broadcast(x, (4, 3)), x[0, 0, 0], of="broadcast_in_dim")
    for before, after in [
        ((4, 6), (24,)),
        ((24,), (2, 3, 4)),
        ((4, 6), (8, 3)),
        ((6, 4), (4, 6)),
        ((4, 1, 6), (1, 4, 2, 3)),
        ((2, 5, 3), (10, 3)),
        ((5, 3), (3, 5)),
        ((6, 5, 2), (10, 6)),
        ((1,), ()),
    ]:
        name = "reshape_" + "x".join(map(str, before)) + "_to_" + "x".join(map(str, after))
        yield one(name, lambda x, after=after: lax.reshape(x, after), array(*before), of="reshape")
    yield one("transpose", lambda x: jnp.transpose(x, (2, 0, 1)), x)
    yield one("squeeze", lambda x: jnp.squeeze(x, (1, 3)), array(4, 1, 3, 1))
    yield one("concatenate", lambda x: jnp.concatenate([x, x[:, :2], x], 1), array(3, 4, 2))
    yield one("concatenate_views", lambda x: jnp.concatenate([x, -x]), x, of="concatenate")
    yield one("pad", lambda x: lax.pad(x, 7.0, ((0, 0, 0), (1, -1, 0), (0, 2, 1))), x)
    yield one("pad_blocks", lambda x: lax.pad(x, 7.0, ((4, 8, 0), (0, 0, 0), (-1, 2, 0))), array(4, 3, 5), of="pad")
    yield one("rev", lambda x: lax.rev(x, (1,)), x)
    yield one("slice", lambda x: x[:, 1:, ::2], array(4, 3, 5))
    yield one("split", lambda x: jnp.split(x, [1, 3], axis=1), array(3, 4, 2))
    yield one("stack", lambda x, y: jnp.stack([x, y], 1), x, array(4, 3, 2, seed=1))
    yield one("unstack", lambda x: jnp.unstack(x, axis=1), x)
    yield one("iota", lambda: lax.broadcasted_iota(np.int32, (3, 5), 1))
    yield one("iota_float", lambda: lax.iota(np.float64, 5), of="iota")
    yield one("tile", lambda x: lax.tile(x, (2, 1, 3)), x)
    yield one("bitcast", lambda x: lax.bitcast_convert_type(x, np.int64), x, of="bitcast_convert_type")
    yield one("bitcast_narrower", lambda x: lax.bitcast_convert_type(x, np.int32), x, of="bitcast_convert_type")
    bits = integers(4, 3, 2, dtype=np.int32)
    yield one("bitcast_wider", lambda x: lax.bitcast_convert_type(x, np.int64), bits, of="bitcast_convert_type")


# Reductions ----------------------------------------------------------------------------------------------------------


def reductions() -> Iterator[Example]:
    x = array(4, 3, 2)
    for name in ["sum", "prod", "max", "min"]:
        fun = getattr(lax, f"reduce_{name}")
        yield Example(f"reduce_{name}", lambda x, f=fun: f(x, (0, 2)), (x,), frozenset({f"reduce_{name}"}))
        of_integers = (integers(4, 3, 2, dtype=np.int32),)
        yield Example(f"{name}_of_integers", lambda x, f=fun: f(x, (1,)), of_integers, frozenset({f"reduce_{name}"}))
    for name in ["and", "or", "xor"]:
        fun = getattr(lax, f"reduce_{name}")
        of = frozenset({f"reduce_{name}"})
        yield Example(f"reduce_{name}", lambda x, f=fun: f(x, (0, 2)), (booleans(4, 3, 2),), of)
        yield Example(f"{name}_of_integers", lambda x, f=fun: f(x, (1,)), (integers(4, 3, 2),), of)
    yield Example("argmax", lambda x: jnp.argmax(x, 1), (x,), frozenset({"argmax"}))
    yield Example("argmin", lambda x: jnp.argmin(x, 0), (x,), frozenset({"argmin"}))

    def mapped(collective: Any) -> Any:
        return jax.vmap(jax.vmap(lambda x: collective(x, ("i", "j")), axis_name="i"), axis_name="j")

    for name in ["psum", "pmax", "pmin"]:
        yield Example(name, mapped(getattr(lax, name)), (x,), frozenset({name}))
    yield Example(
        "pmean_gradient", weighted(jax.vmap(lambda x: lax.pmean(x**2, "i"), axis_name="i")), (x,), frozenset({"psum"})
    )

    def both(a: Any, b: Any) -> Any:
        return a[0] * b[0] + b[1], a[1] + b[1]

    yield Example("reduce", lambda x, y: lax.reduce((x, y), (0.5, 1.0), both, (1,)), (x, x + 1), frozenset({"reduce"}))


# Contractions --------------------------------------------------------------------------------------------------------


def contractions() -> Iterator[Example]:
    def dots(name: str, spec: str, *shapes: tuple[int, ...], gradient: bool = False) -> Example:
        fun = lambda x, y: jnp.einsum(spec, x, y)  # noqa: E731
        args = tuple(array(*shape, seed=i) for i, shape in enumerate(shapes))
        return Example(name, weighted(fun, (0, 1)) if gradient else fun, args, frozenset({"dot_general"}))

    yield dots("matmul", "ij,jk->ik", (4, 3), (3, 2))
    yield dots("matmul_gradient", "ij,jk->ik", (4, 3), (3, 2), gradient=True)
    yield dots("attention", "bthd,bshd->bhts", (3, 2, 2, 4), (3, 5, 2, 4))
    yield dots("inner", "i,i->", (5,), (5,))
    yield dots("outer", "i,j->ij", (3,), (4,))
    yield Example(
        "product_of_booleans",
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        (booleans(4, 3), booleans(3, 5)),
        frozenset({"dot_general"}),
    )
    yield Example(
        "product_of_bfloat16",
        lambda x, y: lax.dot(x, y, preferred_element_type=np.float32),
        (array(4, 3, dtype=jnp.bfloat16), array(3, 2, dtype=jnp.bfloat16)),
        frozenset({"dot_general"}),
    )

    yield Example(
        "product_of_bytes",
        lambda x, y: lax.dot(x, y, preferred_element_type=np.int32),
        (integers(4, 3, dtype=np.int8) << 5, integers(3, 2, dtype=np.int8)),
        frozenset({"dot_general"}),
    )

    def conv(name: str, kernel: tuple[int, ...], *, gradient: bool = True, **options: Any) -> Iterator[Example]:
        """Convolutions along one dimension, channels last; ``[4, 6, 6]`` images of six channels."""
        options = {"window_strides": (1,), "padding": "SAME", "dimension_numbers": ("NWC", "WIO", "NWC")} | options
        fun = lambda x, w: lax.conv_general_dilated(x, w, **options)  # noqa: E731
        args = (array(4, 6, 6), array(*kernel, seed=1))
        of = frozenset({"conv_general_dilated"})
        yield Example(f"conv_{name}", weighted(fun, (0, 1)) if gradient else fun, args, of)

    yield from conv("same", (3, 6, 4))
    yield from conv("pointwise", (1, 6, 4), padding="VALID")
    yield from conv("pointwise_strided", (1, 6, 4), padding="VALID", window_strides=(2,))
    yield from conv("patches", (3, 6, 4), padding="VALID", window_strides=(3,))
    yield from conv("gaps", (2, 6, 4), padding="VALID", window_strides=(3,), gradient=False)
    yield from conv("global", (6, 6, 4), padding="VALID")
    yield from conv("grouped", (3, 2, 9), feature_group_count=3, window_strides=(2,))
    yield from conv("depthwise", (3, 1, 12), feature_group_count=6)
    yield from conv("dilated", (3, 6, 4), padding=((2, 1),), lhs_dilation=(2,), rhs_dilation=(2,))
    yield from conv("batch_grouped", (3, 6, 4), batch_group_count=2)
    yield Example(
        "conv_images",
        lambda x, w: lax.conv_general_dilated(x, w, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (array(3, 4, 4, 2), array(3, 1, 2, 3, seed=1)),
        frozenset({"conv_general_dilated"}),
    )

    def per_example(w: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    yield Example(
        "conv_per_example_gradient",
        jax.vmap(weighted(per_example), (None, 0)),
        (array(3, 3, 4, seed=1), array(4, 5, 3)),
        frozenset({"conv_general_dilated"}),
    )
    yield Example(
        "conv_per_example_gradient_grouped",
        jax.vmap(
            weighted(
                lambda w, x: lax.conv_general_dilated(
                    x[None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2
                )
            ),
            (None, 0),
        ),
        (array(3, 2, 4, seed=1), array(3, 5, 4)),
        frozenset({"conv_general_dilated"}),
    )

    groups = np.array([2, 3, 1])
    ragged = frozenset({"ragged_dot_general"})
    yield Example("ragged_dot", lax.ragged_dot, (array(6, 4), array(3, 4, 5), groups), ragged)
    gradient = lambda x, y, g: weighted(lambda x, y: lax.ragged_dot(x, y, g), (0, 1))(x, y)  # noqa: E731
    yield Example("ragged_dot_gradient", gradient, (array(6, 4), array(3, 4, 5), groups), ragged)
    several = (array(2, 6, 4), array(2, 3, 4, 5), np.array([[2, 3, 1], [0, 2, 4]]))
    yield Example("ragged_dot_mapped", jax.vmap(lax.ragged_dot), several, ragged)
    scale = np.abs(array(3, 2, 2, seed=2)).astype(np.float32)
    yield Example(
        "scaled_dot",
        lambda x, y, s, t: jax.lax.scaled_dot(
            x,
            y,
            lhs_scale=s,
            rhs_scale=t,
            dimension_numbers=(((2,), (2,)), ((0,), (0,))),
            preferred_element_type=np.float32,
        ),
        (
            array(3, 2, 64, dtype=jnp.bfloat16),
            array(3, 4, 64, dtype=jnp.bfloat16),
            scale,
            np.abs(array(3, 4, 2)).astype(np.float32),
        ),
        frozenset({"scaled_dot"}),
    )


# Windows -------------------------------------------------------------------------------------------------------------

POOLS = {"sum": (lax.add, 0.0), "max": (lax.max, -np.inf), "min": (lax.min, np.inf)}


def windows() -> Iterator[Example]:
    of = frozenset(
        {
            "reduce_window",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_scatter_add",
            "select_and_gather_add",
        }
    )

    def pool(combine: Any, init: float, size: int, stride: int, padding: str) -> Any:
        return lambda x: lax.reduce_window(x, init, combine, (1, size, 1), (1, stride, 1), padding)

    x = array(3, 6, 2)
    for kind, window in [
        ("sum", (2, 2, "VALID")),
        ("max", (2, 2, "VALID")),
        ("sum", (3, 2, "SAME")),
        ("max", (3, 2, "SAME")),
        ("min", (3, 3, "VALID")),
        ("sum", (6, 1, "VALID")),
        ("max", (6, 2, "VALID")),
    ]:
        fun = pool(*POOLS[kind], *window)
        yield Example(f"{kind}_pool_{window}", weighted(fun), (x,), of)
        if kind == "max":
            tangent = lambda x, t, fun=fun: jax.jvp(fun, (x,), (t,))[1]  # noqa: E731
            yield Example(f"{kind}_pool_tangent_{window}", tangent, (x, array(3, 6, 2, seed=1)), of)
    for window in [(2, 2, "VALID"), (3, 2, "SAME")]:
        fun = pool(lambda a, b: a * b + b, 0.5, *window)
        yield Example(f"any_pool_{window}", fun, (x,), of)
    yield Example("any_pool_overlapping", pool(lambda a, b: a * b, 1.0, 3, 1, "VALID"), (x,), of)
    yield Example("min_pool_overlapping", pool(lax.min, np.inf, 3, 2, "SAME"), (x,), of)
    for name in ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"]:
        fun = getattr(lax, name)
        reverse = name == "cumsum"
        yield Example(name, lambda x, f=fun, r=reverse: f(x, 1, reverse=r), (array(3, 4, 2),), frozenset({name}))


# Indexing ------------------------------------------------------------------------------------------------------------


def indexing() -> Iterator[Example]:
    scatters = {"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}
    of = frozenset({"gather", "dynamic_slice", "dynamic_update_slice"} | scatters)
    x = array(4, 6, 3)
    i = np.array([1, 5, -2, 4])
    far = np.array([[1, 5, 0], [1, 1, 9], [0, -9, 0], [4, 1, 5]])

    def one(name: str, fun: Callable[..., Any], *args: Any) -> Example:
        return Example(name, fun, args, of)

    for mode in ["fill", "clip", "promise_in_bounds"]:
        yield one(f"take_{mode}", lambda x, i, m=mode: x.at[:, i].get(mode=m), x, i)
        yield one(f"put_{mode}", lambda x, i, u, m=mode: x.at[:, i].add(u, mode=m), x, i, array(4, 4, 3))
    yield one("take_filled_with_one", lambda x, i: x.at[i].get(mode="fill", fill_value=1.0), x, i)
    yield one("take_integers", lambda x, i: x.at[i].get(mode="fill"), integers(4, 6), i)
    yield one("take_booleans", lambda x, i: x.at[i].get(mode="clip"), booleans(6, 3), i)
    yield one("take_keys", lambda i: jax.random.split(jax.random.key(0), 6)[i], i)
    for update in ["add", "subtract", "multiply", "min", "max", "set"]:
        put = lambda x, i, u, update=update: getattr(x.at[jnp.arange(4), i], update)(u)  # noqa: E731
        yield one(f"put_{update}", put, x, i, array(4, 3, seed=1))
    yield one("put_function", lambda x, i: x.at[i].apply(jnp.sin), x, i % 4)
    yield one("put_maximum_of_booleans", lambda x, i: x.at[i].max(True), booleans(6, 3), i)
    yield one("put_part", lambda x, u: x.at[..., 1:3].set(u), x, array(4, 6, 2))
    flags = {"unique_indices": True, "indices_are_sorted": True}
    yield one("put_sorted", lambda x, i, u: x.at[i].add(u, **flags), x, np.array([0, 1, 3]), array(3, 6, 3))
    along = lambda x: jnp.take_along_axis(x, far[:, :, None], 1, mode="clip")  # noqa: E731
    yield one("take_along_axis_gradient", weighted(along), x)
    looked_up = jax.vmap(lambda x, i: x[i], (None, 0))
    yield one("embedding_gradient", lambda x, i: weighted(lambda x: looked_up(x, i))(x), x[0], far)
    yield one("one_of_each", jax.vmap(lambda x, i: x[i]), x, i)
    yield one("histogram", lambda i: jnp.zeros((6, 6)).at[i.ravel(), i[::-1].ravel()].add(1.0), far)
    yield one("dynamic_slice_gradient", weighted(lambda x: lax.dynamic_slice(x, (1, 2, 9), (4, 2, 3))), x)
    yield one("dynamic_update_slice", lambda x, u: lax.dynamic_update_slice(x, u, (1, 2, 9)), x, array(4, 1, 3))
    crop = jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 2), (3, 3)))
    yield one("crop_gradient", lambda x, i: weighted(lambda x: crop(x, i))(x), x, i)
    cache = jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u[None], (i, 0)))
    yield one("cache_per_example", cache, x, array(4, 3), i)

    whole_window = np.array([[0, 0], [1, 0], [0, 1], [0, -1], [-1, 0]])
    take = lax.GatherDimensionNumbers(offset_dims=(0, 1), collapsed_slice_dims=(), start_index_map=(0, 1))
    put = lax.ScatterDimensionNumbers(
        update_window_dims=(0, 1), inserted_window_dims=(), scatter_dims_to_operand_dims=(0, 1)
    )
    for mode in ["fill", "clip", "promise_in_bounds"]:
        fun = lambda x, i, m=mode: lax.gather(x, i, take, (4, 3), mode=m)  # noqa: E731
        yield one(f"take_whole_window_{mode}", fun, array(4, 3), whole_window)
        fun = lambda x, i, u, m=mode: lax.scatter_add(x, i, u, put, mode=m)  # noqa: E731
        yield one(f"put_whole_window_{mode}", fun, array(4, 3), whole_window, array(4, 3, 5))


# Order ---------------------------------------------------------------------------------------------------------------


def order() -> Iterator[Example]:
    x = array(4, 3, 5)
    yield Example("sort", lambda x: jnp.sort(x, axis=1), (x,), frozenset({"sort"}))
    yield Example("argsort", lambda x: jnp.argsort(x, axis=0, descending=True), (x,), frozenset({"sort"}))
    pair = lambda x, y: lax.sort((x, y, x), dimension=0, num_keys=2)  # noqa: E731
    yield Example("sort_pairs", pair, (integers(5, 2), array(5, 2)), frozenset({"sort"}))
    yield Example("top_k", lambda x: lax.top_k(x, 2), (x,), frozenset({"top_k"}))
    yield Example("top_k_gradient", weighted(lambda x: lax.top_k(x, 2)[0]), (x,), frozenset({"top_k", "gather"}))
    yield Example("top_k_of_axis", lambda x: lax.top_k(x, 2, axis=1), (x,), frozenset({"top_k"}))
    approximately = lambda x: lax.approx_max_k(x, 2, reduction_dimension=1)  # noqa: E731
    yield Example("approx_max_k", approximately, (x,), frozenset({"approx_top_k"}))


# Random --------------------------------------------------------------------------------------------------------------


def random() -> Iterator[Example]:
    names = ("bits", "clone", "fold_in", "gamma", "seed", "split", "unwrap", "wrap")
    of = frozenset(f"random_{name}" for name in names)

    def one(name: str, impl: str, fun: Callable[..., Any], *args: Any) -> Example:
        return Example(f"{name}_{impl}", lambda *xs: fun(jax.random.key(1, impl=impl), *xs), args, of)

    def many(key: Any, n: int) -> Any:
        """Keys that no other equation than the one that makes them has touched."""
        words = jax.random.key_data(key)
        data = words + jnp.arange(n, dtype=jnp.uint32)[:, None]
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))

    for impl in ["threefry2x32", "rbg", "unsafe_rbg", "threefry4x32", "philox2x32", "philox4x32"]:
        yield one("bits_per_key", impl, lambda k: jax.vmap(lambda k: jax.random.bits(k, (3,)))(many(k, 4)))
        if impl in ("threefry2x32", "rbg", "unsafe_rbg"):
            yield one("split_per_key", impl, lambda k: jax.vmap(lambda k: jax.random.split(k, 3))(many(k, 4)))
            yield one("fold_in_keys", impl, lambda k: jax.vmap(jax.random.fold_in, (0, None))(many(k, 4), 7))
            yield one("fold_in_data", impl, lambda k: jax.vmap(jax.random.fold_in, (None, 0))(k, jnp.arange(3)))
    table = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
    fry = "threefry2x32"
    yield one("fold_in_table", fry, lambda k: table(many(k, 4), jnp.arange(3)))
    yield one("clone", fry, lambda k: jax.random.clone(many(k, 4)))
    yield one("seeds", fry, lambda k, s: jax.vmap(jax.random.key)(s), np.arange(4))
    yield one("draw", fry, lambda k: jax.random.bits(k, (3, 2)))
    yield one("split_2d", fry, lambda k: jax.random.split(k, (3, 2)))
    for width in ["uint8", "uint16", "uint64"]:
        yield one(f"bits_{width}", fry, lambda k, w=width: jax.random.bits(k, (5,), w))
    yield one("gamma", fry, lambda k: jax.vmap(lambda k: jax.random.gamma(k, jnp.ones(2)))(many(k, 2)))
    yield Example(
        "generator",
        lambda k: lax.rng_bit_generator(k, (5,)),
        (integers(4, dtype=np.uint32),),
        frozenset({"rng_bit_generator"}),
    )
    yield Example("rng_uniform", lambda: lax.rng_uniform(1.0, 1.0, (3,)), (), frozenset({"rng_uniform"}))


# Linear algebra ------------------------------------------------------------------------------------------------------


def linear_algebra() -> Iterator[Example]:
    a, tall = array(3, 4, 4), array(3, 4, 2)
    spd = a @ a.swapaxes(1, 2) + 4 * np.eye(4)

    def one(name: str, fun: Callable[..., Any], *args: Any) -> Example:
        return Example(name, fun, args, frozenset({name.split(" ")[0]}))

    yield one("cholesky", ll.cholesky, spd)
    yield one("cholesky_update", ll.cholesky_update, np.eye(4), array(4))
    yield one("eig", lambda a: ll.eig(a, compute_left_eigenvectors=False), a)
    yield one("eigh", ll.eigh, spd)
    yield one("geqrf", lambda a: jnp.linalg.qr(a, "raw"), tall)
    yield one("hessenberg", ll.hessenberg, a)
    yield one("householder_product", ll.householder_product, tall, tall[:, 0])
    yield one("lu", ll.lu, tall)
    yield one(
        "lu_pivots_to_permutation",
        lambda p: ll.lu_pivots_to_permutation(p, 4),
        integers(3, 3, low=0, high=4, dtype=np.int32),
    )
    yield one("ormqr", lambda a, t, c: ll.ormqr(a, t, c), tall, tall[:, 0], a)
    yield one("qr", lambda a: ll.qr(a, full_matrices=False), tall)
    yield one("qr pivoting", lambda a: ll.qr(a, pivoting=True), tall)
    yield one("schur", ll.schur, a)
    yield one("svd", lambda a: ll.svd(a, full_matrices=False), tall)
    yield one("svd values", lambda a: ll.svd(a, compute_uv=False), tall)
    yield one("symmetric_product", lambda a, c: ll.symmetric_product(a, c, alpha=2.0, beta=1.0), tall, spd)
    yield one("triangular_solve", lambda a, b: ll.triangular_solve(a, b, left_side=True, lower=True), spd, tall)
    right = tall.swapaxes(1, 2).copy()
    yield one("triangular_solve right", lambda a, b: ll.triangular_solve(a, b, left_side=False), spd, right)
    yield one("tridiagonal", ll.tridiagonal, spd)
    yield one("tridiagonal_solve", ll.tridiagonal_solve, a[0, :3], a[1, :3] + 5, a[2, :3], tall)
    yield one("fft", lambda x: lax.fft(x, lax.FftType.FFT, (4,)), a + 1j)
    yield one("fft real", lambda x: jnp.fft.rfft2(x), a)
    yield one("fft inverse", lambda x: jnp.fft.irfft(x), a + 1j)


# Structure -----------------------------------------------------------------------------------------------------------


def structure() -> Iterator[Example]:
    x, y = array(4, 3), array(2, 5)
    device = lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0])  # noqa: E731
    yield Example("barrier", lambda x, y: lax.optimization_barrier((x, y)), (x, y), frozenset({"optimization_barrier"}))
    yield Example("device_put", jax.device_put, (x,), frozenset({"device_put"}))
    yield Example("device_put_on", lambda x: jax.device_put(x, device()), (x,), frozenset({"device_put"}))
    constrained = frozenset({"sharding_constraint"})
    yield Example("constraint", lambda x: lax.with_sharding_constraint(x, device()), (x,), constrained)
    yield Example("empty", lambda: lax.empty((4, 3), np.float64), (), frozenset({"empty"}))


# Sparse arrays -------------------------------------------------------------------------------------------------------


def sparse_arrays() -> Iterator[Example]:
    """Products with a batch of matrices ``[3, 4, 5]`` of blocks ``[2]``; each stores six, one of them nowhere."""
    shape, places = (3, 4, 5, 2), np.stack([integers(3, 6, low=0, high=4), integers(3, 6, seed=1, low=0, high=5)], -1)
    places[:, 5] = shape[1:3]
    products = {
        "rows": ((([2], [0]), ([], [])), array(5, 7)),
        "columns": ((([1], [1]), ([], [])), array(7, 4)),
        "batch": ((([2], [2]), ([0], [1])), array(7, 3, 5)),
        "summed batch": ((([0, 2], [0, 1]), ([], [])), array(3, 5)),
    }
    for name, (numbers, dense) in products.items():

        def by_coordinates(data: Any, indices: Any, dense: Any, numbers: Any = numbers) -> Any:
            return sparse.bcoo_dot_general(sparse.BCOO((data, indices), shape=shape), dense, dimension_numbers=numbers)

        args = array(3, 6, 2), places, dense
        yield Example(f"bcoo_dot_general {name}", by_coordinates, args, frozenset({"bcoo_dot_general"}))

        def by_rows(data: Any, columns: Any, starts: Any, dense: Any, numbers: Any = numbers) -> Any:
            rows = sparse.BCSR((data, columns, starts), shape=shape)
            return sparse.bcsr_dot_general(rows, dense, dimension_numbers=numbers)

        starts = np.broadcast_to(np.array([0, 2, 2, 5, 6]), (3, 5))
        args = array(3, 6, 2), places[..., 1], starts, dense
        yield Example(f"bcsr_dot_general {name}", by_rows, args, frozenset({"bcsr_dot_general"}))

    def shared(data: Any, indices: Any, dense: Any) -> Any:
        numbers = (([1], [1]), ([0], [0]))
        return sparse.bcoo_dot_general(sparse.BCOO((data, indices), shape=(3, 5)), dense, dimension_numbers=numbers)

    args = array(3, 4), integers(1, 4, 1, low=0, high=5), array(3, 5, 2)
    yield Example("bcoo_dot_general of equal places", shared, args, frozenset({"bcoo_dot_general"}))


EXAMPLES = [
    example
    for family in (
        elementwise,
        shapes,
        reductions,
        contractions,
        windows,
        indexing,
        order,
        random,
        linear_algebra,
        structure,
        sparse_arrays,
    )
    for example in family()
]

EQUINOX = "of Equinox; tests/test_equinox.py compares steps that use it"
KERNELS = "split as its user says, or evaluated on GPUs only; tests/test_kernels.py cuts it and compares steps"
HOST = "described where jax.vmap made it only; tests/test_effects.py compares steps that use it"

UNREACHABLE = {
    "geqp3": "inside the lowering of qr",
    "philox2x32": "inside the lowering of random_bits",
    "philox4x32": "inside the lowering of random_bits",
    "threefry4x32": "inside the lowering of random_bits",
    "iota_2x32_shape": "inside the lowering of random_bits",
    "stochastic_round": "on TPU only",
    "reciprocal": "in Pallas kernels only",
    "pallas_call": "of Pallas; tests/operators/test_pallas.py",
    "platform_index": "no factors; the lowering chooses it",
    "psum_invariant": "inside shard_map with checks of variance; over positional axes like psum",
    "postponed": "in programs that vnode rewrites only; tests/test_late.py",
    "aside": "in programs that vnode rewrites only; tests/partition/test_away.py",
    "reshard": "needs a mesh with explicit axes",
    "layout_constraint": "needs a device layout",
    "tie": "made by jax's own optimizers of programs only",
    "empty2": "made by the transposition of a scan; a scalar",
    "nonbatchable": EQUINOX,
    "nondifferentiable_backward": EQUINOX,
    "nontraceable": EQUINOX,
    "unvmap_all": EQUINOX,
    "unvmap_any": EQUINOX,
    "unvmap_max": EQUINOX,
    "mesh_cast": "needs a mesh with explicit axes; tests/test_sharding.py compares steps that use it",
    "call_exported": "split where its program keeps examples apart; test_exported.py and tests/test_kernels.py",
    "custom_partitioning": KERNELS,
    "dot_product_attention_bwd_wrapper": KERNELS,
    "dot_product_attention_fwd_wrapper": KERNELS,
    "ffi_call": HOST,
    "pure_callback": HOST,
}
"""Described primitives that no public function traces to on one CPU device, with where they do occur."""

ONE_VERSION = {"log2", "one_minus_square", "polynomial", "shard_alike"}
"""Described primitives that only some of the supported versions of jax have."""
