"""Equations that contain jaxprs -> calls to inline, and loops and branches as regions.

Knows the parameter names of jax's higher-order primitives in every supported version, and which operands go where. Must
not know how regions are used. All other code asks `call_of` and `region_of`, and asks a `Region` which of its operands
are carried, scanned or read by which body.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive

from vnode.operators.cost import Cost
from vnode.operators.memo import Memo
from vnode.operators.registry import describe, has_rule
from vnode.operators.trip_count import find_trip_count


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr and the values of its constants."""

    jaxpr: Jaxpr
    constants: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """An equation that applies its body to some of its operands.

    Attributes:
      body: the called body.
      operands: the positions of the operands that are passed, in order.
      barrier: whether the body must not be merged with equal computations outside (rematerialization).
      custom_derivative: whether the equation carries a derivative rule that the body does not have.
      reverse_only: whether that rule is for reverse mode only.
    """

    body: Body
    operands: tuple[int, ...]
    barrier: bool = False
    custom_derivative: bool = False
    reverse_only: bool = False


class Control(Protocol):
    """The ways to run loops and branches: in a compiled program, or in Python."""

    def scan(self, body: Callable[[Any, Any], Any], carry: list[Any], xs: list[Any], loop: Loop) -> Any:
        """As `jax.lax.scan`: the last carry, and what the iterations return, stacked."""
        ...

    def repeat(
        self, condition: Run, body: Run, condition_constants: list[Any], constants: list[Any], carry: list[Any]
    ) -> list[Any]:
        """Iterates while the condition, which returns a list of one value, holds; returns the final carry."""
        ...

    def switch(self, index: Any, branches: Sequence[Run], operands: list[Any]) -> list[Any]:
        """As `jax.lax.switch` of functions that take one list."""
        ...


Run = Callable[[list[Any]], list[Any]]
"""Runs a body: from its inputs to its outputs, both in order."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A loop or branch: an equation whose bodies read its operands and compute its results.

    Attributes:
      bodies: in order of evaluation.
      operands: the number of operands.
    """

    bodies: tuple[Body, ...]
    operands: int

    tests: ClassVar[int] = 0
    """The number of bodies, from the first on, that only control the others; those return the equation's results."""

    chooser: ClassVar[int | None] = None
    """The operand that selects the body."""

    stacks: ClassVar[bool] = False
    """Whether results that are not carried are stacked along dimension 0, one element per iteration."""

    @property
    def carried(self) -> range:
        """Operands that change between iterations; their final values are the first results."""
        return range(0)

    @property
    def scanned(self) -> range:
        """Operands of which an iteration reads a slice along dimension 0."""
        return range(0)

    @property
    def fixed(self) -> set[int]:
        """Loop-invariant operands."""
        return set(range(self.operands)).difference(self.carried, self.scanned)

    @property
    def run_count(self) -> int:
        """The trip count of a loop; 1 for a branch, and for a loop of unknown trip count."""
        return 1

    @property
    def passed_through(self) -> range:
        """Operands that the bodies return unchanged, so that results may have any form that these have."""
        return self.carried

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each body its operands, in order."""
        raise NotImplementedError

    def cost(self, costs: Sequence[Cost]) -> Cost:
        """The cost of the equation, given the cost of one run of each body."""
        raise NotImplementedError

    def run(self, control: Control, bodies: Sequence[Run], operands: Sequence[Any]) -> list[Any]:
        """Runs the region.

        Args:
          control: how to run loops and branches.
          bodies: functions that replace the bodies. They receive None for an operand that is None, and may return None
            for unused results, always the same ones.
          operands: the operands' values, in order.

        Returns:
          The results, in order.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Loop(Region):
    """``scan``: operands are constants, initial carries, then arrays that are sliced along dimension 0."""

    constants: int
    carries: int
    length: int
    reverse: bool
    unroll: int

    stacks: ClassVar[bool] = True

    @property
    def carried(self) -> range:
        return range(self.constants, self.constants + self.carries)

    @property
    def scanned(self) -> range:
        return range(self.constants + self.carries, self.operands)

    @property
    def run_count(self) -> int:
        return self.length

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(self.operands)),)

    def cost(self, costs: Sequence[Cost]) -> Cost:
        return costs[0] * self.length

    def run(self, control: Control, bodies: Sequence[Run], operands: Sequence[Any]) -> list[Any]:
        (body,) = bodies
        constants = list(operands[: self.constants])
        first, split = self.carried.start, self.carried.stop

        def iteration(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            out = body([*constants, *carry, *xs])
            return out[: self.carries], out[self.carries :]

        carry, ys = control.scan(iteration, list(operands[first:split]), list(operands[split:]), self)
        return [*carry, *ys]


@dataclasses.dataclass(frozen=True)
class While(Region):
    """``while``: operands are the condition's constants, the body's constants, then initial carries.

    The condition may return an array of booleans, with as many leading dimensions as every carry: then each element of
    the carry stops by itself, and the loop runs until all have stopped.
    """

    condition_constants: int
    body_constants: int
    trip_count: int | None = None
    """The trip count, if it is a constant."""

    tests: ClassVar[int] = 1

    @property
    def carried(self) -> range:
        return range(self.condition_constants + self.body_constants, self.operands)

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        split, first = self.condition_constants, self.carried.start
        return (*range(split), *self.carried), (*range(split, first), *self.carried)

    @property
    def run_count(self) -> int:
        return 1 if self.trip_count is None else self.trip_count

    def cost(self, costs: Sequence[Cost]) -> Cost:
        return costs[0] * (self.run_count + 1) + costs[1] * self.run_count

    def run(self, control: Control, bodies: Sequence[Run], operands: Sequence[Any]) -> list[Any]:
        condition, body = bodies
        split, first = self.condition_constants, self.carried.start
        constants = list(operands[:split]), list(operands[split:first])
        return control.repeat(condition, body, *constants, list(operands[first:]))


@dataclasses.dataclass(frozen=True)
class Branches(Region):
    """``cond``: operand 0 chooses the branch, the others are passed to it."""

    chooser: ClassVar[int | None] = 0

    @property
    def passed_through(self) -> range:
        return range(1, self.operands)

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(self.passed_through),) * len(self.bodies)

    def cost(self, costs: Sequence[Cost]) -> Cost:
        return max(costs, key=lambda cost: cost.flops)

    def run(self, control: Control, bodies: Sequence[Run], operands: Sequence[Any]) -> list[Any]:
        return control.switch(operands[0], bodies, list(operands[1:]))


