"""Views of the cluster for browsers: the state, and each set of changes, encoded once for all viewers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from unified.client.mirror import ClusterMirror
from unified.client.report import summarise
from unified.client.views.overview import attention
from unified.protocol.client_master import Changes, JobStatus
from unified.protocol.columns import columns_of
from unified.protocol.records import EventRecord, json_value

MAX_EVENTS = 500
"""Most events in one message: the newest."""
MAX_ATTENTION = 20
"""Most matters that need attention in one message, urgent ones first."""
_HIDDEN = frozenset({"workers", "annotations"})


class ChangedParts:
    """Parts of the cluster that changed, gathered until the mirror is complete."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self.is_whole = is_whole
        self.jobs: dict[str, None] = {}
        """Ids of jobs that changed, or that have a worker that changed."""
        self.workers: dict[str, dict[str, None]] = {}
        self.nodes: dict[str, None] = {}
        self.gone_jobs: list[str] = []
        self.gone_nodes: list[str] = []
        self.events: list[EventRecord] = []

    def add(self, changes: Changes) -> None:
        """Add an answer of the master. A whole answer needs a new object."""
        for job_id, columns in changes.workers.items():
            self.workers.setdefault(job_id, {}).update(dict.fromkeys(columns["name"]))
        self.jobs.update(dict.fromkeys([*(job.job_id for job in changes.jobs), *changes.workers]))
        self.nodes.update(dict.fromkeys(changes.nodes.get("node", ())))
        self.gone_jobs += changes.gone_jobs
        self.gone_nodes += changes.gone_nodes
        self.events += changes.events


class JobRows:
    """Rows of jobs, each encoded once per change.

    Args:
        mirror: the cluster; its owner keeps it up to date.
    """

    def __init__(self, mirror: ClusterMirror) -> None:
        self._mirror = mirror
        self._rows: dict[str, msgspec.Raw] = {}

    def forget(self, parts: ChangedParts) -> None:
        """Drop the rows of changed jobs, so that the next use encodes them again."""
        if parts.is_whole:
            self._rows.clear()
        for job_id in [*parts.jobs, *parts.gone_jobs]:
            self._rows.pop(job_id, None)

    def row(self, job_id: str) -> msgspec.Raw | None:
        """Return the row of a job; None: there is none of this id."""
        if (found := self._rows.get(job_id)) is None and (status := self._mirror.status(job_id)) is not None:
            found = self._rows[job_id] = msgspec.Raw(msgspec.json.encode(job_row(status)))
        return found

    def rows(self, job_ids: Iterable[str]) -> list[msgspec.Raw]:
        """Return the rows of these jobs, without jobs that are unknown."""
        return [row for job_id in job_ids if (row := self.row(job_id)) is not None]


def job_row(status: JobStatus) -> dict[str, Any]:
    """Return a job without its workers, but with a summary of them by role."""
    row: dict[str, Any] = {name: getattr(status, name) for name in JobStatus.__struct_fields__ if name not in _HIDDEN}
    row["num_workers"] = sum(role.total for role in status.roles)
    row["summary"] = {
        role.name: {
            "states": role.counts,
            "round": role.round,
            "step": None if role.spread is None else role.spread._asdict(),
            "total": role.total,
            "metrics": json_value(dict(role.values)),
        }
        for role in summarise(status)
    }
    return row


