"""Linear programmes over time shares: which part of the time each job has on each kind of device.

Knows levels that are linear in time shares, scales and devices. Must not know what a level means.

The least of all levels is made as large as it can be. Many time shares do that. An interior point method without
crossover ends in the middle of them, where equal jobs have equal shares: a vertex would give one of them all. Equal
jobs have one row together.

    largest_least_level(a, scale, devices)   ->   x, t:  sum_k a[j, k] x[j, k] >= t,  sum_k x[j, k] <= 1,
                                                         sum_j scale[j] x[j, k] <= devices[k]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vnode.errors import ClusterError


def largest_least_level(a: np.ndarray, scale: np.ndarray, devices: np.ndarray) -> tuple[np.ndarray, float]:
    """Time shares of which the least level is the largest.

    Args:
      a: ``[jobs, kinds]`` by how much a job's level rises with its time on a kind; at least 0, not all 0 for a job.
      scale: ``[jobs]`` devices that each takes.
      devices: ``[kinds]`` how many there are.

    Returns:
      The time shares ``[jobs, kinds]``, and the least level.

    Raises:
      ClusterError: highspy is not installed, or finds no solution.

    Example:
      >>> x, level = largest_least_level(np.array([[1.0, 2.0], [1.0, 1.0]]), np.array([1, 1]), np.array([1.0, 1.0]))
      >>> round(level, 6)
      1.0
    """
    rows, classes, sizes = np.unique(np.column_stack([a, scale]), axis=0, return_inverse=True, return_counts=True)
    gains, scales = rows[:, :-1], rows[:, -1]
    count, kinds = gains.shape
    each = np.repeat(np.arange(count), kinds)
    columns = np.arange(count * kinds)
    last = count * kinds  # the level
    # Levels, times of jobs, devices: a row each.
    index = np.concatenate([each, np.arange(count), count + each, 2 * count + np.tile(np.arange(kinds), count)])
    where = np.concatenate([columns, np.full(count, last), columns, columns])
    values = np.concatenate([-gains.ravel(), np.ones(count), np.ones(last), np.repeat(sizes * scales, kinds)])
    bounds = np.concatenate([np.zeros(count), np.ones(count), devices])
    found = solved(index, where, values, bounds, last + 1)
    x = found[:-1].reshape(count, kinds).clip(0, 1)
    return x[classes.ravel()], float(found[-1])


def solved(index: np.ndarray, where: np.ndarray, values: np.ndarray, bounds: np.ndarray, count: int) -> np.ndarray:
    """The variables, at least 0, of which the last is the largest: rows are at most their bounds.

    Raises:
      ClusterError: highspy is not installed, or finds no solution.
    """
    try:
        import highspy
    except ImportError as error:
        text = "this policy solves linear programmes, and needs highspy."
        raise ClusterError(text, remedies=["pip install 'vnode[cluster]'"]) from error
    from scipy.sparse import csc_matrix

    matrix = csc_matrix((values, (index, where)), shape=(len(bounds), count))
    programme: Any = highspy.HighsLp()
    programme.num_col_, programme.num_row_ = count, len(bounds)
    programme.col_cost_ = np.append(np.zeros(count - 1), -1.0)
    programme.col_lower_, programme.col_upper_ = np.zeros(count), np.full(count, highspy.kHighsInf)
    programme.row_lower_, programme.row_upper_ = np.full(len(bounds), -highspy.kHighsInf), bounds
    programme.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    programme.a_matrix_.start_, programme.a_matrix_.index_ = matrix.indptr, matrix.indices
    programme.a_matrix_.value_ = matrix.data
    solver = highspy.Highs()
    options = {"output_flag": False, "solver": "ipm", "run_crossover": "off", "presolve": "off", "threads": 1}
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.setOptionValue("ipm_optimality_tolerance", 1e-9)
    solver.passModel(programme)
    solver.run()
    status = solver.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise ClusterError(
            f"the linear programme of {count} variables has no solution: {solver.modelStatusToString(status)}"
        )
    return np.array(solver.getSolution().col_value)
