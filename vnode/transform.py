"""`virtualize`: checks what the user asks for, and puts a callable in place of the step.

Knows options. Must not know how a step is called or compiled.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from vnode.errors import PlacementError
from vnode.placement.patterns import check_axes, patterns_of
from vnode.placement.placement import Placement, node_count
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.step.pipeline import Options
from vnode.step.protocol import P, R
from vnode.step.spec import StepSpec
from vnode.step.uneven_state import share_of
from vnode.step.virtual import StepFamily, VirtualStep
from vnode.tracebacks import api_boundary

if TYPE_CHECKING:
    from vnode.plan.nodes.auto_step import AutoStep

COUPLINGS = ("exact", "local", "error")
REDUCTIONS = ("invariant", "fast")
PARTITIONS = ("vnode", "xla")


class StepOptions(TypedDict, total=False):
    """Options of `virtualize` besides the number of nodes, for type checkers: the function itself documents them."""

    in_axes: Any
    coupling: str | Mapping[str, str]
    recompute_budget: float
    reduction: str
    lanes: int | str | None
    accumulate_dtype: Any
    partition: str | Mapping[str, PartitionSpec | UnevenSpec]
    placement: Placement | None
    donate_argnums: int | Sequence[int]
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]


@overload
def virtualize(fun: Callable[P, R], *, virtual_nodes: int, **options: Unpack[StepOptions]) -> VirtualStep[P, R]: ...


@overload
def virtualize(
    fun: Callable[P, R],
    *,
    virtual_nodes: Literal["auto"],
    memory: int | str | None = None,
    **options: Unpack[StepOptions],
) -> AutoStep[P, R]: ...


@overload
def virtualize(
    fun: None = None, *, virtual_nodes: int, **options: Unpack[StepOptions]
) -> Callable[[Callable[P, R]], VirtualStep[P, R]]: ...


@overload
def virtualize(
    fun: None = None,
    *,
    virtual_nodes: Literal["auto"],
    memory: int | str | None = None,
    **options: Unpack[StepOptions],
) -> Callable[[Callable[P, R]], AutoStep[P, R]]: ...


@api_boundary
def virtualize(
    fun: Callable[..., Any] | None = None,
    *,
    virtual_nodes: int | str,
    memory: int | str | None = None,
    in_axes: Any = (None, 0),
    coupling: str | Mapping[str, str] = "exact",
    recompute_budget: float = 0.5,
    reduction: str = "invariant",
    lanes: int | str | None = None,
    accumulate_dtype: Any = None,
    partition: str | Mapping[str, PartitionSpec | UnevenSpec] = "vnode",
    placement: Placement | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Splits a step written for the whole batch over virtual nodes, and nodes over devices.

    Args:
      fun: the step, any function of pytrees of arrays. Without it a decorator is returned.
      virtual_nodes: V, the number of slices of the batch that are computed at a time. The result depends on it only by
        rounding, and not at all on the devices. ``"auto"``: the smallest V, hence the fewest waves, whose compiled
        program fits in the memory of a device. It is found when the step is first called, explained or lowered, for
        the arguments and devices of that time, and stays. So it does depend on these devices: write the number down
        (`explain` says it) where a result is to be had again elsewhere.
      memory: with ``"auto"``, what a device may hold: bytes, or a string such as ``"16GiB"``; by default what the
        devices report. CPUs report nothing.
      in_axes: which dimension of each argument carries the examples, as in `jax.vmap`: an integer, None, or a pytree
        prefix, for each positional argument. Arguments beyond its end are not split. A mapping names the arguments
        that are split, ``{"batch": 0}``, however they are given: by position, or by keyword as ``batch=batch``. Batches
        may have different sizes: those that divide into a common number of parts follow each other, each of the others
        is divided by itself.
      coupling: what to do where one example influences another before the final reduction. ``"exact"``: extra passes,
        so that the result equals the whole-batch step. ``"local"``: sums that depend on the model are estimated by
        each node from its own examples (ghost batch statistics), together with the counts that they are divided by;
        not so the buffers of a mixture of experts and the like, which stay exact. ``"error"``: refuse. A mapping from
        regular expressions, searched in the name stack, to modes chooses per coupling.
      recompute_budget: extra work that exactness may cost, as a fraction of the step's scalar operations. The default
        allows for one repeated forward pass, about a third of a deep step: what a contrastive loss, a statistic of the
        losses or a sort over the batch costs. The statistics of normalization layers would cost more: what they would
        repeat is kept. Within the budget as little as possible is kept, so that a larger one, up to 1, saves memory.
        What costs more is refused, with its price; less than a third asks for that where layers are cheap to repeat.
      reduction: how sums over nodes are formed. ``"invariant"``: in the order of a fixed tree, so that the result has
        the same bits on any devices of one kind. ``"fast"``: those of a device in order, then across devices in any.
      lanes: of an invariant reduction, the largest number of devices on which results must agree; by default the
        number of nodes. With as many lanes as devices no sum waits on a device to be added to another, where by default
        one or two do: the nodes of a lane are added one after another, and devices hold whole lanes. ``"auto"``, with
        ``virtual_nodes="auto"``: as many as there are devices, if the step does not fit with as many as nodes.
      accumulate_dtype: dtype of floating-point accumulators; by default the value's own, float32 for 16-bit values.
      partition: who divides a node's computation over axes of a mesh that nodes are not spread over, where the state is
        sharded over these: ``"vnode"`` by its own descriptions of operators, with collectives that it chooses;
        ``"xla"`` leaves that to XLA's partitioner, for comparison. A mapping from regular expressions, searched in the
        names of leaves (``params/mlp/wi/kernel``), to `jax.sharding.PartitionSpec` shards a state that does not come
        so: ``{"mlp/wi": PartitionSpec(None, "model")}``. A `vnode.UnevenSpec` in its place shares a dimension out in
        unequal pieces, where devices differ along an axis: ``{"mlp/wi": vnode.UnevenSpec(1, "model", (640, 384))}``.
      placement: where the nodes live; by default spread over all of ``jax.devices()``. With ``"auto"``, for the fewest
        nodes there may be: V is a multiple of theirs, spread in the same proportions.
      donate_argnums: arguments whose buffers may be re-used, as in `jax.jit`.
      static_argnums: arguments that are compile-time constants, as in `jax.jit`.
      static_argnames: such arguments by name. As in `jax.jit`, either option is found out from the other by the step's
        signature, so that it does not matter whether an argument is given by position or by keyword; if both are given,
        they are taken as they are.

    Returns:
      A `VirtualStep`, or with ``"auto"`` an `AutoStep`, called like `fun`.

    Raises:
      TypeError: `fun` is no function.
      ValueError: an option is not one of those named above, or names an argument that the step does not have; or
        `memory` is given with a fixed number of nodes.
      PlacementError: the placement is for another number of nodes.

    Example:
      >>> import jax.numpy as jnp, vnode
      >>> @vnode.virtualize(virtual_nodes=4)
      ... def step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      >>> step(jnp.ones(3), jnp.ones((8, 3))).shape
      (3,)
    """
    if fun is None:
        return functools.partial(
            cast(Any, virtualize),
            virtual_nodes=virtual_nodes,
            memory=memory,
            in_axes=in_axes,
            coupling=coupling,
            recompute_budget=recompute_budget,
            reduction=reduction,
            lanes=lanes,
            accumulate_dtype=accumulate_dtype,
            partition=partition,
            placement=placement,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    if not callable(fun):
        raise TypeError(f"virtualize takes a function, the step, not something of type {type(fun).__name__}")
    auto = isinstance(virtual_nodes, str) and virtual_nodes == "auto"
    if isinstance(virtual_nodes, str) and not auto:
        raise PlacementError(f"virtual_nodes must be a positive integer or 'auto', not {virtual_nodes!r}")
    nodes = 1 if auto else node_count(virtual_nodes)
    if memory is not None and not auto:
        raise ValueError("memory is for virtual_nodes='auto': a fixed number of nodes takes what it takes")
    if not isinstance(coupling, str | Mapping):
        raise ValueError(f"coupling must be one of {', '.join(COUPLINGS)}, or map patterns to them, not {coupling!r}")
    modes = [coupling] if isinstance(coupling, str) else list(coupling.values())
    for pattern in () if isinstance(coupling, str) else coupling:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"coupling: {pattern!r} is not a regular expression: {error}") from None
    if placement is not None and not isinstance(placement, Placement):
        raise PlacementError(f"placement must be a vnode.Placement, not {placement!r}; step.on(...) takes devices")
    if accumulate_dtype is not None:
        if not jnp.issubdtype(accumulate_dtype, jnp.floating):
            raise ValueError(f"accumulate_dtype must be a floating-point dtype, not {accumulate_dtype!r}")
        if jnp.dtype(accumulate_dtype).itemsize > 4 and not jax.config.jax_enable_x64:
            raise ValueError(f"accumulate_dtype={accumulate_dtype!r} needs jax_enable_x64")
    if any(mode not in COUPLINGS for mode in modes):
        raise ValueError(f"coupling must be one of {', '.join(COUPLINGS)}, or map patterns to them, not {coupling!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    if not isinstance(partition, Mapping) and partition not in PARTITIONS:
        raise ValueError(f"partition must be one of {', '.join(PARTITIONS)}, or map names to specs, not {partition!r}")
    patterns = patterns_of(partition) if isinstance(partition, Mapping) else ()
    if placement is not None and len(placement.mesh.axis_names) > 1:  # patterns may be for meshes that come later
        check_axes(patterns, placement.mesh.axis_names)
    share_of(patterns)
    if not recompute_budget >= 0:
        raise ValueError(f"recompute_budget must be a fraction of the step, at least 0, not {recompute_budget!r}")
    options = Options(
        nodes,
        coupling if isinstance(coupling, str) else dict(coupling),
        recompute_budget,
        reduction,
        None if lanes == "auto" and auto else lane_count(lanes, None if auto else nodes),
        None if accumulate_dtype is None else np.dtype(accumulate_dtype),
        automatic=partition == "xla",
        patterns=patterns,
    )
    donated = argument_numbers("donate_argnums", donate_argnums, fun)
    check_axes_named(in_axes, fun)
    spec = StepSpec(fun, options, in_axes, donated, *static_arguments(static_argnums, static_argnames, fun))
    if auto:
        from vnode.plan.nodes.auto_step import AutoStep
        from vnode.plan.nodes.device_memory import byte_count

        return AutoStep(
            VirtualStep(spec, None, StepFamily(patterns)),
            placement,
            None if memory is None else byte_count(memory),
            fewer_lanes=lanes == "auto" and reduction == "invariant",
        )
    return VirtualStep(spec, placement, StepFamily(patterns))


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function; ``*args, **kwargs`` if it has no signature."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameter = inspect.Parameter
        return [parameter("args", parameter.VAR_POSITIONAL), parameter("kwargs", parameter.VAR_KEYWORD)]


def check_axes_named(in_axes: Any, fun: Callable[..., Any]) -> None:
    """Checks the argument names in `in_axes`.

    Raises:
      ValueError: the step has no argument of a name.
    """
    parameters = parameters_of(fun)
    if not isinstance(in_axes, Mapping) or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (*POSITIONAL, *NAMED)]
    for name in in_axes:
        if name not in known:
            raise ValueError(f"in_axes={in_axes!r}: the step has no argument {name!r}, only {', '.join(known)}")


