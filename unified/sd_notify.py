"""Notifications of a daemon to systemd, by sd_notify(3): it is ready, it is alive, its status, it stops.

The daemon's own loop sends them, so systemd notices a loop that hangs. If systemd does not wait for them, the daemon
sends nothing, and its loop has no further deadline.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping

PERIOD_S = 5.0
"""Time between two looks at the status, or half the watchdog's time if that is shorter."""
_MORE_TIME = f"EXTEND_TIMEOUT_USEC={int(3 * PERIOD_S * 1e6)}"
"""More time for a daemon that stops, counted from this message: its workers may need longer to save."""
SEND_S = 1.0
"""Longest wait of a notification, if systemd reads nothing."""


class ServiceNotifier:
    """Notifier of one daemon, whose loop calls `beat` with every turn and wakes up for `next_deadline`."""

    def __init__(
        self, env: MutableMapping[str, str], *, is_helper: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take ``NOTIFY_SOCKET`` and the watchdog's time out of `env`, so that no child notifies for this process.

        Args:
            is_helper: True if the daemon is part of another program, which may be a service itself: nothing is sent.
        """
        address, watchdog_us = env.pop("NOTIFY_SOCKET", ""), env.pop("WATCHDOG_USEC", "")
        is_watched = env.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()) and watchdog_us.isdecimal()
        address = "" if is_helper else address
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._period_s = min(PERIOD_S, int(watchdog_us) / 2e6) if is_watched else PERIOD_S
        self._clock = clock
        self._status = ""
        self._is_ready = self._is_stopping = False
        self.next_deadline: float | None = clock() if address else None
        """Time at which `beat` is due; None: there is no systemd to notify."""

    def beat(self, is_ready: bool, status: Callable[[], str]) -> None:
        """Send that the daemon is alive if that is due; if it is ready for the first time, send that at once.

        Args:
            status: returns the daemon's status, which `systemctl status` shows.
        """
        if self.next_deadline is None:
            return
        is_first = is_ready and not self._is_ready
        if not is_first and self._clock() < self.next_deadline:
            return
        self.next_deadline = self._clock() + self._period_s
        self._is_ready = self._is_ready or is_ready
        lines = ["READY=1"] * is_first + ["WATCHDOG=1"]
        if self._is_stopping:
            lines.append(_MORE_TIME)
        if (text := status()) != self._status:
            self._status = text
            lines.append(f"STATUS={text}")
        self._send(lines)

    def stopping(self) -> None:
        if self.next_deadline is not None and not self._is_stopping:
            self._is_stopping = True
            self._send(["STOPPING=1", _MORE_TIME])

    def _send(self, lines: list[str]) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_S)
            sender.sendto("\n".join(lines).encode(), self._address)
