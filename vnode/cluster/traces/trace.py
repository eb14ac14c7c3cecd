"""Jobs of a file, with the devices and costs that belong to them.

Knows jobs and costs. Must not know formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vnode.cluster.costs import FREE, Costs
from vnode.cluster.jobs import Job
from vnode.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Trace:
    """Jobs of a file.

    Attributes:
      jobs: of the trace.
      devices: how many the file speaks of, by kind if of several; None if of none.
      costs: what it says of starts and resizes.
      logged: what was measured when the jobs really ran, by policy, for comparisons.
      starts: by policy, the seconds that each job's start took in the log of that policy.
    """

    jobs: Sequence[Job]
    devices: int | Mapping[str, int] | None = None
    costs: Costs = FREE
    logged: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    starts: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    def jobs_for(self, policy: str) -> list[Job]:
        """The jobs, with starts as long as they were logged for a policy; as they are if there is no such log."""
        if policy not in self.starts:
            return list(self.jobs)
        pairs = zip(self.jobs, self.starts[policy], strict=True)
        return [dataclasses.replace(job, start=start) for job, start in pairs]


@contextmanager
def at(place: str) -> Iterator[None]:
    """Has errors of a record name the place where it stands.

    Raises:
      ClusterError: a field is missing, or is not what it must be.
    """
    try:
        yield
    except KeyError as error:
        raise ClusterError(f"{place}: the field {error.args[0]!r} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ClusterError(f"{place}: {error}") from error


def number(record: Mapping[str, Any], field: str, kind: Callable[[Any], Any] = float) -> Any:
    """A number of a record.

    Raises:
      KeyError: it is not there.
      ValueError: it is none.
    """
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} is {value!r}, not a number")
    made = kind(value)
    if made != value:
        raise ValueError(f"{field} is {value!r}, not a whole number")
    return made
