"""A call that fails, or wastes devices -> an error or warning that names the likely mistake.

Knows steps as functions, arguments, and traced programs. Must not know how steps are run.

    step(batch, state)                                 ->  BatchError: the arguments are the other way round
    step(state, {"x": x, "name": "train"}), which adds ->  TypeError, with a note that batch['name'] is a str
    8 devices, virtual_nodes=4                         ->  VnodeWarning: 4 of 8 devices are idle
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from vnode.analysis.program import Program, read_inputs, scope
from vnode.errors import BatchError, VnodeError, VnodeWarning, layout_message
from vnode.placement.leaves import is_array, shapes_of
from vnode.placement.placement import Placement, even_counts
from vnode.show.units import several
from vnode.step.argument_checks import by_argument
from vnode.step.spec import StepSpec
from vnode.tracebacks import level_of_caller

DEFAULT_AXES = (None, 0)
"""The default `in_axes`: the state is not split, the batch is split along its first dimension."""

SHOWN = 8
"""The number of leaves, or of names, that a message lists."""

PADDING = 1 / 3
"""The share of padding above which a warning is given."""


def explain_failure(error: Exception, spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Finds the likely mistake in a call whose trace failed.

    Args:
      error: the error, to which notes are added.
      spec: the step.
      args: positional arguments.
      kwargs: keyword arguments.

    Raises:
      BatchError: the step works with its two arguments the other way round.
    """
    if isinstance(error, VnodeError) and not isinstance(error, BatchError):
        return
    if (
        len(args) == 2
        and not kwargs
        and tuple_of(spec.in_axes) == DEFAULT_AXES
        and not can_trace(spec.fun, args)
        and can_trace(spec.fun, args[::-1])
    ):
        first, second = list(by_argument(dict(enumerate(args)), {}, spec.positional))
        raise BatchError(
            "the step fails with these arguments, and works with the two swapped.",
            facts=[f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"],
            remedies=[
                f"call it as it is written: the first argument is {first}, the second {second}",
                "in_axes=(None, 0) splits the second argument, the batch",
            ],
        ) from error
    if isinstance(error, TypeError | ValueError | AttributeError):
        for note in notes_on_arguments(error, spec, args, kwargs):
            error.add_note(note)


def notes_on_arguments(error: Exception, spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[str]:
    """Says what is unusual about the arguments of a call that failed."""
    named = by_argument(dict(enumerate(args)), kwargs, spec.positional)
    found = [
        f"{name}{jax.tree_util.keystr(path)} is a {type(leaf).__name__}"
        for name, tree in named.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
        if not is_array(leaf)
    ]
    if found:
        yield f"Leaves that are no arrays are constants of the step: {', '.join(found[:SHOWN])}."
    if isinstance(error, jax.errors.ConcretizationTypeError):
        numbers = [name for name, value in named.items() if isinstance(value, bool | int | float)]
        if numbers:
            yield (
                f"Python numbers are values that a program is given: {', '.join(numbers[:SHOWN])}. "
                f"For Python to decide by one of them: vnode.virtualize(..., static_argnames={numbers[0]!r})."
            )
    with contextlib.suppress(Exception):
        sizes = spec.call(args, kwargs).sizes_by_name()
        if len(set(sizes.values())) > 1:
            said = [f"{name} has {size}" for name, size in sizes.items()]
            yield f"The batch's arrays have different numbers of examples: {', '.join(said[:SHOWN])}."


def can_trace(fun: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a function can be traced with some arguments."""
    with contextlib.suppress(Exception):
        jax.eval_shape(fun, *shapes_of(tuple(args)))
        return True
    return False


def tuple_of(in_axes: Any) -> Any:
    """`in_axes`, with a list as a tuple."""
    return tuple(in_axes) if isinstance(in_axes, list) else in_axes


def warn_of_waste(placement: Placement, lane: int, size: int, name: str) -> bool:
    """Warns if devices have no nodes, or more than a third of the examples are padding.

    Args:
      placement: where the nodes live.
      lane: nodes in a lane, which stay on one device.
      size: examples of the batch.
      name: of the step.

    Returns:
      Whether it warned.
    """
    nodes, idle = placement.virtual_nodes, sum(count == 0 for count in placement.counts)
    rows = -(-size // nodes) * nodes
    if idle and list(placement.counts) == even_counts(nodes, placement.size, lane):  # and not the user's own
        lanes = -(-nodes // lane)
        more = f"virtual_nodes={placement.size} or more" if lane == 1 else f"lanes={placement.size} or more"
        verb = "is" if idle == 1 else "are"
        warn(
            f"{idle} of {several(placement.size, 'device')} {verb} idle: {name!r} has {several(nodes, 'virtual node')}"
            + (f" in {several(lanes, 'lane')}." if lane > 1 else "."),
            [more, f"fewer devices: step.on({lanes})"],
        )
    elif rows - size > PADDING * rows:
        warn(
            f"{rows - size} of {rows} examples that {name!r} computes are padding: "
            f"{several(size, 'example')} on {several(nodes, 'virtual node')} of {rows // nodes}.",
            ["a batch that the number of virtual nodes divides", f"virtual_nodes={least_padding(size, nodes)}"],
        )
    else:
        return False
    return True


def least_padding(size: int, nodes: int) -> int:
    """The number of nodes with which a batch has the least padding, from half of the most up to the most.

    The most are `nodes`, or as many as there are examples.

    >>> least_padding(9, 8), least_padding(5, 8)  # 9 examples on 5 nodes of 2, 5 on 5 nodes of 1
    (5, 5)
    """
    most = min(nodes, size)
    return min(range(most, (most - 1) // 2, -1), key=lambda n: -(-size // n) * n)


def warn_of_unused(name: str, programs: Sequence[Program], split: Sequence[int]) -> None:
    """Warns if a step returns nothing, or computes nothing from the batch.

    Args:
      name: of the step.
      programs: the traced programs.
      split: the positions of their inputs that are split over the nodes.
    """
    nothing = not any(each.outputs or any(eqn.effects for eqn in each.equations) for each in programs)
    reads_batch = not (split and programs) or any(not read_inputs(each).isdisjoint(split) for each in programs)
    if nothing and not reads_batch:
        warn(f"{name!r} returns nothing, so nothing is computed.", ["return the new state: return state, loss"])
    elif not reads_batch:
        warn(
            f"no result of {name!r} depends on the batch, so nothing is divided among virtual nodes.",
            [
                "in_axes=(None, None, 0) if another argument holds the examples: by default the second one does",
                "return what is computed from the batch",
            ],
        )


def warn_of_typos(coupling: str | Mapping[str, str], programs: Sequence[Program]) -> None:
    """Warns of patterns of ``coupling`` that the name of no operation matches.

    Args:
      coupling: the user's option.
      programs: the traced programs.
    """
    if isinstance(coupling, str) or not programs:
        return
    names = {name for program in programs for name in names_in(program)}
    for pattern in coupling:
        if not any(re.search(pattern, name) for name in names):
            last = dict.fromkeys(name.rpartition("/")[2] for name in sorted(names) if name)
            there = ", ".join([*last][:SHOWN]) + (", ..." if len(last) > SHOWN else "")
            warn(
                f"coupling has the pattern {pattern!r}, which no name in the step matches.",
                ["take the name of a flax module, or of a jax.named_scope"],
                facts=[f"names: {there}"] if there else ["operations have no names"],
            )


def names_in(program: Program) -> Iterator[str]:
    """The name stacks of a program's equations, and of those in loops and branches."""
    for eqn in program.equations:
        yield scope(eqn)
        for body in program.bodies(eqn):
            yield from names_in(body)


def warn(what: str, remedies: Sequence[str], facts: Sequence[str] = ()) -> None:
    """Warns at the line of the user that called vnode."""
    warnings.warn(layout_message(what, facts=facts, remedies=remedies), VnodeWarning, stacklevel=level_of_caller())
