"""A Pallas call -> the axes of its grid along which it may be split, and why not along the others.

Knows the parameters of a ``pallas_call``: its grid, blocks and kernel. Must not know descriptions, nor import Pallas.

::

    grid (batch, heads, rows)    x[batch, heads, 128 * rows, 64] in blocks of (1, 1, 128, 64)
                                 by (b, h, i) -> (b, h, i, 0)
    axes                         0 along x's dimension 0, 1 along 1, 2 along 2, unless the kernel says otherwise
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vnode.operators.control_flow import body_of
from vnode.operators.pallas_index_maps import Component, Digit, Read, components, digits_of, divisors, numbering
from vnode.operators.pallas_kernel import overwrites, uses, written_inputs
from vnode.operators.pallas_rows import rows_are_independent
from vnode.operators.pallas_sums import adds_up


@dataclasses.dataclass(frozen=True)
class Axis:
    """A grid axis along which a call is split.

    Attributes:
      axis: the grid's axis.
      size: indices of the factor: blocks, or rows.
      within: steps of the grid per index: the minor part of an axis that index maps divide.
      block: rows of a block, where the factor's indices are rows; else 0.
      adds: whether results are sums over the axis.
      linear: if other results are not, the arrays in which the sums are linear.
    """

    axis: int
    size: int
    within: int = 1
    block: int = 0
    adds: bool = False
    linear: int | None = None

    def steps(self, size: int) -> int:
        """The size of the grid's axis for a copy."""
        return -(-size // self.block) if self.block else size * self.within


@dataclasses.dataclass(frozen=True)
class Call:
    """A ``pallas_call`` by its parameters.

    Operands are the sizes of axes that are known at run time only, then scalars, then arrays.
    """

    params: Mapping[str, Any]

    @property
    def mapping(self) -> Any:
        return self.params["grid_mapping"]

    @property
    def blocks(self) -> tuple[Any, ...]:
        """A mapping for each array, operands first."""
        return self.mapping.block_mappings

    @property
    def grid(self) -> tuple[int, ...]:
        """The size of every axis, 0 if it is known at run time only."""
        return tuple(size if isinstance(size, int) else 0 for size in self.mapping.grid)

    @property
    def sizes_given(self) -> int:
        return sum(
            size == 0 and not isinstance(own, int) for size, own in zip(self.grid, self.mapping.grid, strict=True)
        )

    @property
    def scalars(self) -> int:
        return self.mapping.num_index_operands

    @property
    def arrays(self) -> int:
        """Operands that are arrays."""
        return self.mapping.num_inputs

    @property
    def kernel(self) -> Any:
        return body_of(self.params["jaxpr"]).jaxpr

    @property
    def users(self) -> list[int]:
        """The grid axis of each axis number in the kernel, which does not count axes of `jax.vmap`."""
        return [axis for axis in range(len(self.grid)) if axis not in self.mapping.vmapped_dims]

    @property
    def semantics(self) -> dict[int, str]:
        """The author's promise for each axis: ``"parallel"``, ``"arbitrary"``, ..."""
        said = getattr(self.params["compiler_params"], "dimension_semantics", None) or ()
        named = {axis: str(getattr(word, "value", word)).lower() for axis, word in zip(self.users, said, strict=False)}
        return named | dict.fromkeys(self.mapping.vmapped_dims, "parallel")

    @property
    def is_plain(self) -> bool:
        """Whether the call only runs a kernel over a grid."""
        special = [getattr(self.mapping, name, None) for name in ("grid_names", "get_grid_indices", "local_grid_env")]
        return self.params.get("mesh") is None and not any(each is not None for each in special)

    @property
    def has_effects(self) -> bool:
        """Whether the kernel has effects besides its results, such as communication."""
        options = self.params["compiler_params"]
        effect = getattr(options, "has_side_effects", False)
        pure = not effect or str(getattr(effect, "value", effect)).lower() in ("pure", "false", "0")
        return getattr(options, "collective_id", None) is not None or not pure


@dataclasses.dataclass(frozen=True)
class Plan:
    """The axes along which a call is split, and their dimensions in the arrays.

    Attributes:
      axes: the grid's axes.
      scalars: for each scalar operand and each of its dimensions the axis that numbers it, or None.
      arrays: the same for arrays, operands first: the axis whose blocks lie there, or None.
      whole: why the other axes cannot be split.
    """

    axes: list[Axis]
    scalars: list[list[Axis | None]]
    arrays: list[list[Axis | None]]
    whole: dict[int, str] = dataclasses.field(default_factory=dict)


def split_axes(call: Call) -> Plan:
    """Finds the axes along which a call may be split."""
    grid, users = call.grid, call.users
    shapes = [mapping.array_aval.shape for mapping in call.blocks]
    scalar_shapes = [aval.shape for aval in call.mapping.index_map_avals[len(grid) :]]
    nothing = Plan([], [[None] * len(shape) for shape in scalar_shapes], [[None] * len(shape) for shape in shapes])
    nothing.whole.update(dict.fromkeys(range(len(grid)), "the grid, or an index map, does more than to number blocks"))
    maps = [components(mapping.index_map_jaxpr, grid) for mapping in call.blocks]
    if not call.is_plain or any(each is None for each in maps):
        return nothing
    if call.has_effects:
        return dataclasses.replace(nothing, whole=dict.fromkeys(range(len(grid)), "the kernel has side effects"))
    found = [each[0] for each in maps if each is not None]
    use = uses(call.kernel, call.scalars)
    reads = [read for each in maps if each is not None for read in each[1]]
    reads += [Read(r.scalars, tuple(a if a is None else users[a] for a in r.axes)) for r in use.reads]
    whole: dict[int, str] = {}

    def exclude(several: Iterable[int], why: str) -> None:
        for axis in several:
            whole.setdefault(axis, why)

    exclude((axis for axis, size in enumerate(grid) if size == 0), "its size is known at run time only")
    exclude((users[axis] for axis in use.axes), "the kernel uses its program id")
    tied = numbered_scalars(reads, scalar_shapes, grid)
    digits = digits_of(grid, divisors([component for own in found for component in own], grid))
    for read in reads:
        for d, axis in enumerate(read.axes):
            if axis is not None and (tied.get((read.scalars, d)) != axis or len(digits[axis]) > 1):
                exclude([axis], "scalars are read by its program id, and by other numbers")
    exclude(carrying_axes(call), "a step may read what an earlier one left")
    numbered = [
        [
            along_dimension(component, digits, block, size)
            for component, block, size in zip(own, mapping.block_shape, shape, strict=True)
        ]
        for own, mapping, shape in zip(found, call.blocks, shapes, strict=True)
    ]
    for own, lines in zip(found, numbered, strict=True):
        for component, line in zip(own, lines, strict=True):
            others = component.axes if line is None else [digit.axis for digit in line.digits[1:] if digit.leading]
            exclude(others, "an index map does not number blocks by it alone, one after another")
    for lines in numbered[call.arrays :]:
        there = {digit.axis for digit in map(leading_digit, lines) if digit is not None}
        exclude(set(range(len(grid))) - there, "several steps along it write the same block")
    exclude(mismatched_aliases(call, numbered), "a result takes the memory of an operand that lies in other blocks")
    axes: dict[int, Axis] = {}
    for axis in sorted(set(range(len(grid))) - set(whole)):
        (first, *_) = digits[axis]
        places = [
            (k, d, line)
            for k, lines in enumerate(numbered)
            for d, line in enumerate(lines)
            if line is not None and leading_digit(line) == first
        ]
        if len({k for k, _, _ in places}) < len(places):
            exclude([axis], "blocks lie on a diagonal")
            continue
        as_rows = None if axis in tied.values() else rows_of(call, axis, places, shapes)
        if as_rows is not None:
            axes[axis] = as_rows
        elif any(line.ragged for _, _, line in places):
            exclude([axis], "its last block is not full, and rows in a block may depend on each other")
        elif first.size > 1:
            axes[axis] = Axis(axis, first.size, first.within)
    last = max((axis for axis, size in enumerate(grid) if size != 1), default=None)
    read_by = {axis for read in reads for axis in read.axes}
    if last is not None and last not in axes and last not in read_by and len(digits[last]) == 1:
        axes |= summed_axis(call, last, found, numbered)
    arrays = [
        [None if digit is None else axes.get(digit.axis) for digit in map(leading_digit, lines)] for lines in numbered
    ]
    scalars = [
        [axes.get(tied[k, d]) if (k, d) in tied else None for d in range(len(shape))]
        for k, shape in enumerate(scalar_shapes)
    ]
    why = {axis: text for axis, text in whole.items() if axis not in axes and grid[axis] != 1}
    return Plan(list(axes.values()), scalars, arrays, why)


@dataclasses.dataclass(frozen=True)
class Line:
    """The blocks along a dimension.

    Attributes:
      digits: the digits that number them, the leading digit first.
      block: elements of one block.
      ragged: whether the last block extends beyond the array.
    """

    digits: tuple[Digit, ...]
    block: int
    ragged: bool = False


def leading_digit(line: Line | None) -> Digit | None:
    """The leading digit of a dimension's blocks, if it also leads its axis: a copy may have fewer values of it."""
    return line.digits[0] if line is not None and line.digits and line.digits[0].leading else None


def along_dimension(component: Component, digits: Mapping[int, list[Digit]], block: Any, size: int) -> Line | None:
    """The blocks along a dimension of an array; None if they do not cover it one after another."""
    elements = elements_of(block)
    numbers = None if elements is None else numbering(component, digits)
    if elements is None or numbers is None:
        return None
    count = math.prod(digit.size for digit in numbers)
    if not numbers:  # a block that does not depend on the grid, of an array that may have more of them
        return Line((), elements)
    if count * elements == size:
        return Line(tuple(numbers), elements)
    if len(numbers) == 1 and count == -(-size // elements):
        return Line(tuple(numbers), elements, ragged=True)
    return None


def elements_of(block: Any) -> int | None:
    """The elements of a block along a dimension; None if it does not begin at a multiple of them."""
    match type(block).__name__:
        case "Squeezed":
            return 1
        case "Blocked":
            return int(block.block_size)
    return None


def numbered_scalars(
    reads: Sequence[Read], shapes: Sequence[tuple[int, ...]], grid: Sequence[int]
) -> dict[tuple[int, int], int]:
    """For dimensions of scalars that are always read at one axis's program id and are as long as the axis: that
    axis."""
    seen: dict[tuple[int, int], set[int | None]] = {}
    for read in reads:
        for d in range(len(shapes[read.scalars])):
            seen.setdefault((read.scalars, d), set()).add(read.axes[d] if read.axes else None)
    return {
        (k, d): axis
        for (k, d), axes in seen.items()
        for axis in axes
        if len(axes) == 1 and axis is not None and shapes[k][d] == grid[axis]
    }


def carrying_axes(call: Call) -> set[int]:
    """Axes along which a step may read values of earlier ones, unless the kernel's author excludes it."""
    kernel, users, semantics = call.kernel, call.users, call.semantics
    first_scratch = call.scalars + len(call.blocks)
    inputs = range(call.scalars + call.arrays)
    state = [k for k in sorted(written_inputs(kernel)) if k in inputs]
    scratch = list(range(first_scratch, len(kernel.invars)))
    sizes = {number: call.grid[axis] for number, axis in enumerate(users)}
    found = set()
    for axis in range(len(call.grid)):
        word = semantics.get(axis, "arbitrary")
        if word not in ("parallel", "arbitrary"):  # cores that cooperate
            found.add(axis)
            continue
        later = frozenset(number for number, other in enumerate(users) if other > axis)
        left = state if word == "parallel" else [*state, *scratch]
        if word == "parallel" and not state:
            continue
        if not overwrites(kernel, left, later, sizes):
            found.add(axis)
    return found


def mismatched_aliases(call: Call, numbered: Sequence[Sequence[Line | None]]) -> set[int]:
    """Axes along which an operand and the result aliased to it have different blocks."""
    found: set[int] = set()
    for operand, result in dict(call.params["input_output_aliases"]).items():
        own = operand - call.scalars
        if own < 0 or numbered[own] != numbered[call.arrays + result]:
            found |= set(range(len(call.grid)))
    return found


def summed_axis(
    call: Call, axis: int, found: Sequence[Sequence[Component]], numbered: Sequence[Sequence[Line | None]]
) -> dict[int, Axis]:
    """The innermost axis, if the steps along it only sum; else nothing.

    Steps of inner axes would come between the steps of an outer axis.
    """
    kernel, users, first = call.kernel, call.users, call.scalars
    arrays = range(first, first + call.arrays)
    state = range(arrays.stop, len(kernel.invars))
    outputs = set(range(arrays.stop, first + len(call.blocks)))
    plain = not call.params["input_output_aliases"] and written_inputs(kernel) <= set(state) and call.grid[axis] > 1
    if not plain or axis not in users or call.semantics.get(axis, "arbitrary") not in ("parallel", "arbitrary"):
        return {}
    having: set[int] = set()
    for k, (own, lines) in enumerate(zip(found, numbered, strict=True)):
        for component, line in zip(own, lines, strict=True):
            if axis not in component.axes:
                continue
            digit = leading_digit(line)
            if line is None or digit is None or digit.axis != axis or line.ragged or first + k in having:
                return {}
            having.add(first + k)
    size, number, free = call.grid[axis], users.index(axis), having & outputs
    if not free and having and adds_up(kernel, number, size, state, outputs, having):
        return {axis: Axis(axis, size, adds=True)}
    kept = [k for k in state if k not in free]
    for operand in sorted(having - outputs) if free and outputs - free else ():
        if adds_up(kernel, number, size, kept, outputs - free, {operand}, free):
            return {axis: Axis(axis, size, adds=True, linear=operand - first)}
    return {}


def rows_of(
    call: Call, axis: int, places: Sequence[tuple[int, int, Line]], shapes: Sequence[tuple[int, ...]]
) -> Axis | None:
    """An axis by the rows of its blocks, if these are independent and the same everywhere; else None.

    Args:
      call: the call.
      axis: of its grid.
      places: the arrays and dimensions whose blocks it numbers, and how.
      shapes: of all arrays.
    """
    block, size = places[0][2].block, shapes[places[0][0]][places[0][1]]
    alike = all(len(line.digits) == 1 and line.block == block and shapes[k][d] == size for k, d, line in places)
    if block < 2 or not alike or axis not in call.users:
        return None
    rows = {call.scalars + k: sum(not is_squeezed(b) for b in call.blocks[k].block_shape[:d]) for k, d, _ in places}
    scratch = range(call.scalars + len(call.blocks), len(call.kernel.invars))
    if not rows_are_independent(call.kernel, rows, scratch, call.users.index(axis)):
        return None
    return Axis(axis, size, block=block)


def is_squeezed(block: Any) -> bool:
    """Whether the kernel does not see a dimension."""
    return type(block).__name__ == "Squeezed"
