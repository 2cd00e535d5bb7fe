"""The check: was every sample of every epoch trained on, and counted, exactly once?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return what all workers have written down: a line for each shard whose mark the coordinator accepted."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def problems(records: Iterable[dict[str, Any]], ids: Iterable[int], epochs: int) -> list[str]:
    """Sentences about samples that are missing, counted more than once, or not of the dataset; none if all is well.

    Args:
        records: each with its ``epoch`` and the ids of its ``samples``.
        ids: of the dataset's samples.
        epochs: how many there should be.
    """
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for record in records:
        seen.setdefault(record["epoch"], Counter()).update(record["samples"])
    wanted, found = Counter(ids), []
    for epoch, counts in sorted(seen.items()):
        if epoch >= epochs:
            found.append(f"epoch {epoch} was not asked for")
            continue
        if missing := (wanted - counts).total():
            found.append(f"epoch {epoch}: {missing} samples are missing")
        if more := (counts - wanted).total():
            found.append(f"epoch {epoch}: {more} samples are there more than once, or are none of the dataset's")
    return found
