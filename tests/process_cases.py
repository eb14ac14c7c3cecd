"""What the processes of `tests.test_processes` do: train something for a few steps, and tell the bits of the result.

Knows steps, states and batches. Must not know how many processes there are: each case is written as for one.
"""

import contextlib
import errno
import functools
import hashlib
import os
import signal
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vnode
from tests.processes import waiting
from vnode.elastic.checkpoints import Checkpoints
from vnode.elastic.driver import Driver
from vnode.elastic.reader import Reader
from vnode.errors import CheckpointError, DeviceLost
from vnode.placement.process_arrays import replicate_in_processes
from vnode.placement.process_barrier import VARIABLE, meet
from vnode.placement.world import world
from vnode.plan.nodes import node_search
from vnode.plan.nodes.device_memory import program_memory as memory_of
from vnode.step import executor, step_identity

V = 8

LONG = 30.0
"""Seconds that a trace, or a compilation, takes that nobody waits for to the end."""


def bits(tree: Any) -> str:
    """The SHA-256 of a tree of arrays that are whole in this process, with their dtypes and weak types."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        array = np.asarray(data if data.is_fully_addressable else data.addressable_data(0))
        assert array.shape == data.shape, f"{path} is not whole in this process"
        weak = getattr(leaf, "weak_type", False)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {weak}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def hidden_mlp(params, batch, drop):
    """A layer with dropout: ``x [B, 36] -> [B, 5]``."""
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.where(jax.random.bernoulli(drop, 0.9, hidden.shape), hidden / 0.9, 0)


def hidden_cnn(params, batch, drop):
    """Two convolutions and the mean over an image: ``x [B, 36] -> [B, 5]``."""
    images = batch["x"].reshape(-1, 6, 6, 1)
    for kernel in (params["in"].reshape(6, 6, 1, 5)[:3, :3], params["middle"].reshape(1, 1, 5, 5)):
        images = jax.nn.relu(
            jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return images.mean((1, 2))


def hidden_transformer(params, batch, drop):
    """Causal attention over six positions: ``x [B, 36] -> [B, 5]``."""
    words = batch["x"].reshape(-1, 6, 6) @ params["in"][:6]
    scores = jnp.einsum("bqd,bkd->bqk", words @ params["middle"], words) / 5**0.5
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -jnp.inf)
    words = words + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), words)
    words = (words - words.mean(-1, keepdims=True)) * jax.lax.rsqrt(words.var(-1, keepdims=True) + 1e-6)
    return words.mean(1)


MODELS = {"mlp": hidden_mlp, "cnn": hidden_cnn, "transformer": hidden_transformer}


@functools.cache
def step_of(model="mlp"):
    """A virtualized training step: descent with momentum along gradients whose norm is clipped.

    One for all cases of a process, whose programs are then compiled once.
    """
    hidden = MODELS[model]

    def step(state, batch):
        key, drop = jax.random.split(state["key"])

        def loss_of(params):
            return jnp.mean((hidden(params, batch, drop) @ params["out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 0.5 / norm)
        speed = jax.tree.map(lambda v, g: 0.9 * v + scale * g, state["speed"], grads)
        params = jax.tree.map(lambda p, v: p - state["rate"] * v, state["params"], speed)
        return {"params": params, "speed": speed, "key": key, "rate": state["rate"] * 0.9}, {"loss": loss}

    return vnode.virtualize(step, virtual_nodes=V)


def state():
    """Parameters and momentum, a typed key, and a learning rate that is a Python number: a weak type."""
    random, shapes = np.random.default_rng(0), {"in": (36, 5), "middle": (5, 5), "out": (5, 3)}
    params = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    speed = {name: np.zeros_like(value) for name, value in params.items()}
    return {"params": params, "speed": speed, "key": jax.random.key(1), "rate": 0.1}


def examples(count: int) -> dict[str, np.ndarray]:
    """Random examples of the regression."""
    random = np.random.default_rng(2)
    x = random.normal(size=(count, 36)).astype(np.float32)
    return {"x": x, "y": random.normal(size=(count, 3)).astype(np.float32)}


def whole_batches(size: int, steps: int = 2, model: str = "mlp") -> list[str]:
    """Steps on batches that every process has whole."""
    step, now, told = step_of(model), state(), []
    data = examples(steps * size)
    for t in range(steps):
        with waiting(f"step {t}"):
            now, metrics = step(now, {name: rows[t * size : (t + 1) * size] for name, rows in data.items()})
            told.append(bits((now, metrics)))
    return told


def different_batches() -> str:
    """Each process gives other examples as if they were all: the error."""
    step = step_of()
    batch = examples(16)
    batch["y"] = batch["y"] + jax.process_index()
    with waiting("the step to compare batches"):
        try:
            step(state(), batch)
        except vnode.PlacementError as error:
            return str(error)
    return "no error"


def slow_process(seconds: float, patience: float) -> Any:
    """A step that takes one process longer to compile than gloo waits; what the others make of it.

    Args:
      seconds: how much longer.
      patience: how long they may wait for it.
    """

    def step(state, batch):
        os.environ[VARIABLE] = str(patience)  # from here on
        if jax.process_index() == 1:
            time.sleep(seconds)
        return state + jnp.mean(batch["x"]), {}

    with waiting("the slow process"):
        try:
            return bits(vnode.virtualize(step, virtual_nodes=V)(np.float32(1), examples(16))[0])
        except vnode.ProcessError as error:
            return str(error)
        finally:
            os.environ.pop(VARIABLE, None)


def stuck_run(seconds: float, patience: float) -> str:
    """A run whose data come late in one process: the error of each.

    Args:
      seconds: how much later.
      patience: how long they may wait for one another.
    """

    class Slow(vnode.data.Batches):
        def load(self, number: int, placement: Any) -> Any:
            if number == 3:
                os.environ[VARIABLE] = str(patience)  # from here on
                time.sleep(seconds * jax.process_index())
            return super().load(number, placement)

    with waiting("the error of the run"):
        try:
            data = Slow(examples(8), 8)
            vnode.elastic.run(step_of(), state(), data, steps=8, keep_every=None, prefetch=0, progress=False)
        except (vnode.ProcessError, jax.errors.JaxRuntimeError, ValueError) as error:
            return str(error)
    return "no error"


def fewer_devices(size: int) -> dict[str, Any]:
    """A step on all devices, one on those of process 0 alone, one on all again; and one with a stale state."""
    step, data = step_of(), examples(3 * size)
    batches = [{name: rows[t * size : (t + 1) * size] for name, rows in data.items()} for t in range(3)]
    with waiting("the step on all devices"):
        old, _ = step(state(), batches[0])
    alone = step.on([device for device in jax.devices() if device.process_index == 0])
    with waiting("the step on the devices of process 0"):
        new, _ = alone(alone.put(old), batches[1])
    if not jax.distributed.is_initialized():
        return {"bits": bits(step(new, batches[2])[0])}
    with waiting("the state to come back"):
        back = step.put(new)
    others = step.on([device for device in jax.devices() if device.process_index != 0])
    with waiting("the state to come back by way of the other processes"):
        assert bits(step.put(others.put(new))) == bits(back)
    with waiting("the last step"):
        again = bits(step(back, batches[2])[0])
    with waiting("the error of the stale state"):
        try:
            step.put(new if jax.process_index() == 0 else old)
        except vnode.PlacementError as error:
            return {"bits": again, "error": str(error)}
    return {"bits": again, "error": "no error"}


def explained(size: int) -> dict[str, Any]:
    """A report, and a step that was prepared."""
    step, batch, first = step_of(), examples(size), state()
    with waiting("explain"):
        text = str(step.explain(first, batch))
    with waiting("prepare"):
        step.prepare(step.placement, step.put(first), batch).wait()
    with waiting("the step"):
        return {"bits": bits(step(first, batch)[0]), "text": text}


def given_rows(size: int, counts: list[int] | None = None, steps: int = 2) -> dict[str, Any]:
    """Steps on batches of which each process reads its own rows: by `local_batch`, and by `Batches`."""
    step = step_of()
    if counts is not None:
        step = step.on(jax.devices()[: len(counts)], counts=counts)
    data = examples(steps * size)
    batches = vnode.data.Batches(data, size, shuffle=False)
    mine = step.placement.local_examples(size)
    by_rows = by_loader = state()
    for t in range(steps):
        local = {name: rows[t * size + mine] for name, rows in data.items()}
        with waiting(f"step {t}"):
            by_rows, _ = step(by_rows, vnode.data.local_batch(local, size, step.placement))
            by_loader, _ = step(by_loader, batches.load(t, step.placement))
    return {"rows": mine.tolist(), "bits": [bits(by_rows), bits(by_loader)]}


def trained(checkpoint: str, size: int, steps: int, stop_at: int = -1, kill_at: int = -1) -> dict[str, Any]:
    """A run with copies and checkpoints, which changes devices, loses one and is stopped; or goes on with its end."""
    step = step_of()
    batches, failed = vnode.data.Batches(examples(5 * size), size, seed=4), []

    def devices(number: int) -> Any:
        if number == 3 and not failed and len(jax.devices()) > jax.process_count():
            failed.append(number)
            raise DeviceLost(jax.devices()[-1:])
        return (
            vnode.Placement(V, counts=[V - len(jax.devices()) + 1] + [1] * (len(jax.devices()) - 1))
            if number == 2
            else None
        )

    def callback(number: int, metrics: Any) -> None:
        if number == kill_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == stop_at and jax.process_index() == jax.process_count() - 1:
            signal.raise_signal(signal.SIGTERM)  # in one process only

    with waiting("the run"):
        result = vnode.elastic.run(
            step,
            state(),
            batches,
            steps=steps,
            devices=devices,
            keep_every=2,
            checkpoint=checkpoint,
            checkpoint_every=4,
            callback=callback,
            progress=False,
        )
    return {"bits": bits(result.state), "step": result.step, "resumed": result.resumed, "why": result.reason}


def failing(seconds: float) -> None:
    """An error in each process, in that of the service first.

    Args:
      seconds: how much later in the others.
    """
    with waiting("the error"):
        meet("to fail")
        time.sleep(seconds * (jax.process_index() > 0))
        raise RuntimeError(f"process {jax.process_index()} has failed")


def run_error(step: Any = None, data: Any = None, initial: Any = None, **options: Any) -> str:
    """The error of a run; of one that ends well, that it did."""
    try:
        result = vnode.elastic.run(
            step or step_of(),
            state() if initial is None else initial,
            data or vnode.data.Batches(examples(16), 8),
            **{"steps": 8, "progress": False, **options},
        )
    except (vnode.VnodeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"ended after {result.step} steps"


def faster_step():
    """`step_of`, with another learning rate in one process."""
    factor = 0.5 if jax.process_index() else 0.25

    def step(state, batch):
        grad = jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(state)
        return state - factor * grad, {}

    return vnode.virtualize(step, virtual_nodes=V)


def differing() -> dict[str, str]:
    """The errors of runs, and of a step alone, of which one process does something else than the other."""
    second, weights = jax.process_index() == 1, np.zeros((36, 3), np.float32)
    shifted = {name: rows + second for name, rows in examples(16).items()}
    fewer = {**state(), **({"more": np.zeros(2, np.float32)} if second else {})}
    errors = {}

    def ask(name: str, **arguments: Any) -> None:
        with waiting(f"the error of another {name}"):
            errors[name] = run_error(**arguments)

    ask("seed", data=vnode.data.Batches(examples(16), 8, seed=int(second)))
    ask("batch size", data=vnode.data.Batches(examples(16), 4 if second else 8))
    ask("values", data=vnode.data.Batches(shifted, 8))
    ask("option", keep_every=None if second else 4)
    ask("state", initial=fewer)
    ask("nodes", step=vnode.virtualize(step_of().__wrapped__, virtual_nodes=4 if second else 8))
    told = dict(step_identity.versions())
    with unittest.mock.patch.dict(step_identity.versions(), {"jax": "0.0"} if second else told):
        ask("version", steps=0)
    ask("program", step=faster_step(), initial=weights)
    with waiting("the error of a step alone"):
        try:
            faster_step()(weights, examples(8))
        except vnode.ProcessError as error:
            errors["program of a step alone"] = str(error)
    launches, both = world().launches, frozenset({0, 1})
    launches[both] += second  # as after an error in the middle of a run
    ask("program begun")
    launches[both] -= second
    own = (lambda number, metrics: None) if second else None  # what processes may have for themselves
    ask("nothing", callback=own, prefetch=1 + second, history_kept=3 + second, writers=[print] * second)
    return errors


def corrupted(at: int) -> str:
    """The error of a run in which one process's copy of the state becomes another one."""
    follow = Driver.follow

    def changed(driver: Driver, request: Any) -> None:
        if driver.number == at and jax.process_index() == 1:
            speed = driver.state["speed"]["in"]
            copy = jax.device_put(speed.addressable_data(0).at[3, 2].add(1e-6), jax.local_devices()[0])
            copies = jax.make_array_from_single_device_arrays(speed.shape, speed.sharding, [copy])
            driver.state = {**driver.state, "speed": {**driver.state["speed"], "in": copies}}
        follow(driver, request)

    with waiting("the error of the state"), unittest.mock.patch.object(Driver, "follow", changed):
        return run_error(steps=at + 3)


