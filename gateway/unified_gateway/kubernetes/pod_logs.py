"""The lines of a run's pods, from the API server's log streams.

Each stream has a thread, since the Kubernetes client blocks. All readers together have at most `MAX_STREAMS` streams.
Each start of a container, also in a pod that was created again, has a stream of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import urllib3

from unified.errors import RefusedError, UnifiedError
from unified.threads import start_thread
from unified_gateway.kubernetes.api_server import KubernetesApi
from unified_gateway.kubernetes.conditions import Json, incarnation_of, node_of, pod_name
from unified_gateway.kubernetes.manifest import CONTAINER

MAX_STREAMS = 64
MAX_PODS = 16
"""Number of pods, the first ones, that a reader of all pods gets."""
LOOK_S = 2.0
"""Seconds between two looks at the pods."""
DRAIN_S = 30.0
"""Seconds to wait for the rest of the pods' streams after a run's end."""
MAX_LINE_BYTES = 16_384
_MAX_WAITING = 1000


class PodStream:
    """Log of one start of one container: a thread reads it and hands lines to an event loop."""

    def __init__(self, pod: Json, lines: LineQueue, *, follow: bool, tail_lines: int | None) -> None:
        self.prefix = f"[{pod_name(pod)}] "
        self.place = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        self.options: dict[str, Any] = {"follow": follow}
        if tail_lines is not None:
            self.options["tail_lines"] = tail_lines
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._response: urllib3.HTTPResponse | None = None
        self._is_closed = False

    def close(self) -> None:
        """End the stream; its thread ends soon, even while it waits for a line."""
        self._is_closed = True
        if self._response is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # the stream has ended already
                self._response.shutdown()

    def read(self, api: KubernetesApi) -> None:
        """Read to the end, in a thread. Put lines, then an error if one ended the stream, then None into the queue."""
        try:
            self._response = api.open_log(*self.place, CONTAINER, **self.options)
            lines = _lines(self._response)
            while not self._is_closed and (line := next(lines, None)) is not None:
                self._put(line)
        except UnifiedError as error:
            self._put(error)
        except (urllib3.exceptions.HTTPError, OSError):  # closed, or its node is gone: the next look at pods shows it
            pass
        finally:
            if self._response is not None:
                self._response.close()
            self._put(None)

    def _put(self, line: str | UnifiedError | None) -> None:
        """Put a line into the queue, and wait while the queue is full."""
        if self._is_closed or self._loop.is_closed():
            return
        pending = asyncio.run_coroutine_threadsafe(self._lines.put((self, line)), self._loop)
        while not (self._is_closed or self._loop.is_closed()):
            with contextlib.suppress(TimeoutError):
                pending.result(timeout=0.5)
                return
        pending.cancel()


LineQueue = asyncio.Queue[tuple[PodStream, str | UnifiedError | None]]


class PodLogs:
    """All readers of pods' logs of one gateway."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._open: set[PodStream] = set()

    async def read(
        self,
        look: Callable[[], Awaitable[tuple[Sequence[Json], bool]]],
        *,
        node: int | None,
        follow: bool,
        tail_lines: int | None,
    ) -> AsyncGenerator[str, None]:
        """Yield the lines of a run's pods. With several pods, each line begins with the pod's name.

        Args:
            look: returns the present pods, and whether the run has ended.
            node: index of the only pod to read; None for all.
            follow: go on until the run has ended.

        Raises:
            RefusedError: too many streams are open, or a log that is not followed cannot be read.
            MasterUnreachableError: the API server does not answer.
        """
        loop = asyncio.get_running_loop()
        lines: LineQueue = asyncio.Queue(_MAX_WAITING)
        seen: set[tuple[str, int]] = set()
        reading: set[PodStream] = set()
        try:
            while True:
                pods, is_over = await look()
                is_last = is_over or not follow
                taken = [pod for pod in sorted(pods, key=node_of) if node in (None, node_of(pod))][:MAX_PODS]
                for pod in taken:
                    incarnation = incarnation_of(pod)
                    if incarnation is not None and incarnation not in seen:
                        # The whole output of a restarted container is new.
                        tail = tail_lines if all(uid != incarnation[0] for uid, _ in seen) else None
                        seen.add(incarnation)
                        reading.add(self._begin(pod, lines, follow=not is_last, tail_lines=tail))
                until = loop.time() + (DRAIN_S if is_last else LOOK_S)
                while (reading or not is_last) and loop.time() < until:
                    try:
                        async with asyncio.timeout_at(until):
                            stream, line = await lines.get()
                    except TimeoutError:
                        break
                    if line is None:
                        reading.discard(stream)
                    elif isinstance(line, str):
                        yield stream.prefix + line if len(taken) > 1 else line
                    elif follow and isinstance(line, RefusedError):  # the other streams go on
                        yield f"{stream.prefix}… {line}"
                    else:
                        raise line
                if is_last:
                    return
        finally:
            for stream in reading:
                stream.close()

    def close(self) -> None:
        """End all streams."""
        for stream in list(self._open):
            stream.close()

    def _begin(self, pod: Json, lines: LineQueue, *, follow: bool, tail_lines: int | None) -> PodStream:
        if len(self._open) >= MAX_STREAMS:
            text = f"{MAX_STREAMS} logs are being read, and no more at once: try again later."
            raise RefusedError("unavailable", text)
        stream = PodStream(pod, lines, follow=follow, tail_lines=tail_lines)
        self._open.add(stream)
        start_thread("pod-log", self._read, stream)
        return stream

    def _read(self, stream: PodStream) -> None:
        try:
            stream.read(self._api)
        finally:
            self._open.discard(stream)


def _lines(response: urllib3.HTTPResponse) -> Iterator[str]:
    """Yield lines as they arrive; split lines that are too long."""
    rest = b""
    while data := response.read1(MAX_LINE_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        if len(rest) >= MAX_LINE_BYTES:
            whole.append(rest)
            rest = b""
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")
