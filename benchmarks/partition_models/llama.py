"""A Llama of 107 M parameters: RMSNorm, rotary positions, SwiGLU, grouped queries; a scan over layers with remat.

Parameters are float32, products are in bfloat16. AdamW is written by hand.
"""

import jax
import jax.numpy as jnp

from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import cross_entropy, rms_norm, tokens, weights


def rotary(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Turns pairs of features by angles that grow with the position; x is (batch, position, head, feature)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, of several heads of q for each of k and v; all are (batch, position, head, feature)."""
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(jnp.float32) * width**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    found = jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores).astype(v.dtype), v)
    return found.reshape(batch, length, heads * width)


def llama(
    batch: int = 32,
    length: int = 1024,
    vocabulary: int = 20_480,
    layers: int = 12,
    width: int = 768,
    hidden: int = 2048,
    heads: int = 12,
    kv_heads: int = 4,
) -> Model:
    """The model with its train step."""
    head = width // heads

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 3)
        shapes = {
            "norm1": (layers, width),
            "q": (layers, width, width),
            "k": (layers, width, kv_heads * head),
            "v": (layers, width, kv_heads * head),
            "o": (layers, width, width),
            "norm2": (layers, width),
            "gate": (layers, width, hidden),
            "up": (layers, width, hidden),
            "down": (layers, hidden, width),
        }
        return {
            "embed": jax.random.normal(keys[0], (vocabulary, width)),
            "layers": weights(keys[1], shapes),
            **weights(keys[2], {"norm": (width,), "head": (width, vocabulary)}),
        }

    @jax.checkpoint
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda p: p.astype(jnp.bfloat16), w)
        y = rms_norm(x, w["norm1"])
        q, k, v = ((y @ w[name]).reshape(*y.shape[:2], -1, head) for name in "qkv")
        x = x + attention(rotary(q), rotary(k), v) @ w["o"]
        y = rms_norm(x, w["norm2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    def loss(params: Tree, batch: Tree) -> jax.Array:
        words = batch["tokens"]
        x = params["embed"].astype(jnp.bfloat16)[words[:, :-1]]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return cross_entropy(rms_norm(x, params["norm"]) @ params["head"].astype(jnp.bfloat16), words[:, 1:])

    def initial(key: jax.Array) -> Tree:
        params = init(key)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"params": params, "mu": zeros, "nu": zeros, "count": jnp.zeros((), jnp.int32)}

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        count = state["count"] + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g * g, state["nu"], grads)

        def update(p: jax.Array, m: jax.Array, n: jax.Array) -> jax.Array:
            m, n = m / (1 - 0.9**count), n / (1 - 0.95**count)
            return p - 3e-4 * (m / (jnp.sqrt(n) + 1e-8) + 0.1 * p)

        params = jax.tree.map(update, state["params"], mu, nu)
        return {"params": params, "mu": mu, "nu": nu, "count": count}, {"loss": value}

    return Model("llama", step, initial, tokens(batch, length, vocabulary))