def failures(folder: str, at: str) -> dict[str, list[Any]]:
    """Errors that one process has and the other learns of, each with the seconds until then.

    Args:
      folder: an empty one.
      at: the last of them, in the data or in the callback of a run, after which one may have begun more than another.
    """
    last, found = jax.process_index() == jax.process_count() - 1, {}

    def fail(name: str) -> None:
        if last:
            Path(folder, name).write_text(str(time.time()))
            raise ValueError(f"no luck with the {name}")

    def ask(name: str, call: Callable[[], Any]) -> None:
        with waiting(f"the error of the {name}"):
            try:
                error = call()
            except (vnode.VnodeError, ValueError) as caught:
                error = f"{type(caught).__name__}: {caught}"
        seconds = time.time() - float(Path(folder, name).read_text())
        found[name] = [error, seconds]

    class Failing(vnode.data.Batches):
        def load(self, number: int, placement: Any) -> Any:
            if number == 3:
                fail("data")
            return super().load(number, placement)

    def callback(number: int, metrics: Any) -> None:
        if number == 2:
            fail("callback")

    def fails_alone(name: str, seconds: float) -> Any:
        """A step that one process refuses while the other traces it, for so many seconds."""

        def refuses(state, batch):
            time.sleep(0 if seconds else 2)  # where the other does not take long to trace, until it has
            fail(name)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.01)
            return step_of().__wrapped__(state, batch)

        return vnode.virtualize(refuses, virtual_nodes=V)(state(), examples(8))

    def compiles_for_long(lowered: Any, *rest: Any) -> Any:
        time.sleep(0 if last else LONG)  # in a thread that is left behind

    def saves() -> str:
        write = Checkpoints.write

        def failing(self: Any, number: int, *rest: Any) -> None:
            if number == 2:
                fail("save")
            write(self, number, *rest)

        with unittest.mock.patch.object(Checkpoints, "write", failing):
            return run_error(checkpoint=f"{folder}/saved", checkpoint_every=1, steps=9)

    def commits() -> str:
        """Process 0 cannot give a checkpoint its name, in orbax's thread; the other process waits for it there."""
        rename = os.rename

        def full(source: Any, target: Any, **more: Any) -> None:
            if "orbax-checkpoint-tmp" in str(source):
                Path(folder, "commit").write_text(str(time.time()))
                raise OSError(errno.ENOSPC, "No space left on device")
            rename(source, target, **more)

        with unittest.mock.patch.object(os, "rename", rename if last else full):
            return run_error(checkpoint=f"{folder}/full", checkpoint_every=1, steps=9)

    ask("trace", lambda: fails_alone("trace", LONG))
    with unittest.mock.patch.object(jax.stages.Lowered, "compile", compiles_for_long):
        ask("compile", lambda: fails_alone("compile", 0))
    ask("save", saves)
    ask("commit", commits)
    last_one = {"data": {"data": Failing(examples(16), 8)}, "callback": {"callback": callback, "steps": 60}}[at]
    ask(at, lambda: run_error(**last_one))
    return found


