"""Requests of the gateway to the master, which wait without a thread."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from unified.client.connection import MasterConnection, PendingReply, connect_to
from unified.protocol.client_master import ClientRequest

A = TypeVar("A")


class MasterClient:
    """A connection to one master, for one event loop. It reconnects after its socket broke.

    Args:
        address: ``tcp://HOST:PORT``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._connection = connect_to(address)

    @property
    def connection(self) -> MasterConnection:
        """The connection, for threads; a new one if its socket broke."""
        if not self._connection.is_open and not self._connection.is_closed:
            self._connection.close()
            self._connection = connect_to(self.address)
        return self._connection

    async def ask(self, message: ClientRequest, expected: type[A], *, timeout_s: float | None = None) -> A:
        """Send a request, and wait for its answer.

        Args:
            timeout_s: seconds to wait, beyond those that the request waits on purpose; None: the connection's.

        Raises:
            RefusedError: the master said no.
            MasterUnreachableError: no answer came in time.
        """
        connection = self.connection
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def done(_: PendingReply) -> None:
            loop.call_soon_threadsafe(_settle, future)

        reply = connection.send(message, timeout_s=timeout_s, when_done=done)
        try:
            await future
        except asyncio.CancelledError:
            connection.abandon(reply)
            raise
        return connection.take(reply, expected)

    async def close(self) -> None:
        """End the connection; requests that wait fail."""
        await asyncio.to_thread(self._connection.close)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