def body_of(jaxpr: Any) -> Body:
    """Makes a body of a closed or an open jaxpr."""
    return Body(getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ())))


CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "composite": "jaxpr",
    "xla_metadata_call": "jaxpr",
}
"""Primitives that call one jaxpr on all of their operands, and the parameter that holds it."""

WITHOUT_DESCRIPTION = {"custom_partitioning": "call"}
"""Primitives described by their sharding rule; without one they are calls of a jaxpr."""

CUSTOM_DERIVATIVES = {"custom_jvp_call", "custom_vjp_call"}


def call_of(eqn: JaxprEqn) -> Call | None:
    """The call that an equation means, or None."""
    name = eqn.primitive.name
    if name in CALLS:
        return Call(
            body_of(eqn.params[CALLS[name]]),
            tuple(range(len(eqn.invars))),
            barrier=bool(eqn.params.get("differentiated") and eqn.params.get("prevent_cse")),
            custom_derivative=name in CUSTOM_DERIVATIVES,
            reverse_only=name == "custom_vjp_call",
        )
    if name in WITHOUT_DESCRIPTION and describe(eqn) is None:
        return Call(body_of(eqn.params[WITHOUT_DESCRIPTION[name]]), tuple(range(len(eqn.invars))))
    if name == "custom_linear_solve":  # only the solver computes the result; the other jaxprs serve its derivatives
        lengths = eqn.params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        constants = range(start, start + lengths.solve)
        rights = range(sum(lengths), len(eqn.invars))
        return Call(body_of(eqn.params["jaxprs"].solve), (*constants, *rights), custom_derivative=True)
    return None


