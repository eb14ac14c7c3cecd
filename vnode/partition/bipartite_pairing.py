"""Pairs of what was expected and what was found, as many as can be.

Knows how many there are of each, which may be one another, and how readily. Must not know what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.optimize


def maximum_pairing(
    left: Mapping[Any, int], right: Mapping[Any, int], ranks: Mapping[tuple[Any, Any], int]
) -> dict[tuple[Any, Any], int]:
    """Pairs as many as can be, and of such pairings takes the one with the least sum of ranks.

    A transportation problem, which linear programming solves in whole numbers.

    Args:
      left: how many there are of each.
      right: the same, of those to pair them with.
      ranks: of pairs that may be.

    Returns:
      How often each pair is made, for those that are.

    Example:
      >>> maximum_pairing({"a": 1, "b": 1}, {1: 1, 2: 1}, {("a", 1): 0, ("a", 2): 5, ("b", 1): 5})
      {('a', 2): 1, ('b', 1): 1}
    """
    if not ranks:
        return {}
    ones, others = (sorted(set(side)) for side in zip(*ranks, strict=True))
    held = np.array([[*(one == a for a in ones), *(other == b for b in others)] for one, other in ranks], float).T
    one_more = max(ranks.values()) * len(ones) + 1  # more than another pair can add to the ranks of the rest
    cost = np.array(list(ranks.values())) - one_more
    amounts = [*(left[a] for a in ones), *(right[b] for b in others)]
    found = scipy.optimize.linprog(cost, A_ub=held, b_ub=amounts, integrality=np.ones(len(ranks)), method="highs")
    return {pair: round(runs) for pair, runs in zip(ranks, found.x, strict=True) if round(runs)}
