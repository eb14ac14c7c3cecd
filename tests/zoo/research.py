"""Item 9 of the zoo: steps that are not one loss and one gradient.

Knows reinforcement learning, generative models, privacy, meta-learning, second-order methods. Must not know vnode.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from . import Program, case, kit

WIDTH = 4
EXACT = {"recompute_budget": 10.0}


def _squared(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((kit.mlp(params, x) - y) ** 2)


def _regression(batch: int = 16, outputs: int = 2) -> dict[str, jax.Array]:
    return {"x": kit.normal(batch, WIDTH), "y": kit.normal(batch, outputs, seed=1)}


@case(item=9)
def private_gradients() -> Program:
    """DP-SGD: a gradient per example, clipped by its norm, summed, with noise added once."""

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, key = state
        key, noise_key = jax.random.split(key)
        losses, grads = jax.vmap(jax.value_and_grad(_squared), (None, 0, 0))(params, batch["x"], batch["y"])
        norms = jax.vmap(optax.tree.norm)(grads)
        scale = jnp.minimum(1.0, 0.5 / norms)
        total = jax.tree.map(lambda g: jnp.tensordot(scale, g, axes=1), grads)
        flat, unravel = ravel_pytree(total)
        flat = flat + 0.1 * jax.random.normal(noise_key, flat.shape, flat.dtype)
        params = kit.sgd(params, unravel(flat), 0.1 / batch["x"].shape[0])
        return (params, key), losses.mean(), norms, jnp.mean(norms > 0.5)

    return Program(step, ((kit.dense(WIDTH, 6, 2), jax.random.key(0)), _regression()))


@case(item=9, batch=12)
def private_gradients_by_optax() -> Program:
    tx = optax.contrib.differentially_private_aggregate(l2_norm_clip=0.5, noise_multiplier=0.3, key=3)

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, opt_state = state
        grads = jax.vmap(jax.grad(_squared), (None, 0, 0))(params, batch["x"], batch["y"])
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, jax.tree.map(lambda u: -0.1 * u, updates)), opt_state

    params = kit.dense(WIDTH, 6, 2)
    return Program(step, ((params, tx.init(params)), _regression(12)))


@case(item=9)
def gradient_noise_scale() -> Program:
    """The norm of the mean gradient against the mean norm of the examples' gradients."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        grads = jax.vmap(jax.grad(_squared), (None, 0, 0))(params, batch["x"], batch["y"])
        size = batch["x"].shape[0]
        mean = jax.tree.map(lambda g: g.mean(axis=0), grads)
        big = sum(jnp.sum(g**2) for g in jax.tree.leaves(mean))
        small = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)) / size
        signal = (size * big - small) / (size - 1)
        variance = sum(jnp.sum(jnp.var(g, axis=0)) for g in jax.tree.leaves(grads))
        return kit.sgd(params, mean), {"scale": (small - big) / signal, "variance": variance}

    return Program(step, (kit.dense(WIDTH, 6, 2), _regression()))


@case(item=9, batch=12)
def gradient_per_microbatch() -> Program:
    """Gradients of quarters of the batch, for their spread."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)

        def grad(part: dict[str, jax.Array]) -> jax.Array:
            return ravel_pytree(jax.grad(lambda p: _squared(p, part["x"], part["y"]) / part["x"].shape[0])(params))[0]

        grads = jax.vmap(grad)(parts)
        mean = grads.mean(axis=0)
        return kit.sgd(params, ravel_pytree(params)[1](mean)), jnp.sum((grads - mean) ** 2, axis=1)

    return Program(step, (kit.dense(WIDTH, 6, 2), _regression(12)), EXACT)


@case(item=9)
def gan() -> Program:
    """Generator and discriminator, two optimizers, the second update with the first one's new parameters."""
    tx = optax.adam(1e-2, b1=0.5)

    def step(state: Any, real: jax.Array) -> Any:
        g, d, opt_g, opt_d, key = state
        key, a, b = jax.random.split(key, 3)

        def generate(g: Any, key: jax.Array) -> jax.Array:
            return kit.mlp(g, jax.random.normal(key, (real.shape[0], 3), real.dtype))

        def d_loss(d: Any) -> jax.Array:
            fake = lax.stop_gradient(generate(g, a))
            return jnp.mean(jax.nn.softplus(-kit.mlp(d, real)) + jax.nn.softplus(kit.mlp(d, fake)))

        loss_d, grads = jax.value_and_grad(d_loss)(d)
        updates, opt_d = tx.update(grads, opt_d)
        d = optax.apply_updates(d, updates)

        loss_g, grads = jax.value_and_grad(lambda g: jnp.mean(jax.nn.softplus(-kit.mlp(d, generate(g, b)))))(g)
        updates, opt_g = tx.update(grads, opt_g)
        return (optax.apply_updates(g, updates), d, opt_g, opt_d, key), {"d": loss_d, "g": loss_g}

    g, d = kit.dense(3, 6, WIDTH), kit.dense(WIDTH, 6, 1, seed=1)
    state = (g, d, kit.warm(tx.init(g)), kit.warm(tx.init(d)), jax.random.key(4))
    return Program(step, (state, kit.normal(16, WIDTH)))


