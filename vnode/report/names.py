"""A value of a program -> its name: the path of the parameter that it updates, or of the result that it is.

Knows programs, and paths of arguments and results. Must not know schedules, nor what is made of names.

A gradient has no name in a jaxpr. An optimizer computes the new parameter from it elementwise, with the old parameter
and its slots as operands. The shared end of their paths is the name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Atom, Program
from vnode.placement.sharded import is_sharded_batch

Path = tuple[str, ...]

LIMIT = 500
"""Equations that are followed from one value: an optimizer takes tens."""


class Names:
    """Names of a program's values.

    Args:
      program: whose.
      inputs: the path of each input within its argument, or nothing; see `argument_paths`.
      outputs: the path of each output, or nothing; see `paths_of`.
    """

    def __init__(self, program: Program, inputs: Sequence[Path] = (), outputs: Sequence[Path] = ()) -> None:
        self._program = program
        self._inputs = {var: path for var, path in zip(program.inputs, inputs, strict=False) if path}
        self._outputs: dict[Any, Path] = {}
        for atom, path in zip(program.outputs, outputs, strict=False):
            if isinstance(atom, Var) and path:
                self._outputs.setdefault(atom, path)
        self._readers: dict[Var, list[JaxprEqn]] = {}
        for eqn in program.equations:
            for atom in eqn.invars:
                if isinstance(atom, Var):
                    self._readers.setdefault(atom, []).append(eqn)

    def __call__(self, var: Var) -> str:
        """The name of a value; empty if it has none."""
        if not self._inputs and not self._outputs:
            return ""
        inputs: list[Path] = []
        outputs: list[Path] = []
        seen, queue = {var}, [var]
        while queue and len(seen) < LIMIT:
            here = queue.pop(0)
            if here in self._outputs:
                outputs.append(self._outputs[here])
            for eqn in self._readers.get(here, ()):
                if element_count(here) > 1 and self._elementwise(eqn, var):
                    inputs += [path for atom in eqn.invars if (path := self.origin(atom, var)) and atom is not here]
                    new = [out for out in eqn.outvars if out not in seen and element_count(out) == element_count(var)]
                elif self._scales(eqn):
                    new = [out for out in eqn.outvars if out not in seen]
                else:
                    continue
                seen.update(new)
                queue += new
        return shared_ending(inputs, outputs)

    def origin(self, atom: Atom, like: Any = None) -> Path:
        """The path of the input that a value is computed from elementwise; empty if there is none."""
        like = atom if like is None else like
        for _ in range(LIMIT):
            if not isinstance(atom, Var) or element_count(atom) != element_count(like) or element_count(atom) < 2:
                break
            if atom in self._inputs:
                return self._inputs[atom]
            eqn = self._program.definitions.get(atom)
            if eqn is None or not self._elementwise(eqn, like):
                break
            same = [a for a in eqn.invars if isinstance(a, Var) and element_count(a) == element_count(like)]
            if len(same) != 1:
                break
            atom = same[0]
        return ()

    def for_body(self, eqn: JaxprEqn, inner: Program) -> Names:
        """Names of the values in a loop's or branch's body."""
        paths = [self.origin(atom) for atom in eqn.invars]
        paths = paths[max(0, len(paths) - len(inner.inputs)) :]  # what only a condition reads comes first
        return Names(inner, paths)

    def _elementwise(self, eqn: JaxprEqn, like: Any) -> bool:
        """Whether an equation is elementwise, and a result has as many elements as `like`."""
        description = self._program.describe(eqn)
        if description is None or any(description.sizes[f] > 1 for f in (*description.reduced, *description.whole)):
            return False
        return any(element_count(out) == element_count(like) for out in eqn.outvars)

    def _scales(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is linear from scalar to scalar: a sum becomes a mean."""
        description = self._program.describe(eqn)
        scalars = all(element_count(atom) == 1 for atom in (*eqn.invars, *eqn.outvars))
        return description is not None and scalars and bool(description.linear)


