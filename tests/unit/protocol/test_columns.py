"""Tables by columns."""

import pytest

from unified.protocol.client_master import Changes, WorkerStatus, master_to_client
from unified.protocol.columns import columns_of, rows_of
from unified.protocol.records import Device, Progress, WorkerState

ROWS = [
    WorkerStatus(
        name=f"w{rank}", role="w", rank=rank, local_rank=0, node_rank=0, incarnation=0, state=WorkerState.RUNNING,
        progress=Progress(step=rank, metrics={"loss": 0.5, "phase": "warm"}) if rank else None,
    )
    for rank in range(3)
]  # fmt: skip


def test_rows_come_back_and_columns_of_defaults_do_not_travel() -> None:
    columns = columns_of(ROWS)
    assert set(columns) == {"name", "role", "rank", "local_rank", "node_rank", "incarnation", "state", "progress"}
    changes = Changes(version=1, at=0.0, workers={"job": columns})
    _, told = master_to_client.decode(master_to_client.encode(changes, 1))
    assert isinstance(told, Changes)
    assert rows_of(told.workers["job"], WorkerStatus) == ROWS
    assert rows_of(columns_of([]), WorkerStatus) == []


@pytest.mark.parametrize("columns", [{"name": ["a"], "role": []}, {"name": [1]}, {"index": [0], "kind": [None]}])
def test_what_are_no_columns_of_such_rows_is_an_error(columns: dict[str, list[object]]) -> None:
    with pytest.raises(ValueError, match=r"Device|argument|shorter|longer"):
        rows_of(columns, Device)
