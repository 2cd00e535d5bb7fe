"""A client of the training API that needs nothing but Python: copy it into a project of yours."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode


class TrainingApiError(Exception):
    """An answer other than 2xx; the message is the service's own reason."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status


class TrainingClient:
    """The routes of one gateway.

    Args:
        url: its address, such as ``http://127.0.0.1:8000``.
        token: the value of the header ``X-TRAINER-TOKEN``.
    """

    def __init__(self, url: str, token: str, timeout_s: float = 30.0) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s

    def submit(self, payload: dict[str, Any]) -> dict[str, Any]:
        """POST /train. The same payload a second time answers with the same run."""
        return self._json("POST", "/train", payload)

    def status(self, name: str) -> dict[str, Any]:
        """GET /train/{name}."""
        return self._json("GET", f"/train/{name}")

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """GET /train/{name}/metrics: `step` and `metrics`, such as loss and throughput, oldest first."""
        points: list[dict[str, Any]] = self._json("GET", f"/train/{name}/metrics")["items"]
        return points

    def stop(self, name: str) -> dict[str, Any]:
        """DELETE /train/{name}: the run saves a checkpoint and ends."""
        return self._json("DELETE", f"/train/{name}")

    def resume(self, name: str) -> dict[str, Any]:
        """POST /train/{name}/resume: an ended run goes on from its highest complete checkpoint."""
        return self._json("POST", f"/train/{name}/resume", {})

    def logs(self, name: str) -> Iterator[str]:
        """GET /train/{name}/logs?follow=true: each line as it is printed, until the run has ended."""
        event = ""
        with self._open("GET", f"/train/{name}/logs?{urlencode({'follow': 'true'})}") as answer:
            for raw in answer:  # server-sent events
                field, _, value = raw.decode().rstrip("\r\n").partition(": ")
                if field == "event":
                    event = value
                elif field == "data" and event == "line":
                    yield value
                elif field == "data":  # "end", or "error" and its reason
                    return

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        with self._open(method, path, body) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def _open(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"X-TRAINER-TOKEN": self._token, "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise TrainingApiError(error.code, error.read().decode(errors="replace")) from None
