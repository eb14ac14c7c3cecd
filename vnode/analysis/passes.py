"""The schedule of a step, as data: stages of once-only equations and passes over all nodes; its costs.

Knows recipes and levels, and what follows from a schedule: recomputation, and kept values. Must not know how a step is
divided into passes, nor devices or how anything is evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from vnode.analysis.forms import Slice, Whole
from vnode.analysis.low_precision_sums import itemsize
from vnode.analysis.recipe import Evaluation, Recipe
from vnode.analysis.states import Flow, Step
from vnode.operators import Monoid


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """A partial value that a pass completes.

    Attributes:
      var: the value.
      monoid: how pieces combine.
      dtype: of the accumulator.
      rounded: a dtype to which the total is rounded before it is cast to the value's dtype; None if there is none.
      divided_value: the value of which this is a part; None if it is no part.
    """

    var: Var
    monoid: Monoid
    dtype: Any
    rounded: Any = None
    divided_value: Var | None = None

    @property
    def bytes(self) -> int:
        """The accumulator's bytes."""
        return math.prod(self.var.aval.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One scan over all nodes.

    Attributes:
      level: of the whole values it reads.
      recipe: what every node evaluates.
      accumulators: partial values that are completed over all nodes.
      collected: batched values that are kept of all nodes: to be returned, gathered, or read by a later pass.
      waits_for_previous: whether its accumulators reuse the memory of the pass before, and wait for its sums.
    """

    level: int
    recipe: Recipe
    accumulators: tuple[Accumulator, ...]
    collected: tuple[tuple[Var, Slice], ...]
    waits_for_previous: bool = False

    @functools.cached_property
    def whole_inputs(self) -> list[Var]:
        """The whole values that a node reads."""
        return [var for var, form in self.recipe.leaves if isinstance(form, Whole)]

    @functools.cached_property
    def sliced_inputs(self) -> list[tuple[Var, Slice]]:
        """The batched values of which a node reads its part."""
        return [(var, form) for var, form in self.recipe.leaves if isinstance(form, Slice)]


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """Equations that are evaluated once, then a pass.

    Attributes:
      once_actions: evaluated once, on whole values, in order.
      node_pass: the pass that follows, if one is needed.
    """

    once_actions: tuple[Evaluation, ...]
    node_pass: Pass | None


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A step, ready to be emitted.

    Attributes:
      flow: batch flow of the step.
      stages: in order.
      gathered: batched values that are read whole.
    """

    flow: Flow
    stages: tuple[Stage, ...]
    gathered: dict[Var, Slice]

    @functools.cached_property
    def repeated_flops(self) -> dict[int, int]:
        """For each level, the flops of equations that its passes recompute after an earlier pass."""
        first: set[Step] = set()
        repeated: dict[int, int] = {}
        for nodes in self.passes:
            for step in (action.step for action in nodes.recipe.actions if isinstance(action, Evaluation)):
                if step.per_node and step in first:
                    repeated[nodes.level] = repeated.get(nodes.level, 0) + step.flops
                first.add(step)
        return repeated

    @functools.cached_property
    def recomputed_flops(self) -> int:
        """Flops that passes recompute after an earlier pass, including those of loops around passes."""
        inner = sum(
            action.trip_count * inner.recomputed_flops
            for stage in self.stages
            for action in stage.once_actions
            for inner in action.schedules
        )
        return sum(self.repeated_flops.values()) + inner

    @functools.cached_property
    def flops(self) -> int:
        """Scalar operations of the whole step, each equation counted once."""
        return sum(step.flops for step in self.flow.steps)

    @functools.cached_property
    def kept_between_passes(self) -> tuple[Var, ...]:
        """Batched values that passes keep for later passes: those held at the peak.

        A pass holds its inputs while it writes the values that it keeps.
        """
        passes = list(enumerate(self.passes))
        made = {var: number for number, nodes in passes for var, _ in nodes.collected}
        last = {
            var: number
            for number, nodes in passes
            for var, form in nodes.recipe.leaves
            if isinstance(form, Slice) and var in made
        }
        held = [tuple(var for var in last if made[var] <= number <= last[var]) for number, _ in passes]
        return max(held, key=lambda several: sum(map(nbytes, several)), default=())

    @functools.cached_property
    def loop_boundary_values(self) -> tuple[Var, ...]:
        """Batched operands and results of loops and branches around passes, besides the program's inputs."""
        inputs = set(self.flow.program.inputs)
        crossing = [
            (atom, form)
            for stage in self.stages
            for action in stage.once_actions
            if action.schedules
            for atoms, forms in (
                (action.step.eqn.invars, action.operands),
                (action.step.eqn.outvars, action.results),
            )
            for atom, form in zip(atoms, forms, strict=True)
        ]
        return tuple(
            dict.fromkeys(
                var for var, form in crossing if isinstance(var, Var) and isinstance(form, Slice) and var not in inputs
            )
        )

    @functools.cached_property
    def read_whole(self) -> set[Var]:
        """Batched values that an equation reads whole, here or in a loop or branch around passes."""
        inside = {
            atom
            for stage in self.stages
            for action in stage.once_actions
            for i, atom in enumerate(action.step.eqn.invars)
            if i in action.read_whole and isinstance(atom, Var)
        }
        return inside.union(self.gathered)

    @property
    def passes(self) -> list[Pass]:
        """The passes, in order."""
        return [stage.node_pass for stage in self.stages if stage.node_pass is not None]

    def first_pass_number(self, level: int) -> int:
        """The number of the first pass of a level. A level may have no pass, or several."""
        return sum(nodes.level < level for nodes in self.passes)

    def with_inner(self, times: int = 1) -> Iterator[tuple[Schedule, int]]:
        """This schedule and the nested ones, each with its trip count (a ``while`` counts as one iteration)."""
        yield self, times
        for stage in self.stages:
            for action in stage.once_actions:
                for inner in action.schedules:
                    yield from inner.with_inner(times * action.trip_count)


def accumulator_dtype(dtype: Any, monoid: Monoid, wanted: Any) -> Any:
    """The dtype of an accumulator: float32 for sums of smaller floats, unless the user wants another one."""
    dtype = np.dtype(dtype)
    if monoid not in (Monoid.SUM, Monoid.PROD) or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    if wanted is not None:
        return np.dtype(wanted)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def nbytes(var: Var) -> int:
    """Bytes of a value."""
    return math.prod(getattr(var.aval, "shape", ())) * itemsize(var)


def accumulator_bytes(var: Var) -> int:
    """Bytes of an accumulator of `var`, with at least four per element."""
    return math.prod(var.aval.shape) * max(4, itemsize(var))
