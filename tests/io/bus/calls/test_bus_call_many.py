"""One call to several workers: its arguments are encoded once, and lie in shared memory once."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bus import DEADLINE_S, World, entry
from unified.bus.codec.codec import encode_arguments
from unified.bus.shm.files import DIRECTORY, inbox_of
from unified.bus.shm.reader import borrowed_behind
from unified.bus.shm.segment import Segment

TARGETS = ["b", "c", "d"]


def test_arguments_are_encoded_and_laid_into_shared_memory_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    filled: list[str] = []
    fill = Segment.fill

    def encode_and_note(args: Any, kwargs: Any, **options: Any) -> Any:
        if args and isinstance(args[0], np.ndarray):  # others of this process make calls too, such as queues' cleanup
            encoded.append(args)
        return encode_arguments(args, kwargs, **options)

    def fill_and_note(segment: Segment, *args: Any) -> None:
        filled.append(Path(segment.path).name)
        fill(segment, *args)

    monkeypatch.setattr("unified.bus.endpoint.encode_arguments", encode_and_note)
    monkeypatch.setattr(Segment, "fill", fill_and_note)
    got: dict[str, Any] = {}
    a, _ = world.endpoint("a")
    for target in TARGETS:
        _, inbox = world.endpoint(target, {"keep": lambda array, target=target: got.update({target: array})})
        a.update_directory([entry(target, inbox)])
    array = np.arange(1 << 17)
    assert array.nbytes == 1 << 20
    for each in a.call_many(TARGETS, "keep", (array,), {}):
        each.result(DEADLINE_S)
    assert sorted(got) == TARGETS
    for received in got.values():
        np.testing.assert_array_equal(received, array)
    assert len(encoded) == 1
    made = [name for name in os.listdir(DIRECTORY) if inbox_of(name) in {each.inbox_id for each in world.endpoints}]
    all_borrowed = [borrowed_behind(memoryview(each)) for each in got.values()]
    if world.route == "auto":
        assert filled == made == [f"unified-{a.inbox_id}-0"]
        assert [Path(each.reference.segment.path).name for each in all_borrowed if each is not None] == 3 * made
    else:
        assert filled == made == []
        assert all_borrowed == [None] * 3
