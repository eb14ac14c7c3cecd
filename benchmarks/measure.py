"""Measures contenders: step time, compile time, memory, accumulators, tracing, dispatch.

All contenders of one table row run in one process and in turn (one step each, round after round), so that whatever
else the machine does falls on all of them; ratios are medians of the ratios within a round. The scan by hand runs
twice in each round: its ratio to itself is the noise of the row.

This file knows how to measure. It must not know how a contender splits its step, nor how results are shown.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import optax

import vnode
from benchmarks import contenders, models
from benchmarks.contenders import Contender

CONTROL = "scan by hand, again"


class _Runner:
    """A compiled contender with its own state and batch on the devices."""

    def __init__(self, contender: Contender, batch: Any):
        self.contender = contender
        pieces = contender.pieces(batch)
        start = time.perf_counter()
        lowered = contender.function.lower(contender.state, pieces[0])
        self.lower_seconds = time.perf_counter() - start
        start = time.perf_counter()
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        (state, piece), _ = self.compiled.input_shardings
        # A copy, because the step donates its state and the host's arrays are shared between contenders.
        copied = jax.tree.map(lambda x: np.array(x) if not _is_key(x) else x, contender.state)
        self.state = jax.device_put(copied, state)
        self.pieces = [jax.device_put(p, piece) for p in pieces]

    def step(self) -> Any:
        metrics = None
        for piece in self.pieces:
            self.state, metrics = self.compiled(self.state, piece)
            if len(jax.devices()) > 1:
                # CPU devices share one pool of threads: calls queued up behind one another can starve a collective.
                jax.block_until_ready(self.state)
        return metrics

    def timed(self) -> tuple[float, float]:
        """Seconds of one step: on the clock, and of all processor cores together."""
        start, busy = time.perf_counter(), time.process_time()
        jax.block_until_ready((self.step(), self.state))
        return time.perf_counter() - start, time.process_time() - busy


def steps(model: models.Model, nodes: int, names: Sequence[str], budget: float) -> dict[str, dict]:
    """Times one step of every contender on all devices of this process, interleaved.

    Args:
        model: The model; its `size` is the global batch.
        nodes: V, at least as many as devices.
        names: Which contenders.
        budget: Seconds to spend on timing; at least 5 rounds are done.

    Returns:
        For each contender its figures; times in milliseconds, memory in bytes per device.
    """
    devices = jax.devices()
    batch = model.batch(model.size)
    runners: dict[str, _Runner] = {}
    for name in names:
        runners[name] = _Runner(contenders.FACTORIES[name](model, nodes, devices), batch)
    if contenders.HAND in names:
        runners[CONTROL] = _Runner(contenders.FACTORIES[contenders.HAND](model, nodes, devices), batch)

    for runner in runners.values():
        runner.step()
    moments = {name: _moments(runner.state) for name, runner in runners.items()}
    reference = moments[contenders.PLAIN] if contenders.PLAIN in names else next(iter(moments.values()))

    times, busy = _interleaved({name: r.timed for name, r in runners.items()}, budget)
    rows = {}
    for name, runner in runners.items():
        memory = runner.compiled.memory_analysis()
        count, size = accumulators(runner.contender, batch)
        rows[name] = {
            "ms": 1e3 * statistics.median(times[name]),
            "ratio": _ratio(times, name),
            "busy_ratio": _ratio(busy, name),
            "rounds": len(times[name]),
            "lower_seconds": runner.lower_seconds,
            "compile_seconds": runner.compile_seconds,
            "temp_bytes": memory.temp_size_in_bytes,
            "held_bytes": runner.contender.held,
            "accumulators": count,
            "accumulator_bytes": size,
            "difference": _difference(moments[name], reference),
        }
    return rows


def growth(model: models.Model, nodes: Sequence[int], name: str) -> list[dict]:
    """Temporary memory of one contender for several V at the model's node size, on all devices of this process."""
    rows = []
    for v in nodes:
        batch = model.batch(model.node * v)
        contender = contenders.FACTORIES[name](model, v, jax.devices())
        shapes = _shapes((contender.state, contender.pieces(batch)[0]))
        memory = contender.function.lower(*shapes).compile().memory_analysis()
        rows.append({"nodes": v, "temp_bytes": memory.temp_size_in_bytes + contender.held})
        gc.collect()
    return rows


