"""The role that loads data: ``.role("loader").run("unified.loader.service.serve").total(4)…not_driver()``.

Each of its workers makes batches for any number of data loaders of the job, one batch at a time, on its main thread.
"""

from __future__ import annotations

import logging
import pickle
import queue
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from unified.bus.calls.inbound import Caller, current_call
from unified.bus.calls.registry import rpc
from unified.bus.codec.codec import serialize
from unified.core.directory import Change, IncarnationDied
from unified.loader.messages import (
    Batch,
    BringParts,
    DropLoader,
    FetchBatch,
    OpenStream,
    Order,
    Reply,
    StreamLostError,
)
from unified.loader.role_workers import METHOD
from unified.loader.stream_host import StreamHost
from unified.worker.context import current_worker

logger = logging.getLogger(__name__)


class _Given(NamedTuple):
    """An order, in line."""

    order: Order
    owner: Caller | None
    answer: Future[Any]


_line: queue.SimpleQueue[_Given | list[Change] | None] = queue.SimpleQueue()
"""Orders and changes of the directory, in turn; None: stop."""
_dropped: set[str] = set()
"""Loaders whose consumers are done with them: what is still in line for them need not be made."""


@rpc(name=METHOD, inline=True)
def take_order(order: Order) -> Future[Any]:
    """Line an order up; it is answered when it was carried out."""
    if isinstance(order, DropLoader):
        _dropped.add(order.key)
    answer: Future[Any] = Future()
    _line.put(_Given(order, current_call(), answer))
    return answer


def serve() -> None:
    """Entry point of the role: make batches for other workers until this one is stopped.

    A module of your own whose entry point ends in a call of this imports `take_order` too, so that it is exported.

    Raises:
        NotInWorkerError: this process is not a worker.
    """
    worker = current_worker()
    worker.on_stop(lambda: _line.put(None))
    worker.bus.on_directory(lambda changes: _line.put(list(changes)))
    torch.set_num_threads(1)
    loaders = Loaders(worker.actor_info.name, worker.actor_info.node)
    while (given := _line.get()) is not None:
        if isinstance(given, list):
            loaders.learn(given)
            continue
        try:
            answer = loaders.carry_out(given.order, given.owner)
        except Exception as error:
            given.answer.set_exception(error)
        else:
            given.answer.set_result(answer)
        del given  # what it holds may be large, and the next order may be long in coming


class Loaders:
    """The loaders that this process makes batches for.

    Args:
        worker: full name of this worker.
        node: where it is.
    """

    def __init__(self, worker: str, node: str) -> None:
        self._worker = worker
        self._node = node
        self._hosts: dict[str, tuple[StreamHost, Caller | None]] = {}

    def carry_out(self, order: Order, owner: Caller | None) -> Reply | None:
        """Do as the consumer `owner` says.

        Raises:
            StreamLostError: this process has never heard of that loader or stream.
        """
        if isinstance(order, DropLoader):
            _dropped.discard(order.key)
            self._close(order.key)
            return None
        if order.key in _dropped:
            raise StreamLostError(f"loader {order.key} was dropped by its consumer.")
        if isinstance(order, BringParts):
            packed = order.packed
            host = StreamHost(lambda: pickle.loads(packed), where=self._worker, node=self._node, is_sent_on=True)
            self._hosts[order.key] = host, owner
            return None
        if order.key not in self._hosts:
            raise StreamLostError(f"worker {self._worker} does not know loader {order.key}: it has been restarted.")
        host, _ = self._hosts[order.key]
        if isinstance(order, OpenStream):
            host.open(order)
            return None
        return self._made(host, order)

    def learn(self, changes: list[Change]) -> None:
        """Let go of what consumers had whose lives are over."""
        for death in (change for change in changes if isinstance(change, IncarnationDied)):
            for key, (_, owner) in list(self._hosts.items()):
                if owner is None or owner.worker != death.worker:
                    continue
                if death.inbox is None or death.inbox.inbox_id == owner.inbox_id:
                    logger.info("worker=%s event=loader-dropped loader=%s owner=%s", self._worker, key, owner.worker)
                    self._close(key)

    def _made(self, host: StreamHost, order: FetchBatch) -> Reply:
        reply = host.fetch(order)
        if not isinstance(reply, Batch):
            return reply
        return Batch(serialize(reply.value))

    def _close(self, key: str) -> None:
        if key in self._hosts:
            self._hosts.pop(key)[0].close()
