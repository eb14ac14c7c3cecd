"""A jaxpr -> a program: a flat list of equations, with calls inlined, and loops and branches kept.

    jit(f)(x);  scan(body, ...)   ->   the equations of f;  scan(body, ...)

Knows jaxprs, and that calls can be inlined. Must not know about batches or devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from vnode.analysis.indexed_loops import counted_loop, scan_over_rows
from vnode.errors import layout_message
from vnode.operators import OperatorDescription, describe
from vnode.operators.control_flow import Body, call_of, implementation_of, region_of
from vnode.operators.indexing import with_batching_dims
from vnode.operators.multi_operand_barrier import BarrierPart, group_barrier_parts

Atom = Var | Literal

ResultIndex = tuple[int, int]
"""A result of an equation: the number of the equation in the program, and the number of the result."""

T = TypeVar("T")
EquationCache = dict[int, tuple[JaxprEqn, T]]
"""A cache by equations' ids. It holds the equations, so that no id is reused."""


@dataclasses.dataclass(eq=False)
class Program:
    """A list of equations in order of evaluation, each variable defined once.

    Attributes:
      inputs: variables of the arguments, then those of tracers that the function closed over.
      constants: variables whose values are known, with the values.
      equations: without calls; loops and branches are single equations.
      outputs: the returned values.
      custom_derivatives: whether a call that was inlined carried its own derivative rule.
      reverse_only: whether such a rule exists for reverse mode only.
    """

    inputs: list[Var]
    constants: dict[Var, Any]
    equations: list[JaxprEqn]
    outputs: list[Atom]
    custom_derivatives: bool = False
    reverse_only: bool = False
    _descriptions: EquationCache[OperatorDescription | None] = dataclasses.field(default_factory=dict, repr=False)
    _bodies: EquationCache[tuple[Program, ...]] = dataclasses.field(default_factory=dict, repr=False)

    def with_equations(self, equations: list[JaxprEqn]) -> Program:
        """A program with the same inputs and outputs, and other equations."""
        return self.derive(self.inputs, equations, self.outputs)

    def derive(self, inputs: list[Var], equations: list[JaxprEqn], outputs: list[Atom]) -> Self:
        """A program with other equations, which shares this one's caches of descriptions and bodies."""
        known = self.custom_derivatives, self.reverse_only, self._descriptions, self._bodies
        return type(self)(inputs, self.constants, equations, outputs, *known)

    def describe(self, eqn: JaxprEqn) -> OperatorDescription | None:
        """The description of one of the program's equations; cached."""
        key = id(eqn)
        if key not in self._descriptions:
            self._descriptions[key] = eqn, describe(eqn)
        return self._descriptions[key][1]

    def bodies(self, eqn: JaxprEqn) -> tuple[Program, ...]:
        """The bodies of one of the program's loops or branches; cached, so that variables stay the same."""
        key = id(eqn)
        if key not in self._bodies:
            region = region_of(eqn)
            found = () if region is None else region.bodies
            self._bodies[key] = eqn, tuple(inline(body.jaxpr, body.constants, eqn) for body in found)
        return self._bodies[key][1]

    def to_closed_jaxpr(self, like: Jaxpr) -> ClosedJaxpr:
        """The program as the body of a loop or branch, in place of the jaxpr `like`."""
        info = like.debug_info._replace(arg_names=("",) * len(self.inputs), result_paths=None)
        held = list(self.constants)
        jaxpr = Jaxpr(held, list(self.inputs), list(self.outputs), join_parts(self.equations), like.effects, info)
        return ClosedJaxpr(jaxpr, [self.constants[var] for var in held])

    def evaluate(self, values: Sequence[Any]) -> list[Any]:
        """The outputs for some inputs, equation by equation."""
        known: dict[Var, Any] = {**self.constants, **dict(zip(self.inputs, values, strict=True))}

        def read(atom: Atom) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for eqn in self.equations:
            with context_of(eqn):
                known.update(zip(eqn.outvars, bind(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        return [read(atom) for atom in self.outputs]

    @functools.cached_property
    def definitions(self) -> dict[Var, JaxprEqn]:
        """The equation that defines a variable; inputs and constants have none."""
        return {var: eqn for eqn in self.equations for var in eqn.outvars}

    @functools.cached_property
    def readers(self) -> dict[Var, list[JaxprEqn]]:
        """The equations that read a variable, each once; no entry if there are none."""
        found: dict[Var, list[JaxprEqn]] = {}
        for eqn in self.equations:
            for var in dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, Var)):
                found.setdefault(var, []).append(eqn)
        return found


def read_inputs(program: Program) -> set[int]:
    """The positions of the inputs from which an output, or an operand of an equation with an effect, is computed."""
    wanted = [*program.outputs, *(atom for eqn in program.equations if eqn.effects for atom in eqn.invars)]
    read = origins(program, {atom for atom in wanted if isinstance(atom, Var)})
    return {i for i, var in enumerate(program.inputs) if var in read}


def origins(program: Program, wanted: Iterable[Var]) -> set[Var]:
    """Some variables of a program, and all that they are computed from."""
    found = set(wanted)
    for eqn in reversed(program.equations):
        if not found.isdisjoint(eqn.outvars):
            found.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return found


@functools.lru_cache(maxsize=1)
def barrier_equation() -> JaxprEqn:
    """A template equation of ``optimization_barrier`` with one operand."""
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).jaxpr.eqns[0]


