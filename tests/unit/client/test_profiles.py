"""Profiles as a client sees them: what costs most, and a profile that is pulled piece by piece."""

from typing import Any

import pytest
from msgspec import json

from unified.client.connection import MasterConnection
from unified.client.profiles import costs, read_rest
from unified.errors import ClusterError
from unified.protocol.client_master import LogChunk

BOXES = [  # as py-spy writes them, in any order: y, x, width, name
    (52, 0, 10, "all"),
    (68, 0, 8, "run (train.py:3)"),
    (68, 8, 2, "&lt;module&gt; (other.py:1)"),
    (84, 0, 3, "step (train.py:7)"),
    (84, 3, 4, "step (train.py:8)"),
    (100, 4, 1, "run (train.py:3)"),
]


def graph() -> bytes:
    lines = [
        f'<g><title>{name} ({width} samples, {width * 10:.2f}%)</title><rect x="1.0%" y="{y}" width="2.0%" height="15" '
        f'fill="rgb(1,2,3)" fg:x="{x}" fg:w="{width}"/><text x="0.5%" y="94.50"></text></g>'
        for y, x, width, name in reversed(BOXES)
    ]
    return "\n".join(["<svg><title>Flame</title>", *lines, "</svg>"]).encode()


def test_what_costs_most_is_first() -> None:
    found = costs("flamegraph", graph())
    assert [name for name, _ in found] == ["step (train.py)", "run (train.py)", "<module> (other.py)", "all"]
    assert [share for _, share in found] == pytest.approx([0.6, 0.2, 0.2, 0.0])


def test_what_costs_most_in_all_threads() -> None:
    frames = [{"name": "run", "file": "a.py"}, {"name": "step", "file": "a.py"}]
    threads = [
        {"samples": [[0, 1], [0]], "weights": [0.5, 0.25]},
        {"samples": [[1]], "weights": [0.25]},
    ]
    assert costs("speedscope", json.encode({"shared": {"frames": frames}, "profiles": threads})) == [
        ("step (a.py)", 0.75),
        ("run (a.py)", 0.25),
    ]


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"profiles": [{"samples": [[7]], "weights": [1]}]}'])
def test_a_form_that_is_not_known_costs_nothing(data: bytes) -> None:
    assert costs("flamegraph", data) == []
    assert costs("speedscope", data) == []


class Pieces(MasterConnection):
    """Stands for a master that has a profile of `size` bytes, and pulls it in pieces of three."""

    def __init__(self, size: int) -> None:
        self.size = size

    def ask(self, message: Any, expected: Any, *, timeout_s: float | None = None) -> Any:
        assert message.take is None
        assert message.stream == "profile"
        return piece(bytes(range(self.size))[message.offset :][:3], message.offset, self.size)


def piece(data: bytes, offset: int, size: int) -> LogChunk:
    end = offset + len(data)
    return LogChunk(
        worker="w_1-0_1-0", incarnation=2, data=data, offset=offset, next_offset=end, size=size, is_final=False
    )


def test_a_profile_is_pulled_to_its_end() -> None:
    assert read_rest(Pieces(10), "job", piece(b"\0\1", 0, 10)) == bytes(range(10))
    with pytest.raises(ClusterError, match="another profile of w_1-0_1-0 was taken"):
        read_rest(Pieces(11), "job", piece(b"\0\1", 0, 10))
    with pytest.raises(ClusterError, match="no process yet"):
        read_rest(Pieces(0), "job", piece(b"", 0, 0))
