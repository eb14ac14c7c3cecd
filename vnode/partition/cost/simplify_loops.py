"""Loops of one iteration -> their bodies; loop-invariant equations -> before their loop.

    for x in xs: s += exchange(w) * x    ->    w2 = exchange(w); for x in xs: s += w2 * x

Knows equations of one device, and loops among them. Must not know what anything costs. Every compiler does both. An
invariant result that is larger than its operands is not hoisted, because it would be live through the whole loop.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Program, inline
from vnode.analysis.scan_rewriting import rebuild_scan
from vnode.operators import Algebra, describe
from vnode.operators.control_flow import Loop, region_of
from vnode.operators.cost import nbytes


def inline_single_iterations(program: Program) -> Program:
    """Inlines the bodies of loops of one iteration.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> traced = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, a: (c + a, c * a), x[0], x[:1]))(jnp.ones((4, 3)))
      >>> made = inline_single_iterations(inline(traced.jaxpr, traced.consts))
      >>> [eqn.primitive.name for eqn in made.equations if eqn.primitive.name in ("scan", "add", "mul")]
      ['add', 'mul']
    """
    equations: list[JaxprEqn] = []
    constants = dict(program.constants)
    for eqn in program.equations:
        region = region_of(eqn)
        if isinstance(region, Loop) and region.run_count == 1 and not region.tests:
            equations += inlined_body(eqn, region, constants)
        else:
            equations.append(eqn)
    return Program(program.inputs, constants, equations, program.outputs)


def inlined_body(eqn: JaxprEqn, loop: Loop, constants: dict[Var, Any]) -> list[JaxprEqn]:
    """The equations of a loop's body, inlined; the body's constants are added to `constants`."""
    (body,) = loop.bodies
    inner = inline_single_iterations(inline(body.jaxpr, body.constants, eqn))
    constants.update(inner.constants)
    names = {var: eqn.invars[i] for i, var in enumerate(inner.inputs) if i not in loop.scanned}
    equations = [reshape_equation(eqn, eqn.invars[i], inner.inputs[i]) for i in loop.scanned]
    ends = [
        reshape_equation(eqn, names.get(atom, atom) if isinstance(atom, Var) else atom, var)
        for var, atom in zip(eqn.outvars, inner.outputs, strict=True)
    ]
    for each in inner.equations:
        equations.append(each.replace(invars=[names.get(a, a) if isinstance(a, Var) else a for a in each.invars]))
    return [*equations, *ends]


def reshape_equation(eqn: JaxprEqn, atom: Any, var: Var) -> JaxprEqn:
    """An equation that reshapes `atom` into `var`."""
    made = jax.make_jaxpr(lambda x: jax.lax.reshape_p.bind(x, new_sizes=var.aval.shape, dimensions=None, sharding=None))
    (found,) = made(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)).jaxpr.eqns
    return found.replace(invars=[atom], outvars=[var], source_info=eqn.source_info)


def hoist_invariants(program: Program) -> Program:
    """Moves loop-invariant equations before their loops, inner loops first."""
    equations: list[JaxprEqn] = []
    for eqn in program.equations:
        region = region_of(eqn)
        equations += hoist_from_loop(eqn, region) if isinstance(region, Loop) else [eqn]
    return program.with_equations(equations)


def hoist_from_loop(eqn: JaxprEqn, loop: Loop) -> list[JaxprEqn]:
    """A loop's invariant equations, followed by the loop without them."""
    (body,) = loop.bodies
    inner = hoist_invariants(inline(body.jaxpr, body.constants, eqn))
    outer: dict[Var, Any] = dict(zip(inner.inputs[: loop.constants], eqn.invars[: loop.constants], strict=True))
    same: set[Var] = {*outer}
    for each in inner.equations:
        if not is_too_large(each) and all(atom in same for atom in each.invars if isinstance(atom, Var)):
            same.update(each.outvars)
    needed: set[Var] = set()  # by equations worth hoisting
    for each in reversed(inner.equations):
        if same.issuperset(each.outvars) and (needed.intersection(each.outvars) or not is_trivial(each)):
            needed.update(each.outvars, (atom for atom in each.invars if isinstance(atom, Var)))
    before: list[JaxprEqn] = []
    handed: list[Var] = []
    left: list[JaxprEqn] = []
    for each in inner.equations:
        if each.outvars and same.issuperset(each.outvars) and needed.issuperset(each.outvars):
            outer.update({var: Var(var.aval) for var in each.outvars})
            operands = [outer[a] if isinstance(a, Var) else a for a in each.invars]
            before.append(each.replace(invars=operands, outvars=[outer[var] for var in each.outvars]))
            handed += each.outvars
        else:
            left.append(each)
    if not before:
        return [eqn]
    wanted = {a for each in left for a in each.invars if isinstance(a, Var)}
    wanted |= {a for a in inner.outputs if isinstance(a, Var)}
    handed = [var for var in handed if var in wanted]
    kept = [i for i, var in enumerate(inner.inputs) if i in loop.carried or var in wanted]
    changed = Program([*handed, *(inner.inputs[i] for i in kept)], inner.constants, left, inner.outputs)
    constants = len(handed) + sum(i < loop.constants for i in kept)
    operands = [*(outer[var] for var in handed), *(eqn.invars[i] for i in kept)]
    return [*before, rebuild_scan(eqn, changed, operands, constants, eqn.outvars)]


def is_trivial(eqn: JaxprEqn) -> bool:
    """Whether an equation only transposes, broadcasts or slices, or makes a constant: not worth hoisting alone."""
    of = describe(eqn)
    turns = of is not None and of.has(Algebra.MOVES) and len(eqn.invars) == 1
    return turns or not any(isinstance(atom, Var) for atom in eqn.invars)


def is_too_large(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop, or its result is larger than its operands."""
    result = sum(nbytes(var.aval) for var in eqn.outvars)
    return region_of(eqn) is not None or result > sum(nbytes(atom.aval) for atom in eqn.invars)
