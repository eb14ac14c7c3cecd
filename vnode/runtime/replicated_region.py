"""The once-computed actions of a step -> one program for each device of a mesh.

    m = 0.9 * m + g;  w = w - m, all sharded over data   ->   on each device, with its shards: the same two equations

Knows evaluations of whole values, and the partitioner. Must not know passes, placements, nor what a node is.

If the partitioner cannot partition the actions, every device computes all of them whole, from gathered operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
from jax.extend.core import Literal, Var

from vnode.analysis.forms import Form
from vnode.analysis.passes import Stage
from vnode.analysis.program import Atom, Program
from vnode.analysis.recipe import Evaluation
from vnode.errors import PartitionError, UnsupportedPrimitiveError
from vnode.operators.in_program import as_array
from vnode.operators.separate_rounding import Rounding
from vnode.runtime.evaluate_recipe import EvaluationMemo, evaluate_once
from vnode.runtime.mesh_function import MeshFunction, UnevenValues
from vnode.runtime.node import WholeEvaluator
from vnode.runtime.output_sharding import Lying
from vnode.spmd.device_program import BitwiseMode
from vnode.spmd.layout import Axes, Layout, replicated
from vnode.spmd.sharding_backprop import read_layouts


@dataclasses.dataclass(frozen=True)
class ReplicatedRegion:
    """Once-computed actions, in order, as a function of the values that they read.

    Attributes:
      actions: evaluations with whole operands.
      reads: the values that they read and none of them computes.
      wanted: the results that others read, each with its form.
      program: the program that they are part of.
      place: evaluates whole values.
      ends: required layouts of some of `wanted`.
    """

    actions: Sequence[Evaluation]
    reads: tuple[Var, ...]
    wanted: tuple[tuple[Var, Form], ...]
    program: Program
    place: WholeEvaluator
    ends: Mapping[Var, Layout] = dataclasses.field(default_factory=dict)

    @staticmethod
    def from_actions(
        actions: Sequence[Evaluation],
        readers: Mapping[Var, Set[int]],
        program: Program,
        place: WholeEvaluator,
        ends: Mapping[Var, Layout],
    ) -> ReplicatedRegion:
        """Builds the region; `readers` has for each variable its readers: actions by their id, others by any number."""
        made = {var: form for action in actions for var, form in action.produced}
        reads = dict.fromkeys(atom for action in actions for atom in read_variables(action) if atom not in made)
        here = set(map(id, actions))
        wanted = [(var, form) for var, form in made.items() if readers.get(var, set()) - here]
        return ReplicatedRegion(actions, tuple(reads), tuple(wanted), program, place, ends)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """The values of `wanted`, given whole values of `reads`."""
        held = dict(zip(self.reads, values, strict=True))
        known = EvaluationMemo(self.program)

        def read(atom: Atom) -> Any:
            return atom.val if isinstance(atom, Literal) else held[atom]

        for action in self.actions:
            results = dict(zip(action.step.eqn.outvars, evaluate_once(action, read, known, self.place), strict=True))
            held.update((var, results[var]) for var, _ in action.produced)
        return [as_array(held[var], var) for var, _ in self.wanted]

    def read_layouts(self, lying: Lying, axes: Axes, exact: Collection[str]) -> dict[Var, list[Layout]]:
        """The layouts in which inputs are read, one for each use; see `choose_output_layouts`."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in self.reads]
        found = divide_region(self, shapes, list(map(lying, self.reads)), axes, exact)
        if isinstance(found, ReplicatedFunction):
            return {}
        outer = dict(zip(found.flow.program.inputs, self.reads, strict=False))
        return {outer[var]: several for var, several in read_layouts(found.flow).items() if var in outer}


