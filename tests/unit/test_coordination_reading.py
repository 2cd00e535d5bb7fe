"""Workers that read a dataset, come, go and crash, under a coordinator that restarts: each shard is read once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.coordination_world import Story, done, get, spread, worker
from unified.core.coordination.events import WorkerGone
from unified.core.coordination.records import MAX_PAST_SESSIONS
from unified.protocol.coordinator import DataShards, DeregisterWorker, SetDataWorker, ShardsDone

STEPS = ["begin", "end", "join", "crash", "leave", "replace", "haunt", "restart"]


class Reader:
    """A worker that reads as it should: it reports each shard before it begins the next."""

    def __init__(self, story: Story, name: str, life: int) -> None:
        self.story = story
        self.name = name
        self.life = life
        story.send(worker(name, life, world_size=0))
        story.send(SetDataWorker(dataset_id="d", worker_id=name, session=f"{name}/{life}"))
        self.list: list[int] = []
        self.revision = -1
        self.reading: int | None = None

    def begin(self) -> int | None:
        if self.reading is None:
            if self.revision < 0:
                answer = self.story.ask(get(self.name, life=self.life), DataShards)
                self.list, self.revision = [each.shard_id for each in answer.shards], answer.revision
            self.reading = self.list.pop(0) if self.list else None
            if self.reading is None:
                self.revision = -1
            return self.reading
        return None

    def end(self) -> list[int]:
        if self.reading is None:
            return []
        answer = self.story.ask(done(self.name, self.reading, life=self.life), ShardsDone)
        self.reading = None
        if answer.revision != self.revision:
            self.revision = -1
        return answer.shard_ids

    def go_on_after_the_end(self) -> None:
        """Its life is over, and it does not know: whatever it does changes nothing."""
        known = list(self.story.store.items())
        for request in (
            get(self.name, life=self.life),
            done(self.name, *range(23), life=self.life),
            SetDataWorker(dataset_id="d", worker_id=self.name, session=f"{self.name}/{self.life}", is_member=False),
        ):
            assert self.story.refused(request).code in ("replaced", "unknown-worker")
        assert list(self.story.store.items()) == known


@settings(max_examples=100, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3))),
)
def test_each_shard_is_read_once_but_for_what_the_lost_had_begun(shuffle: bool, script: list[tuple[str, int]]) -> None:
    story = spread(Story(), shuffle=shuffle, total_samples=230)
    readers: dict[str, Reader] = {}
    lives: dict[str, int] = {}
    begun: list[int] = []
    counted: list[int] = []
    given_up: list[int] = []
    ghosts: list[Reader] = []

    def play(what: str, name: str) -> None:
        reader = readers.get(name)
        if what == "restart":
            story.restart()
        elif what == "join" and reader is None:
            lives[name] = lives.get(name, -1) + 1
            readers[name] = Reader(story, name, lives[name])
        elif what == "haunt":
            for ghost in ghosts:
                if lives[ghost.name] - ghost.life <= MAX_PAST_SESSIONS:
                    ghost.go_on_after_the_end()
        elif reader is None:
            return
        elif what == "begin" and (shard_id := reader.begin()) is not None:
            begun.append(shard_id)
        elif what == "end":
            counted.extend(reader.end())
        elif what in ("crash", "leave", "replace"):
            if reader.reading is not None:
                given_up.append(reader.reading)
            ghosts.append(reader)
            if what == "replace":
                lives[name] += 1
                readers[name] = Reader(story, name, lives[name])
                return
            session = f"{name}/{lives[name]}"
            if what == "crash":
                story.tell(WorkerGone(space="", worker_id=name, reason="it was killed"))
            else:
                story.send(DeregisterWorker(worker_id=name, session=session))
            del readers[name]

    for what, number in script:
        play(what, f"w{number}")
    play("join", "w0")
    play("haunt", "w0")
    for _ in range(24):
        for name in list(readers):
            play("begin", name)
            play("end", name)
    assert sorted(counted) == list(range(23))
    for shard_id in given_up:
        begun.remove(shard_id)
    assert sorted(begun) == list(range(23))
