"""A checkpoint is what was saved, or is refused; a folder has one run; a state comes out as it went in.

Knows the public interface, the class that the driver saves with, and the files of a checkpoint. References are NumPy
copies of what was saved, and orbax.
"""

import functools
import gc
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vnode
from tests.ahead import program
from vnode.elastic import integrity, restore, run
from vnode.elastic.checkpoints import Checkpoints
from vnode.elastic.integrity import OwnCopy, checksums
from vnode.elastic.lock import FolderLock
from vnode.errors import CheckpointError, DamagedCheckpointError
from vnode.placement.host_copy import abstract

NUMBERS = (2, 4, 6)
OPTIMIZER = optax.adamw(1e-2)
pytestmark = [pytest.mark.quickly, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
"""Orbax leaves coroutines that never ran after an error of its own."""


@pytest.fixture(scope="module", autouse=True)
def tidy() -> Iterator[None]:
    """Other tests do not find what orbax leaves."""
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda _: None)
        gc.collect()


@pytest.fixture
def alone() -> vnode.Placement:
    return vnode.Placement(4, jax.devices()[:1])


def made(number: int) -> dict[str, Any]:
    """A state after a number of steps: no two are alike."""
    params = {"w": jax.random.normal(jax.random.key(number), (40, 30)), "b": jnp.full(3, number, jnp.bfloat16)}
    return {
        "params": params,
        "slots": OPTIMIZER.init(params),
        "key": jax.random.key(number),
        "count": jnp.int32(number),
        "empty": jnp.zeros((0, 2)),
        "name": "mlp",
    }


def bits(state: Any) -> list[Any]:
    """What must come back: names, types and bytes of the arrays."""
    found = []
    for path, leaf in jax.tree.leaves_with_path(state):
        if isinstance(leaf, jax.Array):
            data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            found.append((jax.tree_util.keystr(path), str(leaf.dtype), leaf.shape, np.asarray(data).tobytes()))
    return found


def like() -> Any:
    return jax.tree.map(abstract, made(0))


def save(folder: Path, numbers: tuple[int, ...] = NUMBERS, keep: int = 3) -> None:
    checkpoints = Checkpoints(folder, keep)
    for number in numbers:
        checkpoints.save(number, made(number), {"data": number})
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of `NUMBERS`, to copy."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder)
    return folder


def files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def largest(checkpoint: Path) -> Path:
    """The file with the arrays."""
    return max(files(checkpoint / "default"), key=lambda path: path.stat().st_size)


def flip(path: Path, at: float = 0.5) -> None:
    """Changes one bit."""
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 16
    path.write_bytes(content)


def edit(path: Path) -> None:
    """Another number of what the run added to the state, in JSON that is well-formed."""
    said = json.loads(path.read_text())
    said["custom_metadata"]["vnode"]["facts"]["data"] = 7
    path.write_text(json.dumps(said))


def rewrite(checkpoint: Path) -> None:
    """Other values in an array, written by orbax as a checkpoint ought to be."""
    metadata = (checkpoint / "_CHECKPOINT_METADATA").read_text()
    shutil.rmtree(checkpoint)
    state = {name: leaf for name, leaf in made(6).items() if name not in ("name", "empty")} | {"empty": None}
    state["params"]["w"] = state["params"]["w"].at[3, 4].add(1)
    with ocp.CheckpointManager(checkpoint.parent) as manager:
        manager.save(6, args=ocp.args.StandardSave(state | {"name": None}), force=True)
    (checkpoint / "_CHECKPOINT_METADATA").write_text(metadata)


def exchange(one: Path, other: Path) -> None:
    one.rename(one.with_name("away"))
    other.rename(one)
    one.with_name("away").rename(other)


