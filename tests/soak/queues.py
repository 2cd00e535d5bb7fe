"""Producers and consumers of the soak. Each item has an id, and every step of its way is written down before and after.

A consumer *keeps* an item by writing its id into its journal: that is its durable work. Only then it acknowledges, in
one of two ways: `task_done()`, or its next `get`. So a consumer that is killed between the two leaves an item that is
kept and comes again; `soak_accounts` knows that from one that was doubled. A `get` that gives nothing acknowledges too,
unless the owner was away all the while and could not be told.
"""

import random
import time
from collections.abc import Callable
from typing import Any

from tests.soak import payload
from tests.soak.journal import Incarnation, Journal
from unified.api.runtime import DataQueue

Stop = Callable[[], bool]
LARGEST_BATCH = 8
WAIT_S = 0.5


class Producer:
    """Puts items into one queue until it is told to stop."""

    def __init__(self, journal: Journal, incarnation: Incarnation, name: str) -> None:
        self._journal = journal
        self._incarnation = incarnation
        self._name = name
        self._rng = random.Random(f"{incarnation}{name}")
        self._next = 0

    def run(self, should_stop: Stop) -> None:
        queue: DataQueue[Any] = DataQueue(self._name)
        while not should_stop():
            items = [self._item() for _ in range(self._rng.randint(1, LARGEST_BATCH))]
            ids = [item[0] for item in items]
            self._journal.write("put?", self._name, ids)
            try:
                queue.put(*items)
            except Exception as error:
                self._journal.write("doubt", self._name, ids, f"put: {type(error).__name__}: {error}")
            else:
                self._journal.write("put!", self._name, ids)
            time.sleep(self._rng.random() * 0.1)

    def _item(self) -> tuple[str, int, int, Any]:
        """Id, size, mark, payload."""
        self._next += 1
        nbytes = payload.size(self._rng) if self._rng.random() < 0.02 else self._rng.randrange(2000)
        mark = self._rng.randrange(256)
        kind = self._rng.choice(["array", "tensor", "bytes"])
        item_id = f"{self._incarnation.worker}.{self._incarnation.incarnation}.{self._name}.{self._next}"
        return item_id, nbytes, mark, payload.make(nbytes, mark, kind)


class Consumer:
    """Takes from one queue until it is told to stop.

    Args:
        is_explicit: acknowledge by `task_done()`, else by the next `get`.
    """

    def __init__(self, journal: Journal, incarnation: Incarnation, name: str, *, is_explicit: bool) -> None:
        self._journal = journal
        self._name = name
        self._is_explicit = is_explicit
        self._rng = random.Random(f"{incarnation}{name}consumer")
        self._held: list[str] = []

    def run(self, should_stop: Stop) -> None:
        queue: DataQueue[Any] = DataQueue(self._name)
        while not should_stop():
            items = self._acknowledged_by(lambda: queue.get(self._rng.randint(1, LARGEST_BATCH), timeout=WAIT_S)) or []
            ids = [item[0] for item in items]
            if not ids:
                continue
            self._journal.write("take", self._name, ids)
            for item_id, nbytes, mark, value in items:
                if wrong := payload.complaint(value, nbytes, mark):
                    self._journal.write("wrong", f"item {item_id} of queue {self._name}: {wrong}")
            del items
            if self._rng.random() < 0.1:
                time.sleep(self._rng.random() * 0.3)  # so that some are killed between take and keep
            self._journal.write("keep", self._name, ids)
            self._held = ids
            if self._is_explicit:
                self._acknowledged_by(queue.task_done)
        if self._held:
            self._acknowledged_by(queue.task_done)

    def _acknowledged_by(self, step: Callable[[], Any]) -> Any:
        """Make a step that acknowledges what is held."""
        held, self._held = self._held, []
        if held:
            self._journal.write("ack?", self._name, held)
        try:
            found = step()
        except Exception as error:
            self._journal.write("doubt", self._name, held, f"ack: {type(error).__name__}: {error}")
            time.sleep(WAIT_S)
            return None
        if held:
            is_sure = found != []
            self._journal.write("ack!" if is_sure else "ack~", self._name, held)
            self._held = [] if is_sure else held
        return found
