"""Runs a program as it is and in another way, and compares.

Knows what counts as equal: structure, shapes, dtypes, integers, booleans and the places of
NaN and infinity exactly; floats to rounding. Must not know how programs are made, nor in which ways they run.

Where the two differ, the reference itself is asked how steady it is: it is evaluated again with rounding noise on
every result that rounds. An output that moves with that noise by itself (a comparison of two sums that are equal but
for rounding) proves nothing; a program that differs only there is reported as unsteady instead of wrong. Moving,
comparing and selecting elements gets no noise: a value that is compared with its own maximum must find it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

import vnode
from tests.random_programs.outer import OUTER
from tests.random_programs.program import Program
from tests.random_programs.training import trained, twice
from tests.random_programs.ways import WAYS

RELATIVE = 1e-9
"""Of the largest magnitude in an output; everything is float64."""

ABSOLUTE = 1e-11
"""For outputs that are sums which cancel."""

HALF = 0.06
"""For programs with 16-bit floats in them, relative to the largest magnitude."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program went.

    Attributes:
      status: "equal"; "refused" with a `vnode.VnodeError`; "wrong"; "error" for any other exception; "unsteady";
        "invalid" if the un-virtualized program itself fails.
      head: the failure's class, the same for failures with the same cause as far as can be told.
      detail: what there is to read.
    """

    status: str
    head: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.status in ("wrong", "error")


def check(program: Program, way: str = "nodes") -> Outcome:
    """Runs `program` as it is, and in another way.

    Args:
      program: it; on what it runs, and within which transformation, it says for the way "nodes" alone.
      way: one of `ways.WAYS`.

    Returns:
      The outcome; exceptions other than KeyboardInterrupt become one too.
    """
    if way != "nodes":
        program = dataclasses.replace(program, outer="same", counts=None)
    step, args, around = program.step(), program.values(), OUTER[program.outer]
    if WAYS[way].trains:
        step, around = trained(program, step), functools.partial(twice, program)
    reference = around(step)
    try:
        expected = jax.jit(reference)(*args)
    except Exception as error:  # whatever jax says of a program that it refuses
        return Outcome("invalid", head_of(error), str(error))
    try:
        actual = around(WAYS[way].of(program, step))(*args)
        jax.block_until_ready(actual)
    except vnode.VnodeError as error:
        return Outcome("refused", head_of(error), str(error))
    except Exception as error:  # that is the finding
        return Outcome("error", head_of(error), "".join(traceback.format_exception(error)))
    found = differences(expected, actual, is_half(program))
    if not found:
        return Outcome("equal")
    moving = unsteady(program, reference, args, expected)
    difference = next((text for where, text in found.items() if where not in moving), "")
    if not difference:
        return Outcome("unsteady", "unsteady", next(iter(found.values())))
    return Outcome("wrong", "wrong: " + re.sub(r"'\w+'|[\d.e+-]+", "#", difference), difference)


def is_half(program: Program) -> bool:
    return "float16" in program.step_source() or any("float16" in a.dtype for a in program.arguments)  # or bfloat16


def differences(expected: Any, actual: Any, half: bool = False, slack: float = 1.0) -> dict[str, str]:
    """What differs, by output."""
    left, right = jax.tree.structure(expected), jax.tree.structure(actual)
    if left != right:
        return {"structure": f"structure: expected {left}, got {right}"}
    found = {
        jax.tree_util.keystr(path): difference(e, a, half, slack)
        for (path, e), a in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True)
    }
    return {where: f"{where}: {text}" for where, text in found.items() if text}


def difference(e: Any, a: Any, half: bool, slack: float) -> str:
    """How an output differs from what is expected; an empty string if it does not."""
    if (e.shape, e.dtype) != (a.shape, a.dtype):
        return f"expected {e.dtype}{e.shape}, got {a.dtype}{a.shape}"
    exact = not jnp.issubdtype(e.dtype, jnp.floating)
    e, a = np.asarray(e), np.asarray(a)
    if exact:
        return "" if np.array_equal(e, a) else f"integers differ: expected {e.tolist()}, got {a.tolist()}"
    e, a = e.astype(np.float64), a.astype(np.float64)
    if not np.array_equal(np.isnan(e), np.isnan(a)):
        return f"NaN in other places: expected {e.tolist()}, got {a.tolist()}"
    infinite = np.isinf(e) | np.isinf(a)
    if not np.array_equal(e[infinite], a[infinite]):
        return f"infinity in other places: expected {e.tolist()}, got {a.tolist()}"
    finite = np.isfinite(e)
    e, a = e[finite], a[finite]
    scale = float(np.abs(e).max(initial=0.0))
    allowed = slack * (HALF * scale + 1e-3 if half else RELATIVE * scale + ABSOLUTE)
    worst = float(np.abs(e - a).max(initial=0.0))
    if worst > allowed:
        return f"numbers differ by {worst:.3g} of {scale:.3g}: expected {e.tolist()}, got {a.tolist()}"
    return ""


def head_of(error: BaseException) -> str:
    """The type, the innermost frame inside vnode, and the first line without what varies."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        parts = frame.filename.replace("\\", "/").split("/")
        if "vnode" in parts:
            place = f"{'/'.join(parts[parts.index('vnode') + 1 :])}:{frame.name}"
    text = (str(error) or "no message").splitlines()[0]
    text = re.sub(r"\b[a-z]?\d+(\.\d+)?\b|'[\w.]*\d[\w.]*'|0x[0-9a-f]+", "#", text)
    text = re.sub(r"#(, ?#)*,?", "#", text)
    return f"{type(error).__name__} at {place}: {text[:160]}"


