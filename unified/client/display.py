"""What a person sees while a job runs: a live line a role on a terminal, a plain line now and then elsewhere.

The output of workers goes to stdout, everything about the job to stderr, so that ``> out.txt`` keeps the two apart.
Neither needs to stay: the job does not end because ``| head`` has seen enough.
rich is imported when a terminal is really there, and after the job was submitted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from unified.client.streams import lasting, printable
from unified.client.summary import RoleSummary, restarts_text, summarise
from unified.errors import UsageError
from unified.protocol.client_master import JobStatus
from unified.protocol.records import Stage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

PROGRESS_VARIABLE = "UNIFIED_PROGRESS"
PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.1
BAR_WIDTH = 24
NARROW = 110
"""Columns of a terminal in which the bar makes room for the metrics."""


class Display(Protocol):
    """Where the news of a job go."""

    def update(self, status: JobStatus) -> None:
        """The job's status, as often as it changes."""

    def log(self, lines: list[str]) -> None:
        """Output of workers."""

    def note(self, text: str) -> None:
        """A sentence of ours."""

    def close(self) -> None:
        """Nothing more will come. What was drawn to be overwritten is taken away."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(
    env: Mapping[str, str] | None = None, *, out: TextIO | None = None, err: TextIO | None = None
) -> Display:
    """The display that fits: ``UNIFIED_PROGRESS=0`` shows no progress, ``plain`` never draws, ``live`` always does.

    Raises:
        UsageError: another value.
    """
    env = os.environ if env is None else env
    out = lasting(sys.stdout if out is None else out)
    err = lasting(sys.stderr if err is None else err)
    choice = env.get(PROGRESS_VARIABLE, "")
    if choice == "0":
        return QuietDisplay(out, err)
    if choice == "live" or (choice in ("", "1") and err.isatty() and env.get("TERM") != "dumb"):
        return LiveDisplay(out, err)
    if choice in ("", "1", "plain"):
        return PlainDisplay(out, err)
    raise UsageError(f"{PROGRESS_VARIABLE}={choice!r} is not known: 0 for none, plain, live, or not set.")


class QuietDisplay:
    """Output of workers, and nothing about the job but our own sentences."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, status: JobStatus) -> None:
        """Says nothing."""

    def log(self, lines: list[str]) -> None:
        shown = map(printable, lines) if self._out.isatty() else lines
        self._out.write("".join(f"{line}\n" for line in shown))
        self._out.flush()

    def note(self, text: str) -> None:
        self._err.write(f"{printable(text) if self._err.isatty() else text}\n")
        self._err.flush()

    def close(self) -> None:
        """Nothing is open."""


class PlainDisplay(QuietDisplay):
    """A line when the job's stage, reason or restarts change, one every few seconds while it steps, and its last."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        super().__init__(out, err)
        self._seen: tuple[Stage, str] | None = None
        self._shown: dict[str, RoleSummary] = {}
        self._shown_at = float("-inf")

    def update(self, status: JobStatus) -> None:
        headline = (status.stage, status.reason)
        if headline != self._seen:
            self._seen = headline
            self.note(headline_text(status))
        now = time.monotonic()
        for summary in summarise(status):
            shown = self._shown.get(summary.name)
            is_news = shown is None or (shown.round, shown.num_restarts) != (summary.round, summary.num_restarts)
            is_last = status.stage is Stage.STOPPED and shown is not None and shown.progress != summary.progress
            if summary != shown and (is_news or is_last or now - self._shown_at >= PLAIN_EVERY_S):
                self._shown[summary.name] = summary
                self.note(f"{status.job_id}  {summary.text}")
        if now - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = now


class LiveDisplay:
    """A block at the foot of the terminal, redrawn at most ten times a second; all else scrolls above it."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._out = out
        self._console: Console = Console(file=err, highlight=False, soft_wrap=True)
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()
        self._drawn_at = float("-inf")
        self._headline: tuple[Stage, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, status: JobStatus) -> None:
        headline = (status.stage, status.reason)
        now = time.monotonic()
        if headline != self._headline or now - self._drawn_at >= LIVE_EVERY_S:
            self._headline, self._drawn_at = headline, now
            bar_width = BAR_WIDTH if self._console.width >= NARROW else BAR_WIDTH // 3
            self._live.update(role_table(status, bar_width), refresh=True)
        if status.stage is Stage.STOPPED:  # the block is taken away
            for summary in summarise(status):
                if any(summary.progress):
                    self.note(f"{status.job_id}  {summary.text}")

    def log(self, lines: list[str]) -> None:
        if not self._out.isatty():
            self._out.write("".join(f"{line}\n" for line in lines))
            self._out.flush()
            return
        from rich.text import Text

        for line in lines:
            self._console.print(Text.from_ansi(printable(line)))

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False)

    def close(self) -> None:
        self._live.stop()


def headline_text(status: JobStatus) -> str:
    """``nanogpt-1  INIT  waits: role trainer needs …``."""
    reason = status.reason.splitlines()[0] if status.reason else ""
    return f"{status.job_id}  {status.stage}" + (f"  {reason}" if reason else "")


def role_table(status: JobStatus, bar_width: int = BAR_WIDTH) -> Table:
    """The live block: the job's line, and a line a role."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    rows = Table.grid(padding=(0, 2))
    for _ in range(5):
        rows.add_column(no_wrap=True)
    for role in summarise(status):
        bar = ProgressBar(total=role.total, completed=role.step or 0, width=bar_width) if role.total else Text("")
        rows.add_row(
            Text(f"  {role.name}", style="bold"),
            Text(role.states + (f", round {role.round}" if role.round else "")),
            bar,
            Text(role.step_text),
            Text("  ".join(part for part in (role.metrics, restarts_text(role.num_restarts)) if part)),
        )
    block = Table.grid()
    block.add_row(Text(headline_text(status), style="dim", no_wrap=True, overflow="ellipsis"))
    block.add_row(rows)
    return block
