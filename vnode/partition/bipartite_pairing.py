"""Counts of two kinds of things, and ranks of allowed pairs -> the largest pairing of least rank.

Knows counts and ranks. Must not know what is paired.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.optimize


def maximum_pairing(
    left: Mapping[Any, int], right: Mapping[Any, int], ranks: Mapping[tuple[Any, Any], int]
) -> dict[tuple[Any, Any], int]:
    """The largest pairing; of equal ones, the one with the least sum of ranks.

    A transportation problem, whose linear program has an integer solution.

    Args:
      left: count of each thing to pair.
      right: count of each of its possible partners.
      ranks: rank of each allowed pair.

    Returns:
      The number of times that each pair is made, without zeros.

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
