"""Which waits of the main thread end with a broken round: those of the runtime, and none of user code within them."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from unified.worker.rounds import _is_waiting


def frame_within(*modules: str) -> FrameType:
    """Return the frame of a function of the last module, which one of the module before calls, and so on."""
    inner: Callable[[], FrameType] = sys._getframe
    for module in reversed(modules):
        scope: dict[str, Any] = {"__name__": module, "inner": inner}
        exec("def call():\n    return inner()", scope)
        inner = scope["call"]
    return inner()


@pytest.mark.parametrize(
    ("modules", "is_left"),
    [
        (["train", "unified.bus.calls.future"], True),
        (["train", "unified.queue.producer", "unified.bus.calls.future", "threading"], True),
        (["train", "unified.queue.owner_lookup", "unified.threads", "threading"], True),
        (["train", "asyncio.runners", "asyncio.base_events", "selectors"], True),
        (["train"], False),
        (["train", "threading"], False),
        (["train", "unified.bus.transport.io_threads", "rewards"], False),
        (["train", "unified.bus.transport.io_threads", "rewards", "threading"], False),
        (["train", "asyncio.base_events", "rewards"], False),
        (["train", "unified.elastic.state"], False),
        (["train", "unified.snapshot.worker.client", "socket"], False),
    ],
    ids=str,
)
def test_only_the_innermost_code_that_is_of_no_library_counts(modules: list[str], is_left: bool) -> None:
    assert _is_waiting(frame_within(*modules)) == is_left
