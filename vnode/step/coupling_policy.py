"""A schedule and its couplings -> an error with remedies, if the user forbids them or they exceed the budget.

Knows schedules, couplings and the user's two options about them. Must not know how a step is traced or emitted.

A remedy is offered only where it helps. Remedies follow from the kinds of the couplings that cost something.
``coupling="local"`` is tried on the step itself before it is proposed.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn

from vnode.analysis.coupling_kinds import CouplingKind, kinds_of, remedies_of
from vnode.analysis.pass_cut import BUDGET_POLICIES
from vnode.analysis.passes import Schedule, nbytes
from vnode.analysis.program import scope, source_line
from vnode.analysis.schedule import FORWARD_SHARE
from vnode.analysis.states import Coupling, Flow
from vnode.errors import CouplingError
from vnode.report.coupling_text import coupling_text, user_module
from vnode.report.lines import SHOWN
from vnode.show.units import numbered, several

Option = str | Mapping[str, str]
"""The user's ``coupling``: a mode, or modes by patterns of name stacks."""

Analysed = tuple[Schedule, Sequence[Coupling]]

LOCAL = "each node estimates the sums that depend on the model from its own examples"
GHOST = "each node normalizes by the statistics of its own examples (ghost batch normalization)"


def mode_of(option: Option, eqn: JaxprEqn) -> str:
    """The coupling mode that the user's option gives to an equation, by its name stack."""
    if isinstance(option, str):
        return option
    name = scope(eqn)
    return next((mode for pattern, mode in option.items() if re.search(pattern, name)), "exact")


def check_couplings(
    made: Schedule,
    couplings: Sequence[Coupling],
    option: Option,
    budget: float,
    reschedule: Callable[[Option], Analysed],
) -> None:
    """Checks the couplings of a step against the user's ``coupling`` and ``recompute_budget``.

    Args:
      made: the schedule of the step.
      couplings: of the schedule.
      option: the user's ``coupling``.
      budget: the user's ``recompute_budget``.
      reschedule: schedules the step with another ``coupling``.

    Raises:
      CouplingError: a coupling is forbidden, or recomputation exceeds the budget.
    """
    refused = [c for c in couplings if mode_of(option, c.source or c.eqn) == "error"]
    if refused:
        local: list[Coupling] = []
        remedies = ["coupling='exact': further passes, for the result of the whole batch"]
        allowed = {pattern: "local" if mode == "error" else mode for pattern, mode in mode_patterns(option).items()}
        with contextlib.suppress(CouplingError):
            local = [coupling for coupling in reschedule(allowed)[1] if coupling.mode == "local"]
        if local:
            remedies.append(f"coupling='local': {LOCAL}")
        raise CouplingError(
            "examples influence each other, which coupling='error' forbids.",
            facts=coupling_facts(made, refused),
            remedies=remedies + coupling_remedies(refused),
        )
    if made.recomputed_flops and made.recomputed_flops > budget * made.flops:
        share = made.recomputed_flops / made.flops
        cost = pass_costs(made)
        causes = [coupling for coupling in couplings if cost.get((coupling.flow, coupling.level))]
        raise CouplingError(
            f"exactness would recompute {share:.0%} of the step, about {share / FORWARD_SHARE:.1f} forward passes "
            f"({len(made.passes)} passes in all), more than recompute_budget={budget}.",
            facts=[*coupling_facts(made, couplings), memory_fact(made, budget)],
            remedies=[
                f"recompute_budget={math.ceil(100 * share) / 100} to pay for it",
                *local_remedies(made, couplings, option, budget, reschedule),
                *coupling_remedies(causes),
            ],
        )


def mode_patterns(option: Option) -> Mapping[str, str]:
    return {"": option} if isinstance(option, str) else option


def couplings_in_schedule(made: Schedule, couplings: Sequence[Coupling]) -> list[Coupling]:
    """The couplings that are in the schedule. Others are of earlier iterations of a loop's fixpoint."""
    followed = {inner.flow for inner, _ in made.with_inner()}
    return [coupling for coupling in couplings if coupling.flow in followed]


def pass_costs(made: Schedule) -> dict[tuple[Flow, int], float]:
    """The recomputation of each pass, as a share of the step, by the pass's flow and level."""
    return {
        (inner.flow, level): times * repeated / max(made.flops, 1)
        for inner, times in made.with_inner()
        for level, repeated in inner.repeated_flops.items()
        if repeated
    }


