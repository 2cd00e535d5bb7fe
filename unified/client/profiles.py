"""Profiles of workers: taken on their nodes, pulled through the master, and summed up by function."""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from typing import Any

from msgspec import DecodeError, json

from unified.client.connection import MasterConnection
from unified.errors import ClusterError
from unified.protocol.client_master import LogChunk, ReadLog
from unified.protocol.records import ProfileKind

SLACK_S = 55.0
"""Seconds to wait for an answer beyond the time of the samples: more than the master waits."""
PIECE_BYTES = 1024 * 1024
_FRAME = re.compile(
    r"<title>([^<]*) \([^()]* samples?, [\d.]+%\)</title>"
    r'<rect [^>]*? y="(\d+)"[^>]*? fg:x="(\d+)" fg:w="(\d+)"'
)
_FRAME_HEIGHT = 16


def asked(job: str, worker: str, kind: ProfileKind, seconds: float) -> ReadLog:
    """Return the request that takes a profile; its answer has the first piece."""
    return ReadLog(job=job, worker=worker, stream="profile", max_bytes=PIECE_BYTES, take=kind, wait_s=seconds)


def read_rest(connection: MasterConnection, job: str, first: LogChunk) -> bytes:
    """Return a whole profile, given its first piece. Blocks for one request per MiB.

    Raises:
        ClusterError: the worker has not begun yet, or another profile of it was taken meanwhile.
        RefusedError: the worker's node is gone, for example.
    """
    data, worker = first.data, first.worker
    if not data:
        raise ClusterError(f"{worker} cannot be profiled: it has no process yet.")
    while len(data) < first.size:
        at = len(data)
        request = ReadLog(
            job=job, worker=worker, incarnation=first.incarnation, stream="profile", offset=at, max_bytes=PIECE_BYTES
        )
        part = connection.ask(request, LogChunk)
        if part.size != first.size or not part.data:
            raise ClusterError(f"another profile of {worker} was taken while this one was read: take it again.")
        data += part.data
    return data


def costs(kind: ProfileKind, data: bytes) -> list[tuple[str, float]]:
    """Return the share of time that each function spends in itself, the largest first; empty for an unknown format."""
    try:
        found = _of_flame_graph(data.decode()) if kind == "flamegraph" else _of_speedscope(json.decode(data))
    except (DecodeError, KeyError, TypeError, ValueError):  # a later py-spy: its file is still useful
        return []
    whole = sum(found.values()) or 1.0
    return [(name, value / whole) for name, value in found.most_common()]


def _of_flame_graph(text: str) -> Counter[str]:
    """Return the samples of each function itself, from an SVG of py-spy, which draws callees below their caller."""
    boxes = [
        (int(y), int(x), int(width), re.sub(r":\d+\)$", ")", html.unescape(name)))
        for name, y, x, width in _FRAME.findall(text)
    ]
    own: Counter[str] = Counter()
    levels: defaultdict[int, tuple[list[int], list[str]]] = defaultdict(lambda: ([], []))
    for y, x, width, name in sorted(boxes):
        own[name] += width
        callers_at, callers = levels[y - _FRAME_HEIGHT]
        if callers:
            own[callers[bisect_right(callers_at, x) - 1]] -= width
        levels[y][0].append(x)
        levels[y][1].append(name)
    return own


def _of_speedscope(document: Any) -> Counter[str]:
    own: Counter[str] = Counter()
    for profile in document["profiles"]:
        for sample, weight in zip(profile["samples"], profile["weights"], strict=True):
            frame = document["shared"]["frames"][sample[-1]]
            own[f"{frame['name']} ({frame['file']})"] += weight
    return own
