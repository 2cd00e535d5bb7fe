"""Requests of the page: its session, the stream, data on demand, and the few requests that change something."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from unified.client import profiles
from unified.client.connection import MasterConnection
from unified.client.reports import read_reports
from unified.errors import RefusedError, UnifiedError, UsageError
from unified.protocol import client_master, coordinator
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import Progress, json_value
from unified.security.keys import current
from unified_gateway.http.admission import Receive, Scope, Send
from unified_gateway.http.log_stream import ClosingStream
from unified_gateway.options import release
from unified_gateway.page import worker_data
from unified_gateway.page.app import SIGN_IN_FIRST, STATIC, PageError, PageService, error_response
from unified_gateway.page.session import PageSession

STATUS_OF_CODE = {
    "not-found": 404,
    "name-taken": 409,
    "conflict": 409,
    "ended": 409,
    "bad-request": 400,
}
"""HTTP status of the master's refusals, by code; 503 for all other codes."""
MAX_LOG_BYTES = 1 << 20
MAX_STORY = 1000
MAX_READ_POINTS = 20_000
READ_WITHIN_S = 15.0
STACKS_WAIT_S = 5.0
PROFILE_S = 10.0
_log = logging.getLogger("unified.gateway")
RELEASE = release()
T = TypeVar("T")
Answer = dict[str, Any] | Response | client_master.ClientRequest
"""Answer, or a request that changes something: then the note of the master is the answer."""


class SignInBody(msgspec.Struct):
    """Body of a sign-in."""

    ticket: str
    """A ticket, or a token of the gateway."""


class StopBody(msgspec.Struct):
    """Body of a stop."""

    force: bool = False


class DrainBody(msgspec.Struct):
    """Body of a drain."""

    reason: str = ""


class ProfileBody(msgspec.Struct):
    """Body of a profile."""

    worker: str


class Call:
    """An admitted request of the page.

    Attributes:
        session: the session of the browser.
    """

    def __init__(self, page: PageService, request: Request, session: PageSession) -> None:
        self.page = page
        self.session = session
        self._request = request
        self.parts = page.parts

    def path(self, name: str) -> str:
        return str(self._request.path_params[name])

    def text(self, name: str, default: str = "") -> str:
        return self._request.query_params.get(name, default)

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**63 - 1) -> int | None:
        """Return a parameter as a number, `most` at most; PageError: it is no number, or below `least`."""
        text = self.text(name)
        if not text:
            return default
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise PageError(400, f"{name}={text[:50]!r} is no whole number from {least} on.")
        return min(number, most)

    async def body(self, kind: type[T]) -> T:
        """Return the body; PageError: it is not of this kind."""
        return await body_of(self._request, kind)

    async def ask(self, message: client_master.ClientRequest, expected: type[T], timeout_s: float | None = None) -> T:
        return await self.parts.master.ask(message, expected, timeout_s=timeout_s)

    async def in_thread(self, read: Callable[[MasterConnection], T], what: str) -> T:
        """Run a function that waits for the master in a thread; PageError: it takes too long."""
        work = partial(read, self.parts.master.connection)
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                return await asyncio.get_running_loop().run_in_executor(self.parts.threads, work)
        except TimeoutError:
            raise PageError(503, f"{what} did not come within {READ_WITHIN_S:g} s.") from None

    def cause(self, reason: str = "") -> str:
        """Return the cause of a request, for the event log of the master."""
        return f"asked on the page by {self.session.who}{f': {reason}' if reason else ''}"


Handler = Callable[[Call], Awaitable[Answer]]


async def body_of(request: Request, kind: type[T]) -> T:
    """Return the body of a request; PageError: it is not of this kind."""
    body = await request.body()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PageError(400, f"the body is not what this path takes: {error}.") from None


async def stream(call: Call) -> Answer:
    watcher = call.parts.watcher
    viewer = watcher.join(call.text("job"))
    is_over = partial(call.parts.sessions.is_over, call.session)
    messages = watcher.messages(viewer, is_over=is_over, is_poll=bool(call.text("poll")))
    return ClosingStream(messages, media_type="text/event-stream", headers={"x-accel-buffering": "no"},
                         when_closed=partial(watcher.leave, viewer))  # fmt: skip


async def show_session(call: Call) -> Answer:
    return {"write": call.session.may_write, "release": RELEASE, "master": call.parts.master.address}


async def sign_out(call: Call) -> Answer:
    call.parts.sessions.sign_out(call.session)
    return _json({"note": "signed out."}, {"set-cookie": call.parts.sessions.no_cookie()})


