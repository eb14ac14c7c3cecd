"""The virtualized transformer, compiled by the real TPU compiler for machines that are not there.

Knows the benchmark's compile command, which runs in a process of its own because the compiler loads a large library.
The reference is arithmetic: the gradient of every parameter crosses the devices once, and a few scalars.
"""

import importlib.util
import json
import re

import jax
import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("the TPU compiler is not installed (extra tpu-aot; x86-64 Linux only)", allow_module_level=True)

from benchmarks import contenders, models
from tests.ahead import printed, said

pytestmark = pytest.mark.thorough

NODES_PER_DEVICE = 4


def compile_for(topology: str, contender: str, layers: int) -> dict:
    """What the TPU compiler says about one contender's step."""
    command = ["-m", "benchmarks.tpu", topology, "--contenders", contender]
    command += ["--layers", str(layers), "--width", "64", "--length", "32", "--vocabulary", "512"]
    command += ["--nodes-per-device", str(NODES_PER_DEVICE), "--examples-per-node", "2"]
    return json.loads("\n".join(printed(*command)))


def bytes_of_gradient(layers: int) -> int:
    """Of all parameters, in float32."""
    made = models.transformer(layers=layers, width=64, length=32, vocabulary=512)
    return sum(4 * leaf.size for leaf in jax.tree.leaves(jax.eval_shape(made.init, jax.random.key(0))))


@pytest.mark.parametrize(("topology", "devices"), [("v5e:2x4", 8), ("v5e:16x16", 256)])
def test_reduces_across_devices_once_and_outside_the_loop(topology, devices):
    found = compile_for(topology, contenders.VNODE, layers=2)
    gradient = bytes_of_gradient(layers=2)

    assert found["nodes"] == devices * NODES_PER_DEVICE
    # The model runs in the loop: what follows would be empty words of a program without one.
    assert found["loop_cycles"] > 0.5 * found["cycles"]
    assert found["inside"] == 0
    # Summed loss, weight and correct predictions come on top of the gradient.
    times = 2 * (devices - 1) / devices  # in a ring
    assert times * gradient <= found["outside_bytes"] <= times * (gradient + 64)


@pytest.mark.parametrize(
    ("topology", "devices"), [("v5e:8x8", 64), pytest.param("v5e:16x16", 256, marks=pytest.mark.sweep)]
)
def test_sums_in_tree_order_travel_once(topology, devices):
    """Small sums too; chunks of odd sizes twice, as the TPU compiler gathers them by an all-reduce."""
    found = compile_for(topology, contenders.INVARIANT, layers=1)
    once = 2 * (devices - 1) / devices * bytes_of_gradient(layers=1)  # in a ring
    assert found["inside"] == 0
    assert once <= found["outside_bytes"] <= 2 * once


def test_a_collective_in_the_loop_would_be_seen():
    found = compile_for("v5e:2x4", contenders.MICROBATCH, layers=1)
    assert found["inside"] > 0


SAME_PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
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
"""


MOVING = re.compile(r"(dynamic-slice|dynamic-update-slice|select|broadcast|bitcast|copy|constant|parameter)\(")
"""What only moves elements: a single node's examples come by a select, in place of a slice."""


def arithmetic(fusions: list[str]) -> list[str]:
    """Those that compute something."""
    return sorted(text for text in fusions if any(not MOVING.search(line) for line in text.splitlines()))


def test_a_node_is_the_same_program_whatever_the_number_of_devices():
    """All arithmetic of a node, and of adding two blocks of the tree; only buffers differ in size."""
    said = printed("-c", SAME_PROGRAM)
    found = [json.loads(line) for line in said if line.startswith("{")]
    assert [row["devices"] for row in found] == [1, 2, 8]

    nodes = [arithmetic(row["node"]) for row in found]
    assert any("convolution" in text for text in nodes[0])
    assert any("tanh" in text for text in nodes[0])
    assert nodes == [nodes[0]] * 3
    # A device that holds two nodes, one run, merges nothing by itself. Else: the first block, which is the left one
    # and which the loop carries, plus the one that comes, which stays as it is; and, of sixteen nodes, a block from the
    # stack plus the one that comes, which that loop carries.
    assert [row["firsts"] for row in found] == [[[True, True]] * 2] * 2 + [[]]
    assert [len(arithmetic(row["merges"])) for row in found] == [2, 0, 0]
    for text in [text for row in found for text in arithmetic(row["merges"])]:
        lines = dict(line.split(" = ", 1) for line in text.splitlines())
        *_, total = lines.values()
        left, right = re.findall(r" add\((v\d+), (v\d+)\)$", total)[0]
        assert re.search(r"(dynamic-slice|bitcast)\(", lines[left])
        assert lines[right].endswith("parameter(0)")
    # Across devices, each of which holds a block.
    four, other = "(((0 + 1) + 2) + 3)", "(((4 + 5) + 6) + 7)"
    assert [row["across"] for row in found] == [[], ["(0 + 1)"] * 2, [f"({four} + {other})"] * 2]
    assert json.loads(said[-1]) == ["((0 + 1) + 2)"] * 2  # one of them by an all-to-all


SAME_NODE = """
import json
import jax, jax.numpy as jnp
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
"""


