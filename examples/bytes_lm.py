"""A language model on bytes: a small transformer learns the source text of Python's own standard library.

    python examples/bytes_lm.py

The train step has what tends to break when a batch is split by hand: dropout (the same masks as on the whole batch), a
loss averaged over the bytes that count (their number differs from example to example), rematerialization, and
clipping by the norm of the whole gradient. vnode asks for the decorator and nothing else.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import vnode

END = 0
"""A byte that stands between two files and does not occur in them."""


class Block(nn.Module):
    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, deterministic):
        batch, length, width = x.shape
        y = nn.LayerNorm()(x)
        qkv = nn.DenseGeneral((3, self.heads, width // self.heads))(y)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, width)
        x = x + nn.Dropout(self.dropout)(nn.Dense(width)(y), deterministic)
        y = nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.dropout)(y, deterministic)


class Transformer(nn.Module):
    layers: int
    width: int
    heads: int = 4
    dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens, deterministic):
        embed = nn.Embed(256, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = embed(tokens) + positions
        for _ in range(self.layers):
            x = nn.remat(Block, static_argnums=(2,))(self.heads, self.dropout)(x, deterministic)
        return embed.attend(nn.LayerNorm()(x))


# The step, for the whole batch. Nothing in it knows of nodes or devices.


@vnode.virtualize(virtual_nodes=32)
def train_step(state, batch):
    inputs, targets = batch[:, :-1], batch[:, 1:]
    weights = (inputs != END).astype(jnp.float32)  # what follows the end of a file cannot be predicted

    def loss_fn(params):
        key = jax.random.fold_in(jax.random.key(1), state.step)
        logits = state.apply_fn(params, inputs, deterministic=False, rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return (losses * weights).sum() / weights.sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.tree.norm(grads)}


def load():
    """The top-level modules of the standard library, one after another."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = bytes([END]).join(file.read_bytes().replace(bytes([END]), b"") for file in files)
    return np.frombuffer(text, np.uint8).astype(np.int32), len(files)


def batch_of(text, step, size, length):
    """Which stretches of text are in a batch depends on the step number only."""
    starts = np.random.default_rng(step).integers(0, len(text) - length - 1, size)
    return text[starts[:, None] + np.arange(length + 1)]


def sample(state, prompt, length, count):
    """Continues `prompt`, one byte at a time."""

    @jax.jit
    def next_byte(window, end, key):
        logits = state.apply_fn(state.params, window[None], deterministic=True)[0, end - 1]
        return jax.random.categorical(key, logits / 0.7)

    text = list(prompt)
    for i in range(count):
        window = np.zeros(length, np.int32)
        recent = text[-length:]
        window[: len(recent)] = recent
        text.append(int(next_byte(window, len(recent), jax.random.fold_in(jax.random.key(2), i))))
    return bytes(text).decode("utf-8", errors="replace")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="examples in a batch")
    parser.add_argument("--length", type=int, default=64, help="bytes in an example")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--devices", type=int, default=None, help="how many devices; all of them by default")
    parser.add_argument("--sample", type=int, default=240, help="bytes to write at the end")
    options = parser.parse_args()
    console = Console()

    text, files = load()
    model = Transformer(options.layers, options.width)
    tokens = jnp.zeros((1, options.length), jnp.int32)
    params = model.init(jax.random.key(0), tokens, deterministic=True)
    schedule = optax.warmup_cosine_decay_schedule(0, 5e-3, max(options.steps // 10, 1), max(options.steps, 2))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    step = train_step.on(jax.devices()[: options.devices])
    state = step.put(state)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    console.print(f"{len(text):,} bytes of {files} files; {size:,} parameters; {step.placement}")

    columns = TextColumn("loss {task.fields[loss]:.3f}"), BarColumn(), TimeRemainingColumn()
    began = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=options.steps, loss=float("nan"))
        for i in range(options.steps):
            state, metrics = step(state, batch_of(text, i, options.batch, options.length))
            progress.update(task, advance=1, loss=float(metrics["loss"]))
    seconds = time.perf_counter() - began
    loss = float(metrics["loss"])
    console.print(f"loss {loss:.3f} nats per byte (guessing any byte costs {np.log(256):.3f}) after {seconds:.0f} s")
    console.print(sample(state, b"def ", options.length, options.sample), markup=False, highlight=False)


if __name__ == "__main__":
    main()
