"""A judge as a child process, and requests to it, as a worker of an engine makes them: for Ray's actor and the bare
column, which have no engine roles. Only the standard library.
"""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from typing import Any

from benchmarks.rl.work import JUDGE, QUESTION, WAIT_S


class HttpJudge:
    """Starts the server, and returns when it can answer."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._child = subprocess.Popen([sys.executable, str(JUDGE), "--port", str(self.port)])
        atexit.register(self.close)
        deadline = time.monotonic() + WAIT_S
        while not self._is_up():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the judge does not answer after {WAIT_S:g} s")
            time.sleep(0.05)

    def score(self) -> Any:
        return self.request("POST", "/score", QUESTION)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request on a connection of its own: `EngineWorker` does so, and the server keeps none open."""
        text = None if body is None else json.dumps(body).encode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status >= 300:
                raise AssertionError(f"{path} was answered with {answer.status}")
            return json.loads(content)
        finally:
            connection.close()

    def _is_up(self) -> bool:
        try:
            self.request("GET", "/up")
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
