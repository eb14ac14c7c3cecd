"""The virtualized transformer, compiled by the real TPU compiler for machines that are not there.

Knows the benchmark's compile command, which runs in a process of its own because the compiler loads a large library.
The reference is arithmetic: the gradient of every parameter crosses the devices once, and a few scalars.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("the TPU compiler is not installed (extra tpu-aot; x86-64 Linux only)", allow_module_level=True)

from benchmarks import contenders, models, tpu

NODES_PER_DEVICE = 4


def compile_for(topology: str, contender: str, layers: int) -> dict:
    """What the TPU compiler says about one contender's step."""
    command = [sys.executable, "-m", "benchmarks.tpu", topology, "--contenders", contender]
    command += ["--layers", str(layers), "--width", "64", "--length", "32", "--vocabulary", "512"]
    command += ["--nodes-per-device", str(NODES_PER_DEVICE), "--examples-per-node", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1], env={**os.environ, **tpu.ENVIRONMENT}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("topology", "devices"), [("v5e:2x4", 8), ("v5e:16x16", 256)])
def test_reduces_across_devices_once_and_outside_the_loop(topology, devices):
    found = compile_for(topology, contenders.VNODE, layers=12)
    params = jax.eval_shape(models.transformer(layers=12, width=64, length=32, vocabulary=512).init, jax.random.key(0))
    gradient = sum(4 * leaf.size for leaf in jax.tree.leaves(params))

    assert found["nodes"] == devices * NODES_PER_DEVICE
    # The model runs in the loop: what follows would be empty words of a program without one.
    assert found["loop_cycles"] > 0.5 * found["cycles"]
    assert found["inside"] == 0
    # Summed loss, weight and correct predictions come on top of the gradient.
    assert gradient <= found["outside_bytes"] <= gradient + 64


def test_a_collective_in_the_loop_would_be_seen():
    found = compile_for("v5e:2x4", contenders.MICROBATCH, layers=1)
    assert found["inside"] > 0
