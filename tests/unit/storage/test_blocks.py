"""How what is written is cut, without any store."""

import io
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.errors import UsageError
from unified.storage.backend import check_key
from unified.storage.blocks import blocks_of, pieces_of, size_of
from unified.storage.s3_client import check_endpoint
from unified.storage.s3_transfer import MAX_PARTS, MIN_PART_NBYTES, part_sizes

TIB = 1 << 40


@settings(max_examples=200)
@given(pieces=st.lists(st.binary(max_size=20)), sizes=st.lists(st.integers(1, 15), min_size=1))
def test_blocks_have_the_sizes_that_were_asked_for(pieces: list[bytes], sizes: list[int]) -> None:
    endless = itertools.chain(sizes, itertools.repeat(sizes[-1]))
    blocks = list(blocks_of(pieces_of(pieces), endless))
    assert b"".join(blocks) == b"".join(pieces)
    wanted = list(itertools.islice(itertools.chain(sizes, itertools.repeat(sizes[-1])), len(blocks)))
    assert [len(block) for block in blocks[:-1]] == wanted[:-1]
    assert all(0 < len(block) <= nbytes for block, nbytes in zip(blocks, wanted, strict=True))


def test_blocks_do_not_change_with_the_memory_they_came_from() -> None:
    buffer = bytearray(b"abcdef")
    blocks = blocks_of(pieces_of(buffer), itertools.repeat(4))
    first = next(blocks)
    buffer[:] = b"------"
    assert first == b"abcd"


def test_blocks_that_are_not_needed_any_more_are_used_again() -> None:
    spare: list[bytearray] = []
    seen = []
    for block in blocks_of(pieces_of(b"abcdefghij"), itertools.repeat(4), spare):
        seen.append((bytes(block), id(block)))
        spare.append(block)
    assert [data for data, _ in seen] == [b"abcd", b"efgh", b"ij"]
    assert seen[0][1] == seen[2][1], "the one that was filled while it came back is the next but one"


@settings(max_examples=30)
@given(nbytes=st.integers(0, 5 * TIB), part=st.integers(MIN_PART_NBYTES, 64 << 20))
def test_every_object_that_s3_can_hold_has_parts_enough(nbytes: int, part: int) -> None:
    (size,) = itertools.islice(part_sizes(part, nbytes), 1)
    assert size >= part
    assert size * MAX_PARTS >= nbytes
    assert sum(itertools.islice(part_sizes(part, None), MAX_PARTS)) >= nbytes


def test_parts_of_an_unknown_size_stay_small_while_they_can() -> None:
    sizes = list(itertools.islice(part_sizes(8 << 20, None), MAX_PARTS))
    assert (sizes[:900], sizes) == ([8 << 20] * 900, sorted(sizes))
    assert sizes[-1] <= 5 << 30


def test_sizes_are_known_before_reading_where_they_can_be() -> None:
    file = io.BytesIO(b"0123456789")
    file.seek(4)
    assert size_of(file) == 6
    assert file.tell() == 4
    assert size_of(memoryview(bytearray(24)).cast("q")) == 24
    assert size_of([b"a", b"b"]) is None
    assert size_of(iter([b"a"])) is None


@pytest.mark.parametrize("key", ["a", "a/b", "a/..b/c...", ".hidden", "a b/ü", "step-000001.json"])
def test_keys(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize("url", ["", "host", "host:9000", "ftp://host", "http://"])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        check_endpoint(url)


def test_addresses() -> None:
    assert check_endpoint(None) is None
    assert check_endpoint("http://127.0.0.1:9000") == "http://127.0.0.1:9000"