@case(item=9, batch=12)
def gan_with_gradient_penalty() -> Program:
    """A Wasserstein critic: derivatives by the inputs inside the loss."""

    def step(critic: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        def loss_fn(critic: Any) -> Any:
            score = lambda x: kit.mlp(critic, x)[0]  # noqa: E731
            mix = jax.random.uniform(key, (batch["real"].shape[0], 1), batch["real"].dtype)
            between = mix * batch["real"] + (1 - mix) * batch["fake"]
            slopes = jnp.linalg.norm(jax.vmap(jax.grad(score))(between), axis=-1)
            distance = jax.vmap(score)(batch["fake"]).mean() - jax.vmap(score)(batch["real"]).mean()
            return distance + 10.0 * jnp.mean((slopes - 1.0) ** 2), distance

        (loss, distance), grads = jax.value_and_grad(loss_fn, has_aux=True)(critic)
        return kit.sgd(critic, grads, 0.01), loss, distance

    batch = {"real": kit.normal(12, WIDTH), "fake": kit.normal(12, WIDTH, seed=1)}
    return Program(step, (kit.dense(WIDTH, 6, 1), batch, jax.random.key(0)))


def _rollout(batch: int) -> dict[str, jax.Array]:
    return {
        "observation": kit.normal(batch, WIDTH),
        "action": kit.integers(3, batch),
        "log_prob": kit.normal(batch, scale=0.2) - 1.0,
        "advantage": kit.normal(batch, seed=2),
        "target": kit.normal(batch, seed=3),
    }


def _ppo_loss(params: Any, batch: dict[str, jax.Array]) -> Any:
    logits = jax.nn.log_softmax(kit.mlp(params["policy"], batch["observation"]))
    log_prob = jnp.take_along_axis(logits, batch["action"][:, None], axis=1)[:, 0]
    ratio = jnp.exp(log_prob - batch["log_prob"])
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
    value = jnp.mean((kit.mlp(params["value"], batch["observation"])[:, 0] - batch["target"]) ** 2)
    entropy = -jnp.sum(jnp.exp(logits) * logits, axis=-1).mean()
    clipped = jnp.mean((jnp.abs(ratio - 1.0) > 0.2).astype(ratio.dtype))
    return policy + 0.5 * value - 0.01 * entropy, {"clipped": clipped, "entropy": entropy}


def _ppo_params() -> Any:
    return {"policy": kit.dense(WIDTH, 6, 3), "value": kit.dense(WIDTH, 6, 1, seed=1)}


@case(item=9)
def ppo_epochs() -> Program:
    """Several passes over the same rollout, an update in each: the passes are inside a scan's body."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def step(state: Any, rollout: dict[str, jax.Array]) -> Any:
        def epoch(state: Any, _: None) -> Any:
            params, opt_state = state
            (loss, aux), grads = jax.value_and_grad(_ppo_loss, has_aux=True)(params, rollout)
            updates, opt_state = tx.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), (loss, aux)

        return lax.scan(epoch, state, None, length=3)

    params = _ppo_params()
    return Program(step, ((params, kit.warm(tx.init(params))), _rollout(16)))


@case(item=9)
def ppo_epochs_and_minibatches() -> Program:
    """Every epoch permutes the rollout and goes over it in minibatches."""

    def step(state: Any, rollout: dict[str, jax.Array]) -> Any:
        def epoch(state: Any, _: None) -> Any:
            params, key = state
            key, use = jax.random.split(key)
            order = jax.random.permutation(use, rollout["action"].shape[0])
            minibatches = jax.tree.map(lambda x: x[order].reshape(2, -1, *x.shape[1:]), rollout)

            def update(params: Any, minibatch: Any) -> Any:
                (loss, aux), grads = jax.value_and_grad(_ppo_loss, has_aux=True)(params, minibatch)
                return kit.sgd(params, grads), (loss, aux)

            params, metrics = lax.scan(update, params, minibatches)
            return (params, key), metrics

        return lax.scan(epoch, state, None, length=2)

    return Program(step, ((_ppo_params(), jax.random.key(1)), _rollout(16)))


@case(item=9, batch=12)
def advantage_estimation_and_policy_gradient() -> Program:
    """A reversed scan over time per environment, a policy gradient with entropy."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        values = kit.mlp(params["value"], batch["observation"])[..., 0]

        def back(carry: jax.Array, inputs: Any) -> Any:
            reward, done, value, following = inputs
            carry = reward + 0.9 * following * (1 - done) - value + 0.9 * 0.95 * (1 - done) * carry
            return carry, carry

        inputs = jax.tree.map(
            lambda x: jnp.swapaxes(x, 0, 1), (batch["reward"], batch["done"], values[:, :-1], values[:, 1:])
        )
        _, advantages = lax.scan(back, jnp.zeros(values.shape[0], values.dtype), inputs, reverse=True)
        advantages = lax.stop_gradient(advantages.T)
        targets = lax.stop_gradient(advantages + values[:, :-1])

        def loss_fn(params: Any) -> jax.Array:
            logits = jax.nn.log_softmax(kit.mlp(params["policy"], batch["observation"][:, :-1]))
            chosen = jnp.take_along_axis(logits, batch["action"][..., None], axis=-1)[..., 0]
            baseline = kit.mlp(params["value"], batch["observation"][:, :-1])[..., 0]
            return -jnp.mean(chosen * advantages) + jnp.mean(optax.huber_loss(baseline, targets))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss, advantages

    batch = {
        "observation": kit.normal(12, 5, WIDTH),
        "action": kit.integers(3, 12, 4),
        "reward": kit.normal(12, 4),
        "done": (kit.uniform(12, 4) < 0.2).astype(kit.real()),
    }
    return Program(step, (_ppo_params(), batch))


@case(item=9)
def dqn_with_target_network() -> Program:
    """Double Q-learning with importance weights; the target network is replaced every third step."""

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, target, count = state
        best = jnp.argmax(kit.mlp(params, batch["next"]), axis=-1)
        following = jnp.take_along_axis(kit.mlp(target, batch["next"]), best[:, None], axis=-1)[:, 0]
        goal = batch["reward"] + 0.9 * (1 - batch["done"]) * following

        def loss_fn(params: Any) -> Any:
            q = kit.mlp(params, batch["observation"])
            error = jax.vmap(lambda q, a: q[a])(q, batch["action"]) - goal
            weights = batch["weight"] / batch["weight"].max()
            return jnp.mean(weights * optax.huber_loss(error)), jnp.abs(error)

        (loss, priorities), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        params = kit.sgd(params, grads)
        target = optax.periodic_update(params, target, count, 3)
        return (params, target, count + 1), loss, priorities

    batch = {
        "observation": kit.normal(16, WIDTH),
        "next": kit.normal(16, WIDTH, seed=1),
        "action": kit.integers(3, 16),
        "reward": kit.normal(16),
        "done": (kit.uniform(16) < 0.3).astype(kit.real()),
        "weight": kit.uniform(16, low=0.1, high=1.0),
    }
    state = (kit.dense(WIDTH, 6, 3), kit.dense(WIDTH, 6, 3, seed=1), jnp.asarray(3, jnp.int32))
    return Program(step, (state, batch))


@case(item=9, batch=12)
def actor_critic_with_entropy_temperature() -> Program:
    """Soft actor-critic: reparametrized actions, three losses, three updates, a learned temperature."""

    def step(state: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        actor, critic, log_alpha = state

        def act(actor: Any) -> tuple[jax.Array, jax.Array]:
            mean, log_std = jnp.split(kit.mlp(actor, batch["x"]), 2, axis=-1)
            noise = jax.random.normal(key, mean.shape, mean.dtype)
            action = jnp.tanh(mean + jnp.exp(0.1 * log_std) * noise)
            return action, jnp.sum(-0.5 * noise**2 - 0.1 * log_std - jnp.log1p(-(action**2) + 1e-6), axis=-1)

        def q(critic: Any, action: jax.Array) -> jax.Array:
            return kit.mlp(critic, jnp.concatenate([batch["x"], action], axis=-1))[:, 0]

        critic_loss, critic_grads = jax.value_and_grad(lambda c: jnp.mean((q(c, batch["action"]) - batch["y"]) ** 2))(
            critic
        )
        critic = kit.sgd(critic, critic_grads)

        def actor_loss(actor: Any) -> Any:
            action, log_prob = act(actor)
            return jnp.mean(jnp.exp(log_alpha) * log_prob - q(critic, action)), log_prob

        (loss, log_prob), actor_grads = jax.value_and_grad(actor_loss, has_aux=True)(actor)
        log_alpha = log_alpha + 0.1 * jnp.mean(log_prob + 2.0)
        return (kit.sgd(actor, actor_grads), critic, log_alpha), (critic_loss, loss)

    batch = {"x": kit.normal(12, WIDTH), "action": kit.uniform(12, 2, low=-1.0), "y": kit.normal(12)}
    state = (kit.dense(WIDTH, 6, 4), kit.dense(WIDTH + 2, 6, 1, seed=1), jnp.asarray(0.1, kit.real()))
    return Program(step, (state, batch, jax.random.key(0)))


@case(item=9)
def vae() -> Program:
    def step(params: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            mean, log_var = jnp.split(kit.mlp(params["encoder"], x), 2, axis=-1)
            z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape, mean.dtype)
            logits = kit.mlp(params["decoder"], z)
            reconstruction = jnp.sum(optax.sigmoid_binary_cross_entropy(logits, jax.nn.sigmoid(x)), axis=-1)
            divergence = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), axis=-1)
            return (reconstruction + divergence).mean(), {"kl": divergence.mean(), "z": z}

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), loss, aux

    params = {"encoder": kit.dense(WIDTH, 6, 4), "decoder": kit.dense(2, 6, WIDTH)}
    return Program(step, (params, kit.normal(16, WIDTH), jax.random.key(6)))


