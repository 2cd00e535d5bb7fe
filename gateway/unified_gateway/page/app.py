"""The page as an application of its own, in front of the training API: its parts, and the choice of its requests."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles

from unified.coordinator.client import RemoteCoordinator
from unified.errors import RefusedError
from unified.security.keys import find_key
from unified_gateway.http.admission import App, Receive, Scope, Send, read_body, replay_body
from unified_gateway.http.limits import RateLimits, TokenBucket
from unified_gateway.http.telemetry import Telemetry
from unified_gateway.master_client import MasterClient
from unified_gateway.page import session
from unified_gateway.page.guard import HEADERS, Guard, PageOptions
from unified_gateway.page.watcher import ClusterWatcher
from unified_gateway.tokens import Tokens

STATIC = Path(__file__).parents[1] / "static"
"""Files of the browser's side."""
VIEWS = frozenset({"", "jobs", "nodes", "datasets", "tasks", "logs", "about"})
"""First words of the paths that the page's own router knows."""
PREFIXES = ("/page/", "/static/")
NUM_READERS = 4
MAX_BODY = 16 << 10
SIGN_IN_FIRST = "sign in first: there is no session, or it is over."
_log = logging.getLogger("unified.gateway")


class PageError(Exception):
    """Error that the page answers with.

    Args:
        status: HTTP status.
        reason: a sentence for the user.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class TaskSource(Protocol):
    """Source of the runs of the training API."""

    async def tasks(self) -> list[dict[str, Any]]:
        """Return all known runs, newest first, as the training API lists them.

        Raises:
            MasterUnreachableError: the cluster does not answer.
        """
        ...


class OpenPage(NamedTuple):
    """Parts of the page of a gateway that is open."""

    master: MasterClient
    watcher: ClusterWatcher
    sessions: session.Sessions
    coordinator: RemoteCoordinator
    threads: ThreadPoolExecutor


class PageService:
    """The page of one gateway.

    Args:
        options: where the page is served, and to whom.
        tokens: tokens of the gateway.
        source: source of the runs of the training API.
        telemetry: counts the page's requests.
    """

    def __init__(self, options: PageOptions, tokens: Tokens, source: TaskSource, telemetry: Telemetry) -> None:
        self.options = options
        self.source = source
        self.telemetry = telemetry
        self._tries = RateLimits((session.TRIES_PER_S, session.TRIES_BURST))
        self._all_tries = TokenBucket(session.ALL_TRIES_PER_S, session.ALL_TRIES_BURST)
        self.guard = Guard(options)
        self.began_at = time.monotonic()
        self.welcome = ""
        """Ticket for the user of the gateway, if it has no tokens to sign in with."""
        self._tokens = tokens
        self._open: OpenPage | None = None

    @property
    def parts(self) -> OpenPage:
        """The parts; RefusedError before `open`."""
        if self._open is None:
            raise RefusedError("unavailable", "the gateway has no master, or is not open yet.")
        return self._open

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def open(self, address: str) -> None:
        """Open the page of the master at this address, in an event loop. The cluster is followed once somebody looks;
        with `ticket`, it is followed at once, since the ticket's user comes soon.
        """
        options = self.options
        sessions = session.Sessions(
            find_key(address), self._tokens, is_read_only=options.is_read_only, is_secure=options.is_secure
        )
        if options.ticket:
            sessions.add_ticket(options.ticket, _own_user())
        elif not self._tokens.are_needed:
            self.welcome = sessions.new_ticket(_own_user())
        master = MasterClient(address)
        threads = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="unified-gateway-page")
        self._open = OpenPage(master, ClusterWatcher(master), sessions, RemoteCoordinator(address), threads)
        if options.ticket:
            self._open.watcher.follow_on()

    async def end_streams(self) -> None:
        """End all open streams, as the gateway stops."""
        if self._open is not None:
            await self._open.watcher.close()

    async def close(self) -> None:
        """Close all that `open` opened."""
        if self._open is None:
            return
        found, self._open = self._open, None
        await found.watcher.close()
        await found.master.close()
        await asyncio.to_thread(found.coordinator.close)
        found.threads.shutdown(wait=False, cancel_futures=True)

    def admit_sign_in(self, scope: Scope) -> float | None:
        """Count a try to sign in; return None if it is allowed, else the seconds until the next try."""
        peer = "local" if scope.get("client") is None else str(scope["client"][0])
        if self.options.is_behind_proxy:
            forwarded = dict(scope["headers"]).get(b"x-forwarded-for", b"").decode("latin-1")
            peer = forwarded.rpartition(",")[2].strip()[:64] or peer
        wait_s = self._tries.admit(peer, is_write=True)
        if wait_s is None and not self._all_tries.take():
            wait_s = self._all_tries.wait_s()
        return wait_s

    def session_of(self, headers: dict[bytes, bytes]) -> session.PageSession | None:
        """Return the session of a request, by its cookie."""
        sessions = self.parts.sessions
        # Not with http.cookies: there, an unreadable cookie of another program on this host would hide ours, and the
        # time to unquote a cookie grows with the square of its length.
        for part in headers.get(b"cookie", b"").decode("latin-1").split(";"):
            name, _, value = part.strip().partition("=")
            if name == sessions.cookie_name:
                return sessions.session_of(value)
        return None


class PageDispatcher:
    """ASGI middleware that answers requests to the page, and passes all others to `app`."""

    def __init__(self, app: App, *, page: PageService, routes: App) -> None:
        self._app = app
        self._page = page
        self._routes = routes
        self._files = StaticFiles(directory=STATIC, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (self._is_ours(scope) or self._page.options.ticket):
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        path = scope["path"]

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                have = {name for name, _ in message["headers"]}
                extra = {**HEADERS, "cache-control": "no-cache" if path.startswith("/static/") else "no-store"}
                more = [(name.encode(), text.encode()) for name, text in extra.items() if name.encode() not in have]
                message = {**message, "headers": [*message["headers"], *more]}
                route = next((prefix for prefix in PREFIXES if path.startswith(prefix)), "/")
                self._page.telemetry.count(scope["method"], route, message["status"], time.perf_counter() - began)
            await send(message)

        response = await self._respond(scope, receive)
        if isinstance(response, Response):
            await response(scope, receive, counted)
        else:
            own = {name: each for name, each in scope.items() if name != "app"}  # not FastAPI's own, with its errors
            await self._routes({**own, "page": self._page}, response, counted)

    async def _respond(self, scope: Scope, receive: Receive) -> Response | Receive:
        """Return the answer, or a `receive` for the routes."""
        path, headers = scope["path"], dict(scope["headers"])
        is_call, is_stream = path.startswith("/page/"), path == "/page/stream"
        if reason := self._page.guard.refusal(headers, is_call=is_call, is_stream=is_stream):
            return error_response(403, reason)
        if is_call:
            if scope["method"] in ("GET", "HEAD"):
                return receive
            if path != "/page/session" and self._page.is_open and self._page.session_of(headers) is None:
                return error_response(401, SIGN_IN_FIRST)  # before its body takes memory
            body = await read_body(headers, receive, MAX_BODY)
            return replay_body(body, receive) if isinstance(body, bytes) else error_response(body.status, body.detail)
        if path == "/healthz":
            return JSONResponse({"status": "ok"})
        if scope["method"] not in ("GET", "HEAD"):
            return error_response(405, "this path is read by GET alone.")
        if not self._is_ours(scope):
            return error_response(404, "there is no such page here.")
        index = STATIC / "index.html"
        if path.startswith("/static/"):
            try:
                return await self._files.get_response(path.removeprefix("/static/"), scope)
            except Exception as error:  # starlette's own, for a file that is not there
                return error_response(getattr(error, "status_code", 500), "there is no such file.")
        if not index.exists():
            return error_response(404, "this installation has no page: its file static/index.html is missing.")
        return FileResponse(index, media_type="text/html")

    @staticmethod
    def _is_ours(scope: Scope) -> bool:
        path: str = scope["path"]
        if path.startswith(PREFIXES):
            return True
        accepted = next((text for name, text in scope["headers"] if name == b"accept"), b"")
        view = path.strip("/").partition("/")[0]
        return view in VIEWS and (not view or b"text/html" in accepted)  # other views are paths of the API, too


def error_response(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    """Return the answer that reports an error."""
    body = msgspec.json.encode({"error": reason})
    return Response(body, status, media_type="application/json", headers=headers)


def _own_user() -> str:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        user = f"uid {os.getuid()}"
    return f"{user}@{os.uname().nodename}"
