"""Records of what happened in a cluster: all that a scheduler must know after it was killed.

Knows plain data. Must not know where they are kept, nor what follows from them.

| kind | facts |
|---|---|
| `began` | a scheduler: its `devices`, `policy`, `options` |
| `submitted` | a job: the fields of `Submission` |
| `priority` | the `priority` that a job has from now on |
| `cancel` | someone wants a job to end |
| `measured` | `step`, and `seconds` a step by number of workers |
| `learned` | `nodes` of its step and `steps` of its run, which its workers have told |
| `limited` | the most `workers` that it may have, and `why` |
| `decided` | `shares` by job, `again`: when to decide next, `why` of each change |
| `granted` | `devices` that a job has besides |
| `starting` | number of the `attempt`: its supervisor is about to be started, in a `folder` |
| `begun` | its supervisor is there: `pid`, and when it was `started` |
| `stopping` | its devices are for others: it saves, and waits |
| `holds` | the `devices` that it still has |
| `trains` | on so many `workers`, at which `step` |
| `pending` | it has no devices any more, `why`, and whether that `counts` as a failure |
| `ended` | its `state`, `code`, `why` |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """Something that happened.

    Attributes:
      time: in seconds since 1970.
      kind: one of those above.
      job: its id; None if it is about no single one.
      facts: plain data.
    """

    time: float
    kind: str
    job: str | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
