"""What a compiler makes of loops of a known length: none of one turn, and takes out of others what need not be in them.

Knows equations of one device, and loops among them. Must not know what anything costs.

A loop of one turn is no loop to XLA (``WhileLoopSimplifier``). It runs before a loop what its body computes at every
turn from what does not change (``WhileLoopInvariantCodeMotion``), exchanges too; for TPUs only what has no larger
result than its operands. If all that a body does with a sum over devices is to add it to something that it carries, the
TPU compiler adds each device's part there, and sums over devices once, after the loop
(``WhileLoopAllReduceCodeMotion``).
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.again import scan_of
from vnode.analysis.program import Program, inline
from vnode.operators import Algebra, describe
from vnode.operators.control import Loop, region_of
from vnode.operators.cost import nbytes
from vnode.operators.splits import Free
from vnode.partition.cost.collectives import is_sum
from vnode.partition.cost.sums import adds, parts_first, scatters


def without_single_turns(program: Program) -> Program:
    """The program with the bodies of loops of one turn in their place.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> traced = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, a: (c + a, c * a), x[0], x[:1]))(jnp.ones((4, 3)))
      >>> made = without_single_turns(inline(traced.jaxpr, traced.consts))
      >>> [eqn.primitive.name for eqn in made.equations if eqn.primitive.name in ("scan", "add", "mul")]
      ['add', 'mul']
    """
    equations: list[JaxprEqn] = []
    constants = dict(program.constants)
    for eqn in program.equations:
        region = region_of(eqn)
        if isinstance(region, Loop) and region.times == 1 and not region.tests:
            equations += only_turn(eqn, region, constants)
        else:
            equations.append(eqn)
    return Program(program.inputs, constants, equations, program.outputs)


def only_turn(eqn: JaxprEqn, loop: Loop, constants: dict[Var, Any]) -> list[JaxprEqn]:
    """The body of a loop in its place; what it captured is added to `constants`."""
    (body,) = loop.bodies
    inner = without_single_turns(inline(body.jaxpr, body.constants, eqn))
    constants.update(inner.constants)
    equations: list[JaxprEqn] = []
    names: dict[Var, Any] = {}
    for i, (var, atom) in enumerate(zip(inner.inputs, eqn.invars, strict=True)):
        if i in loop.scanned:
            names[var] = var
            equations.append(reshaped(eqn, atom, var))
        else:
            names[var] = atom
    ends: list[JaxprEqn] = []
    for var, atom in zip(eqn.outvars, inner.outputs, strict=True):
        value = names.get(atom, atom) if isinstance(atom, Var) else atom
        ends.append(reshaped(eqn, value, var))
    for each in inner.equations:
        equations.append(each.replace(invars=[names.get(a, a) if isinstance(a, Var) else a for a in each.invars]))
    return [*equations, *ends]


def reshaped(eqn: JaxprEqn, atom: Any, var: Var) -> JaxprEqn:
    """A value in the shape of a variable, under its name."""
    made = jax.make_jaxpr(lambda x: jax.lax.reshape_p.bind(x, new_sizes=var.aval.shape, dimensions=None, sharding=None))
    (found,) = made(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)).jaxpr.eqns
    return found.replace(invars=[atom], outvars=[var], source_info=eqn.source_info)


def before_loops(program: Program, growing: bool = True) -> Program:
    """The program with what does not change from turn to turn computed before its loops, inner ones first.

    Args:
      program: of one device.
      growing: whether also what has larger results than operands, which then are held through the loop.
    """
    equations: list[JaxprEqn] = []
    for eqn in program.equations:
        region = region_of(eqn)
        if isinstance(region, Loop):
            equations += hoisted(eqn, region, growing)
        else:
            equations.append(eqn)
    return program.with_equations(equations)


def grows(eqn: JaxprEqn) -> bool:
    """Whether an equation has larger results than operands, or an operand that is repeated before, which has."""
    result = sum(nbytes(var.aval) for var in eqn.outvars)
    repeats = any(isinstance(atom, Literal) and nbytes(atom.aval) < result for atom in eqn.invars)
    return result > sum(nbytes(atom.aval) for atom in eqn.invars) or (repeats and elementwise(eqn))


def elementwise(eqn: JaxprEqn) -> bool:
    """Whether an equation goes element by element."""
    of = describe(eqn)
    return of is not None and not of.has(Algebra.MOVES) and all(isinstance(f.split, Free) for f in of.factors)


def hoisted(eqn: JaxprEqn, loop: Loop, growing: bool = True) -> list[JaxprEqn]:
    """What a loop computes at every turn from what does not change, and then the loop without it."""
    (body,) = loop.bodies
    inner = before_loops(inline(body.jaxpr, body.constants, eqn), growing)
    count = loop.constants
    outer: dict[Var, Any] = dict(zip(inner.inputs[:count], eqn.invars[:count], strict=True))
    same = {*outer, *inner.constants}  # variables that are the same at every turn
    fixed: dict[Var, JaxprEqn] = {}
    worth: list[JaxprEqn] = []
    for each in inner.equations:
        read = [atom for atom in each.invars if isinstance(atom, Var)]
        if all(atom in same for atom in read) and (growing or not grows(each)):
            same.update(each.outvars)
            fixed.update(dict.fromkeys(each.outvars, each))
            of = describe(each)
            if read and not (of is not None and of.has(Algebra.MOVES) and len(each.invars) == 1):  # turned, repeated
                worth.append(each)
    first: dict[int, JaxprEqn] = {}  # what is worth it, and what that needs
    pending = list(worth)
    while pending:
        each = pending.pop()
        if id(each) not in first:
            first[id(each)] = each
            pending += [fixed[atom] for atom in each.invars if isinstance(atom, Var) and atom in fixed]
    if not first:
        return [eqn]
    left = [each for each in inner.equations if id(each) not in first]
    wanted = {a for each in left for a in each.invars if isinstance(a, Var)}
    wanted |= {a for a in inner.outputs if isinstance(a, Var)}
    before: list[JaxprEqn] = []
    handed: list[Var] = []
    for each in inner.equations:
        if id(each) in first:
            for var in each.outvars:
                outer[var] = Var(var.aval)
                if var in wanted:
                    handed.append(var)
            operands = [outer.get(a, a) if isinstance(a, Var) else a for a in each.invars]
            before.append(each.replace(invars=operands, outvars=[outer[var] for var in each.outvars]))
    if any(isinstance(a, Var) and a in inner.constants for each in before for a in each.invars):
        return [eqn]  # a captured array would have to become the whole program's
    return [*before, rebuilt(eqn, loop, inner, left, handed, [outer[var] for var in handed], inner.outputs)]


def rebuilt(
    eqn: JaxprEqn,
    loop: Loop,
    inner: Program,
    equations: Sequence[JaxprEqn],
    handed: Sequence[Var],
    operands: Sequence[Any],
    outputs: Sequence[Any],
) -> JaxprEqn:
    """A loop with another body, which is given some more values that do not change, and those that it still reads."""
    read = {a for each in equations for a in each.invars if isinstance(a, Var)} | {a for a in outputs if type(a) is Var}
    kept = [i for i, var in enumerate(inner.inputs) if i in loop.carried or var in read]
    inputs = [*handed, *(inner.inputs[i] for i in kept)]
    body = Program(inputs, inner.constants, list(equations), list(outputs))
    constants = len(handed) + sum(i < loop.constants for i in kept)
    return scan_of(eqn, body, [*operands, *(eqn.invars[i] for i in kept)], constants, eqn.outvars)


def given_once(eqn: JaxprEqn, loop: Loop) -> JaxprEqn:
    """A loop that is given no value twice that does not change, or is sliced (``WhileLoopSimplifier``).

    What it computes of the one and of the other then is seen to be the same.

    Args:
      eqn: the loop.
      loop: what it is.
    """
    places: dict[tuple[bool, Any], int] = {}
    again: dict[int, int] = {}
    for i, atom in enumerate(eqn.invars):
        if isinstance(atom, Var) and i not in loop.carried:
            first = places.setdefault((i in loop.scanned, atom), i)
            if first != i:
                again[i] = first
    if not again:
        return eqn
    (body,) = loop.bodies
    inner = inline(body.jaxpr, body.constants, eqn)
    names = {inner.inputs[i]: inner.inputs[first] for i, first in again.items()}

    def once(atoms: Sequence[Any]) -> list[Any]:
        return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]

    equations = [each.replace(invars=once(each.invars)) for each in inner.equations]
    return rebuilt(eqn, loop, inner, equations, [], [], once(inner.outputs))


def after_loops(program: Program) -> Program:
    """The program with sums over devices that loops only add up done once, after the loop."""
    equations: list[JaxprEqn] = []
    makers = program.definitions
    for eqn in program.equations:
        region = region_of(eqn)
        equations += summed_after(eqn, region, makers) if isinstance(region, Loop) else [eqn]
    return program.with_equations(equations)


def turns(eqn: JaxprEqn) -> bool:
    """Whether an equation puts the elements of one array in another order: a sum over devices may come after it.

    So does what reduces dimensions of one element.
    """
    of = describe(eqn)
    if of is None or len(eqn.invars) != 1 or len(eqn.outvars) != 1 or not isinstance(eqn.invars[0], Var):
        return False
    return (of.has(Algebra.MOVES) or bool(of.reduced)) and eqn.invars[0].aval.size == eqn.outvars[0].aval.size


def summed_after(eqn: JaxprEqn, loop: Loop, makers: Mapping[Var, JaxprEqn]) -> list[JaxprEqn]:
    """A loop without the sums over devices that it only adds up, and these after it.

    They are added up from zero; what the loop begins with otherwise is added after it. Where devices keep a part of the
    sum each, they add up the whole.

    Args:
      eqn: the loop.
      loop: what it is.
      makers: the equations that make what it begins with.
    """
    (body,) = loop.bodies
    whole = inline(body.jaxpr, body.constants, eqn)
    inner = parts_first(after_loops(whole))
    read = [a for each in inner.equations for a in each.invars] + inner.outputs
    users = collections.Counter(a for a in read if isinstance(a, Var))
    made = inner.definitions
    instead: dict[int, list[JaxprEqn]] = {}  # equations in the place of others, by id
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    operands, results = [*eqn.invars], [*eqn.outvars]
    inputs, outputs = [*inner.inputs], [*inner.outputs]
    for k, place in enumerate(loop.carried):
        given, end = inputs[place], outputs[k]
        if not isinstance(end, Var) or users[given] != 1 or users[end] != 1:
            continue
        total = made.get(end)
        if total is None or not adds(total) or given not in total.invars:
            continue
        others = [a for a in total.invars if isinstance(a, Var) and a is not given]
        found = term_of(others[0], made, users) if len(others) == 1 else None
        if found is None:
            continue
        term, order = found
        (part,) = term.invars
        if scatters(term) and not all("permutation" in each.params for each in order):
            continue
        instead[id(term)], value, params = [], part, term.params
        for each in order if scatters(term) else ():
            moved = each.params["permutation"]
            turned = Var(value.aval.update(shape=tuple(value.aval.shape[d] for d in moved)))
            instead[id(each)] = [each.replace(invars=[value], outvars=[turned])]
            params = {**params, "scatter_dimension": moved.index(params["scatter_dimension"])}
            value = turned
        if scatters(term):
            inputs[place] = Var(value.aval)
            outputs[k] = new = Var(value.aval)
            instead[id(total)] = [total.replace(invars=[inputs[place], value], outvars=[new])]
        else:
            first = [*order, total][0]
            instead[id(first)] = [first.replace(invars=[part if a is term.outvars[0] else a for a in first.invars])]
        begin, here, end = operands[place], Var(inputs[place].aval), eqn.outvars[k]
        zero = is_zero(begin, makers)
        if scatters(term) or not zero:
            before.append(zeros(eqn, here.aval))
            operands[place] = before[-1].outvars[0]
        summed = end if zero else Var(end.aval)
        after.append(term.replace(invars=[here], outvars=[summed], params=params))
        if not zero:
            after.append(total.replace(invars=[summed, begin], outvars=[end]))
        results[k] = here
    if not instead and [*map(id, inner.equations)] == [*map(id, whole.equations)]:
        return [eqn]
    left = [other for each in inner.equations for other in instead.get(id(each), [each])]
    changed = Program(inputs, inner.constants, left, outputs)
    looped = rebuilt(eqn.replace(invars=operands), loop, changed, left, [], [], outputs)
    return [*before, looped.replace(outvars=results), *after]


def term_of(
    atom: Var, made: Mapping[Var, JaxprEqn], users: Mapping[Var, int]
) -> tuple[JaxprEqn, list[JaxprEqn]] | None:
    """The sum over devices that a variable is, and what puts it in another order afterwards; None if it is none."""
    term, order = made.get(atom), list[JaxprEqn]()
    while term is not None and turns(term) and users[term.outvars[0]] == 1:
        order.insert(0, term)
        (turned,) = term.invars
        term = made.get(turned) if isinstance(turned, Var) else None
    if term is None or len(term.outvars) != 1 or users[term.outvars[0]] != 1:
        return None
    sums = is_sum(term) or scatters(term)
    return (term, order) if sums and isinstance(term.invars[0], Var) else None


def is_zero(atom: Any, makers: Mapping[Var, JaxprEqn]) -> bool:
    """Whether a value is zero all over, as it is repeated."""
    maker = makers.get(atom) if isinstance(atom, Var) else None
    of = None if maker is None else describe(maker)
    if maker is None or of is None or not of.has(Algebra.MOVES) or len(maker.invars) != 1:
        return False
    (only,) = maker.invars
    return isinstance(only, Literal) and bool(np.all(only.val == 0))


def zeros(eqn: JaxprEqn, aval: Any) -> JaxprEqn:
    """An equation that makes an array of zeros; of a single zero, which is no equation, one that makes a number."""
    make = jax.lax.empty if aval.shape == () else jnp.zeros
    return jax.make_jaxpr(lambda: make(aval.shape, aval.dtype))().jaxpr.eqns[-1].replace(source_info=eqn.source_info)
