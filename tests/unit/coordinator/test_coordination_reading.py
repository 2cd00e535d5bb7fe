"""Workers that read a dataset, come, go and crash, under a coordinator that restarts: each shard is read once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.coordinator import Story, done, get, spread, worker
from unified.core.coordinator.messages import WorkerGone
from unified.core.coordinator.records import MAX_PAST_SESSIONS
from unified.data.shard_cache import ShardCache
from unified.protocol.coordinator import DataShards, DeregisterWorker, SetDataWorker, ShardsDone

STEPS = ["begin", "end", "begin", "end", "join", "crash", "leave", "replace", "haunt", "restart"]
EPOCHS = 2
SHARDS = 12


class Reader:
    """A worker that reads as it should: it reports each shard before it begins the next, and goes on to the next epoch
    when nothing is left of this one, whoever had it."""

    def __init__(self, story: Story, name: str, life: int, at_once: int) -> None:
        self.story = story
        self.name = name
        self.life = life
        story.send(worker(name, life, world_size=0))
        story.send(SetDataWorker(dataset_id="d", worker_id=name, session=f"{name}/{life}"))
        self.known = ShardCache(at_once)
        self.epoch = 0
        self.reading: int | None = None

    @property
    def place(self) -> tuple[int, int] | None:
        """Epoch and shard that it is reading."""
        return None if self.reading is None else (self.epoch, self.reading)

    def begin(self) -> tuple[int, int] | None:
        if self.reading is not None:
            return None
        shards = self.known.take(self.epoch)
        if shards is None:
            request = replace(get(self.name, self.epoch, self.life), limit=self.known.at_once)
            answer = self.story.ask(request, DataShards)
            shards = self.known.learn(self.epoch, answer)
            self.epoch += answer.num_left == 0 and self.epoch + 1 < EPOCHS
        self.reading = shards[0].shard_id if shards else None
        return self.place

    def end(self) -> list[tuple[int, int]]:
        if self.reading is None:
            return []
        answer = self.story.ask(done(self.name, self.reading, epoch=self.epoch, life=self.life), ShardsDone)
        self.known.finish(self.epoch, [self.reading], answer)
        self.reading = None
        return [(self.epoch, shard_id) for shard_id in answer.shard_ids]

    def go_on_after_the_end(self) -> None:
        """Its life is over, and it does not know: whatever it does changes nothing."""
        known = list(self.story.store.items())
        for request in (
            get(self.name, life=self.life),
            done(self.name, *range(SHARDS), life=self.life),
            SetDataWorker(dataset_id="d", worker_id=self.name, session=f"{self.name}/{self.life}", is_member=False),
        ):
            assert self.story.refused(request).code in ("replaced", "unknown-worker")
        assert list(self.story.store.items()) == known


@settings(max_examples=100, deadline=None)
@given(
    st.booleans(),
    st.sampled_from([4, 100]),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), min_size=20, max_size=80),
)
def test_each_shard_is_read_once_but_for_what_the_lost_had_begun(
    shuffle: bool, at_once: int, script: list[tuple[str, int]]
) -> None:
    story = spread(Story(), shuffle=shuffle, total_samples=SHARDS * 10)
    readers: dict[str, Reader] = {}
    lives: dict[str, int] = {}
    begun: list[tuple[int, int]] = []
    counted: list[tuple[int, int]] = []
    given_up: list[tuple[int, int]] = []
    ghosts: list[Reader] = []

    def play(what: str, name: str) -> None:
        reader = readers.get(name)
        if what == "restart":
            story.restart()
        elif what == "join" and reader is None:
            lives[name] = lives.get(name, -1) + 1
            readers[name] = Reader(story, name, lives[name], at_once)
        elif what == "haunt":
            for ghost in ghosts:
                if lives[ghost.name] - ghost.life <= MAX_PAST_SESSIONS:
                    ghost.go_on_after_the_end()
        elif reader is None:
            return
        elif what == "begin" and (place := reader.begin()) is not None:
            begun.append(place)
        elif what == "end":
            counted.extend(reader.end())
        elif what in ("crash", "leave", "replace"):
            if reader.place is not None:
                given_up.append(reader.place)
            ghosts.append(reader)
            if what == "replace":
                lives[name] += 1
                readers[name] = Reader(story, name, lives[name], at_once)
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
    every = [(epoch, shard_id) for epoch in range(EPOCHS) for shard_id in range(SHARDS)]
    for _ in range(len(every) + 2 * EPOCHS):
        for name in list(readers):
            play("begin", name)
            play("end", name)
    assert sorted(counted) == every
    for place in given_up:
        begun.remove(place)
    assert sorted(begun) == every
