"""Worker of an engine role: starts an HTTP server as its child process, watches the server, and passes calls on.

The server is bound to loopback. Its requests come from programs of this host, by `RoleGroup.urls`, and from everywhere
else through `EngineWorker.request`, which is a call like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unified import process
from unified.bus.calls.registry import rpc
from unified.config import cgroups
from unified.engine.watch import OPEN, TOKENS, EngineLook, EngineWatch, counted, engine_kind
from unified.errors import EngineError
from unified.threads import start_thread
from unified.weights.receiver import WeightsReceiver
from unified.worker.context import current_worker

if TYPE_CHECKING:
    from unified.weights.state_dict import VersionedStateDict

LOOPBACK = "127.0.0.1"
MAX_OPEN = 256
"""Calls that one worker passes on at a time; later ones wait."""
LOOK_S = 1.0
LOOK_WITHIN_S = 5.0
START_LOOK_S = 0.1
ENDS_WITHIN_S = 30.0
"""Time after a failed load for the end of this process."""
CUT_S = 10.0
"""A longer time between two looks means that this process was stopped: it says nothing about the engine."""


class EngineWorker:
    """The entry point of an engine role. Its constructor returns when the engine is ready."""

    def __init__(self) -> None:
        worker = current_worker()
        role = worker.actor_info.role_spec
        assert role.engine is not None
        self._worker = worker
        self._me = worker.actor_info.name
        self._options = role.engine
        self._command = sys.argv[1:]
        self._kind = engine_kind(self._command)
        hosts = re.findall(r"\0--host[\0=]([^\0]*)", "\0".join(["", *self._command]))
        self._is_open = bool(hosts) and hosts[-1] not in (LOOPBACK, "localhost", "::1")
        self.port = worker.ports(1)[0]
        self._pool = ThreadPoolExecutor(MAX_OPEN, thread_name_prefix="engine-call")
        self._is_stopping = self._is_loading = self._is_ready = False
        self._num_ooms = _count_ooms()
        self._tokens_at: tuple[float, float] | None = None
        if _answers(self.port):
            raise EngineError(f"port {self.port} is taken: another program of {worker.actor_info.node} listens on it.")
        self._error: EngineError | None = None
        self._files = set[str]()
        environ, self._takes_none = dict(os.environ), ""
        if self._kind and not hosts:  # it would listen everywhere
            self._command += ["--host", LOOPBACK]
        takes_weights = self._kind and importlib.util.find_spec("torch") is not None
        if takes_weights:
            from unified.engine import weights  # imports torch

            self._load_engine = weights.load_vllm if self._kind == "vllm" else weights.load_sglang
            if self._kind == "vllm":
                self._takes_none = weights.prepare_vllm(self._command, environ, is_open=self._is_open)
            elif any("api-key" in word for word in self._command):
                self._takes_none = "its routes for weights need its API key"
        self._began_at = time.monotonic()
        self._child = subprocess.Popen(
            self._command, env=environ, process_group=0, preexec_fn=partial(process.die_with_parent, signal.SIGKILL)
        )  # by the main thread, which lives as long as this process
        worker.on_stop(self._stop)
        self._await_ready()
        self._files = process.tracked_files(lambda: process.group_members(self._child.pid))
        if takes_weights:
            WeightsReceiver(load=self._load)  # has the engine load the newest version that the role has
        if self._error is not None:
            raise self._error
        self._is_ready = True
        worker.bus.registry.register("unified.engine.url", self._urls)
        start_thread("engine-end", self._await_end)
        start_thread("engine-watch", self._watch)

    @rpc
    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,  # noqa: ASYNC109  # of the HTTP request
    ) -> Any:
        """Send the engine an HTTP request.

        Args:
            body: bytes, or what JSON can hold; None: no body.
            timeout: seconds until the answer.

        Returns:
            The answer: decoded, if it is JSON, else bytes.

        Raises:
            EngineError: the status was 300 or above; the message has it and the answer.
        """
        ask = partial(self._checked, method, path, body, timeout, headers)
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(self._pool, ask), timeout)
        except (OSError, HTTPException) as error:
            await asyncio.sleep(LOOK_S)
            if self._child.returncode is not None:  # the engine has ended, so this worker ends: its callers learn why
                await asyncio.Future[None]()
            why = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            raise EngineError(f"the engine of {self._me} did not answer {method} {path}: {why}") from None

    def _checked(self, method: str, path: str, body: Any, timeout_s: float, headers: Any = None) -> Any:
        status, kind, answer = self._ask(method, path, timeout_s, body, headers)
        if status >= 300:
            text = answer[:2000].decode(errors="replace")
            raise EngineError(f"{method} {path} of {self._me} was answered with {status}: {text}")
        is_json = kind.partition(";")[0].strip() == "application/json"
        return json.loads(answer) if answer and is_json else answer

    def _load(self, state: VersionedStateDict) -> None:
        """Load a version into the engine. If that fails, the engine may have a part of it, and this worker ends."""
        if self._takes_none:
            raise EngineError(f"the engine of {self._me} takes no weights: {self._takes_none}.")
        self._is_loading = True
        try:
            self._load_engine(partial(self._checked, "POST"), state)
        except (EngineError, OSError, HTTPException) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(LOOK_S)
            why = error if self._child.returncode is None else self._describe_end()
            failed = EngineError(f"the engine of {self._me} did not load version {state.version}: {why}")
            if not self._is_stopping:
                self._fail(failed)
            if self._is_ready:
                threading.Event().wait(ENDS_WITHIN_S)  # the sender learns that this worker ends, and leaves it out
            raise failed from None
        finally:
            self._is_loading = False
        self._worker.report(weights=state.version)

    @rpc(inline=True)
    def _urls(self) -> tuple[str, str]:
        """Return the engine's address for programs of this host, and for others, or an empty text."""
        remote = f"http://{self._worker.address}:{self.port}" if self._is_open else ""
        return f"http://{LOOPBACK}:{self.port}", remote

    def _ask(
        self, method: str, path: str, timeout_s: float = LOOK_WITHIN_S, body: Any = None, headers: Any = None
    ) -> tuple[int, str, bytes]:
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes | bytearray | memoryview):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        connection = HTTPConnection(LOOPBACK, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("Content-Type", ""), answer.read()
        finally:
            connection.close()

    def _await_ready(self) -> None:
        watch = self._health = EngineWatch(self._began_at, self._options)
        while True:
            look = self._look()
            if self._child.poll() is not None:
                if self._is_stopping:
                    sys.exit(0)
                is_refused = self._child.returncode == 2 and "--weight-transfer-config" in self._command
                hint = " vLLM before 0.28 lacks --weight-transfer-config: set VLLM_SERVER_DEV_MODE=0 for the role."
                raise EngineError(
                    f"{self._describe_end()}, before GET {self._options.ready} was answered.{hint * is_refused}"
                )
            if reason := watch.step(time.monotonic(), look):
                raise EngineError(f"{reason}: the engine is not ready. See its output in this worker's log.")
            if watch.is_ready:
                return
            time.sleep(START_LOOK_S)

    def _describe_end(self) -> str:
        """Return how the engine ended, and after which time, and what the kernel says about it."""
        after_s = time.monotonic() - self._began_at
        text = f"the engine ended after {after_s:.0f} s ({process.describe_end(self._child.returncode)})"
        if (_count_ooms() or 0) > (self._num_ooms or 0):  # of its own, or of a child that it needs
            text += "; memory ran out: the kernel counted an out-of-memory kill in its control group"
        if _answers(self.port):
            text += f"; another program listens on its port {self.port}"
        return text

    def _await_end(self) -> None:
        self._child.wait()
        if not self._is_stopping:
            self._fail(EngineError(f"{self._describe_end()}."))

    def _fail(self, error: EngineError) -> None:
        """End the engine, then this worker: the worker waits for the calls that it has passed on."""
        if self._error is None:  # else it ends for that reason
            self._error = error
            self._kill()
            self._worker.fail(error)

    def _kill(self) -> None:
        """Kill the engine, and remove its shared memory: its processes may have ended with their server."""
        process.kill_group(self._child.pid, self._files)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._is_stopping:
            time.sleep(LOOK_S)
            look, now = self._look(), time.monotonic()
            is_cut = now > last + CUT_S + 2 * LOOK_WITHIN_S
            if self._is_loading or is_cut:
                self._health.pause(now, is_well=is_cut or self._kind == "sglang")  # its ready route waits for the load
            last = now
            if (reason := self._health.step(now, look)) and self._child.poll() is None and not self._is_stopping:
                self._fail(EngineError(f"the engine is ended: {reason}."))
                return
            self._report(now, look)

    def _look(self) -> EngineLook:
        try:
            status, _, _ = self._ask("GET", self._options.ready)
        except (OSError, HTTPException) as error:
            return EngineLook(None, str(error) or type(error).__name__)
        metrics = ""
        if self._kind and status == 200:
            with contextlib.suppress(OSError, HTTPException):  # its health is judged by the ready route
                metrics = self._ask("GET", "/metrics")[2].decode(errors="replace")
        return EngineLook(status, "", counted(metrics, OPEN), counted(metrics, TOKENS))

    def _report(self, now: float, look: EngineLook) -> None:
        if look.num_open is None or look.num_tokens is None:
            return
        before, self._tokens_at = self._tokens_at, (now, look.num_tokens)
        if before is not None and now > before[0]:
            rate = max(0.0, look.num_tokens - before[1]) / (now - before[0])
            self._worker.report(requests=int(look.num_open), tokens_per_s=float(f"{rate:.3g}"))

    def _stop(self) -> None:
        """End the engine in order, within the grace period."""
        self._is_stopping = True
        if self._child.poll() is None:
            process.signal_group(self._child.pid, signal.SIGTERM)
            try:
                self._child.wait(0.9 * self._worker.grace_left())  # the rest is for the end of this process
            except subprocess.TimeoutExpired:
                self._kill()


def _answers(port: int) -> bool:
    """Return whether a program of this host listens on a port."""
    with socket.socket() as probe:
        probe.settimeout(LOOK_WITHIN_S)
        return probe.connect_ex((LOOPBACK, port)) == 0


def _count_ooms() -> int | None:
    """Return the out-of-memory kills that the kernel has counted in this worker's control group; None: not known."""
    counter = cgroups.oom_counter(Path("/proc/self"))
    text = cgroups.read_text(counter) if counter is not None else ""
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)
