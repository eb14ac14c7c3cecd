"""A scan equation -> the same scan with another body: helpers for every pass that rewrites loops.

Knows programs, and loops of known length. Must not know batches, devices, nor why a loop is rewritten.

    c, ys = scan(body, c, xs)   ->   c, ys, zs = scan(body', c, xs)        zs: [trip count, ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Atom, Program, barrier_equation, inline
from vnode.operators.control_flow import Loop, region_of, scan_like


def open_loop(eqn: JaxprEqn) -> tuple[Loop, Program]:
    """A scan, and its body with calls inlined."""
    loop = region_of(eqn)
    assert isinstance(loop, Loop)
    (one,) = loop.bodies
    return loop, inline(one.jaxpr, one.constants, eqn)


def saved_carries(loop: Loop, body: Program) -> dict[int, int]:
    """The stacked results that hold a carry's value before each iteration: result number -> carry number."""
    place = {body.inputs[i]: n for n, i in enumerate(loop.carried)}
    several = range(len(loop.carried), len(body.outputs))
    return {j: place[atom] for j in several if isinstance(atom := body.outputs[j], Var) and atom in place}


def stacked_variable(aval: Any, length: int) -> Var:
    """A variable for the stacked values of all iterations."""
    return Var(aval.update(shape=(length, *aval.shape)))


def barrier_on(var: Var) -> JaxprEqn:
    """A barrier equation on a variable, with a new result variable."""
    return barrier_equation().replace(invars=[var], outvars=[Var(var.aval)])


def rebuild_scan(
    like: JaxprEqn, body: Program, operands: Sequence[Atom], constants: int, results: Sequence[Var]
) -> JaxprEqn:
    """A scan with another body.

    Args:
      like: the present scan.
      body: its inputs are constants, carries, and an iteration's elements of the scanned operands.
      operands: of the new scan.
      constants: the number of constant operands.
      results: of the new scan.
    """
    params = scan_like(like, body.to_closed_jaxpr(like.params["jaxpr"].jaxpr), constants)
    return like.replace(invars=list(operands), outvars=list(results), params=params)
