"""A training that is killed, interrupted, damaged and moved at random moments ends with the bits of one that was not.

    python -m tests.chaos --rounds 50 --seed 7

Knows processes, signals and files. Must not know how checkpoints are made. Each round is a process that trains on
randomly many devices; what happens to it is drawn from the seed: SIGKILL, SIGTERM, Ctrl-C once or twice in quick
succession, after a random time; then perhaps a file of the newest checkpoint is truncated, altered or deleted. The next
round goes on from what is left. The reference is a bare loop over the same step, without virtual nodes' driver.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 60
EXIT = 60.0
"""Seconds within which a process must have ended after it was asked to."""


def child(folder: str, devices: int, pause: float) -> None:
    """One process: goes on with the training, and writes the hash of the final state, or how it was stopped."""
    import jax

    import vnode

    made, batches, state = problem()

    def slowly(step: int, metrics: object) -> None:
        if step == 0 or step % 5 == 0:
            print(f"step {step}", flush=True)
        time.sleep(pause)

    result = vnode.elastic.run(
        made.on(jax.devices()[:devices]),
        state,
        batches,
        steps=STEPS,
        checkpoint=folder,
        checkpoint_every=4,
        callback=slowly,
        progress=False,
    )
    print(json.dumps({"step": result.step, "hash": sha256(result.state)}), flush=True)


def problem() -> tuple:
    """A step with dropout and momentum, its batches, and its first state."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import vnode

    def step(state: dict, batch: dict) -> tuple:
        key, draw = jax.random.split(state["key"])

        def loss_fn(w: jax.Array) -> jax.Array:
            kept = jax.random.bernoulli(draw, 0.9, batch["x"].shape)
            return jnp.mean((jnp.tanh(jnp.where(kept, batch["x"], 0) @ w).sum(-1) - batch["y"]) ** 2)

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        velocity = 0.9 * state["v"] + grad
        return {"w": state["w"] - 0.05 * velocity, "v": velocity, "key": key}, {"loss": loss}

    generator = np.random.default_rng(0)
    data = {"x": generator.normal(size=(37, 4)).astype(np.float32), "y": generator.normal(size=37).astype(np.float32)}
    state = {"w": jnp.ones((4, 3)) / 4, "v": jnp.zeros((4, 3)), "key": jax.random.key(5)}
    return vnode.virtualize(step, virtual_nodes=8, donate_argnums=0), vnode.data.Batches(data, 16, seed=3), state


def undisturbed() -> str:
    """The hash after a bare loop on one device."""
    import jax

    made, batches, state = problem()
    alone = made.on(jax.devices()[:1])
    state = alone.put(state)
    for number in range(STEPS):
        state, _ = alone(state, batches.batch(number))
    return sha256(state)


def sha256(state: dict) -> str:
    import jax
    import numpy as np

    leaves = jax.tree.leaves(state | {"key": jax.random.key_data(state["key"])})
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def damage(folder: Path, draw: random.Random) -> str:
    """Damages a file of the newest checkpoint; one older is left."""
    checkpoints = sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    if len(checkpoints) < 2:
        return ""
    files = sorted(p for p in checkpoints[-1].rglob("*") if p.is_file() and p.stat().st_size)
    if not files:
        return ""
    file, how = draw.choice(files), draw.choice(["truncate", "flip", "delete"])
    content = file.read_bytes()
    if how == "delete":
        file.unlink()
    elif how == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        at = draw.randrange(len(content))
        file.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
    return f", {how} {file.relative_to(folder)}"


def disturb(process: subprocess.Popen, how: str, after: float, draw: random.Random) -> str:
    """Waits for the first step and then some time, and sends signals; a process must end soon after.

    Returns:
      What the process printed until then: all, if the training had ended before.
    """
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("step"):
            break
    time.sleep(after)
    signals = {"kill": [signal.SIGKILL], "term": [signal.SIGTERM], "int": [signal.SIGINT], "int2": [signal.SIGINT] * 2}
    for number in signals[how]:
        process.send_signal(number)
        time.sleep(draw.uniform(0, 0.3))
    return printed


def one_round(folder: Path, how: str, draw: random.Random) -> dict | None:
    """A process, perhaps disturbed; what it printed in the end."""
    devices, pause, after = draw.randint(1, 4), 0.01 if how else 0.0, draw.uniform(0, 0.6)
    command = [sys.executable, "-m", "tests.chaos", "--child", str(folder), str(devices), str(pause)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
        try:
            printed = disturb(process, how, after, draw) if how else ""
            out, _ = process.communicate(timeout=EXIT if how else None)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"the process did not end within {EXIT} s after {how}") from None
        errors.seek(0)
        said = errors.read()
    last = (printed + (out or "")).strip().splitlines()[-1:]
    found = json.loads(last[0]) if last and last[0].startswith("{") else None
    print(
        f"{how or 'to the end':10} on {devices} devices: exit {process.returncode}, {found and found['step']}", end=""
    )
    if how in ("", "term", "int"):
        assert process.returncode == 0 and found is not None, f"a graceful end failed:\n{said}"
    else:
        assert process.returncode in (0, -signal.SIGKILL, -signal.SIGINT), said
        raised = set(re.findall(r"^([\w.]+(?:Error|Exception|Interrupt|Exit))\b", said, re.MULTILINE))
        assert raised <= {"KeyboardInterrupt"}, said
    return found


def environment() -> dict[str, str]:
    """Four devices on a CPU, as for the tests."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    return os.environ | flags | {"PYTHONPATH": str(Path(__file__).parents[1])}


def chaos(rounds: int, seed: int, expected: str, damaging: bool = True) -> int:
    """Trains through `rounds` disturbances; the number of checkpoints damaged.

    Raises:
      AssertionError: a process hung, ended badly, or the final state has other bits.
    """
    draw, damaged = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        for number in range(rounds):
            one_round(folder, draw.choice(["kill", "term", "int", "int2"]) if number % 4 else "kill", draw)
            what = damage(folder, draw) if damaging and folder.exists() and draw.random() < 0.5 else ""
            damaged += bool(what)
            print(what, flush=True)
        final = one_round(folder, "", draw)
        print(flush=True)
    assert final == {"step": STEPS, "hash": expected}, f"seed {seed}: {final} is not {expected}"
    return damaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="disturbances of each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainings", type=int, default=1, help="one after another, with consecutive seeds")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], int(options.child[1]), float(options.child[2]))
        return
    os.environ.update(environment())
    expected = undisturbed()
    for seed in range(options.seed, options.seed + options.trainings):
        chaos(options.rounds, seed, expected)
    print("all the same bits")


if __name__ == "__main__":
    main()
