"""Description of a worker's end: the evidence behind an exit code or a signal, in one line."""

from __future__ import annotations

import signal

from unified.protocol.records import Evidence
from unified_agent.core.messages import WorkerExited

_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that are sent on purpose; a fault of the program does not raise them."""
_MAX_WORDS = 160
_FAULT = "Fatal Python error"
"""Beginning of the traceback that `faulthandler` writes."""


def how(event: WorkerExited) -> str:
    """Return what to add to ``killed by SIGKILL`` or ``exited with code 3``; empty without evidence."""
    evidence = event.evidence
    if evidence is None:
        return ""
    if evidence.killed_for:
        return f": {evidence.killed_for}"
    if event.code == -signal.SIGKILL:
        return f"{_killer(evidence)}{_memory(evidence)}"
    if -event.code in _ASKED:
        return ", which its agent did not send"
    words = "" if event.error else _last_words(event.last_lines)
    return f"; its last output: {words}" if words else ""


def _killer(evidence: Evidence) -> str:
    if evidence.out_of_memory:
        return f", out of memory: {evidence.out_of_memory}"
    if evidence.out_of_memory_here:
        return f", which its agent did not send; maybe out of memory: {evidence.out_of_memory_here}"
    if evidence.is_memory_counted:
        return ", which its agent did not send; the kernel counted no out-of-memory kill"
    return ", which its agent did not send; out-of-memory kills cannot be read on this node"


def _memory(evidence: Evidence) -> str:
    """Return the memory at the end, and at the beginning of the last minute if that was clearly less."""
    if not evidence.memory:
        return f"; it had {evidence.peak_mb:.0f} MB of memory at most" if evidence.peak_mb else ""
    age_s, first_mb = evidence.memory[0]
    last_mb = max(evidence.peak_mb, evidence.memory[-1].mb)
    if last_mb < 1.1 * first_mb:
        return f"; it had {last_mb:.0f} MB of memory"
    return f"; it had {first_mb:.0f} MB of memory {age_s:.0f} s before, and {last_mb:.0f} MB at most"


def _last_words(lines: str) -> str:
    """Return where a fault happened, or else the last line."""
    said = [line.strip() for line in lines.splitlines() if line.strip()]
    if any(line.startswith(_FAULT) for line in said):
        frames = (line for line in said if line.startswith('File "'))
        return next(frames, "")[:_MAX_WORDS]
    return said[-1][:_MAX_WORDS] if said else ""
