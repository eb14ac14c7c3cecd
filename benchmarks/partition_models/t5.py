"""An encoder-decoder as T5: positions relative to each other in the scores, RMS norms, scans over layers with remat.

Raffel et al. (2020). Parameters are float32, products are in bfloat16.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import cross_entropy, rms_norm, training, weights

BUCKETS, FARTHEST = 32, 128


def buckets(queries: int, keys: int, both: bool) -> np.ndarray:
    """The bucket of each distance between two words: single ones first, then ranges that grow."""
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    count = BUCKETS // 2 if both else BUCKETS
    first = count * (distance > 0) if both else 0
    far = np.abs(distance) if both else np.maximum(-distance, 0)
    exact = count // 2
    grown = exact + np.log(np.maximum(far, 1) / exact) / np.log(FARTHEST / exact) * (count - exact)
    return first + np.where(far < exact, far, np.minimum(grown.astype(int), count - 1))


def t5(
    batch: int = 64,
    length: int = 256,
    vocabulary: int = 16_384,
    layers: int = 6,
    width: int = 512,
    hidden: int = 1024,
    heads: int = 8,
) -> Model:
    """The model with its train step; texts of both sides are of the same length."""
    head = width // heads

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 3)
        attention = {"q": (layers, width, width), "kv": (layers, width, 2 * width), "out": (layers, width, width)}
        dense = {"gate": (layers, width, hidden), "up": (layers, width, hidden), "down": (layers, hidden, width)}
        norms = {f"norm{k}": (layers, width) for k in range(3)}
        crossed = {f"cross_{name}": shape for name, shape in attention.items()}
        return {
            "embed": jax.random.normal(keys[0], (vocabulary, width)),
            "encoder": weights(keys[1], {**attention, **dense, **norms}),
            "decoder": weights(keys[2], {**attention, **crossed, **dense, **norms}),
            "near": {"encoder": jnp.zeros((BUCKETS, heads)), "decoder": jnp.zeros((BUCKETS, heads))},
            "norm": {"encoder": jnp.ones(width), "decoder": jnp.ones(width)},
        }

    def attended(y: jax.Array, other: jax.Array, w: Tree, bias: jax.Array, prefix: str = "") -> jax.Array:
        q = (y @ w[f"{prefix}q"]).reshape(*y.shape[:2], heads, head)
        k, v = jnp.split((other @ w[f"{prefix}kv"]).reshape(*other.shape[:2], heads, 2 * head), 2, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) + bias
        found = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
        return found.reshape(y.shape) @ w[f"{prefix}out"]

    def layer(x: jax.Array, w: Tree, bias: jax.Array, encoded: jax.Array | None) -> jax.Array:
        w = jax.tree.map(lambda p: p.astype(jnp.bfloat16), w)
        y = rms_norm(x, w["norm0"])
        x = x + attended(y, y, w, bias)
        if encoded is not None:
            x = x + attended(rms_norm(x, w["norm1"]), encoded, w, jnp.zeros(()), "cross_")
        y = rms_norm(x, w["norm2"])
        return x + (jax.nn.gelu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]

    def side(params: Tree, name: str, words: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
        both = encoded is None
        bias = jnp.moveaxis(params["near"][name][buckets(length, length, both)], -1, 0)
        if not both:
            bias = jnp.where(np.tril(np.ones((length, length), bool)), bias, -1e30)
        once = jax.checkpoint(lambda x, w: (layer(x, w, bias, encoded), None))
        x, _ = jax.lax.scan(once, params["embed"].astype(jnp.bfloat16)[words], params[name])
        return rms_norm(x, params["norm"][name])

    def loss(params: Tree, batch: Tree) -> jax.Array:
        encoded = side(params, "encoder", batch["source"])
        words = batch["target"]
        x = side(params, "decoder", words[:, :-1], encoded)
        logits = x * width**-0.5 @ params["embed"].astype(jnp.bfloat16).T
        return cross_entropy(logits, words[:, 1:])

    def examples(key: jax.Array) -> Tree:
        keys = jax.random.split(key)
        return {
            "source": jax.random.randint(keys[0], (batch, length), 0, vocabulary),
            "target": jax.random.randint(keys[1], (batch, length + 1), 0, vocabulary),
        }

    return training("t5", init, loss, examples)
