"""Exported functions (`jax.export`) for any batch size -> descriptions, if their programs keep rows independent.

Knows as much of StableHLO as proves that each row of the results comes from the same row of the operands. Must not know
how a program is compiled.

A function that takes a batch of any size need not treat examples independently: it may subtract their mean. Its program
shows that. There, a value has rows if its type has one dimension of unknown size, ``tensor<?x4xf32>``. The proof fails
at an operation that is not known to map rows to rows, at a reduction over rows, and where the number of rows is used.
Then the call has no description. A derivative by parameters has none either: it sums over the rows.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from vnode.operators.description import Factors, OperatorDescription
from vnode.operators.memo import Memo
from vnode.operators.registry import rule
from vnode.operators.splits import FREE, WHOLE


@rule(
    "call_exported",
    alike=False,
    advice=(
        "export it with a symbolic batch (jax.export.symbolic_shape), of operations that keep examples apart",
        "or describe it with vnode.operators.register (docs/registering-a-primitive.md)",
    ),
)
def exported_call(eqn: JaxprEqn) -> OperatorDescription | None:
    """The dimensions of unknown size are split freely; all others are whole."""
    exported = eqn.params["exported"]
    shapes = [aval.shape for aval in (*exported.in_avals, *exported.out_avals)]
    unknown = {str(n) for shape in shapes for n in shape if not isinstance(n, int)}
    rows = [[d for d, n in enumerate(shape) if not isinstance(n, int)] for shape in shapes]
    outputs = rows[len(eqn.invars) :]
    if len(unknown) != 1 or not all(name.isidentifier() for name in unknown) or eqn.effects:
        return None  # several unknown sizes, or a sum or product of them
    if any(len(dims) > 1 for dims in rows) or not all(outputs) or exported.ordered_effects:
        return None
    if not _apart.get_or_make(exported, lambda: keeps_rows_apart(exported)):
        return None
    atoms = (*eqn.invars, *eqn.outvars)
    f = Factors()
    examples = f.new(eqn.outvars[0].aval.shape[outputs[0][0]], FREE)
    several = [
        tuple((examples,) if d in dims else (f.new(n, WHOLE),) for d, n in enumerate(atom.aval.shape))
        for atom, dims in zip(atoms, rows, strict=True)
    ]
    description = OperatorDescription(
        factors=f.all, operands=tuple(several[: len(eqn.invars)]), results=tuple(several[len(eqn.invars) :])
    )
    return description if takes_few(eqn, description, examples) else None


def takes_few(eqn: JaxprEqn, description: OperatorDescription, examples: int) -> bool:
    """Whether the function takes few examples: it may require many, or a multiple of eight."""
    for n in (1, 2, 3):
        sizes = tuple(n if f == examples else size for f, size in enumerate(description.sizes))
        shapes = [description.operand_shape(i, sizes) for i in range(len(eqn.invars))]
        types = [jax.ShapeDtypeStruct(s, atom.aval.dtype) for s, atom in zip(shapes, eqn.invars, strict=True)]
        try:
            jax.eval_shape(lambda *values: eqn.primitive.bind(*values, **eqn.params), *types)
        except ValueError:
            return False
    return True


_apart = Memo[bool](200)
"""For programs of exported functions, whether they keep rows independent."""


Rows = Sequence[int | None]
"""For each operand the dimension of its rows; None if it has none."""


class Crossing(Exception):
    """Rows may depend on each other."""


def keeps_rows_apart(exported: Any) -> bool:
    """Whether every row of an exported function's results provably comes from one row of its operands."""
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        functions = {ir.StringAttr(op.attributes["sym_name"]).value: op for op in module.body.operations}
        main = functions["main"].regions[0].blocks[0]
        try:
            returned = RowCountWalk(functions).block(main, [Count.INDEPENDENT] * len(main.arguments))
        except Exception:  # rows may meet, or an operation is not written as it is known here: then nothing is proved
            return False
        return set(returned) <= {Count.INDEPENDENT}


def program_text(exported: Any) -> str:
    """The program of an exported function, without source lines."""
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        return str(module.operation.get_asm(enable_debug_info=False))


class Count(enum.Enum):
    """A value's dependence on the number of rows."""

    INDEPENDENT = "does not depend on the number of rows"
    DERIVED = "is computed from the number of rows"
    EQUAL = "is the number of rows"


CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Operations that call functions of the module, each with the attribute that names the function."""

Counts = Mapping[Any, Count]
"""The dependence of a function's values on the number of rows."""


