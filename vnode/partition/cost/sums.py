"""Sums over devices that a program adds up: XLA adds what each device has of them, and sums over devices once.

Knows equations of one device. Must not know what anything costs.

The TPU compiler does so (``AllReduceReassociate``, ``ReduceScatterReassociate``) where two sums of the same kind, over
the same devices, are read by nothing but an addition; and again with that sum and the next one. So it does where both
are cut in the same way, or turned, before they are added. Where devices keep a part each of a sum that has been summed
over other devices before, it takes the parts first, and sums less over the others.
"""

from __future__ import annotations

import collections

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Program
from vnode.operators import Algebra, describe
from vnode.partition.cost.collectives import is_sum


def added_before(program: Program) -> Program:
    """The program with such sums done once.

    Args:
      program: of one device; loops and branches stay as they are.

    Returns:
      The program, with the same results up to rounding.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.analysis.program import inline
      >>> def three(a, b, c):
      ...     return jax.lax.psum(a, "x") + jax.lax.psum(b, "x") + jax.lax.psum(c, "x")
      >>> traced = jax.make_jaxpr(three, axis_env=[("x", 2)])(1.0, 2.0, 3.0)
      >>> [eqn.primitive.name for eqn in added_before(inline(traced.jaxpr, traced.consts)).equations]
      ['add', 'add', 'psum']
    """
    program = without_zeros(program)
    read = [atom for eqn in program.equations for atom in eqn.invars] + program.outputs
    users = collections.Counter(atom for atom in read if isinstance(atom, Var))
    makers: dict[Var, JaxprEqn] = {}
    kept: dict[int, JaxprEqn] = {}
    for eqn in program.equations:
        pending, after = eqn, list[JaxprEqn]()
        while (pair := summed(pending, makers, users)) is not None:
            for each in (*pair[0], *pair[1]):
                del kept[id(each)]
            several = [Var(each.outvars[0].aval) for each in pair[0][:-1]]
            here, *_ = between = [Var(pair[0][0].invars[0].aval), *several]
            users.update(between)
            places = zip(pair[0], between, [*several, *pending.outvars], strict=True)
            after[:0] = [each.replace(invars=[a, *each.invars[1:]], outvars=[b]) for each, a, b in places]
            pending = pending.replace(invars=[chain[0].invars[0] for chain in pair], outvars=[here])
        for each in (pending, *after):
            kept[id(each)] = each
            makers.update(dict.fromkeys(each.outvars, each))
    return program.with_equations(list(kept.values()))


def parts_first(program: Program) -> Program:
    """The program with sums of which devices keep a part before sums over other devices that only these read.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.analysis.program import inline
      >>> def two(a):
      ...     return jax.lax.psum_scatter(jax.lax.psum(a, "x"), "y", tiled=True)
      >>> traced = jax.make_jaxpr(two, axis_env=[("x", 2), ("y", 4)])(jnp.ones(8))
      >>> made = parts_first(inline(traced.jaxpr, traced.consts))
      >>> [(eqn.primitive.name, eqn.invars[0].aval.shape) for eqn in made.equations]
      [('reduce_scatter', (8,)), ('psum', (2,))]
    """
    read = [atom for eqn in program.equations for atom in eqn.invars] + program.outputs
    users = collections.Counter(atom for atom in read if isinstance(atom, Var))
    makers = program.definitions
    instead: dict[int, list[JaxprEqn]] = {}
    for eqn in program.equations:
        total = makers.get(eqn.invars[0]) if scatters(eqn) and isinstance(eqn.invars[0], Var) else None
        if total is None or not is_sum(total) or users[total.outvars[0]] != 1 or id(total) in instead:
            continue
        part = Var(eqn.outvars[0].aval)
        instead[id(total)] = []
        instead[id(eqn)] = [
            eqn.replace(invars=total.invars, outvars=[part]),
            total.replace(invars=[part], outvars=eqn.outvars),
        ]
    if not instead:
        return program
    equations = [other for eqn in program.equations for other in instead.get(id(eqn), [eqn])]
    return program.with_equations(equations)


def scatters(eqn: JaxprEqn) -> bool:
    """Whether an equation sums one array over devices, of which everybody keeps a part."""
    return eqn.primitive.name == "reduce_scatter" and len(eqn.outvars) == 1 and bool(eqn.params.get("tiled"))


def without_zeros(program: Program) -> Program:
    """The program without additions of zero, as sums in Python begin."""
    same: dict[Var, Var] = {}
    equations: list[JaxprEqn] = []
    for eqn in program.equations:
        eqn = eqn.replace(invars=[same.get(a, a) if isinstance(a, Var) else a for a in eqn.invars])
        terms = [a for a in eqn.invars if isinstance(a, Var)]
        zero = any(isinstance(a, Literal) and np.ndim(a.val) == 0 and a.val == 0 for a in eqn.invars)
        if adds(eqn) and zero and len(terms) == 1 and terms[0].aval == eqn.outvars[0].aval:
            same[eqn.outvars[0]] = terms[0]
        else:
            equations.append(eqn)
    outputs = [same.get(a, a) if isinstance(a, Var) else a for a in program.outputs]
    return program.derived(program.inputs, equations, outputs)


def summed(
    eqn: JaxprEqn, makers: dict[Var, JaxprEqn], users: collections.Counter[Var]
) -> tuple[list[JaxprEqn], list[JaxprEqn]] | None:
    """The two sums over devices that an equation adds, if they may be one, each with how it is cut or turned before."""
    if not adds(eqn):
        return None
    first, second = (back_to_sum(a, makers, users) for a in eqn.invars)
    if not first or not second or first[0] is second[0] or len(first) != len(second):
        return None
    alike = first[0].invars[0].aval == second[0].invars[0].aval and len(second[0].outvars) == 1
    return (first, second) if alike and all(map(same_but_for_array, first, second)) else None


def back_to_sum(atom: object, makers: dict[Var, JaxprEqn], users: collections.Counter[Var]) -> list[JaxprEqn]:
    """A sum over devices, and what moves its elements up to a value that nothing else reads; nothing if it is none."""
    chain = list[JaxprEqn]()
    while isinstance(atom, Var) and users[atom] == 1 and atom in makers:
        eqn = makers[atom]
        chain.insert(0, eqn)
        if is_sum(eqn) or scatters(eqn):
            return chain
        of = describe(eqn) if len(eqn.outvars) == 1 and eqn.invars else None
        if of is None or not of.has(Algebra.MOVES):
            break
        atom = eqn.invars[0]
    return []


def same_but_for_array(one: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether two equations do the same to their first operands."""
    same = one.primitive is other.primitive and repr(sorted(one.params.items())) == repr(sorted(other.params.items()))
    beside = [[repr(a) if isinstance(a, Literal) else id(a) for a in each.invars[1:]] for each in (one, other)]
    return same and beside[0] == beside[1]


def adds(eqn: JaxprEqn) -> bool:
    """Whether an equation is the sum of two arrays."""
    of = describe(eqn)
    return len(eqn.invars) == 2 and of is not None and of.has(Algebra.ADDS)
