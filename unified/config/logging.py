"""The log level of a process, log lines that cannot be forged, and a filter for repeated events.

The environment asks for the level: ``UNIFIED_LOG_LEVEL``, else ``DLROVER_LOG_LEVEL``, else ``RUST_LOG``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal

from unified.errors import OptionError, nearest

VARIABLE = "UNIFIED_LOG_LEVEL"
VARIABLES = (VARIABLE, "DLROVER_LOG_LEVEL", "RUST_LOG")
Level = Literal["trace", "debug", "info", "warn", "error", "off"]
LEVELS: Final[dict[Level, int]] = {"trace": 5, "debug": 10, "info": 20, "warn": 30, "error": 40, "off": 60}
"""Names of log levels, as ``RUST_LOG`` has them, and their numbers in `logging`."""
_OTHER_NAMES = {"warning": "warn", "critical": "error", "none": "off"}
FORGET_S = 3600.0
MAX_KNOWN = 1000


def log_level(env: Mapping[str, str]) -> Level:
    """Return the log level that the environment asks for (see `asked_level`), else ``info``."""
    return asked_level(env) or "info"


def asked_level(env: Mapping[str, str]) -> Level | None:
    """Return the log level that the environment asks for, if it does.

    ``DLROVER_LOG_LEVEL`` may be a number of `logging` too. ``RUST_LOG`` may hold levels of single parts
    (``info,hyper=warn``); its level for everything counts.

    Raises:
        OptionError: ``UNIFIED_LOG_LEVEL`` is no level, or a word in another variable is nearly one.
    """
    if own := env.get(VARIABLE, "").strip():
        if (level := _level(own)) is None:
            raise OptionError(
                f"{VARIABLE}={own!r} is no log level.{nearest(own, LEVELS)} There are: {', '.join(LEVELS)}."
            )
        return level
    found: Level | None = None
    if upstreams := env.get("DLROVER_LOG_LEVEL", "").strip():
        if (level := _level(upstreams) or _level_of_number(upstreams)) is not None:
            return level
        if hint := nearest(upstreams.lower(), LEVELS):
            raise OptionError(f"DLROVER_LOG_LEVEL={upstreams!r} is no log level.{hint}")
    for directive in filter(None, map(str.strip, env.get("RUST_LOG", "").split(","))):
        if (level := _level(directive)) is not None:
            found = level
        elif "=" not in directive and (hint := nearest(directive, LEVELS)):  # other words are parts of programs
            raise OptionError(f"RUST_LOG={env['RUST_LOG']!r}: {directive!r} is no log level.{hint}")
    return found


def logging_level(flag: str | None, env: Mapping[str, str]) -> int:
    """Return the number for `logging` of a daemon's level: that of its flag, else of the environment."""
    return LEVELS[log_level({VARIABLE: flag} if flag else env)]


def log_from(level: Level, name: str = "unified") -> None:
    """Set the level of a logger in a script or a worker whose environment asks for it.

    A level that the program has set for that logger stays. Records go to stderr, as warnings do. If the program sets
    up a handler, before or after this call, only that handler gets them.
    """
    logger = logging.getLogger(name)
    if logger.level != logging.NOTSET:
        return
    logger.setLevel(LEVELS[level])
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    handler.addFilter(lambda record: _is_alone(handler, record))
    logger.addHandler(handler)


def escaped(text: str) -> str:
    """Return a text as one line that hides nothing: line ends, escape sequences and other characters that cannot be
    printed, such as U+202E, become ``\\n``, ``\\x1b``, ``\\u202e``.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class _OneLine(logging.Formatter):
    """Formatter of daemons' logs: words from workers or clients cannot forge another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


def log_to_stderr(name: str, level: int) -> None:
    """Begin the log of a daemon of this name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"%(asctime)s {name} %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class LogOnce:
    """Filter that lets a repeated event be logged once, and then counts it.

    An event counts as new again after an hour without it. At most a thousand events are known: the least recently seen
    are forgotten.

    Attributes:
        total: number of all events, also repeated ones.
    """

    def __init__(self, forget_s: float = FORGET_S, max_known: int = MAX_KNOWN) -> None:
        self._forget_s = forget_s
        self._max_known = max_known
        self._seen_at: dict[str, float] = {}
        """Time of each event's last occurrence, oldest first."""
        self.total = 0

    def is_new(self, now: float, thing: str) -> bool:
        """Count an event; return True if it is worth a line."""
        self.total += 1
        seen_at = self._seen_at.pop(thing, None)
        self._seen_at[thing] = now
        if len(self._seen_at) > self._max_known:
            del self._seen_at[next(iter(self._seen_at))]
        return seen_at is None or now - seen_at > self._forget_s


def _is_alone(handler: logging.Handler, record: logging.LogRecord) -> bool:
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        if any(other is not handler for other in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True


def _level(word: str) -> Level | None:
    name: Any = _OTHER_NAMES.get(word.lower(), word.lower())
    return name if name in LEVELS else None


def _level_of_number(text: str) -> Level | None:
    return next((name for name, number in LEVELS.items() if text == str(number)), None)
