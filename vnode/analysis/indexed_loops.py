"""A loop that reads and writes rows by the loop counter -> a scan over these rows.

Knows loops that count, and slices of one row. Must not know what is computed from a row, batches, nor calls.

A `jax.lax.fori_loop` over examples reads a row by its index, and writes a row of an array that it carries. `jax.vmap`
also makes such loops, of calls that it cannot batch, as Pallas kernels with scalar prefetch::

    scan  carry i, y             scan  over x
        row = x[i]                   row
        y[i] = f(row)                f(row)
        i + 1
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.operators.constant_folding import tabulated
from vnode.operators.control_flow import Loop, region_of, scan_like

Atom = Var | Literal

FlatBody = Any
"""A `vnode.analysis.program.Program`, which knows this module and not the other way round."""


def counted_loop(eqn: JaxprEqn) -> tuple[Loop, int] | None:
    """A loop, and the number of the carry that counts from zero; None if the equation is no such loop."""
    loop = region_of(eqn) if eqn.primitive.name == "scan" and not eqn.effects else None
    if not isinstance(loop, Loop) or loop.reverse or loop.length < 2 or loop.carries < 2:
        return None
    (body,) = loop.bodies
    for k, i in enumerate(loop.carried):
        start, carry, after = eqn.invars[i], body.jaxpr.invars[i], body.jaxpr.outvars[k]
        if is_literal_number(start, 0) and any(
            each.primitive.name == "add"
            and after in each.outvars
            and each.invars[0] is carry
            and is_literal_number(each.invars[1], 1)
            for each in body.jaxpr.eqns
        ):
            return loop, k
    return None


def is_literal_number(atom: Any, number: int) -> bool:
    """Whether an atom is the literal of an integer."""
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.aval.dtype.kind in "iu" and atom.val == number


def scan_over_rows(eqn: JaxprEqn, loop: Loop, counter: int, body: FlatBody) -> list[JaxprEqn] | None:
    """Rewrites a loop as a scan over the rows that it reads and writes by index.

    Args:
      eqn: the loop's equation.
      loop: the loop.
      counter: the number of the carry that counts.
      body: the loop's body, with calls inlined.

    Returns:
      Equations that replace `eqn`, the last one a scan; None if no carry is only written by index.
    """
    if len(body.inputs) != loop.operands:
        return None
    first, n = loop.carried.start, loop.length
    count = body.inputs[first + counter]

    def is_count(atom: Atom) -> bool:
        values = tabulated(atom, body.equations, [count], (0,), (n,))
        return values is not None and np.array_equal(values, np.arange(n))

    def is_row(each: JaxprEqn, name: str, var: Var, row: Sequence[int], at: int) -> bool:
        whole = (n, *row[1:]) == var.aval.shape and row[:1] == (1,)
        return each.primitive.name == name and each.invars[0] is var and whole and is_count(each.invars[at])

    written: dict[int, JaxprEqn] = {}
    for k in range(loop.carries):
        var, out = body.inputs[first + k], body.outputs[k]
        own = body.definitions.get(out) if isinstance(out, Var) else None
        if own is None or body.readers.get(var) != [own] or out in body.readers or own.invars.count(var) > 1:
            continue
        once = body.outputs.count(out) == 1 and var not in body.outputs
        if once and len(own.invars) > 2 and is_row(own, "dynamic_update_slice", var, own.invars[1].aval.shape, 2):
            written[k] = own
    if not written or body.outputs.count(count) or counter in written:
        return None
    read = [
        i
        for i, var in enumerate(body.inputs[:first])
        if body.readers.get(var)
        and var not in body.outputs
        and all(
            is_row(each, "dynamic_slice", var, each.outvars[0].aval.shape, 1) and each.invars.count(var) == 1
            for each in body.readers[var]
        )
    ]
    rows = {i: Var(jax.core.ShapedArray(body.inputs[i].aval.shape[1:], body.inputs[i].aval.dtype)) for i in read}
    made = {
        k: Var(jax.core.ShapedArray(own.invars[1].aval.shape[1:], own.invars[1].aval.dtype))
        for k, own in written.items()
    }

    places = {id(own): k for k, own in written.items()}
    equations: list[JaxprEqn] = []
    for each in body.equations:
        source = next((i for i in read if each.invars and each.invars[0] is body.inputs[i]), None)
        if id(each) in places:
            k = places[id(each)]
            squeezed = row_equation(each.invars[1].aval.shape, each.invars[1].aval.dtype.name, inward=True)
            equations.append(squeezed.replace(invars=[each.invars[1]], outvars=[made[k]], source_info=each.source_info))
        elif source is not None:
            spread = row_equation(each.outvars[0].aval.shape, each.outvars[0].aval.dtype.name, inward=False)
            equations.append(spread.replace(invars=[rows[source]], outvars=each.outvars, source_info=each.source_info))
        else:
            equations.append(each)

    stays = [k for k in range(loop.carries) if k not in written and k != counter]
    constants = [i for i in range(first) if i not in rows]
    scanned = list(loop.scanned)
    inputs = [body.inputs[i] for i in (*constants, *(first + k for k in stays), *scanned)]
    outputs = [body.outputs[k] for k in stays] + body.outputs[loop.carries :] + list(made.values())
    needed = eliminate_dead_code(equations, outputs)
    rewritten = body.derive([*inputs, *rows.values(), count], needed, outputs)
    closed = rewritten.to_closed_jaxpr(loop.bodies[0].jaxpr)
    numbers = Var(jax.core.ShapedArray((n,), count.aval.dtype))
    operands = [eqn.invars[i] for i in (*constants, *(first + k for k in stays), *scanned, *rows)]
    results = [eqn.outvars[k] for k in (*stays, *range(loop.carries, len(eqn.outvars)), *made)]
    return [
        iota_equation(n, count.aval.dtype.name).replace(outvars=[numbers], source_info=eqn.source_info),
        number_equation(n, count.aval.dtype.name).replace(outvars=[eqn.outvars[counter]], source_info=eqn.source_info),
        eqn.replace(
            invars=[*operands, numbers],
            outvars=results,
            params=scan_like(eqn, closed, len(constants), len(stays)),
        ),
    ]


def eliminate_dead_code(equations: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations that outputs need, and those with effects, in order."""
    needed, kept = {id(atom) for atom in outputs}, []
    for eqn in reversed(equations):
        if eqn.effects or any(id(var) in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(id(atom) for atom in eqn.invars)
    return kept[::-1]


@functools.lru_cache
def row_equation(shape: tuple[int, ...], dtype: str, inward: bool) -> JaxprEqn:
    """A template equation from ``[1, ...]`` to its row (`inward`), or back."""
    if inward:
        return jax.make_jaxpr(lambda x: lax.squeeze(x, (0,)))(jax.ShapeDtypeStruct(shape, dtype)).jaxpr.eqns[0]
    row = jax.ShapeDtypeStruct(shape[1:], dtype)
    return jax.make_jaxpr(lambda x: lax.broadcast_in_dim(x, shape, tuple(range(1, len(shape)))))(row).jaxpr.eqns[0]


@functools.lru_cache
def iota_equation(n: int, dtype: str) -> JaxprEqn:
    """A template equation of ``iota(n)``."""
    return jax.make_jaxpr(lambda: lax.iota(dtype, n))().jaxpr.eqns[0]


@functools.lru_cache
def number_equation(n: int, dtype: str) -> JaxprEqn:
    """A template equation of a constant."""
    (eqn,) = jax.make_jaxpr(lax.optimization_barrier)(np.zeros((), dtype)).jaxpr.eqns
    return eqn.replace(invars=[Literal(np.asarray(n, dtype), eqn.invars[0].aval)])
