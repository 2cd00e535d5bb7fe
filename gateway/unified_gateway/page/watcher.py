"""The gateway's watch of the cluster: one request at a time to the master, for any number of viewers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from unified.client.mirror import ClusterMirror
from unified.errors import MasterUnreachableError, RefusedError, UnifiedError
from unified.protocol.client_master import Changes, WatchCluster
from unified_gateway.master_client import MasterClient
from unified_gateway.page.views import ChangedParts, JobRows, JobView, View, encode_event

WAIT_S = 2.0
SETTLE_S = 0.5
"""Seconds for which the master gathers changes, so that a busy cluster costs two answers a second."""
ANSWER_WITHIN_S = 3.0
"""Seconds beyond `WAIT_S` after which the master counts as down."""
RETRY_S = 0.5
LINGER_S = 60.0
"""Seconds for which the cluster is still followed after somebody looked last."""
PING_S = 15.0
MAX_STREAMS = 200
_PING = b": ping\n\n"
_log = logging.getLogger("unified.gateway")


class Viewer:
    """One open stream, and what its browser knows."""

    def __init__(self, job_id: str, view: View) -> None:
        self.job_id = job_id
        self.view = view
        self.news = asyncio.Event()
        self.tick: int | None = None
        self.outage: dict[str, Any] | None = None
        """Outage of the master that the browser knows; None: the master answers."""


class ClusterWatcher:
    """The mirror of a cluster for viewers in one event loop, kept up to date while somebody looks.

    Attributes:
        mirror: the cluster, as of the last answer.
        outage: time and reason of the master's outage, in the stream's form; None: the master answers.
    """

    def __init__(self, master: MasterClient) -> None:
        self.mirror = ClusterMirror()
        self.outage: dict[str, Any] | None = None
        self._master = master
        self._rows = JobRows(self.mirror)
        self._views: dict[str, View] = {}
        self._viewers: set[Viewer] = set()
        self._parts = ChangedParts()
        self._task: asyncio.Task[None] | None = None
        self._is_current = asyncio.Event()
        self._is_closed = False
        self._used_at = 0.0
        """Time (of the monotonic clock) at which somebody looked last."""

    async def current(self, timeout_s: float = WAIT_S + ANSWER_WITHIN_S) -> ClusterMirror:
        """Return the mirror once it is up to date.

        Raises:
            MasterUnreachableError: the master does not answer.
        """
        self.follow_on()
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_current.wait()
        except TimeoutError:
            reason = self.outage["reason"] if self.outage else f"the master did not answer within {timeout_s:g} s."
            raise MasterUnreachableError(reason) from None
        return self.mirror

    def join(self, job_id: str = "") -> Viewer:
        """Return a new viewer of the cluster, or of one job. It ends with `leave`.

        Raises:
            RefusedError: there are `MAX_STREAMS` already.
        """
        if len(self._viewers) >= MAX_STREAMS:
            raise RefusedError("unavailable", f"{MAX_STREAMS} pages are open at this gateway: close some.")
        view = self._views.get(job_id)
        if view is None:
            new = JobView(self.mirror, self._rows, job_id) if job_id else View(self.mirror, self._rows)
            view = self._views[job_id] = new
        viewer = Viewer(job_id, view)
        self._viewers.add(viewer)
        viewer.news.set()
        self.follow_on()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        self._used_at = time.monotonic()
        if not Counter(each.job_id for each in self._viewers)[viewer.job_id]:
            self._views.pop(viewer.job_id, None)

    async def messages(
        self, viewer: Viewer, *, is_over: Callable[[], bool] = lambda: False, is_poll: bool = False
    ) -> AsyncGenerator[bytes]:
        """Yield a viewer's messages as server-sent events, until the watcher is closed or `is_over` returns True.

        `is_over` is called at least every `PING_S` seconds. Changes during one message come with the next one; a viewer
        that missed a message gets the whole state.

        Args:
            is_poll: end after the first messages, for browsers behind a proxy that passes on only complete answers.
        """
        yield b"retry: 2000\n\n" if is_poll else b"retry: 1000\n\n"
        while not self._is_closed and not is_over():
            try:
                async with asyncio.timeout(PING_S):
                    await viewer.news.wait()
            except TimeoutError:
                yield _PING
                continue
            viewer.news.clear()
            if viewer.outage is not self.outage:
                viewer.outage = self.outage
                yield encode_event("master", {"up": True} if self.outage is None else self.outage)
            is_first = viewer.tick is None
            if self.mirror.version >= 0 and (self._is_current.is_set() or (is_first and self.outage is not None)):
                tick, message = viewer.view.tick, viewer.view.since(viewer.tick)
                viewer.tick = tick
                if message:
                    yield message
            if is_poll and (viewer.tick is not None or viewer.outage is not None):
                return

    async def close(self) -> None:
        """End all streams, and the watch."""
        self._is_closed = True
        self._notify(self._viewers)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def follow_on(self) -> None:
        """Follow the cluster from now on, for `LINGER_S` seconds if nobody looks."""
        self._used_at = time.monotonic()
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        wait_s = 0.0
        try:
            while self._viewers or time.monotonic() - self._used_at < LINGER_S:
                request = WatchCluster(after_version=self.mirror.version, wait_s=wait_s, settle_s=SETTLE_S)
                try:
                    is_last = self._take(await self._master.ask(request, Changes, timeout_s=ANSWER_WITHIN_S))
                    wait_s = WAIT_S if is_last else 0.0
                except (UnifiedError, ValueError) as error:
                    wait_s = 0.0
                    self._set_outage(str(error))
                    await asyncio.sleep(RETRY_S)
                except Exception:
                    _log.exception("event=watch-failed")
                    self._set_outage("the gateway has a defect; its log has the traceback.")
                    await asyncio.sleep(PING_S)
        finally:
            self._task = None
            self._is_current.clear()

    def _take(self, changes: Changes) -> bool:
        """Apply an answer of the master; return True if it is the last part of the changes."""
        if changes.is_whole:
            self._parts = ChangedParts(is_whole=True)
        self.mirror.apply(changes)
        self._parts.add(changes)
        if self.mirror.is_complete:
            self._publish()
        else:
            self._is_current.clear()  # new requests wait for the rest
        return self.mirror.is_complete

    def _publish(self) -> None:
        parts, self._parts = self._parts, ChangedParts()
        self._rows.forget(parts)
        changed = {id(view) for view in self._views.values() if view.update(parts)}
        is_news = self.outage is not None or not self._is_current.is_set()
        self.outage = None
        self._is_current.set()
        self._notify(viewer for viewer in self._viewers if is_news or id(viewer.view) in changed)

    def _set_outage(self, reason: str) -> None:
        self._is_current.clear()
        if self.outage is None or self.outage["reason"] != reason:
            since = time.time() if self.outage is None else self.outage["since"]
            self.outage = {"up": False, "since": since, "reason": reason}
            self._notify(self._viewers)

    @staticmethod
    def _notify(viewers: Iterable[Viewer]) -> None:
        for viewer in viewers:
            viewer.news.set()
