"""Snapshot servers of a test, which it ends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.snapshots import SnapshotNode

Nodes = Callable[..., SnapshotNode]


@pytest.fixture
def snapshot_node(tmp_path: Path) -> Iterator[Nodes]:
    """Factory of servers: at the end they hear that their agent is gone, and end in order unless they were killed."""
    nodes: list[SnapshotNode] = []

    def start(name: str = "a", **options: Any) -> SnapshotNode:
        nodes.append(SnapshotNode(tmp_path, name, **options))
        return nodes[-1]

    yield start
    assert {node.end() for node in nodes} <= {0, -9}