@case(item=9, batch=12)
def vae_vector_quantized() -> Program:
    """A codebook with straight-through gradients, updated by running sums over the batch."""

    def step(state: Any, x: jax.Array) -> Any:
        params, codebook, counts, sums = state

        def loss_fn(params: Any) -> Any:
            z = kit.mlp(params["encoder"], x)
            distance = jnp.sum((z[:, None] - codebook[None]) ** 2, axis=-1)
            code = jnp.argmin(distance, axis=-1)
            quantized = codebook[code]
            through = z + lax.stop_gradient(quantized - z)
            errors = jnp.sum((kit.mlp(params["decoder"], through) - x) ** 2, axis=-1)
            return jnp.mean(errors) + 0.25 * jnp.mean((z - lax.stop_gradient(quantized)) ** 2), (z, code)

        (loss, (z, code)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        one_hot = jax.nn.one_hot(code, codebook.shape[0], dtype=x.dtype)
        counts = 0.9 * counts + 0.1 * one_hot.sum(axis=0)
        sums = 0.9 * sums + 0.1 * one_hot.T @ z
        usage = one_hot.mean(axis=0)
        perplexity = jnp.exp(-jnp.sum(usage * jnp.log(usage + 1e-10)))
        return (kit.sgd(params, grads), sums / counts[:, None], counts, sums), loss, perplexity, code

    params = {"encoder": kit.dense(WIDTH, 6, 2), "decoder": kit.dense(2, 6, WIDTH)}
    state = (params, kit.normal(5, 2), kit.uniform(5, low=1.0, high=2.0), kit.normal(5, 2, seed=1))
    return Program(step, (state, kit.normal(12, WIDTH)))


@case(item=9)
def diffusion() -> Program:
    """A random timestep and noise per example, weights by signal-to-noise ratio, averaged parameters."""
    betas = jnp.linspace(1e-2, 0.3, 10)

    def step(state: Any, x: jax.Array) -> Any:
        params, average, key = state
        key, time_key, noise_key = jax.random.split(key, 3)
        signal = jnp.cumprod(1.0 - betas).astype(x.dtype)
        t = jax.random.randint(time_key, (x.shape[0],), 0, betas.shape[0])
        noise = jax.random.normal(noise_key, x.shape, x.dtype)
        alpha = signal[t][:, None]
        noisy = jnp.sqrt(alpha) * x + jnp.sqrt(1 - alpha) * noise
        embedding = jnp.stack([jnp.sin(t / 3.0), jnp.cos(t / 3.0)], axis=-1).astype(x.dtype)

        def loss_fn(params: Any) -> jax.Array:
            predicted = kit.mlp(params, jnp.concatenate([noisy, embedding], axis=-1))
            weights = jnp.minimum(alpha / (1 - alpha), 5.0)
            return jnp.mean(weights * (predicted - noise) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        params = kit.sgd(params, grads)
        return (params, optax.incremental_update(params, average, 0.01), key), loss, t

    params = kit.dense(WIDTH + 2, 6, WIDTH)
    return Program(step, ((params, kit.dense(WIDTH + 2, 6, WIDTH, seed=1), jax.random.key(2)), kit.normal(16, WIDTH)))


@case(item=9, batch=12)
def diffusion_sampling() -> Program:
    """The reverse process: a scan over timesteps with new noise in each."""

    def step(params: Any, x: jax.Array, key: jax.Array) -> Any:
        def body(carry: Any, t: jax.Array) -> Any:
            x, key = carry
            key, use = jax.random.split(key)
            noise = jax.random.normal(use, x.shape, x.dtype)
            x = x - 0.1 * kit.mlp(params, x) + jnp.where(t > 0, 0.05, 0.0) * noise
            return (x, key), jnp.linalg.norm(x, axis=-1)

        (x, _), norms = lax.scan(body, (x, key), jnp.arange(4)[::-1])
        return x, norms

    return Program(step, (kit.dense(WIDTH, 6, WIDTH), kit.normal(12, WIDTH), jax.random.key(2)))


@case(item=9)
def maml() -> Program:
    """The batch is one of tasks: an inner gradient step on each, the outer gradient through it."""

    def step(params: Any, tasks: dict[str, jax.Array]) -> Any:
        def task_loss(params: Any, task: dict[str, jax.Array]) -> Any:
            def inner(p: Any, _: None) -> Any:
                loss, grads = jax.value_and_grad(_squared)(p, task["x"], task["y"])
                return kit.sgd(p, grads, 0.01), loss

            adapted, losses = lax.scan(inner, params, None, length=2)
            return _squared(adapted, task["query_x"], task["query_y"]), losses

        def loss_fn(params: Any) -> Any:
            outer, inner = jax.vmap(task_loss, (None, 0))(params, tasks)
            return outer.mean(), (outer, inner)

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads, 0.01), loss, aux

    tasks = {
        "x": kit.normal(16, 3, WIDTH),
        "y": kit.normal(16, 3, 1, seed=1),
        "query_x": kit.normal(16, 2, WIDTH, seed=2),
        "query_y": kit.normal(16, 2, 1, seed=3),
    }
    return Program(step, (kit.dense(WIDTH, 5, 1), tasks))


@case(item=9, batch=12)
def hessian_vector_product() -> Program:
    """Forward over reverse; the curvature along the gradient sets the rate."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return _squared(params, batch["x"], batch["y"]) / batch["x"].shape[0]

        grads = jax.grad(loss_fn)(params)
        _, curved = jax.jvp(jax.grad(loss_fn), (params,), (grads,))
        dot = lambda a, b: sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))  # noqa: E731
        rate = dot(grads, grads) / jnp.maximum(jnp.abs(dot(grads, curved)), 1e-6)
        return kit.sgd(params, grads, 0.1 * jnp.minimum(rate, 1.0)), rate

    return Program(step, (kit.dense(WIDTH, 6, 2), _regression(12)))


@case(item=9)
def conjugate_gradient_step() -> Program:
    """Hessian-free: a loop of Gauss-Newton products, each of them a sum over the batch."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        flat, unravel = ravel_pytree(params)

        def outputs(flat: jax.Array) -> jax.Array:
            return kit.mlp(unravel(flat), batch["x"])

        residual = outputs(flat) - batch["y"]
        size = batch["x"].shape[0]
        _, pull = jax.vjp(outputs, flat)
        (gradient,) = pull(residual / size)

        def product(v: jax.Array) -> jax.Array:
            _, tangent = jax.jvp(outputs, (flat,), (v,))
            return pull(tangent / size)[0] + 0.1 * v

        def body(_: int, state: Any) -> Any:
            x, r, p = state
            q = product(p)
            a = jnp.vdot(r, r) / jnp.vdot(p, q)
            new = r - a * q
            return x + a * p, new, new + jnp.vdot(new, new) / jnp.vdot(r, r) * p

        x, r, _ = lax.fori_loop(0, 3, body, (jnp.zeros_like(flat), -gradient, -gradient))
        return unravel(flat + x), jnp.linalg.norm(r)

    return Program(step, (kit.dense(WIDTH, 4, 2), _regression()))


@case(item=9, batch=12)
def line_search_by_optax() -> Program:
    """L-BFGS: the line search evaluates the loss on the whole batch inside a while loop."""
    tx = optax.lbfgs(memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(max_backtracking_steps=5))

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, opt_state = state

        def loss_fn(params: Any) -> jax.Array:
            return _squared(params, batch["x"], batch["y"]) / batch["x"].shape[0]

        value, grad = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grad, opt_state, params, value=value, grad=grad, value_fn=loss_fn)
        return (optax.apply_updates(params, updates), opt_state), value

    params = kit.dense(WIDTH, 4, 2)
    return Program(step, ((params, tx.init(params)), _regression(12)))