def encode_event(event: str, body: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with JSON in its one line of data."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(body))


class View:
    """The whole cluster, without workers, and what needs attention, as a stream of messages.

    Attributes:
        tick: number of messages so far, by which a viewer knows whether it missed one.
    """

    def __init__(self, mirror: ClusterMirror, rows: JobRows) -> None:
        self.tick = 0
        self._mirror = mirror
        self._rows = rows
        self._attention: dict[str, Any] = {}
        self._last = b""
        self._whole = b""
        self._whole_at = -1.0

    def update(self, parts: ChangedParts) -> bool:
        """Update the view after changes of the mirror; return True if there is a new message."""
        body = None if parts.is_whole else self._changes(parts)
        if body is None and not parts.is_whole:
            return False
        self.tick += 1
        self._whole_at = -1.0
        self._last = self.whole() if body is None else self._encode("changes", body)
        return True

    def since(self, tick: int | None) -> bytes:
        """Return the next message for a viewer that has seen `tick` messages; empty: there is none.

        A viewer that has seen none (`tick` is None), or that missed a message, gets the whole state.
        """
        if tick == self.tick:
            return b""
        return self._last if tick is not None and tick == self.tick - 1 else self.whole()

    def whole(self) -> bytes:
        """Return the whole state, encoded at most once per answer of the master, whose time it contains."""
        if self._whole_at != self._mirror.at:
            self._whole, self._whole_at = self._encode("whole", self._state()), self._mirror.at
        return self._whole

    def _encode(self, event: str, body: Mapping[str, Any]) -> bytes:
        return encode_event(event, {"version": self._mirror.version, "at": self._mirror.at, **body})

    def _state(self) -> dict[str, Any]:
        mirror = self._mirror
        self._attention = self._attention_now()
        return {
            "attention": self._attention,
            "jobs": self._rows.rows(mirror.jobs),
            "nodes": columns_of(list(mirror.nodes.values())),
            "gone_jobs": [],
            "gone_nodes": [],
            "events": list(mirror.events)[-MAX_EVENTS:],
        }

    def _changes(self, parts: ChangedParts) -> dict[str, Any] | None:
        mirror, known, self._attention = self._mirror, self._attention, self._attention_now()
        is_news = self._attention != known  # also changed by time alone: a job waits for long
        if not (is_news or parts.jobs or parts.nodes or parts.gone_jobs or parts.gone_nodes or parts.events):
            return None
        return {
            "attention": self._attention if is_news else None,
            "jobs": self._rows.rows(parts.jobs),
            "nodes": columns_of([mirror.nodes[name] for name in parts.nodes if name in mirror.nodes]),
            "gone_jobs": parts.gone_jobs,
            "gone_nodes": parts.gone_nodes,
            "events": parts.events[-MAX_EVENTS:],
        }

    def _attention_now(self) -> dict[str, Any]:
        found = attention(self._mirror)
        shown = [each._asdict() for each in found[:MAX_ATTENTION]]
        return {"shown": shown, "total": len(found), "urgent": sum(each.is_urgent for each in found)}


class JobView(View):
    """One job, with its workers and the nodes that they are on."""

    def __init__(self, mirror: ClusterMirror, rows: JobRows, job_id: str) -> None:
        super().__init__(mirror, rows)
        self._job_id = job_id
        self._known: set[str] = set()
        """Nodes of the job's workers."""

    def _state(self) -> dict[str, Any]:
        workers = self._mirror.workers.get(self._job_id, {})
        self._known = {worker.node for worker in workers.values()}
        return self._body(workers, self._known, [], self._mirror.events)

    def _changes(self, parts: ChangedParts) -> dict[str, Any] | None:
        workers = self._mirror.workers.get(self._job_id, {})
        changed = [name for name in parts.workers.get(self._job_id, ()) if name in workers]
        new = {workers[name].node for name in changed} - self._known
        self._known |= new
        nodes = {name for name in parts.nodes if name in self._known} | new
        gone = [name for name in parts.gone_nodes if name in self._known]
        events = [event for event in parts.events if event.job == self._job_id]
        is_concerned = self._job_id in parts.jobs or self._job_id in parts.gone_jobs
        if not (is_concerned or nodes or gone or events):
            return None
        return self._body(changed, nodes, gone, events)

    def _body(
        self, workers: Iterable[str], nodes: Iterable[str], gone: list[str], events: Iterable[EventRecord]
    ) -> dict[str, Any]:
        mirror = self._mirror
        known = mirror.workers.get(self._job_id, {})
        return {
            "job": self._rows.row(self._job_id),
            "workers": columns_of([known[name] for name in workers]),
            "nodes": columns_of([mirror.nodes[name] for name in sorted(nodes) if name in mirror.nodes]),
            "gone_nodes": gone,
            "events": [event for event in events if event.job == self._job_id][-MAX_EVENTS:],
        }
