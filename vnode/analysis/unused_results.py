"""A program -> the same without what no output needs: equations, also in loops and branches, and carries of loops.

Knows liveness, and that an equation with an effect stays. Must not know batches or devices.

    x, losses = scan(layer, x, ws)   ->   x = scan(layer', x, ws)        `losses` is not read; `layer'` computes none

The loops that differentiation makes hold such values: jax leaves them to XLA. Here they would be computed for nothing.
A sum over the batch among them would also give the loop passes of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Atom, Program
from vnode.operators.control_flow import Region, region_of, restrict_region
from vnode.operators.references import is_reference


def remove_unused_results(program: Program) -> Program:
    """Removes what no output needs; the inputs stay."""
    return with_needed_equations(program, program.outputs)[0]


def with_needed_equations(program: Program, outputs: list[Atom]) -> tuple[Program, set[Var]]:
    """A program with the equations that some of its outputs need, and those with effects.

    Args:
      program: the program.
      outputs: the outputs.

    Returns:
      The program with these outputs, and the variables that they need.
    """
    needed = variables(outputs)
    kept: list[JaxprEqn] = []
    for eqn in reversed(program.equations):
        used = [k for k, var in enumerate(eqn.outvars) if var in needed]
        if used or eqn.effects:
            kept.append(without_unused_results(program, eqn, used))
            needed |= variables(kept[-1].invars)
    kept.reverse()
    same = len(kept) == len(program.equations) and all(map(operator.is_, kept, program.equations))
    same = same and len(outputs) == len(program.outputs)
    return program if same else program.derive(program.inputs, kept, outputs), needed


def without_unused_results(program: Program, eqn: JaxprEqn, used: Sequence[int]) -> JaxprEqn:
    """A loop or branch without the results that are not read. An equation in which nothing changes is returned as is.

    Args:
      program: the program that the equation is in.
      eqn: the equation.
      used: the results that are read.
    """
    region = region_of(eqn)
    if region is None or any(map(is_reference, eqn.invars)):
        return eqn
    bodies = program.bodies(eqn)
    if any(len(body.inputs) != len(inputs) for body, inputs in zip(bodies, region.inputs, strict=True)):
        return eqn
    carried = list(region.carried)
    results = set(used)
    while True:
        wanted = sorted(results)
        made = [
            with_needed_equations(body, body.outputs if k < region.tests else [body.outputs[n] for n in wanted])
            for k, body in enumerate(bodies)
        ]
        read = operands_read(region, bodies, [needed for _, needed in made])
        results.update(n for n, i in enumerate(carried) if i in read)
        if len(results) == len(wanted):
            break
    needed_bodies = [body for body, _ in made]
    if all(map(operator.is_, needed_bodies, bodies)):
        return eqn
    read.update(i for n, i in enumerate(carried) if n in results)
    kept = [
        body.derive(
            [var for i, var in zip(inputs, body.inputs, strict=True) if i in read], body.equations, body.outputs
        )
        for body, inputs in zip(needed_bodies, region.inputs, strict=True)
    ]
    closed = [body.to_closed_jaxpr(old.jaxpr) for body, old in zip(kept, region.bodies, strict=True)]
    return restrict_region(eqn, closed, sorted(read), wanted)


def operands_read(region: Region, bodies: Sequence[Program], needed: Sequence[set[Var]]) -> set[int]:
    """The operands of a loop or branch that its bodies read, given the variables that each needs."""
    read = set() if region.chooser is None else {region.chooser}
    for body, inputs, live in zip(bodies, region.inputs, needed, strict=True):
        read.update(i for i, var in zip(inputs, body.inputs, strict=True) if var in live)
    return read


def variables(atoms: Iterable[Atom]) -> set[Var]:
    return {atom for atom in atoms if isinstance(atom, Var)}
