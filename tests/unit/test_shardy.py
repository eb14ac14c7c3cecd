"""Operator descriptions against the sharding rules that Shardy has for the same operations.

Shardy, the partitioner that XLA uses, also writes operations over factors. An equation is lowered alone; where one
operation makes its results, every factor that Shardy can split must be one that our description can split, at the same
places, or the difference stands in `DIFFERENCES` with its reason. (The other way round ours may be finer: Shardy does
not look at what a window or an index is.)
"""

import dataclasses
import re

import jax
import pytest
from jax.extend.mlir import ir, passmanager

from tests.operators.brute_force import CALLS
from tests.operators.examples import EXAMPLES
from vnode.operators import Shifted, Whole, Windowed, describe

pytestmark = pytest.mark.quickly

PLAIN = {"stablehlo.constant", "stablehlo.broadcast_in_dim"}
"""What may make an operand that is not one of the equation's; such an operand is not compared."""

POPULATE = "builtin.module(inline,func.func(sdy-populate-op-sharding-rules))"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a factor stands: digits ``[stride, stride * size)`` of a dimension of an operand or result."""

    tensor: tuple[str, int]
    dim: int
    stride: int
    size: int

    def overlaps(self, other: "Place") -> bool:
        return (
            (self.tensor, self.dim) == (other.tensor, other.dim)
            and self.stride < other.stride * other.size
            and other.stride < self.stride * self.size
        )


@dataclasses.dataclass(frozen=True)
class Rule:
    """The factors that may be split freely, or by combining partial results, each with its places."""

    op: str
    split: dict[str, list[Place]]
    reduced: set[str]


def places(dims_of, shapes, sizes):
    """For each factor of size above one where it stands; `dims_of` maps tensors to dimensions of factors.

    Strides are counted from the major end: Shardy may round the minor factor of a dimension up.
    """
    found = {}
    for tensor, dims in dims_of.items():
        for d, dim in enumerate(dims):
            stride = shapes[tensor][d]
            for factor in dim:
                stride //= sizes[factor]
                if sizes[factor] > 1:
                    found.setdefault(factor, []).append(Place(tensor, d, stride, sizes[factor]))
    return found


def shapes_of(eqn):
    """The shapes of an equation's operands and results."""
    shapes = {("operand", i): atom.aval.shape for i, atom in enumerate(eqn.invars)}
    return shapes | {("result", i): atom.aval.shape for i, atom in enumerate(eqn.outvars)}


def shardy_rule(eqn):
    """Shardy's rule for the one operation that makes the equation's results, or None."""
    args = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    lowered = jax.jit(lambda *xs: eqn.primitive.bind(*xs, **eqn.params)).lower(*args)
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(POPULATE).run(module.operation)
        (main,) = [op for op in module.body.operations if op.attributes["sym_name"].value == "main"]
        block = main.regions[0].blocks[0]
        *_, returned = block.operations
        op = returned.operands[0].owner
        if isinstance(op, ir.Block) or list(op.results) != list(returned.operands):
            return None
        if "sdy.sharding_rule" not in op.attributes:
            return None
        operands = [
            ir.BlockArgument(value).arg_number if isinstance(value.owner, ir.Block) else None for value in op.operands
        ]
        for value, argument in zip(op.operands, operands, strict=True):
            if argument is None and ir.ShapedType(value.type).rank and value.owner.name not in PLAIN:
                return None
        return parse(op.name, str(op.attributes["sdy.sharding_rule"]), operands, shapes_of(eqn))


def parse(name, text, operands, shapes):
    """Reads ``#sdy.op_sharding_rule<([i, j])->([ij]) {i=2, j=3} reduction={...} need_replication={...}>``."""
    before, after = re.fullmatch(r"#sdy\.op_sharding_rule<\((.*?)\)->\((.*?)\)(?: .*)?>", text).groups()
    sizes = {factor: int(n) for factor, n in re.findall(r"([a-z](?:_\d+)?)=(\d+)", text)}

    def tensors(written):
        return [
            [re.findall(r"[a-z](?:_\d+)?", dim) for dim in tensor.split(",")] if tensor else []
            for tensor in re.findall(r"\[(.*?)\]", written)
        ]

    dims_of = {("operand", i): dims for i, dims in zip(operands, tensors(before), strict=True) if i is not None}
    dims_of |= {("result", i): dims for i, dims in enumerate(tensors(after))}

    def kind(word):
        match = re.search(rf"{word}=\{{(.*?)\}}", text)
        return set(re.findall(r"[a-z](?:_\d+)?", match[1])) if match else set()

    kept_whole = kind("need_replication") | kind("permutation")
    reduced = kind("reduction")
    split = {
        factor: at
        for factor, at in places(dims_of, shapes, sizes).items()
        if factor not in kept_whole and (len(at) > 1 or factor in reduced)  # else it is tied to nothing
    }
    return Rule(name, split, reduced)


