"""Equations of one device -> a timed op: one equation, the local copy of a sharded one, or several fused ones.

Knows jaxprs, descriptions, and how one equation is cut. Must not know how long anything takes, nor on what.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Program, context_of, inline
from vnode.operators import OperatorDescription, describe, evaluate, kind_to_keep
from vnode.operators.control_flow import region_of
from vnode.operators.cost import Cost, described_cost, nbytes
from vnode.operators.memo import Memo
from vnode.operators.memory_spaces import is_on_host
from vnode.operators.program_cost import equation_cost
from vnode.spmd.op_sharding import OpSharding


@dataclasses.dataclass(frozen=True, eq=False)
class TimedOp:
    """Equations that run together, at one device's sizes.

    Attributes:
      equations: the equations, in order.
      reads: the variables that other equations compute.
      writes: the variables that other equations read.
    """

    equations: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]

    @functools.cached_property
    def cost(self) -> Cost:
        """Operations of all equations; bytes at the border only, each variable read once and written once."""
        if len(self.equations) == 1 and region_of(self.equations[0]) is None:
            return self.eqn_costs[0]
        total = Cost()
        for each in self.eqn_costs:
            total = total + dataclasses.replace(each, read=0, written=0)
        read, written = self.border
        return dataclasses.replace(total, read=sum(read.values()), written=sum(written.values()))

    @functools.cached_property
    def eqn_costs(self) -> tuple[Cost, ...]:
        """The cost of each equation."""
        return tuple(map(eqn_cost, self.equations))

    @functools.cached_property
    def border(self) -> tuple[Mapping[Var, int], Mapping[Var, int]]:
        """Bytes of each variable that is read, and of each that is written."""
        shares = dict.fromkeys(self.writes, 1.0)  # the share of each variable that is read
        for eqn, each in zip(reversed(self.equations), reversed(self.eqn_costs), strict=True):
            sizes = {atom: nbytes(atom.aval) for atom in eqn.invars if isinstance(atom, Var)}
            whole = sum(sizes.values())
            own = shares.get(eqn.outvars[0], 1.0)
            for var in sizes:  # a look-up reads only a part of its operand
                part = own if each.read >= whole else own * each.read / max(whole, 1)
                shares[var] = max(shares.get(var, 0.0), part)
        read = {var: math.ceil(nbytes(var.aval) * shares[var]) for var in self.reads if var in shares}
        written = {var: nbytes(var.aval) for var in self.writes}
        for var in self.writes:  # an update in place writes only its new elements
            last = max(k for k, eqn in enumerate(self.equations) if var in eqn.outvars)
            if len(self.writes) == 1 or len(self.equations[last].outvars) == 1:
                written[var] = min(written[var], self.eqn_costs[last].written or written[var])
        return read, written

    @functools.cached_property
    def key(self) -> str:
        """A text that identifies the computation."""
        traced = jax.make_jaxpr(self.function)(*self.shapes)
        return re.sub(" at 0x[0-9a-f]+", "", str(traced))  # addresses of functions differ from run to run

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of `reads`."""
        return tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in self.reads)

    def function(self, *values: Any) -> list[Any]:
        """Evaluates the equations: the values of `reads`, in order, give those of `writes`."""
        return Program([*self.reads], {}, [*self.equations], [*self.writes]).evaluate(values)

    def __str__(self) -> str:
        return " + ".join(dict.fromkeys(eqn.primitive.name for eqn in self.equations))


EQN_COSTS = Memo[Cost](20_000)
"""By kind of equation: layers, and the candidates of a search, have many equal equations."""


def eqn_cost(eqn: JaxprEqn) -> Cost:
    """The cost of an equation, loops and branches included; memoized for other equations."""
    if region_of(eqn) is not None:
        return equation_cost(eqn)
    of = kind_to_keep(eqn)
    if of is None:
        return described_eqn_cost(eqn)
    own: dict[Any, int] = {}
    operands = tuple(None if isinstance(a, Literal) else own.setdefault(a, len(own)) for a in eqn.invars)
    there = tuple(is_on_host(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
    return EQN_COSTS.get_or_make((of, operands, there), lambda: described_eqn_cost(eqn))


def described_eqn_cost(eqn: JaxprEqn) -> Cost:
    """The cost of an equation by its description; without a description, its bytes alone."""
    of = describe(eqn)
    if of is not None:
        return described_cost(eqn, of)
    read = sum(nbytes(atom.aval) for atom in {*(a for a in eqn.invars if isinstance(a, Var))})
    return Cost(read=read, written=sum(nbytes(var.aval) for var in eqn.outvars))


def timed_op_of(equations: Sequence[JaxprEqn], writes: Iterable[Var] | None = None) -> TimedOp:
    """Equations, in order, as one timed op, which by default writes all results that none of them reads."""
    made = dict.fromkeys(var for eqn in equations for var in eqn.outvars)
    read = dict.fromkeys(a for eqn in equations for a in eqn.invars if isinstance(a, Var))
    wanted = [var for var in made if var not in read] if writes is None else list(writes)
    return TimedOp(tuple(equations), tuple(var for var in read if var not in made), tuple(wanted))


def traced_op(function: Callable[..., Any], *args: Any) -> TimedOp:
    """Traces a function of arrays as one timed op, calls inlined.

    >>> traced_op(lambda x: jnp.exp(x) + 1, jnp.ones((4, 8))).cost
    Cost(matrix={}, vector=64, transcendental=32, read=128, written=128)
    """
    traced = jax.make_jaxpr(function)(*args)
    return program_op(inline(traced.jaxpr, traced.consts))


def program_op(program: Program) -> TimedOp:
    """A program as one timed op."""
    outputs = dict.fromkeys(atom for atom in program.outputs if isinstance(atom, Var))
    return TimedOp(tuple(program.equations), (*program.inputs, *program.constants), tuple(outputs))


def copy_of(eqn: JaxprEqn, choice: OpSharding, platform: str = "") -> TimedOp:
    """The first device's copy of a sharded equation, without the collectives before and after.

    Copies of other devices differ in positions only.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from vnode.spmd.op_sharding import OperandSharding, choose
      >>> from vnode.spmd.layout import from_spec
      >>> (eqn,) = jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((8, 16)), jnp.ones((16, 32))).jaxpr.eqns
      >>> axes = {"x": 4}
      >>> layouts = from_spec(P(None, "x"), (8, 16), axes), from_spec(P("x"), (16, 32), axes)
      >>> given = [OperandSharding(layout) for layout in layouts]
      >>> choice = choose(eqn, describe(eqn), given, axes, [None])
      >>> copy_of(eqn, choice).cost.matrix  # 2 * 8 * 4 * 32
      {'float32': 2048}
    """
    description: OperatorDescription = choice.description
    sizes = choice.sizes()
    shapes = [
        jax.ShapeDtypeStruct(description.operand_shape(i, sizes), atom.aval.dtype)
        for i, atom in enumerate(eqn.invars)
        if isinstance(atom, Var)
    ]
    lengths = {f: choice.parts[f][0][0].length for way in choice.ways for f in way.lead}

    def divided_evaluation(*values: Any) -> list[Any]:
        left = iter(values)
        operands = [atom.val if isinstance(atom, Literal) else next(left) for atom in eqn.invars]
        positions = {f: functools.partial(jnp.arange, n, dtype=jnp.int32) for f, n in lengths.items()}
        with context_of(eqn):
            return evaluate(description, eqn, operands, sizes, positions, platform)

    return traced_op(divided_evaluation, *shapes)
