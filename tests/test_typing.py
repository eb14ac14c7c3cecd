"""What `vnode` shows to editors, type checkers and a prompt: types, names, short reprs, and what importing it loads.

Knows public names. Must not know how they are made.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from vnode.transform import StepOptions

ROOT = Path(__file__).parent.parent


@pytest.mark.thorough
def test_pyright_agrees_with_the_examples() -> None:
    """That each wrong call is one, too: an ignored error that is none is an error."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    run = subprocess.run([*command, "tests/typing_examples.py"], cwd=ROOT, capture_output=True, text=True)
    said = json.loads(run.stdout)
    wrong = [f"line {d['range']['start']['line'] + 1}: {d['message']}" for d in said["generalDiagnostics"]]
    assert not [line for line, d in zip(wrong, said["generalDiagnostics"], strict=True) if d["severity"] == "error"]
    assert said["summary"]["filesAnalyzed"] == 1


def test_overloads_have_the_options_of_the_function() -> None:
    taken = set(inspect.signature(vnode.virtualize).parameters)
    assert taken == {"fun", "virtual_nodes", "memory", *StepOptions.__annotations__}


def test_only_public_names_are_there() -> None:
    """Beside submodules, which Python puts where they are imported."""
    submodules = {module.name for module in pkgutil.iter_modules(vnode.__path__)}
    assert {name for name in vars(vnode) if not name.startswith("_")} - submodules <= set(vnode.__all__)
    lazy = {"cluster", "data", "elastic", "grain", "nnx", "partition"}
    assert lazy | {"__version__", *vnode.__all__} == set(dir(vnode))
    assert vnode.__all__ == sorted(set(vnode.__all__), key=vnode.__all__.index)
    for name in dir(vnode):
        thing = getattr(vnode, name)
        home = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", "vnode")
        assert home.startswith("vnode"), f"{name} is {home}'s"
    assert vnode.__version__ == importlib.metadata.version("vnode")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(vnode, "nothing")  # noqa: B009


def test_importing_loads_jax_and_nothing_heavy() -> None:
    """Beyond jax and its own modules: a few of jax's, and Python's. No framework, drawing or devices."""
    code = (
        "import jax, jax.numpy, sys; before = set(sys.modules)\n"
        "import vnode, json; vnode.virtualize, vnode.Placement; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = json.loads(run.stdout)
    mine = [name for name in new if name.split(".")[0] == "vnode"]
    top = {name.split(".")[0] for name in new} - {"vnode", "jax", *sys.stdlib_module_names}
    assert not top, f"vnode imports {top}"
    assert len(mine) <= 160 and len(new) - len(mine) < 60
    asked_for = "partition workers elastic data integrations cli report.step_report show.html show.terminal show.text"
    late = tuple(f"vnode.{name}" for name in f"{asked_for} plan.balance plan.check plan.explain_placements".split())
    assert not [name for name in mine if name.startswith(late)]


def public_objects() -> dict[str, Any]:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), (x @ w).mean()

    virtual = vnode.virtualize(step, virtual_nodes=64)
    args = jnp.ones(3), jnp.ones((256, 3))
    times = tuple(vnode.Measurement(1, nodes, 0.1 * nodes + 0.05) for nodes in (1, 2, 4, 8, 16, 32))
    profiles = vnode.Profiles(tuple(vnode.Profile(kind, 2, times) for kind in ("V100", "P100")))
    here = virtual.on(jax.devices()[:3])
    return {
        "Placement": here.placement,
        "VirtualStep": here,
        "VirtualStep without placement": virtual,
        "AutoStep": vnode.virtualize(step, virtual_nodes="auto", memory="1MiB"),
        "Report": here.explain(*args),
        "Comparison": vnode.explain(here, *args, devices=[1, 2]),
        "Check": vnode.check(here, args, devices=[1], plain=False),
        "Fit": vnode.fit(virtual, args, devices=jax.devices()[:1], memory="1MiB"),
        "Profiles": profiles,
        "Profile": profiles.kinds[0],
        "Measurement": times[0],
        "Balance": vnode.balance(profiles, 32),
        "Batches": vnode.data.Batches(np.arange(1000), batch_size=100),
        "ShardedBatch": vnode.data.Batches(np.arange(1000), batch_size=100).load(0, vnode.Placement(3)),
        "Preparation": here.prepare([jax.devices()[:1]], *args).wait(),
    }


def test_reprs_are_one_or_two_lines() -> None:
    for name, thing in public_objects().items():
        text = repr(thing)
        assert len(text.splitlines()) <= 2 and len(text) <= 200, f"{name}: {text}"
        assert " object at 0x" not in text, f"{name}: {text}"
        assert text.startswith(name.split()[0]), f"{name}: {text}"
