"""`virtualize`: ties tracing, analysis and emission together behind a callable.

Knows the user's function, its arguments and which of them carry examples. Must not know primitives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from vnode.analysis.flow import Coupling, Follower, State
from vnode.analysis.forms import WHOLE, Batch, Slice
from vnode.analysis.program import scope, trace
from vnode.analysis.schedule import Schedule, schedule
from vnode.errors import BatchError, CouplingError, PlacementError, layout_message
from vnode.placement import Placement
from vnode.report import Report, coupling_line, report
from vnode.runtime.emit import emit

COUPLINGS = ("exact", "local", "error")
REDUCTIONS = ("invariant", "fast")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked of `virtualize`."""

    virtual_nodes: int
    in_axes: Any
    coupling: Any
    recompute_budget: float
    reduction: str
    accumulate_dtype: Any
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]

    def mode(self, eqn: JaxprEqn) -> str:
        """The coupling mode of an equation, by its name stack."""
        if isinstance(self.coupling, str):
            return self.coupling
        name = scope(eqn)
        for pattern, mode in self.coupling.items():
            if re.search(pattern, name):
                return mode
        return "exact"


def virtualize(
    fun: Callable[..., Any] | None = None,
    *,
    virtual_nodes: int,
    in_axes: Any = (None, 0),
    coupling: str | Mapping[str, str] = "exact",
    recompute_budget: float = 0.25,
    reduction: str = "invariant",
    accumulate_dtype: Any = None,
    placement: Placement | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """Splits a step written for the whole batch over virtual nodes, and nodes over devices.

    Args:
      fun: the step, any function of pytrees of arrays. Without it a decorator is returned.
      virtual_nodes: V, the number of slices of the batch that are computed at a time. The result depends on it only by
        rounding, and not at all on the devices.
      in_axes: which dimension of each argument carries the examples, as in `jax.vmap`: an integer, None, or a pytree
        prefix, for each positional argument. Arguments beyond its end are not split; nor are keyword arguments.
      coupling: what to do where one example influences another before the final reduction. ``"exact"``: extra passes, so
        that the result equals the whole-batch step. ``"local"``: sums that depend on the model are estimated by each
        node from its own examples (ghost batch statistics). ``"error"``: refuse. A mapping from regular expressions,
        searched in the name stack, to modes chooses per coupling.
      recompute_budget: extra work that exactness may cost, as a fraction of the step's scalar operations.
      reduction: ``"invariant"`` or ``"fast"``, how sums over nodes are formed.
      accumulate_dtype: dtype of floating-point accumulators; by default the value's own, float32 for 16-bit values.
      placement: where the nodes live; by default spread over all of ``jax.devices()``.
      donate_argnums: arguments whose buffers may be re-used, as in `jax.jit`.
      static_argnums: arguments that are compile-time constants, as in `jax.jit`.

    Returns:
      A `VirtualStep`, called like `fun`.

    Raises:
      ValueError: an option is not one of those named above.
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
            virtualize,
            virtual_nodes=virtual_nodes,
            in_axes=in_axes,
            coupling=coupling,
            recompute_budget=recompute_budget,
            reduction=reduction,
            accumulate_dtype=accumulate_dtype,
            placement=placement,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )
    if isinstance(virtual_nodes, bool) or not isinstance(virtual_nodes, int) or virtual_nodes < 1:
        raise PlacementError(f"virtual_nodes must be a positive integer, not {virtual_nodes!r}")
    modes = [coupling] if isinstance(coupling, str) else list(coupling.values())
    if any(mode not in COUPLINGS for mode in modes):
        raise ValueError(f"coupling must be one of {', '.join(COUPLINGS)}, or map patterns to them, not {coupling!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    if not recompute_budget >= 0:
        raise ValueError(f"recompute_budget must be a fraction of the step, at least 0, not {recompute_budget!r}")
    options = Options(
        virtual_nodes,
        in_axes,
        coupling if isinstance(coupling, str) else dict(coupling),
        recompute_budget,
        reduction,
        None if accumulate_dtype is None else np.dtype(accumulate_dtype),
        (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums),
        (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums),
    )
    return VirtualStep(fun, options, placement)


class VirtualStep:
    """A step on virtual nodes; made by `virtualize`.

    Calling it runs the step. It composes with `jax.jit`, `jax.lax.scan`, `jax.eval_shape` and `jax.vmap`.
    """

    def __init__(self, fun: Callable[..., Any], options: Options, placement: Placement | None) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._options = options
        self._placement = placement
        self._siblings: dict[Placement, VirtualStep] = {}
        self._has_statics = False
        if placement is not None:
            if placement.virtual_nodes != options.virtual_nodes:
                raise PlacementError(
                    f"the placement is for {placement.virtual_nodes} nodes, the step has {options.virtual_nodes}"
                )
            self._siblings[placement] = self
        self._jit = jax.jit(
            self._whole, donate_argnums=options.donate_argnums, static_argnums=options.static_argnums
        )
        self._static_jit = jax.jit(
            self._from_parts, static_argnums=0, donate_argnums=tuple(i + 1 for i in options.donate_argnums)
        )

    @property
    def placement(self) -> Placement:
        """Where the nodes live."""
        if self._placement is None:
            self._placement = Placement(self._options.virtual_nodes)
            self._siblings[self._placement] = self
        return self._placement

    def on(self, devices: Any, *, counts: Sequence[int] | None = None) -> VirtualStep:
        """The same step on other devices.

        Args:
          devices: a `Placement`, a `jax.sharding.Mesh` with the placement's axis, or a sequence of devices.
          counts: nodes on each device; as even as possible by default.

        Returns:
          A `VirtualStep`. Asked twice for the same placement it returns the same object, with its compiled programs.
        """
        if isinstance(devices, Placement):
            placement = devices
        elif isinstance(devices, jax.sharding.Mesh):
            placement = Placement(self._options.virtual_nodes, mesh=devices, counts=counts, axis=self.placement.axis)
        else:
            placement = Placement(self._options.virtual_nodes, list(devices), counts=counts)
        if placement not in self._siblings:
            sibling = VirtualStep(self._fun, self._options, placement)
            sibling._siblings = self._siblings
            self._siblings[placement] = sibling
        return self._siblings[placement]

    def put(self, tree: Any) -> Any:
        """Places a state on the placement's devices, replicated; leaves that are not arrays stay as they are."""
        sharding = self.placement.sharding()
        return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding) if is_array(leaf) else leaf, tree)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_statics:
            try:
                return self._jit(*args, **kwargs)
            except (TypeError, HasStatics):
                if all(map(is_array, jax.tree.leaves((self._dynamic(args), kwargs)))) and not self._has_statics:
                    raise
                self._has_statics = True
            except ValueError as error:
                if "incompatible devices" not in str(error):
                    raise
                args, kwargs = self._moved(args), self._moved(kwargs)
                return self._jit(*args, **kwargs)
        static, parts = self._split(args, kwargs)
        try:
            arrays = self._static_jit(static, *parts)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
            arrays = self._static_jit(static, *self._moved(parts))
        return static.merge_outputs(arrays)

    def _moved(self, tree: Any) -> Any:
        """Brings arrays that live on other devices to the placement's."""
        here = set(self.placement.devices)

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or leaf.sharding.device_set == here:
                return leaf
            return jax.device_put(leaf, self.placement.sharding())

        return jax.tree.map(move, tree)

    def _dynamic(self, args: tuple[Any, ...]) -> list[Any]:
        static = {i % len(args) for i in self._options.static_argnums if -len(args) <= i < len(args)}
        return [arg for i, arg in enumerate(args) if i not in static]

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Statics, list[list[Any]]]:
        """Separates arrays from the rest."""
        static = {i % len(args) for i in self._options.static_argnums if -len(args) <= i < len(args)}
        parts: list[list[Any]] = []
        rest: list[tuple[Any, tuple[Any, ...]]] = []
        for i, arg in enumerate((*args, kwargs)):
            leaves, treedef = ([arg], None) if i in static else jax.tree.flatten(arg)
            keep = [i not in static and is_array(leaf) for leaf in leaves]
            parts.append([leaf for leaf, k in zip(leaves, keep, strict=True) if k])
            rest.append((treedef, tuple(None if k else Held(leaf) for leaf, k in zip(leaves, keep, strict=True))))
        return Statics(tuple(rest), len(args)), parts

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step without running it, as ``jax.jit(f).lower``; takes `jax.ShapeDtypeStruct`s too."""
        if all(map(is_array, jax.tree.leaves((self._dynamic(args), kwargs)))):
            return self._jit.lower(*args, **kwargs)
        static, parts = self._split(args, kwargs)
        return self._static_jit.lower(static, *parts)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Says what becomes of the step: what is split, hoisted and accumulated, its passes and couplings.

        Args:
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s.
          **kwargs: keyword arguments of the step.

        Returns:
          A report; print it.
        """
        static, parts = self._split(args, kwargs)
        made, _, couplings = self._analyse(static, parts)
        name = getattr(self._fun, "__name__", type(self._fun).__name__)
        return report(made, self.placement, name, couplings, self._options.reduction)

    def analyse(self, *args: Any, **kwargs: Any) -> Schedule:
        """The schedule of the step for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        static, parts = self._split(args, kwargs)
        return self._analyse(static, parts)[0]

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        static, parts = self._split(args, kwargs)
        outputs = self._from_parts(static, *parts)
        if static.has_static_outputs:
            self._has_statics = True
            raise HasStatics
        return static.merge_outputs(outputs)

    def _from_parts(self, static: Statics, *parts: list[Any]) -> list[Any]:
        made, leaves, _ = self._analyse(static, parts)
        return emit(made, self.placement, leaves)

    def _analyse(self, static: Statics, parts: Sequence[list[Any]]) -> tuple[Schedule, list[Any], list[Coupling]]:
        options = self._options
        args, kwargs = static.merge_inputs(parts)
        leaves = [leaf for part in parts for leaf in part]
        axes = static.dynamic(batch_axes(options.in_axes, args, kwargs))
        batch = batch_of(leaves, axes, static.dynamic(jax.tree_util.tree_flatten_with_path((args, kwargs))[0]))

        def flat(*values: Any) -> list[Any]:
            rest = iter(values)
            a, k = static.merge_inputs([[next(rest) for _ in part] for part in parts])
            return static.split_outputs(self._fun(*a, **k))

        shapes = [abstract(leaf) for leaf in leaves]
        program, _ = trace(flat, *shapes)
        follower = Follower(batch, options.virtual_nodes, options.mode)
        states = []
        for axis, leaf in zip(axes, shapes, strict=True):
            if axis is None or batch.size == 1:
                states.append(State(WHOLE, model=axis is None))
            else:
                states.append(State(Slice(batch, axis % len(leaf.shape), 1, Fraction(1)), given=True))
        flow = follower.follow(program, states)
        made = schedule(flow, options.accumulate_dtype)
        self._check_coupling(made, follower.couplings)
        return made, leaves, follower.couplings

    def _check_coupling(self, made: Schedule, couplings: Sequence[Coupling]) -> None:
        """Refuses what the user did not want, and what would cost more than the budget."""
        refused = [c for c in couplings if self._options.mode(c.source or c.eqn) == "error"]
        if refused:
            raise CouplingError(
                layout_message(
                    "examples influence each other, which coupling='error' forbids.",
                    facts=couplings_text(refused),
                    remedies=["coupling='exact' for extra passes", "coupling='local' for per-node statistics"],
                )
            )
        budget = self._options.recompute_budget
        if made.flops and made.recomputed > budget * made.flops:
            raise CouplingError(
                layout_message(
                    f"exactness would recompute {made.recomputed / made.flops:.0%} of the step "
                    f"({len(made.passes)} passes), more than recompute_budget={budget}.",
                    facts=couplings_text(couplings),
                    remedies=[
                        f"recompute_budget={math.ceil(100 * made.recomputed / made.flops) / 100} to pay for it",
                        "coupling='local' to estimate model statistics in each node (ghost batch normalization)",
                        "coupling={'BatchNorm': 'local'} to do so for some scopes only",
                        "normalize within examples instead (GroupNorm, LayerNorm)",
                    ],
                )
            )


def couplings_text(couplings: Sequence[Coupling]) -> list[str]:
    """Couplings for an error message, each place once."""
    lines = dict.fromkeys(map(coupling_line, couplings))
    return [f"{line.what} at {line.where}" for line in lines]


class HasStatics(Exception):
    """The step returned leaves that are not arrays; they are kept outside the compiled program."""


class Held:
    """A static leaf, compared by value, by identity where it does not hash."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return id(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held):
            return NotImplemented
        if self.value is other.value:
            return True
        try:
            hash(self.value)
            return type(self.value) is type(other.value) and bool(self.value == other.value)
        except TypeError:
            return False


