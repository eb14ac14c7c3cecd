"""The virtualized transformer, compiled by the real TPU compiler for machines that are not there.

Knows the benchmark's compile command, which runs in a process of its own because the compiler loads a large library.
The reference is arithmetic: the gradient of every parameter crosses the devices once, and a few scalars.
"""

import json
import re
import sys

import jax
import pytest

from benchmarks import contenders, models
from tests.ahead import printed, program, said

pytestmark = pytest.mark.tpu

LARGE = pytest.param("v5e:16x16", 256, marks=pytest.mark.sweep)

NODES_PER_DEVICE = 4


def compile_for(topology: str, contender: str, layers: int) -> dict:
    """What the TPU compiler says about one contender's step."""
    command = [sys.executable, "-m", "benchmarks.tpu", topology, "--contenders", contender]
    command += ["--layers", str(layers), "--width", "64", "--length", "32", "--vocabulary", "512"]
    command += ["--nodes-per-device", str(NODES_PER_DEVICE), "--examples-per-node", "2"]
    return json.loads("\n".join(printed(*command)))


def bytes_of_gradient(layers: int) -> int:
    """Of all parameters, in float32."""
    made = models.transformer(layers=layers, width=64, length=32, vocabulary=512)
    return sum(4 * leaf.size for leaf in jax.tree.leaves(jax.eval_shape(made.init, jax.random.key(0))))


@pytest.mark.parametrize(("topology", "devices"), [("v5e:2x4", 8), LARGE])
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


@pytest.mark.parametrize(("topology", "devices"), [("v5e:8x8", 64), LARGE])
def test_sums_in_tree_order_travel_once(topology, devices):
    """Small sums too; chunks of odd sizes twice, as the TPU compiler gathers them by an all-reduce."""
    found = compile_for(topology, contenders.INVARIANT, layers=1)
    once = 2 * (devices - 1) / devices * bytes_of_gradient(layers=1)  # in a ring
    assert found["inside"] == 0
    assert once <= found["outside_bytes"] <= 2 * once


def test_a_collective_in_the_loop_would_be_seen():
    found = compile_for("v5e:2x4", contenders.MICROBATCH, layers=1)
    assert found["inside"] > 0


MOVING = re.compile(r"(dynamic-slice|dynamic-update-slice|select|broadcast|bitcast|copy|constant|parameter)\(")
"""What only moves elements: a single node's examples come by a select, in place of a slice."""


def arithmetic(fusions: list[str]) -> list[str]:
    """Those that compute something."""
    return sorted(text for text in fusions if any(not MOVING.search(line) for line in text.splitlines()))


def test_a_node_is_the_same_program_whatever_the_number_of_devices():
    """All arithmetic of a node, and of adding two blocks of the tree; only buffers differ in size."""
    said = printed(*program("same_program_on_tpus"))
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


def test_a_node_is_the_same_program_where_it_reads_several_inputs_and_keeps_values():
    """Two inputs are packed, and barriers are all that is between a node and the buffers of its device."""
    found = [json.loads(line)["node"] for line in printed(*program("same_node_on_tpus")) if line.startswith("{")]
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
    """A contrastive step on one device: beside gradient caching by hand half a gradient, 10% of its time."""
    ways = "by hand,fast,invariant in one lane,invariant on the host"
    command = ["benchmarks.bits_memory", "--tpu", "v5e:2x4", "--models", "contrastive", "--ways", ways]
    lines = printed(sys.executable, "-m", *command)
    rows = {row["way"]: row for row in map(json.loads, lines)}
    hand, lane = rows["by hand"], rows["invariant in one lane"]
    assert hand["cycles"] > 0
    assert lane["cycles"] <= 1.1 * hand["cycles"]
    assert rows["fast"]["cycles"] <= 1.05 * hand["cycles"]
    most = hand["temporary_mib"] + hand["gradients_mib"] / 2
    assert lane["temporary_mib"] <= most
    hosted = rows["invariant on the host"]
    assert hosted["temporary_mib"] <= most
    assert hosted["host_mib"] >= 1.9 * hand["gradients_mib"]  # two sums wait, but for small arrays


def test_what_a_devices_only_node_contributes_is_the_total():
    """With batch norms, so in passes. One node on one device: beside the step as written no more than its gradient, and
    that once more where it is updated. One on each of four: no more than two nodes on each of them take."""
    found = said("single_node_on_tpus")
    alone, one, two = found["found"]
    gradient = 4 * (2 * 1024 * 8192 + 8192 * 8192) / 2**20
    assert alone <= found["plain"] + 2 * gradient
    assert one <= two


def test_what_is_spread_in_an_update_of_shards_has_no_memory_of_its_own():
    """The corrections of Adam's moments are two numbers, by which all elements of a shard are divided."""
    found = said("spread_update_on_tpus")
    assert "fusion" in found and "broadcast" not in found
