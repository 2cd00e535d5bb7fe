"""Counterpart of ``dlrover.python.unified.util.decorators``: decorators that log how functions end."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from unified.compat.upstream.log import default_logger as logger

F = TypeVar("F", bound=Callable[..., Any])


def catch_exception(msg: str) -> Callable[[F], F]:
    """Decorate a function, async or not: an exception is logged under `msg`, and None is returned."""
    return lambda function: _within(function, lambda: _Caught(msg))


def log_execution(name: str, log_exception: bool = True) -> LogExecution:
    """Log the start and the end of the work called `name`, and how long it took.

    Used as ``with log_execution("load"): …``, or as a decorator of a function, async or not.

    Args:
        log_exception: log an exception with its traceback. It is raised in any case.
    """
    return LogExecution(name, log_exception)


class LogExecution(contextlib.AbstractContextManager["LogExecution"]):
    """Result of `log_execution`. Each call of a decorated function is timed by itself."""

    def __init__(self, name: str, log_exception: bool) -> None:
        self._name = name
        self._log_exception = log_exception
        self._began = 0.0

    def __call__(self, function: F) -> F:
        return _within(function, lambda: LogExecution(self._name, self._log_exception))

    def __enter__(self) -> LogExecution:
        logger.info("%s begins", self._name)
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        took = time.monotonic() - self._began
        if error is None:
            logger.info("%s ended after %.2f s", self._name, took)
        elif self._log_exception:
            logger.error("%s failed after %.2f s", self._name, took, exc_info=error)


class _Caught(contextlib.AbstractContextManager[None]):
    def __init__(self, msg: str) -> None:
        self._msg = msg

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        logger.error(self._msg, exc_info=error)
        return True


def _within(function: F, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> F:
    wrapped: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context():
                return await function(*args, **kwargs)
    else:

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*args, **kwargs)

    return wrapped  # type: ignore[no-any-return]