class Statics:
    """What a call holds besides arrays: tree structures and static leaves; hashable."""

    def __init__(self, rest: tuple[tuple[Any, tuple[Any, ...]], ...], count: int) -> None:
        self.rest = rest
        self.count = count
        self.outputs: tuple[Any, list[Any]] | None = None

    def __hash__(self) -> int:
        return hash(self.rest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statics) and self.rest == other.rest and self.adopt(other)

    def adopt(self, other: Statics) -> bool:
        """Two equal calls share what the first one returned besides arrays."""
        self.outputs = other.outputs = self.outputs or other.outputs
        return True

    def dynamic(self, per_leaf: Sequence[Any]) -> list[Any]:
        """Of something per leaf of ``(args, kwargs)`` (a static argument counts as it flattens), that of the arrays."""
        entries = iter(per_leaf)
        kept: list[Any] = []
        for treedef, held in self.rest:
            count = len(jax.tree.leaves(held[0].value)) if treedef is None else len(held)
            mine = [next(entries) for _ in range(count)]
            kept += [] if treedef is None else [e for e, h in zip(mine, held, strict=True) if h is None]
        return kept

    def merge_inputs(self, parts: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, given their arrays."""
        merged = []
        for (treedef, held), part in zip(self.rest, parts, strict=True):
            arrays = iter(part)
            leaves = [next(arrays) if h is None else h.value for h in held]
            merged.append(leaves[0] if treedef is None else jax.tree.unflatten(treedef, leaves))
        return tuple(merged[: self.count]), merged[self.count]

    def split_outputs(self, out: Any) -> list[Any]:
        """The arrays of what the step returned; remembers the rest."""
        leaves, treedef = jax.tree.flatten(out)
        self.outputs = (treedef, [None if is_array(leaf) else Held(leaf) for leaf in leaves])
        return [leaf for leaf in leaves if is_array(leaf)]

    @property
    def has_static_outputs(self) -> bool:
        return self.outputs is not None and any(held is not None for held in self.outputs[1])

    def merge_outputs(self, arrays: Sequence[Any]) -> Any:
        """What the step returned, given its arrays."""
        assert self.outputs is not None
        treedef, held = self.outputs
        rest = iter(arrays)
        return jax.tree.unflatten(treedef, [next(rest) if h is None else h.value for h in held])


def is_array(leaf: Any) -> bool:
    """Whether a leaf is something that `jax.jit` takes as an array."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex | jax.ShapeDtypeStruct)


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def batch_axes(in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | None]:
    """One axis, or None, for every leaf of the arguments.

    Raises:
      BatchError: `in_axes` is no prefix of the arguments.
    """
    if isinstance(in_axes, int):
        in_axes = (in_axes,) * len(args)
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if not isinstance(in_axes, tuple):
        raise BatchError(f"in_axes must be an integer, or a tuple with one entry per argument, not {in_axes!r}")
    axes: list[int | None] = []
    for i, arg in enumerate(args):
        entry = in_axes[i] if i < len(in_axes) else None

        def spread(axis: Any, subtree: Any) -> list[int | None]:
            return [axis] * len(jax.tree.leaves(subtree))

        try:
            parts = jax.tree.map(spread, entry, arg, is_leaf=lambda leaf: leaf is None)
        except ValueError as error:
            raise BatchError(
                layout_message(
                    f"in_axes[{i}] does not fit argument {i}: {error}",
                    facts=[f"in_axes[{i}] = {entry!r}"],
                    remedies=["give an integer, None, or a pytree prefix of the argument, as in jax.vmap"],
                )
            ) from None
        axes += jax.tree.leaves(parts, is_leaf=lambda leaf: leaf is None)
    return axes + [None] * len(jax.tree.leaves(kwargs))


def batch_of(leaves: Sequence[Any], axes: Sequence[int | None], paths: Sequence[Any]) -> Batch:
    """The batch that the arguments carry.

    Raises:
      BatchError: they carry none, an empty one, or disagree.
    """
    sizes: dict[str, int] = {}
    for (path, _), leaf, axis in zip(paths, leaves, axes, strict=True):
        if axis is None:
            continue
        name = jax.tree_util.keystr(path[1:])
        shape = np.shape(leaf)
        if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            raise BatchError(
                layout_message(
                    f"in_axes names dimension {axis!r} of an argument that has {len(shape)} dimensions.",
                    facts=[f"argument {name}: shape {tuple(shape)}"],
                    remedies=["check in_axes", "use None for arguments that are not split"],
                )
            )
        sizes[f"argument {name}: shape {tuple(shape)}, dimension {axis}"] = shape[axis]
    if not sizes:
        raise BatchError(
            layout_message(
                "no argument is batched: there is nothing to split.",
                remedies=["say with in_axes which arguments carry examples, e.g. in_axes=(None, 0)"],
            )
        )
    if len(set(sizes.values())) > 1:
        raise BatchError(
            layout_message(
                "the batched arguments disagree about the size of the batch.",
                facts=[f"{name} has {size}" for name, size in sizes.items()],
                remedies=["pass None in in_axes for arguments that are not split"],
            )
        )
    (size,) = set(sizes.values())
    if size == 0:
        raise BatchError(layout_message("the batch is empty.", facts=list(sizes)))
    return Batch(size)
