"""The table of regret: devices of compiled collectives, which plan is best, and models that can be trained."""

from typing import Any

import jax
import pytest

from benchmarks.partition_models.realistic import REALISTIC
from benchmarks.regret import exchange_seconds, table
from vnode.partition import Machine
from vnode.partition.hlo import Instruction, device_groups

TEXT = {"batch": 4, "length": 8, "vocabulary": 32, "layers": 2, "width": 16}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {**TEXT, "hidden": 32, "heads": 4, "kv_heads": 2},
    "mamba": {**TEXT, "inner": 32, "state": 4, "rank": 2},
    "vit": {"batch": 4, "image": 8, "patch": 4, "layers": 2, "width": 16, "heads": 2, "classes": 8},
    "moe": {**TEXT, "hidden": 32, "heads": 2, "experts": 4, "capacity": 3},
    "dlrm": {"batch": 16, "tables": 3, "rows": 16, "width": 4, "dense": 3, "bottom": (8,), "top": (8,)},
    "muon": {**TEXT, "heads": 2},
    "gnn": {"batch": 4, "nodes": 8, "edges": 16, "features": 4, "layers": 2, "width": 16},
    "unet": {"batch": 4, "image": 8, "channels": (8, 16), "width": 16},
    "t5": {**TEXT, "hidden": 32, "heads": 2},
    "dit": {"batch": 4, "latent": 8, "layers": 2, "width": 16, "heads": 2, "classes": 4},
}


@pytest.mark.thorough
@pytest.mark.sampled(1, thorough=0)
@pytest.mark.parametrize("name", REALISTIC)
def test_loss_falls(name: str) -> None:
    """A model whose loss does not fall on one batch is not what its users train."""
    model = REALISTIC[name](**SMALL[name])
    state, batch, step = model.initial(jax.random.key(0)), model.examples(jax.random.key(1)), jax.jit(model.step)
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0], losses


def groups_of(rest: str) -> list[tuple[int, ...]]:
    return [*device_groups(Instruction("c", "f32[8]", "all-reduce", rest))]


def test_groups_are_read_in_both_notations() -> None:
    assert groups_of("%x), replica_groups={{0,2},{1,3}}, to_apply=%add") == [(0, 2), (1, 3)]
    assert groups_of("%x), replica_groups=[2,4]<=[4,2]T(1,0)") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups_of("%x), source_target_pairs={{0,1},{1,0}}") == [(0, 1), (1, 0)]


def test_exchange_is_by_the_machines_numbers() -> None:
    """A mesh's first two devices are neighbours on the torus, whatever the machine calls them."""
    machine, mesh = Machine.tpu("v5e:2x4"), {"vnode": 4, "model": 2}
    pairs = machine.mesh(mesh).groups("model")
    want = 3 * machine.collective("all_reduce", pairs).seconds(1 << 20)
    listed = [[2 * i, 2 * i + 1] for i in range(4)]
    assert exchange_seconds([["all-reduce", 1 << 20, 2, 3, listed]], machine, mesh) == pytest.approx(want)
    assert exchange_seconds([["all-reduce", 1 << 20, 2, 3, []]], machine, mesh) == pytest.approx(want)


def test_regret_is_against_the_best_of_both_runs() -> None:
    def plan(name: str, seconds: float, memory: int) -> dict[str, Any]:
        said = {"memory": memory * 2, "seconds": seconds, "compute": seconds, "exchange": 0.0}
        made = {"name": name, "mesh": "8", "seconds": seconds, "memory": memory, "said": said, "on_host": 0}
        return {**made, "search_seconds": 10.0}

    before = {
        "a v5e:2x4": {"plan": plan("FSDP", 2.0, 100 << 20), "experts": {"Megatron 4x2": plan("M", 1.0, 50 << 20)}}
    }
    after = {"a v5e:2x4": {"plan": plan("searched", 1.5, 100 << 20), "experts": {"slow": plan("slow", 9.0, 1)}}}
    (row,) = table(before, after).rows
    assert row[:3] == ["a", "v5e:2x4", "FSDP 8: 2000.00 ms, 100 MiB"]
    assert row[4:] == ["Megatron 4x2: 1000.00 ms, 50 MiB", "+50.0%", "+100.0%", "+100%", "+100%", "10", "10"]
