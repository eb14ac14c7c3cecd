"""A coupling -> its kind (normalization, pairs, ...), and remedies for its cost.

Knows batch flow's verdicts and descriptions: where the value that is read came from, and how. Must not know any
primitive by name, nor what the couplings of a step cost together.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.forms import Partial, Slice, Whole
from vnode.analysis.states import Coupling, CouplingReason, Flow, Step
from vnode.operators import Algebra, Monoid, Role
from vnode.operators import advice as registry_advice


class CouplingKind(enum.Enum):
    """The kind of a coupling. The text completes a sentence that begins with "for"."""

    COUNT = "a sum of the batch alone"
    NORMALIZATION = "statistics of a normalization over the batch"
    STATISTIC = "a statistic of the whole batch"
    EVALUATION = "the model at other parameters"
    SHARED = "sums over examples that others read"
    PAIRS = "every example compared with every other"
    MOVE = "examples that are moved or picked"
    WHOLE = "an operation on all examples at once"
    UNDESCRIBED = "a primitive without a description"
    CONDITION = "a loop that ends for all examples together"
    CARRY = "a loop from example to example"
    BRANCH = "a branch taken for single examples"
    OVERFLOW = "sums of small range that a loop or branch computes with"
    INSIDE = "a loop with passes of its own"


GROUPS = "reshape to [groups, size, ...] with groups a multiple of virtual_nodes, and jax.vmap over the groups"

REMEDIES: dict[CouplingKind, tuple[str, ...]] = {
    CouplingKind.COUNT: ("compute it from the data beforehand, and pass it as an argument that is not batched",),
    CouplingKind.NORMALIZATION: ("normalize within examples (GroupNorm, LayerNorm), if it is a layer of the model",),
    CouplingKind.STATISTIC: ("use that of the step before: return it, and pass it as an argument that is not batched",),
    CouplingKind.EVALUATION: (
        "evaluate the model once per step: with a step length from a schedule, or at what the step before has found "
        "(return it, and pass it as an argument that is not batched)",
    ),
    CouplingKind.SHARED: (f"form them within groups: {GROUPS}",),
    CouplingKind.PAIRS: (
        f"compare within groups: {GROUPS}",
        "compare with a queue of earlier embeddings, passed as an argument that is not batched",
    ),
    CouplingKind.MOVE: (
        "move or pick examples before the model is applied, where nothing is computed again",
        f"move or pick within groups: {GROUPS}",
    ),
    CouplingKind.WHOLE: (
        f"do it within groups: {GROUPS}",
        "use the result of the step before: return it, and pass it as an argument that is not batched",
    ),
    CouplingKind.UNDESCRIBED: (),
    CouplingKind.CONDITION: (
        "jax.vmap the loop over the examples, so that each stops by itself",
        "let the loop run a fixed number of times (lax.fori_loop)",
    ),
    CouplingKind.CARRY: (
        "carry nothing but sums from one example to the next, none of them in float16, or jax.vmap over the examples",
    ),
    CouplingKind.BRANCH: ("jax.vmap over the examples, or jnp.where in place of the branch",),
    CouplingKind.OVERFLOW: (
        "form the sums in bfloat16, whose range is that of float32, or in float32 (jnp.sum(..., dtype=jnp.float32))",
        "return them from the loop as they are, stacked, and compute with them after it",
    ),
    CouplingKind.INSIDE: (),
}
"""Remedies for each kind, the best first, besides a larger budget and ``coupling="local"``."""


def remedies_of(coupling: Coupling, kind: CouplingKind) -> tuple[str, ...]:
    """Remedies for a coupling of a kind. A primitive without a description needs one."""
    if kind is not CouplingKind.UNDESCRIBED:
        return REMEDIES[kind]
    return registry_advice(coupling.source or coupling.eqn)


def kinds_of(couplings: Sequence[Coupling]) -> list[CouplingKind | None]:
    """The kind of each coupling; None for a coupling that follows from another one.

    The kind of a reduction shows where its result meets its operands. All other readers of the result, as in the
    backward pass, get the same kind.
    """
    kinds = [kind_of(coupling) for coupling in couplings]
    known = {
        (coupling.flow, coupling.source.outvars[0]): kind
        for coupling, kind in zip(couplings, kinds, strict=True)
        if kind in (CouplingKind.NORMALIZATION, CouplingKind.STATISTIC) and coupling.source is not None
    }
    return [
        known.get((coupling.flow, coupling.source.outvars[0]), kind)
        if kind is not None and coupling.source is not None and coupling.source.outvars
        else kind
        for coupling, kind in zip(couplings, kinds, strict=True)
    ]


def kind_of(coupling: Coupling) -> CouplingKind | None:
    """The kind of a single coupling; None if it reads no reduction itself."""
    flow, why = coupling.flow, coupling.why
    step = defining_step(flow, coupling.eqn)
    if why is CouplingReason.UNDESCRIBED:
        return CouplingKind.UNDESCRIBED
    if coupling.kind == "loop":
        if why is CouplingReason.BRANCH:
            return CouplingKind.BRANCH
        if why in (CouplingReason.CARRIES, CouplingReason.READS, CouplingReason.SEVERAL):
            return CouplingKind.CARRY
        if why is CouplingReason.OVERFLOW:
            return CouplingKind.OVERFLOW
        return CouplingKind.CONDITION if step is not None and condition_is_reduced(step) else CouplingKind.INSIDE
    if coupling.kind == "materialize":
        if why in (CouplingReason.PAIRS, CouplingReason.GATHERED):
            return CouplingKind.PAIRS
        description = flow.program.describe(coupling.eqn)
        moves = description is not None and (description.has(Algebra.MOVES) or bool(description.role(Role.INDEX)))
        return CouplingKind.MOVE if moves or why is CouplingReason.REORDERS else CouplingKind.WHOLE
    reduced = defining_step(flow, coupling.source) if coupling.source is not None else None
    if reduced is None or not any(isinstance(form, Partial) for form in reduced.results):
        return None
    if not any(flow.states[var].model for var in reduced.eqn.outvars):
        return CouplingKind.COUNT
    description = reduced.description
    if description is not None and description.role(Role.INDEX):
        return CouplingKind.MOVE
    if step is not None and not set(batched_sources(flow, step)).isdisjoint(batched_sources(flow, reduced)):
        per_feature = any(math.prod(getattr(var.aval, "shape", ())) > 1 for var in reduced.eqn.outvars)
        plain = description is not None and not description.has(Algebra.CONTRACTS) and set(reduced.results) == {SUM}
        return CouplingKind.NORMALIZATION if per_feature and plain else CouplingKind.STATISTIC
    if step is not None and reads_parameters(flow, step):
        return CouplingKind.EVALUATION
    return CouplingKind.SHARED


SUM = Partial(Monoid.SUM)


def condition_is_reduced(step: Step) -> bool:
    """Whether the condition of a loop with passes of its own depends on a reduction over the batch."""
    region = step.region
    if region is None or not region.tests:
        return False
    test, body = step.bodies
    read = {atom for inner in test.steps for atom in inner.eqn.invars if isinstance(atom, Var)}
    tested = {i for var, i in zip(test.program.inputs, region.inputs[0], strict=True) if var in read}
    tested &= set(region.carried)
    return any(body.state(body.program.outputs[i - region.carried.start]).whole_level for i in tested) or any(
        inner.level for inner in test.steps
    )


def defining_step(flow: Flow, eqn: JaxprEqn) -> Step | None:
    """The step of an equation; None if the equation has no result in the flow."""
    return flow.steps[flow.position[eqn.outvars[0]]] if eqn.outvars and eqn.outvars[0] in flow.position else None


def batched_sources(flow: Flow, step: Step) -> Iterator[Var]:
    """The batched values that a step's batched operands are computed from without a contraction."""
    seen: set[Var] = set()
    stack = list(step.eqn.invars)
    while stack:
        var = stack.pop()
        if not isinstance(var, Var) or var in seen or not isinstance(flow.states[var].form, Slice | Partial):
            continue
        seen.add(var)
        state = flow.states[var]
        if state.model and isinstance(state.form, Slice):
            yield var
        before = flow.steps[flow.position[var]] if var in flow.position else None
        if before is not None and before.description is not None and not before.description.has(Algebra.CONTRACTS):
            stack += before.eqn.invars


def reads_parameters(flow: Flow, reader: Step) -> bool:
    """Whether a step of a later pass reads a whole value, computed from a reduction, of an unbatched argument's shape.

    Such a value is most likely a second set of parameters, as of a line search.
    """
    given = {
        shape
        for var in flow.program.inputs
        if not isinstance(flow.states[var].form, Slice) and (shape := getattr(var.aval, "shape", ()))
    }
    return any(
        isinstance(form, Whole) and isinstance(atom, Var) and flow.states[atom].level and atom.aval.shape in given
        for atom, form in zip(reader.eqn.invars, reader.operands, strict=True)
    )
