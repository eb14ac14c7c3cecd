"""A program -> its values that compilers may see to be broadcasts, and the operands in which that would show.

    d = broadcast_in_dim(norm)       # visible: each row is the same number
    e = d * ones                     # visible: computed element by element from broadcasts alone
    w / e                            # the divisor shows: XLA may multiply by the reciprocal of `norm` instead

XLA divides by a broadcast value, or multiplies by its reciprocal, depending on which other quotients have the same
shape. That depends on the sizes of shards. So whoever promises the same bits hides such divisors
(`vnode.operators.separate_rounding.Rounding.hide_broadcast`). Constants are left out: compilers treat them alike
everywhere.

Knows programs and descriptions. Must not know how values are hidden, nor where they are held.
"""

from __future__ import annotations

from collections.abc import Collection

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Program
from vnode.operators import Algebra, OperatorDescription


def visible_broadcasts(program: Program) -> frozenset[Var]:
    """The values of a program that compilers may see to be broadcasts of computed values.

    Args:
      program: the program; values of the bodies of its loops and branches are not among them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.analysis.program import inline
      >>> made = jax.make_jaxpr(lambda s, w: w / (s * jnp.ones(3)))(1.0, jnp.ones(3))
      >>> program = inline(made.jaxpr, made.consts)
      >>> found = visible_broadcasts(program)
      >>> [eqn.primitive.name for eqn in program.equations if found.intersection(eqn.outvars)]
      ['mul']
    """
    constant, spread = set(program.constants), set[Var]()
    for eqn in program.equations:
        read = [atom for atom in eqn.invars if isinstance(atom, Var)]
        if not eqn.effects and constant.issuperset(read):
            constant.update(eqn.outvars)
        description = program.describe(eqn)
        if description is None or not (description.by_element or description.has(Algebra.MOVES)):
            continue
        size = min(map(size_of, eqn.outvars), default=0)
        arrays = [var for var in read if size_of(var) > 1]
        others = [v for v in arrays if v not in spread and not (description.has(Algebra.SPREADS) and size_of(v) < size)]
        larger = description.has(Algebra.MOVES) and size > sum(map(size_of, read))
        if larger or (arrays and not others):
            spread.update(eqn.outvars)
    return frozenset(spread - constant)


def operands_to_hide(eqn: JaxprEqn, description: OperatorDescription | None, spread: Collection[Var]) -> frozenset[int]:
    """The operands of an equation in which it would show that they are broadcasts: its divisors.

    Args:
      eqn: the equation.
      description: its description; without one nothing shows.
      spread: the visible broadcasts of its program.
    """
    divisors = frozenset[int]() if description is None else description.divisors
    return frozenset(i for i in divisors if isinstance(atom := eqn.invars[i], Var) and atom in spread)


def size_of(var: Var) -> int:
    """The number of a value's elements; 1 if it has no shape."""
    return getattr(var.aval, "size", 1)
