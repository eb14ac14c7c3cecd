"""A traced function -> a fingerprint that is the same in every process; two fingerprints -> their differences.

Knows jaxprs, and which of their parameters affect the result. Must not know steps, devices or files.

    lambda x: 2 * sin(x)   ->   sha256 of   input float32[3]
                                            [0] sin(float32[3]) -> float32[3]
                                            ['2.0', 1] mul(2.0, float32[3]) -> float32[3]
                                            output [2]

The text omits all that does not change values: names of functions and variables, source lines, shardings, meshes and
weak types. It contains the behaviour of a Python function whose results the program reads (`jax.pure_callback`, see
`vnode.analysis.host_function`), and only the name of one called for its effects, such as `jax.debug.callback`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from vnode.analysis.program import Program, inline, source_line
from vnode.analysis.tracing import trace
from vnode.operators.control_flow import Region, region_of

SHOWN = 1000
"""The number of distinct operations kept to name differences. The digest covers all operations."""

NON_PARTITIONABLE_KEYS = "random numbers with jax_threefry_partitionable=False"
"""The text for programs that draw from keys under this setting. It changes the numbers, and no parameter shows it."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a traced function.

    Attributes:
      digest: SHA-256 of its operations, constants and data flow.
      operations: the count of each operation, regardless of its operands; the first `SHOWN` of them.
      lines: the user's source line of each operation; not compared.
    """

    digest: str
    operations: dict[str, int]
    lines: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The fingerprint as a dictionary for JSON; without `lines`."""
        return {"digest": self.digest, "operations": self.operations}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Fingerprint:
        """A fingerprint from the dictionary of `to_json`."""
        return cls(content["digest"], dict(content["operations"]))

    def differences(self, before: Fingerprint) -> list[str]:
        """The operations that only this function has, and those that only `before` has; empty if they are equal."""
        if self.digest == before.digest:
            return []
        now, then = Counter(self.operations), Counter(before.operations)
        facts = [f"now:  {counted_text(text, n)}{self.location_text(text)}" for text, n in (now - then).items()]
        facts += [f"then: {counted_text(text, n)}" for text, n in (then - now).items()]
        return facts or ["the same operations, applied to other values"]

    def location_text(self, operation: str) -> str:
        """`` at`` and the source line of an operation; empty if it is unknown."""
        return f" at {self.lines[operation]}" if self.lines.get(operation) else ""


def counted_text(text: str, count: int) -> str:
    """An operation with its count, if that is not one."""
    return text if count == 1 else f"{count} x {text}"


def fingerprint(fun: Callable[..., Any], *args: Any) -> Fingerprint:
    """Traces a function, without running it, and returns its fingerprint.

    Args:
      fun: a function of pytrees of arrays, which returns one.
      *args: arrays, or `jax.ShapeDtypeStruct`s.

    Returns:
      The same in every process, for arguments of the same shapes and dtypes, whatever devices there are.

    Example:
      >>> import jax.numpy as jnp
      >>> def descend(rate, w):
      ...     return w - rate * jnp.sin(w)
      >>> a, b = (fingerprint(functools.partial(descend, rate), jnp.ones(3)) for rate in (0.1, 0.01))
      >>> [fact.split(" at ")[0] for fact in a.differences(b)]
      ['now:  mul(0.1, float32[3]) -> float32[3]', 'then: mul(0.01, float32[3]) -> float32[3]']
    """
    return fingerprint_of(trace(fun, *args).program)


def fingerprint_of(*programs: Program, host_code: bool = True) -> Fingerprint:
    """The fingerprint of several programs, in order; without `host_code` only with the names of Python functions."""
    writer = Writer(host_code)
    for program in programs[:-1]:
        writer.program(program)
    return writer.write(programs[-1])


class Writer:
    """Turns programs into text, operation by operation.

    Args:
      host_code: whether the text contains the behaviour of Python functions whose results a program reads.
    """

    def __init__(self, host_code: bool = True) -> None:
        self.host_code = host_code
        self.counts: Counter[str] = Counter()
        self.lines: dict[str, str] = {}
        self.hash = hashlib.sha256()

    def write(self, program: Program) -> Fingerprint:
        """Feeds the last program, and returns the fingerprint of all."""
        self.program(program)
        shown = dict(sorted(self.counts.items())[:SHOWN])
        return Fingerprint(self.hash.hexdigest(), shown, {text: self.lines[text] for text in shown})

    def program(self, program: Program) -> None:
        """Feeds a program to the hash, with variables numbered in order."""
        numbers: dict[Var, int] = {}
        for var in program.inputs:
            numbers[var] = len(numbers)
            self.feed(f"input {type_of(var)}")
        for var, value in program.constants.items():
            numbers[var] = len(numbers)
            text = f"constant {value_text(value)}"
            self.feed(text)
            self.count(text, "")
        if any(map(draws_non_partitionable, program.equations)):
            self.feed(NON_PARTITIONABLE_KEYS)
            self.count(NON_PARTITIONABLE_KEYS, "")
        for eqn in program.equations:
            operands = [literal(atom) if isinstance(atom, Literal) else numbers[atom] for atom in eqn.invars]
            for var in eqn.outvars:
                numbers[var] = len(numbers)
            text = self.operation(eqn)
            self.feed(f"{operands} {text}")
        self.feed(f"output {[literal(a) if isinstance(a, Literal) else numbers[a] for a in program.outputs]}")

    def operation(self, eqn: JaxprEqn) -> str:
        """An equation as text. Feeds the bodies of a loop or branch before, and counts their operations."""
        region = region_of(eqn)
        for body in () if region is None else region.bodies:
            self.feed("body")
            self.program(inline(body.jaxpr, body.constants, eqn))
        params = [] if region is None else facts_of(region)
        if region is None:
            said = {name: value for name, value in eqn.params.items() if value is not None and name != "weak_type"}
            is_read = self.host_code and bool(eqn.outvars)
            texts = {name: parameter_text(value, is_read) for name, value in sorted(said.items())}
            params = [f"{name}={text}" for name, text in texts.items() if text]
        inside = ", ".join(literal(a) if isinstance(a, Literal) else type_of(a) for a in eqn.invars)
        outside = ", ".join(map(type_of, eqn.outvars))
        text = f"{eqn.primitive.name}{'[' + ', '.join(params) + ']' if params else ''}({inside}) -> {outside}"
        self.count(text, source_line(eqn) if text not in self.lines else "")
        return text

    def count(self, text: str, line: str) -> None:
        self.counts[text] += 1
        self.lines.setdefault(text, line)

    def feed(self, text: str) -> None:
        self.hash.update(text.encode() + b"\n")


