"""The kernel of a Pallas call -> whether its steps along an axis only sum.

Knows kernels, and how sums are written in them. Must not know index maps, nor nodes.

A product of matrices adds up blocks of the contracted dimension, in its result or in scratch memory::

    @pl.when(pl.program_id(2) == 0)                       # first, zero
    def _():
        total[...] = jnp.zeros_like(total)
    total[...] += x[...] @ y[...]                         # then, terms that know nothing of the total
    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)  # at last, the total as it is
    def _():
        o[...] = total[...].astype(o.dtype)

A call on some of the blocks computes a part of the sum. Only this order of writes is recognized as a sum.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from vnode.operators.control_flow import Body, call_of, region_of
from vnode.operators.pallas_kernel import PROGRAM_ID, has_program_id, takes_all


class Term(enum.Enum):
    """The dependence of a value on the operands with blocks along the axis."""

    ZERO = "zero if these operands are"
    SAME = "independent of these operands"
    ANY = "unknown"


class StepCondition(enum.Enum):
    """The program id of the axis, or a condition on it."""

    NUMBER = "the program id"
    FIRST = "the program id is zero"
    LAST = "the program id is the last one"


@dataclasses.dataclass(frozen=True)
class Total:
    """The contents of a reference at a place, plus terms.

    Attributes:
      reference: the reference.
      place: the place, as the reading equation has it; None for all of it.
      cast: whether the value was cast to another type.
    """

    reference: int
    place: Any
    cast: bool = False


Value = Term | StepCondition | Total | int
"""An integer is a reference."""

LINEAR = {"neg", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose", "reduce_sum", "copy"}
"""Zero if their operand is."""

PRODUCTS = {"mul", "dot_general"}
"""Zero if one of the operands is, and the other one is a number."""

SUMS = {"add", "add_any", "sub"}


class Unknown(Exception):
    """The value is not known to be a sum."""


class Stage(enum.IntEnum):
    """The state of a reference."""

    UNTOUCHED, ZEROED, FINAL = range(3)


def adds_up(
    kernel: Jaxpr,
    axis: int,
    size: int,
    state: Sequence[int],
    outputs: Set[int],
    having: Set[int],
    free: Set[int] = frozenset(),
) -> bool:
    """Whether results of a call are sums over an axis, of terms that are zero where its operands are.

    Args:
      kernel: the kernel.
      axis: the axis, as the kernel counts axes.
      size: its size.
      state: inputs that are scratch or results.
      outputs: inputs that are the sums.
      having: operands with blocks along the axis.
      free: results with blocks along the axis; if there are any, the terms are linear in `having`.
    """
    sums = Sums(axis, size, dict.fromkeys(state, Stage.UNTOUCHED), outputs, having, free)
    try:
        sums.body(kernel, list(range(len(kernel.invars))))
    except Unknown:
        return False
    return all(sums.stages[k] != Stage.UNTOUCHED for k in outputs)


class Sums:
    """Follows sums through a kernel; arguments as those of `adds_up`."""

    def __init__(
        self, axis: int, size: int, stages: dict[int, Stage], outputs: Set[int], having: Set[int], free: Set[int]
    ) -> None:
        self.axis, self.size, self.stages, self.outputs, self.having = axis, size, stages, outputs, having
        self.free = free
        self.done = False  # totals have been written to results
        self.level = 0  # nesting depth: `with_size` rewrites the outermost program
        self.depth = 0  # depth of branches that some steps skip

    def body(self, jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """The kinds of a program's results, given those of its inputs.

        Raises:
          Unknown: the kernel does not only sum, as far as is known.
        """
        env: dict[Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update(dict.fromkeys(jaxpr.constvars, Term.SAME))

        def read(atom: Any) -> Value:
            if not isinstance(atom, Literal):
                return env[atom]
            return Term.ZERO if np.ndim(atom.val) == 0 and atom.val == 0 else Term.SAME

        self.level += 1
        for eqn in jaxpr.eqns:
            results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        self.level -= 1
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """The kinds of an equation's results; raises as `body`."""
        name = eqn.primitive.name
        if name == PROGRAM_ID:
            if eqn.params["axis"] != self.axis:
                return [Term.SAME]
            if self.level > 1:
                raise Unknown
            return [StepCondition.NUMBER]
        if name == "cond":
            return self.branch(eqn, operands)
        call = call_of(eqn)
        if call is not None and not any(isinstance(value, StepCondition) for value in operands):
            return self.body(call.body.jaxpr, [operands[i] for i in call.operands])
        if any(isinstance(value, StepCondition) for value in operands):
            return [self.test(eqn, operands)]
        if name == "get":
            return [self.get(eqn, operands)]
        if name in ("swap", "addupdate"):
            self.put(eqn, operands)
            return [Term.ANY] * len(eqn.outvars)
        totals = [value for value in operands if isinstance(value, Total)]
        if totals:
            others = [value for value in operands if value is not totals[0]]
            added = name in ("add", "add_any") and others == [Term.ZERO] * (len(operands) - 1)
            if len(totals) > 1 or not (added or name == "convert_element_type"):
                raise Unknown
            return [dataclasses.replace(totals[0], cast=totals[0].cast or not added)]
        if any(isinstance(value, int) for value in operands) or eqn.effects or self.axis in has_program_id(eqn):
            raise Unknown
        terms = [value for value in operands if isinstance(value, Term)]
        return [term(eqn, terms, linear=bool(self.free))] * len(eqn.outvars)

    def test(self, eqn: JaxprEqn, operands: list[Value]) -> StepCondition:
        """The condition on the program id that an equation computes."""
        (first, *_) = operands
        if eqn.primitive.name == "convert_element_type" and first in (StepCondition.FIRST, StepCondition.LAST):
            assert isinstance(first, StepCondition)
            return first
        if (
            eqn.primitive.name != "eq"
            or operands[0] is not StepCondition.NUMBER
            or not isinstance(eqn.invars[1], Literal)
        ):
            raise Unknown
        number = int(eqn.invars[1].val)
        if number not in (0, self.size - 1):
            raise Unknown
        return StepCondition.FIRST if number == 0 else StepCondition.LAST

    def branch(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Follows a branch taken at the first step, at the last one, or at any step."""
        region = region_of(eqn)
        assert region is not None
        chosen, given = operands[0], operands[1:]
        if any(isinstance(value, StepCondition) for value in given):
            raise Unknown
        if isinstance(chosen, Term):
            if self.free and chosen is not Term.SAME:
                raise Unknown
            self.depth += 1
            made = [self.body(body.jaxpr, given) for body in region.bodies]
            self.depth -= 1
            if any(not isinstance(value, Term) for values in made for value in values):
                raise Unknown
            both = zip(*made, strict=True)
            return [values[0] if len(set(values)) == 1 and chosen is Term.SAME else Term.ANY for values in both]
        plain = not self.depth and not eqn.outvars and len(region.bodies) == 2 and not region.bodies[0].jaxpr.eqns
        if chosen is StepCondition.FIRST and plain:
            self.check_first_step(region.bodies[1], given)
        elif chosen is StepCondition.LAST and plain:
            self.done = True  # the last step only writes totals to results
            self.body(region.bodies[1].jaxpr, given)
        else:
            raise Unknown
        return []

    def check_first_step(self, body: Body, given: list[Value]) -> None:
        """Checks that the first step only initializes with zero."""
        env: dict[Any, Value] = dict(zip(body.jaxpr.invars, given, strict=True))
        zeros: set[Var] = set()
        for eqn in body.jaxpr.eqns:
            if eqn.primitive.name == "broadcast_in_dim" and is_zero(eqn.invars[0]):
                zeros.update(eqn.outvars)
                continue
            reference = env.get(eqn.invars[0]) if eqn.primitive.name == "swap" else None
            written = eqn.invars[1] if len(eqn.invars) > 1 else None
            if (
                not isinstance(reference, int)
                or self.stages.get(reference) != Stage.UNTOUCHED
                or not takes_all(eqn, eqn.invars[2:])
            ):
                raise Unknown
            if written not in zeros and not is_zero(written):
                raise Unknown
            self.stages[reference] = Stage.ZEROED

    def get(self, eqn: JaxprEqn, operands: list[Value]) -> Value:
        """The kind of a value that is read from a reference; raises as `body`."""
        reference = operands[0]
        if not isinstance(reference, int) or any(value not in (Term.SAME, Term.ZERO) for value in operands[1:]):
            raise Unknown
        if reference in self.free:
            return Term.ANY
        if reference not in self.stages:
            return Term.ZERO if reference in self.having else Term.SAME
        if self.stages[reference] != Stage.ZEROED:
            raise Unknown
        return Total(reference, access_place(eqn.invars[1:], eqn))

    def put(self, eqn: JaxprEqn, operands: list[Value]) -> None:
        """Follows a write to a reference; raises as `body`."""
        reference, value = operands[0], operands[1]
        if not isinstance(reference, int) or any(i not in (Term.SAME, Term.ZERO) for i in operands[2:]):
            raise Unknown
        if reference in self.free and isinstance(value, Term):
            return
        stage, adds = self.stages.get(reference), eqn.primitive.name == "addupdate"
        if stage == Stage.UNTOUCHED and reference in self.outputs:
            handed_on = isinstance(value, Total) and value.place is None and takes_all(eqn, eqn.invars[2:])
            if adds or self.depth or not handed_on:
                raise Unknown
            self.stages[reference], self.done = Stage.FINAL, True
            return
        more = value is Term.ZERO if adds else value == Total(reference, access_place(eqn.invars[2:], eqn))
        if self.done or stage != Stage.ZEROED or not more:
            raise Unknown


def access_place(indices: Sequence[Any], eqn: JaxprEqn) -> Any:
    """The place at which an equation accesses its reference; None if that is all of it."""
    if takes_all(eqn, indices):
        return None
    named = tuple((atom.val, None) if isinstance(atom, Literal) else (None, id(atom)) for atom in indices)
    return eqn.params["tree"], named


def is_zero(atom: Any) -> bool:
    """Whether an atom is the number zero."""
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.val == 0


def term(eqn: JaxprEqn, operands: Sequence[Term], linear: bool) -> Term:
    """A result of an equation without references; `linear`: it must be zero where linear operands are."""
    name = eqn.primitive.name
    if all(value is Term.SAME for value in operands):
        return Term.SAME
    zeros = operands.count(Term.ZERO)
    if name in LINEAR or name in SUMS:
        return Term.ZERO if zeros == len(operands) else Term.ANY
    if name in PRODUCTS:
        return Term.ZERO if Term.ANY not in operands and (zeros == 1 if linear else zeros) else Term.ANY
    if name == "select_n" and all(value is Term.ZERO for value in operands[1:]):
        return Term.ZERO if not linear or operands[0] is Term.SAME else Term.ANY
    return Term.ANY


def with_size(kernel: Jaxpr, axis: int, size: int, other: int) -> Jaxpr:
    """A kernel that `adds_up` along an axis, for another size of it: the last step changes."""
    ids = {eqn.outvars[0] for eqn in kernel.eqns if eqn.primitive.name == PROGRAM_ID and eqn.params["axis"] == axis}

    def rewritten(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name != "eq" or eqn.invars[0] not in ids or int(eqn.invars[1].val) != size - 1:
            return eqn
        last = eqn.invars[1]
        return eqn.replace(invars=[eqn.invars[0], Literal(np.asarray(other - 1, last.aval.dtype), last.aval)])

    return kernel.replace(eqns=[rewritten(eqn) for eqn in kernel.eqns])
