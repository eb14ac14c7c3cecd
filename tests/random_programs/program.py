"""What a random program is: arguments, statements, outputs; and how it reads as Python source.

Knows Python source and how argument values are drawn. Must not know how programs are made, nor what is expected of
them when they run.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.opaque import opaque

NAME = re.compile(r"\b[a-z]\d+\b")
"""Every variable and function of a program is a letter and a number."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the program.

    Attributes:
      name: its name.
      shape: its shape at the global batch.
      dtype: a dtype's name, or "key" for new-style random keys.
      axis: the batch dimension, as in `jax.vmap`; None if it carries no examples.
      low: the least value.
      high: the greatest value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int | None
    low: float = -1.0
    high: float = 1.0

    @property
    def source(self) -> str:
        """An expression that draws the value from a generator called ``draw``."""
        if self.dtype == "key":
            seed = f"jax.random.key({zlib.crc32(self.name.encode()) % 1000})"
            return f"jax.random.split({seed}, {self.shape})" if self.shape else seed
        draw = f"draw({self.name!r})"
        if self.dtype == "bool":
            return f"{draw}.uniform(size={self.shape}) < 0.6"
        if self.dtype.startswith(("int", "uint")):
            return f"{draw}.integers({int(self.low)}, {int(self.high) + 1}, {self.shape}, dtype=np.{self.dtype})"
        uniform = f"{draw}.uniform({self.low}, {self.high}, {self.shape})"
        return uniform if self.dtype == "float64" else f"jnp.asarray({uniform}, jnp.{self.dtype})"

    def value(self, seed: int) -> Any:
        """The value, which depends on `seed` and the argument's own name only."""
        return eval(self.source, {"jax": jax, "jnp": jnp, "np": np, "draw": drawer(seed)})


def drawer(seed: int) -> Callable[[str], np.random.Generator]:
    """For every name a generator of its own, so that the other values stay when an argument goes."""
    return lambda name: np.random.default_rng([seed, zlib.crc32(name.encode())])


@dataclasses.dataclass(frozen=True)
class Function:
    """A local function that a statement calls.

    Attributes:
      name: its name.
      parameters: the text of its parameter list.
      statements: its body.
      result: the expression that it returns.
      decorator: a line before it.
      unpack: lines at its start (a carry's parts, say).
      trailer: lines after it (a derivative rule), with the function's indentation.
    """

    name: str
    parameters: str
    statements: tuple[Statement, ...]
    result: str
    decorator: str = ""
    unpack: tuple[str, ...] = ()
    trailer: tuple[str, ...] = ()

    def lines(self, indent: str) -> Iterator[str]:
        if self.decorator:
            yield indent + self.decorator
        yield f"{indent}def {self.name}({self.parameters}):"
        inner = indent + "    "
        yield from (inner + line for line in self.unpack)
        for statement in self.statements:
            yield from statement.lines(inner)
        yield f"{inner}return {self.result}"
        yield from (indent + line for line in self.trailer)


@dataclasses.dataclass(frozen=True)
class Statement:
    """An assignment, after the definitions of the functions that its expression calls.

    Attributes:
      targets: the names that it binds.
      expression: the right-hand side.
      functions: definitions before it.
      avals: shape and dtype of every target, ``(shape, dtype name)``.
    """

    targets: tuple[str, ...]
    expression: str
    functions: tuple[Function, ...] = ()
    avals: tuple[tuple[tuple[int, ...], str], ...] = ()

    def lines(self, indent: str) -> Iterator[str]:
        for function in self.functions:
            yield from function.lines(indent)
        yield f"{indent}{', '.join(self.targets)} = {self.expression}"

    def uses(self) -> set[str]:
        """Names that stand in it, also those that it binds itself."""
        return names_in("\n".join(self.lines("")))


def names_in(source: str) -> set[str]:
    """The names of variables and functions in `source`.

    >>> sorted(names_in("f3(x1 + jnp.float64(v20), axis=1)"))
    ['f3', 'v20', 'x1']
    """
    return set(NAME.findall(source))


