"""Calls with a partitioning of the user's own (`jax.experimental.custom_partitioning`): split by their sharding rule.

Knows Shardy's rules as jax holds them, and how jax asks the user's ``partition`` for the function of one shard. Must
not know what the call computes.

A rule such as ``"b i j, b j k -> b i k"`` names the factors of every operand and result, as a description does. A copy
of the call is evaluated by the user's function of one shard, which ``partition`` returns. It is asked for the factor
over an axis of a mesh that does not exist. A factor is whole if the function wants other operands for it, or
communicates over it. So are factors that the rule declares reduced (the user's function adds up the shards itself),
replicated or permuted.

A call without a usable rule is its body (`vnode.operators.control_flow.call_of`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import BATCHING, SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from vnode.operators.control_flow import body_of
from vnode.operators.description import (
    Dims,
    Emit,
    Factors,
    OperatorDescription,
    Positions,
    Sizes,
    Work,
    shape_of,
)
from vnode.operators.program_cost import body_cost
from vnode.operators.registry import rule
from vnode.operators.splits import FREE, WHOLE

SHARDS = 2
"""The number of shards of each factor in the mesh for which ``partition`` is asked."""


@rule("custom_partitioning", alike=False)
def partitioned_call(eqn: JaxprEqn) -> OperatorDescription | None:
    """The factors of the call's sharding rule; None if there is none, or if no factor of it splits."""
    found = sharding_rule(eqn)
    description = None if found is None else description_from_rule(eqn, found)
    if description is None:
        return None
    splits = [f for f, factor in enumerate(description.factors) if factor.split is FREE]
    whole = [f for f in splits if shard_function(eqn, description, description.sizes, (f,)) is None]
    if len(whole) == len(splits):
        return None
    factors = [dataclasses.replace(x, split=WHOLE) if f in whole else x for f, x in enumerate(description.factors)]
    count = math.prod(factor.size for factor in factors)
    operations = max(body_cost(body_of(eqn.params["call"])).flops // max(count, 1), 1)
    emits: Mapping[str, Emit] = dict.fromkeys(("cpu", "gpu", "tpu"), evaluate_shard)
    return dataclasses.replace(
        description, factors=tuple(factors), work=Work(operations), emit=evaluate_shard, replaced_on=emits
    )


def sharding_rule(eqn: JaxprEqn) -> SdyShardingRule | None:
    """The sharding rule of a call, if it has a readable one."""
    found, options = eqn.params["sharding_rule"], {}
    if callable(found):
        types = [
            [CompilerType(atom.aval.shape, str(atom.aval.dtype)) for atom in atoms]
            for atoms in (eqn.invars, eqn.outvars)
        ]
        try:
            found = found(*eqn.params["static_args"], AbstractMesh((SHARDS,), ("shard",)), *types)
        except Exception:  # the function may read more of a mesh, or of types, than the stand-ins have
            return None
        if isinstance(found, list | tuple) and len(found) == 2:
            found, options = found
    if isinstance(found, str):
        parsed = custom_partitioning(lambda: None)
        parsed.def_partition(None, sharding_rule=found, **options)
        found = parsed.sharding_rule
    return found if isinstance(found, SdyShardingRule) else None


@dataclasses.dataclass(frozen=True)
class CompilerType:
    """A stand-in for a compiler's type, for sharding rules that are functions."""

    shape: tuple[int, ...]
    element_type: str

    @property
    def rank(self) -> int:
        return len(self.shape)


def description_from_rule(eqn: JaxprEqn, found: SdyShardingRule) -> OperatorDescription | None:
    """A description with the factors of a sharding rule; None if the rule does not have the equation's shapes."""
    mappings = (*found.operand_mappings, *found.result_mappings)
    atoms = (*eqn.invars, *eqn.outvars)
    if len(mappings) != len(atoms):
        return None
    named = [names_of(mapping, len(atom.aval.shape)) for mapping, atom in zip(mappings, atoms, strict=True)]
    if any(len(names) != len(atom.aval.shape) for names, atom in zip(named, atoms, strict=True)):
        return None
    sizes = sizes_of(named, [atom.aval.shape for atom in atoms], found.factor_sizes)
    inputs, outputs = (set(flatten_names(several)) for several in (named[: len(eqn.invars)], named[len(eqn.invars) :]))
    special = {*found.reduction_factors, *found.need_replication_factors, *found.permutation_factors}
    f = Factors()
    numbers: dict[str, int] = {}
    for name, size in sizes.items():
        minor = any(name in dim[1:] for names in named for dim in names)  # no shard of a dimension is a part of it
        free = name in inputs and name in outputs and name not in special and not minor
        numbers[name] = f.new(size, FREE if free else WHOLE)

    def dims(names: Sequence[tuple[str, ...]], shape: Sequence[int]) -> Dims:
        several = []
        for dim, n in zip(names, shape, strict=True):
            known = all(name in numbers for name in dim) and math.prod(sizes[name] for name in dim) == n
            several.append(tuple(numbers[name] for name in dim) if known else (f.new(n, WHOLE),))
        return tuple(several)

    every = [dims(names, atom.aval.shape) for names, atom in zip(named, atoms, strict=True)]
    stand = {factor for several in every for dim in several for factor in dim}
    used = {factor: number for number, factor in enumerate(sorted(stand))}
    every = [tuple(tuple(used[factor] for factor in dim) for dim in several) for several in every]
    operands, results = tuple(every[: len(eqn.invars)]), tuple(every[len(eqn.invars) :])
    return OperatorDescription(factors=tuple(f.all[i] for i in sorted(stand)), operands=operands, results=results)


def names_of(mapping: Sequence[Any], rank: int) -> list[tuple[str, ...]]:
    """The names of each dimension's factors; those of an ellipsis are generated."""
    dims = [(dim,) if isinstance(dim, str) else tuple(dim) for dim in mapping]
    if dims and dims[0][0].startswith(BATCHING):
        (group,), *own = dims
        return [(f"{group.ljust(2, '0')}/{i}",) for i in range(rank - len(own))] + own
    return dims


def flatten_names(named: Iterable[Sequence[tuple[str, ...]]]) -> Iterator[str]:
    return (name for names in named for dim in names for name in dim)


def sizes_of(
    named: Sequence[Sequence[tuple[str, ...]]], shapes: Sequence[Sequence[int]], given: Mapping[str, int]
) -> dict[str, int]:
    """The sizes of factors, except those with dimensions of different sizes."""
    found: dict[str, set[int]] = {name: {given[name]} if name in given else set() for name in flatten_names(named)}
    for names, shape in zip(named, shapes, strict=True):
        for dim, n in zip(names, shape, strict=True):
            if len(dim) == 1:
                found[dim[0]].add(n)
    return {name: sizes.pop() for name, sizes in found.items() if len(sizes) == 1}


def shard_function(
    eqn: JaxprEqn, description: OperatorDescription, sizes: Sizes, cut: Sequence[int]
) -> ClosedJaxpr | None:
    """The user's function of one shard.

    Args:
      eqn: the call.
      description: its description, as far as it is known.
      sizes: sizes of a shard's factors.
      cut: the factors that are cut, each over an axis of its own.

    Returns:
      The traced function; None if the user's ``partition`` wants other shardings of operands or results, or returns no
      function for a single shard.
    """
    params = eqn.params
    names = {f: f"shard{f}" for f in cut}
    mesh = AbstractMesh((SHARDS,) * len(cut), tuple(names.values()))
    all_sizes = tuple(n * SHARDS if f in names else n for f, n in enumerate(sizes))

    def types(dims: Sequence[Dims], atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Abstract arrays of all shards together, each with its sharding."""
        specs = [[next((names[f] for f in dim if f in names), None) for dim in several] for several in dims]
        return [
            jax.ShapeDtypeStruct(
                shape_of(several, all_sizes), atom.aval.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
            )
            for several, atom, spec in zip(dims, atoms, specs, strict=True)
        ]

    given, made = types(description.operands, eqn.invars), types(description.results, eqn.outvars)
    local = [
        jax.ShapeDtypeStruct(shape_of(several, sizes), atom.aval.dtype)
        for several, atom in zip(
            (*description.operands, *description.results), (*eqn.invars, *eqn.outvars), strict=True
        )
    ]
    in_tree, out_tree = params["in_tree"], params["out_tree"]
    try:
        _, fun, result_shardings, operand_shardings = params["partition"](
            *params["static_args"], mesh, in_tree.unflatten(given), out_tree.unflatten(made)
        )
        asked = [*in_tree.flatten_up_to(operand_shardings), *out_tree.flatten_up_to(result_shardings)]
        if [spec_of(sharding) for sharding in asked] != [spec_of(each.sharding) for each in (*given, *made)]:
            return None
        traced = jax.make_jaxpr(fun)(*in_tree.unflatten(local[: len(given)]))
    except Exception:  # the user's functions may be written for real devices, or for other sizes; then nothing is cut
        return None
    found = [(aval.shape, aval.dtype) for aval in traced.out_avals]
    return traced if found == [(each.shape, each.dtype) for each in local[len(given) :]] else None


def spec_of(sharding: Any) -> tuple[Any, ...]:
    """A sharding's spec, without entries that shard nothing."""
    entries = [entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in sharding.spec]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entry or None for entry in entries)


def evaluate_shard(
    d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """Evaluates the call's body on whole values, else the user's function of a shard."""
    cut = tuple(f for f, n in enumerate(sizes) if n != d.sizes[f] or f in positions)
    if not cut:
        return list(jaxpr_as_fun(e.params["call"])(*operands))
    function = shard_function(e, d, sizes, cut)
    if function is None:
        raise ValueError(
            f"custom_partitioning: `partition` gives no function of a shard with operands "
            f"{', '.join(map(str, (d.operand_shape(i, sizes) for i in range(len(operands)))))}, "
            "although it gave one of another size. What to do: take another number of virtual nodes."
        )
    return list(jaxpr_as_fun(function)(*operands))
