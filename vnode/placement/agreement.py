"""Facts of each process -> agreement, or the same error in every process.

Knows processes, and facts as JSON. Must not know what the facts describe.

Each process leaves its facts at a meeting, long ones as checksums, and reads those of all. So all reach the same
conclusion: they go on, or every process raises the same error, which names the processes that differ from the majority.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from vnode.errors import ProcessError, layout_message
from vnode.placement.process_barrier import exchange_words, process_names
from vnode.placement.world import world

LONGEST = 120
"""Characters up to which a fact is exchanged in full; longer ones are exchanged as checksums."""

SHOWN = 8
"""The most differing facts that an error lists."""

CHECKSUM = "sha256:"

LAUNCHED = "programs begun together"
"""A fact of each process: if one has begun more programs than another, its next collectives would meet the other's
earlier ones."""

REMEDY = "start all processes with the same program, arguments and versions"


class DifferentProcess(ProcessError):
    """A process does something else than the others; `process` is its number."""


def check_same(
    what: str,
    facts: Mapping[str, Any],
    processes: Iterable[int] | None = None,
    *,
    shows: Mapping[str, Callable[[Any, Any], list[str]]] | None = None,
    remedies: Iterable[str] = (REMEDY,),
) -> None:
    """Raises if facts differ between processes; all of them must call it.

    Args:
      what: as for `vnode.placement.process_barrier.meet`.
      facts: by name, JSON values; entries of dictionaries are compared one by one. None means unknown, and is not
        compared.
      processes: the processes; all by default.
      shows: for long facts, by name, a function that describes how two of them differ, one line each, given a differing
        process's fact and another's.
      remedies: advice for the error message.

    Raises:
      DifferentProcess: some facts differ; the error names the processes, and the facts with their values.
    """
    if not world().has_others:
        return
    concerned = frozenset(range(world().count) if processes is None else processes)
    mine = flatten_facts(facts, [*shows] if shows else []) | {LAUNCHED: world().launches[concerned]}
    words = exchange_words(what, json.dumps({name: shorten(value) for name, value in mine.items()}), processes)
    everyones = {process: json.loads(words[process]) for process in sorted(words)}
    names = dict.fromkeys(name for facts in everyones.values() for name in facts)
    odd = {name: found for name in names if (found := find_differing(name, everyones))}
    if not odd:
        return
    long = [name for name, two in odd.items() if any(everyones[p].get(name, "").startswith(CHECKSUM) for p in two)]
    full: dict[int, Any] = {}
    if long:  # all processes know that, and exchange them
        tells = world().index in {process for name in long for process in odd[name]}
        word = json.dumps({name: mine.get(name) for name in long} if tells else {})
        words = exchange_words(f"{what}, {long}", word, processes)
        full = {process: json.loads(text) for process, text in words.items()}
    lines = []
    for name, (one, other) in list(odd.items())[:SHOWN]:
        here, there = process_names([one]), process_names([other])
        values = [full[process].get(name) for process in (one, other)] if name in long else [None]
        if shows and name in shows and None not in values:
            lines += [f"{name}, {here} (now) and {there} (then):"]
            lines += [f"  {line}" for line in shows[name](*values)]
        else:
            texts = [everyones[process].get(name, "none") for process in (one, other)]
            lines.append(f"{name}: {texts[0]} in {here}, {texts[1]} in {there}")
    lines += [f"and {len(odd) - SHOWN} more"] if len(odd) > SHOWN else []
    strangers = sorted({one for one, _ in odd.values()})
    if list(odd) == [LAUNCHED]:
        remedies = ["start all processes again: an error that not all of them had has parted them"]
    raise DifferentProcess(
        layout_message(
            f"{process_names(strangers)} {'do' if len(strangers) > 1 else 'does'} not do what the others do: "
            f"{', '.join(odd)}.",
            facts=[*lines, f"the processes came {what}; nothing was run"],
            remedies=[*remedies],
        ),
        process=strangers[0],
        told=True,
    )


def find_differing(name: str, everyones: Mapping[int, Mapping[str, str]]) -> tuple[int, int] | None:
    """A process whose fact differs from the majority's, and one of the majority; None if all known facts agree.

    >>> find_differing("seed", {0: {"seed": "1"}, 1: {"seed": "2"}, 2: {"seed": "2"}, 3: {"seed": "null"}})
    (0, 1)
    """
    found = {process: facts.get(name, "none") for process, facts in everyones.items()}
    found = {process: text for process, text in found.items() if text != "null"}
    if len({*found.values()}) < 2:
        return None
    most = collections.Counter(found.values()).most_common(1)[0][0]  # on a tie the lowest process's
    return next(p for p, text in found.items() if text != most), next(p for p, text in found.items() if text == most)


def flatten_facts(facts: Mapping[str, Any], whole: Collection[str] = ()) -> dict[str, Any]:
    """Flattens dictionaries of facts, except those named in `whole`.

    >>> flatten_facts({"data": {"seed": 1, "size": None}, "examples": None})
    {'data.seed': 1, 'data.size': 'None', 'examples': None}
    """
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and name not in whole:
            found |= {f"{name}.{key}": "None" if entry is None else entry for key, entry in value.items()}
        else:
            found[name] = value
    return found


def shorten(value: Any) -> str:
    """The text of a fact in messages."""
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= LONGEST else f"{CHECKSUM}{hashlib.sha256(text.encode()).hexdigest()[:24]}"
