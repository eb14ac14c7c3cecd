"""Flow -> plain data -> the flow through an equal program in another process.

Knows flows and plain data. Must not know how layouts were found, files, nor virtual nodes.

    Flow  ->  {"digest": "5f2e...", "axes": {"data": 2}, "steps": [[[0], [0], [0], ...], ...], "layouts": [...]}

Equations are identified by their position. So a record fits one program only, identified by its digest: the fingerprint
of the computation (`vnode.analysis.fingerprint`), with shapes and constants.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Var

from vnode.analysis.fingerprint import Writer
from vnode.analysis.program import Program, message_about
from vnode.errors import PartitionError
from vnode.operators import Monoid
from vnode.operators.control_flow import region_of
from vnode.spmd.branch_groups import Branches, Group, branch_locations, branches_of, group_equations
from vnode.spmd.layout import Axes, Cut, Layout
from vnode.spmd.op_sharding import FactorSharding, OperandSharding, build_sharding, reached_layouts
from vnode.spmd.sharding_flow import Flow, Step, branch_result_layouts, present_at_one


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedStep:
    """The sharding of one equation.

    Attributes:
      operands: required layouts of operands.
      made: layouts in which results are computed.
      results: layouts in which results are read.
      ways: the sharded factors, by number, each with its axes; None for an equation evaluated whole.
      materializable: evaluated wherever its result is needed.
      is_constraint: a sharding constraint, which computes nothing.
      bodies: bodies of a loop or branch.
    """

    operands: tuple[Layout, ...]
    made: tuple[Layout, ...]
    results: tuple[Layout, ...]
    ways: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] | None = None
    materializable: bool = False
    is_constraint: bool = False
    bodies: tuple[RecordedFlow, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedFlow:
    """Layouts through a program, without the program.

    Attributes:
      digest: the program's digest; empty for the body of a loop or branch.
      axes: the mesh axes longer than one, each with its size; empty for a body.
      inputs: layouts of inputs.
      steps: one per equation, in order.
      outputs: layouts in which outputs are returned.
      ends: layouts in which outputs are computed.
      groups: equations evaluated side by side; `steps` are those of the program with these groups.
    """

    digest: str
    axes: tuple[tuple[str, int], ...]
    inputs: tuple[Layout, ...]
    steps: tuple[RecordedStep, ...]
    outputs: tuple[Layout, ...]
    ends: tuple[Layout, ...]
    groups: tuple[Group, ...] = ()

    @staticmethod
    def from_flow(flow: Flow, axes: Axes | None = None) -> RecordedFlow:
        """Records a flow; without axes, a body's flow."""
        digest = "" if axes is None else digest_of(flow.program)
        return RecordedFlow(
            digest,
            tuple((axes or {}).items()),
            flow.inputs,
            tuple(map(record_step, flow.steps)),
            flow.outputs,
            flow.ends,
        )

    def flow(self, program: Program, axes: Axes) -> Flow:
        """The flow through an equal program.

        Args:
          program: with calls inlined; its digest is `digest`.
          axes: the mesh axes longer than one, the same as recorded.

        Raises:
          PartitionError: the mesh or the program is another one.
        """
        if self.axes and dict(self.axes) != dict(axes):
            raise PartitionError(
                "a plan runs only on a mesh with the plan's axes; only the nodes' axis may have another size.",
                facts=[f"axes then: {dict(self.axes)}", f"axes now: {dict(axes)}"],
                remedies=["resize only the axis of the nodes", "or search a plan for the present machine"],
            )
        program = group_equations(program, self.groups) if self.groups else program
        if len(program.equations) != len(self.steps):
            raise PartitionError(
                "the recorded split belongs to another program.",
                facts=[f"{len(self.steps)} equations then", f"{len(program.equations)} now"],
                remedies=["search again"],
            )
        at = branch_locations(program)
        steps = tuple(
            restore_step(program, eqn, s, axes, at) for eqn, s in zip(program.equations, self.steps, strict=True)
        )
        return Flow(program, self.inputs, steps, self.outputs, self.ends)

    def to_json(self) -> dict[str, Any]:
        """Converts to plain data; each layout is written once, and referred to by number."""
        known: dict[Layout, int] = {}

        def numbers(layouts: Iterable[Layout]) -> list[int]:
            return [known.setdefault(layout, len(known)) for layout in layouts]

        def write(flow: RecordedFlow) -> dict[str, Any]:
            return {
                "inputs": numbers(flow.inputs),
                "outputs": numbers(flow.outputs),
                "ends": numbers(flow.ends),
                "steps": [
                    [
                        numbers(step.operands),
                        numbers(step.made),
                        numbers(step.results),
                        None if step.ways is None else [[list(lead), list(axes)] for lead, axes in step.ways],
                        int(step.materializable),
                        int(step.is_constraint),
                        [write(body) for body in step.bodies],
                    ]
                    for step in flow.steps
                ],
            }

        return {
            "digest": self.digest,
            "axes": dict(self.axes),
            **write(self),
            "groups": [[group.axis, [sorted(branch) for branch in group.branches]] for group in self.groups],
            "layouts": [layout_to_json(layout) for layout in known],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> RecordedFlow:
        """Restores the result of `to_json`.

        Raises:
          KeyError, IndexError, TypeError or ValueError: `content` is no such result.
        """
        layouts = [layout_from_json(each) for each in content["layouts"]]

        def numbered(numbers: Sequence[int]) -> tuple[Layout, ...]:
            if any(not 0 <= number < len(layouts) for number in numbers):
                raise ValueError(f"layouts are numbered from 0 to {len(layouts) - 1}, not {numbers}")
            return tuple(layouts[number] for number in numbers)

        def flow(content: Mapping[str, Any], digest: str = "", axes: Mapping[str, int] | None = None) -> RecordedFlow:
            steps = []
            for operands, made, results, ways, materializable, is_constraint, bodies in content["steps"]:
                shardings = None if ways is None else tuple((tuple(lead), tuple(axes)) for lead, axes in ways)
                inside = tuple(flow(body) for body in bodies)
                lists = numbered(operands), numbered(made), numbered(results)
                steps.append(RecordedStep(*lists, shardings, bool(materializable), bool(is_constraint), inside))
            inputs, outputs, ends = (numbered(content[key]) for key in ("inputs", "outputs", "ends"))
            sizes = tuple((str(name), int(size)) for name, size in (axes or {}).items())
            return RecordedFlow(digest, sizes, inputs, tuple(steps), outputs, ends)

        groups = [
            Group(str(axis), tuple(frozenset(map(int, branch)) for branch in branches))
            for axis, branches in content.get("groups", ())
        ]
        unknown = {group.axis for group in groups} - set(content["axes"])
        if unknown:
            raise ValueError(f"branches along {', '.join(sorted(unknown))}: the record has no such mesh axis")
        whole = flow(content, str(content["digest"]), content["axes"])
        return dataclasses.replace(whole, groups=tuple(groups))


def digest_of(program: Program) -> str:
    """A digest that identifies a program: SHA-256, hexadecimal."""
    return Writer().write(program).digest


def record_step(step: Step) -> RecordedStep:
    """Records one step."""
    ways = None if step.choice is None else tuple((tuple(way.lead), way.axes) for way in step.choice.ways)
    bodies = tuple(RecordedFlow.from_flow(body) for body in step.bodies)
    return RecordedStep(step.operands, step.made, step.results, ways, step.materializable, step.is_constraint, bodies)


def restore_step(program: Program, eqn: Any, step: RecordedStep, axes: Axes, at: Mapping[Var, tuple[str, int]]) -> Step:
    """Restores one step.

    Args:
      program: the program of the equation.
      eqn: the equation.
      step: the record.
      axes: the mesh axes.
      at: for each value computed in a branch, the axis and the index along it whose devices have the value.

    Raises:
      PartitionError: the equation cannot be sharded so, hence is another one.
    """
    misfit = functools.partial(
        PartitionError,
        message_about(eqn, f"a recorded split of {eqn.primitive.name!r} does not fit it.", remedies=["search again"]),
    )
    if [len(step.operands), len(step.made), len(step.results)] != [len(eqn.invars), *[len(eqn.outvars)] * 2]:
        raise misfit()
    region = region_of(eqn)
    if region is not None:
        programs = program.bodies(eqn)
        if len(programs) != len(step.bodies):
            raise misfit()
        bodies = tuple(body.flow(inside, axes) for body, inside in zip(step.bodies, programs, strict=True))
        return Step(eqn, step.operands, step.made, step.results, region=region, bodies=bodies)
    branches = branches_of(eqn)
    if branches is not None:
        made = restore_branches(branches, eqn, step, axes, at)
        if made is None or len(made[1]) != len(eqn.outvars) or made[1] != step.made:
            raise misfit()
        return Step(eqn, step.operands, step.made, step.results, bodies=made[0], branches=branches)
    if step.ways is None:
        return Step(
            eqn,
            step.operands,
            step.made,
            step.results,
            materializable=step.materializable,
            is_constraint=step.is_constraint,
        )
    description = program.describe(eqn)
    splits = {} if description is None else {tuple(lead): split for lead, split in description.leads}
    if description is None or any(lead not in splits for lead, _ in step.ways):
        raise misfit()
    ways = tuple(FactorSharding(lead, splits[lead], names) for lead, names in step.ways)
    passed = tuple(dict.fromkeys(each for layout in step.operands for each in layout.partial))
    choice = build_sharding(eqn, description, ways, [OperandSharding(layout) for layout in step.operands], axes, passed)
    if choice is None or choice.operands != step.operands or reached_layouts(eqn, choice) != step.made:
        raise misfit()
    return Step(eqn, step.operands, step.made, step.results, choice)


def restore_branches(
    branches: Branches, eqn: Any, step: RecordedStep, axes: Axes, at: Mapping[Var, tuple[str, int]]
) -> tuple[tuple[Flow, ...], tuple[Layout, ...]] | None:
    """The flows through branches, and layouts of their results; None if the record is of other branches."""
    inner = {name: size for name, size in axes.items() if name != branches.axis}
    given = [tuple(present_at_one(step.operands[i], branches.axis) for i in reads) for reads in branches.operands]
    pairs = list(zip(step.bodies, branches.programs, strict=False))
    whole = all(not each.partial and branches.axis not in each.cut_axes for several in given for each in several)
    stays = all(
        not layout.partial or (isinstance(atom, Var) and branches.reads_at(i, at.get(atom)))
        for i, (atom, layout) in enumerate(zip(eqn.invars, step.operands, strict=True))
    )
    if not (len(step.bodies) == len(branches.programs) <= axes.get(branches.axis, 1) and whole and stays):
        return None
    if [body.inputs for body, _ in pairs] != given or any(len(b.outputs) != len(p.outputs) for b, p in pairs):
        return None
    flows = [body.flow(program, inner) for body, program in zip(step.bodies, branches.programs, strict=True)]
    return tuple(flows), branch_result_layouts(branches, flows, axes)


def layout_to_json(layout: Layout) -> list[Any]:
    """Converts a layout to plain data."""
    dims = [None if cut is None else [list(cut.axes), cut.outer, cut.size] for cut in layout.dims]
    return [dims, [[name, monoid.value] for name, monoid in layout.partial]]


def layout_from_json(content: Sequence[Any]) -> Layout:
    """Restores the result of `layout_to_json`."""
    dims, partial = content
    cuts = (None if cut is None else Cut(tuple(map(str, cut[0])), int(cut[1]), int(cut[2])) for cut in dims)
    return Layout(tuple(cuts), tuple((str(name), Monoid(monoid)) for name, monoid in partial))
