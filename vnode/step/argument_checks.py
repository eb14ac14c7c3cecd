"""The arguments of a call -> errors: too few, shapes without values, arrays that are deleted or donated twice.

Knows signatures and deleted arrays. Must not know what becomes of the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from vnode.errors import VnodeError, limit_lines
from vnode.placement.donated import arrays_among, check_not_donated, donated_leaves


def check_tuple(args: Any, call: str) -> None:
    """Checks that a step's arguments are given as a tuple.

    Args:
      args: the arguments.
      call: the function that takes them.

    Raises:
      TypeError: they are not.
    """
    if not isinstance(args, tuple | list):
        kind = type(args).__name__
        raise TypeError(f"args must be a tuple of the step's arguments, as {call}(step, (w, x)), not {kind}")


def check_signature(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str) -> None:
    """Checks arguments against a function's signature.

    Raises:
      TypeError: Python would not call the function with them.
    """
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except ValueError:  # a callable without a signature
        return
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positional_names(fun: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters; empty if it has no signature.

    Example:
      >>> positional_names(lambda state, *, batch: state)
      ('state',)
    """
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in POSITIONAL)


def takes_any(fun: Callable[..., Any]) -> bool:
    """Whether a function takes any number of arguments by position."""
    try:
        return any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return True


def by_argument(args: Mapping[int, Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Arguments by their names.

    >>> by_argument({0: 1.0, 1: 2.0}, {"rate": 0.1}, ["state"])
    {'state': 1.0, 'argument 1': 2.0, 'rate': 0.1}
    """
    return {**{names[i] if i < len(names) else f"argument {i}": arg for i, arg in args.items()}, **kwargs}


def check_values(args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str] = ()) -> None:
    """Checks that the arguments of a run are no shapes without values.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.
      names: of the positional arguments, as far as they are known.

    Raises:
      VnodeError: there is a `jax.ShapeDtypeStruct`.

    Example:
      >>> import jax.numpy as jnp
      >>> check_values([jnp.ones(3), 1.0], {})
    """
    named = by_argument(dict(enumerate(args)), kwargs, names)
    ask = "or call what needs shapes only: step.explain(...), step.lower(...)"
    check_no_shapes(
        named, "the step is to be run on shapes without values (jax.ShapeDtypeStruct).", ["give arrays", ask]
    )


def check_placed(tree: Any) -> None:
    """Checks that a state to be placed has no shapes without values.

    Raises:
      VnodeError: it has a `jax.ShapeDtypeStruct`.
    """
    said = "shapes without values (jax.ShapeDtypeStruct) cannot be put on devices."
    check_no_shapes({"": tree}, said, ["give arrays: the result of init(...), not of jax.eval_shape(init, ...)"])


def check_no_shapes(named: Mapping[str, Any], said: str, remedies: Sequence[str]) -> None:
    """Checks that trees have no shapes without values.

    Args:
      named: trees by their names.
      said: the error's first sentence.
      remedies: of the error.

    Raises:
      VnodeError: there is a `jax.ShapeDtypeStruct`.
    """
    found = [
        f"{name}{jax.tree_util.keystr(path)}: {leaf}"
        for name, tree in named.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if found:
        raise VnodeError(
            said,
            facts=limit_lines(found),
            remedies=remedies,
        )


def check_arguments(
    args: Mapping[int, Any], kwargs: dict[str, Any], donated: Sequence[int] = (), names: Sequence[str] = ()
) -> None:
    """Checks that no array of the arguments is deleted.

    Args:
      args: arguments by position.
      kwargs: keyword arguments.
      donated: positions of those that the step donates.
      names: of the positional arguments, as far as they are known.

    Raises:
      VnodeError: an array is deleted.
    """
    if not donated_leaves((tuple(args.values()), kwargs), ""):
        return  # before any names are made: every call asks
    check_not_donated(
        by_argument(args, kwargs, names),
        {
            name: f"the step donates {name}: donate_argnums={tuple(donated)}"
            for name in by_argument(dict.fromkeys(donated), {}, names)
        },
    )


def check_donated_once(
    args: Sequence[Any], kwargs: dict[str, Any], donated: Sequence[int], names: Sequence[str] = ()
) -> None:
    """Checks that no donated buffer is passed in another place too; jaxlib 0.10 crashes on several devices.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.
      donated: positions of those that the step donates.
      names: of the positional arguments, as far as they are known.

    Raises:
      VnodeError: there is such a buffer.
    """
    called = by_argument(dict(enumerate(args)), kwargs, names)
    named = [(name, arg, i in donated) for i, (name, arg) in enumerate(called.items())]
    places: dict[Any, list[str]] = {}
    given: set[Any] = set()
    for name, tree, gone in named:
        for path, leaf in jax.tree.leaves_with_path(tree):
            for number in buffer_ids(leaf):
                places.setdefault(number, []).append(name + jax.tree_util.keystr(path))
                if gone:
                    given.add(number)
    again = list(dict.fromkeys(" is ".join(names) for n, names in places.items() if n in given and len(names) > 1))
    if not again:
        return
    raise VnodeError(
        "the step donates an array that is passed in two places: the other one would be deleted.",
        facts=[
            *limit_lines(again),
            f"donate_argnums={tuple(donated)}",
        ],
        remedies=[
            "copy values that start equal, such as an average of the parameters: jax.tree.map(jnp.copy, params)",
            "or virtualize without donate_argnums",
        ],
    )


def has_repeated_array(tree: Any) -> bool:
    """Whether a tree has the same array object twice."""
    arrays = arrays_among(jax.tree.leaves(tree))
    return len(set(map(id, arrays))) < len(arrays)


def buffer_ids(leaf: Any) -> list[Any]:
    """Identifies an array's buffers, by device and address; arrays on different devices may share one."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.size:
        return []
    try:
        return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]
    except (AttributeError, NotImplementedError, RuntimeError):  # typed keys, and devices without addresses
        return [id(leaf)]
