"""Compiles a step with a persistent cache, for as many devices as argument 1 says."""

import sys

import jax
import jax.numpy as jnp

import vnode


def train_step(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


devices = jax.devices()[: int(sys.argv[1])]
step = vnode.virtualize(train_step, virtual_nodes=4).on(devices)
jax.block_until_ready(step(step.put(jnp.ones(3)), jnp.ones((8, 3))))
