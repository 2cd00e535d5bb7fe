"""The HTTP server of `unified-gateway`: listens, tells its address, serves until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import NamedTuple

import uvicorn

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
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        gateway = app.state.gateway
        await gateway.open()
        try:
            await _Server(config, url, listening.address_file).serve(sockets=[listener])
        finally:
            await gateway.close()
    return 0


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