def coupling_facts(made: Schedule, couplings: Sequence[Coupling]) -> list[str]:
    """The most expensive couplings for an error message, each source line once, with the passes that they need."""
    cost = pass_costs(made)
    within = {inner.flow: inner for inner, _ in made.with_inner()}
    found: dict[tuple[str, str], list[Coupling]] = {}
    for coupling, kind in zip(couplings, kinds_of(couplings), strict=True):
        if kind is not None:
            source = coupling.source or coupling.eqn
            found.setdefault((source.primitive.name, source_and_module(source)), []).append(coupling)
    lines: dict[str, float] = {}
    for (_, line), here in found.items():
        passes = {(c.flow, c.level): cost.get((c.flow, c.level), 0.0) for c in here}
        flow = here[0].flow
        numbers = sorted({within[flow].first_pass_number(level) for other, level in passes if other is flow})
        text = f"{numbered('pass', numbers)}{'' if flow is made.flow else ' inside'}"
        share = sum(passes.values())
        text += f" repeat{'s' * (len(numbers) == 1)} {share:.0%} of the step" if share >= 0.005 else ""
        lines[f"{coupling_text(here[0])} at {line}: {text}"] = share
    shown = sorted(lines, key=lambda line: -lines[line])[:SHOWN]
    rest = [f"... and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else []
    return list(shorten_repeated_paths(line for line in lines if line in shown)) + rest


def shorten_repeated_paths(lines: Iterable[str]) -> Iterator[str]:
    """Shortens lines that name source lines: the directory of each file is shown once.

    >>> list(shorten_repeated_paths(["mul at /home/me/net.py:3 (f)", "add at /home/me/net.py:5 (f)"]))
    ['mul at /home/me/net.py:3 (f)', 'add at net.py:5 (f)']
    """
    named: set[str] = set()

    def brief(found: re.Match[str]) -> str:
        known = found[0] in named
        named.add(found[0])
        return found[2] if known else found[0]

    for line in lines:
        yield re.sub(r"(\S*[/\\])([^/\\\s]+)(?=:\d+ )", brief, line)


def memory_fact(made: Schedule, budget: float) -> str:
    """The fact that tells why passes do not keep more values for later ones."""
    kept = sum(sum(map(nbytes, inner.kept_between_passes)) for inner, _ in made.with_inner())
    held = f", beside the {kept / 2**20:,.1f} MiB that are kept already," if kept else ""
    least = BUDGET_POLICIES[-1 if budget >= FORWARD_SHARE else -2].price
    saved = f"fewer than {several(int(least), 'operation')} per byte"
    return f"keeping more values from pass to pass{held} would save {saved}"


def source_and_module(eqn: JaxprEqn) -> str:
    name = user_module(eqn)
    return source_line(eqn) + (f" in {name}" if name else "")


def coupling_remedies(couplings: Sequence[Coupling]) -> list[str]:
    """The remedies for the kinds of some couplings; with the kind, if there are several.

    Sums of the batch alone are left out beside other kinds: they cost next to nothing.
    """
    found: dict[CouplingKind, dict[str, None]] = {}
    for coupling, kind in zip(couplings, kinds_of(couplings), strict=True):
        remedies = () if kind is None else remedies_of(coupling, kind)
        if kind is not None and remedies:
            found.setdefault(kind, {}).update(dict.fromkeys(remedies))
    causes = [kind for kind in found if kind is not CouplingKind.COUNT] or list(found)
    return [f"for {kind.value}: {remedy}" if len(causes) > 1 else remedy for kind in causes for remedy in found[kind]]


def local_remedies(
    made: Schedule,
    couplings: Sequence[Coupling],
    option: Option,
    budget: float,
    reschedule: Callable[[Option], Analysed],
) -> list[str]:
    """The smallest change of ``coupling`` that gets the step accepted, or else makes it cheaper; empty if none does."""
    kinds = zip(couplings, kinds_of(couplings), strict=True)
    normalizing = [c.source or c.eqn for c, kind in kinds if c.mode == "exact" and kind is CouplingKind.NORMALIZATION]
    names = dict.fromkeys(map(module_pattern, normalizing))
    choices: list[tuple[Option, str]] = [("local", LOCAL)]
    if normalizing and all(names):
        choices.insert(0, ({"|".join(names): "local", **({} if isinstance(option, str) else option)}, GHOST))
    elif normalizing:
        choices = [("local", GHOST)]
    for choice, meaning in choices:
        try:
            then, _ = reschedule(choice)
        except CouplingError:
            continue
        last = choice == "local"
        if then.recomputed_flops <= budget * then.flops or (
            last and made.recomputed_flops - then.recomputed_flops > made.flops / 100
        ):
            share = then.recomputed_flops / max(then.flops, 1)
            left = f"; {share:.0%} of the step is then recomputed" if share >= 0.005 else ""
            return [f"coupling={choice!r}: {meaning}{left}"]
    return []


def module_pattern(eqn: JaxprEqn) -> str:
    """A pattern for the innermost module or scope that the user named, without its trailing number."""
    innermost = user_module(eqn).rpartition("/")[2]
    return re.escape(re.sub(r"_\d+$", "", innermost))