def tracing(model: models.Model, nodes: int, names: Sequence[str], repeats: int) -> dict[str, dict]:
    """Time to get the jaxpr of each contender's step, from nothing, in turn; the plain step's is the reference.

    Tracing keeps one thread busy, so it is the processor's time that counts: other programs do not show in it.
    """
    devices = jax.devices()
    batch = model.batch(model.size)
    times: dict[str, list[float]] = {name: [] for name in names}
    equations = {}
    for _ in range(repeats):
        for name in names:
            contender = contenders.FACTORIES[name](model, nodes, devices)
            shapes = _shapes((contender.state, contender.pieces(batch)[0]))
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            jaxpr = jax.make_jaxpr(contender.traceable)(*shapes)
            times[name].append(time.process_time() - start)
            equations[name] = count_equations(jaxpr.jaxpr)
    return {n: {"ms": 1e3 * statistics.median(times[n]), "equations": equations[n]} for n in names}


def resizing(model: models.Model, nodes: int, route: Sequence[int], rounds: int, warmed: bool) -> list[dict]:
    """Times moves of a training run from one number of devices to the next, prepared in the background before.

    A move is over when the first step on the new devices is. Its steps are compared with the ones that follow there.

    Args:
        model: The model.
        nodes: V.
        route: Numbers of devices, gone through in a circle.
        rounds: How often; the first round meets programs that were prepared and never run.
        warmed: Whether they were run once in the background as well.

    Returns:
        For each move of each round: milliseconds of moving the state, of the first step, and of a step after it;
        bytes of the state; seconds of compiling in the background.
    """
    batch = model.batch(model.size)
    places = {d: jax.devices()[:d] for d in route}
    step = vnode.virtualize(models.plain_step(model), virtual_nodes=nodes, donate_argnums=0).on(places[route[0]])
    state, _ = step(models.initial_state(model), batch)
    others = [places[d] for d in dict.fromkeys(route[1:])]
    prepared = (step.warm_up(others, state, batch) if warmed else step.prepare(others)).wait()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if hasattr(leaf, "nbytes"))
    rows, here = [], route[0]
    for number in range(rounds):
        for there in [*route[1:], route[0]]:
            for _ in range(2):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            step = step.on(places[there])
            began = time.perf_counter()
            state = jax.block_until_ready(step.put(state))
            moved = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            first = time.perf_counter()
            later = []
            for _ in range(3):
                start = time.perf_counter()
                state, _ = jax.block_until_ready(step(state, batch))
                later.append(time.perf_counter() - start)
            rows.append(
                {
                    "round": number,
                    "warmed up": warmed,
                    "move": f"{here} -> {there}",
                    "moving_ms": 1e3 * (moved - began),
                    "first_ms": 1e3 * (first - moved),
                    "step_ms": 1e3 * statistics.median(later),
                    "bytes": size,
                    "compile_seconds": prepared.seconds.get(step.placement),
                }
            )
            here = there
    return rows if warmed else [*rows, first_run(model, nodes, places[route[0]])]


def first_run(model: models.Model, nodes: int, devices: Sequence[jax.Device]) -> dict:
    """The same for a scan by hand that stays where it is: what any program takes longer when it runs first."""
    batch = model.batch(model.size)
    contender = contenders.by_hand(model, nodes, devices)
    compiled = contender.function.lower(contender.state, batch).compile()
    state, batch = jax.device_put((contender.state, batch), compiled.input_shardings[0])
    times = []
    for _ in range(4):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, batch))
        times.append(time.perf_counter() - start)
    return {
        "round": 0,
        "warmed up": False,
        "move": f"{contender.name}, {len(devices)}",
        "moving_ms": 0.0,
        "first_ms": 1e3 * times[0],
        "step_ms": 1e3 * statistics.median(times[1:]),
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "compile_seconds": None,
    }