def foreign(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    (checkpoint / "holiday.jpg").write_bytes(b"not an array")


def emptied(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def dangling(checkpoint: Path) -> None:
    """A link in place of a checkpoint, to what is no more."""
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to(checkpoint.parent.parent / "nowhere")


DAMAGE: dict[str, tuple[Callable[[Path], Any], int]] = {
    "truncate arrays": (lambda folder: os.truncate(largest(folder / "6"), 100), 4),
    "delete arrays": (lambda folder: largest(folder / "6").unlink(), 4),
    "flip arrays": (lambda folder: flip(largest(folder / "6")), 4),
    "truncate manifest": (lambda folder: os.truncate(folder / "6/default/manifest.ocdbt", 9), 4),
    "truncate metadata": (lambda folder: os.truncate(folder / "6/_CHECKPOINT_METADATA", 99), 4),
    "delete metadata": (lambda folder: (folder / "6/_CHECKPOINT_METADATA").unlink(), 4),
    "flip metadata": (lambda folder: flip(folder / "6/_CHECKPOINT_METADATA"), 4),
    "edit metadata": (lambda folder: edit(folder / "6/_CHECKPOINT_METADATA"), 4),
    "delete tree": (lambda folder: (folder / "6/default/_METADATA").unlink(), 4),
    "edit arrays": (lambda folder: rewrite(folder / "6"), 4),
    "empty folder": (lambda folder: emptied(folder / "6"), 4),
    "dangling link": (lambda folder: dangling(folder / "6"), 4),
    "foreign folder": (lambda folder: foreign(folder / "6"), 4),
    "renamed": (lambda folder: (folder / "4").rename(folder / "8"), 6),
    "swapped": (lambda folder: exchange(folder / "4", folder / "6"), 2),
    "swapped arrays": (lambda folder: exchange(folder / "4/default", folder / "6/default"), 2),
}


@pytest.mark.parametrize("way", DAMAGE)
def test_damaged(way: str, saved: Path, tmp_path: Path, alone: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The newest good checkpoint is used, and those that are skipped are named; their place can be written again."""
    folder = shutil.copytree(saved, tmp_path / "run")
    damage, good = DAMAGE[way]
    damage(folder)
    there = [int(path.name) for path in folder.iterdir()]
    skipped = sorted((number for number in there if number > good), reverse=True)
    checkpoints = Checkpoints(folder, keep=3)
    with caplog.at_level(logging.WARNING, "vnode"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoints.newest(lambda number: checkpoints.restore(number, like(), alone))
    assert found is not None
    assert (found[0], bits(found[1])) == (good, bits(made(good)))
    assert checkpoints.facts(good) == {"data": good}
    for number in skipped:
        assert any(f"checkpoint {number} in" in str(warning.message) for warning in caught)
        assert f"checkpoint {number} in" in caplog.text
        with pytest.raises(DamagedCheckpointError, match=f"checkpoint {number} in"):
            restore(folder, like(), step=number)
    for number in (*reversed(skipped), 10):
        checkpoints.save(number, made(number), {})
    checkpoints.close()
    assert bits(restore(folder, like())) == bits(made(10))
    assert sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) == sorted({*there, 10})[-3:]
    assert len([p for p in folder.iterdir() if "damaged" in p.name]) == len(skipped)


@pytest.mark.sweep
def test_any_damage_to_any_file(saved: Path, tmp_path: Path) -> None:
    """Whatever is done to a file of a checkpoint, it is read as it was saved, or is damaged."""
    outcomes = {"whole": 0, "damaged": 0}
    ways: list[Callable[[Path], Any]] = [Path.unlink, *(functools.partial(flip, at=at) for at in (0, 0.1, 0.3, 0.6, 1))]
    ways += [lambda path, size=size: os.truncate(path, int(size * path.stat().st_size)) for size in (0, 0.5, 0.99)]
    for i in range(len(files(saved / "6"))):
        for way in ways:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            folder = shutil.copytree(saved, tmp_path / "run")
            way(files(folder / "6")[i])
            try:
                assert bits(restore(folder, like(), step=6)) == bits(made(6))
                outcomes["whole"] += 1
            except DamagedCheckpointError:
                outcomes["damaged"] += 1
    assert outcomes["damaged"] > len(ways)


@pytest.mark.filterwarnings("ignore:checkpoint")
def test_none_is_good(saved: Path, tmp_path: Path, alone: Any) -> None:
    """Rather than to begin anew as if there were nothing, a run says what is wrong with each."""
    folder = shutil.copytree(saved, tmp_path / "run")
    for number in NUMBERS:
        flip(largest(folder / str(number)))
    checkpoints = Checkpoints(folder, keep=3)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used") as caught:
        checkpoints.newest(lambda number: checkpoints.restore(number, like(), alone))
    assert all(f"checkpoint {number} in" in str(caught.value) for number in NUMBERS)
    checkpoints.close()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        restore(folder)


def changed(**changes: Any) -> Any:
    return {name: leaf for name, leaf in {**made(0), **changes}.items() if leaf is not ...}


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        ({"count": ...}, r"\['count'\]: only in the checkpoint"),
        ({"more": jnp.ones(2)}, r"\['more'\]: not in the checkpoint"),
        ({"count": jnp.float32(0)}, r"\['count'\]: int32\[\] in the checkpoint, float32\[\] in the state"),
        ({"empty": jnp.zeros((0, 3))}, r"\['empty'\]: float32\[0, 2\] in the checkpoint, float32\[0, 3\]"),
        ({"key": jax.random.key(0, impl="rbg")}, r"\['key'\]: key<fry>\[\] in the checkpoint, key<rbg>\[\]"),
    ],
)
def test_other_model(other: dict[str, Any], fact: str, saved: Path) -> None:
    """A checkpoint of another state is no damage, and no older one is tried."""
    with pytest.raises(CheckpointError, match=fact) as caught:
        restore(saved, changed(**other))
    assert "checkpoint 6 in" in str(caught.value)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_restore(saved: Path) -> None:
    """With a state of the same structure, or as nested dictionaries; the newest, or the one asked for."""
    state = made(4)
    there = restore(saved, like(), step=4)
    assert bits(there) == bits(state)
    assert jax.tree.structure(there) == jax.tree.structure(state)
    assert there["name"] == "mlp"
    free = restore(saved)
    np.testing.assert_array_equal(free["params"]["w"], made(6)["params"]["w"])
    assert set(free) == {"params", "slots", "key", "count", "empty"}
    assert set(free["slots"]["0"]) == {"count", "mu", "nu"}
    assert free["empty"].shape == (0, 2)
    assert jax.random.key_data(free["key"]).tolist() == [0, 6]
    assert {d for leaf in jax.tree.leaves(free) for d in leaf.devices()} == {jax.devices()[0]}
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    target = NamedSharding(mesh, PartitionSpec("model"))
    wanted = like()
    wanted["params"]["w"] = jax.ShapeDtypeStruct((40, 30), jnp.float32, sharding=target)
    split = restore(saved, wanted)
    assert split["params"]["w"].sharding == target
    assert bits(split) == bits(made(6))
    for absent in (saved / "nowhere", saved.parent):
        with pytest.raises(CheckpointError, match="no checkpoints in"):
            restore(absent)
    with pytest.raises(CheckpointError, match="no checkpoint 5 in") as caught:
        restore(saved, step=5)
    assert "2, 4, 6" in str(caught.value)


class Alike(NamedTuple):
    """A dictionary's key that prints as any other one."""

    number: int

    def __repr__(self) -> str:
        return "key"


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)},  # orbax has one name for both
        {Alike(1): jnp.ones(2), Alike(2): jnp.zeros(2)},
        jnp.arange(3.0),
        {"a": None, "b": jnp.zeros((2, 0))},
        {"a/b": jnp.ones(2), "": jnp.zeros(1), "..": jnp.ones(1), "é\n": [(jnp.ones(()),), {3: jnp.zeros(4)}]},
        {"small": jnp.arange(4, dtype=jnp.int4), "is": jnp.ones(3, bool), "z": jnp.full(2, 1 + 2j)},
        optax.chain(optax.clip(1.0), optax.adam(1e-3)).init({"w": jnp.ones(3)}),
    ],
    ids=["ambiguous names", "equal names", "single array", "no elements", "odd names", "dtypes", "namedtuples"],
)
def test_any_state(state: Any, tmp_path: Path, alone: Any) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    assert bits(checkpoints.restore(1, jax.tree.map(abstract, state), alone)) == bits(state)
    checkpoints.close()
    assert sorted(b[2:] for b in bits(restore(tmp_path))) == sorted(b[2:] for b in bits(state))


