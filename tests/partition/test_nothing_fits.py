"""What the error names for when nothing fits: searched for, it fits, and nothing that is cheaper does.

Knows steps, machines, searches and the text of the error. Must not know how a remedy is found.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from vnode.partition import Machine, search
from vnode.partition.plan import budget

FOUND = re.compile(r"what would fit: (.*) \(([\d.]+ \w+), ")
EXAMPLES = 256


def step(state: Any, x: jax.Array) -> Any:
    """Three times the same two weights, and momentum."""

    def loss(params: Any) -> jax.Array:
        h = x
        for _ in range(3):
            h = jax.nn.gelu(h @ params["up"]) @ params["down"]
        return jnp.mean((h - x) ** 2)

    grads = jax.grad(loss)(state["params"])
    slots = jax.tree.map(lambda m, g: 0.9 * m + g, state["slots"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], slots), "slots": slots}


def arguments(width: int, hidden: int, examples: int = EXAMPLES) -> Any:
    params = {
        "up": jax.ShapeDtypeStruct((width, hidden), np.float32),
        "down": jax.ShapeDtypeStruct((hidden, width), np.float32),
    }
    return {"params": params, "slots": params}, jax.ShapeDtypeStruct((examples, width), np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A search for which nothing fits.

    Attributes:
      args: of the step.
      memory: bytes that a device may hold.
      remedy: what should help: names of what is changed.
      donated: whether the state is given away.
      nodes: V.
    """

    args: Any
    memory: int
    remedy: set[str]
    donated: bool = True
    nodes: int = 8


CASES = {
    "large activations": Case(arguments(16, 512), 240 * 1024, {"virtual_nodes"}),
    "a state that is kept": Case(arguments(64, 512, 32), 740 * 1024, {"donate_argnums"}, donated=False),
    "several sums that wait": Case(arguments(16, 512, 64), 190 * 1024, {"lanes"}, nodes=16),
    "sums that wait": Case(arguments(64, 512, 32), 600 * 1024, {"reduction"}),
    "activations and sums": Case(arguments(16, 512), 200 * 1024, {"virtual_nodes", "lanes"}),
    "a large state": Case(arguments(128, 512, 32), 740 * 1024, {"devices"}),
}
DEVICES = 2


def machine_of(devices: int) -> Machine:
    return Machine.gpus("P100", hosts=1, per_host=devices)


def tried(case: Case, devices: int = DEVICES, **changed: Any) -> Any:
    """A search with a change."""
    options = {
        "virtual_nodes": case.nodes,
        "donate_argnums": (0,) if case.donated else (),
        "memory": case.memory,
        "budget": 600.0,  # what is found does not depend on how busy the machine is
        **changed,
    }
    return search(step, case.args, machine_of(devices), **options)


def fits(case: Case, **changed: Any) -> bool:
    try:
        return bool(tried(case, **changed).figures.memory <= case.memory)
    except vnode.MemoryLimitError:
        return False


def said(error: Any) -> dict[str, Any]:
    """The change that an error names."""
    found = FOUND.search(str(error.value))
    assert found is not None, str(error.value)
    changed: dict[str, Any] = {}
    for part in re.split(", (?=[a-z0-9])", found[1]):
        if part.endswith(" devices"):
            changed["devices"] = int(part.split()[0])
        else:
            name, value = part.split("=")
            changed[name] = ast.literal_eval(value)
    return changed


@pytest.mark.sampled(0, thorough=1)
@pytest.mark.parametrize("name", CASES)
def test_what_is_named_fits_and_nothing_cheaper_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    with pytest.raises(vnode.MemoryLimitError) as error:
        tried(case)
    change = said(error)
    assert set(change) == case.remedy
    assert fits(case, **change)
    monkeypatch.setattr(budget, "MORE", 0.0)  # other searches are to say only whether something fits
    examples = case.args[1].shape[0]
    nodes = [n for n in (case.nodes * 2**k for k in range(1, 6)) if n <= examples]
    orders: list[dict[str, Any]] = [{"lanes": DEVICES}, {"reduction": "fast"}]
    cheaper: list[dict[str, Any]] = [{"donate_argnums": (0,)}, *orders]
    cheaper += [{"virtual_nodes": n, **each} for each in ({}, *orders) for n in nodes]
    cheaper += [{"devices": n} for n in (2 * DEVICES, 4 * DEVICES, 8 * DEVICES)]
    for each in cheaper[: cheaper.index(change)]:
        assert not fits(case, **each), each


def test_without_time_to_try_it_says_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MORE", 0.0)
    with pytest.raises(vnode.MemoryLimitError) as error:
        tried(CASES["a large state"])
    text = str(error.value)
    assert "what would fit" not in text and "not enough" not in text
    assert "more virtual nodes: there are 8 for 32 examples" in text
    assert re.search(r'reduction="fast": about [\d.]+ \w+ less', text) and re.search(r"about \d devices", text)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("budget", "short"), [(1e-3, True), (60.0, False)])
def test_a_search_that_had_too_little_time_says_so(budget, short):
    machine = Machine.tpu("v5e:2x2")
    with pytest.raises(vnode.MemoryLimitError) as raised:
        search(step, arguments(64, 256), machine, virtual_nodes=4, memory=1000, budget=budget, progress=False)
    assert ("more time" in str(raised.value)) == short