def draws_non_partitionable(eqn: JaxprEqn) -> bool:
    """Whether an equation reads keys with ``jax_threefry_partitionable=False``, which draws other numbers."""
    reads = any(jnp.issubdtype(getattr(a.aval, "dtype", bool), jax.dtypes.prng_key) for a in eqn.invars)
    return reads and not eqn.ctx.threefry_partitionable


def facts_of(region: Region) -> list[str]:
    """The fields of a loop or branch besides its bodies, and besides unrolling, which does not change the result."""
    facts = {field.name: getattr(region, field.name) for field in dataclasses.fields(region)}
    return [f"{name}={value}" for name, value in facts.items() if name not in ("bodies", "unroll")]


def type_of(var: Any) -> str:
    """The dtype and shape of a variable, without weak type or sharding."""
    aval = var.aval
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "dtype") else type(aval).__name__


def literal(atom: Literal) -> str:
    """A literal in its own dtype: 0.1, not 0.10000000149, which is float32's 0.1 in float64."""
    return value_text(np.asarray(atom.val, atom.aval.dtype)) if np.ndim(atom.val) == 0 else value_text(atom.val)


def parameter_text(value: Any, is_read: bool) -> str:
    """A parameter of an equation as text.

    Args:
      value: the parameter.
      is_read: whether the equation has results. Then the text contains the behaviour of a Python function it calls.
    """
    called = getattr(value, "callback_func", None) if is_read else None
    if called is None:
        return value_text(value)
    from vnode.analysis.host_function import function_text  # rarely met

    return function_text(called)


@functools.singledispatch
def value_text(value: Any) -> str:
    """A parameter, constant or literal as text without addresses; empty if it does not change values."""
    if isinstance(value, jax.sharding.Sharding | jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return ""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # the step may be traced now
            return f"{value.dtype} {value_text(jax.random.key_data(value))}"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        if array.ndim == 0:
            return str(array)
        return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:12]}"
    if isinstance(value, np.dtype | jax.dtypes.extended | type):
        return str(value)
    if callable(value):
        return function_name(value)
    text = repr(value)
    text = type(value).__name__ if " at 0x" in text or "\n" in text else text
    return f"{text} of {' '.join(held)}" if (held := list(map(value_text, programs_in(value)))) else text


def programs_in(value: Any) -> Iterator[Any]:
    """Jaxprs in the fields of a dataclass, at any depth; its text does not show them."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from programs_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from programs_in(getattr(value, field.name, None))


@value_text.register(bool | int | float | complex | str | None)
def _(value: Any) -> str:
    return str(value)


@value_text.register
def _(value: enum.Enum) -> str:
    return value.name


@value_text.register(tuple | list)
def _(value: Any) -> str:
    return f"({', '.join(map(value_text, value))})"


@value_text.register(set | frozenset)
def _(value: Any) -> str:
    return f"{{{', '.join(sorted(map(value_text, value)))}}}"


@value_text.register
def _(value: dict) -> str:
    return f"{{{', '.join(f'{key}: {value_text(entry)}' for key, entry in sorted(value.items(), key=str))}}}"


@value_text.register(ClosedJaxpr | Jaxpr)
def _(value: Any) -> str:
    body = getattr(value, "jaxpr", value)
    return Writer().write(inline(body, getattr(value, "consts", ()))).digest[:12]


@value_text.register
def _(value: export.Exported) -> str:
    from vnode.operators.exported import program_text  # rarely met, as its description is

    return hashlib.sha256(program_text(value).encode()).hexdigest()[:12]


def function_name(value: Any) -> str:
    """A function's name; a partial function's or a wrapper's with the inner function and the bound arguments."""
    inner = getattr(value, "func", getattr(value, "__wrapped__", None))
    if inner is not None and inner is not value:
        return f"{value_text(inner)}({value_text(tuple(getattr(value, 'args', ()) or ()))})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))
