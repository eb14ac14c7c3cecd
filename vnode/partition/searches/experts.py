"""What experts do: data parallel, fully sharded, Megatron's splits, one weird trick; found by pattern in any program.

Knows programs as problems, and named dimensions. Must not know how a search goes about it.

Sources: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014): examples divide the
convolutions, units the dense layers; Shoeybi et al., "Megatron-LM" (2019), section 3: of two products in a row the
first is cut along its columns, the second along its rows, so that one sum is exchanged; Rajbhandari et al., "ZeRO"
(SC 2020), and Zhao et al., "PyTorch FSDP" (VLDB 2023): examples divide the work, and everything that is kept from step
to step is divided over the same devices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np

from vnode.operators import Algebra, Windowed
from vnode.partition.searches.elimination import Elimination
from vnode.partition.searches.problem import Array
from vnode.partition.searches.steps import Search
from vnode.partition.searches.strategies import PIECES
from vnode.spmd.layout import Layout

Wishes = Sequence[Sequence[Hashable]]
"""For each axis the named dimensions that it shall divide, the most wanted first."""


def experts(search: Search, batch: Sequence[int], examples: Collection[Hashable] = ()) -> dict[str, Array]:
    """What experts would choose.

    Args:
      search: a program as a problem.
      batch: numbers of the inputs whose first dimension counts examples.
      examples: named dimensions that do so as well, of parts of the batch.

    Returns:
      By name, assignments of `search.problem`. Where a program has nothing to divide so, they may be the same.
    """
    return _Experts(search, batch, examples).all()


class _Experts:
    def __init__(self, search: Search, batch: Sequence[int], examples: Collection[Hashable]) -> None:
        self.search, self.flat = search, search.flat
        inputs = search.program.inputs
        several = [*(self.flat.named(inputs[i], 0) for i in batch if inputs[i].aval.shape), *examples]
        self.examples = dict.fromkeys(several)  # the order of a set would be another in each process
        self.given = set(inputs)
        self.devices = math.prod(search.axes.values())
        self.first: dict[int, int] = {}  # of each operator, a cluster or value that it stands for
        for place, operator in enumerate(search.groups):
            self.first.setdefault(operator, place)

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
            found[f"Megatron over {', '.join(model)}"] = self.assigned(wishes, kept="open")
        found["one weird trick"] = self.assigned([examples] * len(axes), kept="open", dense=self.units(dense=True))
        return found

    def units(self, dense: bool = False) -> list[Hashable]:
        """The named dimensions that are columns of one product of weights and rows of the next, in the program's order.

        Args:
          dense: only those of matrix products, no convolutions.
        """
        cut: dict[Hashable, None] = {}
        passing: set[Hashable] = set(self.examples)
        for number, node in enumerate(self.flat.nodes):
            d = node.description
            if d is None or not d.has(Algebra.CONTRACTS) or len(d.operands) != 2 or len(d.results) != 1:
                continue
            if dense and self.slides(number):
                continue
            name = lambda f, number=number: self.flat.factor(number, f)  # noqa: E731
            several = [{f for dim in dims for f in dim} for dims in (*d.operands, d.results[0])]
            named = [{name(f) for f in each} for each in several]
            counts = [bool(each & self.examples.keys()) for each in named]
            weights = [k for k in range(2) if not counts[k] and counts[1 - k]]
            if len(weights) != 1 or not counts[2]:
                continue
            own, other = several[weights[0]], several[1 - weights[0]]
            rows = {name(f) for f in own & other}
            columns = [f for dim in d.operands[weights[0]] for f in dim if f in own - other]
            columns.sort(
                key=lambda f, sizes=d.sizes: sizes[f] % self.devices != 0
            )  # the major one that all devices divide
            passing |= rows - cut.keys()
            free = [name(f) for f in columns if name(f) not in passing and d.sizes[f] > 1]
            if not rows & cut.keys() and free and not cut.keys() & free:
                cut[free[0]] = None
        return [*cut]

    def slides(self, number: int) -> bool:
        d = self.flat.nodes[number].description
        return d is not None and any(isinstance(x.split, Windowed) for x in d.factors)

    def assigned(self, wishes: Wishes, *, kept: str, dense: Sequence[Hashable] = ()) -> Array:
        """An assignment in which clusters divide what is wished, and all else is what goes best with it.

        Args:
          wishes: for each axis.
          kept: what is kept from step to step is ``"whole"``, ``"cut"`` over all axes, or ``"open"``.
          dense: dimensions that are wished first by clusters in which no window slides.
        """
        search, problem = self.search, self.search.problem
        chosen = np.array([int(np.argmin(s)) for s in problem.seconds], np.int64)
        open_: list[int] = []
        for operator in range(problem.operators):
            place = self.first[operator]
            if place >= len(search.clusters):
                k = self.layout(place - len(search.clusters), kept, wishes)
                if k is None:
                    open_.append(operator)
                chosen[operator] = k or 0
                continue
            cluster = search.clusters[place]
            slides = any(self.slides(n) for n in cluster.nodes)
            own = wishes if slides or not dense else [[*dense, *each] for each in wishes]
            has = {name for each in cluster.dimensions for name in each}
            if PIECES in has or (kept == "cut" and not has & self.examples.keys()):
                open_.append(operator)
            chosen[operator] = self.closest(operator, cluster.dimensions, own)
        kept_ = [np.arange(n) if i in set(open_) else chosen[i : i + 1] for i, n in enumerate(problem.sizes)]
        rest = problem.restricted(kept_)
        _, best = Elimination(rest.sizes, rest.edges).least(rest.seconds)
        return np.array([own[k] for own, k in zip(kept_, best, strict=True)], np.int64)

    def closest(self, operator: int, dimensions: Sequence[Sequence[Hashable]], wishes: Wishes) -> int:
        """The possible strategy that does most of what is wished, and nothing else."""
        seconds = self.search.problem.seconds[operator]

        def distance(s: int) -> tuple[bool, int, float]:
            missed = 0
            for name, wish in zip(dimensions[s], wishes, strict=True):
                ranks: Mapping[Hashable, int] = {each: k for k, each in enumerate(wish)}
                missed += len(wish) if name is None else ranks.get(name, 10 * len(wish) + 10)
            return not np.isfinite(seconds[s]), missed, float(seconds[s])

        return min(range(len(seconds)), key=distance)

    def layout(self, value: int, kept: str, wishes: Wishes) -> int | None:
        """The layout of a value that an expert insists on."""
        of = self.search.values[value]
        shape = of.var.aval.shape
        if of.var not in self.given:
            return None
        counted = [d for d in range(len(shape)) if self.flat.named(of.var, d) in self.examples]
        if counted:
            over = {axis for axis, wish in zip(self.search.axes, wishes, strict=True) if self.examples.keys() & wish}

            def wished(k: int) -> tuple[bool, int]:
                cut = of.layouts[k].cut_axes
                return cut.keys() <= over and set(cut.values()) <= {counted[0]}, len(cut)

            return max(range(len(of.layouts)), key=wished)
        if kept == "open":
            return None
        if kept == "whole":
            return next(k for k, layout in enumerate(of.layouts) if layout.whole)

        def most(k: int) -> tuple[int, int]:
            layout: Layout = of.layouts[k]
            cut = [d for d, each in enumerate(layout.dims) if each is not None]
            return len(layout.cut_axes), -len(cut)

        return max(range(len(of.layouts)), key=most)
