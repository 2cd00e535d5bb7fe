"""Writers of one object that meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from unified.errors import AlreadyExistsError
from unified.storage import StorageBackend

NUM_WRITERS = 4


def race(store: StorageBackend, nbytes: int) -> None:
    """Several write one object at the same time, none of them over another: one does, and it is that one's."""
    together = threading.Barrier(NUM_WRITERS)
    outcomes: list[str] = []

    def write(number: int) -> None:
        payload = bytes([number]) * nbytes

        def pieces() -> Iterator[bytes]:
            together.wait(30)  # after the first look whether it is there
            yield payload

        try:
            store.write("a", pieces(), if_absent=True)
            outcomes.append(f"made by {number}")
        except AlreadyExistsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(NUM_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = store.read("a")
    assert made == made[:1] * nbytes
    assert sorted(outcomes) == [f"made by {made[0]}"] + ["refused"] * (NUM_WRITERS - 1)
