"""Displays of a running job: a live line a role on a terminal, a plain line now and then elsewhere.

The output of workers goes to stdout, everything about the job to stderr, so that ``> out.txt`` keeps the two apart.
Either stream may close: the job goes on after ``| head`` has ended.
rich is imported only for a terminal, and after the job was submitted.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from unified.client.folding import LineFolder, is_wanted
from unified.client.logs import LineView, Output
from unified.client.output import OutputWriter, Prefix, WorkerOutput
from unified.client.report import RoleSummary, headline_text, restarts_text, stage_text, summarise
from unified.client.terminal import lasting, printable, undecodable_replaced
from unified.config.logging import escaped
from unified.errors import UsageError
from unified.protocol.client_master import JobStatus
from unified.protocol.records import Stage
from unified.values import ClosedOnExit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

PROGRESS_VARIABLE = "UNIFIED_PROGRESS"
PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.1
BAR_WIDTH = 24
MAX_BEGUN = 8
"""Greatest number of partial lines, such as progress bars, that are shown at a time."""
NARROW = 110
"""Columns of a terminal below which the bar is shorter, so that the metrics fit."""


class Display(ABC, ClosedOnExit):
    """Place where the news of a job are shown.

    Attributes:
        wants_all: every line of every worker is shown, and not only as much as a person can follow.
    """

    wants_all: bool

    @abstractmethod
    def update(self, status: JobStatus, now: float = 0.0) -> None:
        """Take the job's status, as often as it changes or, while the job is stalled, each second.

        Args:
            now: the master's clock; 0.0: nobody needs to know whether the job is stalled.
        """

    @abstractmethod
    def output(self, outputs: list[Output]) -> None:
        """Show output of workers."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show a sentence of ours."""

    @abstractmethod
    def close(self) -> None:
        """End the display, and erase its live block."""

    def refresh(self) -> None:  # most draw nothing
        """Draw what changed since the last time; called a few times a second."""


def open_display(
    env: Mapping[str, str] | None = None,
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
    prefix: Prefix = "auto",
) -> Display:
    """Return the display that fits: ``UNIFIED_PROGRESS=0`` shows no progress, ``plain`` never draws, ``live`` always.

    Args:
        prefix: whether lines of workers have their worker in front; ``auto``: on a terminal.
    """
    env = os.environ if env is None else env
    out = lasting(sys.stdout if out is None else out)
    err = lasting(sys.stderr if err is None else err)
    choice = env.get(PROGRESS_VARIABLE, "")
    if choice == "0":
        return QuietDisplay(out, err, prefix)
    if choice == "live" or (choice in ("", "1") and err.isatty() and env.get("TERM") != "dumb"):
        return LiveDisplay(out, err, prefix)
    if choice in ("", "1", "plain"):
        return PlainDisplay(out, err, prefix)
    raise UsageError(f"{PROGRESS_VARIABLE}={choice!r} is not known: use 0 (no progress), plain or live, or unset it.")


class QuietDisplay(Display):
    """Shows the output of workers and our own sentences, but no progress."""

    def __init__(self, out: TextIO, err: TextIO, prefix: Prefix = "auto") -> None:
        self._err = lasting(err)
        self.wants_all = not (out.isatty() and err.isatty())
        self._writer = WorkerOutput(lasting(out), self._err, prefix)

    def update(self, status: JobStatus, now: float = 0.0) -> None:
        self._writer.update(status)

    def output(self, outputs: list[Output]) -> None:
        self._writer.write(outputs)

    def note(self, text: str) -> None:
        self._writer.break_line()
        self._err.write(f"{escaped(text)}\n")
        self._err.flush()

    def close(self) -> None:
        self._writer.close()


