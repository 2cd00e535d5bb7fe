"""The HTTP server of `unified-gateway`: listens, tells its address, serves until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from unified_master.gateway.app import create_app
from unified_master.gateway.options import GatewayOptions
from unified_master.gateway.tokens import Tokens

MAX_CONNECTIONS = 2000
STOP_WITHIN_S = 5
"""Seconds for requests that are under way when the gateway is stopped; a follower of logs is cut off then."""
_log = logging.getLogger("unified.gateway")


class Listening(NamedTuple):
    """Address of the server, and the file that tells it."""

    host: str
    port: int
    address_file: Path | None = None


class _Server(uvicorn.Server):
    """Server that says when it is ready."""

    def __init__(self, config: uvicorn.Config, url: str, address_file: Path | None) -> None:
        super().__init__(config)
        self._url = url
        self._address_file = address_file

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again at the end, before the gateway is closed."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _log.info("event=gateway-ready address=%s", self._url)
        if self._address_file is not None:
            temporary = self._address_file.with_name(f".{self._address_file.name}.{os.getpid()}")
            temporary.write_text(f"{self._url}\n")
            temporary.replace(self._address_file)


def run_server(options: GatewayOptions, tokens: Tokens, listening: Listening) -> int:
    """Serve until a signal ends it; return the exit code.

    Raises:
        OSError: the address cannot be listened on.
        UnifiedError: the cluster cannot be used, or an option not be carried out.
    """
    return asyncio.run(_serve(options, tokens, listening))


async def _serve(options: GatewayOptions, tokens: Tokens, listening: Listening) -> int:
    app = create_app(options, tokens)
    config = uvicorn.Config(
        app,
        http=type("_Protocol", (_Protocol,), {"head_within_s": options.head_within_s}),
        lifespan="off",  # the gateway is opened here, so that what goes wrong is one line and no traceback
        log_config=None,
        access_log=False,  # admission logs what changes something, and counts the rest
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=STOP_WITHIN_S,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with _listen(listening.host, listening.port) as listener:
        host, port = listener.getsockname()[:2]
        server = _Server(config, f"http://{f'[{host}]' if ':' in host else host}:{port}", listening.address_file)
        gateway = app.state.gateway
        with _signals(server) as is_stopping:
            opening = asyncio.create_task(gateway.open())
            stopping = asyncio.create_task(is_stopping.wait())
            await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not opening.done():
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
                return 0
            await opening
            try:
                await server.serve(sockets=[listener])
            finally:
                await gateway.close()
    return 0


@contextmanager
def _signals(server: uvicorn.Server) -> Iterator[asyncio.Event]:
    """Let SIGTERM and SIGINT stop the server in order, and a second one at once; the event is set by the first."""
    loop = asyncio.get_running_loop()
    is_stopping = asyncio.Event()

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        is_stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield is_stopping
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _Protocol(H11Protocol):
    """HTTP that does not wait for ever for the head of a request."""

    head_within_s: ClassVar[float]
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Have a deadline if, and only if, no request is under way."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._deadline is None:
            self._deadline = self.loop.call_later(self.head_within_s, self._close_if_idle)
        elif not is_idle and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_if_idle(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be listened on: {error.strerror}. Choose another --port.") from None
    return listener
