"""The kernel of a Pallas call -> dependences between its grid steps.

Knows kernels: programs that read and write references, what they are told of the grid, and how they branch. Must not
know index maps, nor which axis is split.

Steps of a grid run one after another, and may leave values for the next: in scratch memory, or in operands that they
write. An axis is independent if no step reads these: at the first step for each of its values, all scratch is
overwritten before it is read. The usual accumulator does so::

    @pl.when(pl.program_id(2) == 0)     # the first step for each value of axes 0 and 1
    def _():
        total[...] = jnp.zeros_like(total)
    total[...] += x[...] @ y[...]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from vnode.operators.constant_folding import OF_INTEGERS
from vnode.operators.control_flow import Body, Branches, Loop, Region, call_of, region_of
from vnode.operators.pallas_index_maps import Read, read_indices

PROGRAM_ID = "program_id"


@dataclasses.dataclass(frozen=True)
class Use:
    """A kernel's use of the grid.

    Attributes:
      axes: axes whose program id it uses for more than reading scalars.
      reads: how it reads scalars.
    """

    axes: frozenset[int]
    reads: tuple[Read, ...]


def bodies_of(eqn: JaxprEqn) -> tuple[Region | None, list[tuple[Body, tuple[int, ...]]]]:
    """The bodies that an equation runs, each with the operands that it is given; no region for a call."""
    call = call_of(eqn)
    if call is not None:
        return None, [(call.body, call.operands)]
    region = region_of(eqn)
    return region, [] if region is None else list(zip(region.bodies, region.inputs, strict=True))


def has_program_id(eqn: JaxprEqn) -> Iterator[int]:
    """The axes whose program id is asked for anywhere in an equation."""
    if eqn.primitive.name == PROGRAM_ID:
        yield eqn.params["axis"]
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(each, "jaxpr", each)
            for other in getattr(inner, "eqns", ()):
                yield from has_program_id(other)


def uses(kernel: Jaxpr, scalars: int) -> Use:
    """A kernel's use of program ids.

    Args:
      kernel: its first inputs are references to scalars.
      scalars: the number of scalar inputs.
    """
    axes: set[int] = set()
    reads: list[Read] = []

    def walk(jaxpr: Jaxpr, env: dict[Var, tuple[str, int]]) -> None:
        """`env`: variables that are a program id, or a reference to scalars."""
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == PROGRAM_ID:
                env[eqn.outvars[0]] = ("id", eqn.params["axis"])
                continue
            known = {k: env[i] for k, i in enumerate(eqn.invars) if isinstance(i, Var) and i in env}
            if known and is_copy(eqn):
                env[eqn.outvars[0]] = known[0]
                continue
            if eqn.primitive.name == "get" and known.get(0, ("", 0))[0] == "scalars":
                indices = read_indices(eqn)
                found = [env.get(i, ("", 0)) if isinstance(i, Var) else ("", 0) for i in indices or ()]
                reads.append(Read(known[0][1], tuple(axis if kind == "id" else None for kind, axis in found)))
                direct = {id(i) for i in indices or ()}
                axes.update(
                    axis for k, (kind, axis) in known.items() if kind == "id" and id(eqn.invars[k]) not in direct
                )
                continue
            region, bodies = bodies_of(eqn)
            passed: set[int] = set()
            for body, operands in bodies:
                inner = {}
                for var, k in zip(body.jaxpr.invars, operands, strict=True):
                    if k in known and (region is None or k not in (*region.carried, *region.scanned)):
                        inner[var] = known[k]
                        passed.add(k)
                walk(body.jaxpr, inner)
            if not bodies:
                axes.update(has_program_id(eqn))
            if region is not None and region.chooser is not None:
                passed.discard(region.chooser)
            for k, (kind, number) in known.items():
                if k in passed:
                    continue
                if kind == "id":
                    axes.add(number)
                else:
                    reads.append(Read(number, ()))

    walk(kernel, {var: ("scalars", k) for k, var in enumerate(kernel.invars[:scalars])})
    return Use(frozenset(axes), tuple(reads))


def is_copy(eqn: JaxprEqn) -> bool:
    """Whether an equation copies its operand: jax writes conversions from a type to itself."""
    return eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype


def written_inputs(kernel: Jaxpr) -> frozenset[int]:
    """The inputs of a kernel that it writes."""
    found: set[int] = set()
    for effect in kernel.effects:
        if "Read" in type(effect).__name__:
            continue
        index, var = getattr(effect, "input_index", None), getattr(effect, "input", None)
        if index is not None:
            found.add(index)
        elif var in kernel.invars:
            found.add(kernel.invars.index(var))
    return frozenset(found)


class Exposed(Exception):
    """A value that an earlier step may have left is read."""


RANDOM = -1
"""Number of the random generator's state among the inputs of a kernel."""


