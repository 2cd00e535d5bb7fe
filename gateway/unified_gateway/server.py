"""The HTTP server of `unified-gateway`: listens, announces its address, serves until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from unified.sd_notify import ServiceNotifier
from unified_gateway.app import create_app
from unified_gateway.options import GatewayOptions
from unified_gateway.page.guard import PageOptions
from unified_gateway.service import Gateway
from unified_gateway.tokens import Tokens

MAX_CONNECTIONS = 2000
STOP_WITHIN_S = 5
"""Seconds for open requests to end when the gateway stops; afterwards, followers of logs are cut off."""
UNREAD_WITHIN_S = 60
"""Seconds after which a client that reads nothing is cut off."""
_log = logging.getLogger("unified.gateway")


class Listening(NamedTuple):
    host: str
    port: int
    address_file: Path | None = None
    uds: Path | None = None
    """Unix socket to listen on, in place of host and port."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    is_printed: bool = False
    """True to write the address to stdout as well, once the gateway is ready."""

    def url(self, listener: socket.socket) -> str:
        """Return the address for a browser; for a Unix socket, ``http+unix://PATH`` or ``https+unix://PATH``."""
        scheme = "https" if self.tls_cert else "http"
        if self.uds is not None:
            return f"{scheme}+unix://{self.uds}"
        host, port = listener.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class _Server(uvicorn.Server):
    """Server that says when it is ready."""

    def __init__(self, config: uvicorn.Config, url: str, listening: Listening, gateway: Gateway) -> None:
        super().__init__(config)
        self.url = url
        self._listening = listening
        self._gateway = gateway

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again at the end, before the gateway is closed."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _log.info("event=gateway-ready address=%s", self.url)
        page, file = self._gateway.page, self._listening.address_file
        if page is not None and page.welcome:
            _log.info("event=page-ready url=%s/#ticket=%s (once, within 5 minutes)", self.url, page.welcome)
        if file is not None:
            temporary = file.with_name(f".{file.name}.{os.getpid()}")
            temporary.write_text(f"{self.url}\n")
            temporary.replace(file)
        if self._listening.is_printed:
            print(self.url, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._gateway.page is not None:  # otherwise its open streams would use up `STOP_WITHIN_S`
            await self._gateway.page.end_streams()
        await super().shutdown(sockets)


def run_server(
    options: GatewayOptions,
    tokens: Tokens,
    listening: Listening,
    notifier: ServiceNotifier,
    page: PageOptions | None = None,
) -> int:
    """Serve until a signal ends it; return the exit code.

    Raises:
        OSError: the address cannot be listened on.
        UnifiedError: the cluster cannot be used, or an option cannot be carried out.
    """
    app = create_app(options, tokens, page=page)
    return asyncio.run(_serve(app, options, listening, notifier))


async def _serve(app: FastAPI, options: GatewayOptions, listening: Listening, notifier: ServiceNotifier) -> int:
    config = uvicorn.Config(
        app,
        http=type("_Protocol", (_Protocol,), {"head_within_s": options.head_within_s}),
        lifespan="off",  # `_serve` opens the gateway, so that an error is one line and no traceback
        log_config=None,
        access_log=False,  # admission logs writes, and counts all requests
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=STOP_WITHIN_S,
        ssl_certfile=listening.tls_cert,
        ssl_keyfile=listening.tls_key,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with _listen(listening) as listener:
        gateway = app.state.gateway
        server = _Server(config, listening.url(listener), listening, gateway)
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
            beating = asyncio.create_task(_notify(notifier, server))
            try:
                await server.serve(sockets=[listener])
            finally:
                beating.cancel()
                await gateway.close()
    return 0


async def _notify(notifier: ServiceNotifier, server: _Server) -> None:
    """Notify systemd, if it runs this service, that the loop runs and that the server is ready."""
    while (due := notifier.next_deadline) is not None:
        await asyncio.sleep(max(0.0, due - time.monotonic()) if server.started else 0.01)
        notifier.beat(server.started, lambda: f"serves at {server.url}")
        if server.should_exit:
            notifier.stopping()


@contextmanager
def _signals(server: uvicorn.Server) -> Iterator[asyncio.Event]:
    """Let the first SIGTERM or SIGINT set the event and stop the server in order; let the second stop it at once."""
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
    """HTTP protocol with a deadline for the head of a request."""

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
        """Set the deadline if no request is under way; otherwise cancel it."""
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


@contextmanager
def _listen(listening: Listening) -> Iterator[socket.socket]:
    """Listen. A Unix socket is for its owner alone, and is removed at the end."""
    if listening.uds is not None:
        with _listen_unix(listening.uds) as listener:
            yield listener
        return
    host, port = listening.host, listening.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # accepted sockets inherit it: a client that reads nothing is cut off
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_WITHIN_S * 1000)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be listened on: {error.strerror}. Choose another --port.") from None
    with listener:
        yield listener


@contextmanager
def _listen_unix(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if path.is_socket() and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink()  # its listener was killed
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
        except OSError as error:
            reason = "it is there already" if error.errno == errno.EADDRINUSE else error.strerror or error
            raise OSError(f"{path} cannot be listened on: {reason}. Choose another --uds.") from None
        own = path.stat().st_ino
        try:
            yield listener
        finally:
            with suppress(OSError):
                if path.stat().st_ino == own:
                    path.unlink()
