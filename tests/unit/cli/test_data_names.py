"""Names in the output of `--json`, which programs rely on: some may come, none may go."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec

from unified.client.logs import LogLine
from unified.protocol.client_master import JobLine, JobStatus, NodeStatus
from unified.protocol.records import EventRecord

PROMISED = Path(__file__).with_name("data_names.txt")


def names_in(kind: object) -> Iterator[str]:
    """Yield ``Record.field`` and ``Enum.VALUE`` of a record, and of the records that its fields hold."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for name, field in get_type_hints(kind).items():
            if not name.startswith("__"):
                yield f"{kind.__name__}.{name}"
                yield from names_in(field)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield from (f"{kind.__name__}.{value}" for value in kind)
    else:
        for each in get_args(kind):
            yield from names_in(each)


def test_no_name_goes() -> None:
    found = {name for kind in (JobStatus, JobLine, NodeStatus, EventRecord, LogLine) for name in names_in(kind)}
    promised = set(PROMISED.read_text().split())
    assert len(promised) > 120
    assert not promised - found, "a program that reads these stops working"
    assert not found - promised, f"add these to {PROMISED.name}"