def test_a_node_is_the_same_program_where_it_reads_several_inputs_and_keeps_values():
    """Two inputs are packed, and barriers are all that is between a node and the buffers of its device."""
    found = [json.loads(line)["node"] for line in printed("-c", SAME_NODE) if line.startswith("{")]
    assert len(found) == 3

    def plain(fusion: str) -> str:
        """Without the order of parameters, and of the operands of what commutes."""
        fusion = re.sub(r"parameter\(\d+\)", "parameter()", fusion)
        return re.sub(r"(add|maximum|multiply)\((v\d+), (v\d+)\)", lambda m: f"{m[1]}{sorted(m.group(2, 3))}", fusion)

    nodes = [sorted(map(plain, arithmetic(each))) for each in found]
    for word in ("convolution", "tanh", "exponential"):
        assert any(word in text for text in nodes[0])
    assert any("slice={[1:2]" in text for text in nodes[0])  # the second of two inputs
    for text in nodes[0]:  # none that also writes to a buffer of the device, or reads one by position
        assert not ("convolution" in text and "dynamic-update-slice" in text)
    assert nodes == [nodes[0]] * 3


def test_the_same_bits_cost_little_memory_and_in_one_lane_little_time():
    """A contrastive step on one device: beside gradient caching by hand half a gradient, a twentieth of its time."""
    ways = "by hand,fast,invariant in one lane,invariant on the host"
    lines = printed("-m", "benchmarks.bits_memory", "--tpu", "v5e:2x4", "--models", "contrastive", "--ways", ways)
    rows = {row["way"]: row for row in map(json.loads, lines)}
    hand, lane = rows["by hand"], rows["invariant in one lane"]
    assert hand["cycles"] > 0
    assert lane["cycles"] <= 1.05 * hand["cycles"]
    assert rows["fast"]["cycles"] <= 1.05 * hand["cycles"]
    most = hand["temporary_mib"] + hand["gradients_mib"] / 2
    assert lane["temporary_mib"] <= most
    hosted = rows["invariant on the host"]
    assert hosted["temporary_mib"] <= most
    assert hosted["host_mib"] >= 1.9 * hand["gradients_mib"]  # two sums wait, but for small arrays


ALONE = """
import json
import jax, jax.numpy as jnp
import vnode
from benchmarks import tpu
from jax.sharding import SingleDeviceSharding
from vnode.placement.temporary import temporary_of

def normal(x):
    mean = jnp.mean(x, 0)
    return (x - mean) * jax.lax.rsqrt(jnp.mean((x - mean) ** 2, 0) + 1e-3)

def step(w, x):
    def loss(w):
        return jnp.mean((jnp.tanh(normal(jnp.tanh(x @ w[0])) @ w[1]) @ w[2] - x) ** 2)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))

sizes = ((1024, 8192), (8192, 8192), (8192, 1024))
w, x = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes], jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
devices = list(tpu.topology("v5e:2x2"))
found = []
for nodes, count in ((1, 1), (4, 4), (8, 4)):
    placement = vnode.Placement(nodes, devices[:count])
    virtual = vnode.virtualize(step, virtual_nodes=nodes, placement=placement, donate_argnums=0)
    found.append(temporary_of(virtual.lower(w, x).compile()).held / 2**20)
alone = SingleDeviceSharding(devices[0])
given = [[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=alone) for leaf in w]]
given.append(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone))
plain = jax.jit(step, donate_argnums=0).lower(*given).compile()
print(json.dumps({"found": found, "plain": temporary_of(plain).held / 2**20}))
"""


def test_what_a_devices_only_node_contributes_is_the_total():
    """With batch norms, so in passes. One node on one device: beside the step as written no more than its gradient, and
    that once more where it is updated. One on each of four: no more than two nodes on each of them take."""
    found = said(ALONE)
    alone, one, two = found["found"]
    gradient = 4 * (2 * 1024 * 8192 + 8192 * 8192) / 2**20
    assert alone <= found["plain"] + 2 * gradient
    assert one <= two


SPREAD = """
import json
from benchmarks import tpu
import os
os.environ.update(tpu.ENVIRONMENT)
import jax, jax.numpy as jnp, numpy as np, optax
import vnode
from jax.sharding import Mesh, PartitionSpec
from vnode.partition.hlo import parse

tx = optax.adam(1e-2)

def step(state, x):
    w, slots = state
    updates, slots = tx.update(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), slots, w)
    return optax.apply_updates(w, updates), slots

w = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
mesh = Mesh(np.array(tpu.topology("v5e:2x4")).reshape(8), ("vnode",))
virtual = vnode.virtualize(
    step, virtual_nodes=8, placement=vnode.Placement(8, mesh=mesh), donate_argnums=0,
    partition={"^0$|mu|nu": PartitionSpec("vnode")},
)
args = (w, jax.eval_shape(tx.init, w)), jax.ShapeDtypeStruct((512, 2048), jnp.float32)
module = parse(virtual.lower(*args).compile().as_text())
alone = [visit.instruction for visit in module.walk() if not visit.fused]
print(json.dumps([each.opcode for each in alone if each.bytes == w.size * 4 // 8]))
"""


def test_what_is_spread_in_an_update_of_shards_has_no_memory_of_its_own():
    """The corrections of Adam's moments are two numbers, by which all elements of a shard are divided."""
    found = said(SPREAD)
    assert "fusion" in found and "broadcast" not in found
