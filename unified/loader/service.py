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
from unified.bus.codec.codec import encode
from unified.core.directory import Change, IncarnationDied
from unified.loader.messages import (
    BringParts,
    DropLoader,
    FetchedBatch,
    FetchReply,
    LoaderMessage,
    OpenStream,
    StreamLostError,
)
from unified.loader.role_workers import METHOD
from unified.loader.stream_host import StreamHost
from unified.worker.context import current_worker

logger = logging.getLogger(__name__)


class _QueuedMessage(NamedTuple):
    message: LoaderMessage
    owner: Caller | None
    answer: Future[Any]


_line: queue.SimpleQueue[_QueuedMessage | list[Change] | None] = queue.SimpleQueue()
"""Messages and changes of the directory, in order; None: stop."""
_dropped: set[str] = set()
"""Loaders whose consumers are done with them: waiting requests for them are dropped."""


@rpc(name=METHOD, inline=True)
def take_order(message: LoaderMessage) -> Future[Any]:
    """Queue a message; it is answered when it was carried out."""
    if isinstance(message, DropLoader):
        _dropped.add(message.key)
    answer: Future[Any] = Future()
    _line.put(_QueuedMessage(message, current_call(), answer))
    return answer


def serve() -> None:
    """Entry point of the role: make batches for other workers until this one is stopped.

    If your own entry point calls this function, its module must import `take_order` too, so that it is exported.

    Raises:
        NotInWorkerError: this process is not a worker.
    """
    worker = current_worker()
    worker.on_stop(lambda: _line.put(None))
    worker.bus.on_directory(lambda changes: _line.put(list(changes)))
    torch.set_num_threads(1)
    loaders = HostedLoaders(worker.actor_info.name, worker.actor_info.node)
    while (given := _line.get()) is not None:
        if isinstance(given, list):
            loaders.learn(given)
            continue
        try:
            answer = loaders.handle(given.message, given.owner)
        except Exception as error:
            given.answer.set_exception(error)
        else:
            given.answer.set_result(answer)
        del given  # frees memory, perhaps much, before the wait for the next message


class HostedLoaders:
    """The loaders that this process makes batches for."""

    def __init__(self, worker: str, node: str) -> None:
        self._worker = worker
        self._node = node
        self._hosts: dict[str, tuple[StreamHost, Caller | None]] = {}

    def handle(self, message: LoaderMessage, owner: Caller | None) -> FetchReply | None:
        """Carry out a message of the consumer `owner`.

        Raises:
            StreamLostError: this process does not know that loader or stream.
        """
        if isinstance(message, DropLoader):
            _dropped.discard(message.key)
            self._close(message.key)
            return None
        if message.key in _dropped:
            raise StreamLostError(f"loader {message.key} was dropped by its consumer.")
        if isinstance(message, BringParts):
            packed = message.packed
            host = StreamHost(lambda: pickle.loads(packed), where=self._worker, node=self._node, is_sent_on=True)
            self._hosts[message.key] = host, owner
            return None
        if message.key not in self._hosts:
            raise StreamLostError(f"worker {self._worker} does not know loader {message.key}: it has been restarted.")
        host, _ = self._hosts[message.key]
        if isinstance(message, OpenStream):
            host.open(message)
            return None
        reply = host.fetch(message)
        return FetchedBatch(encode(reply.value)) if isinstance(reply, FetchedBatch) else reply

    def learn(self, changes: list[Change]) -> None:
        """Drop the loaders of consumers whose incarnations are dead."""
        for death in (change for change in changes if isinstance(change, IncarnationDied)):
            for key, (_, owner) in list(self._hosts.items()):
                if owner is None or owner.worker != death.worker:
                    continue
                if death.inbox is None or death.inbox.inbox_id == owner.inbox_id:
                    logger.info("worker=%s event=loader-dropped loader=%s owner=%s", self._worker, key, owner.worker)
                    self._close(key)

    def _close(self, key: str) -> None:
        if key in self._hosts:
            self._hosts.pop(key)[0].close()