class ReplicatedFunction:
    """A function of arrays that every device evaluates whole, with the interface of a `MeshFunction`."""

    def __init__(self, fun: ReplicatedRegion, layouts: Sequence[Layout], alike: BitwiseMode | None) -> None:
        self.fun, self.alike = fun, alike
        self.inputs = [replicated(len(layout.dims)) for layout in layouts]
        self.results = [replicated(len(var.aval.shape)) for var, _ in fun.wanted]
        self.dims = (None,) * len(fun.wanted)

    def __call__(self, values: Sequence[Any], latest: Any = None, rounding: Rounding | None = None) -> list[Any]:
        rounding = rounding or Rounding.from_values(values) if self.alike is not None else None
        stored = None if self.alike is None else self.alike.in_memory
        return dataclasses.replace(self.fun, place=WholeEvaluator(self.fun.place.platform, rounding, stored))(values)


def divide_region(
    fun: ReplicatedRegion,
    shapes: Sequence[Any],
    layouts: Sequence[Layout],
    axes: Axes,
    exact: Collection[str] = (),
    alike: BitwiseMode | None = None,
    rooms: UnevenValues | None = None,
    whole: Collection[int] = (),
) -> MeshFunction | ReplicatedFunction:
    """Partitions once-computed actions over the axes of a mesh.

    Args:
      fun: the actions.
      shapes: shapes of the inputs.
      layouts: layouts of the inputs.
      axes: the mesh axes.
      exact: axes whose size must not change bits of results.
      alike: the `BitwiseMode`, if elements must be computed alike whatever the sizes of some axes.
      rooms: inputs given in uneven blocks, as for `MeshFunction`; replicated computations get none.
      whole: numbers of results that are returned in one piece.

    Returns:
      A function from one device's arrays to that device's results, with the layouts of both.
    """
    try:
        platform = fun.place.platform
        ends = [fun.ends.get(var) for var, _ in fun.wanted]
        return MeshFunction(
            fun, shapes, layouts, axes, platform, exact=exact, alike=alike, rooms=rooms, whole=whole, ends=ends
        )
    except (PartitionError, UnsupportedPrimitiveError):
        return ReplicatedFunction(fun, layouts, alike)


def defer_constants(stages: Sequence[Stage]) -> list[Stage]:
    """Moves the creation of arrays from constants to their first use.

    Compilers do not know these as constants (`Rounding.opaque_constant`), and would keep them live during earlier
    passes.

    Example: `(zeros = broadcast(0); pass 0), (norm = f(grads, zeros))` is `(pass 0), (zeros = ...; norm = ...)`.
    """
    waiting: dict[Var, Evaluation] = {}  # by result

    def brought(reads: Iterable[Var]) -> Iterator[Evaluation]:
        for var in reads:
            if (action := waiting.get(var)) is not None:
                for made in action.step.eqn.outvars:
                    waiting.pop(made, None)
                yield from brought(read_variables(action))
                yield action

    found = []
    for stage in stages:
        once: list[Evaluation] = []
        for action in stage.once_actions:
            if is_separate(action) or any(var not in waiting for var in read_variables(action)):
                once += [*brought(read_variables(action)), action]
            else:
                waiting.update(dict.fromkeys(action.step.eqn.outvars, action))
        if stage.node_pass is not None:
            once += brought(var for var, _ in stage.node_pass.recipe.leaves)
        found.append(Stage(tuple(once), stage.node_pass))
    rest = tuple(brought([*waiting]))
    return [*found, Stage(rest, None)] if rest else found


def is_separate(action: Evaluation) -> bool:
    """Whether an action is evaluated by itself: it has passes, or effects."""
    eqn = action.step.eqn
    holds = any(hasattr(atom.aval, "inner_aval") for atom in (*eqn.invars, *eqn.outvars))
    return bool(action.schedules) or bool(eqn.effects) or holds


def read_variables(action: Evaluation) -> list[Var]:
    """The variables that an action reads; of a loop's or branch's operands, those that are used."""
    pairs = zip(action.step.eqn.invars, action.operands, strict=True)
    return [atom for atom, form in pairs if isinstance(atom, Var) and not (form is None and action.bodies)]
