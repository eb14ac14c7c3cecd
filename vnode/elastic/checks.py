"""What a run refuses: a step that is not virtualized, a state that is gone, a checkpoint of another time.

Knows steps, states and what a step returns, from outside. Must not know how a run goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from vnode.elastic.options import RunOptions
from vnode.errors import CheckpointError, VnodeError, layout_message
from vnode.placement.gone import given_away
from vnode.placement.leaves import is_array
from vnode.step.protocol import Step

if TYPE_CHECKING:
    from vnode.elastic.checkpoints import Checkpoints


def check_step(step: Any) -> None:
    """Refuses a step that is not virtualized.

    Raises:
      VnodeError: it is not.
    """
    if isinstance(step, Step):
        return
    name = getattr(step, "__name__", type(step).__name__)
    raise VnodeError(
        layout_message(
            f"{name} is not virtualized.",
            facts=[f"it is a {type(step).__name__}"],
            remedies=[
                "step = vnode.virtualize(step, virtual_nodes=8), without jax.jit around it",
                "step = vnode.nnx.virtualize(step, virtual_nodes=8, in_axes=(None, None, 0)) for nnx objects",
            ],
        )
    )


def check_start(number: int, options: RunOptions, checkpoints: Checkpoints | None) -> None:
    """Refuses a checkpoint that does not lie between the first and the last step.

    Raises:
      CheckpointError: it does not.
    """
    if options.start <= number <= options.steps:
        return
    assert checkpoints is not None
    beyond = number > options.steps
    raise CheckpointError(
        layout_message(
            f"checkpoint {number} in {checkpoints.folder} is "
            + (f"beyond steps={options.steps}." if beyond else f"before start={options.start}."),
            facts=["steps counts from the first step of all, those before a checkpoint included"]
            if beyond
            else ["the state that was given and the checkpoint cannot both be gone on with"],
            remedies=["more steps" if beyond else "leave out start to go on from the checkpoint", "another folder"],
        )
    )


def check_results(results: Any, shapes: Any) -> None:
    """Refuses what is no state and metrics, in this order.

    Args:
      results: what a step returned.
      shapes: of the state that it was given.

    Raises:
      VnodeError: it returned something else, or the two the other way round.
    """
    if not (isinstance(results, tuple) and len(results) == 2):
        raise VnodeError(
            layout_message(
                "a step must return its state and its metrics.",
                facts=[f"it returned {type(results).__name__}"],
                remedies=["return state, {'loss': loss}", "return state, {} where there is nothing to tell"],
            )
        )
    first, second = map(form, results)
    expected = form(shapes)
    if first != expected and second == expected:
        raise VnodeError(
            layout_message(
                "a step must return its state first, then its metrics.",
                facts=["the second thing that it returned has the form of the state, the first has not"],
                remedies=["return state, metrics"],
            )
        )


def check_kept(state: Any) -> None:
    """Refuses an evaluation after which the arrays of the state are no more.

    Raises:
      VnodeError: some were donated.
    """
    gone = given_away(state, "state")
    if gone:
        raise VnodeError(
            layout_message(
                "the evaluation gave the state away: its arrays are no more.",
                facts=[f"donated: {', '.join(gone[:8])}"],
                remedies=["no donate_argnums for the step that evaluates"],
            )
        )


def form(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """The structure of a pytree, and the shapes in it."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [np.shape(leaf) if is_array(leaf) else () for leaf in leaves]
