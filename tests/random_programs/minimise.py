"""Makes a failing program small while it keeps failing the same way.

Knows the parts of a program and which of them can be left out. Must not know what the failure is: it is given a
predicate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.random_programs.program import Argument, Function, Program, Statement, live, names_in

Predicate = Callable[[Program], bool]

PLAIN = ("float64", "int64", "int32", "bool")
"""Dtypes of values that can be replaced by arguments and constants."""


def minimise(program: Program, fails: Predicate, budget: int = 200) -> Program:
    """Tries smaller programs for as long as one of them fails.

    Args:
      program: a failing program.
      fails: whether a program fails in the same way; an invalid program does not.
      budget: how many programs may be tried.

    Returns:
      A program that fails, of which no single simplification tried does, unless the budget ran out.
    """
    tried: set[str] = {str(program)}
    while True:
        for smaller in simplifications(program):
            smaller = tidy(smaller)
            text = str(smaller)
            if text in tried:
                continue
            tried.add(text)
            budget -= 1
            if budget < 0:
                return program
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def tidy(program: Program) -> Program:
    """Without statements and arguments that nothing depends on, as long as a batched argument is left."""
    statements = tuple(tidy_statement(s) for s in live(program.statements, set(program.outputs)))
    used = names_in("\n".join(line for s in statements for line in s.lines(""))) | set(program.outputs)
    arguments = tuple(a for a in program.arguments if a.name in used)
    if not any(a.axis is not None for a in arguments):
        arguments += (program.batched[0],)
    return dataclasses.replace(program, statements=statements, arguments=arguments)


def tidy_statement(statement: Statement) -> Statement:
    functions = tuple(
        dataclasses.replace(
            f,
            statements=tuple(
                tidy_statement(s) for s in live(f.statements, names_in(f.result + "".join(f.unpack + f.trailer)))
            ),
        )
        for f in statement.functions
    )
    return dataclasses.replace(statement, functions=functions)


def simplifications(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest steps first."""
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield dataclasses.replace(program, outputs=(name,))
    if program.bundle:
        yield dataclasses.replace(program, bundle=False)
    if program.outer != "same":
        yield dataclasses.replace(program, outer="same")
    if program.counts is not None:
        yield dataclasses.replace(program, counts=None)
    for devices in range(1, program.devices if program.counts is None else 1):
        yield dataclasses.replace(program, devices=devices)
    if program.reduction != "fast":
        yield dataclasses.replace(program, reduction="fast")
    for nodes in (1, 2, 3, 4):
        if nodes < program.virtual_nodes and program.counts is None:
            yield dataclasses.replace(program, virtual_nodes=nodes)
    inputs = [(a.name, a.shape, a.dtype) for a in program.arguments]
    # Return an earlier value instead of an output's.
    for name in program.outputs:
        for statement in reversed(program.statements):
            if name in statement.targets:
                for used in sorted(statement.uses() - set(statement.targets), reverse=True):
                    if any(used in s.targets for s in program.statements):
                        outputs = dict.fromkeys(used if o == name else o for o in program.outputs)
                        yield dataclasses.replace(program, outputs=tuple(outputs))
    # A new argument instead of a computed value.
    sizes = {a.shape[a.axis] for a in program.batched}
    for i, statement in reversed(list(enumerate(program.statements))):
        if len(statement.targets) == 1 and statement.avals and statement.avals[0][1] in PLAIN:
            shape, dtype = statement.avals[0]
            name = statement.targets[0]
            if name in program.outputs and len(program.outputs) == 1:
                continue
            rest = (*program.statements[:i], *program.statements[i + 1 :])
            for axis in [d for d, n in enumerate(shape) if n in sizes] + [None]:
                argument = Argument(name, shape, dtype, axis, 0 if dtype != "float64" else -1, 1)
                yield dataclasses.replace(program, statements=rest, arguments=(*program.arguments, argument))
    for statements in simpler_bodies(program.statements, inputs):
        yield dataclasses.replace(program, statements=statements)


Names = list[tuple[str, tuple[int, ...], str]]


def simpler_bodies(statements: tuple[Statement, ...], inputs: Names) -> Iterator[tuple[Statement, ...]]:
    """Bodies with one statement simplified: replaced by one of its operands, or with a simpler local function."""
    scope = list(inputs)
    for i, statement in enumerate(statements):
        for simpler in simpler_statements(statement, scope):
            yield (*statements[:i], simpler, *statements[i + 1 :])
        scope += [(n, *aval) for n, aval in zip(statement.targets, statement.avals, strict=False)]


def simpler_statements(statement: Statement, scope: Names) -> Iterator[Statement]:
    if len(statement.targets) == 1 and statement.avals:
        uses = statement.uses()
        for name, shape, dtype in reversed(scope):
            if (shape, dtype) == statement.avals[0] and name in uses and statement.expression != name:
                yield dataclasses.replace(statement, expression=name, functions=())
        shape, dtype = statement.avals[0]
        if dtype in PLAIN:
            constant = f"jnp.ones({shape}, jnp.{dtype if dtype != 'bool' else 'bool_'})"
            if statement.expression != constant:
                yield dataclasses.replace(statement, expression=constant, functions=())
    for k, function in enumerate(statement.functions):
        for simpler in simpler_functions(function, scope):
            functions = (*statement.functions[:k], simpler, *statement.functions[k + 1 :])
            yield dataclasses.replace(statement, functions=functions)


def simpler_functions(function: Function, scope: Names) -> Iterator[Function]:
    if function.decorator in ("@jax.checkpoint", "@jax.remat", "@jax.jit"):
        yield dataclasses.replace(function, decorator="")
    for statements in simpler_bodies(function.statements, scope):
        yield dataclasses.replace(function, statements=statements)