@case(item=9)
def kronecker_factors() -> Program:
    """K-FAC: second moments of activations and of gradients per example precondition the update."""

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        w, a_average, g_average = state
        x, size = batch["x"], batch["x"].shape[0]
        error = x @ w - batch["y"]
        a_average = 0.9 * a_average + 0.1 * x.T @ x / size
        g_average = 0.9 * g_average + 0.1 * error.T @ error / size
        gradient = x.T @ error / size
        damped = [m + 0.1 * jnp.eye(m.shape[0], dtype=m.dtype) for m in (a_average, g_average)]
        natural = jnp.linalg.solve(damped[0], jnp.linalg.solve(damped[1], gradient.T).T)
        return (w - natural, a_average, g_average), jnp.linalg.norm(natural)

    eye = lambda n: jnp.eye(n, dtype=kit.real())  # noqa: E731
    return Program(step, ((kit.normal(WIDTH, 2), eye(WIDTH), eye(2)), _regression()))


@case(item=9, batch=12)
def adversarial_training() -> Program:
    """Inputs are moved up the loss for three steps, then the parameters down."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            return _squared(params, x, batch["y"]) / x.shape[0]

        def attack(_: int, x: jax.Array) -> jax.Array:
            x = x + 0.05 * jnp.sign(jax.grad(loss_fn, argnums=1)(params, x))
            return jnp.clip(x, batch["x"] - 0.1, batch["x"] + 0.1)

        moved = lax.stop_gradient(lax.fori_loop(0, 3, attack, batch["x"]))
        loss, grads = jax.value_and_grad(loss_fn)(params, moved)
        return kit.sgd(params, grads, 0.01), loss, moved

    return Program(step, (kit.dense(WIDTH, 6, 2), _regression(12)))


@case(item=9)
def physics_informed() -> Program:
    """Second derivatives by the inputs, per point, in the loss; boundary points are shared by all."""

    def step(params: Any, points: jax.Array, boundary: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            u = lambda x: kit.mlp(params, x)[0]  # noqa: E731
            laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(points)
            inside = jnp.mean((laplacian + jnp.sin(points[:, 0])) ** 2)
            return inside + jnp.mean(jax.vmap(u)(boundary) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads, 0.01), loss

    return Program(step, (kit.dense(2, 5, 1), kit.uniform(16, 2), kit.uniform(6, 2, seed=1)))


@case(item=9, batch=12)
def normalizing_flow() -> Program:
    """Coupling layers with log-determinants, and a linear layer whose determinant no example touches."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            z = x @ params["linear"]
            log_det = jnp.linalg.slogdet(params["linear"])[1]
            for net in params["nets"]:
                a, b = jnp.split(z, 2, axis=-1)
                shift, log_scale = jnp.split(kit.mlp(net, a), 2, axis=-1)
                log_scale = jnp.tanh(log_scale)
                z = jnp.concatenate([b * jnp.exp(log_scale) + shift, a], axis=-1)
                log_det = log_det + log_scale.sum(axis=-1)
            return -jnp.mean(jax.scipy.stats.norm.logpdf(z).sum(axis=-1) + log_det)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    nets = [kit.dense(2, 5, 4, seed=i) for i in range(2)]
    params = {"linear": kit.normal(WIDTH, WIDTH) + 2 * jnp.eye(WIDTH, dtype=kit.real()), "nets": nets}
    return Program(step, (params, kit.normal(12, WIDTH)))


