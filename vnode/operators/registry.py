"""The registry: one rule per primitive, which describes the primitive's equations.

Knows equations' primitives by name, and descriptions. Must not know any particular primitive: the families beside this
file do, each for its own primitives.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Hashable, Mapping

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive

from vnode.operators.description import OperatorDescription
from vnode.operators.memo import Memo

Rule = Callable[[JaxprEqn], OperatorDescription | None]
_rules: dict[str, Rule] = {}
_unshared: set[str] = set()
"""Primitives whose descriptions depend on more than parameters and types."""
_users: set[str] = set()
"""Primitives that users describe; nothing else is known of them."""
_advice: dict[str, tuple[str, ...]] = {}
_rare: dict[str, str] = {}
"""Families that are not imported yet, by the module of jax that makes their primitives."""


def import_when_met(families: Mapping[str, str]) -> None:
    """Registers families that are imported when a primitive without a rule is met, if jax's module for them is
    imported.

    Args:
      families: modules of descriptions, by the jax modules that define their primitives.
    """
    _rare.update(families)


def rule_of(name: str) -> Rule | None:
    """The rule for the primitives of a name."""
    if name not in _rules:
        for origin, family in tuple(_rare.items()):
            if origin in sys.modules:
                importlib.import_module(family)
                _rare.pop(origin, None)
    return _rules.get(name)


def rule(*names: str, alike: bool = True, advice: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
    """Registers a rule for the primitives called `names`; for the families of this package.

    Names, not objects: some primitives have no public home in jax, and some exist in one supported version only.

    Args:
      *names: the primitives' names.
      alike: whether the description depends on nothing but parameters and types.
      advice: advice to the user where the rule gives no description.

    Returns:
      A decorator for the rule.
    """

    def add(fun: Rule) -> Rule:
        for name in names:
            if name in _users:  # described before this family was met
                continue
            if name in _rules:
                raise ValueError(f"two descriptions of primitive {name!r}")
            _rules[name] = fun
            _advice[name] = advice
            if not alike:
                _unshared.add(name)
        return fun

    return add


def register(primitive: Primitive | str) -> Callable[[Rule], Rule]:
    """Describes a user's primitive (a Pallas kernel, an FFI call); replaces an earlier description.

    Args:
      primitive: the primitive, or its name.

    Returns:
      A decorator for the rule: a function from a `JaxprEqn` to its `OperatorDescription`. Its result is checked against
        the equation's shapes each time.

    Example:
      >>> from vnode.operators import OperatorDescription, register
      >>> from jax.extend.core import Primitive
      >>> from vnode.operators.description import Factors
      >>> twice_p = Primitive("twice")
      >>> @register(twice_p)
      ... def twice(eqn):
      ...     f = Factors()
      ...     dims = f.dims(eqn.invars[0].aval.shape)
      ...     return OperatorDescription(
      ...         factors=f.all, operands=(dims,), results=(dims,), linear=(frozenset({0}),))
    """
    name = primitive if isinstance(primitive, str) else primitive.name

    def add(fun: Rule) -> Rule:
        def checked(eqn: JaxprEqn) -> OperatorDescription | None:
            description = fun(eqn)
            if description is None:
                return None
            description.check(eqn)
            return dataclasses.replace(
                description
            )  # a copy, so that cached answers are this equation's: rules may return the same object

        _rules[name] = checked
        _unshared.add(name)
        _users.add(name)
        return fun

    return add


def describe(eqn: JaxprEqn) -> OperatorDescription | None:
    """The description of an equation, or None if its primitive has none.

    Equations of one kind share a description; layers, and the plans of a search, have many of few kinds.

    Args:
      eqn: an equation of any jaxpr.

    Returns:
      The description.
    """
    fun = rule_of(eqn.primitive.name)
    if fun is None:
        return None
    key = kind_to_keep(eqn)
    if key is None:
        return fun(eqn)
    return _known.get_or_make(key, lambda: fun(eqn))


_known = Memo[OperatorDescription | None](20_000)
"""Cached descriptions, by kind."""


def has_rule(eqn: JaxprEqn) -> bool:
    """Whether there is a rule for an equation's primitive."""
    return rule_of(eqn.primitive.name) is not None


def is_users(eqn: JaxprEqn) -> bool:
    """Whether a user described an equation's primitive, so that nothing else is known of it."""
    return eqn.primitive.name in _users


def advice(eqn: JaxprEqn) -> tuple[str, ...]:
    """Advice to the user about an equation without a description."""
    return _advice.get(eqn.primitive.name) or (
        "describe it with vnode.operators.register (docs/registering-a-primitive.md)",
        "or write the operation with primitives that jax.lax documents",
    )


def kind(eqn: JaxprEqn) -> Hashable | None:
    """The kind of an equation, which determines its description.

    Args:
      eqn: an equation of any jaxpr.

    Returns:
      The kind; None if the rule is a user's or depends on more of the equation, or a parameter is unhashable.
    """
    name = eqn.primitive.name
    if rule_of(name) is not None and name in _unshared:
        return None
    types = [(getattr(a.aval, "shape", None), getattr(a.aval, "dtype", None)) for a in (*eqn.invars, *eqn.outvars)]
    made = (name, eqn.ctx.threefry_partitionable, tuple(eqn.params.items()), tuple(types))
    try:
        hash(made)
    except TypeError:
        return None
    return made


PROGRAMS = (Jaxpr, ClosedJaxpr)


def kind_to_keep(eqn: JaxprEqn) -> Hashable | None:
    """The `kind` of an equation, for a cache. None also for one that holds a program or function, whose constants the
    cache would keep alive."""
    programs = any(isinstance(each, PROGRAMS) or callable(each) for each in eqn.params.values())
    return None if programs else kind(eqn)
