"""Makes several worlds in one process, each process of which is a thread with a client of XLA of its own.

Knows the constructors of services, clients and gloo that jax has for itself. Must not know what the threads compute.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jax._src.lib import xla_client
from jaxlib import _jax

from tests.processes import free_port
from vnode.placement.failure_board import Board
from vnode.placement.rendezvous import Rendezvous
from vnode.placement.world import World, in_world

FOREVER = 10**6
"""Seconds without a sign of life after which the service would miss a process."""


@contextlib.contextmanager
def service() -> Iterator[str]:
    """A service of one node, which all processes of a world connect to as that node; yields its address."""
    address = f"127.0.0.1:{free_port()}"
    there = _jax.get_distributed_runtime_service(
        address, 1, heartbeat_timeout=FOREVER, shutdown_timeout=1, recoverable=True
    )
    try:
        yield address
    finally:
        there.shutdown()


def connected(address: str) -> Any:
    """A client of the service."""
    client = _jax.get_distributed_runtime_client(
        address,
        0,
        init_timeout=10,
        shutdown_timeout=1,
        heartbeat_timeout=FOREVER,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    return client


@contextlib.contextmanager
def joined(address: str, index: int, count: int, generation: int) -> Iterator[World]:
    """The context of a world, for one of its processes, which must all call it at once."""
    client = Rendezvous(connected(address), index, count)
    gloo = _jax.make_gloo_tcp_collectives(distributed_client=client.client, hostname="127.0.0.1")
    backend = xla_client.make_cpu_client(
        asynchronous=True,
        distributed_client=client.client,
        node_id=index,
        num_nodes=count,
        collectives=gloo,
        num_devices=1,
    )
    board = Board(client, index) if count > 1 else None
    here = World(count, index, client, board, generation=generation, own_devices=tuple(backend.devices()))
    try:
        with in_world(here):
            yield here
    finally:
        if board is not None:
            board.close()
        client.client.shutdown()  # or it would abort this process when the service ends


def in_threads(work: Callable[[int], Any], count: int, patience: float = 60.0) -> list[Any]:
    """The results of a function for each of so many numbers, called in threads at once.

    Raises:
      TimeoutError: one did not return in time.
      Exception: what one of them raised.
    """
    results: list[Any] = [TimeoutError("a thread did not end in time")] * count

    def run(index: int) -> None:
        try:
            results[index] = work(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def in_worlds(work: Callable[[World], Any], count: int, generation: int = 1) -> list[Any]:
    """What a function returns in each process of a world, which are threads of this one."""

    def begin(index: int) -> Any:
        with joined(address, index, count, generation) as here:
            return work(here)

    with service() as address:
        return in_threads(begin, count)