def test_a_state_of_many_levels(tmp_path: Path) -> None:
    """It is read as it was written; one that Python cannot recurse into is not called damaged."""

    def nested(levels: int) -> Any:
        return functools.reduce(lambda tree, _: {"d": tree}, range(levels), jnp.arange(3.0))

    checkpoints, here = Checkpoints(tmp_path, keep=1), vnode.Placement(1, jax.devices()[:1])
    checkpoints.save(1, nested(400), {})
    checkpoints.wait()
    (read,) = jax.tree.leaves(checkpoints.restore(1, nested(400), here))
    assert read.tolist() == [0.0, 1.0, 2.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vnode.elastic.reader.FRAMES", 0)
        with pytest.raises(CheckpointError, match="too deeply nested to be read") as caught:
            checkpoints.restore(1, nested(400), here)
    assert not isinstance(caught.value, DamagedCheckpointError)
    checkpoints.close()


def test_sixty_four_bits(tmp_path: Path) -> None:
    """Arrays that jax would cut to 32 bits are refused."""
    with jax.enable_x64(True):
        checkpoints = Checkpoints(tmp_path, keep=1)
        checkpoints.save(1, {"x": jnp.ones(3)}, {})
        checkpoints.close()
    with pytest.raises(CheckpointError, match="64 bits") as caught:
        restore(tmp_path)
    assert "jax_enable_x64" in str(caught.value)


def reference(array: np.ndarray) -> str:
    """The checksum of an array of 32-bit words or 16-bit elements, in NumPy."""

    def mixed(words: Any) -> Any:
        words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return words ^ (words >> np.uint32(16))

    position = np.arange(array.size, dtype=np.uint32)
    word = array.reshape(-1).view(f"uint{8 * array.itemsize}").astype(np.uint32)
    salt = mixed(position * np.uint32(0x9E3779B9) + np.uint32(1))
    first = mixed(word ^ salt)
    second = mixed((first ^ position) * np.uint32(0x85EBCA77) + salt)
    return f"{first.sum(dtype=np.uint32):08x}{second.sum(dtype=np.uint32):08x}"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_checksums(dtype: Any) -> None:
    """Those of NumPy, however the array is sharded; also where the caller has set a mesh."""
    host = np.random.default_rng(0).normal(size=(8, 6)).astype(dtype)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    specs = [PartitionSpec(), PartitionSpec("a", "b"), PartitionSpec("b"), PartitionSpec(("b", "a"))]
    arrays = {i: jax.device_put(host, NamedSharding(mesh, spec)) for i, spec in enumerate(specs)}
    assert set(checksums(arrays).values()) == {reference(host)}
    with jax.set_mesh(mesh):
        assert checksums({0: jax.device_put(host, jax.devices()[1])}) == {0: reference(host)}
    for count in (1, 2):  # slots that a plan keeps in the host's memory
        there = NamedSharding(Mesh(np.array(jax.devices()[:count]), ("a",)), PartitionSpec(), memory_kind="pinned_host")
        assert checksums({0: jax.device_put(host, there)}) == {0: reference(host)}
    for change in (host[::-1], np.where(np.arange(6) == 3, -host, host), host.reshape(6, 8).T):
        assert checksums({0: jnp.asarray(change)})[0] != reference(host)


def test_checksums_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part that other processes have counts once, wherever it lies; what no other has does not count."""

    def holders(parts: list[tuple[int, str]]) -> tuple[int, ...]:
        there = {Mock(process_index=process): part for process, part in parts}
        return integrity.holders_of(Mock(devices_indices_map=lambda shape: there), (4,))

    assert holders([(0, "a"), (1, "b"), (2, "a"), (3, "b")]) == (0, 1, 0, 1)
    assert holders([(0, "a"), (0, "b"), (1, "b"), (1, "c")]) == (0, 1)

    def sums(value: np.ndarray, devices: Any) -> list[int]:
        mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
        state = {
            "divided": jax.device_put(value, NamedSharding(mesh, PartitionSpec(None, "model"))),
            "own": jax.device_put(value + 1, NamedSharding(mesh, PartitionSpec("data", "model"))),
            "whole": jax.device_put(value * 2, NamedSharding(mesh, PartitionSpec())),
        }
        specs = {
            PartitionSpec(None, "model"): (0, 1, 0, 1),
            PartitionSpec("data", "model"): (0, 1, 2, 3),
            PartitionSpec(): (0, 0, 0, 0),
        }
        monkeypatch.setattr(integrity, "holders_of", lambda sharding, shape: specs[sharding.spec])
        copy = OwnCopy(state)
        copy.prepare().join()
        assert copy.holders == [(0, 1, 0, 1), (0, 0, 0, 0)]
        begun = copy.begin(state)
        assert begun is not None
        return integrity.vote_words(begun)

    value, devices = np.arange(8, dtype=np.float32).reshape(2, 4), jax.devices()[:4]
    mine = sums(value, devices)
    assert len(mine) == 4
    assert sums(value, devices[::-1]) == mine  # another process may have the same parts on devices in another order
    value[1, 3] += 1
    other = sums(value, devices)
    assert all(a != b for a, b in zip(mine, other, strict=True))


def test_one_run_on_a_folder(tmp_path: Path) -> None:
    """The second is told who has it. What a killed run held is free, also when a process it forked lives on."""
    first = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match="another run") as caught:
        Checkpoints(tmp_path, keep=1)
    assert "this same process" in str(caught.value)
    first.close()
    assert not list(tmp_path.iterdir())
    code = (
        "import os, sys, time; from etils import epath; from vnode.elastic.lock import FolderLock\n"
        f"lock = FolderLock(epath.Path({str(tmp_path)!r}))\n"
        "child = os.fork()\n"
        "if not child: print(os.getpid(), flush=True)\n"  # when it has let go of what it was given
        "time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            with pytest.raises(CheckpointError, match="another run") as caught:
                Checkpoints(tmp_path, keep=1)
            assert f"process {other.pid} on " in str(caught.value)
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
            Checkpoints(tmp_path, keep=1).close()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A scheme of `etils.epath` that this machine's file system is not asked for, and where its files are."""
    root = tmp_path_factory.mktemp("bucket")

    def there(*parts: Any) -> str:
        return os.path.join(*parts).replace("fake:/", str(root))

    @epath.register_path_cls("fake://")
    class FakePath(type(epath.Path("/"))):
        def __new__(cls, *parts: Any) -> Any:
            return super().__new__(cls, there(*parts))

        def __init__(self, *parts: Any) -> None:
            super().__init__(*([there(*parts)] if sys.version_info >= (3, 12) else []))

    yield "fake://runs/7", root / "runs" / "7"


def test_other_paths(bucket: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another scheme is not one of the working directory."""
    monkeypatch.chdir(tmp_path)
    url, there = bucket
    checkpoints = Checkpoints(url, keep=2)
    for number in NUMBERS:
        checkpoints.save(number, made(number), {})
    checkpoints.close()
    assert sorted(path.name for path in there.iterdir()) == ["4", "6"]
    assert bits(restore(url, like())) == bits(made(6))
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="no paths that begin with nowhere://"):
        Checkpoints("nowhere://bucket/run", keep=1)


def test_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the run that started last has the folder, and the other stops at its next save, with its state."""
    monkeypatch.setattr("vnode.elastic.lock.is_local", lambda folder: False)
    first = Checkpoints(tmp_path, keep=1)
    first.save(1, made(1), {})
    first.wait()
    second = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match="another run") as caught:
        first.save(2, state := made(2), {})
    assert (caught.value.state, caught.value.step) == (state, 2)
    first.close()
    second.save(3, made(3), {})
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_lock_that_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next save takes it again, or learns that another run has it."""
    lock = tmp_path / "vnode.lock"
    first = Checkpoints(tmp_path, keep=1)
    lock.unlink()
    with caplog.at_level(logging.WARNING, "vnode"):
        first.save(1, made(1), {})
    assert "vnode.lock was deleted during a run" in caplog.text
    with pytest.raises(CheckpointError, match="another run is writing"):
        FolderLock(epath.Path(tmp_path))
    lock.unlink()
    second = FolderLock(epath.Path(tmp_path))
    with pytest.raises(CheckpointError, match="another run is writing"):
        first.save(2, made(2), {})
    second.release()
    first.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run learns at its start that it cannot save."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoints to") as caught:
        Checkpoints(tmp_path / "file" / "run", keep=1)
    assert "a folder that this process may write to" in str(caught.value)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write checkpoints to"):
            Checkpoints(tmp_path / "run", keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "run").iterdir())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(epath.Path("/")), "write_bytes", full)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        Checkpoints(tmp_path / "run", keep=1)
    assert "make room on the disk" in str(caught.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", ["at once", "in the background"])
def test_failed_save(way: str, tmp_path: Path) -> None:
    """It raises an error that has the state, and leaves nothing behind that waits."""
    folder, before = tmp_path / "run", set(threading.enumerate())
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, made(1), {})
    checkpoints.wait()
    state = made(2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if way == "at once":
        shutil.rmtree(folder)
        folder.write_text("")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="could not write a checkpoint to") as caught:
            checkpoints.save(2, state, {})
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.step == 2
    assert bits(caught.value.state) == bits(state)
    checkpoints.close()
    waiting = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    assert not [thread for thread in waiting if "ThreadPool" not in thread.name and "asyncio" not in thread.name]
    if way == "in the background":
        assert bits(restore(folder, like())) == bits(made(1))
        FolderLock(epath.Path(folder)).release()


def test_orbax_reads_ours(saved: Path) -> None:
    """A `CheckpointManager` of a user restores the state, with its structure or without."""
    state = {name: leaf for name, leaf in made(6).items() if name not in ("empty", "name")}
    target = {**jax.tree.map(ocp.utils.to_shape_dtype_struct, state), "empty": None, "name": None}
    with ocp.CheckpointManager(saved) as manager:
        assert manager.latest_step() == 6
        there = manager.restore(6, args=ocp.args.StandardRestore(target))
        free = manager.restore(6)
    assert bits({name: there[name] for name in state}) == bits(state)
    np.testing.assert_array_equal(free["params"]["w"], state["params"]["w"])


@functools.partial(vnode.virtualize, virtual_nodes=2)
def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"w": state["w"] + batch.mean(0), "slots": (state["slots"][0] * 2,)}, {}


def start() -> dict[str, Any]:
    return {"w": jnp.zeros(3), "slots": (jnp.ones(2),)}


@pytest.mark.parametrize("way", ["alone", "among others", "manager", "manager of others"])
def test_run_goes_on_from_theirs(way: str, tmp_path: Path) -> None:
    """A run resumes from what a user's own `CheckpointManager` saved, in a folder or given as it is."""
    state = {"w": jnp.full(3, 5.0), "slots": (jnp.full(2, 8.0),)}
    args: Any = ocp.args.StandardSave(state)
    if "others" in way:
        args = ocp.args.Composite(state=args, position=ocp.args.JsonSave({"epoch": 3}))
    theirs = ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=1))
    theirs.save(3, args=args)
    theirs.wait_until_finished()
    where: Any = theirs if "manager" in way else tmp_path
    data = [np.ones((4, 3), np.float32)] * 5
    result = run(step.on(jax.devices()[:2]), start(), data, steps=5, checkpoint=where)
    assert result.resumed == 3
    np.testing.assert_array_equal(result.state["w"], np.full(3, 7.0))
    np.testing.assert_array_equal(result.state["slots"][0], np.full(2, 32.0))
    if "manager" in way:
        assert list(theirs.all_steps()) == [5]  # it keeps as many as its user said
    else:
        assert {path.name for path in tmp_path.iterdir()} == {"3", "5"}  # what a run did not write is not deleted
    np.testing.assert_array_equal(restore(where, start())["w"], np.full(3, 7.0))
    theirs.close()
    with pytest.raises(CheckpointError, match="holds another state"):
        restore(tmp_path, {"w": jnp.zeros(4), "slots": (jnp.ones(2),)})