def overwrites(kernel: Jaxpr, state: Sequence[int], zeros: frozenset[int], sizes: Mapping[int, int]) -> bool:
    """Whether a step reads no value that earlier steps left.

    Args:
      kernel: the kernel.
      state: inputs in which values may be left.
      zeros: axes whose program id is zero at this step.
      sizes: the size of each axis, as far as it is known: the program id of one of size 1 is zero.
    """
    done: set[int] = set()

    def walk(jaxpr: Jaxpr, env: dict[Var, int], known: dict[Var, np.ndarray], done: set[int]) -> None:
        """`env`: variables that are one of `state`; `known`: values; `done`: those that are overwritten, extended."""
        read_later = {i for eqn in jaxpr.eqns for i in eqn.invars if isinstance(i, Var)}
        read_later.update(i for i in jaxpr.outvars if isinstance(i, Var))

        def value(i: Any) -> np.ndarray | None:
            return np.asarray(i.val, i.aval.dtype) if isinstance(i, Literal) else known.get(i)

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name == PROGRAM_ID:
                if eqn.params["axis"] in zeros or sizes.get(eqn.params["axis"]) == 1:
                    known[eqn.outvars[0]] = np.zeros((), np.int32)
                continue
            if name == "prng_seed":
                done.add(RANDOM)
                continue
            if name.startswith("prng_") and RANDOM not in done:
                raise Exposed
            held = {k: env[i] for k, i in enumerate(eqn.invars) if isinstance(i, Var) and i in env}
            region, bodies = bodies_of(eqn)
            if bodies:
                enter(eqn, region, bodies, held, [value(i) for i in eqn.invars], known, done)
            elif name == "swap" and eqn.outvars[0] not in read_later and set(held) <= {0}:
                if held and takes_all(eqn, eqn.invars[2:]):
                    done.add(held[0])
            elif not done.issuperset(held.values()) or any(runs_random(eqn)):
                raise Exposed
            elif name in OF_INTEGERS and len(eqn.outvars) == 1 and eqn.outvars[0].aval.shape == ():
                operands = [value(i) for i in eqn.invars]
                if all(each is not None for each in operands):
                    result = np.asarray(OF_INTEGERS[name](*operands))
                    known[eqn.outvars[0]] = result.astype(eqn.outvars[0].aval.dtype)

    def enter(
        eqn: JaxprEqn,
        region: Region | None,
        bodies: list[tuple[Body, tuple[int, ...]]],
        held: dict[int, int],
        values: list[np.ndarray | None],
        known: dict[Var, np.ndarray],
        done: set[int],
    ) -> None:
        if isinstance(region, Branches) and values[0] is not None:
            bodies = [bodies[min(max(int(values[0]), 0), len(bodies) - 1)]]
            region = None
        after = []
        for body, operands in bodies:
            own, inner = set(done), {}
            changing = () if region is None else (*region.carried, *region.scanned)
            for var, k in zip(body.jaxpr.invars, operands, strict=True):
                if values[k] is not None and k not in changing:
                    inner[var] = values[k]
            env = {var: held[k] for var, k in zip(body.jaxpr.invars, operands, strict=True) if k in held}
            walk(body.jaxpr, env, inner, own)
            after.append(own)
            if region is None:
                for var, i in zip(eqn.outvars, body.jaxpr.outvars, strict=True):
                    found = np.asarray(i.val, i.aval.dtype) if isinstance(i, Literal) else inner.get(i)
                    if found is not None:
                        known[var] = found
        if region is None or isinstance(region, Branches) or (isinstance(region, Loop) and region.length > 0):
            done |= set.intersection(*after)

    try:
        walk(kernel, {kernel.invars[k]: k for k in state}, {}, done)
    except Exposed:
        return False
    return True


def runs_random(eqn: JaxprEqn) -> Iterator[bool]:
    """Whether an equation without known bodies draws random bits; one entry for each body."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(each, "jaxpr", each)
            for other in getattr(inner, "eqns", ()):
                if other.primitive.name.startswith("prng_"):
                    yield True
                yield from runs_random(other)


def takes_all(eqn: JaxprEqn, indices: Sequence[Any]) -> bool:
    """Whether an equation accesses all of its reference, by its index operands."""
    transforms = jax.tree.unflatten(eqn.params["tree"], indices)
    shape = eqn.invars[0].aval.shape
    if not transforms:
        return True
    if len(transforms) > 1 or not hasattr(transforms[0], "indices"):
        return False
    return all(is_all(index, size) for index, size in zip(transforms[0].indices, shape, strict=True))


def is_all(index: Any, size: int) -> bool:
    """Whether an index covers a whole dimension: a slice from its start, or its only element."""
    if hasattr(index, "start"):
        start = index.start.val if isinstance(index.start, Literal) else index.start
        return isinstance(start, int | np.integer) and int(start) == 0 and index.size == size and index.stride == 1
    return size == 1 and isinstance(index, Literal) and np.ndim(index.val) == 0 and int(index.val) == 0
