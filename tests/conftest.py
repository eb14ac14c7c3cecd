"""What every test process needs before jax is imported: eight CPU devices.

Knows environment variables, and hypothesis's profiles. Must not know vnode. pytest imports this file first in every
process, the workers of pytest-xdist included, so nothing here may depend on another test module.
"""

import gc
import importlib.util
import itertools
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Read by XLA when the first device is asked for, and by jax when it is imported: nothing above imports jax.
_devices = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_devices}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["VNODE_COMPILE_PLANS"] = "0"  # searches compile only where a test gives them devices

# Tracing makes much that lives long, which Python's collector would go through again and again.
gc.set_threshold(50_000, 20, 20)

hypothesis.settings.register_profile("vnode", deadline=None, derandomize=True)
hypothesis.settings.load_profile("vnode")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "newest: part of the selection that also runs on the newest jax")
    config.addinivalue_line(
        "markers", "thorough: takes long; not part of `make test`, but of `make test-thorough`, which CI runs"
    )
    config.addinivalue_line(
        "markers",
        "sampled(n, thorough=m): n of a test's cases, spread evenly, are part of the usual run; of the others m are "
        "thorough (half as many as n if it is not said), and the rest are sweeps",
    )
    config.addinivalue_line("markers", "tpu: asks the compiler for TPUs, and so is thorough")
    config.addinivalue_line(
        "markers",
        "quickly: compiled without XLA's expensive optimizations, on which nothing that is tested depends, in the "
        "processes that a test starts too; and in its own, unless fusion_emitters=True is said, by XLA's older code "
        "generator for CPUs",
    )
    config.addinivalue_line("markers", "sweep: one of many alike; only with VNODE_TEST_ALL=1")
    config.addinivalue_line("markers", "wheel: downloads packages into a fresh environment; only if asked for")


THOROUGH = Path(__file__).parent / "thorough"
"""The folder of tests that need more than the extra `test` brings, or take long."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import what a usual run leaves out, and whose packages need not be there."""
    return True if collection_path == THOROUGH and "not thorough" in config.option.markexpr else None


