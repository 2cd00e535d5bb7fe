"""Messages on a stream come out as they went in, however the stream is cut; rubbish ends it and costs nothing."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from unified.bus.transport.framing import FrameReader, Frames, pack

MESSAGES = st.lists(
    st.tuples(
        st.binary(max_size=200),
        st.binary(max_size=300) | st.integers(16_000, 20_000).map(bytes),
        st.lists(st.binary(max_size=300) | st.integers(0, 70_000).map(lambda n: b"z" * n), max_size=4),
    ),
    max_size=6,
)


def read(stream: bytes, cuts: list[int]) -> list[Frames]:
    """Feed a stream in helpings of these sizes, over and over, as a link does."""
    reader, found, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        turn += 1
        wanted = reader.wanted
        if wanted is None:
            found += reader.feed(stream[at : at + size])
            at += size
        else:
            with wanted:
                size = min(size, len(wanted), len(stream) - at)
                wanted[:size] = stream[at : at + size]
            found += reader.filled(size)
            at += size
    assert reader.error is None
    return found


def plain(frames: Frames) -> tuple[bytes, bytes, list[bytes]]:
    return bytes(frames.envelope), bytes(frames.body), [bytes(each) for each in frames.buffers]


@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 40_000), min_size=1, max_size=5))
def test_any_cut_gives_the_same_messages(messages: list[tuple[bytes, bytes, list[bytes]]], cuts: list[int]) -> None:
    stream = b"".join(bytes(piece) for message in messages for piece in pack(*message))
    assert [plain(each) for each in read(stream, cuts)] == messages


@given(rubbish=st.binary(max_size=2000))
def test_rubbish_is_an_error_or_waits_for_more(rubbish: bytes) -> None:
    reader = FrameReader()
    for frames in reader.feed(rubbish):
        assert len(frames.envelope) + len(frames.body) <= len(rubbish)


def test_what_came_before_the_rubbish_counts() -> None:
    reader = FrameReader()
    (whole,) = pack(b"e", b"b", [])
    assert [plain(each) for each in reader.feed(bytes(whole) + b"\xff" * 50)] == [(b"e", b"b", [])]
    assert reader.error is not None
    assert "is refused" in str(reader.error)


def test_claimed_sizes_take_no_memory() -> None:
    """A gigabyte is announced, and 100 kB come."""
    head = b"".join(bytes(piece) for piece in pack(b"e", b"", [memoryview(bytearray(1)), memoryview(bytearray(1))]))[
        :28
    ]
    head = head[:12] + (1 << 30).to_bytes(8, "little") * 2 + b"e"
    tracemalloc.start()
    reader = FrameReader()
    assert reader.feed(head + b"x" * 100_000) == []
    wanted = reader.wanted
    assert wanted is not None
    wanted.release()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000
