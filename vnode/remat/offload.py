"""What loops stack for later loops, moved to the host's memory: less memory of devices, and a way there and back.

Knows programs, and loops of known length. Must not know batches, devices, costs, nor who decides what is moved.

The derivative of a scan is another scan over what the first one kept of every turn. Where both have the same turns, a
turn of the first can send a kept value to the host when it is made, and a turn of the later one fetch its part when it
is read: a device holds that of a turn or two. (`vnode.remat.residual_remat` computes it once more instead.) Values
that are made and read outside of loops are not moved: compilers fetch them long before they are read, and keep both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Atom, Program, ResultIndex
from vnode.analysis.scan_rewriting import open_loop, rebuild_scan
from vnode.errors import PartitionError
from vnode.operators.host_transfer import has_several_rows, move, variable_in_space
from vnode.operators.memory_spaces import HOST, can_offload, is_on_host
from vnode.remat.residual_remat import loop_residuals


def offloadable_residuals(program: Program) -> set[ResultIndex]:
    """What loops of a program stack that could lie on the host until later loops read it, turn by turn.

    Args:
      program: with calls inlined.
    """
    found = loop_residuals(program)
    return {(k, j) for k, j in found if is_offloadable(program.equations[k].outvars[j])}


def is_offloadable(var: Var) -> bool:
    """Whether a value of all turns has a type that can be moved to the host turn by turn, and is not there."""
    return can_offload(var.aval) and has_several_rows(var.aval.shape[1:]) and not is_on_host(var.aval)


def offload_residuals(program: Program, chosen: Collection[ResultIndex]) -> Program:
    """A program in which what loops keep for later ones lies on the host in between.

    Args:
      program: with calls inlined.
      chosen: of what is `movable`.

    Returns:
      Another program of the same inputs and outputs, with as many equations; chosen results have new variables.

    Raises:
      PartitionError: something is chosen that cannot be moved.
    """
    unknown = set(chosen) - offloadable_residuals(program)
    if unknown:
        raise PartitionError(f"no loop keeps {sorted(unknown)} for later ones alone, such that a host can hold it")
    equations = list(program.equations)
    away: dict[Var, Var] = {}
    for k, j in chosen:
        var = equations[k].outvars[j]
        away[var] = variable_in_space(var.aval, HOST)
    for k, eqn in enumerate(equations):
        if any(atom in away for atom in eqn.invars if isinstance(atom, Var)):
            equations[k] = eqn = fetch_from_host(eqn, away)
        if any(var in away for var in eqn.outvars):
            equations[k] = send_to_host(eqn, away)
    return program.with_equations(equations)


def send_to_host(eqn: JaxprEqn, away: Mapping[Var, Var]) -> JaxprEqn:
    """A loop that stacks some of its results on the host."""
    loop, body = open_loop(eqn)
    outputs, results = list(body.outputs), list(eqn.outvars)
    there: dict[int, tuple[Atom, Var]] = {}  # values of a turn, and what they are on the host
    for j, var in enumerate(eqn.outvars):
        if var in away:
            atom = body.outputs[j]
            _, outputs[j] = there.setdefault(id(atom), (atom, variable_in_space(atom.aval, HOST)))
            results[j] = away[var]
    own = {id(var) for each in body.equations for var in each.outvars}
    equations = [move(atom, var, eqn) for key, (atom, var) in there.items() if key not in own]
    for each in body.equations:
        equations.append(each)
        equations += [move(var, there[id(var)][1], each) for var in each.outvars if id(var) in there]
    made = Program(body.inputs, body.constants, equations, outputs)
    return rebuild_scan(eqn, made, eqn.invars, len(loop.fixed), results)


def fetch_from_host(eqn: JaxprEqn, away: Mapping[Var, Var]) -> JaxprEqn:
    """A loop that reads some of what it goes through from the host, each turn's part before it is first needed."""
    loop, body = open_loop(eqn)
    operands, inputs = list(eqn.invars), list(body.inputs)
    waiting: dict[Var, Var] = {}  # parts of a turn that are not there yet, as they are on the host
    for i in loop.scanned:
        atom = eqn.invars[i]
        if isinstance(atom, Var) and atom in away:
            operands[i] = away[atom]
            inputs[i] = waiting[body.inputs[i]] = variable_in_space(body.inputs[i].aval, HOST)
    equations: list[JaxprEqn] = []

    def fetch(wanted: Sequence[object], like: JaxprEqn) -> None:
        for var in [each for each in waiting if any(each is atom for atom in wanted)]:
            equations.append(move(waiting.pop(var), var, like))

    for each in body.equations:
        fetch(each.invars, each)
        equations.append(each)
    fetch(body.outputs, eqn)
    made = Program(inputs, body.constants, equations, body.outputs)
    return rebuild_scan(eqn, made, operands, len(loop.fixed), eqn.outvars)