@case(item=9)
def neural_ode_and_energy_model() -> Program:
    """Runge-Kutta in a scan, then Langevin sampling by the energy's own gradient, contrastive divergence."""

    def step(params: Any, x: jax.Array, key: jax.Array) -> Any:
        def energy(params: Any, x: jax.Array) -> jax.Array:
            def rk(z: jax.Array, _: None) -> Any:
                f = lambda z: jnp.tanh(kit.mlp(params["field"], z))  # noqa: E731
                k1 = f(z)
                k2 = f(z + 0.05 * k1)
                return z + 0.1 * k2, None

            z, _ = lax.scan(rk, x, None, length=2)
            return kit.mlp(params["energy"], z)[..., 0]

        def langevin(carry: Any, _: None) -> Any:
            sample, key = carry
            key, use = jax.random.split(key)
            slope = jax.grad(lambda s: energy(params, s).sum())(sample)
            return (sample - 0.1 * slope + 0.1 * jax.random.normal(use, x.shape, x.dtype), key), None

        (negative, _), _ = lax.scan(langevin, (x, key), None, length=2)

        def loss_fn(params: Any) -> jax.Array:
            return energy(params, x).mean() - energy(params, negative).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss, negative

    params = {"field": kit.dense(WIDTH, 5, WIDTH), "energy": kit.dense(WIDTH, 5, 1)}
    return Program(step, (params, kit.normal(16, WIDTH), jax.random.key(9)))


