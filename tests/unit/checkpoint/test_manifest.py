"""Names and records of checkpoints."""

import gzip
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified.checkpoint import manifest as m
from unified.checkpoint.payload import BytesPayload, MeasuredStream, check_compression, compressed, decompress
from unified.config.runtime import Compression
from unified.errors import CheckpointCorruptError, UsageError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def test_the_name_is_the_documents() -> None:
    assert m.manifest_name(1) == "step-000001.json"
    assert m.step_of("step-000001.json") == 1
    assert m.step_of("step-1234567.json") == 1234567


@pytest.mark.parametrize("name", ["step-1.json", "step-0000001.json", "step-000001.json.tmp", "x-step-000001.json", ""])
def test_other_names_are_no_manifests(name: str) -> None:
    assert m.step_of(name) is None


@given(st.integers(0, 10**9))
def test_names_come_back_and_sort_by_step(step: int) -> None:
    assert m.step_of(m.manifest_name(step)) == step
    assert m.part_of(m.part_name(step, "ab12")) == (step, "ab12")
    assert m.part_of(m.part_name(step, "ab12", "a/b.bin")) == (step, "ab12")
    assert m.part_of(m.manifest_name(step)) is None
    assert m.step_of(m.part_name(step, "ab12")) is None


@given(
    st.integers(0, 10**7), st.lists(st.binary(max_size=50), max_size=3), st.dictionaries(st.text(), JSON, max_size=3)
)
def test_a_manifest_comes_back(step: int, payloads: list[bytes], metadata: dict[str, object]) -> None:
    parts = [
        m.Part(
            key=m.part_name(step, "t", str(i)),
            size_bytes=len(data),
            checksum=f"crc32:{zlib.crc32(data):08x}",
            name=str(i),
        )
        for i, data in enumerate(payloads)
    ]
    made = m.make_manifest(parts, step=step, saved_at=1.5, metadata=metadata)
    assert made.size_bytes == sum(map(len, payloads))
    assert m.decode(m.encode(made), m.manifest_name(step)) == made


@given(st.data())
def test_a_manifest_cut_anywhere_is_refused(data: st.DataObject) -> None:
    whole = m.encode(m.make_manifest([], step=3, metadata={"loss": 0.5}))
    cut = data.draw(st.integers(0, len(whole) - 3))  # the last two are "}" and a line end
    with pytest.raises(CheckpointCorruptError, match=r"step-000003\.json"):
        m.decode(whole[:cut], "step-000003.json")


def test_a_manifest_under_another_name_or_of_a_later_version_is_refused() -> None:
    with pytest.raises(CheckpointCorruptError, match="renamed"):
        m.decode(m.encode(m.make_manifest([], step=3)), "step-000004.json")
    with pytest.raises(CheckpointCorruptError, match="later version"):
        m.decode(m.encode(m.make_manifest([], step=3, format=99)), "step-000003.json")


def encode(metadata: dict[str, object]) -> bytes:
    return m.encode(m.make_manifest([], step=3, metadata=metadata))


@pytest.mark.parametrize(
    ("use", "value", "message"),
    [
        *((encode, {"a": value}, "step 3") for value in (object(), float("nan"))),
        *((m.check_step, step, "whole number") for step in (-1, True, 1.0, "1", None)),
        *((BytesPayload, b"", "0 bytes"), (BytesPayload, None, "NoneType"), (BytesPayload, {"w": 1}, "state dict")),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(use: Callable[[Any], object], value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        use(value)


def test_what_is_stored_is_compared_with_what_was_saved() -> None:
    part = m.Part(key="k", size_bytes=3, checksum=f"crc32:{zlib.crc32(b'abc'):08x}")
    m.check_part(part, 3, part.checksum)
    with pytest.raises(CheckpointCorruptError, match="2 bytes"):
        m.check_part(part, 2, part.checksum)
    with pytest.raises(CheckpointCorruptError, match="checksum"):
        m.check_part(part, 3, "crc32:00000000")


ABC = {"crc32": "crc32:352441c2", "xxh3": "xxh3_64:78af5f94892f3950"}
"""Checksums of ``b"abc"``."""


def text_of(data: bytes, expected: str = "") -> str:
    checksum = m.Checksum(expected)
    checksum.update(data)
    return checksum.text


def test_a_checksum_is_xxh3_where_that_is_installed_and_of_the_saved_algorithm_where_it_is_compared() -> None:
    pytest.importorskip("xxhash")
    assert text_of(b"abc") == text_of(b"abc", m.XXH3) == ABC["xxh3"]
    assert text_of(b"abc", "crc32:00000000") == ABC["crc32"]
    parts = [m.Part(key=name, size_bytes=3, checksum=text) for name, text in ABC.items()]
    assert [m.make_manifest(each, step=1).format for each in ([], parts[:1], parts[1:], parts)] == [1, 1, 2, 2]


def test_without_xxhash_a_checksum_is_a_crc_and_an_xxh3_is_believed_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(m, "_xxhash", lambda: None)
    assert text_of(b"abc") == ABC["crc32"]
    assert text_of(b"abc", ABC["crc32"]) == ABC["crc32"]
    with pytest.warns(m.CheckpointUnverifiedWarning, match=r"pip install 'unified-runtime\[xxhash\]'"):
        assert text_of(b"abc", ABC["xxh3"]) == ABC["xxh3"]


@pytest.mark.parametrize("compression", [None, "gzip", "zstd"])
def test_a_payload_streams_twice_and_comes_back(compression: Compression | None) -> None:
    if compression == "zstd" and sys.version_info < (3, 14):
        pytest.importorskip("backports.zstd")
    data = bytes(range(256)) * 40_000  # more than one chunk
    measured = MeasuredStream(BytesPayload(data), compression)
    stored = [b"".join(measured) for _ in range(2)]
    assert stored[0] == stored[1]
    checksum = m.Checksum()
    checksum.update(stored[0])
    assert (measured.checksum.text, measured.checksum.nbytes) == (checksum.text, len(stored[0]))
    assert decompress(stored[0], compression) == data
    if compression == "gzip":
        assert gzip.decompress(stored[0]) == data
    if compression is not None:
        with pytest.raises(CheckpointCorruptError):
            decompress(stored[0][:-10], compression)
        with pytest.raises(CheckpointCorruptError):
            decompress(b"none of that", compression)


def test_compressions_that_are_not_there_are_named() -> None:
    assert check_compression("none") is None
    with pytest.raises(UsageError, match="Did you mean 'gzip'"):
        check_compression("gzp")


def test_data_that_may_change_are_copied() -> None:
    data = bytearray(b"before")
    payload = BytesPayload(data)
    data[:] = b"after!"
    assert b"".join(payload.chunks()) == b"before"


def test_compressed_passes_chunks_through_as_they_are() -> None:
    chunks = [memoryview(b"ab"), memoryview(b"cd")]
    assert list(compressed(chunks, None)) == chunks
