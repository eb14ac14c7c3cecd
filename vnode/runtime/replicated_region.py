"""What is computed once in a step, as a program for each device of a mesh.

Knows evaluations of whole values, and the partitioner. Must not know passes, placements, nor what a node is.

What cannot be divided is computed whole by every device, of what is gathered for it.
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
    """Actions that are evaluated once, one after another, as a function of what they read.

    Attributes:
      actions: evaluations, all of whose operands are whole.
      reads: what they read that none of them makes.
      wanted: what others read of what they make, and in which form.
      program: of which they are a part.
      place: where they are evaluated.
      ends: how some of what is wanted shall lie.
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
        """The actions, given for each variable who reads it: actions by their number as objects, others by any."""
        made = {var: form for action in actions for var, form in action.produced}
        reads = dict.fromkeys(atom for action in actions for atom in read_variables(action) if atom not in made)
        here = set(map(id, actions))
        wanted = [(var, form) for var, form in made.items() if readers.get(var, set()) - here]
        return ReplicatedRegion(actions, tuple(reads), tuple(wanted), program, place, ends)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """What is wanted, given whole values of what is read."""
        held = dict(zip(self.reads, values, strict=True))
        known = EvaluationMemo(self.program)

        def read(atom: Atom) -> Any:
            return atom.val if isinstance(atom, Literal) else held[atom]

        for action in self.actions:
            results = dict(zip(action.step.eqn.outvars, evaluate_once(action, read, known, self.place), strict=True))
            held.update((var, results[var]) for var, _ in action.produced)
        return [as_array(held[var], var) for var, _ in self.wanted]

    def read_layouts(self, lying: Lying, axes: Axes, exact: Collection[str]) -> dict[Var, list[Layout]]:
        """In which layouts what is read is wanted, each time it is read; see `choose_output_layouts`."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in self.reads]
        found = divide_region(self, shapes, list(map(lying, self.reads)), axes, exact)
        if isinstance(found, ReplicatedFunction):
            return {}
        outer = dict(zip(found.flow.program.inputs, self.reads, strict=False))
        return {outer[var]: several for var, several in read_layouts(found.flow).items() if var in outer}


class ReplicatedFunction:
    """A function of arrays that every device evaluates whole; it stands in the place of a `MeshFunction`."""

    def __init__(self, fun: ReplicatedRegion, layouts: Sequence[Layout], alike: BitwiseMode | None) -> None:
        self.fun, self.alike = fun, alike
        self.inputs = [replicated(len(layout.dims)) for layout in layouts]
        self.results = [replicated(len(var.aval.shape)) for var, _ in fun.wanted]
        self.dims = (None,) * len(fun.wanted)

    def __call__(self, values: Sequence[Any], latest: Any = None, rounding: Rounding | None = None) -> list[Any]:
        rounding = rounding or Rounding.from_values(values) if self.alike is not None else None
        return dataclasses.replace(self.fun, place=WholeEvaluator(self.fun.place.platform, rounding))(values)


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
    """What is computed once, divided over the axes of a mesh.

    Args:
      fun: the computation.
      shapes: of what it reads.
      layouts: how that lies.
      axes: of the mesh.
      exact: axes whose size must not show in the bits of results.
      alike: if compilers shall compute elements alike whatever the sizes of some axes.
      rooms: which of what it reads is given in blocks, as for `MeshFunction`; what is computed whole is given none.
      whole: results, by number, that are wanted in one piece.

    Returns:
      From one device's arrays to that device's results, with the layouts of both.
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
    """Stages in which arrays that are made of constants are made where they are read first.

    Compilers do not know them for constants (`Rounding.opaque_constant`), and would hold them while passes before run.

    Example: `(zeros = broadcast(0); pass 0), (norm = f(grads, zeros))` is `(pass 0), (zeros = ...; norm = ...)`.
    """
    waiting: dict[Var, Evaluation] = {}  # by what they make

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
    """Whether an action is not evaluated together with others: it holds passes, or does more than to compute."""
    eqn = action.step.eqn
    holds = any(hasattr(atom.aval, "inner_aval") for atom in (*eqn.invars, *eqn.outvars))
    return bool(action.schedules) or bool(eqn.effects) or holds


def read_variables(action: Evaluation) -> list[Var]:
    """The variables that an action reads: of what a loop or branch is given, those that somebody wants."""
    pairs = zip(action.step.eqn.invars, action.operands, strict=True)
    return [atom for atom, form in pairs if isinstance(atom, Var) and not (form is None and action.bodies)]
