"""A step and options -> a virtualized step: `virtualize` checks the options and wraps the step.

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
    """Options of `virtualize` besides the number of nodes, for type checkers; `virtualize` documents them."""

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
    """Splits a step that is written for the whole batch over virtual nodes, and the nodes over devices.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp, vnode
      >>> @vnode.virtualize(virtual_nodes=4)
      ... def step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      >>> step(jnp.ones(3), jnp.ones((8, 3))).shape
      (3,)

    Here each of four nodes computes the gradient of two examples. The result equals the undecorated step's, up to
    rounding, and has the same bits on any devices of one kind.

    Args:
      fun: the step: any function of pytrees of arrays. Without it, a decorator is returned.
      virtual_nodes: V, the number of equal parts of the batch. V changes the result only by rounding; the number of
        devices does not change it at all. ``"auto"`` chooses the smallest V whose compiled program fits in a device's
        memory, hence the fewest waves. It is chosen at the first call, `explain` or `lower`, for those arguments and
        devices, and then stays. It depends on the devices, so write the number down (`explain` prints it) to repeat a
        result elsewhere.
      memory: with ``"auto"``, the memory of a device: bytes, or a string such as ``"16GiB"``. By default the devices
        report it; CPUs report none.
      in_axes: the dimension of each argument that counts examples, as in `jax.vmap`: an integer, None, or a pytree
        prefix for each positional argument. Further arguments are not split. A mapping such as ``{"batch": 0}`` names
        the split arguments; they may then be passed by position or by keyword. Batches may have different sizes. Sizes
        with a common divisor are split into equally many parts; any other batch is split by itself.
      coupling: what to do where one example influences another before the final reduction, as in batch normalization.

        - ``"exact"`` runs extra passes, so that the result equals the whole-batch step.
        - ``"local"`` lets each node estimate sums that depend on the model, and the counts that divide them, from its
          own examples (ghost batch statistics). Buffers of a mixture of experts and the like stay exact.
        - ``"error"`` refuses the step.

        A mapping from regular expressions, searched in the name stack, to these modes chooses per coupling.
      recompute_budget: the extra work that ``"exact"`` may cost, as a fraction of the step's scalar operations. The
        default allows one repeated forward pass, about a third of a deep step: enough for a contrastive loss, a
        statistic of the losses or a sort over the batch. Where a repetition would cost more, as for normalization
        layers, activations are kept instead. Within the budget as few as possible are kept, so a larger budget, up to
        1, saves memory. A step that needs a larger budget is refused, and the error names the price.
      reduction: how sums over nodes are formed. ``"invariant"`` adds in the order of a fixed tree, so the result has
        the same bits on any devices of one kind. ``"fast"`` adds on each device in order, then across devices in any
        order.
      lanes: with ``"invariant"``, the largest number of devices that get the same bits; by default V. The nodes of a
        lane, V / lanes rounded up, are added one after another, and devices hold whole lanes. With one lane per
        device, a device holds one running sum; by default it holds pending sums as well, two of them with 64 nodes.
        ``"auto"``, with ``virtual_nodes="auto"``, takes as many lanes as devices if the step does not fit with V
        lanes.
      accumulate_dtype: the dtype of floating-point accumulators. By default it is the value's own, and float32 for
        16-bit values.
      partition: how a node's computation is divided over mesh axes over which the state is sharded. Nodes are not
        spread over these axes.

        - ``"vnode"`` divides it by vnode's own descriptions of operators, and chooses the collectives.
        - ``"xla"`` leaves it to XLA's partitioner, for comparison.
        - A mapping also shards a state that is not sharded yet. Its keys are regular expressions, searched in the names
          of leaves (``params/mlp/wi/kernel``); its values are `jax.sharding.PartitionSpec`:
          ``{"mlp/wi": PartitionSpec(None, "model")}``. A `vnode.UnevenSpec` gives unequal devices unequal parts:
          ``{"mlp/wi": vnode.UnevenSpec(1, "model", (640, 384))}``.
      placement: the devices of the nodes; by default all of ``jax.devices()``, evenly. With ``virtual_nodes="auto"`` it
        is a placement of the fewest nodes: V is a multiple of their number, spread in the same proportions.
      donate_argnums: positions of arguments whose buffers may be reused, as in `jax.jit`.
      static_argnums: positions of arguments that are compile-time constants, as in `jax.jit`.
      static_argnames: names of such arguments. As in `jax.jit`, each of the two options is inferred from the other by
        the step's signature, so the arguments may be passed by position or by keyword. If both are given, both are
        taken as they are.

    Returns:
      A `VirtualStep`, or with ``virtual_nodes="auto"`` an `AutoStep`. It is called like `fun`.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: an option has a value that is not listed above, or names an argument that the step does not have; or
        `memory` is given with a fixed number of nodes.
      PlacementError: `virtual_nodes` is not a positive integer or ``"auto"``, or `placement` is not a `Placement` for
        that number of nodes.
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
        raise TypeError(f"virtualize takes a function, not a value of type {type(fun).__name__}")
    auto = isinstance(virtual_nodes, str) and virtual_nodes == "auto"
    if isinstance(virtual_nodes, str) and not auto:
        raise PlacementError(f"virtual_nodes must be a positive integer or 'auto', not {virtual_nodes!r}")
    nodes = 1 if auto else node_count(virtual_nodes)
    if memory is not None and not auto:
        raise ValueError("memory is for virtual_nodes='auto'; a fixed number of nodes has no memory limit")
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
        try:
            np.dtype(accumulate_dtype)
        except TypeError as error:
            raise ValueError(f"accumulate_dtype={accumulate_dtype!r} is no dtype, such as jnp.bfloat16") from error
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
    """Positions and names of arguments that are compile-time constants; either is inferred from the other.

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
    """The number of lanes; None for as many as nodes.

    Raises:
      ValueError: it is not between one and the number of nodes, if that is known.
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
    """Argument numbers as `jax.jit` takes them; negative ones are counted from the end.

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
