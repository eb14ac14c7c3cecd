"""Linear algebra and Fourier transforms of stacks of matrices or vectors.

Knows the number of trailing dimensions of each operand that belong to one problem. The leading ones number independent
problems; one problem is not split. Must not know nodes or devices, beyond the platform.

On CPUs, jaxlib calls LAPACK for a stack of problems in a thread pool, and waits. XLA runs parts of a program in that
pool, too. If all its threads wait in such calls, as in loops of several devices on few cores, nobody solves the
problems, and the program hangs. A stack of one is solved in the calling thread. So stacks are split there: XLA then
runs the calls concurrently, as far as it has threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn

from vnode.operators.description import Factors, OperatorDescription, Positions, Sizes, Work
from vnode.operators.registry import rule
from vnode.operators.splits import FREE, WHOLE

CORE: dict[str, tuple[int, ...]] = {
    "cholesky": (2,),
    "cholesky_update": (2, 1),
    "eig": (2,),
    "eigh": (2,),
    "geqp3": (2, 1),
    "geqrf": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu": (2,),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "symmetric_product": (2, 2),
    "triangular_solve": (2, 2),
    "tridiagonal": (2,),
    "tridiagonal_solve": (1, 1, 1, 2),
}
"""For each primitive the dimensions of one problem in every operand."""

LINEAR = {"triangular_solve": 1, "tridiagonal_solve": 3}
"""The operand in which a primitive is linear: a solver's right-hand side."""

TOGETHER = 8
"""The most problems of a stack that are unrolled to calls; more run in a loop."""


def solve_separately(
    description: OperatorDescription, eqn: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """Solves a stack of problems with one call each."""
    primitive, params = eqn.primitive, eqn.primitive.get_bind_params(eqn.params)
    leading = jnp.ndim(operands[0]) - CORE[primitive.name][0]
    stack = jnp.shape(operands[0])[:leading]
    count = math.prod(stack)

    def solve(parts: Sequence[Any]) -> list[Any]:
        results = primitive.bind(*parts, **params)
        return list(results) if primitive.multiple_results else [results]

    if count < 2:
        return solve(operands)
    group = max(n for n in range(1, TOGETHER + 1) if count % n == 0)

    def some(parts: list[jax.Array]) -> list[jax.Array]:
        solved = [solve([part[i : i + 1] for part in parts]) for i in range(group)]
        return [jnp.concatenate(column) for column in zip(*solved, strict=True)]

    groups = [jnp.reshape(x, (count // group, group, *jnp.shape(x)[leading:])) for x in operands]
    results = [x[None] for x in some([g[0] for g in groups])] if count == group else lax.map(some, groups)
    return [x.reshape(*stack, *x.shape[2:]) for x in results]


@rule(*CORE)
def stacked(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    name = eqn.primitive.name
    leading = len(eqn.invars[0].aval.shape) - CORE[name][0]
    stack = f.dims(eqn.invars[0].aval.shape[:leading])
    operands = [stack + f.dims(atom.aval.shape[leading:], WHOLE) for atom in eqn.invars]
    if name in LINEAR:  # the solution has the shape of the right-hand sides, which are independent too
        results = [operands[LINEAR[name]]]
        f.change(*results[0][-1 if eqn.params.get("left_side", True) else -2], split=FREE)
    else:
        results = [stack + f.dims(atom.aval.shape[leading:], WHOLE) for atom in eqn.outvars]
    first = {factor for dim in operands[0] for factor in dim}
    f.change(*(k for k in range(len(f.all)) if k not in first and f.split(k) is WHOLE), counted=False)
    core = eqn.invars[0].aval.shape[leading:]
    return OperatorDescription(
        factors=f.all,
        operands=tuple(operands),
        results=tuple(results),
        linear=(frozenset({LINEAR[name]}),) if name in LINEAR else (),
        work=Work(max(1, *core) if len(core) == 2 and name not in LINEAR else 1),
        replaced_on={"cpu": solve_separately},
    )


@rule("fft")
def fft(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    lengths = eqn.params["fft_lengths"]
    stack = f.dims(eqn.invars[0].aval.shape[: -len(lengths)] if lengths else eqn.invars[0].aval.shape)
    before = f.dims(eqn.invars[0].aval.shape[len(stack) :], WHOLE)
    after = f.dims(eqn.outvars[0].aval.shape[len(stack) :], WHOLE)
    f.change(*(factor for dim in after for factor in dim), counted=False)
    return OperatorDescription(
        factors=f.all,
        operands=(stack + before,),
        results=(stack + after,),
        linear=(frozenset({0}),),
        work=Work(5 * max(1, math.prod(lengths).bit_length() - 1)),
        replaced_on={"cpu": fft_in_rows},
    )


def fft_in_rows(
    d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """A transform in row-major layout: jaxlib's for CPUs fails at run time for other layouts."""

    def rows(x: Any) -> Any:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return [rows(e.primitive.bind(rows(operands[0]), **e.params))]