async def explain(call: Call) -> Answer:
    limit = call.number("limit", 200, least=1, most=MAX_STORY) or 200
    request = client_master.Explain(
        job=call.path("job"), worker=call.text("worker"), limit=limit, before=call.number("before")
    )
    return {"events": (await call.ask(request, client_master.Story)).events}


async def logs(call: Call) -> Answer:
    stream_name = call.text("stream", "out")
    if stream_name not in ("out", "err"):  # two files, each with offsets of its own
        raise PageError(400, f"there is no stream {stream_name[:50]!r}: give out or err.")
    offset = call.number("offset", -65536, least=-(2**62)) or 0
    request = client_master.ReadLog(
        job=call.path("job"),
        worker=call.text("worker"),
        incarnation=call.number("incarnation"),
        stream=stream_name,  # type: ignore[arg-type]
        offset=offset,
        max_bytes=call.number("max_bytes", 65536, least=1, most=MAX_LOG_BYTES) or 1,
    )
    chunk, times = await call.ask(request, client_master.LogChunk), b""
    if chunk.data and call.text("times"):
        part = {"incarnation": chunk.incarnation, "offset": chunk.offset, "max_bytes": len(chunk.data)}
        request = msgspec.structs.replace(request, stream=f"{stream_name}.times", **part)
        with suppress(UnifiedError):  # what is kept of the log of a node that is gone has no times
            times = (await call.ask(request, client_master.LogChunk)).data
    return worker_data.log_part(chunk, times=times, is_tail=offset < 0)


async def metrics(call: Call) -> Answer:
    mirror = await call.parts.watcher.current()
    worker = worker_data.find_worker(mirror, call.path("job"), call.text("worker"))
    names, job = [name for name in call.text("names").split(",") if name], call.path("job")
    kept = await call.in_thread(
        lambda connection: read_reports(
            connection, job, worker.name, worker.incarnation, limit=MAX_READ_POINTS, within_s=READ_WITHIN_S
        ),
        f"what {worker.name} reported",
    )
    return worker_data.curves(kept, names)


async def stacks(call: Call) -> Answer:
    request = client_master.GetStacks(
        job=call.path("job"), role=call.text("role"), rank=call.number("rank"), wait_s=STACKS_WAIT_S
    )
    found = await call.ask(request, client_master.JobStacks, timeout_s=2 * STACKS_WAIT_S)
    return worker_data.stacks(found)


async def datasets(call: Call) -> Answer:
    request = coordinator.DescribeSpaces(space=call.text("job"), is_every_space=not call.text("job"))
    future = call.parts.coordinator.submit(request, coordinator.SpaceList)
    spaces = (await asyncio.wrap_future(future)).spaces
    return {
        name: [
            {"space": space.space, **msgspec.structs.asdict(each)} for space in spaces for each in getattr(space, name)
        ]
        for name in ("datasets", "barriers", "checkpoints", "workers")
    }


async def tasks(call: Call) -> Answer:
    mirror = await call.parts.watcher.current()
    found = await call.page.source.tasks()
    for task in found:
        workers = mirror.workers.get(task["job_id"], {}).values()
        found_progress = (each.progress for each in workers if each.rank == 0 and each.progress is not None)
        progress = next((each for each in found_progress if each.step is not None or each.metrics), Progress())
        task |= {"step": progress.step, "total": progress.total}
        task |= {name: json_value(progress.metrics.get(name)) for name in ("loss", "eval_loss", "lr", "tokens_per_s")}
    return {"tasks": found}


async def profile(call: Call) -> Answer:
    job, worker = call.path("job"), (await call.body(ProfileBody)).worker
    request = profiles.asked(job, worker, "flamegraph", PROFILE_S)
    first = await call.ask(request, client_master.LogChunk, timeout_s=profiles.SLACK_S)
    data = await call.in_thread(lambda connection: profiles.read_rest(connection, job, first), "the profile")
    _log.info("event=page-profile client=%s job=%s worker=%s", ascii(call.session.who), ascii(job), ascii(first.worker))
    return {"worker": worker, "svg": data.decode(errors="replace")}


async def stop(call: Call) -> client_master.ClientRequest:
    force = (await call.body(StopBody)).force
    return client_master.StopJob(job=call.path("job"), force=force, reason=call.cause())


async def suspend(call: Call) -> client_master.ClientRequest:
    return client_master.SuspendJob(job=call.path("job"), reason=call.cause())


async def resume(call: Call) -> client_master.ClientRequest:
    return client_master.ResumeJob(job=call.path("job"), reason=call.cause())


