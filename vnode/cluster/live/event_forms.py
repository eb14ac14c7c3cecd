"""Refuses records that do not have the form of their kind, as a damaged file holds them.

Knows the facts of each kind that a book reads. Must not know where records are kept.

    Record(2.0, "granted", "1", {"devices": 3})   ->   ValueError: granted: devices is 3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vnode.cluster.live.event_log import Record
from vnode.cluster.live.submission import Submission, is_count, is_number, is_string
from vnode.errors import ClusterError

Form = Callable[[Any], bool]


def is_list_of_texts(value: Any) -> bool:
    """Whether it is a list of texts."""
    return isinstance(value, list) and all(map(is_string, value))


def maybe(form: Form) -> Form:
    """Whether it is None, or has a form."""
    return lambda value: value is None or form(value)


def table_of(form: Form) -> Form:
    """Whether it is a dict from texts to values of a form."""
    return lambda value: isinstance(value, dict) and all(is_string(key) and form(each) for key, each in value.items())


def is_seconds(value: Any) -> bool:
    """Whether it is a dict from numbers of workers to seconds."""
    return table_of(is_number)(value) and all(key.isdecimal() for key in value)


def is_options(value: Any) -> bool:
    """Whether it has the options of a policy."""
    counts = value.get("counts", []) if isinstance(value, dict) else None
    return isinstance(counts, list) and all(map(is_count, counts))


OPTIONAL = ("folder",)
"""Facts that records of earlier versions lack."""

FORMS: Mapping[str, Mapping[str, Form]] = {
    "began": {"devices": is_list_of_texts, "policy": is_string, "options": is_options},
    "submitted": {},
    "priority": {"priority": is_number},
    "cancel": {},
    "measured": {"step": is_count, "seconds": is_seconds},
    "learned": {"nodes": maybe(is_count), "steps": maybe(is_count)},
    "limited": {"workers": is_count, "why": is_string},
    "decided": {"shares": table_of(is_count), "why": table_of(is_string), "again": maybe(is_number)},
    "granted": {"devices": is_list_of_texts},
    "starting": {"attempt": is_count, "folder": is_string},
    "begun": {"pid": is_count, "started": maybe(is_string)},
    "stopping": {"why": is_string},
    "holds": {"devices": is_list_of_texts},
    "trains": {"workers": is_count},
    "pending": {"counts": lambda value: isinstance(value, bool), "step": is_count, "why": is_string},
    "ended": {
        "state": lambda value: value in ("succeeded", "failed", "cancelled"),
        "code": maybe(is_count),
        "step": is_count,
        "why": is_string,
    },
}
"""The facts of each kind that a book reads."""

LATEST = 1e11
"""The end of times that can be shown, in seconds since 1970."""

OF_ALL = ("began", "decided")
"""Kinds that are about no single job."""


def check_form(record: Record) -> None:
    """Refuses a record that no scheduler has written.

    Raises:
      ValueError: the record does not have the form of its kind.
    """
    kind, facts = record.kind, record.facts
    if kind not in FORMS:
        raise ValueError(f"its kind is {kind!r}")
    if not is_number(record.time) or not 0 <= record.time < LATEST:
        raise ValueError(f"{kind}: its time is {record.time!r}")
    if not isinstance(facts, dict):
        raise ValueError(f"{kind}: its facts are {shown(facts)}")
    if (record.job is None) != (kind in OF_ALL) or not isinstance(record.job, str | None):
        raise ValueError(f"{kind}: its job is {record.job!r}")
    if kind == "submitted":
        try:
            Submission.from_facts(facts)
        except ClusterError as error:
            raise ValueError(str(error)) from error
    for name, form in FORMS[kind].items():
        if name not in facts and name not in OPTIONAL:
            raise ValueError(f"{kind}: {name} is missing")
        if name in facts and not form(facts[name]):
            raise ValueError(f"{kind}: {name} is {shown(facts[name])}")


class Forms:
    """Checks the records of a file one after the other: their forms, and that they name jobs that were submitted."""

    def __init__(self) -> None:
        self.jobs: set[str | None] = set()

    def check(self, record: Record) -> None:
        """Refuses a record that cannot follow those before it.

        Raises:
          ValueError: the record does not have the form of its kind, or names another job.
        """
        check_form(record)
        if record.kind == "submitted":
            if record.job != str(len(self.jobs) + 1):
                raise ValueError(f"submitted: its job is {record.job!r}, not the next one")
            self.jobs.add(record.job)
        named = record.facts["shares"] if record.kind == "decided" else () if record.job is None else (record.job,)
        if unknown := [name for name in named if name not in self.jobs]:
            raise ValueError(f"{record.kind}: no job {unknown[0][:20]!r} was submitted")


def shown(value: Any) -> str:
    """A value, without the rest of a long one."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