def inline(jaxpr: Jaxpr, constants: Sequence[Any], within: JaxprEqn | None = None) -> Program:
    """Inlines every call in `jaxpr`, at any depth, with fresh variables.

    Name stacks are joined, so that profiles and errors name the scopes that the user opened. The operands of a
    rematerialized body get a barrier. Otherwise the compiler would merge the body with the forward pass.

    Args:
      jaxpr: an open jaxpr.
      constants: values of its constant variables.
      within: the loop or branch whose body it is; its source line is used for equations that have none.

    Returns:
      The program.
    """
    caller = within and within.source_info.replace(name_stack=source_info_util.new_name_stack())
    program = Program([], {}, [], [])

    def walk(body: Body, operands: Sequence[Atom] | None, caller: Any) -> list[Atom]:
        env: dict[Var, Atom] = {}

        def fresh(var: Var) -> Var:
            env[var] = new = Var(var.aval)
            return new

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        captured: list[Var] = []
        for var, value in zip(body.jaxpr.constvars, body.constants, strict=True):
            if operands is None and isinstance(value, jax.core.Tracer):
                captured.append(fresh(var))
            else:
                program.constants[fresh(var)] = value
        if operands is None:
            program.inputs.extend([*(fresh(var) for var in body.jaxpr.invars), *captured])
        else:
            env.update(zip(body.jaxpr.invars, operands, strict=True))
        for eqn in body.jaxpr.eqns:
            source = eqn.source_info
            if caller is not None:
                source = source.replace(name_stack=caller.name_stack + source.name_stack)
                if not in_user_code(source):
                    source = source.replace(traceback=caller.traceback)
            call = call_of(eqn) or implementation_of(eqn, [known(read(atom)) for atom in eqn.invars])
            if call is None:
                flat = eqn.replace(
                    invars=[read(atom) for atom in eqn.invars],
                    outvars=[fresh(var) for var in eqn.outvars],
                    source_info=source,
                )
                program.equations += split_equation(flat)
                continue
            program.custom_derivatives |= call.custom_derivative
            program.reverse_only |= call.reverse_only
            passed = [read(eqn.invars[i]) for i in call.operands]
            if call.barrier:
                barrier = BarrierPart(barrier_equation().primitive.name)
                passed = [behind_barrier(atom, barrier, source) for atom in passed]
            results = walk(call.body, passed, source)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in body.jaxpr.outvars]

    def known(atom: Atom) -> Any:
        """The value of a scalar that does not depend on the arguments, or None."""
        value = atom.val if isinstance(atom, Literal) else program.constants.get(atom)
        numeric = isinstance(value, jax.Array | np.ndarray | np.generic | int | float)
        return value if numeric and not isinstance(value, jax.core.Tracer) and np.ndim(value) == 0 else None

    visible: dict[int, bool] = {}

    def in_user_code(source: Any) -> bool:
        """Whether the traceback has a frame outside jax. That of a cached call may have none."""
        key = id(source.traceback)
        if key not in visible:
            visible[key] = bool(source_info_util.summarize(source))
        return visible[key]

    def behind_barrier(atom: Atom, barrier: BarrierPart, source: Any) -> Atom:
        if isinstance(atom, Literal):
            return atom
        new = Var(atom.aval)
        part = barrier_equation().replace(primitive=barrier, invars=[atom], outvars=[new], source_info=source)
        program.equations.append(part)
        return new

    program.outputs = walk(Body(jaxpr, tuple(constants)), None, caller)
    definitions = {var: eqn for eqn in program.equations for var in eqn.outvars}
    program.equations = [
        new
        for eqn in program.equations
        for new in with_batching_dims(eqn, definitions.get, program.constants.get) or rewrite_indexed_loop(eqn) or [eqn]
    ]
    return program


