"""Values of a program -> copies in host memory, and back.

    h: f32[8, 128] in device memory   ->   aside[space=Host] h: the same value in host memory

Knows memory spaces, and how compilers treat moves between them. Must not know programs, nor which values move, and why.

A value that a loop moves in each iteration is a slice of an array on the host. The TPU compiler copies slices in pieces
of rows. A failed check ends the process if a slice is only a row of a tile, or a part of one. That was seen with
libtpu 0.0.42, for arrays of 16 bits with one dimension or of shape ``[n, 1]``. Such values stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive, Var

from vnode.operators.description import OperatorDescription, Positions, Sizes
from vnode.operators.memory_spaces import DEVICE, HOST, is_on_host
from vnode.operators.registry import rule
from vnode.operators.structure import identities

aside_p = Primitive("aside")
"""Moves its operand to the memory in the parameter ``space``. Used in vnode's programs only; no jaxpr has it."""


@aside_p.def_abstract_eval
def _(aval: Any, *, space: Any) -> Any:
    return aval.update(memory_space=space)


@rule("aside")
def host_transfer(eqn: JaxprEqn) -> OperatorDescription:
    return identities(eqn, replaced_on=dict.fromkeys(("cpu", "gpu", "tpu"), emit_move))


def emit_move(
    d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """Emits a move, where the value can be moved, or was."""
    (value,) = operands
    space = e.params["space"]
    stays = not has_several_rows(value.shape) if space == HOST else not is_on_host(jax.typeof(value))
    return [value if stays else jax.device_put(value, space)]


def has_several_rows(shape: Sequence[int]) -> bool:
    """Whether arrays of a shape have several rows, of several elements each.

    >>> has_several_rows((8, 128)), has_several_rows((8, 1)), has_several_rows((1, 128)), has_several_rows((128,))
    (True, False, False, False)
    """
    return sum(n > 1 for n in shape) > 1 and shape[-1] > 1


def move(source: Any, target: Var, like: JaxprEqn) -> JaxprEqn:
    """The equation that moves a value to the memory of another variable.

    Args:
      source: the value's variable.
      target: its new one, of the same shape and dtype.
      like: an equation with the source position to use.
    """
    space = HOST if is_on_host(target.aval) else DEVICE
    return move_template(space).replace(invars=[source], outvars=[target], source_info=like.source_info)


@functools.lru_cache(maxsize=2)
def move_template(space: Any) -> JaxprEqn:
    """A template of an equation that moves a number to a memory."""
    (eqn,) = jax.make_jaxpr(lambda x: aside_p.bind(x, space=space))(0.0).jaxpr.eqns
    return eqn


def variable_in_space(aval: Any, space: Any) -> Var:
    """A new variable for a value of a type in a memory."""
    return Var(aval.update(memory_space=space))
