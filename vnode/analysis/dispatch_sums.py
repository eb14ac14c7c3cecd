"""Batch flow -> the sums over the batch that no node can estimate: dispatch buffers, as of a mixture of experts.

Knows batch flow's states and descriptions. Must not know any primitive by name, nor what an estimate is used for.

With ``coupling="local"`` a node estimates a sum over the batch by V times the sum over its own examples. That is right
for a statistic, to which every example contributes. It is wrong for a dispatch buffer, ``buffer = one_hot.T @ x``: each
place in it has a single nonzero term, and each example reads its own term again. The estimate would multiply it by V.
Two signs tell a dispatch buffer:

- Places. An example picks places along a dimension: by a comparison (``one_hot``), by an index (``x.at[i].add``), or by
  its position in the batch (a permutation matrix).
- Readers. A reader multiplies the sum by such a mask, or looks up in it.

A sum over places that no reader reads by place is a statistic: the load of every expert, for example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import Var

from vnode.analysis.forms import Form, Partial, Slice, Whole
from vnode.analysis.program import Atom
from vnode.analysis.states import Flow, Step
from vnode.operators import Monoid, OperatorDescription, Role
from vnode.operators.control_flow import Region
from vnode.operators.description import Dim

Dimensions = frozenset[int]
NO_DIMENSIONS: Dimensions = frozenset()

Places = dict[Var, Dimensions]
"""For a batched value, the dimensions along which examples pick places. For a whole value, the dimensions along which
its elements enumerate places, as in an iota or an argument."""


def find_dispatch_sums(flow: Flow) -> set[Var]:
    """The sums that nodes would estimate, although examples both write and read them by place."""
    places = places_of(flow)
    made_of: dict[Atom, set[Var]] = {}
    found: set[Var] = set()
    for step in flow.steps:
        read = {i: made_of[atom] for i, atom in enumerate(step.eqn.invars) if isinstance(atom, Var) and atom in made_of}
        batched = any(isinstance(form, Slice) for form in step.operands)
        if batched:
            found.update(*(sums for i, sums in read.items() if reads_by_place(places, step, i)))
        for var, form in zip(step.eqn.outvars, step.results, strict=True):
            if read and not batched:
                made_of[var] = set().union(*read.values())
            elif batched and form == Partial(Monoid.SUM) and flow.states[var].ghost and places.get(var):
                made_of[var] = {var}
    return found


def reads_by_place(places: Places, step: Step, operand: int) -> bool:
    """Whether examples read a whole operand by place: they multiply it by a mask, or look up in it."""
    atoms, description, form = step.eqn.invars, step.description, step.operands[operand]
    if (
        isinstance(form, Slice)
        and isinstance(atom := atoms[operand], Var)
        and form.dim in places.get(atom, NO_DIMENSIONS)
    ):
        return True  # masked before, for all examples at once
    others = {i for i, form in enumerate(step.operands) if isinstance(form, Slice) and i != operand}
    picking = {i for i in others if isinstance(atom := atoms[i], Var) and places.get(atom)}
    if description is None:
        return bool(picking)
    added = {i for group in description.linear if operand in group for i in group}
    if picking - added:
        return True
    looked_up = factors(description.operands[operand]) - factors(*description.results) - set(description.reduced)
    return bool(looked_up) and not description.role(Role.INDEX).isdisjoint(others)


def factors(*arrays: Sequence[Dim]) -> set[int]:
    """The factors in the dimensions of some arrays."""
    return {factor for dims in arrays for dim in dims for factor in dim}


def places_of(flow: Flow, given: Mapping[Var, Dimensions] | None = None) -> Places:
    """The places of every value of a program that has any.

    Args:
      flow: batch flow of the program.
      given: places of the inputs of a body. By default a whole argument has places along all dimensions, and so has a
        batched argument of integers or truth values.
    """
    places: Places = {}
    for var in [*flow.program.inputs, *flow.program.constants]:
        state = flow.states[var]
        if given is not None and var in given:
            record_places(places, var, given[var], state.form)
        else:
            by_element = isinstance(state.form, Whole) or is_discrete(var)
            record_places(places, var, all_dimensions(var) if by_element else state.places, state.form)
    for step in flow.steps:
        if step.region is not None:
            record_region_places(places, step, step.region)
            continue
        description = step.description or flow.program.describe(step.eqn)
        if description is None:
            continue
        picked = picked_factors(flow, places, step, description)
        for var, dims, form in zip(step.eqn.outvars, description.results, step.results, strict=True):
            record_places(places, var, (d for d, dim in enumerate(dims) if not picked.isdisjoint(dim)), form)
    return places


def record_places(places: Places, var: Var, dims: Iterable[int], form: Form | None = None) -> None:
    """Records the places of a value. The batched dimension and dimensions of size one have none."""
    shape = getattr(var.aval, "shape", ())
    batch = form.dim if isinstance(form, Slice) else None
    found = frozenset(d for d in dims if shape[d] > 1 and d != batch)
    if found:
        places[var] = found


def all_dimensions(atom: Atom) -> Dimensions:
    return frozenset(range(len(getattr(atom.aval, "shape", ()))))


def picked_factors(flow: Flow, places: Places, step: Step, description: OperatorDescription) -> set[int]:
    """The factors of an equation along which its results have places."""
    atoms = step.eqn.invars
    if not any(isinstance(form, Slice) for form in step.operands):  # whole values only
        found = {f for f, factor in enumerate(description.factors) if factor.positional and not atoms}
        for atom, dims in zip(atoms, description.operands, strict=True):
            found |= factors([dims[d] for d in places.get(atom, NO_DIMENSIONS)]) if isinstance(atom, Var) else set()
        return found | relocated_factors(description, found)
    found = set()
    compares = (
        all(map(is_discrete, atoms)) and not any(map(is_boolean, atoms)) and all(map(is_boolean, step.eqn.outvars))
    )
    for atom, dims, form in zip(atoms, description.operands, step.operands, strict=True):
        if not isinstance(atom, Var) or atom not in places:
            continue
        along = isinstance(form, Slice) and form.dim in places[atom]
        if isinstance(flow.states[atom].form, Slice) or compares or along:
            found |= factors([dims[d] for d in places[atom] if not (along and d == form.dim)])
    indexed = [i for i in description.role(Role.INDEX) if isinstance(step.operands[i], Slice)]
    if indexed:  # the factor written by index is in the result, and not counted
        found |= {f for f in factors(*description.results) if not description.factors[f].counted}
    return found | relocated_factors(description, found)


def relocated_factors(description: OperatorDescription, found: set[int]) -> set[int]:
    """The result's own factors where an operand's factor is neither kept nor reduced (a flip, a window)."""
    kept = factors(*description.results)
    left = found - kept - set(description.reduced)
    return kept - factors(*description.operands) if left else set()


def is_discrete(atom: Atom) -> bool:
    """Whether an array holds integers or truth values."""
    dtype = getattr(atom.aval, "dtype", jnp.float32)
    return is_boolean(atom) or jnp.issubdtype(dtype, jnp.integer)


def is_boolean(atom: Atom) -> bool:
    return getattr(atom.aval, "dtype", None) == jnp.bool_


def record_region_places(places: Places, step: Step, region: Region) -> None:
    """Records the places of a loop's or branch's results, by a fixpoint over its carries."""
    operands = [places.get(atom, NO_DIMENSIONS) if isinstance(atom, Var) else NO_DIMENSIONS for atom in step.eqn.invars]
    first = region.carried.start
    while True:
        results: list[set[int]] = [set() for _ in step.eqn.outvars]
        for k, (flow, inputs) in enumerate(zip(step.bodies, region.inputs, strict=True)):
            given = {
                var: frozenset(d - 1 for d in operands[i] if d) if i in region.scanned else operands[i]
                for var, i in zip(flow.program.inputs, inputs, strict=True)
            }
            inner = places_of(flow, given)
            for result, atom in zip(results, flow.program.outputs if k >= region.tests else (), strict=False):
                result |= inner.get(atom, NO_DIMENSIONS) if isinstance(atom, Var) else NO_DIMENSIONS
        grown = [operands[i] | results[i - first] for i in region.carried]
        if grown == [operands[i] for i in region.carried]:
            break
        operands[first : first + len(grown)] = grown
    for k, (var, form) in enumerate(zip(step.eqn.outvars, step.results, strict=True)):
        stacked = region.stacks and k >= len(region.carried)
        record_places(places, var, (d + 1 if stacked else d for d in results[k]), form)