def spread(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of some tests, evenly spread."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests by their folder and by what they need; leaves sweeps out of the usual run."""
    compiler = importlib.util.find_spec("libtpu") is not None
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if THOROUGH in item.path.parents or item.get_closest_marker("tpu"):
            item.add_marker(pytest.mark.thorough)
        if item.get_closest_marker("tpu") and not compiler:
            item.add_marker(pytest.mark.skip(reason="needs the compiler for TPUs: the extra tpu-aot, on Linux"))
        if item.get_closest_marker("sampled") and not item.get_closest_marker("sweep"):
            cases.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for several in cases.values():
        mark = several[0].get_closest_marker("sampled")
        (count,) = mark.args
        usual = spread(several, count)
        others = [item for item in several if item not in usual]
        thorough = spread(others, mark.kwargs.get("thorough", count // 2))
        for item in others:
            item.add_marker(pytest.mark.thorough if item in thorough else pytest.mark.sweep)
    if os.environ.get("VNODE_TEST_ALL") == "1":
        return
    left_out = {item for item in items if item.get_closest_marker("sweep") or not has_turn(item)}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def has_turn(item: pytest.Item) -> bool:
    """Whether a test is in the part that runs, if thorough tests take turns: VNODE_TEST_TURN is "1/8" to "8/8"."""
    turn = os.environ.get("VNODE_TEST_TURN")
    if not turn or not item.get_closest_marker("thorough"):
        return True
    part, parts = map(int, turn.split("/"))
    return zlib.crc32(item.nodeid.encode()) % parts == part - 1


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a test that failed at once, with its error: a run that is stopped has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        error = getattr(report.longrepr, "reprcrash", None)
        print(f"\nFAILED {report.nodeid} ({report.when}): {getattr(error, 'message', '')[:2000]}", flush=True)


def pytest_collection_finish() -> None:
    """What was imported stays, and is looked at by the garbage collector no more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    """Fails early and clearly where the flags above came too late."""
    import jax

    assert jax.default_backend() == "cpu" and len(jax.devices()) >= 8, f"tests need 8 CPU devices, not {jax.devices()}"


FUSION_EMITTERS = [False]
"""Whether programs without optimizations are made by the newer of XLA's code generators for CPUs all the same."""


@pytest.fixture(autouse=True)
def _optimizations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiling takes most of the time of most tests, and two thirds of that what makes programs fast."""
    marker = request.node.get_closest_marker("quickly")
    if marker is None:
        yield
        return
    import jax

    FUSION_EMITTERS[0] = marker.kwargs.get("fusion_emitters", False)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for the processes that a test starts
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    FUSION_EMITTERS[0] = False


@pytest.fixture(scope="session", autouse=True)
def _without_programs_that_put_arrays() -> None:
    """Arrays of NumPy are copied to the device without a program.

    ``jnp.asarray`` compiles a program that returns its argument, for each shape and type: one of six programs in all.
    """
    import jax
    import numpy as np

    try:
        from jax._src.lax.lax import stage_p
    except ImportError:  # other versions put arrays in other ways
        return
    compiled = stage_p.impl

    def put(value: Any) -> Any:
        alone = type(value) is np.ndarray and jax.sharding.get_abstract_mesh().empty
        return jax.device_put(value, may_alias=False) if alone else compiled(value)

    stage_p.def_impl(put)


@pytest.fixture(scope="session", autouse=True)
def _without_fusion_emitters() -> None:
    """Programs without optimizations are made by the older of the two, in half of the time, where jax still has both.

    There is no switch of jax's for that, and options of a `jax.jit` reach neither the steps of vnode nor single
    operations. With VNODE_TEST_ALL=1 the newer one makes all.

    All kernels of a program are compiled together. Else XLA deals them out to 32 modules of LLVM, and without
    optimizations such a module is optimized all the same if one of its kernels calls a reducer, and is not if none
    does: whether a product and a sum are contracted in one kernel then depends on which others there are in the
    program, hence on the placement. (With optimizations all are optimized; the newer generator makes no such calls.)
    Kernels run in an order that uses little memory, rather than one for several threads: in programs made so, devices
    did not always begin collectives in a branch and those beside it in the same order, and waited for ever, or mixed
    them up. (With optimizations this was not seen in hundreds of runs.)
    """
    import jax
    from jax._src import compiler

    if jax.__version_info__ >= (0, 11) or os.environ.get("VNODE_TEST_ALL") == "1":
        return
    options_of = compiler.get_compile_options

    def quicker(*args: Any, env_options_overrides: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        if jax.config.read("jax_disable_most_optimizations") and not FUSION_EMITTERS[0]:
            older = {
                "xla_cpu_use_fusion_emitters": False,
                "xla_cpu_parallel_codegen_split_count": 1,
                "xla_cpu_enable_concurrency_optimized_scheduler": False,
            }
            env_options_overrides = {**older, **(env_options_overrides or {})}
        return options_of(*args, env_options_overrides=env_options_overrides, **kwargs)

    compiler.get_compile_options = quicker


MAPS = 20_000
"""Memory maps of a process from which on compiled programs are forgotten: Linux allows some 65,000."""

EVERY = 25
"""After every so many tests they are counted, of which a test adds a thousand at most: counting takes 20 ms."""

TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """Forgets compiled programs when there are many: each takes memory maps, and without them a process dies.

    What tests keep of their results is forgotten with them: a program that is compiled again may be compiled without
    optimizations, where it was not, and have other bits.
    """
    yield
    maps = Path("/proc/self/maps")
    if next(TESTS) % EVERY == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        import jax

        jax.clear_caches()
        for name, module in list(sys.modules.items()):
            for kept in vars(module).values() if name.startswith("tests.") else ():
                if callable(forget := getattr(kept, "cache_clear", None)):
                    forget()
