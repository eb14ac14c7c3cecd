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
from vnode.runtime.evaluate_recipe import Known, evaluate_once
from vnode.runtime.mesh_function import Divided, Rooms
from vnode.runtime.node import Once
from vnode.runtime.output_sharding import Lying
from vnode.spmd.device_program import Alike
from vnode.spmd.layout import Axes, Layout, replicated
from vnode.spmd.sharding_backprop import read_in


@dataclasses.dataclass(frozen=True)
class Together:
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
    place: Once
    ends: Mapping[Var, Layout] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(
        actions: Sequence[Evaluation],
        readers: Mapping[Var, Set[int]],
        program: Program,
        place: Once,
        ends: Mapping[Var, Layout],
    ) -> Together:
        """The actions, given for each variable who reads it: actions by their number as objects, others by any."""
        made = {var: form for action in actions for var, form in action.produced}
        reads = dict.fromkeys(atom for action in actions for atom in read_by(action) if atom not in made)
        here = set(map(id, actions))
        wanted = [(var, form) for var, form in made.items() if readers.get(var, set()) - here]
        return Together(actions, tuple(reads), tuple(wanted), program, place, ends)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """What is wanted, given whole values of what is read."""
        held = dict(zip(self.reads, values, strict=True))
        known = Known(self.program)

        def read(atom: Atom) -> Any:
            return atom.val if isinstance(atom, Literal) else held[atom]

        for action in self.actions:
            results = dict(zip(action.step.eqn.outvars, evaluate_once(action, read, known, self.place), strict=True))
            held.update((var, results[var]) for var, _ in action.produced)
        return [as_array(held[var], var) for var, _ in self.wanted]

    def reading(self, lying: Lying, axes: Axes, exact: Collection[str]) -> dict[Var, list[Layout]]:
        """In which layouts what is read is wanted, each time it is read; see `handed_on`."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in self.reads]
        found = divided_once(self, shapes, list(map(lying, self.reads)), axes, exact)
        if isinstance(found, Whole):
            return {}
        outer = dict(zip(found.flow.program.inputs, self.reads, strict=False))
        return {outer[var]: several for var, several in read_in(found.flow).items() if var in outer}


class Whole:
    """A function of arrays that every device evaluates whole; it stands in the place of a `Divided`."""

    def __init__(self, fun: Together, layouts: Sequence[Layout], alike: Alike | None) -> None:
        self.fun, self.alike = fun, alike
        self.inputs = [replicated(len(layout.dims)) for layout in layouts]
        self.results = [replicated(len(var.aval.shape)) for var, _ in fun.wanted]
        self.dims = (None,) * len(fun.wanted)

    def __call__(self, values: Sequence[Any], latest: Any = None, rounding: Rounding | None = None) -> list[Any]:
        rounding = rounding or Rounding.of(values) if self.alike is not None else None
        return dataclasses.replace(self.fun, place=Once(self.fun.place.platform, rounding))(values)


def divided_once(
    fun: Together,
    shapes: Sequence[Any],
    layouts: Sequence[Layout],
    axes: Axes,
    exact: Collection[str] = (),
    alike: Alike | None = None,
    rooms: Rooms | None = None,
    whole: Collection[int] = (),
) -> Divided | Whole:
    """What is computed once, divided over the axes of a mesh.

    Args:
      fun: the computation.
      shapes: of what it reads.
      layouts: how that lies.
      axes: of the mesh.
      exact: axes whose size must not show in the bits of results.
      alike: if compilers shall compute elements alike whatever the sizes of some axes.
      rooms: which of what it reads is given in blocks, as for `Divided`; what is computed whole is given none.
      whole: results, by number, that are wanted in one piece.

    Returns:
      From one device's arrays to that device's results, with the layouts of both.
    """
    try:
        platform = fun.place.platform
        ends = [fun.ends.get(var) for var, _ in fun.wanted]
        return Divided(
            fun, shapes, layouts, axes, platform, exact=exact, alike=alike, rooms=rooms, whole=whole, ends=ends
        )
    except (PartitionError, UnsupportedPrimitiveError):
        return Whole(fun, layouts, alike)


def constants_late(stages: Sequence[Stage]) -> list[Stage]:
    """Stages in which arrays that are made of constants are made where they are read first.

    Compilers do not know them for constants (`Rounding.unknown`), and would hold them while passes before run.

    Example: `(zeros = broadcast(0); pass 0), (norm = f(grads, zeros))` is `(pass 0), (zeros = ...; norm = ...)`.
    """
    waiting: dict[Var, Evaluation] = {}  # by what they make

    def brought(reads: Iterable[Var]) -> Iterator[Evaluation]:
        for var in reads:
            if (action := waiting.get(var)) is not None:
                for made in action.step.eqn.outvars:
                    waiting.pop(made, None)
                yield from brought(read_by(action))
                yield action

    found = []
    for stage in stages:
        once: list[Evaluation] = []
        for action in stage.once_actions:
            if stands_apart(action) or any(var not in waiting for var in read_by(action)):
                once += [*brought(read_by(action)), action]
            else:
                waiting.update(dict.fromkeys(action.step.eqn.outvars, action))
        if stage.node_pass is not None:
            once += brought(var for var, _ in stage.node_pass.recipe.leaves)
        found.append(Stage(tuple(once), stage.node_pass))
    rest = tuple(brought([*waiting]))
    return [*found, Stage(rest, None)] if rest else found


def stands_apart(action: Evaluation) -> bool:
    """Whether an action is not evaluated together with others: it holds passes, or does more than to compute."""
    eqn = action.step.eqn
    holds = any(hasattr(atom.aval, "inner_aval") for atom in (*eqn.invars, *eqn.outvars))
    return bool(action.schedules) or bool(eqn.effects) or holds


def read_by(action: Evaluation) -> list[Var]:
    """The variables that an action reads: of what a loop or branch is given, those that somebody wants."""
    pairs = zip(action.step.eqn.invars, action.operands, strict=True)
    return [atom for atom, form in pairs if isinstance(atom, Var) and not (form is None and action.bodies)]
