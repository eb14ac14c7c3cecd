"""A recommendation model, DLRM: large embedding tables, products of all pairs of embeddings, dense layers at both ends.

Naumov et al. (2019). Tables of equal size are stacked. Parameters are float32, products are in bfloat16.
"""

import itertools

import jax
import jax.numpy as jnp
import optax

from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import training, weights


def dlrm(
    batch: int = 16_384,
    tables: int = 8,
    rows: int = 131_072,
    width: int = 64,
    dense: int = 13,
    bottom: tuple[int, ...] = (512, 256),
    top: tuple[int, ...] = (1024, 1024, 512),
) -> Model:
    """The model with its train step."""
    pairs = [(i, j) for i in range(tables + 1) for j in range(i)]
    first, second = zip(*pairs, strict=True)
    sizes = {"bottom": (dense, *bottom, width), "top": (len(pairs) + width, *top, 1)}

    def init(key: jax.Array) -> Tree:
        shapes: dict[str, tuple[int, ...]] = {}
        for part, several in sizes.items():
            for k, (n, m) in enumerate(itertools.pairwise(several)):
                shapes |= {f"{part}_{k}": (n, m)}
        keys = jax.random.split(key, 2)
        return {"tables": 0.05 * jax.random.normal(keys[0], (tables, rows, width)), **weights(keys[1], shapes)}

    def layers(params: Tree, part: str, x: jax.Array) -> jax.Array:
        count = len(sizes[part]) - 1
        for k in range(count):
            x = x @ params[f"{part}_{k}"].astype(jnp.bfloat16)
            x = jax.nn.relu(x) if k < count - 1 else x
        return x

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = layers(params, "bottom", batch["dense"].astype(jnp.bfloat16))
        found = jax.vmap(lambda table, i: table[i], in_axes=(0, 1), out_axes=1)(params["tables"], batch["rows"])
        several = jnp.concatenate([x[:, None], found.astype(jnp.bfloat16)], axis=1)
        products = jnp.einsum("bid,bjd->bij", several, several)[:, jnp.array(first), jnp.array(second)]
        logits = layers(params, "top", jnp.concatenate([x, products], axis=1))[:, 0].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicks"]).mean()

    def examples(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 3)
        return {
            "dense": jax.random.normal(keys[0], (batch, dense)),
            "rows": jax.random.randint(keys[1], (batch, tables), 0, rows),
            "clicks": jax.random.bernoulli(keys[2], 0.5, (batch,)).astype(jnp.float32),
        }

    return training("dlrm", init, loss, examples, optax.adagrad(1e-2))
