"""What type checkers and editors know of vnode's steps; `tests/test_typing.py` runs pyright on it, nothing is executed.

Knows the public interface. Must not hold code that is only valid at run time. A line with an ignored error must have
that error: an unnecessary one is an error itself.
"""

# pyright: reportAttributeAccessIssue=true, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import Any, assert_type

import jax

import vnode


class State(dict[str, jax.Array]):
    pass


def plain(state: State, batch: jax.Array, *, rate: float = 0.1) -> tuple[State, float]:
    return state, rate


# Called with the step, it keeps its signature

step = vnode.virtualize(plain, virtual_nodes=4)
assert_type(step(State(), jax.numpy.ones(3)), tuple[State, float])
assert_type(step(State(), jax.numpy.ones(3), rate=0.2), tuple[State, float])
step(State())  # pyright: ignore[reportCallIssue]
step(State(), jax.numpy.ones(3), speed=1.0)  # pyright: ignore[reportCallIssue]
step("state", jax.numpy.ones(3))  # pyright: ignore[reportArgumentType]

# So it does on other devices, and as a decorator

moved = step.on(jax.devices()[:1])
assert_type(moved(State(), jax.numpy.ones(3)), tuple[State, float])
assert_type(moved.placement, vnode.Placement)


@vnode.virtualize(virtual_nodes=4, in_axes=(None, 0), donate_argnums=0)
def decorated(state: State, batch: jax.Array) -> State:
    return state


assert_type(decorated(State(), jax.numpy.ones(3)), State)
decorated(State())  # pyright: ignore[reportCallIssue]

# A number of nodes that is to be found

automatic = vnode.virtualize(plain, virtual_nodes="auto", memory="16GiB")
assert_type(automatic(State(), jax.numpy.ones(3)), tuple[State, float])


@vnode.virtualize(virtual_nodes="auto")
def found(state: State, batch: jax.Array) -> State:
    return state


assert_type(found(State(), jax.numpy.ones(3)), State)
found_step: vnode.AutoStep[..., State] = found
known_step: vnode.VirtualStep[..., State] = decorated

# Options

vnode.virtualize(plain, virtual_nodes="many")  # pyright: ignore[reportCallIssue, reportArgumentType]
vnode.virtualize(plain, virtual_nodes=4, memory="16GiB")  # pyright: ignore[reportCallIssue, reportArgumentType]
vnode.virtualize(plain, virtual_nodes=4, nodes=4)  # pyright: ignore[reportCallIssue]
vnode.virtualize(plain)  # pyright: ignore[reportCallIssue]


# A step in a class is a method


class Trainer:
    @vnode.virtualize(virtual_nodes=4, in_axes=(None, None, 0))
    def step(self, state: State, batch: jax.Array) -> State:
        return state


assert_type(Trainer().step(State(), jax.numpy.ones(3)), State)
Trainer().step(State())  # pyright: ignore[reportCallIssue]


# Objects of flax.nnx, and the other modules that are imported when asked for


@vnode.nnx.virtualize(virtual_nodes=4, in_axes=(None, 0))
def of_objects(model: Any, batch: jax.Array) -> float:
    return 0.0


assert_type(of_objects(None, jax.numpy.ones(3)), float)
of_objects(None)  # pyright: ignore[reportCallIssue]
assert_type(vnode.data.Batches([1, 2], batch_size=2), vnode.data.Batches)
names = [vnode.elastic.run, vnode.grain.Dataset]
nothing = vnode.nothing  # pyright: ignore[reportAttributeAccessIssue]

# What is said of a step

assert_type(vnode.__version__, str)
assert_type(step.placement.virtual_nodes, int)
assert_type(vnode.check(step, (State(), jax.numpy.ones(3)), devices=[1, 2]).ok, bool)
assert_type(vnode.check(step, (State(), jax.numpy.ones(3))).leaves[0].path, str)
