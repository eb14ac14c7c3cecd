"""Steps that call host code (`jax.experimental.io_callback`) -> results to keep, so that each call happens once.

Knows steps and passes. Must not know how a step is divided into passes, nor devices or how anything is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Var

from vnode.analysis.forms import Slice
from vnode.analysis.passes import Stage
from vnode.analysis.program import message_about
from vnode.analysis.recipe import evaluated_steps
from vnode.analysis.states import Flow, Step
from vnode.errors import CouplingError


def calls_host(step: Step) -> bool:
    """Whether nodes call host code that may return another result the second time (not debugging output)."""
    return step.per_node and any("IO" in type(effect).__name__ for effect in step.eqn.effects)


def calls_host_for_results(step: Step) -> bool:
    """Whether nodes call host code and read its results."""
    return calls_host(step) and bool(step.eqn.outvars)


def host_call_results(flow: Flow) -> dict[Var, int]:
    """The batched results of host code, each with the first later pass that may read it."""
    return {
        var: step.level + 1
        for step in flow.steps
        if calls_host(step)
        for var, form in zip(step.eqn.outvars, step.results, strict=True)
        if isinstance(form, Slice)
    }


def check_host_calls(stages: Sequence[Stage]) -> None:
    """Checks that no host code is called in several passes.

    Raises:
      CouplingError: a later pass would call it again.
    """
    called: set[Step] = set()
    for stage in stages:
        for step in evaluated_steps(stage.node_pass.recipe) if stage.node_pass else ():
            if step in called and calls_host(step):
                raise CouplingError(
                    message_about(
                        step.eqn,
                        f"the step needs the result of {step.eqn.primitive.name!r} in several passes, and calling host "
                        "code again may give another.",
                        remedies=[
                            "use jax.pure_callback if the code gives the same for the same operands",
                            "or call it in a step of its own and pass its results to this one",
                        ],
                    )
                )
        called |= evaluated_steps(stage.node_pass.recipe) if stage.node_pass else set()
