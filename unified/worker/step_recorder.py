"""Record of one step of this worker by ``torch.profiler``, for ``unified profile JOB --torch``.

torch's recorder belongs to the thread that began it. A record therefore begins and ends in calls of
`current_worker().report(step=…)` by one thread: at the first new step after the request, and at the next one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unified.protocol.records import MAX_PROFILE_BYTES
from unified.threads import TimerThread, start_thread


class StepRecorder:
    """Writes a record beside the worker's log.

    Args:
        log_file: path of the worker's stderr.
        answer: called once for each `begin`, from any thread, with the reason why there is no record, or "".
    """

    def __init__(self, log_file: str, answer: Callable[[str], None]) -> None:
        self._path = Path(f"{log_file.removesuffix('.err')}.profile")
        self._send = answer
        self._lock = threading.Lock()
        self._is_asked = False
        self._profile: Any = None
        self._thread = 0
        self._within_s = 0.0
        self._timer = TimerThread("unified-step-recorder", self._overdue)
        self.is_idle = True
        """False while `next_step` has something to do."""

    def begin(self, within_s: float) -> None:
        """Record the next step, which has to end within `within_s` seconds."""
        with self._lock:
            if "torch" not in sys.modules:
                self._send("it has not imported torch")
            elif self._profile is not None:
                self._send("a step that it was to record before has not ended yet")
            else:
                self._is_asked, self._within_s, self.is_idle = True, within_s, False
                self._timer.set(time.monotonic() + within_s)

    def next_step(self) -> None:
        """Begin or end the record, after this thread has reported a new step. Never raises."""
        with self._lock:
            try:
                if self._profile is None and self._is_asked:
                    from torch import autograd, profiler

                    # A second profiler would silently not start.
                    if getattr(autograd.profiler, "_is_profiler_enabled", False):
                        raise RuntimeError("the program itself runs a profiler already")
                    profile = profiler.profile()
                    profile.start()
                    self._profile, self._thread = profile, threading.get_ident()
                elif self._profile is not None and self._thread == threading.get_ident():
                    profile, self._profile, self.is_idle = self._profile, None, True
                    profile.stop()
                    if self._is_asked:
                        self._is_asked = False
                        start_thread("unified-step-record", self._write, profile)
            except Exception as error:
                self._answer(f"torch.profiler: {error}")

    def _write(self, profile: Any) -> None:
        fresh = self._path.with_suffix(".profile.json.gz")
        error = ""
        try:
            profile.export_chrome_trace(str(fresh))
            fresh.chmod(0o600)
            if (size := fresh.stat().st_size) > MAX_PROFILE_BYTES:
                error = f"the trace of its step has {size >> 20} MiB, more than {MAX_PROFILE_BYTES >> 20} MiB"
            else:
                fresh.replace(self._path)
            fresh.unlink(missing_ok=True)
        except Exception as fault:
            error = f"the trace of its step cannot be written: {fault}"
        self._send(error)

    def _overdue(self) -> None:
        with self._lock:
            what = "reported no step" if self._profile is None else "did not end the step that it had begun"
            self._answer(f"it {what} within {self._within_s:g} s: current_worker().report(step=…) says where one ends")

    def _answer(self, error: str) -> None:
        if self._is_asked:
            self._is_asked, self.is_idle = False, self._profile is None
            self._send(error)