class RowCountWalk:
    """Finds the values computed from the number of rows; raises `Crossing` where rows may depend on each other."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self.functions = functions

    def block(self, block: Any, given: Sequence[Count]) -> list[Count]:
        """The results' dependence on the number of rows, given the arguments' dependence."""
        counts = dict(zip(block.arguments, given, strict=True))
        for op in block.operations:
            operands = [counts.get(value, Count.INDEPENDENT) for value in op.operands]
            if op.operation.name in ("func.return", "return"):
                return operands
            if is_assertion(op):
                continue
            if op.operation.name in CALLS:
                callee = self.functions[ir.FlatSymbolRefAttr(op.attributes[CALLS[op.operation.name]]).value]
                results = self.block(callee.regions[0].blocks[0], operands)
            else:
                results = [result_counts(op, operands, counts)] * len(op.results)
            counts.update(zip(op.results, results, strict=True))
        raise Crossing


def result_counts(op: Any, operands: Sequence[Count], counts: Counts) -> Count:
    """The dependence of an operation's results on the number of rows; raises `Crossing`."""
    rows_in, rows_out = [rows(value) for value in op.operands], [rows(value) for value in op.results]
    for region in op.regions:
        for inner in operations(region):
            if any(counts.get(x) in (Count.EQUAL, Count.DERIVED) or rows(x) is not None for x in inner.operands):
                raise Crossing
    if op.operation.name == "stablehlo.get_dimension_size":
        given = isinstance(op.operands[0].owner, ir.Block) and rows_in[0] == integer(op, "dimension")
        return Count.EQUAL if given else Count.DERIVED
    if not any(each is not None for each in (*rows_in, *rows_out)):
        if op.operation.name in SAME and operands[0] is Count.EQUAL:
            return Count.EQUAL
        return Count.INDEPENDENT if set(operands) <= {Count.INDEPENDENT} else Count.DERIVED
    shapes = SHAPES.get(op.operation.name, ())
    data = {count for i, count in enumerate(operands) if i not in shapes}
    if not data <= {Count.INDEPENDENT} or None in rows_out:
        raise Crossing
    (row, *others) = set(rows_out)
    keeps = KEEPS.get(op.operation.name) or (by_element if is_elementwise(op) else None)
    if others or row is None or keeps is None or not keeps(op, rows_in, row, counts):
        raise Crossing
    return Count.INDEPENDENT


SAME = {"stablehlo.reshape", "stablehlo.convert"}
"""Operations that return their operand's number unchanged."""


def element(value: Any, k: int) -> tuple[Any, int]:
    """The source of element `k` of a short list of numbers, such as a shape."""
    op = value.owner
    if isinstance(op, ir.Block):
        return value, k
    if op.operation.name == "stablehlo.concatenate":
        for operand in op.operands:
            (n,) = shape_of(operand)
            if n is None:
                raise Crossing
            if k < n:
                return element(operand, k)
            k -= n
    if op.operation.name in SAME and product(shape_of(op.operands[0])) == 1:
        return element(op.operands[0], 0)
    return value, k


def is_number(value: Any, k: int, number: int) -> bool:
    """Whether element `k` of a list is known to be `number`."""
    source, k = element(value, k)
    if isinstance(source.owner, ir.Block) or source.owner.name != "stablehlo.constant":
        return False
    held = np.asarray(ir.DenseIntElementsAttr(source.owner.attributes["value"])).reshape(-1)
    return bool(held[k if held.size > 1 else 0] == number)


def is_count(value: Any, k: int, counts: Counts) -> bool:
    """Whether element `k` of a list is the number of rows."""
    return counts.get(element(value, k)[0]) is Count.EQUAL


def operations(region: Any) -> list[Any]:
    """The operations in a region, at any depth."""
    found = [op for block in region.blocks for op in block.operations]
    return found + [inner for op in found for nested in op.regions for inner in operations(nested)]


def shape_of(value: Any) -> list[int | None]:
    """The sizes of a value's dimensions, None for an unknown one."""
    try:
        ranked = ir.RankedTensorType(value.type)
    except ValueError:  # a token, a tuple
        raise Crossing from None
    return [None if ranked.is_dynamic_dim(d) else ranked.get_dim_size(d) for d in range(ranked.rank)]


def rows(value: Any) -> int | None:
    """The dimension of unknown size; None if there is none. Raises `Crossing` if there are several."""
    unknown = [d for d, n in enumerate(shape_of(value)) if n is None]
    if len(unknown) > 1:
        raise Crossing
    return unknown[0] if unknown else None


def is_assertion(op: Any) -> bool:
    return op.operation.name == "stablehlo.custom_call" and "shape_assertion" in str(op.attributes["call_target_name"])


# fmt: off
NAMES = {
    "abs", "add", "and", "atan2", "bitcast_convert", "cbrt", "ceil", "clamp", "compare", "complex", "convert", "cosine",
    "count_leading_zeros", "divide", "exponential", "exponential_minus_one", "floor", "imag", "is_finite", "log",
    "log_plus_one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "real",
    "reduce_precision", "remainder", "round_nearest_afz", "round_nearest_even", "rsqrt", "select", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor",
}
"""Elementwise operations of StableHLO."""