# How steady the reference is.


EXACT = frozenset(
    [
        "abs",
        "and",
        "argmax",
        "argmin",
        "broadcast_in_dim",
        "clamp",
        "concatenate",
        "convert_element_type",
        "copy",
        "cummax",
        "cummin",
        "dynamic_slice",
        "dynamic_update_slice",
        "eq",
        "floor",
        "gather",
        "ge",
        "gt",
        "iota",
        "is_finite",
        "le",
        "lt",
        "max",
        "min",
        "ne",
        "neg",
        "not",
        "or",
        "pad",
        "random_bits",
        "random_fold_in",
        "random_seed",
        "random_split",
        "random_unwrap",
        "random_wrap",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_precision",
        "reduce_xor",
        "reshape",
        "rev",
        "round",
        "scatter",
        "select_and_gather_add",
        "select_n",
        "sign",
        "slice",
        "sort",
        "split",
        "squeeze",
        "stop_gradient",
        "threefry2x32",
        "top_k",
        "transpose",
        "xor",
    ]
)
"""Primitives whose results are not rounded."""


SUMS = frozenset(["conv_general_dilated", "cumsum", "dot_general", "reduce_sum", "reduce_window_sum"])
"""Primitives that add products of their operands' elements."""


def inner_jaxpr(params: dict[str, Any]) -> tuple[Jaxpr, Sequence[Any]] | None:
    """The body of a call, where the equation is one."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = params.get(name)
        if isinstance(body, ClosedJaxpr):
            return body.jaxpr, body.consts
        if isinstance(body, Jaxpr):
            return body, ()
    return None


CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}


def noisy(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], rng: np.random.Generator, noise: float
) -> list[Any]:
    """Evaluates a jaxpr with `noise`, relative to what was added, on every rounded result."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    for eqn in jaxpr.eqns:
        operands = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
        inner = inner_jaxpr(eqn.params) if eqn.primitive.name in CALLS else None
        if eqn.primitive.name == "cond":
            branches = eqn.params["branches"]
            chosen = branches[min(max(int(operands[0]), 0), len(branches) - 1)]
            inner, operands = (chosen.jaxpr, chosen.consts), operands[1:]
        if inner is not None:
            results = noisy(*inner, operands, rng, noise)
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
            if eqn.primitive.name in SUMS:  # as far off as what they add, also where that cancels
                sizes = eqn.primitive.bind(*map(magnitude, operands), **eqn.params)
                results = [perturbed(r, rng, noise, size) for r, size in zip(results, [sizes], strict=True)]
            elif eqn.primitive.name not in EXACT:
                results = [perturbed(r, rng, noise, r) for r in results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]


def magnitude(operand: Any) -> Any:
    return jnp.abs(operand) if jnp.issubdtype(jnp.result_type(operand), jnp.floating) else operand


def perturbed(value: Any, rng: np.random.Generator, noise: float, size: Any) -> Any:
    """A value with noise relative to `size`."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    off = noise * rng.uniform(-1, 1, value.shape)
    return (jnp.asarray(value, jnp.float64) + jnp.asarray(size, jnp.float64) * off).astype(value.dtype)


def unsteady(program: Program, reference: Callable[..., Any], args: tuple[Any, ...], expected: Any) -> set[str]:
    """The outputs of the un-virtualized program that do not keep their value under rounding noise."""
    half = is_half(program)
    rng = np.random.default_rng(program.seed)
    closed = jax.make_jaxpr(reference)(*args)
    moving: set[str] = set()
    for noise in [2.0**-8] * 6 if half else [1e-15, 1e-14, 1e-14, 1e-13, 1e-13]:
        values = noisy(closed.jaxpr, closed.consts, jax.tree.leaves(args), rng, noise)
        again = jax.tree.unflatten(jax.tree.structure(expected), values)
        moving |= differences(expected, again, half, slack=0.3).keys()
    return moving


if __name__ == "__main__":
    sys.exit("run python -m tests.random_programs")
