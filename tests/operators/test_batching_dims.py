"""Indexing that writes the batch into its indices, rewritten with batching dimensions.

The reference is the program as traced: the rewritten one must type-check, give the same values, and no longer look up
the operand's batch dimension.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, check_jaxpr, jaxpr_as_fun

from vnode.operators import describe
from vnode.operators.indexing import SCATTERS, with_batching_dims

pytestmark = pytest.mark.quickly

B, T, D = 4, 3, 5
X = np.random.RandomState(0).randn(B, T, D).astype(np.float32)
CLASS = np.array([1, 0, 2, -1])
TOKEN = np.array([[0, 4, -2], [1, 1, 1], [3, 0, 9], [2, 4, 0]])


def rewrite(fun, *args):
    """`fun` traced and rewritten: the new closed jaxpr, and the gathers and scatters in it."""
    closed = jax.make_jaxpr(fun)(*args)
    definitions = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    equations = []
    rewritten = 0
    for eqn in closed.jaxpr.eqns:
        new = with_batching_dims(eqn, definitions.get, constants.get)
        rewritten += new is not None
        equations += [eqn] if new is None else new
    jaxpr = closed.jaxpr.replace(eqns=equations)
    check_jaxpr(jaxpr)
    lookups = [eqn for eqn in equations if eqn.primitive.name == "gather" or eqn.primitive.name in SCATTERS]
    return ClosedJaxpr(jaxpr, closed.consts), lookups, rewritten


def is_whole(eqn, axis):
    """Whether a dimension of the operand of a gather or scatter is looked up in."""
    description = describe(eqn)
    return any(factor in description.whole for factor in description.operands[0][axis])


def weighted(fun):
    """A scalar with a different cotangent for every element of ``fun(x, *rest)``, differentiated by ``x``."""

    def loss(x, *rest):
        y = fun(x, *rest)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()

    return jax.grad(loss)


def by_rows(x, i):
    return x[jnp.arange(B), i]


def by_rows_and_columns(x, i):
    return x[jnp.arange(B)[:, None], jnp.arange(T), i]


def by_rows_of_a_matrix(x, i):
    return x[jnp.arange(B)[:, None], i]


def batch_in_the_middle(x, i):
    return jnp.moveaxis(x, 0, 1)[i, jnp.arange(B)]


def batch_last(x, i):
    return jnp.moveaxis(x, 0, 2)[i, :, jnp.arange(B)]


def two_lookups(x, i):
    return x[jnp.arange(B), i, i + 1]


def numpy_rows(x, i):
    return x[np.arange(B), i]


def shifted_and_back(x, i):
    return x[jnp.arange(1, B + 1) - 1, i]


def rows_only(x, i):
    return x[jnp.arange(B)] + i[:, None, None]


def clipped(x, i):
    return x.at[jnp.arange(B), i].get(mode="clip")


def filled(x, i):
    return x.at[jnp.arange(B), i].get(mode="fill", fill_value=0)


READS = [
    (by_rows, CLASS, [0]),
    (by_rows_and_columns, TOKEN, [0, 1]),
    (by_rows_of_a_matrix, TOKEN, [0]),
    (batch_in_the_middle, CLASS, [1]),
    (batch_last, CLASS, [2]),
    (two_lookups, CLASS, [0]),
    (numpy_rows, CLASS, [0]),
    (shifted_and_back, CLASS, [0]),
    (rows_only, CLASS, [0]),
    (clipped, CLASS, [0]),
    (filled, CLASS, [0]),
]


@pytest.mark.parametrize(("fun", "index", "axes"), READS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("gradient", [False, True], ids=["value", "gradient"])
def test_reading(fun, index, axes, gradient):
    fun = weighted(fun) if gradient else fun
    closed, lookups, rewritten = rewrite(fun, X, index)
    assert rewritten == len(lookups) == 1 + gradient
    for eqn in lookups:
        assert not any(is_whole(eqn, axis) for axis in axes)
    want = jax.jit(fun)(X, index)
    got = jaxpr_as_fun(closed)(X, jnp.asarray(index))[0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("update", ["set", "add", "multiply", "min", "max", "subtract"])
def test_writing(update):
    def fun(x, i, u):
        return getattr(x.at[jnp.arange(B), i], update)(u)

    u = X[:, 0] * 3
    closed, (eqn,), rewritten = rewrite(fun, X, CLASS, u)
    assert rewritten == 1 and not is_whole(eqn, 0)
    np.testing.assert_array_equal(jaxpr_as_fun(closed)(X, CLASS, u)[0], jax.jit(fun)(X, CLASS, u))


def test_writing_a_cache():
    def fun(cache, position, key):
        return cache.at[jnp.arange(B), :, position].set(key)

    closed, (eqn,), rewritten = rewrite(fun, X, CLASS, X[:, :, 0] * 3)
    assert rewritten == 1 and not is_whole(eqn, 0)
    args = (X, CLASS, X[:, :, 0] * 3)
    np.testing.assert_array_equal(jaxpr_as_fun(closed)(*args)[0], jax.jit(fun)(*args))


@pytest.mark.parametrize("batch", [1, 3])
def test_one_example_or_one_row(batch):
    """Dimensions of size one: every column is a position then."""
    x, i = X[:batch, :1], np.zeros((batch, 1), int)

    def fun(x, i):
        return x[jnp.arange(batch)[:, None], jnp.arange(1), i]

    closed, (eqn,), rewritten = rewrite(fun, x, i)
    assert rewritten == 1 and not is_whole(eqn, 0)
    np.testing.assert_array_equal(jaxpr_as_fun(closed)(x, i)[0], jax.jit(fun)(x, i))


NOT_POSITIONS = {
    "reversed": lambda x, i: x[jnp.arange(B)[::-1], i],
    "fewer rows than the operand": lambda x, i: x[jnp.arange(B - 1), i[:-1]],
    "rolled": lambda x, i: x[(jnp.arange(B) + 1) % B, i],
    "from the end": lambda x, i: x[jnp.arange(B) - B + 1, i],
    "an argument": lambda x, i: x[i, i % T],
    "the same row": lambda x, i: x[jnp.zeros(B, int), i],
    "every other": lambda x, i: x[jnp.arange(0, B, 2), i[::2]],
}


@pytest.mark.parametrize("case", NOT_POSITIONS)
def test_what_is_no_position_stays(case):
    fun = NOT_POSITIONS[case]
    _, lookups, rewritten = rewrite(fun, X, CLASS % T)
    assert rewritten == 0
    assert all(is_whole(eqn, 0) for eqn in lookups)


def test_positions_of_a_large_batch_are_not_built():
    """The index array of a 2-D lookup is never folded at full size."""
    rows, columns = 1 << 17, 1 << 10

    def fun(x, i):
        return x[jnp.arange(rows)[:, None], jnp.arange(columns), i]

    x = jax.ShapeDtypeStruct((rows, columns, 2), jnp.float32)
    i = jax.ShapeDtypeStruct((rows, columns), jnp.int32)
    _, (eqn,), rewritten = rewrite(fun, x, i)
    assert rewritten == 1 and not is_whole(eqn, 0) and not is_whole(eqn, 1)


def test_indices_that_come_from_a_deep_program():
    """What the lookup depends on is not followed through thousands of equations."""

    def fun(x, i):
        y = x[:, 0, 0] * 0
        for _ in range(3000):
            y = y + 1e-9
        return x[jnp.arange(B), y.astype(int) + i % T]

    _, (eqn,), rewritten = rewrite(fun, X, CLASS)
    assert rewritten == 1 and not is_whole(eqn, 0)