def dispatch(names: Sequence[str], leaves: int, calls: int) -> dict[str, float]:
    """Microseconds from call to return of a step that computes next to nothing, with one node per device.

    Args:
        names: Which contenders. That of vnode comes once more inside `jax.jit`: the same program without the call.
        leaves: Number of arrays in the parameters (the state has three times as many).
        calls: Calls of each contender, in turn; who is first changes.
    """
    devices = jax.devices()
    model = _tiny(leaves, len(devices))
    batch = model.batch(model.size)
    live = {}
    for name in names:
        contender = contenders.FACTORIES[name](model, len(devices), devices)
        # The public callable, not the compiled object: its dispatch is what is measured.
        functions = {name: contender.function}
        if name == contenders.VNODE:
            functions[contenders.JITTED] = jax.jit(contender.function, donate_argnums=0)
        for key, function in functions.items():
            runner = _Runner(dataclasses.replace(contender, function=function), batch)
            state, _ = function(runner.state, runner.pieces[0])
            live[key] = [function, state, runner.pieces[0]]
    times: dict[str, list[float]] = {key: [] for key in live}
    order = list(live)
    for _ in range(calls):
        order = [*order[1:], order[0]]
        for key in order:
            function, state, piece = live[key]
            start = time.perf_counter()
            state, _metrics = function(state, piece)
            times[key].append(time.perf_counter() - start)
            live[key][1] = jax.block_until_ready(state)
    return {key: 1e6 * statistics.median(taken) for key, taken in times.items()}


def accumulators(contender: Contender, batch: Any) -> tuple[int, int]:
    """Number and bytes of the floating-point values carried by the outermost loops of a step, or held in its state."""
    if contender.held:
        return len(jax.tree.leaves(contender.state["params"])), contender.held
    shapes = _shapes((contender.state, contender.pieces(batch)[0]))
    jaxpr = jax.make_jaxpr(contender.traceable)(*shapes).jaxpr
    carried = [a for a in _carried(jaxpr) if jnp.issubdtype(a.dtype, jnp.inexact)]
    return len(carried), sum(a.size * a.dtype.itemsize for a in carried)


def count_equations(jaxpr: Any) -> int:
    """Equations of a jaxpr, those of its inner jaxprs included."""
    return sum(1 + sum(count_equations(inner) for inner in _inner(eqn)) for eqn in jaxpr.eqns)


def _carried(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            start = eqn.params["num_consts"]
            found += [v.aval for v in eqn.invars[start : start + eqn.params["num_carry"]]]
        elif eqn.primitive.name == "while":
            start = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            found += [v.aval for v in eqn.invars[start:]]
        else:
            for inner in _inner(eqn):
                found += _carried(inner)
    return found


def _inner(eqn: Any) -> list[Any]:
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.core.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, jex.core.Jaxpr):
                found.append(item)
    return found


def _interleaved(
    timed: dict[str, Callable[[], tuple[float, float]]], budget: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Runs everything in turn until the budget is spent, starting each round with another contender."""
    names = list(timed)
    times: dict[str, list[float]] = {name: [] for name in names}
    busy: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    rounds = 0
    while rounds < 5 or (time.perf_counter() - start < budget and rounds < 300):
        first = rounds % len(names)
        for name in names[first:] + names[:first]:
            clock, cores = timed[name]()
            times[name].append(clock)
            busy[name].append(cores)
        rounds += 1
    return times, busy


def _ratio(times: dict[str, list[float]], name: str) -> float:
    reference = times.get(contenders.HAND)
    if reference is None:
        return float("nan")
    return statistics.median(a / b for a, b in zip(times[name], reference, strict=True))


def _moments(state: Any) -> list[np.ndarray]:
    """Adam's first moments after one step: the gradient up to a factor, which the parameters show less clearly."""
    return [np.array(x, np.float64) for x in jax.tree.leaves(optax.tree_utils.tree_get(state["opt"], "mu"))]


def _difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    square = sum(float(((x - y) ** 2).sum()) for x, y in zip(a, b, strict=True))
    return (square / sum(float((y**2).sum()) for y in b)) ** 0.5


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _tiny(leaves: int, devices: int) -> models.Model:
    def init(key):
        return [jnp.ones(2) for _ in range(leaves)]

    def batch(n):
        return {"x": np.ones((n, 2), np.float32)}

    def terms(params, batch):
        values = batch["x"] * sum(params)
        return values.sum(), jnp.float32(values.shape[0]), values.sum()

    return models.Model("tiny", init, batch, terms, devices, 1)
