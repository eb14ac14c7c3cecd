"""Facts that must be the same in all processes: told to one another, and compared.

Knows processes, and facts as JSON. Must not know what the facts are of.

Each process leaves its facts at a meeting, long ones as checksums, and reads those of all. All come to the same answer:
the facts go on, or every process raises the same error, which names those that differ from the most.
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
"""Characters of a fact that is told as it is; of a longer one a checksum is."""

SHOWN = 8
"""Facts that differ, of which an error tells."""

CHECKSUM = "sha256:"

LAUNCHED = "programs begun together"
"""A fact of each process: where one has begun more than another, what they begin next would meet what is left over."""

REMEDY = "start all processes with the same program, arguments and versions"


class DifferentProcess(ProcessError):
    """A process does something else than the others; `process` says which."""


def check_same(
    what: str,
    facts: Mapping[str, Any],
    processes: Iterable[int] | None = None,
    *,
    shows: Mapping[str, Callable[[Any, Any], list[str]]] | None = None,
    remedies: Iterable[str] = (REMEDY,),
) -> None:
    """Refuses facts that are not the same in all processes; all of them must call it.

    Args:
      what: as for `vnode.placement.process_barrier.meet`.
      facts: by name, fit for JSON; those of dictionaries are compared one by one. One that is None is not known, and
        not compared.
      processes: which; by default all there are.
      shows: for long facts, by name: says how two of them differ, a line each, given that of a process that differs and
        that of another one.
      remedies: what to do about it.

    Raises:
      DifferentProcess: some differ; it names the processes, and the facts with their values.
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
    if long:  # all know that, and come to tell
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
    """A process whose fact is another one than that of most, and one of these; None if all that have it agree.

    >>> find_differing("seed", {0: {"seed": "1"}, 1: {"seed": "2"}, 2: {"seed": "2"}, 3: {"seed": "null"}})
    (0, 1)
    """
    found = {process: facts.get(name, "none") for process, facts in everyones.items()}
    found = {process: text for process, text in found.items() if text != "null"}
    if len({*found.values()}) < 2:
        return None
    most = collections.Counter(found.values()).most_common(1)[0][0]  # the lowest process's, where several are as many
    return next(p for p, text in found.items() if text != most), next(p for p, text in found.items() if text == most)


def flatten_facts(facts: Mapping[str, Any], whole: Collection[str] = ()) -> dict[str, Any]:
    """Facts of dictionaries one by one, but for those that are one fact.

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
    """A fact as it is told."""
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= LONGEST else f"{CHECKSUM}{hashlib.sha256(text.encode()).hexdigest()[:24]}"
