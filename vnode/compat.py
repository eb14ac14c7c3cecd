"""The private API of jax that vnode needs: one function for each use, with the public API that would replace it.

Knows jax's internals. Must not know what they are used for.

`tests/test_compat.py` has a canary for each function, which runs on both supported versions of jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:  # a process that only keeps the coordination service starts without jax
    import jax

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """A lowered program, as bytes that another process compiles to the same executable.

    Attributes:
      module: StableHLO, as MLIR bytecode with source locations (their scopes name loops in the compiled text).
      options: a serialized ``CompileOptions``.
      text: StableHLO as text without locations: equal for equal programs.
    """

    module: bytes
    options: bytes
    text: str


def compile_request(lowered: jax.stages.Lowered) -> CompileRequest:
    """Takes out of a lowered program what its compilation needs.

    There is no public way: ``Lowered`` shows its module, but not the options of its compilation (which shardings may
    be propagated, the order of devices).

    Args:
      lowered: from ``jax.jit(f).lower(...)``, over the devices of one platform.

    Returns:
      The request.
    """
    import io

    import numpy as np
    from jax._src.interpreters import pxla

    computation: Any = lowered._lowering  # type: ignore[attr-defined]
    given = computation.compile_args
    module: Any = lowered.compiler_ir("stablehlo")
    effects = len(given["ordered_effects"])
    propagated = pxla.get_prop_to_input_output(given["in_shardings"], given["out_shardings"], effects)
    devices = np.array([*computation._device_list], dtype=object)
    options = pxla.create_compile_options(module, given["tuple_args"], *propagated, given["backend"], devices, {})
    bytecode = io.BytesIO()
    module.operation.write_bytecode(file=bytecode)
    text = module.operation.get_asm(enable_debug_info=False)
    return CompileRequest(bytecode.getvalue(), options.SerializeAsString(), text)


def trace_settings() -> Hashable:
    """The settings and contexts by which jax traces a function to other programs: ``jax.jit`` keeps one for each.

    No public function has all of them.
    """
    from jax._src import config

    return config.trace_context()


def thread_settings() -> dict[str, Any]:
    """The settings of jax that this thread alone has, as within ``jax.enable_x64(True)``; by name.

    jax keeps them by thread, and not in `contextvars`. Other threads do not see them.
    """
    from jax._src import config

    local = {name: state.get_local() for name, state in config.config_states.items()}
    return {name: value for name, value in local.items() if value is not config.config_ext.unset}


@contextlib.contextmanager
def under_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """Gives this thread settings that another one has.

    Args:
      settings: as `thread_settings` returns them.
    """
    from jax._src import config

    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(config.config_states[name](value))
        yield


def carry_settings(work: Callable[P, T]) -> Callable[P, T]:
    """A function that runs under the settings of jax that this thread has now, in whichever thread it is called."""
    settings = thread_settings()

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with under_settings(settings):
            return work(*args, **kwargs)

    return run


DRAFT_OPTIONS: dict[str, Any] = {"optimization_level": 19}
"""Options of ``jax.stages.Lowered.compile`` for few optimizations: XLA's ``EFFORT_O1``, jax's level ``"O1"``."""


def compile_requested(module: bytes, options: bytes, devices: Sequence[Any], draft: bool = False) -> Any:
    """Compiles what `compile_request` took out, perhaps in another process.

    Args:
      module: as in `CompileRequest`.
      options: likewise.
      devices: as many as the program was lowered for, of the same kind, in the same order.
      draft: whether to compile with `DRAFT_OPTIONS`.

    Returns:
      XLA's executable, which has ``get_compiled_memory_stats``, ``hlo_modules`` and ``serialize``.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        build = xla_client.CompileOptions.ParseFromString(options)
        for name, value in DRAFT_OPTIONS.items() if draft else ():
            setattr(build.executable_build_options, name, value)
        executable_devices = xla_client.DeviceList(tuple(devices))
        return compiler.backend_compile_and_load(devices[0].client, parsed, executable_devices, build, [])


def distributed_state() -> Any:
    """The client and the service by which the processes of `jax.distributed.initialize` find each other.

    There is no public way to the service: ``jax.experimental.multihost_utils`` offers collectives only.

    Returns:
      jax's own object, with ``client``, ``service`` and ``preemption_sync_manager``, each None if it is not there.
    """
    from jax._src import distributed

    return distributed.global_state


def client_constructors() -> Mapping[str, Any]:
    """The constructors of a second client of CPU devices, by name.

    ``jax.distributed.initialize`` makes one client for the life of a process; there is no public way to another one.

    Raises:
      ImportError: this version of jaxlib has no such module.
      AttributeError: it lacks one of the constructors.
    """
    from jaxlib import _jax, xla_client

    return {
        "get_distributed_runtime_client": _jax.get_distributed_runtime_client,
        "get_distributed_runtime_service": _jax.get_distributed_runtime_service,
        "make_gloo_tcp_collectives": _jax.make_gloo_tcp_collectives,
        "make_cpu_client": xla_client.make_cpu_client,
    }


def coordination_service(address: str, processes: int, **options: Any) -> Any:
    """Starts a coordination service, at which the processes of a job meet; jax itself is not imported.

    ``jax.distributed.initialize`` starts one in process 0 only, and it ends with that process.

    Args:
      address: host and port at which it listens.
      processes: how many will connect.
      **options: of the service: ``heartbeat_timeout`` and ``shutdown_timeout`` in seconds, ``recoverable``.

    Returns:
      The service; its ``shutdown`` ends it.
    """
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(address, processes, **options)