async def drain(call: Call) -> client_master.ClientRequest:
    reason = (await call.body(DrainBody)).reason
    return client_master.DrainNode(node=call.path("node"), reason=call.cause(reason))


async def undrain(call: Call) -> client_master.ClientRequest:
    return client_master.DrainNode(node=call.path("node"), is_over=True, reason=call.cause())


async def about(call: Call) -> Answer:
    licences = STATIC / "vendor" / "LICENSES.txt"
    key = call.parts.master.connection.key
    return {
        "release": RELEASE,
        "python": platform.python_version(),
        "protocol": PROTOCOL_VERSION,
        "master": call.parts.master.address,
        "key": "none" if key is None else current(key).fingerprint,
        "licences": licences.read_text(encoding="utf-8") if licences.exists() else "",
        "uptime_s": round(time.monotonic() - call.page.began_at, 1),
    }


async def sign_in(request: Request) -> Response:
    """Exchange a ticket, or a token, for a cookie. There is no session yet."""
    page: PageService = request.scope["page"]
    try:
        if (wait_s := page.admit_sign_in(request.scope)) is not None:
            after = str(int(wait_s) + 1)
            return error_response(429, f"too many sign-ins: try again in {after} s.", {"retry-after": after})
        shown, sessions = await body_of(request, SignInBody), page.parts.sessions
        session = sessions.sign_in(shown.ticket)
        _log.info("event=sign-in client=%s", session.who if session else None)
        if session is None:
            return error_response(
                401, "this ticket is not known here, was used before, or is older than 5 minutes: `unified ui` gives a "
                "new one. A token of the gateway serves as well, where it has any."
            )  # fmt: skip
        body = {"write": session.may_write, "release": RELEASE, "master": page.parts.master.address}
        return _json(body, {"set-cookie": sessions.cookie(session)})
    except PageError as error:
        return error_response(error.status, str(error))
    except UnifiedError as error:
        return error_response(503, str(error))


def _endpoint(handler: Handler, *, writes: bool = False) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a handler: it needs a session, for `writes` one that may change something."""

    async def endpoint(request: Request) -> Response:
        page: PageService = request.scope["page"]
        try:
            session = page.session_of(dict(request.scope["headers"]))
            if session is None:
                return error_response(401, SIGN_IN_FIRST)
            if writes and not session.may_write:
                return error_response(403, "this session may only read.")
            answer = await handler(Call(page, request, session))
            if isinstance(answer, client_master.ClientRequest):
                answer = {"note": (await page.parts.master.ask(answer, client_master.Done)).note}
                _log.info("event=page-write client=%s path=%s", ascii(session.who), ascii(request.url.path[:200]))
        except PageError as error:
            return error_response(error.status, str(error))
        except RefusedError as error:
            return error_response(STATUS_OF_CODE.get(error.code, 503), str(error))
        except UsageError as error:
            return error_response(400, str(error))
        except UnifiedError as error:
            return error_response(503, str(error))
        except Exception as error:
            _log.exception("event=page-failed path=%s", ascii(request.url.path[:200]))
            return error_response(500, f"a defect of the gateway ({type(error).__name__}); its log has the traceback.")
        return answer if isinstance(answer, Response) else _json(answer)

    return endpoint


def _json(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(404, f"there is nothing at {scope['path'][:200]!r}.")(scope, receive, send)


_READS: dict[str, Handler] = {
    "/page/session": show_session,
    "/page/stream": stream,
    "/page/jobs/{job}/explain": explain,
    "/page/jobs/{job}/logs": logs,
    "/page/jobs/{job}/metrics": metrics,
    "/page/jobs/{job}/stacks": stacks,
    "/page/datasets": datasets,
    "/page/tasks": tasks,
    "/page/about": about,
}
_WRITES: dict[str, Handler] = {
    "/page/jobs/{job}/profile": profile,
    "/page/jobs/{job}/stop": stop,
    "/page/jobs/{job}/suspend": suspend,
    "/page/jobs/{job}/resume": resume,
    "/page/nodes/{node}/drain": drain,
    "/page/nodes/{node}/undrain": undrain,
}
router = APIRouter(default=_nothing, redirect_slashes=False)
router.add_route("/page/session", sign_in, ["POST"])
router.add_route("/page/session", _endpoint(sign_out), ["DELETE"])
for _path, _handler in _READS.items():
    router.add_route(_path, _endpoint(_handler), ["GET"])
for _path, _handler in _WRITES.items():
    router.add_route(_path, _endpoint(_handler, writes=True), ["POST"])