def coarser(eqn, rule):
    """The places of every factor that Shardy splits and our description does not."""
    d = describe(eqn)
    dims_of = {("operand", i): dims for i, dims in enumerate(d.operands)}
    dims_of |= {("result", i): dims for i, dims in enumerate(d.results)}
    ours = places(dims_of, shapes_of(eqn), d.sizes)
    whole = {f for f, factor in enumerate(d.factors) if isinstance(factor.split, Whole)}
    partial = {f for lead, split in d.leads if split.partial(lead) is not None for f in together(d, lead)}
    for name, theirs in rule.split.items():
        at = [{f for f, mine in ours.items() for place in mine if place.overlaps(there)} for there in theirs]
        tied = all(together(d, factors) == together(d, at[0]) for factors in at)
        if at[0] & whole or not tied or (name in rule.reduced) != (at[0] <= partial):
            yield theirs


def together(d, factors):
    """Factors, with all that are cut together with one of them."""
    found = set(factors)
    for f in factors:
        split = d.factors[f].split
        if isinstance(split, Shifted):
            found |= split.concerned(()) | ({split.unit} if split.unit is not None else set())
        if isinstance(split, Windowed):
            found |= {g for g in (split.operand, split.result, split.extent, split.back) if g is not None}
    return found


def equations(jaxpr):
    """The equations of a jaxpr, calls opened."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS:
            inner = eqn.params[CALLS[eqn.primitive.name]]
            yield from equations(getattr(inner, "jaxpr", inner))
        else:
            yield eqn


def sliced(eqn):
    """Dimensions of which a gather takes some elements, but not all."""
    return [
        d for d, (n, m) in enumerate(zip(eqn.invars[0].aval.shape, eqn.params["slice_sizes"], strict=True)) if n != m
    ]


DIFFERENCES = {
    "conv_general_dilated": (
        "windows with gaps between them: a part of what lies between two would be no part of a window",
        lambda eqn: eqn.params["dimension_numbers"].lhs_spec[2:],
    ),
    "gather": ("slices of several elements may straddle two parts", sliced),
    "reduce": ("a computation of the user's own is not known to be a monoid", lambda eqn: eqn.params["dimensions"]),
}
"""Where our descriptions are coarser: the reason, and the dimensions of operand 0 that it holds for."""


# fmt: off
SPOKEN = {
    "add", "broadcast_in_dim", "clamp", "concatenate", "conv_general_dilated", "convert_element_type", "dot_general",
    "dynamic_slice", "dynamic_update_slice", "fft", "gather", "pad", "psum", "reduce_max", "reduce_sum",
    "reduce_window_max", "reduce_window_sum", "reshape", "rev", "scatter-add", "select_n", "slice", "sort", "squeeze",
    "stack", "tile", "transpose", "triangular_solve",
}
# fmt: on
"""Primitives that must be among those compared, lest the comparison become empty unnoticed."""


@pytest.fixture(scope="module")
def comparison():
    """What Shardy was heard about, and the equations that are coarser with the places of each factor concerned."""
    spoken, differences = set(), []
    with jax.enable_x64(True):
        for example in EXAMPLES:
            for eqn in equations(jax.make_jaxpr(example.fun)(*example.args).jaxpr):
                avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
                if eqn.primitive.name not in example.of or any(is_key(aval) for aval in avals):
                    continue
                rule = shardy_rule(eqn)
                if rule is not None:
                    spoken.add(eqn.primitive.name)
                    differences += [(example.name, eqn, at) for at in coarser(eqn, rule)]
    return spoken, differences


def is_key(aval):
    return jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)


def explained(eqn, at):
    """Whether the table has a difference: one of the factor's places is a dimension that the reason holds for."""
    if eqn.primitive.name not in DIFFERENCES:
        return False
    dims = DIFFERENCES[eqn.primitive.name][1](eqn)
    return any(place.tensor == ("operand", 0) and place.dim in dims for place in at)


def test_at_least_as_fine_as_shardy(comparison):
    _, differences = comparison
    assert [(name, str(eqn), at) for name, eqn, at in differences if not explained(eqn, at)] == []


def test_every_difference_occurs(comparison):
    _, differences = comparison
    assert set(DIFFERENCES) - {eqn.primitive.name for _, eqn, _ in differences} == set()


def test_shardy_speaks_of_every_family(comparison):
    spoken, _ = comparison
    assert spoken >= SPOKEN
