"""The HTTP gateway of ``unified-master --http``.

It is a process of its own, so that a flood of requests costs the master none of its time. It is started again when it
ends, and ends with the master.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from unified.config.addresses import HostPort, split_address
from unified.core.backoff import Backoff
from unified.errors import UsageError
from unified.process import describe_end
from unified.security.keys import is_loopback
from unified.threads import start_thread

STOP_WITHIN_S = 8.0
"""Seconds from SIGTERM to SIGKILL; requests that are under way have 5."""
QUICK_S = 10.0
"""Run time below which the next start has to wait longer."""
BACKOFF = Backoff()
CANNOT_SERVE = 2
"""Exit code of a gateway whose options or packages are at fault; see `unified_gateway.cli`."""
_log = logging.getLogger("unified.master")


class GatewayAddress(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, bind: str) -> GatewayAddress:
        """Return the address of ``PORT`` or ``HOST:PORT``; the default host is loopback if `bind` is, else all.

        Raises:
            UsageError: the text is neither.
        """
        default = "127.0.0.1" if is_loopback(bind) else "0.0.0.0"
        try:
            found = HostPort(default, int(text)) if text.isdecimal() else split_address(text, ())
        except ValueError:
            found = HostPort("", None)
        if found.port is None or not 0 <= found.port <= 65535:
            raise UsageError(f"--http {text!r} is no address: write PORT or HOST:PORT.")
        return cls(found.bare_host, found.port)


class GatewayProcess:
    """``python -m unified_gateway`` for one master, from now until `close`."""

    def __init__(self, master: str, address: GatewayAddress) -> None:
        # -P: no imports of a user's modules in the working directory
        self._command = [sys.executable, "-P", "-m", "unified_gateway", "--master", master]
        self._command += ["--host", address.host, "--port", str(address.port), "--die-with-parent", str(os.getpid())]
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        # The parent-death signal comes when the thread that started the process ends, so this thread stays.
        self._thread = start_thread("unified-gateway", self._supervise)

    def close(self) -> None:
        """End the gateway, and wait for its end."""
        with self._lock:
            self._is_closing.set()
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join()

    def _supervise(self) -> None:
        num_quick = 0
        while not self._is_closing.wait(BACKOFF.delay_s(num_quick)):
            began = time.monotonic()
            try:
                code = self._run()
                how = describe_end(code)
            except OSError as error:
                code, how = 1, f"could not be started: {error}"
            if code == CANNOT_SERVE:
                why = "the gateway cannot serve, as it says above: it is not started again"
                _log.error("event=gateway-refused reason=%r", why)
                return
            if not self._is_closing.is_set():
                num_quick = num_quick + 1 if time.monotonic() - began < QUICK_S else 0
                _log.error("event=gateway-ended reason=%r", f"the gateway {how}; it is started again")

    def _run(self) -> int:
        with self._lock:
            if self._is_closing.is_set():
                return 0
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        return self._process.wait()
