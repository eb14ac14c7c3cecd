"""A coupling -> a sentence: which equation reads which reduction, and in which of the user's modules.

Knows couplings and equations. Must not know schedules, nor what is done about a coupling.
"""

from __future__ import annotations

import re

from jax.extend.core import JaxprEqn

from vnode.analysis.forms import Partial
from vnode.analysis.program import scope, source_line
from vnode.analysis.states import Coupling, CouplingReason
from vnode.operators import Monoid
from vnode.report.lines import Line

TRANSFORMATIONS = re.compile(r"\w+\(|\)")
"""The names of jax's transformations in a name stack: ``transpose(jvp(...))``."""

REDUCTIONS = {Monoid.PROD: "product", Monoid.MAX: "maximum", Monoid.MIN: "minimum"}


def coupling_line(coupling: Coupling, number: int, inside: bool) -> Line:
    """A coupling in one line: which pass needs it, what reads what, and where the user wrote it.

    Args:
      coupling: the coupling.
      number: of the pass.
      inside: whether the pass is in a loop or branch within the step.
    """
    source = coupling.source or coupling.eqn
    name = user_module(source)
    needed = "" if coupling.kind == "loop" else f"pass {number}{' inside' * inside}: "
    return Line(f"{needed}{coupling_text(coupling)}", source_line(source) + (f" in {name}" if name else ""))


def coupling_text(coupling: Coupling) -> str:
    """A coupling as a clause: an equation, and the reduction or batch that it reads."""
    source = coupling.source or coupling.eqn
    name = source.primitive.name
    if coupling.mode == "local":
        return f"{name} reads each node's own estimate of a sum over the batch"
    match coupling.kind:
        case "loop":
            return f"{coupling.eqn.primitive.name} has passes of its own: {name} {coupling.why and coupling.why.value}"
        case "materialize":
            said = (
                coupling.why
                if coupling.why in (CouplingReason.PAIRS, CouplingReason.UNDESCRIBED)
                else CouplingReason.WHOLE
            )
            return f"{name} {said.value}{whole_reason(coupling)}"
    if coupling.source is None:
        return f"{name} reads what was made of the whole batch"
    form = coupling.flow.states[source.outvars[0]].form
    reduction = REDUCTIONS.get(form.monoid, form.monoid.value) if isinstance(form, Partial) else "sum"
    return f"{name} reads a {reduction} over the batch"


def whole_reason(coupling: Coupling) -> str:
    """The reason why an equation is not split, if its description has one."""
    description = coupling.flow.program.describe(coupling.eqn)
    return f": {description.whole_because}" if description is not None and description.whole_because else ""


def user_module(eqn: JaxprEqn) -> str:
    """The modules and scopes that the user named, whichever of jax's transformations the equation comes from.

    >>> TRANSFORMATIONS.sub("", "transpose(jvp(Net))/BatchNorm_0")
    'Net/BatchNorm_0'
    """
    return "/".join(part for part in TRANSFORMATIONS.sub("", scope(eqn)).split("/") if part)
