"""A function and one dimension of its parameters -> a function whose devices compute different numbers of its blocks.

Knows functions of pytrees, names of leaves, and programs in blocks. Must not know how loops are made of equations.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.analysis.tracing import trace
from vnode.errors import PartitionError, layout_message
from vnode.placement.leaves import shape_of
from vnode.placement.patterns import check_axes, name_of, patterns_of
from vnode.placement.trace_context import with_jit, without_mesh
from vnode.spmd.factor_blocks import InBlocks, in_blocks
from vnode.spmd.layout import from_spec
from vnode.spmd.sharded_program import as_spec_layout, flow_over_mesh, long_axes, spec_of
from vnode.spmd.sharding_flow import Flow, follow, with_cut
from vnode.spmd.uneven_blocks import Share, restore_program, store


@dataclasses.dataclass(frozen=True, eq=False)
class Blocked:
    """A function whose devices compute different numbers of blocks of a dimension.

    It is called like the original function, with arguments as `put` returns them. Its results are stored the same way,
    so a state that it returns can be its next argument.

    Attributes:
      mesh: the devices.
      split: the program in blocks.
      flow: the layouts of its values on the mesh.
      arguments: the structure of the arguments.
      names: names of the arguments' leaves.
      results: the structure of the results.
      donated: arguments whose buffers the results may use.
    """

    mesh: Mesh
    split: InBlocks
    flow: Flow
    arguments: Any
    names: tuple[str, ...]
    results: Any
    donated: tuple[int, ...] = ()

    @property
    def share(self) -> Share:
        """The number of blocks of each device."""
        return self.split.share

    @functools.cached_property
    def _run(self) -> Callable[..., list[Any]]:
        leaves = tuple(number for argument in self.donated for number in self._leaves(self.arguments, argument))
        return jax.jit(flow_over_mesh(self.flow, self.mesh), donate_argnums=leaves)

    @with_jit
    def __call__(self, *arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        if tree != self.arguments:
            raise PartitionError(f"expected arguments of structure {self.arguments}, got {tree}")
        for name, leaf, var in zip(self.names, leaves, self.split.program.inputs, strict=True):
            if jnp.result_type(leaf) != var.aval.dtype:
                raise PartitionError(f"{name} has dtype {jnp.result_type(leaf)}, where {var.aval.dtype} is expected")
            if np.shape(leaf) != var.aval.shape:
                raise PartitionError(
                    layout_message(
                        f"{name} has shape {np.shape(leaf)}, where {var.aval.shape} is expected.",
                        remedies=["pass arguments as `put` returns them: it stores them in blocks"],
                    )
                )
        with without_mesh():
            return jax.tree.unflatten(self.results, self._run(*leaves))

    def put(self, value: Any, argument: int = 0) -> Any:
        """Stores one argument on the mesh: every device has room for as many blocks as the device with most.

        Args:
          value: the argument, a pytree of arrays in their own shapes.
          argument: the number of the argument.

        Returns:
          The same pytree, on the mesh.

        Raises:
          PartitionError: the function was made for another argument.
        """
        leaves, several = self._child(self.arguments, argument, value, "argument")
        tree = jax.tree.structure(value)
        placed = []
        for leaf, number in zip(leaves, several, strict=True):
            dim, layout = self.split.inputs[number], self.flow.inputs[number]
            expected = list(self.split.program.inputs[number].aval.shape)
            if dim is not None:
                expected[dim] = expected[dim] // (self.share.max_blocks * len(self.share.counts)) * self.share.blocks
            if np.shape(leaf) != tuple(expected):
                raise PartitionError(
                    f"{self.names[number]} has shape {np.shape(leaf)}, where {tuple(expected)} is expected"
                )
            spec = spec_of(as_spec_layout(layout, long_axes(self.mesh)))
            with without_mesh():
                kept = leaf if dim is None else store(leaf, dim, self.share)
                placed.append(jax.device_put(kept, NamedSharding(self.mesh, spec)))
        return jax.tree.unflatten(tree, placed)

    def get(self, value: Any, result: int = 0) -> Any:
        """One result in its own shapes: undoes `put`.

        Results are numbered if the function returns a tuple; any other result is number 0.

        Raises:
          PartitionError: the function returns no such result.
        """
        leaves, numbers = self._child(self.results, result, value, "result")
        tree = jax.tree.structure(value)
        dims = tuple(self.split.outputs[number] for number in numbers)
        with without_mesh():
            program = restore_program(dims, self.share, NamedSharding(self.mesh, PartitionSpec()))
            return jax.tree.unflatten(tree, program(leaves))

    def _child(self, whole: Any, child: int, value: Any, what: str) -> tuple[list[Any], range]:
        """The leaves of one argument or result, and their numbers.

        Raises:
          PartitionError: there is no such argument or result, or it is another pytree.
        """
        children = child_structures(whole)
        if child not in range(len(children)):
            raise PartitionError(f"there is no {what} {child}: they are numbered from 0 to {len(children) - 1}")
        leaves, tree = jax.tree.flatten(value)
        if tree != children[child]:
            raise PartitionError(
                layout_message(
                    f"{what} {child} is another pytree than the function was made for.",
                    facts=[f"expected {children[child]}", f"got {tree}"],
                    remedies=[f"pass {what} {child} alone", f"or name the {what}'s number: {what}=..."],
                )
            )
        return leaves, self._leaves(whole, child)

    @staticmethod
    def _leaves(tree: Any, child: int) -> range:
        """The numbers of the leaves of an argument or a result."""
        sizes = [each.num_leaves for each in child_structures(tree)]
        return range(sum(sizes[:child]), sum(sizes[: child + 1]))

    def __str__(self) -> str:
        share = self.share
        lines = [f"{share.blocks} blocks over {', '.join(share.axes)}: {', '.join(map(str, share.counts))} a device"]
        for name, dim, var in zip(self.names, self.split.inputs, self.split.program.inputs, strict=True):
            if dim is not None:
                shape = list(var.aval.shape)
                room, shape[dim] = shape[dim], shape[dim] // (share.max_blocks * len(share.counts)) * share.blocks
                lines.append(f"  {name} {tuple(shape)}: dimension {dim}, stored as {room}")
        if self.split.gathered:
            lines.append(f"  gathered: {', '.join(var.aval.str_short() for var in self.split.gathered)}")
        return "\n".join(lines)


@with_jit
def blocked(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    mesh: Mesh,
    dims: Mapping[str, int],
    counts: Sequence[int],
    axis: str | tuple[str, ...],
    *,
    partition: Mapping[str, PartitionSpec] | None = None,
    donate: Sequence[int] = (),
) -> Blocked:
    """A function in which devices compute different numbers of blocks of a dimension: 5 here, 3 there, in one program.

    A dimension of parameters (hidden units, heads, channels, words) is cut into equal blocks. Every equation with that
    dimension, gradients and updates included, runs in a loop over a device's own blocks. Memory is padded to the device
    with most blocks; work is not.

    Args:
      function: a pure function of pytrees of arrays.
      arguments: its arguments, or `jax.ShapeDtypeStruct`s of them.
      mesh: the devices.
      dims: maps patterns, searched in the names of the arguments' leaves (``0/params/wi``), to the dimension that is
        cut. Dimensions tied to it are found.
      counts: the number of blocks for each index along `axis`.
      axis: the mesh axis, or several, major to minor.
      partition: maps patterns of names to the other axes that divide leaves. By default no axis divides them.
      donate: arguments that are not used again, as `donate_argnums` of `jax.jit`; a state is then updated in place.

    Returns:
      The function over the mesh.

    Raises:
      PartitionError: an equation cannot be evaluated block by block (source line, why); a pattern matches no name;
        blocks do not divide the dimension.

    Source:
      Unequal shares: Song et al., "AccPar" (HPCA 2020), section 5.

    Example:
      >>> def layer(params, x):
      ...     return jax.nn.gelu(x @ params["wi"]) @ params["wo"]
      >>> params = {"wi": jax.numpy.ones((4, 16)), "wo": jax.numpy.ones((16, 4))}
      >>> x = jax.numpy.ones((2, 4))
      >>> split = blocked(layer, (params, x), jax.make_mesh((2,), ("model",)), {"wi": 1}, (5, 3), "model")
      >>> print(split)
      8 blocks over model: 5, 3 a device
        0/wi (4, 16): dimension 1, stored as 20
        0/wo (16, 4): dimension 0, stored as 20
      >>> bool(jax.numpy.allclose(split(split.put(params), x), layer(params, x), rtol=1e-4))
      True
    """
    check_numbers(dims, counts)
    if not isinstance(axis, str | tuple | list):
        raise PartitionError(f"axis: expected the name of an axis of the mesh, or several, not {axis!r}")
    share = Share((axis,) if isinstance(axis, str) else tuple(axis), tuple(map(int, counts)))
    axes = long_axes(mesh)
    share.check(axes)
    bare = jax.tree.map(  # shapes without the mesh that arrays may be on
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), shape_of(leaf).dtype), arguments
    )
    results = []

    def flat(*values: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(function(*values))
        results[:] = [tree]
        return leaves

    program = trace(flat, *bare).program
    names = tuple(name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tuple(arguments)))
    if len(program.inputs) > len(names):
        raise PartitionError("the function closes over values that jax is tracing: give them as arguments")
    cut = {i: dim for pattern, dim in dims.items() for i in matching_names(pattern, names)}
    split = in_blocks(program, share, cut, names=dict(enumerate(names)))
    asked = {i: spec for pattern, spec in (partition or {}).items() for i in matching_names(pattern, names)}
    check_axes(patterns_of(partition or {}), mesh.axis_names)
    inputs = []
    for number, (var, dim) in enumerate(zip(split.program.inputs, split.inputs, strict=True)):
        layout = from_spec(asked.get(number, PartitionSpec()), var.aval.shape, axes)
        inputs.append(layout if dim is None else with_cut(dim, share.cut(var.aval.shape[dim], axes), layout))
    flow = follow(split.program, inputs, axes)
    return Blocked(mesh, split, flow, jax.tree.structure(tuple(arguments)), names, results[0], tuple(donate))


def child_structures(tree: Any) -> list[Any]:
    """The structures of a tuple's items; of any other tree, its own.

    >>> child_structures(jax.tree.structure((1, {"a": 2}))), child_structures(jax.tree.structure({"a": 2}))
    ([PyTreeDef(*), PyTreeDef({'a': *})], [PyTreeDef({'a': *})])
    """
    data = tree.node_data()
    return tree.children() if data is not None and data[0] is tuple else [tree]


def check_numbers(dims: Any, counts: Any) -> None:
    """Checks dimensions by name, and numbers of blocks.

    Raises:
      PartitionError: `dims` does not map names to dimensions, or a number is not an integer.
    """
    if not isinstance(dims, Mapping):
        raise PartitionError(f"dims maps patterns of names to dimensions, as {{'params/wi': 1}}, not {dims!r}")
    for what, numbers in (("counts", counts), ("dims", [*dims.values()])):
        if isinstance(numbers, str) or not all(isinstance(n, int | np.integer) for n in numbers):
            raise PartitionError(f"{what}: expected integers, not {numbers!r}")


def matching_names(pattern: str, names: Sequence[str]) -> list[int]:
    """The numbers of the names in which a pattern is found."""
    try:
        numbers = [number for number, name in enumerate(names) if re.search(pattern, name)]
    except re.error as error:
        raise PartitionError(f"{pattern!r} is not a regular expression: {error}") from None
    if not numbers:
        raise PartitionError(
            layout_message(
                f"{pattern!r} matches no argument's name.",
                facts=["the names are", *names],
                remedies=["name one of them"],
            )
        )
    return numbers
