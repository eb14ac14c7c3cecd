"""The result of batch flow, as data: the state of every value, the step of every equation, and the couplings.

Knows forms, programs and descriptions, as data. Must not know how any of it is found, nor what is done with it.

Levels. A value of level k is available after k rounds of reductions. The step's arguments have level 0. A sum over
examples in pass k has level k + 1 when it is read as a whole value. An equation of batched values that reads a whole
value of level k belongs to pass k. A batched value that must be read whole (for a sort over the batch, or all pairs) is
materialized: gathered after its pass, one level later.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.forms import WHOLE, Batch, Form, Location, Partial, Slice, Whole
from vnode.analysis.program import Atom, Program
from vnode.operators import OperatorDescription
from vnode.operators.control_flow import Region
from vnode.operators.program_cost import equation_flops


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a value.

    Attributes:
      form: how nodes hold it.
      level: the round after which a whole value is available; the earliest pass that can compute any other.
      local_level: the round after which nodes can have the whole value, or one computed from their own examples alone.
      ghost: whether it is computed from a sum over the batch that depends on the model, under ``coupling="local"``:
        examples read their node's estimate.
      zero: whether it is known to be all zeros.
      model: whether it depends on an unbatched argument.
      estimates: for a partial value, whether it is computed from a node's own estimates.
      materialized: whether a batched value exists for all nodes at once (an argument, or a result of a loop around
        passes), so that reading it whole takes no pass.
      examples: for a whole value, dimensions that descend from the batch; nodes may divide them again.
      places: for an input of a body with passes of its own, dimensions along which examples pick places.
      estimated_inside: whether it is computed from sums that a loop or branch with passes of its own estimates inside,
        while outside only the sums exist.
      counted_outside: whether, in a body with passes of its own, it is computed from a sum of the data alone (a count)
        that is formed outside of the body.
    """

    form: Form
    level: int = 0
    local_level: int = 0
    ghost: bool = False
    zero: bool = False
    model: bool = False
    estimates: bool = False
    materialized: bool = False
    examples: frozenset[int] = frozenset()
    places: frozenset[int] = frozenset()
    estimated_inside: bool = False
    counted_outside: bool = False

    @property
    def crosses_region(self) -> bool:
        """Whether it is computed from sums on the other side of a loop's or branch's border."""
        return self.estimated_inside or self.counted_outside

    @property
    def whole_level(self) -> int:
        """The round after which the value can be read whole."""
        return self.level if isinstance(self.form, Whole) or self.materialized else self.level + 1

    @property
    def estimable(self) -> bool:
        """Whether nodes have a local version before the whole value, for an estimate to use.

        That is their own estimate, or a sum of the data alone, such as a count of examples.
        """
        return self.estimated or (isinstance(self.form, Whole | Partial) and self.local_level < self.whole_level)

    @property
    def estimated(self) -> bool:
        """Whether nodes read their own estimate in place of the whole value."""
        return self.ghost and isinstance(self.form, Whole | Partial)

    @property
    def ready_level(self) -> int:
        """The round after which nodes can read the value, whole or as an estimate."""
        return self.local_level if self.estimated else self.whole_level


ZERO, NONZERO = State(WHOLE, zero=True), State(WHOLE)


class CouplingReason(enum.Enum):
    """The reason why a batched value is read whole, or why nodes cannot run a loop or branch on their own."""

    WHOLE = "needs the whole batch at once"
    RESULTS = "does not keep the batch in every result"
    PAIRS = "compares every example with every other"
    GATHERED = "is contracted with a value that needed the whole batch"
    REORDERS = "orders the batch differently"
    UNDESCRIBED = "has no description, so it is given the whole batch at once"
    IN_ORDER = "is gone through in order"
    SEVERAL = "takes the examples in several orders"
    READS = "reads the batch while it goes through the batch"
    CARRIES = "carries a value from example to example"
    FORMS = "carries a value computed from all examples"
    SUM = "reads a sum over the batch inside the loop"
    OVERFLOW = "computes with a sum over the batch in a type of small range"
    CONDITION = "has a condition that is reduced over the batch"
    BRANCH = "chooses a branch by single examples"


@dataclasses.dataclass(frozen=True)
class Coupling:
    """One place where an example influences another.

    Attributes:
      flow: batch flow of the program that it is in.
      eqn: the equation that reads what other examples contributed.
      kind: ``"reduction"`` (it reads a completed reduction), ``"materialize"`` (it needs the whole batch at once), or
        ``"loop"`` (it is a loop or branch with passes of its own).
      level: the pass it belongs to.
      mode: ``"exact"`` or ``"local"``.
      source: for a reduction, the reducing equation; for a loop, the equation inside that nodes cannot run alone.
      why: for all other kinds, why nodes cannot work on their own examples.
    """

    flow: Flow
    eqn: JaxprEqn
    kind: str
    level: int
    mode: str = "exact"
    source: JaxprEqn | None = None
    why: CouplingReason | None = None


