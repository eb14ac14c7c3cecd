"""Schedule, groups of devices -> one program per piece and group; devices of different kinds cannot share a program.

Knows pieces of a schedule, groups and unfinished emissions. Must not know how a step was analysed, nor any primitive.

Each piece is compiled to one program per group. A loop or branch with passes of its own runs here, in Python. The
partial sums that a piece's pass leaves go to all groups; each group adds them in tree order when the next piece begins.
Programs are launched asynchronously.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.forms import Slice
from vnode.analysis.passes import Pass, Schedule
from vnode.analysis.program import Atom
from vnode.analysis.recipe import Evaluation
from vnode.analysis.states import Flow
from vnode.operators.control_flow import Loop, Run
from vnode.operators.in_program import as_array
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch
from vnode.runtime import device_reductions
from vnode.runtime.emit import Emission
from vnode.runtime.evaluate_recipe import restore_weak_types
from vnode.runtime.group_arrays import Replicas, batch_part, join_program
from vnode.runtime.mode import Mode
from vnode.runtime.one_pass import sums_of
from vnode.runtime.program_split import Key, ProgramPlan

Held = dict[Key, Any]


class GroupProgram:
    """A step on several groups of devices, compiled at its first call.

    Args:
      schedule: the step.
      placement: a placement with several groups.
      mode: the guarantee asked of the emission.
      lane: as for `emit`.
      name: what compilers and profiles call the programs.
      shared: for each input whether it is given in `ShardedBatch`.

    Attributes:
      returned: which inputs are outputs as they are.
    """

    def __init__(
        self, schedule: Schedule, placement: Placement, mode: Mode, lane: int, name: str, shared: Sequence[bool]
    ) -> None:
        self.schedule = schedule
        self.placement = placement
        self.groups = placement.working
        self.mode, self.lane, self.name = mode, lane, name
        outputs = {atom for atom in schedule.flow.program.outputs if isinstance(atom, Var)}
        self.returned = frozenset(i for i, var in enumerate(schedule.flow.program.inputs) if var in outputs)
        self.alike = len({group.kinds for group in self.groups}) == 1
        inputs = zip(schedule.flow.program.inputs, shared, strict=True)
        collected: list[Key] = [("collected", var) for var, is_shared in inputs if is_shared]
        self._plans: dict[Schedule, ProgramPlan] = {schedule: ProgramPlan(schedule, collected)}
        self._programs: dict[tuple[Schedule, int | Var, int], Callable[..., Any]] = {}
        self._replicas = Replicas()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the step.

        Args:
          inputs: values of the program's inputs at their global shapes, wherever they live.

        Returns:
          The program's outputs on the devices of the first group.
        """
        flow = self.schedule.flow
        held: list[Held] = [{} for _ in self.groups]
        for var, value in zip(flow.program.inputs, inputs, strict=True):
            form = flow.states[var].form
            for g, (mine, group) in enumerate(zip(held, self.groups, strict=True)):
                if isinstance(value, ShardedBatch):
                    mine["collected", var] = value.parts[g]
                    continue
                if not isinstance(form, Slice):
                    mine["whole", var] = self._replicas.copy_in_group(value, g, group)
                    continue
                mine["batched", var] = batch_part(value, form, flow, group)
                if var in self.schedule.gathered:
                    mine["full", var] = jax.device_put(value, group.sharding())
        outputs = []
        for atom, values in zip(flow.program.outputs, self.run(self.schedule, held), strict=True):
            form = flow.states[atom].form if isinstance(atom, Var) else None
            if isinstance(form, Slice):
                outputs.append(self.join_parts(values, form, flow, self.groups[0]))
                continue
            if self.alike:
                self._replicas.keep(values)
            outputs.append(values[0])
        return restore_weak_types(outputs, flow.program.outputs)

    def run(self, schedule: Schedule, held: list[Held]) -> list[list[Any]]:
        """Runs a schedule whose inputs the groups hold; returns each output per group, batched outputs as parts."""
        if schedule not in self._plans:
            self._plans[schedule] = ProgramPlan(schedule)
        plan = self._plans[schedule]
        for number, piece in enumerate(plan.pieces):
            for key in plan.reads[number]:
                self.resolve(key, plan, held)
            if piece.nested is not None:
                self.run_nested(piece.nested, held)
            if piece.nested is not None or piece.idle:
                continue
            left = [mine["left", piece.completes[0]] for mine in held] if piece.completes else []
            for g, (mine, group) in enumerate(zip(held, self.groups, strict=True)):
                given = [mine[key] for key in plan.reads[number] if key[0] != "left"]
                made = self.program(plan, number, g)(jax.device_put(left, group.sharding()), *given)
                mine.update(zip(plan.hands_on[number], made, strict=True))
        outputs = []
        for atom in schedule.flow.program.outputs:
            if isinstance(atom, Literal):
                outputs.append([jnp.asarray(atom.val, atom.aval.dtype)] * len(held))
                continue
            key = plan.result_key(atom)
            self.resolve(key, plan, held)
            outputs.append([mine[key] for mine in held])
        return outputs

    def resolve(self, key: Key, plan: ProgramPlan, held: list[Held]) -> None:
        """Brings a value to where it is read, if it is not there yet.

        A batched value is joined from the groups' parts, or split into them; a constant is copied to all groups.
        """
        kind, var = key
        if key in held[0]:
            return
        constants = plan.schedule.flow.program.constants
        if kind == "whole" and var in constants:
            for g, (mine, group) in enumerate(zip(held, self.groups, strict=True)):
                mine[key] = self._replicas.copy_in_group(constants[var], g, group)
        if kind not in ("full", "batched"):
            return
        form = plan.states[var].form
        assert isinstance(form, Slice)
        if ("collected", var) in held[0] and ("batched", var) not in held[0]:
            for g, mine in enumerate(held):
                mine["batched", var] = self.order_by_batch(plan, var, g)(mine["collected", var])
            return self.resolve(key, plan, held)
        parts = [mine.get(("batched", var)) for mine in held]
        for mine, group in zip(held, self.groups, strict=True):
            if kind == "full":
                mine[key] = self.join_parts(parts, form, plan.schedule.flow, group)
            else:
                mine[key] = batch_part(mine["full", var], form, plan.schedule.flow, group)

    def program(self, plan: ProgramPlan, number: int, g: int) -> Callable[..., list[Any]]:
        """The program of group `g` for a piece: from partial sums and the values read to the values handed on."""
        key = (plan.schedule, number, g)
        if key in self._programs:
            return self._programs[key]
        piece, group = plan.pieces[number], self.groups[g]
        reads = [key for key in plan.reads[number] if key[0] != "left"]

        def run(left: list[Any], *given: Any) -> list[Any]:
            emission = Emission(plan.schedule, group, None, self.mode, self.lane)
            places = {
                "whole": emission.whole,
                "full": emission.whole,
                "batched": emission.batched,
                "collected": emission.collected,
            }
            for (kind, var), value in zip(reads, given, strict=True):
                places[kind][var] = value
            if piece.completes is not None:
                nodes = piece.completes[1]
                emission.finish_totals(nodes, self.combine_pass_totals(nodes, left))
            for action in piece.once:
                emission.run_once(action)
            rest = emission.run_pass(piece.nodes) if piece.nodes is not None else None
            made: list[Any] = []
            for kind, what in plan.hands_on[number]:
                if kind == "left":
                    made.append(rest)
                elif kind == "batched":
                    made.append(
                        emission.batched[what] if what in emission.batched else emission.read_in_batch_order(what)
                    )
                else:
                    made.append(places[kind][what])
            return made

        run.__name__ = run.__qualname__ = self.name
        self._programs[key] = jax.jit(run)
        return self._programs[key]

    def order_by_batch(self, plan: ProgramPlan, var: Var, g: int) -> Callable[[Any], Any]:
        """The program of group `g` that brings a collected value into the order of the batch."""
        key = (plan.schedule, var, g)
        if key not in self._programs:
            emission = Emission(plan.schedule, self.groups[g], None, self.mode, self.lane)

            def run(value: Any) -> Any:
                emission.collected[var] = value
                return emission.read_in_batch_order(var)

            self._programs[key] = jax.jit(run)
        return self._programs[key]

    def combine_pass_totals(self, nodes: Pass, left: Sequence[Any]) -> list[Any]:
        """The totals of a pass, from the partial sums of all groups."""
        sums = sums_of(nodes)
        if self.mode is not Mode.INVARIANT:
            return [
                device_reductions.fold_in_order(s.monoid, jnp.stack(values))
                for s, *values in zip(sums, *left, strict=True)
            ]
        blocks, exact = [blocks for blocks, _ in left], [exact for _, exact in left]
        return device_reductions.combine_programs(
            sums, blocks, exact, [group.nodes for group in self.groups], self.lane
        )

    def join_parts(self, parts: Sequence[Any], form: Slice, flow: Flow, group: Placement) -> Any:
        """Joins the groups' parts of a batched value in one group."""
        n = flow.node_elements(form)
        real = [value for value, g in zip(parts, self.groups, strict=True) if g.first * n < form.units]
        return join_program(form.dim, form.outer)(jax.device_put(real, group.sharding()))

    def run_nested(self, action: Evaluation, held: list[Held]) -> None:
        """Runs a loop or branch whose bodies have passes of their own; batched values are joined first."""
        eqn = action.step.eqn
        operands = [[whole_operand(mine, atom) for mine in held] for atom in eqn.invars]

        def body(made: Schedule, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
            flow = made.flow
            inner: list[Held] = [{} for _ in held]
            for var, values in zip(flow.program.inputs, inputs, strict=True):
                kind = "full" if isinstance(flow.states[var].form, Slice) else "whole"
                for mine, value in zip(inner, values, strict=True):
                    mine[kind, var] = value
            results = self.run(made, inner)
            for k, atom in enumerate(flow.program.outputs):
                form = flow.states[atom].form if isinstance(atom, Var) else None
                if isinstance(form, Slice):
                    results[k] = [self.join_parts(results[k], form, flow, group) for group in self.groups]
            return results

        region = action.step.region
        assert region is not None
        results = region.run(
            Stepwise(eqn, len(held)), [functools.partial(body, made) for made in action.schedules], operands
        )
        for var, form, values in zip(eqn.outvars, action.results, results, strict=True):
            if form is None:
                continue
            for mine, value in zip(held, values, strict=True):
                mine["full" if isinstance(form, Slice) else "whole", var] = value


class Stepwise:
    """Runs loops and branches in Python; every group has a copy of each value.

    Args:
      eqn: the loop or branch.
      groups: the number of groups.
    """

    def __init__(self, eqn: JaxprEqn, groups: int) -> None:
        self._eqn, self._groups = eqn, groups

    def scan(self, body: Callable[[Any, Any], Any], carry: list[Any], xs: list[Any], loop: Loop) -> Any:
        rows = []
        order = range(loop.length)
        for i in reversed(order) if loop.reverse else order:
            carry, row = body(carry, [[value[i] for value in column] for column in xs])
            rows.append(row)
        if not rows:
            empty = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in self._eqn.outvars[loop.carries :]]
            return carry, [[value] * self._groups for value in empty]
        stacks = zip(*(rows[::-1] if loop.reverse else rows), strict=True)
        return carry, [[jnp.stack(column) for column in zip(*values, strict=True)] for values in stacks]

    def repeat(
        self, condition: Run, body: Run, condition_constants: list[Any], constants: list[Any], carry: list[Any]
    ) -> list[Any]:
        while bool(condition([*condition_constants, *carry])[0][0]):
            carry = body([*constants, *carry])
        return carry

    def switch(self, index: Any, branches: Sequence[Run], operands: list[Any]) -> list[Any]:
        return branches[min(max(int(index[0]), 0), len(branches) - 1)](operands)


def whole_operand(mine: Held, atom: Atom) -> Any:
    """The whole value of an atom."""
    if isinstance(atom, Literal):
        return as_array(atom.val, atom)
    return mine["full", atom] if ("full", atom) in mine else mine["whole", atom]