def paths_of(tree: Any) -> list[Path]:
    """The path of every leaf of a pytree, key by key.

    >>> paths_of(({"w": 1.0, "b": [2.0]},))
    [('0', 'b', '0'), ('0', 'w')]
    """
    return [
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for path, _ in jax.tree.leaves_with_path(tree, is_leaf=is_sharded_batch)
    ]


def argument_paths(args: Sequence[Any], kwargs: Any) -> list[Path]:
    """The path of every leaf within its argument; of an argument that is a leaf itself, its number.

    >>> argument_paths((1.0, {"w": 2.0}), {"rate": 3.0})
    [('argument 0',), ('w',), ('rate',)]
    """
    inside = [path[1:] or (f"argument {path[0]}",) for path in paths_of(tuple(args))]
    return inside + paths_of(dict(kwargs))


def element_count(atom: Any) -> int:
    """The number of elements of an array; 0 for anything else."""
    return getattr(atom.aval, "size", 0)


def shared_ending(inputs: Sequence[Path], outputs: Sequence[Path]) -> str:
    """The shared end of paths. For results alone, leading positions are dropped.

    >>> shared_ending([("opt_state", "0", "mu", "Dense_0", "kernel"), ("params", "Dense_0", "kernel")], [])
    'Dense_0/kernel'

    """
    paths = [*inputs, *outputs]
    if not paths:
        return ""
    shared: list[str] = []
    for keys in zip(*(reversed(path) for path in paths), strict=False):
        if len(set(keys)) > 1:
            break
        shared.insert(0, keys[0])
    if inputs:
        return "/".join(shared or inputs[0])
    shared = shared or list(paths[0])
    named = shared[next((i for i, key in enumerate(shared) if not key.isdigit()), len(shared)) :]
    return "/".join(named) if named else f"result {'/'.join(shared)}"


def summary(names: Sequence[str], most: int = 3) -> str:
    """Many names in a few words: those that differ by numbers become one, and those that differ by one key.

    >>> summary(["h_0/w", "h_1/w", "h_2/w", "h_0/b", "h_1/b", "h_2/b"])
    'h_0..2/w,b'
    >>> summary(["a", "a", "b"]), summary([]), summary(["h_1/w", "h_3/w"])
    ('a, b', '', 'h_1,3/w')
    """
    alike: dict[str, list[list[str]]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(re.sub(r"\d+", "\0", name), []).append(re.findall(r"\d+", name))
    found = []
    for pattern, numbers in alike.items():
        text = pattern
        for values in zip(*numbers, strict=True):
            text = text.replace("\0", several_numbers(sorted(set(map(int, values)))), 1)
        found.append(text)
    found = merge_by_key(found)
    return ", ".join(found[:most]) + (f", and {len(found) - most} more" if len(found) > most else "")


def merge_by_key(names: Sequence[str]) -> list[str]:
    """Merges paths that differ by one key only, the last key first.

    >>> merge_by_key(["a/query/w", "a/key/w", "a/b", "c/b", "c/d"])
    ['a/query,key/w', 'a/b', 'c/b,d']
    """
    paths: list[Any] = [tuple(name.split("/")) for name in names]
    for back in range(1, max(map(len, paths), default=0) + 1):
        alike: dict[Any, list[str]] = {}
        for path in paths:
            at = len(path) - back
            if at < 0 or len(path) == 1:
                alike[path] = []
            else:
                alike.setdefault((path[:at], path[at + 1 :]), []).append(path[at])
        paths = [(*around[0], ",".join(keys), *around[1]) if keys else around for around, keys in alike.items()]
    return ["/".join(path) for path in paths]


def several_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers: the first and the last if none is missing."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}..{numbers[-1]}"
    if len(numbers) > 4:
        return f"{numbers[0]},..,{numbers[-1]}"
    return ",".join(map(str, numbers))