def folders(folder: str) -> dict[str, str]:
    """The errors of folders that are not the same in both processes."""
    second, saved, found = jax.process_index() == 1, f"{folder}/seen", {}
    with waiting("the error of another folder"):
        found["other folder"] = run_error(checkpoint=f"{folder}/of-{int(second)}")
    with waiting("a run with checkpoints"):
        found["first"] = run_error(checkpoint=saved, checkpoint_every=2, steps=4)

    def other(state, batch):
        new, metrics = step_of().__wrapped__(state, batch)
        return {**new, "rate": new["rate"] * (0.5 if second else 1.0)}, metrics

    with waiting("the error of another program"):
        found["other program"] = run_error(vnode.virtualize(other, virtual_nodes=V), checkpoint=saved, steps=6)
    listed = Reader.folders

    def older(self: Any) -> Any:
        return {number: path for number, path in listed(self).items() if number < 4 or not second}

    like = step_of().put(state())
    with waiting("the error of an older listing"), unittest.mock.patch.object(Reader, "folders", older):
        found["older listing"] = run_error(checkpoint=saved, steps=6)
        try:
            vnode.elastic.restore(saved, like=like)
        except CheckpointError as error:
            found["restored from an older listing"] = str(error)
    with waiting("the end of the run"):
        found["again"] = run_error(checkpoint=saved, steps=6)
        found["restored"] = bits(vnode.elastic.restore(saved, like=like))
    return found


