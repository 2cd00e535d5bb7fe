"""Which backend an elastic role gets."""

import pytest

from unified.rounds.process_group import choose_backend


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [
        ("auto", "cpu", "gloo"),
        ("auto", "cuda:3", "nccl"),
        ("auto", "npu:0", "hccl"),
        ("gloo", "cuda:0", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda:0", "cpu:gloo,cuda:nccl"),
    ],
)
def test_backend(wanted: str, device: str, expected: str) -> None:
    assert choose_backend(wanted, device) == expected
