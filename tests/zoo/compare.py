"""Runs a case of the zoo virtualized, and compares everything it returns with the step as the user wrote it.

The same programs say how much memory they take, and what they print is counted. Where a step is compiled as users
compile, it also runs on one device, and the bits are compared.

Knows vnode's public interface. Must not know any case, nor what counts as equal.

Float64 is switched on around a run, so that both precisions can run in either order; jax keeps separate compiled
programs for them. It is switched for all threads: callbacks run in threads of XLA's.

Compiling takes nearly all of the time, so the runs in float64, which are the most, are compiled without XLA's
expensive optimizations (and by the code generator that `tests.conftest` chooses then); those in float32 as users
compile. References are always compiled without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vnode
from tests.rounding import MOVED, compare, host, moved_by

from . import Case, Program, unchanged

QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""How references are compiled. Before jax 0.11 there was another choice that takes two thirds of the time."""
if jax.__version_info__ < (0, 11):
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


SLACK = 4096
"""Bytes that a virtualized step may take beside twice those of the plain step, and sums that wait for others.

Of such sums there are some for each level of a tree over the nodes, as large as arguments and results at most. Most
steps here have few examples: these take less than the plain step. The bound catches memory that grows with the nodes.
"""


FROM_OUTSIDE = {
    "under_grad",
    "under_grad_of_masked_mean",
    "under_grad_by_the_inputs",
    "under_jvp_and_hessian",
    "custom_jvp_under_grad",
}
"""Cases that are differentiated from outside: their bits may depend on the devices."""


@contextlib.contextmanager
def running_in(precision: str) -> Iterator[None]:
    """Switches float64, and with it quick compilation, on or off in every thread (as a context jax does so in one)."""
    names = ("jax_enable_x64", "jax_disable_most_optimizations")
    before = {name: jax.config.read(name) for name in names}
    try:
        for name in names:
            jax.config.update(name, precision == "float64")
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def check(case: Case, nodes: int, devices: int, precision: str) -> None:
    """Asserts that a case gives the reference's results on so many nodes and devices, or is refused as it should be.

    Args:
      case: the case.
      nodes: V.
      devices: how many of the machine's devices, from the first.
      precision: ``"float64"`` or ``"float32"``.

    Raises:
      AssertionError: results differ, or the step was (or was not) refused.
    """
    with running_in(precision):
        program = build(case, precision)
        if case.expect is not None:
            refusal(case, program, nodes, devices)
            return
        step = virtual(case, program, nodes, devices)
        if is_plain(program) and not case.nnx:
            needs = step.executor.compile_for(program.args, {}).memory_analysis()  # the call finds the program
            plain = references(case, precision, nodes if program.reference else 0).temporary
            sums = (2 + 3 * math.log2(nodes)) * (needs.argument_size_in_bytes + needs.output_size_in_bytes)
            assert needs.temp_size_in_bytes <= 2 * plain + sums + SLACK, "memory"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            got = jax.block_until_ready(program.outer(step)(*program.args))
            jax.effects_barrier()
        assert len(printed.getvalue().splitlines()) == case.lines(nodes), printed.getvalue()
        agrees(case, got, nodes, precision)
        if precision == "float32" and devices > 1 and case.name not in FROM_OUTSIDE:
            assert digest(got) == digest(call(case, program, nodes, 1)), "the bits depend on the number of devices"


def digest(tree: Any) -> str:
    """The SHA-256 of all arrays of a tree, with their types and shapes."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(host(leaf))
        sha.update(f"{array.dtype}{array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def agrees(case: Case, got: Any, nodes: int, precision: str) -> None:
    """Asserts that a result of a case's virtualized step is the reference's."""
    want, *moved = references(case, precision, nodes if build(case, precision).reference else 0).results
    compare(got, want, moved, unit(case, precision))


def virtual(case: Case, program: Program, nodes: int, devices: int) -> Any:
    """The virtualized step."""
    virtualize = vnode.nnx.virtualize if case.nnx else vnode.virtualize
    return virtualize(program.step, virtual_nodes=nodes, **program.options).on(jax.devices()[:devices])


def call(case: Case, program: Program, nodes: int, devices: int) -> Any:
    """The result of the virtualized step."""
    return program.outer(virtual(case, program, nodes, devices))(*program.args)


def is_plain(program: Program) -> bool:
    """Whether nothing is done to the step but to compile it."""
    return program.jit is jax.jit and program.outer is unchanged


def refusal(case: Case, program: Program, nodes: int, devices: int) -> None:
    """Asserts that the virtualized step raises the right error."""
    name, pattern = case.expect or ("", "")
    import pytest

    with pytest.raises(getattr(vnode, name), match=pattern):
        call(case, program, nodes, devices)


@functools.lru_cache(maxsize=8)
def build(case: Case, precision: str) -> Program:
    """The program of a case in a precision."""
    assert jax.config.jax_enable_x64 == (precision == "float64")
    return case.make()


@dataclasses.dataclass(frozen=True)
class References:
    """Results and memory of the step as the user wrote it.

    Attributes:
      results: the result, and those for arguments that are moved by a unit of rounding.
      temporary: bytes of temporary memory, if the step is only compiled.
    """

    results: Sequence[Any]
    temporary: int = 0


@functools.lru_cache(maxsize=8)
def references(case: Case, precision: str, nodes: int) -> References:
    """Results and memory of the step as the user wrote it."""
    program = build(case, precision)
    step = program.reference(nodes) if program.reference else program.step
    rng = np.random.default_rng(0)
    several = [program.args] + [moved_by(program.args, unit(case, precision), rng) for _ in range(MOVED)]
    if not is_plain(program):
        run = program.outer(program.jit(step))
        return References([jax.tree.map(host, run(*args)) for args in several])
    run = jax.jit(step, compiler_options=QUICKLY)  # options of outermost functions only, says jax
    temporary = run.lower(*program.args).compile().memory_analysis().temp_size_in_bytes
    return References([jax.tree.map(host, run(*args)) for args in several], temporary)


def unit(case: Case, precision: str) -> float:
    """The unit of rounding of the coarsest type that a case computes in; zero if it rounds nothing."""
    return 0.0 if case.exact else float(jnp.finfo(case.coarsest or precision).eps)