def rewrite_indexed_loop(eqn: JaxprEqn) -> list[JaxprEqn] | None:
    """A loop that reads and writes rows by index, as a scan over them; None for any other equation."""
    counted = counted_loop(eqn)
    if counted is None:
        return None
    loop, counter = counted
    (body,) = loop.bodies
    return scan_over_rows(eqn, loop, counter, inline(body.jaxpr, body.constants, eqn))


def split_equation(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Splits an equation of many independent operands into one per operand (an identity)."""
    if len(eqn.outvars) < 2 or len(eqn.outvars) != len(eqn.invars):
        return [eqn]
    description = describe(eqn)
    if description is None or description.part is None:
        return [eqn]
    own = eqn.primitive
    primitive = BarrierPart(own.name) if own is barrier_equation().primitive else own
    return [
        eqn.replace(primitive=primitive, invars=[atom], outvars=[var], params=description.part(eqn.params, i))
        for i, (atom, var) in enumerate(zip(eqn.invars, eqn.outvars, strict=True))
    ]


def join_parts(equations: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Equations for a jaxpr, which has jax's own barriers only: undoes `split_equation` for neighbouring parts."""
    own, found = barrier_equation().primitive, list[JaxprEqn]()
    for eqn, *others in group_barrier_parts(equations, lambda eqn: eqn, lambda *_: True):
        if eqn.primitive.name == own.name:
            several = (eqn, *others)
            invars = [atom for each in several for atom in each.invars]
            outvars = [var for each in several for var in each.outvars]
            found.append(eqn.replace(primitive=own, invars=invars, outvars=outvars))
        else:
            found += [eqn, *others]
    return found


def context_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """A context with an equation's source line, name stack, and the settings under which it was traced."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    source = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    if eqn.ctx.threefry_partitionable == jax.config.jax_threefry_partitionable:
        return source
    contexts = contextlib.ExitStack()
    contexts.enter_context(source)
    contexts.enter_context(jax.threefry_partitionable(eqn.ctx.threefry_partitionable))
    return contexts


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation with its own primitive and parameters."""
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


PROMPTS = ("<stdin>", "<python-input-")
"""File names of code typed at Python's prompt, before version 3.13 and since. Similar names are of generated code."""

LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(os.path.dirname(__file__)))


def source_line(eqn: JaxprEqn) -> str:
    """The user's source line of an equation, ``file:line (function)``: the innermost one outside installed packages.

    In a notebook it is ``In[3]:line (function)``, with the number of the cell.
    """
    recorded = eqn.source_info.traceback
    frames = recorded.frames if recorded is not None else ()
    found = first_user_line((frame.file_name, frame.line_num, frame.function_name) for frame in frames)
    if found:
        return found
    line = source_info_util.summarize(eqn.source_info)
    return "(inside jax)" if LIBRARIES[-1] in line else line


def source_line_of_error(error: BaseException) -> str:
    """The user's source line that raised an error; as `source_line`."""
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return first_user_line(reversed(frames)) or "(inside jax)"


def first_user_line(frames: Iterable[tuple[str, int | None, str]]) -> str | None:
    """The first of some frames (file, line, function) that is outside installed packages."""
    for file_name, line, function in frames:
        name = notebook_cell(file_name) or file_name
        generated = name.startswith("<") and not name.startswith(PROMPTS)
        if not any(library in name for library in LIBRARIES) and not generated:
            return f"{name}:{line} ({function})"
    return None


def notebook_cell(file_name: str) -> str | None:
    """IPython's name, ``In[3]``, of the cell that it compiled under a file name; None for files.

    The file name is that of a temporary file that does not exist, or in a terminal a name in angle brackets.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    ask = getattr(getattr(shell, "compile", None), "format_code_name", None)  # since IPython 8
    found = ask(file_name) if ask is not None else None
    return found and found[1]


def scope(eqn: JaxprEqn) -> str:
    """The name stack of an equation: flax modules and ``jax.named_scope``s, joined by slashes."""
    return str(eqn.source_info.name_stack)


def signature(eqn: JaxprEqn) -> str:
    """The primitive with the types of its operands and results."""

    def types(atoms: Sequence[Any]) -> str:
        return ", ".join(atom.aval.str_short(short_dtypes=True) for atom in atoms)

    return f"{eqn.primitive.name}({types(eqn.invars)}) -> {types(eqn.outvars)}"


def message_about(eqn: JaxprEqn, what: str, *, facts: Sequence[str] = (), remedies: Sequence[str]) -> str:
    """An error's message about an equation, with its source line and its signature."""
    return layout_message(what, where=source_line(eqn), facts=[signature(eqn), *facts], remedies=remedies)