@dataclasses.dataclass(frozen=True)
class Program:
    """A function for the whole batch, its arguments, and the way it is virtualized.

    Attributes:
      seed: what it was made from; also seeds the argument values.
      arguments: its arguments.
      statements: its body.
      outputs: the names that it returns.
      virtual_nodes: V.
      devices: how many devices.
      reduction: as in `vnode.virtualize`.
      bundle: whether the batched arguments come as one dict, and the others as another.
      counts: nodes on each device, None for as even as possible.
      outer: the name of the transformation around the function, one of `outer.OUTER`.
    """

    seed: int
    arguments: tuple[Argument, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    virtual_nodes: int
    devices: int
    reduction: str = "invariant"
    bundle: bool = False
    counts: tuple[int, ...] | None = None
    outer: str = "same"

    def step_source(self) -> str:
        """The function alone, called ``step``."""
        lines = []
        if self.bundle:
            lines.append("def step(state, batch):")
            for bundle, members in (("state", self.whole), ("batch", self.batched)):
                lines += [f"    {a.name} = {bundle}[{a.name!r}]" for a in members]
        else:
            lines.append(f"def step({', '.join(a.name for a in self.ordered)}):")
        for statement in self.statements:
            lines += statement.lines("    ")
        lines.append(f"    return {{{', '.join(f'{name!r}: {name}' for name in self.outputs)}}}")
        return "\n".join(lines) + "\n"

    @property
    def whole(self) -> list[Argument]:
        return [a for a in self.arguments if a.axis is None]

    @property
    def batched(self) -> list[Argument]:
        return [a for a in self.arguments if a.axis is not None]

    @property
    def ordered(self) -> list[Argument]:
        return self.whole + self.batched

    @property
    def in_axes(self) -> tuple[Any, ...]:
        if self.bundle:
            return (None, {a.name: a.axis for a in self.batched})
        return tuple(a.axis for a in self.ordered)

    def step(self) -> Callable[..., dict[str, Any]]:
        """The function, compiled from its source; tracebacks and `inspect` see the source's lines."""
        import linecache

        source = self.step_source()
        filename = f"<random program {self.seed}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        namespace: dict[str, Any] = {"jax": jax, "jnp": jnp, "opaque": opaque}
        exec(compile(source, filename, "exec"), namespace)
        return namespace["step"]

    def values(self) -> tuple[Any, ...]:
        """The arguments' values."""
        if self.bundle:
            return (
                {a.name: a.value(self.seed) for a in self.whole},
                {a.name: a.value(self.seed) for a in self.batched},
            )
        return tuple(a.value(self.seed) for a in self.ordered)

    def __str__(self) -> str:
        """A script that shows the difference."""
        if self.bundle:
            values = ", ".join(
                "{" + ", ".join(f"{a.name!r}: {a.source}" for a in members) + "}"
                for members in (self.whole, self.batched)
            )
        else:
            values = ", ".join(a.source for a in self.ordered)
        outer = "{}" if self.outer == "same" else self.outer + "({})"
        counts = f", counts={self.counts}" if self.counts else ""
        return f"""\
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={self.devices}"
import zlib
import jax, jax.numpy as jnp, numpy as np, vnode
from tests.opaque import opaque
from tests.random_programs.outer import grad, jit, scan, vmap
jax.config.update("jax_enable_x64", True)
draw = lambda name: np.random.default_rng([{self.seed}, zlib.crc32(name.encode())])

{self.step_source()}
args = ({values},)
virtual = vnode.virtualize(
    step, virtual_nodes={self.virtual_nodes}, in_axes={self.in_axes}, recompute_budget=float("inf"),
    reduction={self.reduction!r})
print(jax.jit({outer.format("step")})(*args))
print({outer.format(f"virtual.on(jax.devices(){counts})")}(*args))
"""


def live(statements: Iterable[Statement], needed: set[str]) -> tuple[Statement, ...]:
    """The statements that `needed` names depend on, in order."""
    kept: list[Statement] = []
    needed = set(needed)
    for statement in reversed(tuple(statements)):
        if needed & set(statement.targets):
            kept.append(statement)
            needed |= statement.uses()
    return tuple(reversed(kept))


def size(shape: tuple[int, ...]) -> int:
    """The number of elements of an array of `shape`."""
    return math.prod(shape)
