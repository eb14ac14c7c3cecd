"""How often loops turn, as read off their jaxprs, against the loops run.

Knows `jax.lax.while_loop` and what conditions people write. Must not know how the number is found.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.budget import examples
from vnode.operators.control_flow import region_of

pytestmark = pytest.mark.quickly


def written(loop: Callable[..., Any], *args: Any) -> int | None:
    """The number of turns that is read off the only loop of a program."""
    (eqn,) = (eqn for eqn in jax.make_jaxpr(loop)(*args).jaxpr.eqns if eqn.primitive.name == "while")
    region = region_of(eqn)
    assert region is not None
    return region.trip_count


COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}

ADDITIONS = {
    "i + s": lambda i, s: i + s,
    "s + i": lambda i, s: s + i,
    "i - -s": lambda i, s: i - (-s),
    "typed": lambda i, s: i + np.asarray(s, i.dtype)[()],
}

ENDLESS = 100


def counted(dtype: Any, compare: Callable[..., Any], first: int, step: int, limit: int) -> bool:
    """Whether a count passes its limit before it reaches the end of its type (and would begin anew at the other)."""
    i, info = first, np.iinfo(dtype)
    for _ in range(ENDLESS):
        if not compare(i, limit):
            return True
        i += step
        if not info.min <= i <= info.max:
            return False
    return False


@st.composite
def counts(draw: Any) -> tuple[Any, str, str, int, int, int]:
    """A type, a comparison, an addition, the first number, the step, and a limit not far from there."""
    dtype = draw(st.sampled_from([np.int32, np.int8, np.uint8, np.uint32]))
    info = np.iinfo(dtype)
    addition = draw(st.sampled_from(sorted(ADDITIONS)))
    first = draw(st.sampled_from([info.min, 0, info.max])) + draw(st.integers(-30, 30))
    first = min(max(first, info.min), info.max)
    limit = min(max(first + draw(st.integers(-60, 60)), info.min), info.max)
    signs = (-1, 1) if info.min else (-1,) if addition == "i - -s" else (1,)
    return (
        dtype,
        draw(st.sampled_from(sorted(COMPARISONS))),
        addition,
        first,
        draw(st.integers(0, 5)) * draw(st.sampled_from(signs)),
        limit,
    )


@settings(max_examples=examples(300))
@given(counts(), st.booleans(), st.sampled_from(["written", "carried", "closed over"]))
def test_a_count_that_is_written_down(case, mirrored, where):
    dtype, name, addition, first, step, limit = case
    compare, add = COMPARISONS[name], ADDITIONS[addition]

    def loop(start: Any, limit: Any, x: Any) -> Any:
        """Besides the count it counts its turns."""

        def condition(carry: Any) -> Any:
            i, _, _, carried = carry
            end = carried if where == "carried" else limit
            return compare(end, i) if mirrored else compare(i, end)

        def body(carry: Any) -> Any:
            i, turns, x, carried = carry
            return add(i, step), turns + 1, x * 0.5, carried

        return lax.while_loop(condition, body, (start, jnp.int32(0), x, limit))

    one, end = np.asarray(first, dtype)[()], np.asarray(limit, dtype)[()]
    known = written(lambda x: loop(one, end, x), 1.0)

    def compared(i: Any, end: Any) -> bool:
        return compare(end, i) if mirrored else compare(i, end)

    if not counted(dtype, compared, first, step, limit):
        assert known is None
    else:
        assert known == int(jax.jit(loop)(one, end, 1.0)[1])


@given(st.integers(-3, 12), st.integers(-3, 12))
def test_fori_loop(low, high):
    def loop(low: Any, high: Any) -> Any:
        return lax.fori_loop(low, jnp.asarray(high), lambda i, x: x + 1, 0)

    assert written(lambda: loop(low, high)) == int(loop(low, high))


NOT_COUNTED = {
    "the limit is an argument": lambda n: lax.while_loop(lambda i: i < n, lambda i: i + 1, 0),
    "it begins at an argument": lambda n: lax.while_loop(lambda i: i < 7, lambda i: i + 1, n),
    "the step is an argument": lambda n: lax.while_loop(lambda i: i < 7, lambda i: i + n, 0),
    "it doubles": lambda n: lax.while_loop(lambda i: i < 7, lambda i: i + i, 1),
    "it is subtracted": lambda n: lax.while_loop(lambda i: i < 7, lambda i: 1 - i, 1),
    "another is counted": lambda n: lax.while_loop(lambda c: c[0] < 7, lambda c: (c[1] + 1, c[0]), (0, 1)),
    "the limit moves, too": lambda n: lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 2, c[1] + 1), (0, 5)),
    "it is no integer": lambda n: lax.while_loop(lambda i: i < 7.0, lambda i: i + 1.0, 0.0),
    "two conditions": lambda n: lax.while_loop(lambda i: (i < 7) & (i < n), lambda i: i + 1, 0),
    "unequal": lambda n: lax.while_loop(lambda i: i != 7, lambda i: i + 1, 0),
    "it is changed first": lambda n: lax.while_loop(lambda i: i * i < 7, lambda i: i + 1, 0),
    "it stays": lambda n: lax.while_loop(lambda i: i < 7, lambda i: i, n),
    "it counts from another": lambda n: lax.while_loop(lambda c: c[0] < 7, lambda c: (c[1] + 1, c[1] + 1), (0, 0)),
    "it adds only sometimes": lambda n: lax.while_loop(lambda i: i < 7, lambda i: i + jnp.int32(i % 2 == 0), 0),
}


@pytest.mark.parametrize("case", NOT_COUNTED)
def test_a_loop_that_does_not_count(case):
    assert written(NOT_COUNTED[case], 3) is None


def test_a_condition_that_is_no_comparison():
    assert written(lambda done: lax.while_loop(lambda c: c[0], lambda c: (c[1] > 2, c[1] + 1), (done, 0)), True) is None


def test_loops_that_stop_element_by_element():
    """Each counts for itself: how often all of them turn is not written down."""
    loop = lambda n: lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)  # noqa: E731
    assert written(jax.vmap(loop), np.arange(3)) is None
