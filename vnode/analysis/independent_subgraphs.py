"""A recipe -> independent subgraphs (towers), which share no batched value and can be evaluated one after another.

Knows recipes and the bytes of what they make. Must not know how a recipe is evaluated, nor why one would wait.

    a = f(x);  b = g(y);  loss = a + b   ->   [constants], [a = f(x)], [b = g(y)], [loss = a + b]

A tower holds residuals for its backward pass. Two interleaved towers hold the residuals of both at once. Evaluated one
after the other, the second reuses the memory of the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.core import Literal

from vnode.analysis.forms import Slice
from vnode.analysis.recipe import Conversion, Evaluation, Key, Recipe
from vnode.operators.cost import nbytes
from vnode.operators.multi_operand_barrier import barrier_of

Action = Evaluation | Conversion

MIN_SUBGRAPH_SHARE = 0.1
"""The share of the largest subgraph's bytes below which a subgraph is not separated."""


@dataclasses.dataclass(frozen=True, eq=False)
class Subgraph:
    """Some actions of a recipe.

    Attributes:
      actions: in order of evaluation.
      batched_leaves: keys of the batched leaves that only these actions read.
      requests: keys of the recipe's requests that these actions make, in order of evaluation.
    """

    actions: tuple[Action, ...]
    batched_leaves: tuple[Key, ...] = ()
    requests: tuple[Key, ...] = ()


def keys_read(action: Action) -> list[Key]:
    """The variables that an action reads, with their forms."""
    if isinstance(action, Conversion):
        return [(action.var, action.source)]
    operands = zip(action.step.eqn.invars, action.operands, strict=True)
    return [(atom, form) for atom, form in operands if form is not None and not isinstance(atom, Literal)]


def keys_made(action: Action) -> list[Key]:
    """The variables that an action makes, with their forms."""
    if isinstance(action, Conversion):
        return [(action.var, action.target)]
    results = zip(action.step.eqn.outvars, action.results, strict=True)
    return [(var, form) for var, form in results if form is not None]


def split_subgraphs(recipe: Recipe) -> list[Subgraph]:
    """Divides a recipe into subgraphs that can be evaluated one after another.

    Two batched actions are in one subgraph if one reads a result of the other, or if both read the same batched leaf.
    Actions without batched operands come first. Scalars computed from several subgraphs, and read by none, come last:
    a loss that is the sum of the towers' losses.

    Args:
      recipe: of a node.

    Returns:
      The first actions, the large subgraphs, and all other actions, which may be empty. A single subgraph with the
      whole recipe if fewer than two are large.
    """
    whole = [Subgraph(tuple(recipe.actions))]
    actions = recipe.actions
    if any(isinstance(action, Evaluation) and action.step.eqn.effects for action in actions):
        return whole
    first, last = actions_without_examples(actions), final_scalar_actions(actions)
    groups = connected_actions(actions, first | last)
    if len(groups) < 2:
        return whole
    sizes = [sum(nbytes(var.aval) for k in group for var, form in keys_made(actions[k])) for group in groups]
    large = [group for group, size in zip(groups, sizes, strict=True) if size >= MIN_SUBGRAPH_SHARE * max(sizes)]
    if len(large) < 2:
        return whole
    requests = {key for key in recipe.requests if not isinstance(key[0], Literal)}
    found = []
    for group in large:
        ends = tuple(key for k in group for key in keys_made(actions[k]) if key in requests)
        found.append(Subgraph(tuple(actions[k] for k in group), find_batched_leaves(actions, group), ends))
    taken = {k for group in large for k in group}
    early = [action for k, action in enumerate(actions) if k in first]
    rest = [action for k, action in enumerate(actions) if k not in taken and k not in first]
    return [Subgraph(tuple(early)), *found, Subgraph(tuple(rest))]


def actions_without_examples(actions: Sequence[Action]) -> set[int]:
    """The numbers of the actions that depend on no batched leaf."""
    made: set[Key] = set()  # without examples
    depends: set[Key] = set()
    found: set[int] = set()
    for k, action in enumerate(actions):
        read = keys_read(action)
        if any(key in depends or (isinstance(key[1], Slice) and key not in made) for key in read):
            depends.update(keys_made(action))
        else:
            made.update(keys_made(action))
            found.add(k)
    return found


def find_batched_leaves(actions: Sequence[Action], group: Sequence[int]) -> tuple[Key, ...]:
    """The batched leaves that the actions with some numbers read."""
    made = {key for action in actions for key in keys_made(action)}
    read = dict.fromkeys(key for k in group for key in keys_read(actions[k]) if key not in made)
    return tuple(key for key in read if isinstance(key[1], Slice))


def final_scalar_actions(actions: Sequence[Action]) -> set[int]:
    """The numbers of the actions that make scalars from unbatched values, and whose readers all do the same."""
    found: set[int] = set()
    wanted: set[Key] = set()  # by all other actions
    for k in reversed(range(len(actions))):
        scalars = all(not var.aval.shape and not isinstance(form, Slice) for var, form in keys_made(actions[k]))
        joins = not any(isinstance(form, Slice) for _, form in keys_read(actions[k]))
        if scalars and joins and not wanted.intersection(keys_made(actions[k])):
            found.add(k)
        else:
            wanted.update(keys_read(actions[k]))
    return found


def connected_actions(actions: Sequence[Action], left_out: set[int]) -> list[list[int]]:
    """The connected components of actions, by number, over their results and batched leaves.

    Args:
      actions: of the recipe.
      left_out: numbers of the actions that are in no component.
    """
    others = {key for k in left_out for key in keys_made(actions[k])}
    maker: dict[object, int] = {}
    above = list(range(len(actions)))

    def top(k: int) -> int:
        while above[k] != k:
            above[k] = above[above[k]]
            k = above[k]
        return k

    inside = [k for k in range(len(actions)) if k not in left_out]
    for k in inside:
        action = actions[k]
        read = (key for key in keys_read(action) if key not in others)
        shared: list[object] = [key for key in read if key in maker or isinstance(key[1], Slice)]
        barrier = barrier_of(action.step.eqn) if isinstance(action, Evaluation) else None
        if barrier is not None:
            shared.append(barrier)  # its parts stay together
        for key in shared:
            above[top(k)] = top(maker.setdefault(key, k))
        maker.update(dict.fromkeys(keys_made(action), k))
    groups: dict[int, list[int]] = {}
    for k in inside:
        groups.setdefault(top(k), []).append(k)
    return list(groups.values())
