"""Checks of a run's step, state and checkpoint: errors for what it cannot run.

Knows steps, states and what a step returns, from outside. Must not know how a run goes on.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from vnode.elastic.options import RunOptions
from vnode.errors import CheckpointError, VnodeError, layout_message, limit_lines
from vnode.placement.donated import donated_leaves
from vnode.placement.leaves import is_array, is_key, shape_of
from vnode.step.protocol import Step

if TYPE_CHECKING:
    from vnode.elastic.checkpoints import Checkpoints


SHOWN = 8
"""Leaves that are named."""


def check_step(step: Any) -> None:
    """Refuses a step that is not virtualized.

    Raises:
      VnodeError: it is not.
    """
    if isinstance(step, Step):
        return
    raise VnodeError(
        f"{name_of(step)} is not virtualized.",
        facts=[f"it is a {type(step).__name__}"],
        remedies=[
            "step = vnode.virtualize(step, virtual_nodes=8), without jax.jit around it",
            "step = vnode.nnx.virtualize(step, virtual_nodes=8, in_axes=(None, None, 0)) for nnx objects",
        ],
    )


def name_of(function: Any) -> str:
    """The name of a function."""
    return getattr(function, "__name__", type(function).__name__)


def named_batches(step: Any) -> list[str]:
    """The arguments of a step that its `in_axes` names; none if it says them by position."""
    for each in (step, getattr(step, "pattern", None), getattr(step, "_step", None)):
        axes = getattr(getattr(each, "spec", None), "in_axes", None)
        if isinstance(axes, Mapping):
            known = inspect.signature(step).parameters
            return [name for name in axes if name in known]
    return []


def check_takes(step: Any, objects: int = 1) -> None:
    """Refuses a step that cannot be called with a state and a batch alone.

    Args:
      step: a virtualized step.
      objects: how many arguments the state is.

    Raises:
      VnodeError: it takes fewer arguments, or needs more.
    """
    try:
        signature = inspect.signature(step)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        named = [name for name in named_batches(step) if kinds[name] is inspect.Parameter.KEYWORD_ONLY]
        signature.bind(*[None] * (objects + (len(named) != 1)), **(dict.fromkeys(named) if len(named) == 1 else {}))
    except ValueError:  # a callable that does not tell
        return
    except TypeError as error:
        wanted = "(state, batch)" if objects == 1 else f"({objects} objects, and the batch)"
        raise VnodeError(
            f"vnode.elastic.run calls a step with {wanted}, and {name_of(step)} takes {signature}: {error}.",
            remedies=[
                "put what changes from step to step into the state: random keys, schedules, counters",
                "put what comes with the data into the batch, as a dictionary",
                "bind the rest first: functools.partial(step, config=config), then vnode.virtualize",
            ],
        ) from None


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
            facts=["steps counts from the very first step, before any checkpoint"]
            if beyond
            else ["the given state and the checkpoint cannot both be the start"],
            remedies=["more steps" if beyond else "leave out start to resume from the checkpoint", "another folder"],
        )
    )


def check_storable(state: Any) -> None:
    """Refuses a state with arrays of dtypes that checkpoints do not have: uint2, uint4, and float8_e4m3.

    Raises:
      VnodeError: there is such an array.
    """
    try:
        import tensorstore
    except ImportError:  # `open_folder` says what to install
        return
    for path, leaf in jax.tree.leaves_with_path(state):
        if is_array(leaf) and not is_key(leaf):
            dtype = shape_of(leaf).dtype
            try:
                tensorstore.dtype(dtype.name)
            except ValueError:
                raise VnodeError(
                    f"checkpoints cannot hold arrays of {dtype}.",
                    facts=[f"state{jax.tree_util.keystr(path)}: {dtype}{list(np.shape(leaf))}"],
                    remedies=[
                        "keep it in another dtype of the same range, as uint8 for uint4, and cast it in the step",
                        "or run without checkpoint=...",
                    ],
                ) from None


def check_results(results: Any, state: Any) -> None:
    """Refuses results that are not a state and metrics, in this order; the state must keep its types.

    Args:
      results: those that a step returned.
      state: that it was given; its arrays may be gone.

    Raises:
      VnodeError: it returned something else, or the two the other way round, or a state of other types.
    """
    if not (isinstance(results, tuple) and len(results) == 2):
        raise VnodeError(
            "a step must return its state and its metrics.",
            facts=[f"it returned {type(results).__name__}"],
            remedies=["return state, {'loss': loss}", "return state, {} if there are no metrics"],
        )
    changed = list(changes(state, results[0]))
    if not changed:
        return
    if not any(changes(state, results[1])):
        raise VnodeError(
            "a step must return its state first, then its metrics.",
            facts=["the second result has the structure of the state, the first has not"],
            remedies=["return state, metrics"],
        )
    raise VnodeError(
        "a step must return a state of the types that it was given: as in jax.lax.scan, the next step takes it.",
        facts=limit_lines(changed, SHOWN),
        remedies=[
            "begin with the types that the step returns: jax.eval_shape(step, state, batch) says them",
            "or cast in the step: new.astype(old.dtype)",
            "return growing values among the metrics",
        ],
    )


def changes(before: Any, after: Any) -> Iterator[str]:
    """The differences in the types of two states, by the names of their leaves; weak types do not count.

    >>> list(changes({"w": np.float32(1), "n": 0}, {"w": np.ones(2), "n": 1}))
    ["state['w'] was float32[], and is float32[2]"]
    """
    old, new = (jax.tree.flatten(tree) for tree in (before, after))
    if old[1] == new[1] and all(map(same_type, old[0], new[0])):
        return
    then, now = (
        {f"state{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (before, after)
    )
    for name in then.keys() - now.keys():
        yield f"{name} was {type_name(then[name])}, and is gone"
    for name in now.keys() - then.keys():
        yield f"{name} is new, {type_name(now[name])}"
    for name in (name for name in then if name in now):
        if not same_type(then[name], now[name]):
            yield f"{name} was {type_name(then[name])}, and is {type_name(now[name])}"
    if then.keys() == now.keys():
        for a, b in zip(containers(old[1]), containers(new[1]), strict=True):
            if a is not b:
                yield f"a {a.__name__} in it is now a {b.__name__}"


def containers(structure: Any) -> list[type]:
    """The types of the nodes of a pytree, from the root on."""
    data = structure.node_data()
    return [
        type(None) if data is None else data[0],
        *itertools.chain.from_iterable(map(containers, structure.children())),
    ]


def same_type(a: Any, b: Any) -> bool:
    """Whether two leaves have one shape and dtype; those that are no arrays may be any other such leaf."""
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):  # of which there are many
        return a.shape == b.shape and a.dtype == b.dtype
    return type_name(a) == type_name(b) if is_array(a) or is_array(b) else True


def type_name(leaf: Any) -> str:
    """The type of an array as jax writes it, ``float32[3,4]``; that of another leaf by its class."""
    if not is_array(leaf):
        return f"a {type(leaf).__name__}"
    kind = shape_of(leaf)
    return f"{kind.dtype}[{','.join(map(str, kind.shape))}]"


def check_kept(state: Any) -> None:
    """Refuses an evaluation after which the arrays of the state are no more.

    Raises:
      VnodeError: some were donated.
    """
    gone = donated_leaves(state, "state")
    if gone:
        raise VnodeError(
            "the evaluation donated the state: its arrays are deleted.",
            facts=[f"donated: {', '.join(gone[:8])}"],
            remedies=["no donate_argnums for the step that evaluates"],
        )


def form(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """The structure of a pytree, and the shapes in it."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [np.shape(leaf) if is_array(leaf) else () for leaf in leaves]
