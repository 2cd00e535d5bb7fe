"""A stream under every order of events: nothing is lost, doubled or reordered, the window holds, and it ends once."""

from collections import deque
from collections.abc import Generator
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from unified.bus.calls.remote_errors import describe, describe_ours, rebuild
from unified.bus.codec.codec import SerializedValue
from unified.bus.streams import generator, stream
from unified.bus.streams.generator import Step, StreamSource
from unified.bus.streams.stream import RpcStream, StreamFeed
from unified.errors import BusOverloadedError, RemoteError, RpcError, WorkerDiedError
from unified.protocol.envelope import Kind

WINDOW_ITEMS, WINDOW_BYTES = 4, 300
WHAT = "the call of 'm' to worker b"


class StreamMachine(RuleBasedStateMachine):
    """The two sides, and the messages between them in two queues that keep their order (and lose some, if told to)."""

    def __init__(self) -> None:
        super().__init__()
        self._patched = [(module, vars(module).copy()) for module in (stream, generator)]
        for module, _ in self._patched:
            module.WINDOW_ITEMS, module.WINDOW_BYTES = WINDOW_ITEMS, WINDOW_BYTES  # type: ignore[attr-defined]
        self.to_caller: deque[tuple[Kind, int, SerializedValue]] = deque()
        self.to_callee: deque[tuple[Kind, int]] = deque()
        self.made: list[bytes] = []
        """What the generator yielded."""
        self.got: list[bytes] = []
        self.raised: list[BaseException] = []
        self.num_stops = 0
        self.num_closings = 0
        """How often the generator's `finally` ran."""
        self.num_ends_sent = 0
        self.num_cancels = 0
        self.num_abandons = 0
        self.is_dead = False
        self.is_closed = False
        self.num_lost = 0

    @initialize(sizes=st.lists(st.integers(0, 400), max_size=30), how=st.sampled_from(["ends", "raises"]))
    def begin(self, sizes: list[int], how: str) -> None:
        self.sizes, self.how = sizes, how
        self.source = StreamSource(
            self.generate(sizes),
            self.send,
            describe=lambda error: SerializedValue(self.described(error), []),
            what=WHAT,
        )
        self.feed = StreamFeed(WHAT, send_more=self.more, cancel=self.cancel, abandon=self.abandon)
        self.stream: RpcStream[bytes] | None = RpcStream(self.feed)

    def generate(self, sizes: list[int]) -> Generator[bytes, None, None]:
        try:
            for i, size in enumerate(sizes):
                self.made.append(bytes([i]) + b"x" * size)
                yield self.made[-1]
            if self.how == "raises":
                raise KeyError("key")
        finally:
            self.num_closings += 1

    def described(self, error: BaseException) -> bytes:
        return describe(error, worker="b", node="n1", ours={})

    def send(self, kind: Kind, count: int, content: SerializedValue, may_wait: bool) -> bool:
        self.num_ends_sent += kind in (Kind.RESULT, Kind.ERROR)
        self.to_caller.append((kind, count, content))
        return True

    def more(self, count: int) -> None:
        self.to_callee.append((Kind.MORE, count))

    def cancel(self) -> None:
        self.num_cancels += 1
        self.to_callee.append((Kind.CANCEL, 0))

    def abandon(self) -> None:
        self.num_abandons += 1
        self.to_callee.append((Kind.CANCEL, 0))

    @rule()
    def advance(self) -> None:
        """The generator takes a step."""
        if not self.is_dead:
            self.source.advance()

    @precondition(lambda self: self.to_caller)
    @rule()
    def arrive(self) -> None:
        """The next message reaches the caller."""
        kind, count, content = self.to_caller.popleft()
        match kind:
            case Kind.ITEM:
                self.feed.push(count, content.body, content.buffers)
            case Kind.RESULT:
                self.feed.end(count)
            case Kind.ERROR:
                self.feed.fail(rebuild(content.body, WHAT))

    @precondition(lambda self: self.to_callee)
    @rule()
    def arrive_there(self) -> None:
        """The next message reaches the callee."""
        kind, count = self.to_callee.popleft()
        match kind:
            case Kind.MORE:
                self.source.more(count)
            case Kind.CANCEL:
                self.source.close()
            case Kind.UNDELIVERABLE:
                self.source.close()
                if not self.is_dead:
                    self.to_caller.append(
                        (Kind.ERROR, 0, SerializedValue(describe_ours(BusOverloadedError("dropped")), []))
                    )

    @rule()
    def consume(self) -> None:
        """The caller takes an item, if that needs no waiting; a drained stream stops."""
        if self.stream is None or not (self.feed._has_news()):
            return
        try:
            self.got.append(next(self.stream))
        except StopIteration:
            self.num_stops += 1
        except RpcError as error:
            self.raised.append(error)

    @precondition(lambda self: self.stream is not None)
    @rule(how=st.sampled_from(["close", "drop"]))
    def leave(self, how: str) -> None:
        """The caller wants no more."""
        if how == "close" and self.stream is not None:
            self.stream.close()
        self.stream = None
        self.is_closed = True

    @rule()
    def die(self) -> None:
        """The callee's process ends; the caller's endpoint learns of it after all that had come."""
        self.is_dead = True
        self.to_caller.clear()
        self.feed.fail(WorkerDiedError("worker b died"))

    @precondition(lambda self: any(kind is Kind.ITEM for kind, _, _ in self.to_caller))
    @rule()
    def lose(self) -> None:
        """A relay drops an item, and tells the callee."""
        i = next(i for i, (kind, _, _) in enumerate(self.to_caller) if kind is Kind.ITEM)
        del self.to_caller[i]
        self.num_lost += 1
        self.to_callee.append((Kind.UNDELIVERABLE, 0))

    @invariant()
    def nothing_lost_doubled_or_reordered(self) -> None:
        assert self.got == self.made[: len(self.got)]

    @invariant()
    def at_most_a_window_ahead(self) -> None:
        if not self.made or self.num_lost:
            return
        on_the_way = self.made[len(self.got) :]
        assert len(on_the_way) <= WINDOW_ITEMS + 1  # one more: it is made before it is known to be the end
        assert len(self.source._sizes) <= WINDOW_ITEMS
        assert sum(map(len, on_the_way[:-1])) <= WINDOW_BYTES + 400

    @invariant()
    def ends_once(self) -> None:
        assert len(self.raised) <= 1
        assert self.num_ends_sent <= 1
        assert self.num_closings <= 1
        assert self.num_cancels <= 1
        assert self.num_abandons <= self.is_closed

    def teardown(self) -> None:
        """Given time, everything comes to its end: no credit is withheld and no message waited for that never comes."""
        try:
            if hasattr(self, "source"):
                self.run_out()
        finally:
            for module, before in self._patched:
                vars(module).update({name: before[name] for name in ("WINDOW_ITEMS", "WINDOW_BYTES")})

    def run_out(self) -> None:
        for _ in range(20 * (len(self.sizes) + 5)):
            self.advance()
            if self.to_caller:
                self.arrive()
            if self.to_callee:
                self.arrive_there()
            self.consume()
        self.nothing_lost_doubled_or_reordered()
        self.ends_once()
        if not self.is_dead:
            assert self.source.advance() is Step.ENDED
            assert self.num_closings == (1 if self.made or self.num_ends_sent else 0)
        if self.is_closed:
            return
        assert self.feed.is_drained
        assert self.num_stops >= 1
        if not self.raised:
            assert (self.got, self.how, len(self.got)) == (self.made, "ends", len(self.sizes))
            return
        (error,) = self.raised
        if type(error) in (RpcError, BusOverloadedError):
            assert "was lost" in str(error) or str(error) == "dropped"
            assert self.num_lost
        elif isinstance(error, RemoteError):
            assert isinstance(error, KeyError)
            assert self.how == "raises"
            assert self.num_lost or len(self.got) == len(self.sizes)
        else:
            assert isinstance(error, WorkerDiedError)
            assert self.is_dead


TestStreamMachine: Any = StreamMachine.TestCase
TestStreamMachine.settings = settings(max_examples=200, stateful_step_count=50)