@pytest.mark.thorough
def test_a_run_after_damage(tmp_path: Path) -> None:
    """A run goes on from the newest good checkpoint, and ends where an undisturbed one does."""
    data = [np.full((4, 3), number, np.float32) for number in range(6)]
    alone = step.on(jax.devices()[:1])
    whole = run(alone, start(), data, steps=6)
    run(alone, start(), data, steps=4, checkpoint=tmp_path, checkpoint_every=2)
    flip(largest(tmp_path / "4"))
    with pytest.warns(UserWarning, match="checkpoint 4 in .* is damaged"):
        result = run(alone, start(), data, steps=6, checkpoint=tmp_path, checkpoint_every=2)
    assert result.resumed == 2
    assert bits(result.state) == bits(whole.state)
    assert bits(restore(tmp_path, start(), step=4)) != bits(whole.state)


@pytest.mark.sweep
def test_several_processes(tmp_path: Path) -> None:
    """Arrays that are spread over processes have the checksums of one process, which restores them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    for count in (2, 1):
        environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}"}
        arguments = [[str(count), str(index), port, str(tmp_path)] for index in range(count)]
        running = [subprocess.Popen([*program("checkpointing_process"), *each], env=environment) for each in arguments]
        try:
            assert [process.wait(120) for process in running] == [0] * count
        finally:
            for process in running:
                process.kill()
