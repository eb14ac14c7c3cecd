"""A small language model on bytes: the same program on one host and on every host of a TPU pod slice.

    python examples/cloud_tpu/train.py                                      # this machine's TPUs or GPUs
    python examples/cloud_tpu/train.py --distributed --checkpoint gs://...  # on each host of a slice
    python examples/cloud_tpu/train.py --compile-for v5e:4x4                # nothing runs: does it compile, and fit?
    python examples/cloud_tpu/train.py --layers 2 --width 128 --batch 64 --virtual-nodes 8 --steps 20  # on a CPU

Twelve layers of width 768, on 512 texts a step, are for accelerators: on a CPU a step of them takes minutes.

The only difference between one host and many is `jax.distributed.initialize`. The number of virtual nodes is fixed, so
that a run that is preempted goes on from its checkpoint on a slice of another size, with the same batches and the same
order of sums. Every process starts from the same seed, and reads only the examples of its own devices.
"""

import argparse
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import vnode

LENGTH = 256
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def hidden(params, tokens):
    """Causal attention and an MLP, layer by layer: int32[B, T] -> float32[B, T, width]."""
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    visible = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))

    def normed(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def layer(x, p):
        query, key, value = jnp.einsum("btd,dcnh->cbtnh", normed(x), p["qkv"])
        scores = jnp.einsum("bqnh,bknh->bnqk", query, key) / query.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        x = x + jnp.einsum("bnqk,bknh,nhd->bqd", weights, value, p["out"])
        return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"], None

    return normed(jax.lax.scan(layer, x, params["layers"])[0])


def train_step(state, text):
    """One step for the whole batch, uint8[B, T + 1]. Nothing in it knows of devices or hosts."""
    tokens = text.astype(jnp.int32)

    def loss_of(params):
        logits = hidden(params, tokens[:, :-1]) @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, slots = OPTIMIZER.update(grads, state["slots"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, {"loss": loss}


def initial_state(layers, width):
    """Parameters and AdamW's slots, from a fixed seed."""
    keys, heads = iter(jax.random.split(jax.random.key(0), 6)), max(1, width // 64)

    def normal(*shape, fan):
        return jax.random.normal(next(keys), shape) / fan**0.5

    params = {
        "embed": normal(256, width, fan=width),
        "position": normal(LENGTH, width, fan=width),
        "layers": {
            "qkv": normal(layers, width, 3, heads, width // heads, fan=width),
            "out": normal(layers, heads, width // heads, width, fan=width * layers),
            "up": normal(layers, width, 4 * width, fan=width),
            "down": normal(layers, 4 * width, width, fan=4 * width * layers),
        },
    }
    return {"params": params, "slots": OPTIMIZER.init(params)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--distributed", action="store_true", help="join the other hosts (Cloud TPU, Slurm)")
    parser.add_argument("--text", type=Path, help="a file; by default the sources of Python's own library")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--virtual-nodes", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--checkpoint", help="a folder that all hosts see, such as gs://bucket/run")
    parser.add_argument("--compile-for", metavar="TOPOLOGY", help="compile for such a slice (v5e:4x4), and stop")
    options = parser.parse_args()

    step = vnode.virtualize(train_step, virtual_nodes=options.virtual_nodes, donate_argnums=0)
    if options.compile_for:
        jax.config.update("jax_platforms", "cpu")  # a TPU is compiled for, and none is looked for
        state = jax.eval_shape(lambda: initial_state(options.layers, options.width))
        text = jax.ShapeDtypeStruct((options.batch, LENGTH + 1), jnp.uint8)
        print(vnode.fit(step, (state, text), devices=options.compile_for))
        return
    if options.distributed:
        jax.distributed.initialize()  # before anything asks for a device

    library = sorted(Path(os.__file__).parent.glob("*.py"))
    data = options.text.read_bytes() if options.text else b"".join(file.read_bytes() for file in library)
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), LENGTH + 1)[::LENGTH]
    batches = vnode.data.Batches(windows, options.batch, seed=0)
    state = initial_state(options.layers, options.width)

    def report(number, metrics):
        if jax.process_index() == 0 and (number < 3 or number % 10 == 0):
            print(f"step {number}: loss {float(metrics['loss']):.4f}", flush=True)

    vnode.elastic.run(step, state, batches, steps=options.steps, checkpoint=options.checkpoint, callback=report)


if __name__ == "__main__":
    main()
