"""Metrics of the gateway itself, in the format of Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from unified.client.mirror import ClusterMirror
from unified_gateway.backend import RunRecord
from unified_gateway.exposition import ClusterCollector
from unified_gateway.schemas import RunState

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNMATCHED = "(none)"
"""Route name of requests that match no route."""


class Telemetry:
    """Counters of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "unified_gateway_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "unified_gateway_request_seconds",
            "Time from a request to the beginning of its answer.",
            ["method", "route"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._runs = Gauge("unified_gateway_runs", "Runs known, by state.", ["status"], registry=self._registry)
        self._is_up = Gauge(
            "unified_gateway_backend_up",
            "1 if the cluster answered when this was read.",
            registry=self._registry,
        )
        self._followers = Gauge("unified_gateway_log_followers", "Readers of logs now.", registry=self._registry)
        self._cluster = ClusterCollector()
        self._registry.register(self._cluster)
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; `route` is the template of its path, so that names in paths make no series."""
        method = method if method in METHODS else "other"  # a client may send any word
        key = (method, route, status)
        found = self._children.get(key)
        if found is None:  # looking up labels is the slowest part here
            found = (self._requests.labels(method, route, str(status)), self._seconds.labels(method, route))
            self._children[key] = found
        found[0].inc()
        found[1].observe(seconds)

    def set_followers(self, number: int) -> None:
        self._followers.set(number)

    def render(self, runs: Iterable[RunRecord] | None, mirror: ClusterMirror | None = None) -> bytes:
        """Return everything as text.

        Args:
            runs: newest attempt of each run; None if the cluster did not answer.
            mirror: the cluster; None if the master did not answer.
        """
        self._cluster.mirror = mirror
        self._is_up.set(runs is not None)
        if runs is not None:
            tally = Tally(run.status for run in runs)
            for state in get_args(RunState):
                self._runs.labels(state).set(tally[state])
        return generate_latest(self._registry)
