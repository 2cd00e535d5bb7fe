"""The end of an allocation: what signals mean, when jobs are suspended, and whether it goes back into the queue.

This module only decides: `unified.slurm.execution` passes the signals on to it, and carries out its decisions.
"""

from __future__ import annotations

import math
import os
import signal

MARGIN_S = 30.0
"""Seconds before the end of the allocation at which a driver that still runs is ended."""
UNKNOWN_S = 300.0
"""Seconds that jobs have to save if SLURM does not say when the allocation ends."""
OUTPUT_S = 20.0
"""Least seconds that a driver has, at the time limit, for the last output of workers that have saved."""
TERM_S = 10.0
"""Seconds from SIGTERM to the end of the driver. Agents and workers get SIGTERM, too, and SLURM kills all of them after
its KillWait, 30 s in most places."""
END_S = 5.0
"""Seconds that a driver, a master or a step may take to end when its work is done."""
AGAIN_S = 5.0
"""Seconds between two suspends of all jobs, because a driver may submit new ones although the allocation ends."""
SUSPEND = "suspend"


class Ending:
    """The end of one allocation. Times are of the caller's clock, in seconds.

    Args:
        num_restarts: restarts of the allocation so far.
        requeues: greatest number of restarts; then the allocation does not go back into the queue. None: no limit.

    Attributes:
        is_unfinished: a job waits for the next allocation.
    """

    def __init__(self, slurm_id: str, num_restarts: int, requeues: int | None) -> None:
        self._slurm_id = slurm_id
        self._num_restarts = num_restarts
        self._requeues = requeues
        self._asked: dict[int, float] = {}
        """Signals that came, with the time of the first of each kind."""
        self._suspend_at = -math.inf
        self._driver_ends_at = math.inf
        self._signals = [signal.SIGTERM, signal.SIGKILL]
        """Signals that the driver did not get yet."""
        self.is_unfinished = False

    def note(self, number: int, now: float) -> None:
        """Note a signal: SIGUSR1 before the time limit, SIGTERM from SLURM or anybody, SIGINT from a terminal."""
        self._asked.setdefault(number, now)

    @property
    def is_asked(self) -> bool:
        """True after any signal."""
        return bool(self._asked)

    @property
    def has_begun(self) -> bool:
        """True after a signal that ends the allocation. Ctrl-C ends only a driver."""
        return bool(self._asked.keys() - {signal.SIGINT})

    @property
    def is_time_over(self) -> bool:
        """True if the allocation ends by its time limit. After SIGTERM only SLURM may start it again."""
        return signal.SIGUSR1 in self._asked and not self.is_terminated

    @property
    def is_terminated(self) -> bool:
        """True if SIGTERM came: SIGKILL follows soon."""
        return signal.SIGTERM in self._asked

    @property
    def may_requeue(self) -> bool:
        """True if the allocation may go back into the queue."""
        return self._requeues is None or self._num_restarts < self._requeues

    def due(self, now: float) -> str | signal.Signals | None:
        """Return what to do now, while the driver runs: `SUSPEND` all jobs, or send the driver this signal."""
        if self.is_terminated and len(self._signals) == 2:  # SLURM has sent the driver SIGTERM, too
            self._signals.pop(0)
            self._driver_ends_at = self._asked[signal.SIGTERM] + TERM_S
        if self.has_begun and now >= self._suspend_at:
            self._suspend_at = now + AGAIN_S
            return SUSPEND
        if now > self._driver_ends_at and self._signals:  # its job waits, and the driver does not end by itself
            self._driver_ends_at = now + END_S
            return self._signals.pop(0)
        return None

    def suspends(self, now: float, left_s: float | None) -> tuple[str, float]:
        """Return the reason for which jobs are suspended, and the time by which they must have saved.

        Args:
            left_s: seconds to the end of the allocation; None: SLURM does not say.
        """
        reason = f"SLURM ends allocation {self._slurm_id}"
        if not self.is_time_over:
            return f"{reason} (SIGTERM, as for scancel, a requeue, a preemption)", now + OUTPUT_S
        if left_s is not None:
            reason += f" in {left_s:.0f} s"
        if self.may_requeue:
            limit = f" of {self._requeues}" if self._requeues is not None else ""
            reason += f"; it goes on in restart {self._num_restarts + 1}{limit}"
        until = now + (UNKNOWN_S if left_s is None else max(OUTPUT_S, left_s - MARGIN_S))
        self._driver_ends_at = min(self._driver_ends_at, until)
        return reason, until

    def driver_ended(self, code: int, *, has_suspended: bool) -> None:
        """Note the driver's exit code.

        Args:
            has_suspended: a job of the cluster is suspended.
        """
        was_ended = len(self._signals) < 2 and code != 0
        waits = self.has_begun and (was_ended or has_suspended)
        self.is_unfinished = code == os.EX_TEMPFAIL or waits

    def requeues(self) -> tuple[bool, str]:
        """Return whether to put the allocation, whose job waits, back into the queue, and a text for the user."""
        if not self.has_begun:
            again = f"`scontrol requeue {self._slurm_id}` lets the job go on"
            text = f"the job is suspended, and this allocation ends: {again}"
            return False, text
        if not self.is_time_over:
            return False, ""
        if not self.may_requeue:
            return False, f"the job has not ended, and --requeues {self._requeues} are used up"
        return True, ""
