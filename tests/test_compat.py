"""A canary for each use of jax's private API (`vnode.compat`): it sings on both supported versions."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.compat import (
    carry_settings,
    client_constructors,
    compile_request,
    compile_requested,
    coordination_service,
    distributed_state,
    thread_settings,
    trace_settings,
)


def instructions(text: str | None) -> list[str]:
    """The compiled text without what is written in any order."""
    return re.sub(r", (backend_config|metadata)=\{.*", "", text or "").splitlines()


@pytest.mark.newest
@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_request_is_compiled_to_the_same_program(donated: tuple[int, ...]) -> None:
    """Shardings that XLA propagates, the order of devices, and donated arguments travel with the request."""
    devices = jax.devices()[:4][::-1]
    mesh = Mesh(np.array(devices), ("x",))
    shape = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    lowered = jax.jit(lambda a, b: (a @ b.T @ a, jnp.sum(b)), donate_argnums=donated).lower(shape, shape)
    request, compiled = compile_request(lowered), lowered.compile()
    executable = compile_requested(request.module, request.options, devices)
    compile_requested(request.module, request.options, devices, draft=True)
    said, wanted = executable.get_compiled_memory_stats(), compiled.memory_analysis()
    for name in ("argument", "output", "alias", "temp"):
        assert getattr(said, f"{name}_size_in_bytes") == getattr(wanted, f"{name}_size_in_bytes")
    text = "\n\n".join(module.to_string() for module in executable.hlo_modules())
    assert instructions(text) == instructions(compiled.as_text())
    again = jax.jit(lambda a, b: (a @ b.T @ a, jnp.sum(b)), donate_argnums=donated).lower(shape, shape)
    assert compile_request(again).text == request.text


@pytest.mark.newest
def test_the_state_of_processes_has_what_is_asked_of_it() -> None:
    state = distributed_state()
    assert not jax.distributed.is_initialized()
    assert state.client is None and state.service is None and hasattr(state, "preemption_sync_manager")


@pytest.mark.newest
def test_a_client_meets_its_service() -> None:
    """The service and the client of one process: a key that is written is read, and both end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    service = coordination_service(address, 1, heartbeat_timeout=100, shutdown_timeout=1)
    made = client_constructors()
    assert sorted(made) == [
        "get_distributed_runtime_client",
        "get_distributed_runtime_service",
        "make_cpu_client",
        "make_gloo_tcp_collectives",
    ]
    client = made["get_distributed_runtime_client"](address, 0, init_timeout=10)
    client.connect()
    client.key_value_set("key", "value")
    assert client.blocking_key_value_get("key", 1000) == "value"
    client.shutdown()
    service.shutdown()


@pytest.mark.newest
def test_settings_of_a_thread_reach_another_one() -> None:
    before = trace_settings()
    with jax.enable_x64(True), jax.default_prng_impl("rbg"), jax.debug_nans(True):
        assert trace_settings() != before and len(thread_settings()) == 3
        work = carry_settings(lambda: (jnp.arange(2).dtype, jax.random.key(0).dtype, trace_settings()))
        wanted = work()
    assert trace_settings() == before and not thread_settings()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == wanted
        assert not pool.submit(thread_settings).result()
    assert wanted[0] == np.int64
