"""A program as a problem -> the splits that experts write today, found by pattern: data parallel, FSDP, Megatron (with
sequence parallelism), context parallelism, expert parallelism, one weird trick.

Knows programs as problems, and named dimensions. Must not know how a search works.

Sources:

- data parallel convolutions, dense layers cut by units: Krizhevsky, "One weird trick for parallelizing convolutional
  neural networks" (2014);
- Megatron: Shoeybi et al., "Megatron-LM" (2019), section 3. The first of two products is cut along its columns, the
  second along its rows, so that one sum is exchanged;
- sequence parallelism: Korthikanti et al., "Reducing activation recomputation in large transformer models" (MLSys
  2023), section 4.2. The equations between these products are cut along the sequence;
- context parallelism: Llama 3 (2024), section 3.3.2. Everything is cut along the sequence; attention gathers keys and
  values;
- expert parallelism: Lepikhin et al., "GShard" (ICLR 2021). The experts' weights are cut by experts, everything else
  by examples, with an all-to-all in between;
- FSDP: Rajbhandari et al., "ZeRO" (SC 2020), and Zhao et al., "PyTorch FSDP" (VLDB 2023). Examples divide the work, and
  the state is divided over the same devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from vnode.operators import Algebra, Windowed
from vnode.partition.searches.elimination import Elimination
from vnode.partition.searches.ilp_formulation import Search
from vnode.partition.searches.problem import Array
from vnode.partition.searches.strategies import PIECES, Cluster
from vnode.spmd.layout import Layout

SEQUENCE, CONTEXT, EXPERT = "Megatron with sequence parallelism", "context parallel", "expert parallel"
"""The names of splits that only some programs have."""

Wishes = Sequence[Sequence[Hashable]]
"""For each axis the named dimensions that it should divide, the most wanted first."""


def experts(search: Search, batch: Sequence[int], examples: Collection[Hashable] = ()) -> dict[str, Array]:
    """The splits that experts would choose.

    Args:
      search: a program as a problem.
      batch: numbers of the inputs whose first dimension counts examples.
      examples: named dimensions that also count examples, of parts of the batch.

    Returns:
      Assignments of `search.problem` by name. Two of them are the same where a program has nothing for them to divide.
    """
    return _Experts(search, batch, examples).all()


class _Experts:
    def __init__(self, search: Search, batch: Sequence[int], examples: Collection[Hashable]) -> None:
        self.search, self.flat = search, search.flat
        inputs, self.batch = search.program.inputs, batch
        several = [*(self.flat.named(inputs[i], 0) for i in batch if inputs[i].aval.shape), *examples]
        self.examples = dict.fromkeys(several)  # a set's order would differ from process to process
        self.given = set(inputs)
        self.devices = math.prod(search.axes.values())
        self.counts_experts = self.experts()

    def all(self) -> dict[str, Array]:
        axes = list(self.search.axes)
        examples = list(self.examples)
        found = {
            "data parallel": self.assigned([examples] * len(axes), kept="whole"),
            "FSDP": self.assigned([examples] * len(axes), kept="cut"),
        }
        for model in [[axis] for axis in axes] + ([axes] if len(axes) > 1 else []):
            units = self.units()
            wishes = [units if axis in model else examples for axis in axes]
            over = ", ".join(model)
            found[f"Megatron over {over}"] = self.assigned(wishes, kept="open")
            if sequence := self.sequence():
                wishes = [[*units, *sequence] if axis in model else examples for axis in axes]
                found[f"{SEQUENCE} over {over}"] = self.assigned(wishes, kept="open")
                wishes = [sequence if axis in model else examples for axis in axes]
                found[f"{CONTEXT} over {over}"] = self.assigned(wishes, kept="open")
            if several := self.counts_experts:
                by_experts = [[*several, *examples] if axis in model else examples for axis in axes]

                def of_experts(cluster: Cluster, wishes: Wishes = by_experts) -> Wishes | None:
                    return wishes if self.computed_by_experts(cluster) else None

                wishes = [examples] * len(axes)
                found[f"{EXPERT} over {over}"] = self.assigned(wishes, kept="open", other=of_experts)
        dense = [[*self.units(dense=True), *examples]] * len(axes)

        def of_dense(cluster: Cluster) -> Wishes | None:
            return None if any(map(self.slides, cluster.nodes)) else dense

        found["one weird trick"] = self.assigned([examples] * len(axes), kept="open", other=of_dense)
        return found

    def units(self, dense: bool = False) -> list[Hashable]:
        """The named dimensions that are columns of one product with weights and rows of the next, in program order.

        Args:
          dense: only dimensions of matrix products, none of convolutions.
        """
        cut: dict[Hashable, None] = {}
        passing: set[Hashable] = set(self.examples)
        for number, node in enumerate(self.flat.nodes):
            d, several = node.description, self.sides(number)
            if d is None or not several or (dense and self.slides(number)):
                continue
            counts = [not self.examples.keys().isdisjoint(each.values()) for each in several]
            if counts[0] == counts[1] or not counts[2]:
                continue
            own, other = several[counts.index(False)], several[counts.index(True)]
            rows = {own[f] for f in own.keys() & other.keys()}
            columns = [f for f in own if f not in other and d.sizes[f] > 1]
            columns.sort(key=lambda f, of=d.sizes: of[f] % self.devices != 0)  # the major one that all devices divide
            passing |= rows - cut.keys()
            free = [own[f] for f in columns if own[f] not in passing]
            if not rows & cut.keys() and free and not cut.keys() & free:
                cut[free[0]] = None
        return [*cut]

    def sides(self, number: int) -> list[dict[int, Hashable]]:
        """The named dimension of each factor of a product's operands, and of its result; empty for other equations."""
        d = self.flat.nodes[number].description
        if d is None or not d.has(Algebra.CONTRACTS) or len(d.operands) != 2 or len(d.results) != 1:
            return []
        return [{f: self.flat.factor(number, f) for dim in dims for f in dim} for dims in (*d.operands, d.results[0])]

    def sequence(self) -> list[Hashable]:
        """The named dimensions that count positions of a sequence.

        Each is the second dimension of an input that has words, or vectors, for each example. A dimension along which
        windows slide is not one.
        """
        inputs = [self.search.program.inputs[i] for i in self.batch]
        words = [var for var in inputs if len(var.aval.shape) > 1 + (not jnp.issubdtype(var.aval.dtype, jnp.integer))]
        found = {self.flat.named(var, 1): None for var in words if var.aval.shape[1] > 1}
        for number, node in enumerate(self.flat.nodes):
            d = node.description
            for f, factor in enumerate(d.factors) if d is not None else ():
                if isinstance(factor.split, Windowed):
                    found.pop(self.flat.factor(number, f), None)
        return [name for name in found if name not in self.examples]

    def experts(self) -> list[Hashable]:
        """The named dimensions that count experts: a product has a weight matrix for each, and so has its result."""
        found: dict[Hashable, None] = {}
        for number, node in enumerate(self.flat.nodes):
            if node.description is not None and self.multiplies_matrices(number):
                first, second, result = self.sides(number)
                for f in sorted(first.keys() & second.keys() & result.keys()):
                    if node.description.sizes[f] > 1 and first[f] not in self.examples:
                        found[first[f]] = None
        return [*found]

    def multiplies_matrices(self, number: int) -> bool:
        """Whether a product reads one of several weight matrices, or computes their gradient."""
        sides = [{*each.values()} for each in self.sides(number)]
        return any(len(side) > 2 and any(side <= weight for weight in self.weights) for side in sides)

    @functools.cached_property
    def weights(self) -> list[set[Hashable]]:
        """The named dimensions of each leaf that is not part of the batch."""
        leaves = [var for i, var in enumerate(self.search.program.inputs) if i not in self.batch]
        return [{self.flat.named(var, d) for d in range(len(var.aval.shape))} for var in leaves]

    def computed_by_experts(self, cluster: Cluster) -> bool:
        """Whether experts compute a cluster; sending tokens to experts and back does not count."""
        has = {name for each in cluster.dimensions for name in each}
        experts = has & {*self.counts_experts}
        products = [n for n in cluster.nodes if self.contracts(n)]
        if products or not experts:
            return bool(experts) and any(map(self.multiplies_matrices, products))
        return any(has & (weight - experts) for weight in self.weights if experts <= weight)

    def contracts(self, number: int) -> bool:
        d = self.flat.nodes[number].description
        return d is not None and d.has(Algebra.CONTRACTS)

    def slides(self, number: int) -> bool:
        d = self.flat.nodes[number].description
        return d is not None and any(isinstance(x.split, Windowed) for x in d.factors)

    def assigned(
        self, wishes: Wishes, *, kept: str, other: Callable[[Cluster], Wishes | None] = lambda _: None
    ) -> Array:
        """An assignment in which clusters divide the wished dimensions; everything else follows at least cost.

        Args:
          wishes: the wishes for each axis.
          kept: the layout of the state: ``"whole"``, ``"cut"`` over all axes, or ``"open"``.
          other: the wishes of a cluster that has its own; None if `wishes` apply to it.
        """
        search, problem = self.search, self.search.problem
        chosen = np.array([int(np.argmin(s)) for s in problem.seconds], np.int64)
        open_ = set[int]()
        for operator, place in enumerate(search.first):
            if place >= len(search.clusters):
                k = self.layout(place - len(search.clusters), kept, wishes)
                if k is None:
                    open_.add(operator)
                chosen[operator] = k or 0
                continue
            cluster = search.clusters[place]
            own = other(cluster) or wishes
            has = {name for each in cluster.dimensions for name in each}
            if PIECES in has or (kept == "cut" and not has & self.examples.keys()):
                open_.add(operator)
            chosen[operator] = self.closest(operator, cluster.dimensions, own)
        kept_ = [np.arange(n) if i in open_ else chosen[i : i + 1] for i, n in enumerate(problem.sizes)]
        rest = problem.restricted(kept_)
        _, best = Elimination(rest.sizes, rest.edges).least(rest.seconds)
        return np.array([own[k] for own, k in zip(kept_, best, strict=True)], np.int64)

    def closest(self, operator: int, dimensions: Sequence[Sequence[Hashable]], wishes: Wishes) -> int:
        """The possible strategy that divides as many wished dimensions, and as few others, as possible."""
        seconds = self.search.problem.seconds[operator]

        def distance(s: int) -> tuple[bool, int, float]:
            missed = 0
            for name, wish in zip(dimensions[s], wishes, strict=True):
                ranks: Mapping[Hashable, int] = {each: k for k, each in enumerate(wish)}
                missed += len(wish) if name is None else ranks.get(name, 10 * len(wish) + 10)
            return not np.isfinite(seconds[s]), missed, float(seconds[s])

        return min(range(len(seconds)), key=distance)

    def layout(self, value: int, kept: str, wishes: Wishes) -> int | None:
        """The layout of a value where the expert's split fixes it; None where it does not."""
        of = self.search.values[value]
        shape = of.var.aval.shape
        if of.var not in self.given:
            return None
        counted = [d for d in range(len(shape)) if self.flat.named(of.var, d) in self.examples]
        if counted:
            over = {axis for axis, wish in zip(self.search.axes, wishes, strict=True) if self.examples.keys() & wish}

            def wished_dims(k: int) -> tuple[bool, int]:
                cut = of.layouts[k].cut_axes
                return cut.keys() <= over and set(cut.values()) <= {counted[0]}, len(cut)

            return max(range(len(of.layouts)), key=wished_dims)
        if kept == "open":
            return None
        if kept == "whole":
            return next(k for k, layout in enumerate(of.layouts) if layout.is_whole)

        def most_divided(k: int) -> tuple[int, int]:
            layout: Layout = of.layouts[k]
            cut = [d for d, each in enumerate(layout.dims) if each is not None]
            return len(layout.cut_axes), -len(cut)

        return max(range(len(of.layouts)), key=most_divided)