@dataclasses.dataclass(eq=False)  # not frozen only because many are made
class Step:
    """The evaluation of one equation.

    Attributes:
      eqn: the equation.
      per_node: evaluated by every node on its own operands; otherwise once, on whole values.
      level: the pass, or the level of the whole values it reads.
      operands: the form in which each operand is read.
      results: the form of each result.
      description: for an equation that is neither loop nor branch.
      location: the factor that is split, if one is.
      region: the loop or branch that the equation is.
      bodies: batch flow of the region's bodies, in order.
      over_batch: whether the region is a loop over the examples.
      nested: whether the region is evaluated once, with passes of its own; its batched operands and results exist for
        all nodes at once.
    """

    eqn: JaxprEqn
    per_node: bool
    level: int
    operands: tuple[Form, ...]
    results: tuple[Form, ...]
    description: OperatorDescription | None = None
    location: Location | None = None
    region: Region | None = None
    bodies: tuple[Flow, ...] = ()
    over_batch: bool = False
    nested: bool = False

    @functools.cached_property
    def flops(self) -> int:
        """Scalar operations of the whole equation."""
        return equation_flops(self.eqn) if self.description is None else self.description.flops


@dataclasses.dataclass(eq=False)
class Flow:
    """Batch flow of one program.

    Attributes:
      program: the program.
      states: of every variable.
      steps: one per equation, in order.
      output_forms: the form in which each output is returned.
      gathered: batched values that are read whole.
      batch: the largest batch.
      node_size: examples of `batch` per node, padding included.
      node_sizes: examples per node of each batch.
    """

    program: Program
    states: dict[Var, State]
    steps: list[Step]
    output_forms: list[Form] = dataclasses.field(default_factory=list)
    gathered: set[Var] = dataclasses.field(default_factory=set)
    batch: Batch = dataclasses.field(default_factory=lambda: Batch(1))
    node_size: int = 1
    node_sizes: dict[Batch, int] = dataclasses.field(default_factory=dict)

    _interned: dict[State, State] = dataclasses.field(default_factory=lambda: {ZERO: ZERO, NONZERO: NONZERO})

    _wholes: dict[tuple[int, int, bool, bool], State] = dataclasses.field(default_factory=dict)

    def interned(self, state: State) -> State:
        """The interned state that equals `state`, so that states can be compared by identity."""
        return self._interned.setdefault(state, state)

    def whole_state(self, level: int, local: int, ghost: bool, model: bool) -> State:
        """The interned state of a whole value that is neither zero nor descends from the batch."""
        key = (level, local, ghost, model)
        if key not in self._wholes:
            self._wholes[key] = self.interned(State(WHOLE, level, local, ghost, model=model))
        return self._wholes[key]

    def slices_of(self, size: int, dim: int) -> list[Slice]:
        """The ways in which batched values so far hold the batch along a dimension of a size, as forms along `dim`."""
        forms = (state.form for state in self._interned if isinstance(state.form, Slice))
        return list(dict.fromkeys(form.move(dim) for form in forms if form.outer * form.units == size))

    def needs_no_padding(self, nodes: int) -> bool:
        """Whether a number of nodes holds every batch without padding."""
        return all(nodes * size == batch.size for batch, size in self.node_sizes.items())

    def node_elements(self, form: Slice) -> int:
        """Elements that a node holds of one run of a batch, padding included."""
        return int(self.node_sizes[form.batch] * form.ratio)

    @functools.cached_property
    def position(self) -> dict[Var, int]:
        """The position of the step that defines a variable; inputs and constants have none."""
        return {var: i for i, step in enumerate(self.steps) for var in step.eqn.outvars}

    def state(self, atom: Atom) -> State:
        """The state of a variable or literal."""
        return literal_state(atom.val) if isinstance(atom, Literal) else self.states[atom]


def literal_state(value: Any) -> State:
    """The state of a literal: a whole value, zero or not."""
    value = np.asarray(value)
    return ZERO if value.dtype.names is None and not value.any() else NONZERO  # float0 has names, and no values


LARGEST_READ = 1 << 16
"""Elements of the largest constant whose values are read to see whether they are zeros."""


def constant_state(value: Any) -> State:
    """The state of an array that a step closes over, as of a literal; nonzero if it is large, or may change."""
    known = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    if not known or jnp.issubdtype(value.dtype, jax.dtypes.extended) or value.size > LARGEST_READ:
        return NONZERO
    if value.is_deleted() or not value.is_fully_addressable:
        return NONZERO
    return literal_state(jax.device_get(value))


class CoupledInBody(Exception):
    """An equation in a body reduces over the batch, or needs all of it: nodes cannot run the body on their own."""

    def __init__(self, eqn: JaxprEqn, why: CouplingReason) -> None:
        super().__init__(why.value)
        self.eqn = eqn
        self.why = why


CouplingMode = Callable[[JaxprEqn], str]
"""The coupling mode of a reducing or materializing equation: ``"exact"``, ``"local"`` or ``"error"``."""


class BatchFollower(Protocol):
    """The interface of `vnode.analysis.batch_flow.Follower` that loops and branches use."""

    batch: Batch
    nodes: int
    mode: CouplingMode
    couplings: list[Coupling]
    sums: set[Var]
    dispatch_sums: set[Var]
    divides_chunks: bool

    @property
    def batches(self) -> set[Batch]:
        """The batches that are divided."""
        ...

    def accept(self, form: Slice | Location) -> bool:
        """Whether nodes may hold multiples of the form's grain; remembers it if so."""
        ...

    def follow(self, program: Program, inputs: Sequence[State], *, body: bool = False) -> Flow:
        """Batch flow of a program."""
        ...

    def for_nested_program(self, batch: Batch | None) -> BatchFollower:
        """A follower for a program with passes of its own; for `batch` if the program has its own batch."""
        ...
