"""A Python function -> its name and a checksum of its behaviour, the same in every process that runs the same source.

Knows functions and their code. Must not know jaxprs, nor who calls the function.

The checksum covers bytecode, constants, the names that are read, defaults, and closure variables that are numbers or
text and never assigned. It also covers functions of the same module that are called by name. Arrays, lists and objects
are skipped: they may be large, differ between processes, or change between calls.

  >>> def scaled(by):
  ...     return lambda x: by * x
  >>> function_text(scaled(2)) == function_text(scaled(2)), function_text(scaled(2)) == function_text(scaled(3))
  (True, False)
"""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(...))
WRITES = ("STORE_DEREF", "STORE_GLOBAL", "DELETE_DEREF")


def function_text(function: Any) -> str:
    """The name of a callable, and a checksum of its behaviour."""
    digest = hashlib.sha256()
    for part in value_parts(function, set()):
        digest.update(part.encode() + b"\n")
    return f"{name_of(function)} {digest.hexdigest()[:12]}"


def name_of(function: Any) -> str:
    """The qualified name of a function."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def value_parts(value: Any, seen: set[int]) -> Iterator[str]:
    """The parts of a value that are the same in every process.

    Args:
      value: a function, or a closure variable.
      seen: ids of the functions visited so far.
    """
    if isinstance(value, SIMPLE):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, tuple):
        yield f"tuple of {len(value)}"
        for each in value:
            yield from value_parts(each, seen)
    elif isinstance(value, frozenset):
        yield f"set {sorted(map(repr, value))}" if all(isinstance(each, SIMPLE) for each in value) else "set"
    elif isinstance(value, functools.partial):
        yield from value_parts((value.func, value.args, *sorted(value.keywords.items())), seen)
    elif isinstance(value, types.MethodType):
        yield from value_parts(value.__func__, seen)
    elif isinstance(value, types.CodeType):
        yield from code_parts(value, seen)
    elif isinstance(value, types.FunctionType):
        if id(value) not in seen:
            seen.add(id(value))
            yield from function_parts(value, seen)
    elif isinstance(value, type | types.BuiltinFunctionType):
        yield f"{value.__module__}.{value.__qualname__}"
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        inner = getattr(value, "__wrapped__", getattr(type(value), "__call__", None))  # noqa: B004
        if isinstance(inner, types.FunctionType):
            yield from value_parts(inner, seen)


def code_parts(code: types.CodeType, seen: set[int]) -> Iterator[str]:
    """The bytecode of a function and of its inner functions, without lines and names of variables."""
    yield f"code {code.co_code.hex()} {code.co_names} {code.co_argcount} {code.co_kwonlyargcount} {code.co_flags}"
    yield from value_parts(code.co_consts, seen)


def function_parts(function: types.FunctionType, seen: set[int]) -> Iterator[str]:
    """The code of a function, its defaults, its closure variables, and the functions that it calls."""
    code = function.__code__
    yield from code_parts(code, seen)
    yield from value_parts((function.__defaults__, *sorted((function.__kwdefaults__ or {}).items())), seen)
    codes = [*nested_codes(code)]
    written = {i.argval for each in codes for i in dis.get_instructions(each) if i.opname in WRITES}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name not in written:
            try:
                yield from value_parts(cell.cell_contents, seen)
            except ValueError:  # it has no value yet
                yield "empty"
    for name in sorted({name for each in codes for name in each.co_names}):
        called = function.__globals__.get(name)
        if isinstance(called, types.FunctionType) and called.__module__ == function.__module__:
            yield from value_parts(called, seen)


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of all its inner functions."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from nested_codes(const)
