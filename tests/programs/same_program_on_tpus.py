"""A step for TPUs of several sizes: a line with the fingerprint of each compiled program."""

import json

import jax
import jax.numpy as jnp

import vnode
from benchmarks import hlo, tpu


def step(w, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"]))(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads)


shapes = {"a": (128, 256), "b": (256, 8)}  # which travel by halves between pairs, and as they are
w = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
devices = tpu.topology("v5e:2x4")
for count in (1, 2, 8):
    placed = vnode.virtualize(step, virtual_nodes=16).on(devices[:count])
    text = placed.lower(w, jax.ShapeDtypeStruct((64, 128), jnp.float32)).compile().as_text()
    module = hlo.parse(text)
    has_node = lambda name: any(
        i.instruction.opcode == "convolution" for i in hlo.Module(name, module.computations).walk()
    )
    (body,) = [
        name
        for visit in module.walk()
        if visit.instruction.opcode == "while" and not visit.loops
        for name in visit.instruction.called()["body"]
        if has_node(name)
    ]
    inner = [i.called()["body"][0] for i in module.computations[body] if i.opcode == "while"]
    (run,) = [name for name in inner if has_node(name)]
    inner.remove(run)
    fused = lambda name: [
        hlo.canonical(module, i.called()["calls"][0]) for i in module.computations[name] if i.opcode == "fusion"
    ]
    merges = [f for name in inner for f in fused(name)]
    firsts = []
    for name in inner:
        lines = {i.name: i for i in module.computations[name]}
        carried = [*lines.values()][-1].operands
        for i in lines.values():
            if i.opcode == "add" and i.type.startswith("f32["):
                left, right = i.operands
                place = lines[left].rest.split("index=")[1].split(",")[0]
                firsts.append([int(place) == carried.index(i.name), right in carried])
    across = hlo.additions(module, count)
    found = {"devices": count, "node": fused(run), "merges": merges, "firsts": firsts, "across": across}
    print(json.dumps(found))
three = vnode.virtualize(step, virtual_nodes=3).on(devices[:3])
text = three.lower(w, jax.ShapeDtypeStruct((24, 128), jnp.float32)).compile().as_text()
print(json.dumps(hlo.additions(hlo.parse(text), 3)))
