"""Health of an engine, judged from looks at it: whether it is ready, and why it has failed. Pure."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from unified.job.spec import EngineOptions

OPEN = ("vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs", "sglang:num_queue_reqs")
"""Metrics of vLLM and SGLang that count open requests."""
TOKENS = tuple(f"{engine}:{kind}_tokens_total" for engine in ("vllm", "sglang") for kind in ("generation", "prompt"))
"""Metrics that grow while an engine works: tokens made, and tokens of prompts read."""
_SAMPLE = re.compile(r"^([\w:]+)(?:\{.*\})? ([-+]?[\d.]+(?:[eE][-+]?\d+)?)(?: |$)", re.MULTILINE)


class EngineLook(NamedTuple):
    """Result of one look at an engine."""

    status: int | None
    """HTTP status of its ready route; None if no answer came."""
    error: str = ""
    """Reason why no answer came."""
    num_open: float | None = None
    """Requests that it has accepted and not answered; None if it does not tell."""
    num_tokens: float | None = None
    """Tokens that it has made or read since its start."""


class EngineWatch:
    """Judges one engine from its start to its failure.

    Attributes:
        is_ready: the engine has answered its ready route.
    """

    def __init__(self, now: float, options: EngineOptions) -> None:
        self.is_ready = False
        self._options = options
        self._well_at = now
        """Time of the last good answer; of the start before the first."""
        self._moved_at = now
        """Time at which tokens were last seen to come, or no request was open."""
        self._num_tokens: float | None = None

    def step(self, now: float, look: EngineLook) -> str:
        """Take a look in; return why the engine has failed, or an empty text."""
        route = f"GET {self._options.ready}"
        is_well = look.status is not None and 200 <= look.status < 300
        self.is_ready |= is_well
        if look.num_tokens != self._num_tokens or not look.num_open:
            self._num_tokens, self._moved_at = look.num_tokens, now
        if not is_well:
            within_s = self._options.unhealthy_timeout if self.is_ready else self._options.start_timeout
            if now < self._well_at + within_s:
                return ""
            what = f"answered {look.status}" if look.status is not None else f"not answered ({look.error})"
            return f"{route} has {what} for {within_s:g} s" + ("" if self.is_ready else " since its start")
        self._well_at = now
        if now >= self._moved_at + self._options.stall_timeout > self._moved_at:
            count = f"{look.num_open:.0f} request{'s are' if look.num_open != 1 else ' is'} open"
            return f"{count}, and it has made no token for {self._options.stall_timeout:g} s"
        return ""

    def pause(self, now: float, *, is_well: bool = False) -> None:
        """Count the time until now as no stall, for the engine was paused; with `is_well`, as good answers, too."""
        self._moved_at = now
        if is_well:
            self._well_at = now


def counted(metrics: str, names: tuple[str, ...]) -> float | None:
    """Return the sum of some metrics in Prometheus' text form; None if there is none of them."""
    found = [float(value) for name, value in _SAMPLE.findall(metrics) if name in names]
    return sum(found) if found else None


def engine_kind(command: list[str]) -> str:
    """Return the kind of an engine that is known: ``vllm``, ``sglang``, or an empty text."""
    for word, after in itertools.pairwise(command):
        if word == "-m" and after in MODULES:
            return after.partition(".")[0]
        if after == "serve" and word.rpartition("/")[2] in ("vllm", "sglang"):
            return word.rpartition("/")[2]
    return ""


MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main", "sglang.launch_server")
