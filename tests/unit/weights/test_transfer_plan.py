"""Buckets hold everything once and stay small; whoever is on another host is reached through one worker there."""

from hypothesis import given
from hypothesis import strategies as st

from unified.protocol.records import WorkerIncarnation
from unified.weights.transfer_plan import ALIGNMENT, Bucket, TensorEntry, cut, digest, tree

ENTRIES = st.lists(
    st.builds(
        lambda nbytes, is_sharded: TensorEntry("", "uint8", (nbytes,), nbytes, is_sharded),
        st.integers(0, 300),
        st.booleans(),
    ),
    max_size=30,
).map(lambda found: [entry._replace(key=str(number)) for number, entry in enumerate(found)])


@given(entries=ENTRIES, bucket_bytes=st.integers(1, 400), num_ranks=st.integers(1, 4))
def test_every_entry_is_in_one_bucket(entries: list[TensorEntry], bucket_bytes: int, num_ranks: int) -> None:
    buckets = cut(entries, bucket_bytes, num_ranks)
    plain = [entry for bucket in buckets for entry in bucket.entries if not entry.is_sharded]
    sharded = [entry for bucket in buckets for entry in bucket.entries if entry.is_sharded]
    assert plain == [entry for entry in entries if not entry.is_sharded]
    assert sharded == [entry for entry in entries if entry.is_sharded]
    for bucket in buckets:
        assert bucket.nbytes <= bucket_bytes or len([entry for entry in bucket.entries if entry.nbytes]) == 1
        assert len({entry.is_sharded for entry in bucket.entries}) == 1


@given(entries=ENTRIES, num_ranks=st.integers(1, 4))
def test_what_is_sharded_is_spread_and_rank_0_sends_the_rest(entries: list[TensorEntry], num_ranks: int) -> None:
    buckets = cut(entries, 100, num_ranks)
    assert all(bucket.rank == 0 for bucket in buckets if not bucket.entries[0].is_sharded)
    ranks = [bucket.rank for bucket in buckets if bucket.entries[0].is_sharded]
    assert ranks == [index % num_ranks for index in range(len(ranks))]


@given(entries=ENTRIES)
def test_places_in_a_bucket_are_aligned_and_apart(entries: list[TensorEntry]) -> None:
    bucket = Bucket(tuple(entries), 0)
    end = 0
    for entry, start in zip(entries, bucket.offsets, strict=True):
        assert start % ALIGNMENT == 0
        assert start >= end
        end = start + entry.nbytes
    assert end <= bucket.nbytes


def test_digest_tells_models_apart() -> None:
    entry = TensorEntry("w", "float32", (2,), 8)
    buckets = cut([entry], 100)
    assert digest(buckets, {}, ["x"]) == digest(cut([entry], 100), {}, ["x"])
    others = [
        digest(cut([entry._replace(dtype="bfloat16")], 100), {}, ["x"]),
        digest(buckets, {"v": "w"}, ["x"]),
        digest(buckets, {}, []),
    ]
    assert digest(buckets, {}, ["x"]) not in others


def test_one_worker_of_each_other_node_passes_on() -> None:
    nodes = {"a": "n1", "b": "n2", "c": "n2", "d": "n3", "e": "", "f": "n2", "g": "n1"}
    incarnations = {name: WorkerIncarnation(name, number) for number, name in enumerate(nodes)}
    roots, children = tree(incarnations.values(), nodes, "n1")
    assert {incarnation.worker for incarnation in roots} == {"a", "g", "e", "b", "d"}
    assert children == {"b": (incarnations["c"], incarnations["f"])}


@given(nodes=st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.sampled_from(["", "n1", "n2", "n3"])))
def test_everybody_is_reached_once(nodes: dict[str, str]) -> None:
    incarnations = [WorkerIncarnation(name, 0) for name in nodes]
    roots, children = tree(incarnations, nodes, "n1")
    assert sorted([*roots, *(incarnation for name in children for incarnation in children[name])]) == sorted(
        incarnations
    )
    assert set(children) <= {incarnation.worker for incarnation in roots}