def implementation_of(eqn: JaxprEqn, known: Sequence[Any]) -> Call | None:
    """The call of a primitive's implementation, if that is written in JAX.

    That is so for primitives of libraries, of sparse arrays (`jax.experimental.sparse`), and for those that jax itself
    lowers to others (since jax 0.12).

    Args:
      eqn: the equation.
      known: the operands' values, None where unknown; an implementation may need one while it is traced.

    Returns:
      The call; None for primitives of jax's core and those with a description, and where the implementation has effects
      or is no JAX code.
    """
    if eqn.effects or has_rule(eqn) or region_of(eqn) is not None:
        return None
    high = eqn.primitive.is_high(*[atom.aval for atom in eqn.invars], **eqn.params)
    run = getattr(eqn.primitive, "to_lojax" if high else "impl", None)
    module = getattr(getattr(run, "func", run), "__module__", None) or "jax._src"
    if not callable(run) or (f"{module}.".startswith(("jax._src.", "jaxlib.")) and not high):
        return None
    given = tuple(None if value is None else (type(value), np.asarray(value).item()) for value in known)
    shapes = tuple(jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type) for a in eqn.invars)
    params = tuple(eqn.params.items())
    key = run, eqn.primitive, exact_key(params), shapes, exact_key(given)
    make = functools.partial(implementation, run, eqn.primitive, params, shapes, given)
    try:
        written = IMPLEMENTATIONS.get_or_make(key, make)
    except TypeError:  # an unhashable parameter
        written = make()
    with jax.threefry_partitionable(eqn.ctx.threefry_partitionable):
        body = trace_implementation(
            written, [shape for shape, value in zip(shapes, given, strict=True) if value is None], eqn
        )
    if body is None or [v.aval.shape for v in body.jaxpr.outvars] != [v.aval.shape for v in eqn.outvars]:
        return None
    return Call(body, tuple(i for i, value in enumerate(known) if value is None), custom_derivative=high)


IMPLEMENTATIONS = Memo[Any](1024)
"""Caches one traced function per kind of equation, so that jax traces it once per configuration."""


def exact_key(value: Any) -> Hashable:
    """A key that distinguishes numbers that are equal in Python but not in a program: 1 and True, 0.0 and -0.0."""
    if isinstance(value, tuple | list):
        return type(value), tuple(map(exact_key, value))
    return type(value), repr(value) if isinstance(value, float | complex | np.inexact) else value


def implementation(
    run: Callable[..., Any],
    primitive: Primitive,
    params: tuple[tuple[str, Any], ...],
    shapes: tuple[Any, ...],
    given: tuple[Any, ...],
) -> Any:
    """A primitive's implementation as a function of the values that are not given."""

    def evaluate(*values: Any) -> list[Any]:
        rest = iter(values)
        operands = [
            next(rest)
            if value is None
            else value[1]
            if value[0] in (bool, int, float)
            else np.asarray(value[1], shape.dtype)
            for value, shape in zip(given, shapes, strict=True)
        ]
        results = run(*operands, **dict(params))
        return list(results) if primitive.multiple_results else [results]

    return jax.jit(evaluate)


def trace_implementation(function: Any, shapes: Sequence[Any], eqn: JaxprEqn) -> Body | None:
    """The traced body of an implementation; None if it is no JAX code, has effects, or is the equation itself."""
    try:
        closed = function.trace(*shapes).jaxpr
    except Exception:  # code that is not written in JAX may raise anything on tracers
        return None
    same = any(each.primitive is eqn.primitive and each.params == eqn.params for each in closed.jaxpr.eqns)
    return None if closed.effects or same else body_of(closed)


def region_of(eqn: JaxprEqn) -> Region | None:
    """The region of a loop or branch; None for other equations."""
    params, count = eqn.params, len(eqn.invars)
    match eqn.primitive.name:
        case "scan":
            if "num_consts" in params:
                constants, carries = params["num_consts"], params["num_carry"]
            else:
                groups = params["ft_in"].update(list(range(len(eqn.invars)))).unpack()
                constants, carries = len(list(groups[0])), len(list(groups[1]))
            body = body_of(params["jaxpr"])
            return Loop((body,), count, constants, carries, params["length"], params["reverse"], params["unroll"])
        case "while":
            bodies = tuple(body_of(params[name]) for name in WHILE)
            constants = params["cond_nconsts"], params["body_nconsts"]
            known = find_trip_count(bodies[0].jaxpr, bodies[1].jaxpr, eqn.invars, constants)
            return While(bodies, count, *constants, known)
        case "cond":
            return Branches(tuple(body_of(branch) for branch in params["branches"]), count)
    return None


def with_bodies(eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr]) -> JaxprEqn:
    """Replaces the bodies of a loop or branch; they are in the region's order, and have as many inputs and outputs."""
    match eqn.primitive.name:
        case "scan":
            (params,) = ({"jaxpr": in_representation_of(eqn.params["jaxpr"], body)} for body in bodies)
        case "while":
            params = {
                name: in_representation_of(eqn.params[name], body) for name, body in zip(WHILE, bodies, strict=True)
            }
        case _:
            several = zip(eqn.params["branches"], bodies, strict=True)
            params = {"branches": tuple(in_representation_of(old, body) for old, body in several)}
    return eqn.replace(params={**eqn.params, **params})


