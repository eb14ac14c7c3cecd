"""A program -> one whose loops' residuals are offloaded to the host's memory between forward and backward loop.

Knows programs, and loops of known length. Must not know batches, devices, costs, nor who decides what is moved.

    scan: h = f(h); stack h   ->   scan: h = f(h); stack to_host(h)
    scan over h: ...          ->   scan over host h: fetch h; ...

The derivative of a scan is another scan over the residuals of the first. If both have the same trip count, each
iteration of the first sends its residual to the host, and each of the second fetches one: a device holds one or two.
(`vnode.remat.residual_remat` recomputes them instead.) Values outside of loops are not offloaded: compilers fetch them
long before they are read, and keep both copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Atom, Program, ResultIndex, source_line
from vnode.analysis.scan_rewriting import open_loop, rebuild_scan
from vnode.errors import PartitionError
from vnode.operators.host_transfer import has_several_rows, move, variable_in_space
from vnode.operators.memory_spaces import HOST, can_offload, is_on_host
from vnode.remat.residual_remat import loop_residuals


def offloadable_residuals(program: Program) -> set[ResultIndex]:
    """The residuals of loops that can be offloaded until later loops read them.

    Args:
      program: with calls inlined.
    """
    found = loop_residuals(program)
    return {(k, j) for k, j in found if is_offloadable(program.equations[k].outvars[j])}


def is_offloadable(var: Var) -> bool:
    """Whether a stacked value can be moved to the host one iteration at a time, and is not on the host."""
    return can_offload(var.aval) and has_several_rows(var.aval.shape[1:]) and not is_on_host(var.aval)


def offload_residuals(program: Program, chosen: Collection[ResultIndex]) -> Program:
    """Offloads residuals of loops.

    Args:
      program: with calls inlined.
      chosen: some of the `offloadable_residuals`.

    Returns:
      Another program of the same inputs and outputs, with as many equations; chosen results have new variables.

    Raises:
      PartitionError: a chosen residual cannot be offloaded.
    """
    unknown = set(chosen) - offloadable_residuals(program)
    if unknown:
        raise PartitionError(f"{sorted(unknown)} are not residuals of a loop that can be offloaded")
    equations = list(program.equations)
    on_host: dict[Var, Var] = {}
    for k, j in chosen:
        var = equations[k].outvars[j]
        on_host[var] = variable_in_space(var.aval, HOST)
    for k, eqn in enumerate(equations):
        if any(atom in on_host for atom in eqn.invars if isinstance(atom, Var)):
            equations[k] = eqn = fetch_from_host(eqn, on_host)
        if any(var in on_host for var in eqn.outvars):
            equations[k] = send_to_host(eqn, on_host)
    return program.with_equations(equations)


def check_offloaded(loops: Iterable[JaxprEqn]) -> None:
    """Checks that no residual is offloaded from or to some loops: those that are divided into passes of their own.

    A pass keeps what the next one reads on the device.

    Raises:
      PartitionError: one is.
    """
    for eqn in loops:
        if any(is_on_host(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
            raise PartitionError(
                "a plan offloads a residual of a loop that is divided into passes of its own.",
                facts=[source_line(eqn)],
                remedies=["search again: such residuals stay on the device now"],
            )


def send_to_host(eqn: JaxprEqn, on_host: Mapping[Var, Var]) -> JaxprEqn:
    """A forward loop that stacks some of its results on the host."""
    loop, body = open_loop(eqn)
    outputs, results = list(body.outputs), list(eqn.outvars)
    host_variables: dict[int, tuple[Atom, Var]] = {}  # an iteration's values, with their host variables
    for j, var in enumerate(eqn.outvars):
        if var in on_host:
            atom = body.outputs[j]
            _, outputs[j] = host_variables.setdefault(id(atom), (atom, variable_in_space(atom.aval, HOST)))
            results[j] = on_host[var]
    own = {id(var) for each in body.equations for var in each.outvars}
    equations = [move(atom, var, eqn) for key, (atom, var) in host_variables.items() if key not in own]
    for each in body.equations:
        equations.append(each)
        equations += [move(var, host_variables[id(var)][1], each) for var in each.outvars if id(var) in host_variables]
    made = Program(body.inputs, body.constants, equations, outputs)
    return rebuild_scan(eqn, made, eqn.invars, len(loop.fixed), results)


def fetch_from_host(eqn: JaxprEqn, on_host: Mapping[Var, Var]) -> JaxprEqn:
    """A backward loop that fetches some scanned operands from the host, each element before its first use."""
    loop, body = open_loop(eqn)
    operands, inputs = list(eqn.invars), list(body.inputs)
    waiting: dict[Var, Var] = {}  # elements not fetched yet, with their host variables
    for i in loop.scanned:
        atom = eqn.invars[i]
        if isinstance(atom, Var) and atom in on_host:
            operands[i] = on_host[atom]
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
