"""A canary for each use of jax's private API (`vnode.compat`): it sings on both supported versions."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.compat import compile_request, compile_requested


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
    said, wanted = executable.get_compiled_memory_stats(), compiled.memory_analysis()
    for name in ("argument", "output", "alias", "temp"):
        assert getattr(said, f"{name}_size_in_bytes") == getattr(wanted, f"{name}_size_in_bytes")
    text = "\n\n".join(module.to_string() for module in executable.hlo_modules())
    assert instructions(text) == instructions(compiled.as_text())
    again = jax.jit(lambda a, b: (a @ b.T @ a, jnp.sum(b)), donate_argnums=donated).lower(shape, shape)
    assert compile_request(again).text == request.text