FUNCTIONS = {
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "cosh", "digamma", "erf", "erf_inv", "erfc",
    "lgamma", "next_after", "polygamma", "sinh", "square", "tan", "zeta",
}
"""Elementwise functions outside StableHLO: of another dialect, or called by name."""
# fmt: on


def is_elementwise(op: Any) -> bool:
    dialect, _, name = op.operation.name.partition(".")
    if op.operation.name == "stablehlo.custom_call":
        dialect, _, name = ir.StringAttr(op.attributes["call_target_name"]).value.partition(".")
    return name in NAMES if dialect == "stablehlo" else dialect in ("chlo", "mhlo") and name in FUNCTIONS


def integers(op: Any, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


def integer(op: Any, name: str) -> int:
    return ir.IntegerAttr(op.attributes[name]).value


def by_element(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    """Whether all operands have rows, or are scalars, which may be combined with rows."""
    pairs = zip(op.operands, rows_in, strict=True)
    return all(each == row or (each is None and not shape_of(value)) for value, each in pairs)


def by_type(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    """Always: if the operation contracted or reduced rows, its result would have none."""
    return True


def concatenated(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    return integer(op, "dimension") != row and all(each == row for each in rows_in)


def broadcast(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    """Whether rows stay rows, or a value without rows becomes the same in each row."""
    dims = integers(op, "broadcast_dimensions")
    if rows_in[0] is not None:
        return dims[rows_in[0]] == row
    return all(n == 1 for n, d in zip(shape_of(op.operands[0]), dims, strict=True) if d == row)


def reshaped(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    """Whether the numbers of elements before and after the dimension of rows stay the same."""
    before, after = shape_of(op.operands[0]), shape_of(op.results[0])
    if rows_in[0] is None:
        return False
    return product(before[: rows_in[0]]) == product(after[:row]) and product(before) == product(after)


def product(sizes: Sequence[int | None]) -> int:
    """The product of the known sizes."""
    return math.prod(n for n in sizes if n is not None)


def gathered(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    """Whether rows of indices look up in an operand without rows, or every row is read at the same places."""
    if rows_in[0] is None:
        return rows_in[1] is not None
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    if rows_in[1] is not None or rows_in[0] in (*numbers.start_index_map, *numbers.operand_batching_dims):
        return False
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(shape_of(op.operands[0]))) if d not in gone]
    at = rows_in[0] in kept and list(numbers.offset_dims)[kept.index(rows_in[0])] == row
    return at and len(op.operands) == 3 and is_count(op.operands[2], rows_in[0], counts)


def sliced(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    """Whether all rows stay, in order."""
    _, start, limit, stride = op.operands
    whole = is_number(start, row, 0) and is_number(stride, row, 1) and is_count(limit, row, counts)
    return rows_in[0] == row and whole


def padded(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    ends = [integers(op, f"{name}")[row] for name in ("edge_padding_low", "edge_padding_high", "interior_padding")]
    return rows_in[0] == row and not any(ends)


def convolved(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    groups = integer(op, "batch_group_count")
    batch = rows_in[0] == numbers.input_batch_dimension and numbers.output_batch_dimension == row
    return batch and groups == 1 and rows_in[1] is None


def iota(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    return integer(op, "iota_dimension") != row


def reversed_along(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    return row not in integers(op, "dimensions")


def sorted_along(op: Any, rows_in: Rows, row: int, counts: Counts) -> bool:
    return integer(op, "dimension") not in (row, row - len(shape_of(op.results[0])))


KEEPS: dict[str, Callable[[Any, Rows, int, Counts], bool]] = {
    "stablehlo.broadcast_in_dim": broadcast,
    "stablehlo.concatenate": concatenated,
    "stablehlo.convolution": convolved,
    "stablehlo.dot_general": by_type,
    "stablehlo.dynamic_broadcast_in_dim": broadcast,
    "stablehlo.dynamic_gather": gathered,
    "stablehlo.dynamic_iota": iota,
    "stablehlo.dynamic_reshape": reshaped,
    "stablehlo.gather": gathered,
    "stablehlo.pad": padded,
    "stablehlo.real_dynamic_slice": sliced,
    "stablehlo.reduce": by_type,
    "stablehlo.reshape": reshaped,
    "stablehlo.reverse": reversed_along,
    "stablehlo.sort": sorted_along,
    "stablehlo.transpose": by_type,
}
"""Operations that keep rows independent if the function returns true."""

SHAPES: dict[str, tuple[int, ...]] = {
    "stablehlo.dynamic_broadcast_in_dim": (1,),
    "stablehlo.dynamic_gather": (2,),
    "stablehlo.dynamic_iota": (0,),
    "stablehlo.dynamic_reshape": (1,),
    "stablehlo.real_dynamic_slice": (1, 2, 3),
}
"""Operands that only determine the result's shape."""
