"""Admission of requests before anything reads them: tokens, rates, sizes of bodies. It also counts all requests.

It is plain ASGI, outside of the framework, because each status read passes through it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from unified.security.keys import is_loopback
from unified_gateway.http.limits import RateLimits, TokenBucket
from unified_gateway.http.telemetry import UNMATCHED, Telemetry
from unified_gateway.tokens import TOKEN_HEADER, Tokens

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY = 1 << 20
MAX_DRAINED = 64 << 20
"""Most bytes of an oversized body that are read and dropped, so that the client goes on to read the answer."""
BODY_TIMEOUT_S = 30.0
SEND_WITHIN_S = 60.0
"""Seconds within which a client has to take each part of a streamed answer."""
OPEN_PATHS = frozenset({"/healthz"})
READS = frozenset({"GET", "HEAD"})
REJECTED_PER_S, REJECTED_BURST = 50.0, 200.0
"""Limit of answers 401 to wrong tokens, for all clients together; above it, the answer is 429."""
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_HEADER = TOKEN_HEADER.lower().encode()
_log = logging.getLogger("unified.gateway")


class Rejection(NamedTuple):
    """Answer to a request that is not admitted."""

    status: int
    detail: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


class HttpAdmission:
    """ASGI middleware that lets requests in to `app`, or answers them itself."""

    def __init__(self, app: App, *, tokens: Tokens, limits: RateLimits, telemetry: Telemetry) -> None:
        self._app = app
        self._tokens = tokens
        self._limits = limits
        self._telemetry = telemetry
        self._rejected = TokenBucket(REJECTED_PER_S, REJECTED_BURST)
        self._rejections_logged = TokenBucket(1.0, 1.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        is_write = scope["method"] in WRITES
        headers = dict(scope["headers"])
        client = self._tokens.client_of(_text(headers.get(_HEADER)) or _bearer(headers))

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                self._telemetry.count(scope["method"], _route(scope), status, time.perf_counter() - began)
                if is_write and (is_admitted or self._rejections_logged.take()):
                    text = "event=request client=%s method=%s path=%s status=%d"
                    _log.info(text, client, scope["method"], ascii(scope["path"][:200]), status)
            if message.get("more_body", False):
                async with asyncio.timeout(SEND_WITHIN_S):
                    await send(message)
            else:
                await send(message)

        is_admitted = False
        rejection = self._reject(scope, headers, client, is_write=is_write)
        if rejection is None and is_write:
            body = await read_body(headers, receive)
            rejection = body if isinstance(body, Rejection) else None
            receive = receive if isinstance(body, Rejection) else replay_body(body, receive)
        if rejection is not None:
            await _answer(counted, rejection)
        else:
            is_admitted = True
            try:
                await self._app(scope, receive, counted)
            except Exception:  # a defect: an outer layer answers 500
                self._telemetry.count(scope["method"], _route(scope), 500, time.perf_counter() - began)
                raise

    def _reject(
        self, scope: Scope, headers: dict[bytes, bytes], client: str | None, *, is_write: bool
    ) -> Rejection | None:
        """Return the rejection of a request, by its head alone; None: it is admitted."""
        if scope["path"] in OPEN_PATHS and scope["method"] in READS:
            return None
        if client is None:
            if not self._rejected.take():
                return Rejection(429, "too many requests have no token: slow down.", ((b"retry-after", b"1"),))
            reason = "is wrong" if _HEADER in headers or _bearer(headers) else "is missing"
            return Rejection(401, f"the token in the header {TOKEN_HEADER} {reason}.")
        if is_write and not self._tokens.may_write(client):
            return Rejection(403, f"the token {client!r} is for reading alone.")
        if not self._tokens.are_needed:
            if not _is_local(scope, headers):
                detail = "this gateway has no token and serves its own host alone: set TRAINER_API_TOKEN where it runs."
                return Rejection(403, detail)
            if is_write and not is_own_page(headers):
                return Rejection(403, "this gateway has no token and refuses requests from pages of other sites.")
        wait_s = self._limits.admit(client, is_write=is_write)
        if wait_s is None:
            return None
        after = str(max(1, round(wait_s + 0.5))).encode()
        return Rejection(429, f"too many requests of client {client!r}: slow down.", ((b"retry-after", after),))


def _bearer(headers: dict[bytes, bytes]) -> str | None:
    """Return the token of ``Authorization: Bearer``, as Prometheus sends it; None: there is none."""
    scheme, _, token = (_text(headers.get(b"authorization")) or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _is_local(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Return True if address and ``Host`` of a request are loopback: no other host's name led a browser here."""
    server = scope.get("server")
    host = _text(headers.get(b"host")) or "localhost"
    return (server is None or is_loopback(str(server[0]))) and is_loopback(host)


def is_own_page(headers: dict[bytes, bytes]) -> bool:
    """Return False if a browser says that another site's page makes the request."""
    site = headers.get(b"sec-fetch-site", b"none")
    origin = (_text(headers.get(b"origin")) or "").partition("://")[2]
    return site in (b"none", b"same-origin") and origin in ("", _text(headers.get(b"host")))


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", UNMATCHED)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


async def read_body(headers: dict[bytes, bytes], receive: Receive, limit: int = MAX_BODY) -> bytes | Rejection:
    """Read the whole body, of at most `limit` bytes, within `BODY_TIMEOUT_S`."""
    announced = headers.get(b"content-length", b"0")
    nbytes = int(announced) if announced.isdigit() else 0
    too_large = Rejection(
        413, f"the body is larger than {limit} bytes: put large values into a file.", ((b"connection", b"close"),)
    )
    if nbytes > MAX_DRAINED or (nbytes > limit and b"expect" in headers):
        return too_large
    parts: list[bytes] = []
    total = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return Rejection(400, "the client went away before all of the body was there.")
                total += len(message.get("body", b""))
                if total <= limit:
                    parts.append(message.get("body", b""))
                elif total > MAX_DRAINED:
                    return too_large
                if not message.get("more_body", False):
                    return b"".join(parts) if total <= limit else too_large
    except TimeoutError:
        close = ((b"connection", b"close"),)
        return Rejection(408, f"the body was not there within {BODY_TIMEOUT_S:g} s.", close)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body in one piece, then the messages of the given `receive`."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Send, rejection: Rejection) -> None:
    body = json.dumps({"detail": rejection.detail}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *rejection.headers,
    ]
    await send({"type": "http.response.start", "status": rejection.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
