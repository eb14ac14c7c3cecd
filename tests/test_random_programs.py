"""A seeded subset of the random programs: equal to the reference or refused; never wrong, never another exception.

``python -m tests.random_programs`` runs as many as one likes.
"""

import collections
import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import vnode
from tests.random_programs import check as checking
from tests.random_programs.check import Outcome, check
from tests.random_programs.generate import generate
from tests.random_programs.minimise import minimise, tidy
from tests.random_programs.program import Program

pytestmark = pytest.mark.quickly

SHARDS = 6
"""Tests of their own, so that workers can share them."""

PROGRAMS = 8
"""Programs of each."""


def checked(shard: int, way: str) -> None:
    @hypothesis.settings(max_examples=PROGRAMS, derandomize=True, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(st.integers(0, 2**32 - 1))
    def equal_or_refused(seed: int) -> None:
        with jax.enable_x64(True):
            program = generate(seed * SHARDS + shard)
            outcome = check(program, way)
            seen[outcome.status] += 1
            if outcome.failed:
                pytest.fail(report(program, outcome, way))

    seen: collections.Counter[str] = collections.Counter()
    equal_or_refused()
    assert seen["equal"] >= PROGRAMS // 2, f"most programs prove nothing: {seen}"


@pytest.mark.thorough
@pytest.mark.parametrize("shard", [pytest.param(i, marks=[pytest.mark.newest] if i < 2 else []) for i in range(SHARDS)])
def test_random_programs(shard: int) -> None:
    checked(shard, "nodes")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way", ["batches", "layouts", "plans", pytest.param("training", marks=pytest.mark.newest), "searches"]
)
def test_random_programs_in_other_ways(way: str) -> None:
    checked(0, way)


def report(program: Program, outcome: Outcome, way: str) -> str:
    """The failing program made small, and what is wrong with it."""

    def same(smaller: Program) -> bool:
        again = check(smaller, way)
        return again.status == outcome.status and (again.status == "wrong" or again.head == outcome.head)

    small = tidy(program)
    small = minimise(small, same, budget=60) if same(small) else program
    return f"{small}\n# {outcome.head}\n# {check(small, way).detail}"


def test_a_seed_is_a_program() -> None:
    with jax.enable_x64(True):
        assert str(generate(7)) == str(generate(7))
        assert str(generate(7)) != str(generate(8))


class Wrapped:
    """Stands where a virtualized step would, and changes what it returns."""

    def __init__(self, step, change):
        self.step, self.change = step, change

    def on(self, devices, counts=None):
        return lambda *args: self.change(jax.jit(self.step)(*args))


def refuse(out):
    raise vnode.CouplingError("not today")


def crash(out):
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda out: out, "equal"),
        (lambda out: jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), out), "wrong"),
        (lambda out: jax.tree.map(lambda leaf: leaf[None], out), "wrong"),
        (lambda out: list(out.values()), "wrong"),
        (refuse, "refused"),
        (crash, "error"),
    ],
)
def test_the_check_sees(change, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that accepts everything would pass the test above too."""
    monkeypatch.setattr(checking.vnode, "virtualize", lambda step, **_: Wrapped(step, change))
    with jax.enable_x64(True):
        assert check(dataclasses.replace(generate(3), outer="same")).status == status


def test_only_outputs_that_move_by_themselves_are_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sign of a sum that cancels; twice a sum is as sure as any number."""

    def outputs(x: jax.Array) -> dict[str, jax.Array]:
        return {"sign": x.sum() - x.mean() * x.size > 0, "twice": 2 * x.sum()}

    def change(*names: str) -> str:
        def changed(out: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {name: out[name] ^ True if name == "sign" else out[name] + (name in names) for name in out}

        monkeypatch.setattr(checking.vnode, "virtualize", lambda step, **_: Wrapped(step, changed))
        return check(program).status

    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=9))
        program = dataclasses.replace(generate(3), outer="same")
        assert checking.unsteady(program, outputs, (x,), outputs(x)) == {"['sign']"}
        monkeypatch.setattr(Program, "step", lambda self: outputs)
        monkeypatch.setattr(Program, "values", lambda self: (x,))
        assert change() == "unsteady"
        assert change("twice") == "wrong"


def test_minimise_keeps_only_what_fails() -> None:
    with jax.enable_x64(True):
        programs = map(tidy, map(generate, range(100)))
        program = next(p for p in programs if "jnp.sin" in p.step_source() and len(p.statements) > 8)
        small = minimise(program, lambda p: "jnp.sin" in p.step_source())
    assert "jnp.sin" in small.step_source()
    assert len(small.statements) == 1
    assert len(small.outputs) == 1
