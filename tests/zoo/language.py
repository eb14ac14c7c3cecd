"""Item 3 of the zoo: language models.

Knows flax linen and transformers. Must not know vnode. Models have one or two layers of width eight.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import Program, case, kit

VOCABULARY = 11
WIDTH = 8
LENGTH = 6


def _tokens(batch: int, length: int = LENGTH, seed: int = 0) -> jax.Array:
    return kit.integers(VOCABULARY, batch, length, seed=seed)


def _next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return kit.cross_entropy(logits[:, :-1], tokens[:, 1:]).mean()


def _train(model: nn.Module, batch: int, **options: Any) -> Program:
    """A plain training step: next-token loss, AdamW."""
    tx = optax.adamw(1e-2)
    tokens = _tokens(batch)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params, opt_state = state

        def loss_fn(params: Any) -> jax.Array:
            return _next_token_loss(model.apply({"params": params}, tokens), tokens)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "norm": optax.tree.norm(grads)}

    params = kit.init(model, tokens)["params"]
    return Program(step, ((params, kit.warm(tx.init(params))), tokens), options)


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of ``x[..., time, heads, features]``."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-jnp.arange(half) / half)
    angles = positions[..., None, None] * frequencies
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nn.Module):
    """Self-attention written out, or by ``jax.nn.dot_product_attention``."""

    heads: int = 2
    rotary: bool = False
    fused: bool = False
    kv_heads: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        features = x.shape[-1] // self.heads
        kv_heads = self.kv_heads or self.heads
        q = nn.DenseGeneral((self.heads, features), name="q")(x)
        k = nn.DenseGeneral((kv_heads, features), name="k", use_bias=False)(x)
        v = nn.DenseGeneral((kv_heads, features), name="v")(x)
        if self.rotary:
            positions = jnp.arange(x.shape[1])
            q, k = rotary(q, positions), rotary(k, positions)
        if self.fused:
            y = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        else:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / features**0.5
            causal = nn.make_causal_mask(x[:, :, 0], dtype=bool)
            scores = jnp.where(causal if mask is None else causal & mask, scores, -1e9)
            y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(y)


class Block(nn.Module):
    """Pre-norm transformer block."""

    rotary: bool = False
    fused: bool = False
    kv_heads: int | None = None
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        drop = nn.Dropout(self.dropout, deterministic=not self.dropout)
        attention = Attention(rotary=self.rotary, fused=self.fused, kv_heads=self.kv_heads)
        x = x + drop(attention(nn.LayerNorm()(x), mask))
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(WIDTH)(hidden))


class Model(nn.Module):
    """A decoder-only language model."""

    layers: int = 1
    learned: bool = True
    rotary: bool = False
    fused: bool = False
    kv_heads: int | None = None
    tied: bool = False
    dropout: float = 0.0
    remat: Any = None
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH)
        x = embed(tokens)
        if self.learned:
            x = x + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], WIDTH))
        block = Block if self.remat is None else self.remat(Block)
        kwargs = {"rotary": self.rotary, "fused": self.fused, "kv_heads": self.kv_heads, "dropout": self.dropout}
        if self.scanned:
            stack = nn.scan(
                lambda block, x, _: (block(x, mask), None),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.layers,
            )
            x, _ = stack(block(**kwargs), x, None)
        else:
            for i in range(self.layers):
                x = block(**kwargs, name=f"block_{i}")(x, mask)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCABULARY)(x)


@case(item=3)
def lm_learned_positions_unrolled() -> Program:
    return _train(Model(layers=2), 16)


@case(item=3, batch=12)
def lm_rotary_positions() -> Program:
    return _train(Model(learned=False, rotary=True), 12)


# jax.nn.dot_product_attention takes its softmax in float32.
@case(item=3, coarsest="float32")
def lm_fused_attention() -> Program:
    return _train(Model(fused=True), 16)


@case(item=3, batch=12, coarsest="float32")
def lm_grouped_query_attention_tied_embeddings() -> Program:
    return _train(Model(fused=True, kv_heads=1, tied=True), 12)


@case(item=3)
def lm_tied_embeddings_scaled() -> Program:
    """One table for input and output, by indexing: its gradient is a scatter plus a matrix product."""
    table = kit.normal(VOCABULARY, WIDTH, scale=0.3)
    params = {"table": table, "mlp": kit.dense(WIDTH, WIDTH)}

    def step(params: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            x = params["table"][tokens] * WIDTH**0.5
            logits = kit.mlp(params["mlp"], x) @ params["table"].T
            return _next_token_loss(logits, tokens)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    return Program(step, (params, _tokens(16)))


@case(item=3)
def lm_dropout() -> Program:
    model = Model(layers=2, dropout=0.2)
    tokens = _tokens(16)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, count, key = state
        rngs = {"dropout": jax.random.fold_in(key, count)}

        def loss_fn(params: Any) -> jax.Array:
            return _next_token_loss(model.apply({"params": params}, tokens, rngs=rngs), tokens)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return (kit.sgd(params, grads), count + 1, key), loss

    params = kit.init(model, tokens)["params"]
    return Program(step, ((params, jnp.asarray(3), jax.random.key(5)), tokens))


@case(item=3)
def lm_packed_sequences() -> Program:
    """Several documents in a row: attention within a document, positions that restart, loss on real tokens."""
    model = Model(learned=False)
    positions_table = kit.normal(LENGTH, WIDTH, seed=4)

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        segments, tokens = batch["segments"], batch["tokens"]
        starts = jnp.concatenate([jnp.ones_like(segments[:, :1]), segments[:, 1:] != segments[:, :-1]], axis=1)
        index = jnp.arange(LENGTH)
        positions = index - lax.cummax(jnp.where(starts, index, 0), axis=1)
        same = (segments[:, None, :, None] == segments[:, None, None, :]) & (segments > 0)[:, None, None, :]
        valid = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply({"params": params["model"]}, tokens, same)
            logits = logits + params["positions"][positions] @ jnp.ones((WIDTH, VOCABULARY), kit.real())
            losses = kit.cross_entropy(logits[:, :-1], tokens[:, 1:])
            return jnp.sum(losses * valid) / jnp.sum(valid)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    batch = {"tokens": _tokens(16), "segments": jnp.sort(kit.integers(4, 16, LENGTH, seed=1), axis=1)}
    params = {"model": kit.init(model, batch["tokens"])["params"], "positions": positions_table}
    return Program(step, (params, batch))


@case(item=3, batch=12)
def lm_remat() -> Program:
    return _train(Model(layers=2, remat=nn.remat), 12)


@case(item=3)
def lm_remat_with_policy() -> Program:
    """Checkpoints that keep the results of matrix products, with dropout inside."""
    params = [kit.dense(WIDTH, 2 * WIDTH, WIDTH, seed=i) for i in range(2)]
    table = kit.normal(VOCABULARY, WIDTH)

    def step(params: Any, tokens: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        def block(layer: Any, x: jax.Array, key: jax.Array) -> jax.Array:
            keep = jax.random.bernoulli(key, 0.8, x.shape)
            return x + jnp.where(keep, kit.mlp(layer, x) / 0.8, 0.0)

        saved = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)

        def loss_fn(params: Any) -> jax.Array:
            x = table[tokens]
            for layer, k in zip(params, jax.random.split(key, 2), strict=True):
                x = saved(layer, x, k)
            return _next_token_loss(x @ table.T, tokens)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    return Program(step, (params, _tokens(16), jax.random.key(2)))


@case(item=3)
def lm_scanned_layers() -> Program:
    return _train(Model(layers=3, scanned=True), 16)


@case(item=3, batch=12)
def lm_scanned_layers_with_remat() -> Program:
    return _train(Model(layers=2, scanned=True, remat=nn.remat, rotary=True, learned=False), 12)


@case(item=3)
def lm_scanned_layers_with_dropout() -> Program:
    model = Model(layers=2, scanned=True, dropout=0.3)
    tokens = _tokens(16)

    def step(params: Any, tokens: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return _next_token_loss(model.apply({"params": params}, tokens, rngs={"dropout": key}), tokens)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    return Program(step, (kit.init(model, tokens)["params"], tokens, jax.random.key(2)))


def _stacked(layers: int) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *[kit.dense(WIDTH, 2 * WIDTH, WIDTH, seed=i) for i in range(layers)])


@case(item=3)
def lm_plain_scan_over_layers() -> Program:
    """The layers' parameters stacked, ``lax.scan`` with ``jax.checkpoint``; per-token losses leave the step."""
    table = kit.normal(VOCABULARY, WIDTH)

    def step(params: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            def layer(x: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
                return x + kit.mlp(p, x), jnp.mean(x**2)

            x, scales = lax.scan(jax.checkpoint(layer), table[tokens], params)
            losses = kit.cross_entropy((x @ table.T)[:, :-1], tokens[:, 1:])
            return losses.mean() + 0.01 * scales.sum(), (losses, scales)

        (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), aux

    return Program(step, (_stacked(3), _tokens(16)))


@case(item=3, batch=12)
def masked_language_model() -> Program:
    """Bidirectional attention with padding, 30% of the tokens hidden at random, loss on the hidden ones."""

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array, valid: jax.Array) -> jax.Array:
            x = nn.Embed(VOCABULARY + 1, WIDTH)(tokens)
            mask = nn.make_attention_mask(valid > 0, valid > 0)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
            return nn.Dense(VOCABULARY)(x)

    model = Encoder()

    def step(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Any, jax.Array]:
        hidden = jax.random.bernoulli(key, 0.3, batch["tokens"].shape) & (batch["valid"] > 0)
        inputs = jnp.where(hidden, VOCABULARY, batch["tokens"])

        def loss_fn(params: Any) -> jax.Array:
            losses = kit.cross_entropy(model.apply({"params": params}, inputs, batch["valid"]), batch["tokens"])
            return jnp.sum(losses * hidden) / jnp.maximum(jnp.sum(hidden), 1)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    batch = {"tokens": _tokens(12), "valid": kit.lengths_mask(12, LENGTH)}
    return Program(step, (kit.init(model, batch["tokens"], batch["valid"])["params"], batch, jax.random.key(1)))


@case(item=3)
def encoder_decoder() -> Program:
    """Cross-attention from targets to sources, each with its own padding."""

    def attend(p: Any, x: jax.Array, y: jax.Array, valid: jax.Array) -> jax.Array:
        scores = (x @ p["q"]) @ jnp.swapaxes(y @ p["k"], -1, -2)
        scores = jnp.where(valid[:, None, :] > 0, scores, -1e9)
        return x + jax.nn.softmax(scores) @ (y @ p["v"])

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            source, target = params["table"][batch["source"]], params["table"][batch["target"]]
            target = attend(params["attention"], target, source, batch["valid"])
            logits = target @ params["table"].T
            losses = kit.cross_entropy(logits[:, :-1], batch["target"][:, 1:])
            weights = batch["weights"][:, 1:]
            return (losses * weights).sum() / weights.sum()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    attention = {name: kit.normal(WIDTH, WIDTH, seed=i, scale=0.3) for i, name in enumerate("qkv")}
    params = {"table": kit.normal(VOCABULARY, WIDTH), "attention": attention}
    batch = {
        "source": _tokens(16, 5),
        "target": _tokens(16, 4, seed=1),
        "valid": kit.lengths_mask(16, 5).at[:, 0].set(1),
        "weights": kit.lengths_mask(16, 4, seed=1),
    }
    return Program(step, (params, batch))


def _decoder() -> Any:
    weights = {name: kit.normal(WIDTH, WIDTH, seed=i, scale=0.4) for i, name in enumerate("qkv")}
    return {"table": kit.normal(VOCABULARY, WIDTH, seed=9), **weights}


def _decode_one(params: Any, cache: Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
    """Logits after one more token, with the keys and values of the earlier ones in a cache."""
    x = params["table"][token]
    cache = {
        "k": lax.dynamic_update_slice_in_dim(cache["k"], (x @ params["k"])[:, None], position, axis=1),
        "v": lax.dynamic_update_slice_in_dim(cache["v"], (x @ params["v"])[:, None], position, axis=1),
    }
    scores = jnp.einsum("bd,btd->bt", x @ params["q"], cache["k"])
    scores = jnp.where(jnp.arange(cache["k"].shape[1]) <= position, scores, -jnp.inf)
    x = x + jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), cache["v"])
    return x @ params["table"].T, cache