class PlainDisplay(QuietDisplay):
    """Shows a line when stage, reason or restarts change, every few seconds while the job steps, and at its end."""

    def __init__(self, out: TextIO, err: TextIO, prefix: Prefix = "auto") -> None:
        super().__init__(out, err, prefix)
        self._seen: tuple[str, str] | None = None
        self._shown: dict[str, RoleSummary] = {}
        self._shown_at = float("-inf")

    def update(self, status: JobStatus, now: float = 0.0) -> None:
        super().update(status)
        headline = (stage_text(status, now), status.reason)
        if headline != self._seen:
            self._seen = headline
            self.note(headline_text(status, now))
        now = time.monotonic()
        for summary in summarise(status):
            shown = self._shown.get(summary.name)
            is_news = shown is None or (shown.round, shown.num_restarts) != (summary.round, summary.num_restarts)
            is_last = status.stage is Stage.STOPPED and shown is not None and shown.progress != summary.progress
            if (shown is None or summary.text != shown.text) and (
                is_news or is_last or now - self._shown_at >= PLAIN_EVERY_S
            ):
                self._shown[summary.name] = summary
                self.note(f"{status.job_id}  {summary.text}")
        if now - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = now


class LiveDisplay(Display):
    """A block at the foot of the terminal, redrawn at most ten times a second; all else scrolls above it."""

    def __init__(self, out: TextIO, err: TextIO, prefix: Prefix = "auto") -> None:
        from rich.console import Console
        from rich.live import Live

        self.wants_all = not (out.isatty() and err.isatty())
        self._file = None if out.isatty() else OutputWriter({"out": lasting(out)}, prefix=prefix)
        self._lines = LineView(has_prefix=prefix != "never")
        if prefix != "never" and is_wanted():
            self._lines.folder = LineFolder()
        self._status: JobStatus | None = None
        self._begun: list[str] = []
        """Partial lines, as they were drawn last."""
        self._console: Console = Console(file=err, highlight=False, soft_wrap=True)
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()
        self._drawn_at = float("-inf")
        self._headline, self._now = "", 0.0

    def update(self, status: JobStatus, now: float = 0.0) -> None:
        headline = headline_text(status, now)
        self._status, self._now = status, now
        if headline != self._headline or time.monotonic() - self._drawn_at >= LIVE_EVERY_S:
            self._headline = headline
            self._draw()
        if status.stage is Stage.STOPPED:  # the block is taken away
            for summary in summarise(status):
                if any(summary.progress):
                    self.note(f"{status.job_id}  {summary.text}")

    def output(self, outputs: list[Output]) -> None:
        if self._file is not None:
            self._file.write(output for output in outputs if output.source.stream == "out")
        self._print(self._lines.feed(each for each in outputs if self._file is None or each.source.stream == "err"))
        self.refresh()

    def refresh(self) -> None:
        self._print(self._lines.due())
        if time.monotonic() - self._drawn_at >= LIVE_EVERY_S and self._lines.partials() != self._begun:
            self._draw()

    def _print(self, lines: list[str]) -> None:
        from rich.text import Text

        for line in lines:
            self._console.print(Text.from_ansi(printable(undecodable_replaced(line))))

    def _draw(self) -> None:
        """Draw the block: the job, and below it the partial lines, so that a prompt stands last."""
        from rich.console import Group
        from rich.text import Text

        self._drawn_at = time.monotonic()
        self._begun = self._lines.partials()
        bar_width = BAR_WIDTH if self._console.width >= NARROW else BAR_WIDTH // 3
        rows = [Text.from_ansi(printable(undecodable_replaced(line))) for line in self._begun[-MAX_BEGUN:]]
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        table = [role_table(self._status, bar_width, self._now)] if self._status is not None else []
        self._live.update(Group(*table, *rows), refresh=True)

    def note(self, text: str) -> None:
        self._print(self._lines.due(is_end=True))
        self._console.print(escaped(text), markup=False)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._print(self._lines.flush())
        self._live.stop()


def role_table(status: JobStatus, bar_width: int = BAR_WIDTH, now: float = 0.0) -> Table:
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
    block.add_row(Text(headline_text(status, now), style="dim", no_wrap=True, overflow="ellipsis"))
    block.add_row(rows)
    return block