def static_arguments(
    numbers: int | Sequence[int], names: str | Sequence[str], fun: Callable[..., Any]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of arguments that are compile-time constants; found from one another if only one is given.

    Raises:
      ValueError: the function has no such argument.
    """
    positions = argument_numbers("static_argnums", numbers, fun)
    wanted = (names,) if isinstance(names, str) else tuple(names)
    parameters = parameters_of(fun)
    known = [p.name for p in parameters if p.kind in NAMED]
    for name in wanted:
        if name not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"static_argnames={names!r}: the step has no argument {name!r}, only {', '.join(known)}")
    by_position = [p.name for p in parameters if p.kind in POSITIONAL]
    if positions and not wanted:
        found = [by_position[i] for i in positions if i < len(by_position)]
        wanted = tuple(name for name in found if name in known)
    elif wanted and not positions:
        positions = tuple(i for i, name in enumerate(by_position) if name in wanted)
    return positions, wanted


def lane_count(lanes: Any, virtual_nodes: int | None) -> int | None:
    """How many lanes there are; None: as many as nodes.

    Raises:
      ValueError: not between one and the number of nodes, if that is known.
    """
    if lanes is None:
        return None
    if lanes == "auto":
        raise ValueError("lanes='auto' is for virtual_nodes='auto', and for vnode.partition.search")
    whole = isinstance(lanes, int | np.integer) and not isinstance(lanes, bool)
    if not whole or not 1 <= lanes <= (virtual_nodes or lanes):
        most = "on" if virtual_nodes is None else f"to virtual_nodes={virtual_nodes}"
        raise ValueError(f"lanes must be an integer from 1 {most}, not {lanes!r}")
    return int(lanes)


def argument_numbers(option: str, numbers: int | Sequence[int], fun: Callable[..., Any]) -> tuple[int, ...]:
    """Argument numbers as `jax.jit` takes them, none negative.

    Raises:
      ValueError: the function has no such argument.
    """
    wanted = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if not wanted:
        return ()
    parameters = parameters_of(fun)
    count = sum(p.kind in POSITIONAL for p in parameters)
    unlimited = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for i in wanted:
        if unlimited and i < 0:
            raise ValueError(f"{option}={numbers!r}: count from the front, the step takes any number of arguments")
        if not unlimited and not -count <= i < count:
            raise ValueError(f"{option}={numbers!r}: the step has {count} positional arguments")
    return tuple(i if i >= 0 else count + i for i in wanted)