def _empty_cache(batch: int, length: int) -> Any:
    return {name: jnp.zeros((batch, length, WIDTH), kit.real()) for name in "kv"}


@case(item=3)
def decode_with_scan() -> Program:
    """Greedy decoding, a fixed number of tokens; the cache is made inside the step."""

    def step(params: Any, prompts: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(carry: Any, position: jax.Array) -> tuple[Any, Any]:
            token, cache = carry
            logits, cache = _decode_one(params, cache, token, position)
            token = jnp.argmax(logits, axis=-1).astype(token.dtype)
            return (token, cache), (token, jax.nn.logsumexp(logits, axis=-1))

        carry = (prompts, _empty_cache(prompts.shape[0], 5))
        _, (tokens, scores) = lax.scan(body, carry, jnp.arange(5))
        return tokens.T, scores

    return Program(step, (_decoder(), kit.integers(VOCABULARY, 16)))


@case(item=3, batch=12)
def decode_with_while_loop() -> Program:
    """Decoding until every example has produced the end token; finished examples stay as they are."""
    end = 3

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        prompts, length = batch["prompts"], 8

        def going(state: Any) -> jax.Array:
            position, _, _, done, _ = state
            return (position < length - 1) & ~jnp.all(done)

        def body(state: Any) -> Any:
            position, tokens, token, done, cache = state
            logits, cache = _decode_one(params, cache, token, position)
            new = jnp.where(done, end, jnp.argmax(logits, axis=-1).astype(token.dtype))
            tokens = tokens.at[:, position + 1].set(new)
            return position + 1, tokens, new, done | (new == end), cache

        tokens = jnp.full((prompts.shape[0], length), end, prompts.dtype).at[:, 0].set(prompts)
        done = jnp.zeros(prompts.shape, bool)
        _, tokens, _, done, _ = lax.while_loop(going, body, (0, tokens, prompts, done, _empty_cache(12, length)))
        return tokens, done

    batch = {"prompts": kit.integers(VOCABULARY, 12)}
    return Program(step, (_decoder(), batch))


@case(item=3)
def decode_with_sampling() -> Program:
    """Temperature and top-k sampling with one key for the whole batch; the cache is an argument and a result."""

    def step(params: Any, state: Any, key: jax.Array, position: jax.Array) -> Any:
        logits, cache = _decode_one(params, state["cache"], state["token"], position)
        values, indices = lax.top_k(logits, 4)
        choice = jax.random.categorical(key, values / 0.7)
        token = jnp.take_along_axis(indices, choice[:, None], axis=-1)[:, 0]
        return {"cache": cache, "token": token.astype(jnp.int32)}

    state = {"cache": {n: kit.normal(16, 5, WIDTH, seed=i) for i, n in enumerate("kv")}, "token": _tokens(16)[:, 0]}
    return Program(step, (_decoder(), state, jax.random.key(4), jnp.asarray(2)))


@case(item=3)
def decode_with_flax_cache() -> Program:
    """flax's own autoregressive cache: an index that is shared, keys and values per example."""
    attention = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=WIDTH, decode=True)
    x = kit.normal(16, 5, WIDTH)
    variables = jax.eval_shape(lambda: attention.init(jax.random.key(0), x))
    cache = jax.tree.map(lambda s: jnp.zeros(s.shape, kit.real() if s.ndim else s.dtype), variables["cache"])

    def step(params: Any, cache: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        y, updated = attention.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return updated["cache"], y

    in_axes = (None, jax.tree.map(lambda c: 0 if c.ndim else None, cache), 0)
    return Program(step, (kit.fill(variables["params"]), cache, x[:, :1]), {"in_axes": in_axes})


@case(item=3, batch=12)
def sequence_scoring() -> Program:
    """Evaluation: log-likelihood of every sequence and perplexity of all of them."""
    model = Model()
    tokens = _tokens(12)

    def step(params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        logits = model.apply({"params": params}, batch["tokens"])
        losses = kit.cross_entropy(logits[:, :-1], batch["tokens"][:, 1:]) * batch["valid"][:, 1:]
        count = batch["valid"][:, 1:].sum()
        return {"per_example": -losses.sum(-1), "perplexity": jnp.exp(losses.sum() / count), "count": count}

    batch = {"tokens": tokens, "valid": kit.lengths_mask(12, LENGTH)}
    return Program(step, (kit.init(model, tokens)["params"], batch))