@case(item=9, batch=12)
def distillation() -> Program:
    """A frozen teacher's soft targets, and a student's layer matched to the teacher's."""

    def step(student: Any, teacher: Any, batch: dict[str, jax.Array]) -> Any:
        targets = jax.nn.softmax(kit.mlp(teacher, batch["x"]) / 2.0)

        def loss_fn(student: Any) -> jax.Array:
            logits = kit.mlp(student, batch["x"])
            soft = optax.losses.kl_divergence(jax.nn.log_softmax(logits / 2.0), targets).mean()
            return 4.0 * soft + kit.cross_entropy(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(student)
        return kit.sgd(student, grads), loss

    batch = {"x": kit.normal(12, WIDTH), "y": kit.integers(3, 12)}
    args = (kit.dense(WIDTH, 4, 3), kit.dense(WIDTH, 8, 3, seed=1), batch)
    return Program(step, args, {"in_axes": (None, None, 0)})


@case(item=9)
def diagonal_fisher_and_influence() -> Program:
    """Squared gradients per example, and the example's gradient against the mean gradient."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        flat, unravel = ravel_pytree(params)
        per_example = jax.vmap(jax.grad(lambda f, x, y: _squared(unravel(f), x, y)), (None, 0, 0))
        grads = per_example(flat, batch["x"], batch["y"])
        fisher = jnp.mean(grads**2, axis=0)
        mean = grads.mean(axis=0)
        influence = grads @ (mean / (fisher + 0.1))
        return unravel(flat - 0.01 * mean / (fisher + 0.1)), fisher, influence

    return Program(step, (kit.dense(WIDTH, 4, 2), _regression()))
