"""Address of a service -> a further client of JAX for several processes: the devices of another world.

Knows the private constructors of JAX's clients, here alone. Must not know who asks for a world, nor what it computes.

A process may have several clients, each with its own devices, so that the next world is made while this one trains. The
processes of a world find one another by a service outside of them. The service has a single node, and every process
connects as that node. So nobody waits for the others to connect, no heartbeat is missed when one dies, and JAX aborts
no process because of another one. (JAX aborts a process whose service ends: it must outlive the processes.)
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import socket
import weakref
from collections.abc import Mapping
from typing import Any

import jax

from vnode.compat import client_constructors
from vnode.errors import ProcessError, layout_message
from vnode.placement.failure_board import Board
from vnode.placement.rendezvous import Rendezvous
from vnode.placement.world import World

HEARTBEAT = 10**6
"""Seconds between heartbeats: in effect none is sent."""

CONNECT = 20
"""Seconds within which the service must answer."""


def join_world(
    address: str,
    index: int,
    count: int,
    *,
    generation: int = 0,
    interface: str = "127.0.0.1",
    workers: tuple[int, ...] = (),
) -> World:
    """Joins a world; waits until all of its processes do.

    Args:
      address: the service's address, ``host:port``.
      index: this process's number.
      count: the number of processes.
      generation: the number of the world.
      interface: the address at which other processes reach this one.
      workers: the numbers of the workers, for messages.

    Returns:
      The world. A single process's world has the devices that JAX shows.

    Raises:
      ProcessError: this version of JAX lacks the constructors, or the service does not answer.
    """
    if count == 1:
        return World(own_devices=tuple(jax.local_devices()), generation=generation, workers=workers)
    check_reachable(address)
    client = connect(address)
    backend = backend_of(client, index, count, interface)
    meeting = Rendezvous(client, index, count)
    board = Board(meeting, index)
    devices = tuple(backend.devices())
    return World(count, index, meeting, board, own_devices=devices, generation=generation, workers=workers)


def leave_world(world: World) -> None:
    """Leaves a world of several processes without waiting for any; its service may end afterwards.

    Its arrays stay valid. Another process that still waits for this one is not notified.
    """
    assert world.board is not None
    world.board.close()
    world.client.client.shutdown()


def connect(address: str) -> Any:
    """Connects a client to a service."""
    client = constructors()["get_distributed_runtime_client"](
        address,
        0,
        init_timeout=CONNECT,
        shutdown_timeout=1,
        heartbeat_timeout=HEARTBEAT,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    return client


def backend_of(client: Any, index: int, count: int, interface: str) -> Any:
    """Makes one process's XLA client; waits until all processes make theirs."""
    made = constructors()
    collectives = made["make_gloo_tcp_collectives"](distributed_client=client, hostname=interface)
    backend = made["make_cpu_client"](
        asynchronous=True,
        distributed_client=client,
        node_id=index,
        num_nodes=count,
        collectives=collectives,
        num_devices=jax.local_device_count(),
    )
    MADE.add(backend)
    return backend


MADE: weakref.WeakSet[Any] = weakref.WeakSet()
"""The live XLA clients that were made here."""


KEPT: weakref.WeakSet[Any] = weakref.WeakSet()
"""The clients among them that are never destroyed."""


def keep_client(backend: Any) -> None:
    """Prevents a client's destruction: that waits for its threads, and they perhaps for a lost process."""
    if backend not in KEPT:
        KEPT.add(backend)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


@atexit.register
def keep_clients() -> None:
    """Prevents the destruction of all clients at the end of the process."""
    for backend in list(MADE):
        keep_client(backend)


class Stage:
    """All processes of a world, simulated in this one, to compile for them; none of them may compute.

    Args:
      count: the number of processes.
    """

    def __init__(self, count: int) -> None:
        self.count, self.service, self.client = count, None, None

    def __enter__(self) -> Stage:
        try:
            self.set_up()
        except BaseException:  # such as at the end of the process, when no more threads are started
            self.__exit__()
            raise
        return self

    def set_up(self) -> None:
        """Makes the service, and the clients of all processes."""
        if self.count > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            self.service = constructors()["get_distributed_runtime_service"](
                address, 1, heartbeat_timeout=HEARTBEAT, shutdown_timeout=1
            )
            self.client = client = connect(address)
            with concurrent.futures.ThreadPoolExecutor(self.count) as pool:
                made = [pool.submit(backend_of, client, i, self.count, "127.0.0.1") for i in range(self.count)]
                self.backends = [each.result() for each in made]

    def world(self, index: int) -> World:
        """The world as one of its processes sees it."""
        if self.count == 1:
            return World(own_devices=tuple(jax.local_devices()))
        meeting, board = Rendezvous(self.client, index, self.count), Board.silent(index)
        return World(self.count, index, meeting, board, own_devices=tuple(self.backends[index].devices()))

    def __exit__(self, *_: Any) -> None:
        if self.client is not None and self.service is not None:
            self.client.shutdown()  # before its service, or JAX would abort this process
            self.service.shutdown()
            self.backends = []


def check_reachable(address: str) -> None:
    """Checks that the service answers: JAX aborts a process that cannot connect.

    Raises:
      ProcessError: it does not answer.
    """
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT).close()
    except OSError as error:
        raise ProcessError(
            layout_message(
                f"the service of the workers at {address} does not answer: {error}",
                remedies=["does the supervisor still run? Start the job again: it resumes from its checkpoint"],
            )
        ) from error


def constructors() -> Mapping[str, Any]:
    """The constructors of JAX's clients, by name.

    Raises:
      ProcessError: this version of JAX lacks them.
    """
    if jax.default_backend() != "cpu":
        raise ProcessError(
            layout_message(
                f"a second client of JAX is tested only on CPUs, and this process computes on {jax.default_backend()}.",
                remedies=[
                    "replace all workers at each change: vnode run --restart, launch(restart=True)",
                    "or run them on CPUs: JAX_PLATFORMS=cpu",
                ],
            )
        )
    try:
        return client_constructors()
    except (ImportError, AttributeError) as error:
        raise ProcessError(
            layout_message(
                f"JAX {jax.__version__} cannot make a second client in any way that vnode knows: {error}",
                remedies=["use a version that vnode was tested with: 0.10.2 to 0.12", "or start without workers"],
            )
        ) from error
