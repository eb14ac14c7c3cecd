"""A step for TPUs of several sizes: a line with the code of one node in each compiled program."""

import json

import jax
import jax.numpy as jnp

import vnode
from benchmarks import hlo, tpu


def step(w, x, y):
    def loss(w):
        a, b = jnp.tanh(x @ w["a"]) @ w["b"], jnp.tanh(y @ w["a"]) @ w["b"]
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(a @ b.T)))

    value, grads = jax.value_and_grad(loss)(w)
    return value, jax.tree.map(lambda a, g: a - 0.1 * g, w, grads)


w = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in {"a": (128, 256), "b": (256, 128)}.items()}
x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
devices = tpu.topology("v5e:2x4")
for count in (1, 2, 8):
    text = vnode.virtualize(step, virtual_nodes=16).on(devices[:count]).lower(w, x, x).compile().as_text()
    module = hlo.parse(text)
    names, found = hlo.named_loops(module), []
    for visit in module.walk():
        within = names.get(visit.loops[-1][0], ()) if visit.loops else ()
        if visit.instruction.opcode == "fusion" and not visit.fused and within[-1:] == ("run",):
            found.append(hlo.canonical(module, visit.instruction.called()["calls"][0]))
    print(json.dumps({"devices": count, "node": found}))
