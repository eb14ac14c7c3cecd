"""A schedule and a placement -> its report, with all counts.

Knows schedules, placements, and what values are called. Must not know how a schedule is made or emitted, nor what is
shown of a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.forms import Slice, Whole
from vnode.analysis.passes import Pass, Schedule, nbytes
from vnode.analysis.program import Program, signature, source_line
from vnode.analysis.recipe import Conversion, Evaluation
from vnode.analysis.states import Coupling, CouplingReason, Flow
from vnode.operators import Algebra
from vnode.operators.control_flow import Loop, region_of
from vnode.operators.splits import FREE
from vnode.placement.node_layout import Layout
from vnode.placement.placement import Placement
from vnode.report.coupling_text import coupling_line
from vnode.report.lines import Line, PassReport
from vnode.report.names import Names
from vnode.report.reduction import Reduction
from vnode.report.step_report import Report


def describe_schedule(
    made: Schedule,
    placement: Placement | Layout,
    name: str,
    couplings: Sequence[Coupling],
    reduction: Reduction,
    names: Names | None = None,
    turns: int = 1,
) -> Report:
    """Describes a schedule.

    Args:
      made: the schedule.
      placement: where its nodes live, or would.
      name: of the step.
      couplings: met by batch flow.
      reduction: how sums over nodes are formed.
      names: of its program's values, by their paths.
      turns: its trip count in one step.

    Returns:
      The report.
    """
    flow = made.flow
    names = names or Names(flow.program)
    nested = [
        describe_schedule(
            inner,
            placement,
            source_line(action.step.eqn),
            (),
            reduction,
            names.for_body(action.step.eqn, inner.flow.program),
            region.length if isinstance(region := region_of(action.step.eqn), Loop) else 1,
        )
        for stage in made.stages
        for action in stage.once_actions
        for inner in action.schedules
    ]
    defined = flow.program.definitions
    return Report(
        name=name,
        batch=flow.batch.size,
        virtual_nodes=placement.virtual_nodes,
        node_size=flow.node_size,
        placement=placement,
        inputs=tuple(
            Line(type_text(var.aval), str(flow.states[var].form), nbytes(var))
            for var in flow.program.inputs
            if isinstance(flow.states[var].form, Slice)
        ),
        passes=tuple(pass_report(made, number, placement, reduction, names) for number in range(len(made.passes))),
        nested=tuple(inner for inner in nested if inner.passes or inner.nested),
        once=sum(len(stage.once_actions) for stage in made.stages),
        hoisted=len(made.stages[0].once_actions) if made.passes else 0,
        gathered=tuple(
            Line(type_text(var.aval), source_line(defined[var]) if var in defined else "argument", nbytes(var))
            for var in made.gathered
        ),
        sliced=tuple(
            Line(type_text(var.aval), source_line(defined[var]), nbytes(var))
            for var in dict.fromkeys(
                action.var
                for nodes in made.passes
                for action in nodes.recipe.actions
                if isinstance(action, Conversion) and isinstance(action.target, Slice)
            )
            if var in defined
        ),
        drawn=tuple(drawn_lines(made)),
        couplings=tuple(dict.fromkeys(coupling_lines(made, couplings))),
        undescribed=undescribed_lines(couplings),
        flops=made.flops,
        recomputed=made.recomputed_flops,
        reduction=reduction.text(placement),
        exceptions=reduction.exceptions(made, placement),
        buffers=reduction.pending_bytes(made, placement),
        cheaper=reduction.cheaper(placement),
        turns=turns,
        between=value_lines(made.kept_between_passes, defined, names),
        around=value_lines(made.loop_boundary_values, defined, names),
        layouts=tuple(dict.fromkeys(layout_lines(flow, placement))),
    )


def value_lines(values: Sequence[Var], defined: Mapping[Var, JaxprEqn], names: Names) -> tuple[Line, ...]:
    """Values of a program with the source lines that make them."""
    return tuple(Line(type_text(var.aval), source_line(defined[var]), nbytes(var), names(var)) for var in values)


def drawn_lines(made: Schedule) -> Iterator[Line]:
    """Random draws as long as the batch that are made once, and whose rows go through products one by one."""
    program, examples = made.flow.program, made.flow.batch.size
    for stage in made.stages:
        for action in stage.once_actions:
            eqn = action.step.eqn
            description = program.describe(eqn) if eqn.invars else None  # without operands: an iota
            if description is None:
                continue
            drawn = any(factor.positional and factor.size == examples for factor in description.factors)
            if drawn and is_multiplied_by_rows(program, eqn.outvars, examples):
                yield from (Line(type_text(var.aval), source_line(eqn), nbytes(var)) for var in eqn.outvars)


def is_multiplied_by_rows(program: Program, values: Sequence[Var], rows: int) -> bool:
    """Whether values reach, element by element, a product that has a free dimension of so many rows."""
    reached = set(values)
    for eqn in program.equations:
        read = [i for i, atom in enumerate(eqn.invars) if isinstance(atom, Var) and atom in reached]
        description = program.describe(eqn) if read else None
        if description is None:
            continue
        if description.by_element:
            reached.update(eqn.outvars)
        elif description.has(Algebra.CONTRACTS):
            factors = [description.factors[f] for i in read for dim in description.operands[i] for f in dim]
            if any(factor.split is FREE and factor.size == rows for factor in factors):
                return True
    return False


def coupling_lines(made: Schedule, couplings: Sequence[Coupling]) -> Iterator[Line]:
    """Couplings with the numbers of the passes that need them, of the step or of a loop within it."""
    within = {inner.flow: inner for inner, _ in made.with_inner()}
    for coupling in couplings:
        passes = within.get(coupling.flow, made)
        yield coupling_line(coupling, passes.first_pass_number(coupling.level), passes is not made)


def undescribed_lines(couplings: Sequence[Coupling]) -> tuple[Line, ...]:
    """The primitives without a description that have batched operands, with the bytes that are gathered for each."""
    found: dict[JaxprEqn, Line] = {}
    for coupling in couplings:
        if coupling.why is not CouplingReason.UNDESCRIBED or coupling.kind != "materialize":
            continue
        eqn, states = coupling.eqn, coupling.flow.states
        collected = {atom for atom in eqn.invars if isinstance(atom, Var) and not isinstance(states[atom].form, Whole)}
        found[eqn] = Line(signature(eqn), source_line(eqn), sum(map(nbytes, collected)))
    return tuple(found.values())


def layout_lines(flow: Flow, placement: Placement | Layout) -> Iterator[Line]:
    """The sharding constraints of a program, and their fate on a placement."""
    mesh = getattr(placement, "mesh", None)
    for step in flow.steps:
        for body in step.bodies:
            yield from layout_lines(body, placement)
        description = flow.program.describe(step.eqn)
        if description is None or not any(description.layout or ()):
            continue
        axes = dict.fromkeys(name for names in description.layout or () for name in names or ())
        form = step.results[0]
        examples = description.layout[form.dim] or () if isinstance(form, Slice) and description.layout else ()
        carrying = [name for name in axes if name in examples or (mesh is not None and name == placement.axis)]
        kept = [name for name in axes if mesh is not None and name in mesh.axis_names and name not in carrying]
        away = [name for name in axes if name not in carrying + kept]
        parts = [
            f"{', '.join(names)} {fate}"
            for names, fate in (
                (carrying, "dropped: carries the examples"),
                (kept, "kept inside a node"),
                (away, "dropped: no axis of the placement"),
            )
            if names
        ]
        yield Line(f"{type_text(step.eqn.outvars[0].aval)} over {'; '.join(parts)}", source_line(step.eqn))


def pass_report(
    made: Schedule, number: int, placement: Placement | Layout, reduction: Reduction, names: Names
) -> PassReport:
    nodes = made.passes[number]
    defined = made.flow.program.definitions
    actions = [action for action in nodes.recipe.actions if isinstance(action, Evaluation)]
    return PassReport(
        number=number,
        level=nodes.level,
        reads=read_passes(made.passes, number),
        adds_only=nodes.waits_for_previous,
        equations=len(actions),
        flops=sum(action.step.flops for action in actions),
        accumulators=tuple(
            Line(
                f"{a.monoid.value} {type_text(held)}",
                source_line(defined[a.var]),
                reduction.bytes(a),
                names(a.divided_value or a.var),
            )
            for a, held in ((a, reduction.device_part(a)) for a in nodes.accumulators)
        ),
        collected=value_lines([var for var, _ in nodes.collected], defined, names),
        sent=reduction.bytes_sent(nodes, placement),
    )


def read_passes(passes: Sequence[Pass], number: int) -> tuple[int, ...]:
    """The earlier passes that a pass waits for: those of the level before, or the one that keeps its operands."""
    this = passes[number]
    if this.waits_for_previous:
        return (next(k for k, other in enumerate(passes) if other.level == this.level),)
    before = max((other.level for other in passes if other.level < this.level), default=None)
    return tuple(k for k, other in enumerate(passes) if other.level == before)


def type_text(aval: Any) -> str:
    return aval.str_short(short_dtypes=True)