def restrict_region(
    eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr], operands: Sequence[int], results: Sequence[int]
) -> JaxprEqn:
    """A loop or branch with some of its operands and results.

    Args:
      eqn: the loop or branch.
      bodies: in the region's order; their inputs and outputs are those of the operands and results that stay.
      operands: the operands that stay, in order.
      results: the results that stay, in order.
    """
    region = region_of(eqn)
    assert region is not None

    def count(*bounds: int) -> int:
        return sum(i in range(*bounds) for i in operands)

    if isinstance(region, Loop):
        (body,) = bodies
        carries = count(region.carried.start, region.carried.stop)
        params = scan_like(eqn, body, count(region.constants), carries)
    else:
        params = with_bodies(eqn, bodies).params
    if isinstance(region, While):
        split = region.condition_constants
        params |= {"cond_nconsts": count(split), "body_nconsts": count(split, region.carried.start)}
    return eqn.replace(
        invars=[eqn.invars[i] for i in operands], outvars=[eqn.outvars[k] for k in results], params=params
    )


def scan_like(eqn: JaxprEqn, body: ClosedJaxpr, constants: int, carries: int | None = None) -> dict[str, Any]:
    """The parameters of a scan like a given one, with another body.

    Args:
      eqn: the given scan.
      body: its inputs are constants, carries, and one iteration's elements of scanned arrays.
      constants: the number of its constants.
      carries: the number of carries; by default that of `eqn`.
    """
    loop = region_of(eqn)
    assert isinstance(loop, Loop)
    carries = loop.carries if carries is None else carries
    inputs, outputs = len(body.jaxpr.invars), len(body.jaxpr.outvars)
    params = {**eqn.params, "jaxpr": in_representation_of(eqn.params["jaxpr"], body)}
    if "num_consts" in params:
        params |= {"num_consts": constants, "num_carry": carries}
    else:
        params |= scan_grouping(constants, carries, inputs - constants - carries, outputs - carries)
    return params | ({"linear": (False,) * inputs} if "linear" in params else {})


@functools.cache
def scan_grouping(constants: int, carries: int, scanned: int, stacked: int) -> dict[str, Any]:
    """The parameter that groups a scan's operands and results, since jax 0.12; copied from a scan that jax made."""

    def scan(constant: list[Any], carry: list[Any], xs: list[Any]) -> Any:
        def turn(carry: list[Any], parts: list[Any]) -> Any:
            total = sum([*constant, *carry, *parts])
            return [total + each for each in carry], [total * (k + 2) for k in range(stacked)]

        return jax.lax.scan(turn, carry, xs, length=1)

    given = [1.0] * constants, [1.0] * carries, [np.ones(1)] * scanned
    (made,) = (eqn for eqn in jax.make_jaxpr(scan)(*given).jaxpr.eqns if eqn.primitive.name == "scan")
    return {name: made.params[name] for name in ("ft_in", "ft_out")}


def in_representation_of(old: Any, body: ClosedJaxpr) -> Any:
    """A body in the representation, closed or open, in which an equation holds `old`."""
    return body if not hasattr(old, "eqns") or type(old) is type(body) else body.jaxpr


WHILE = ("cond_jaxpr", "body_jaxpr")
"""The parameters that hold the bodies of a ``while``."""


def bind_while(
    eqn: JaxprEqn, condition: Any, body: Any, condition_constants: Sequence[Any], constants: Sequence[Any], init: Any
) -> list[Any]:
    """Runs a ``while`` equation with other jaxprs (whose condition may return an array of booleans).

    Args:
      eqn: the equation; its primitive is bound.
      condition: closed jaxpr from condition constants and carries to booleans.
      body: closed jaxpr from constants and carries to carries.
      condition_constants: constants of the condition.
      constants: constants of the body.
      init: initial carries.

    Returns:
      The final carries.
    """
    params = {
        **with_bodies(eqn, (condition, body)).params,
        "cond_nconsts": len(condition_constants),
        "body_nconsts": len(constants),
    }
    return eqn.primitive.bind(*condition_constants, *constants, *init, **params)