def killed(at: str, checkpoint: str) -> None:
    """A run whose last process is killed.

    Args:
      at: where: while it compiles, while it saves, or while it restores.
      checkpoint: a folder.
    """

    def end(*rest: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    places = {"compile": (executor, "check_same"), "save": (Checkpoints, "write"), "restore": (Reader, "load")}
    last, (place, name) = jax.process_index() == jax.process_count() - 1, places[at]
    patch = unittest.mock.patch.object(place, name, end) if last else contextlib.nullcontext()
    with waiting("the run"), patch:
        vnode.elastic.run(
            step_of(),
            state(),
            vnode.data.Batches(examples(16), 8),
            steps=8,
            checkpoint=checkpoint,
            checkpoint_every=2,
            progress=False,
        )


def refused(checkpoint: str, size: int) -> str:
    """A run on a folder that another one has: the error."""
    with waiting("the error of the folder"):
        try:
            vnode.elastic.run(
                step_of(), state(), vnode.data.Batches(examples(size), size), steps=2, checkpoint=checkpoint
            )
        except CheckpointError as error:
            return str(error)
    return "no error"


def batch_on_other_devices(size: int) -> dict[str, Any]:
    """A batch that was loaded for all devices, moved to those of process 0: by `put`, and by a step there."""
    step, data = step_of(), examples(size)
    alone = step.on([device for device in jax.devices() if device.process_index == 0])
    loaded = vnode.data.Batches(data, size, shuffle=False).load(0, step.placement)
    with waiting("the batch to be moved"):
        there = alone.put(loaded)
        assert {*jax.tree.leaves(there)[0].devices()} == {*alone.placement.devices}
    with waiting("the step on what was moved, and on what was not"):
        first = alone.put(step.put(state()))
        results = [alone(first, batch)[0] for batch in (there, loaded)]
    with waiting("the states to come back"):
        return {"moved": step.put(there)["x"].shape, "bits": [bits(step.put(result)) for result in results]}


def chosen_nodes(size: int, memory: int) -> dict[str, Any]:
    """The number of nodes that is found where each process has another limit, and another compiler, it seems."""
    here, there = step_of(), jax.process_index()
    node_search.program_memory = lambda compiled: (4 if there == 1 else 1) * memory_of(compiled)
    try:
        step = vnode.virtualize(here.__wrapped__, virtual_nodes="auto", memory=memory + there)
        with waiting("the number of nodes"):
            result, _ = step(step.put(state()), examples(size))
    finally:
        node_search.program_memory = memory_of
    assert step.search is not None
    return {"nodes": step.placement.virtual_nodes, "limit": step.search.limit, "bits": bits(result)}


def unknown_memory(size: int) -> str:
    """The error where no process knows how much a device holds."""
    with waiting("the error of the number of nodes"):
        try:
            vnode.virtualize(step_of().__wrapped__, virtual_nodes="auto")(state(), examples(size))
        except vnode.MemoryLimitError as error:
            return str(error)
    return "no error"


def plans(folder: str) -> dict[str, Any]:
    """What is refused in several processes, and what is the same in all: times from a file, reports, what fits."""

    def mean(state, batch):
        return state - jnp.mean(batch["x"] @ jnp.ones(36)) * state, {}

    step, args, errors = vnode.virtualize(mean, virtual_nodes=V), (np.float32(1), examples(16)), []
    for ask in (vnode.check, vnode.profile):
        try:
            ask(step, args)
        except vnode.ProcessError as error:
            errors.append(str(error))
    with waiting("check on this process's devices"):
        ok = vnode.check(step, args, devices=[jax.local_devices()]).ok
    path = f"{folder}/profile.json"
    if jax.process_index() == 0:
        vnode.profile(step, args, jax.local_devices()[:1], nodes=[2], steps=1).save(path)
    with waiting("the profile"):
        meet("to read the profile")
    counts = vnode.balance(vnode.profile(step, args, path=path), V).placement().counts
    text = str(vnode.explain(step, *args, devices=[1, 16, len(jax.devices())], compile=True))
    fits = vnode.fit(step, args, devices=jax.devices(), memory="1GiB").smallest
    return {"errors": errors, "ok": ok, "counts": counts, "explain": text, "fits": fits}


def other_trees() -> list[str]:
    """The errors where processes put other arrays, and the same ones elsewhere."""
    step, first, errors = step_of(), jax.process_index() == 0, []
    tree = {"a": np.zeros(2), "b": np.zeros(3)} if first else {"a": np.zeros(2)}
    elsewhere = step.on(jax.devices(), counts=[3, 5] if first else [5, 3])
    for name, there, what in (("trees", step, tree), ("placements", elsewhere, state())):
        with waiting(f"the error of the {name}"):
            try:
                there.put(what)
            except vnode.PlacementError as error:
                errors.append(str(error))
    return errors


def evaluated(size: int) -> list[Any]:
    """A run that is evaluated on the way, on batches of which each process reads its own examples."""

    def errors(params, batch):
        return {"error": jnp.mean((batch["x"] @ params["params"]["in"])[:, :3] - batch["y"])}

    step = vnode.virtualize(errors, virtual_nodes=V)
    held_out = vnode.data.Batches(examples(2 * size), size, shuffle=False)
    with waiting("the run"):
        result = vnode.elastic.run(
            step_of(),
            state(),
            vnode.data.Batches(examples(size), size),
            steps=2,
            evaluate=vnode.elastic.Evaluation(step, held_out),
            evaluate_every=1,
            progress=False,
        )
    return [(number, float(metrics["error"])) for number, metrics in result.evaluations]


def objects(size: int) -> list[str]:
    """Steps that update nnx objects in place."""
    import optax  # other cases need not wait for these
    from flax import nnx

    model = nnx.Linear(36, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    virtual, told = vnode.nnx.virtualize(step, virtual_nodes=V, in_axes=(None, None, 0)), []
    for t in range(2):
        with waiting(f"step {t}"):
            told.append(bits((virtual(model, optimizer, examples(size)), nnx.state(model, nnx.Param))))
    return told


def jitted(size: int) -> str:
    """A virtualized step in a program of the user's."""
    step = step_of()
    with waiting("the program"):
        return bits(jax.jit(lambda now, batch: step(now, batch))(step.put(state()), step.put(examples(size)))[0])


def sharded(size: int) -> list[str]:
    """A state that is sharded over all devices, on fewer of them, and back."""

    def descend(state, batch):
        return state - 0.1 * jnp.mean(batch["x"], 0), {}

    step = vnode.virtualize(descend, virtual_nodes=V)
    whole = np.random.default_rng(5).normal(size=(8, 36)).astype(np.float32)
    sharding = step.placement.sharding(step.placement.axis)
    first = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    with waiting("the step"):
        new, _ = step(first, examples(size))
    alone = step.on([device for device in jax.devices() if device.process_index == 0])
    with waiting("the state to go and come back"):
        back = step.put(alone.put(new))
    assert back.sharding.is_equivalent_to(sharding, 2)
    with waiting("the shards of the others"):
        return [bits(replicate_in_processes(array)) for array in (new, back)]


def large(size: int) -> str:
    """A gradient of 16 MB, which travels by collectives of its own: by gloo never by a reduce-scatter."""

    def descend(state, batch):
        def loss_of(w):
            return jnp.mean(jnp.tanh(batch["x"] @ w) ** 2)

        return state - 0.1 * jax.grad(loss_of)(state), {}

    step = vnode.virtualize(descend, virtual_nodes=V)
    now = step.put(jnp.asarray(np.random.default_rng(5).normal(size=(36, 1 << 17)), jnp.float32))
    batch = step.put(examples(size))
    text = jax.jit(lambda now, batch: step(now, batch)).lower(now, batch).as_text()
    assert ("reduce_scatter" in text) == (jax.process_count() == 1)
    with waiting("the steps"):
        for _ in range(6):
            now, _ = step(now, batch)
        return bits(now)


class OptionalField:
    """Examples by number, whose last four have a field more; batches of 8 in their order."""

    by_row = True

    def __len__(self) -> int:
        return 16

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        x = np.ones(len(rows), np.float32)
        return {"n": 777 * x, "x": x} if (rows >= 12).all() else {"x": x}


def other_forms() -> str:
    """The error of a run in which the second half of the second batch, another process's, has another form."""
    step = vnode.virtualize(lambda state, batch: (state + batch["x"].mean(), {}), virtual_nodes=V)
    with waiting("the error of another structure"):
        return run_error(step, vnode.data.Batches(OptionalField(), 8, shuffle=False), jnp.float32(0))
