"""Both ends of a stream wired to each other, and generators for it."""

import asyncio
from collections.abc import AsyncGenerator, Generator

from tests.support.deadlines import met
from unified.bus.calls.remote_errors import describe, rebuild
from unified.bus.codec.codec import SerializedValue
from unified.bus.streams.generator import AnyGenerator, Step, StreamSource
from unified.bus.streams.stream import StreamFeed
from unified.protocol.envelope import Kind

DEADLINE_S = met(100.0)
WHAT = "the call of 'tokens' to worker b"


class Wire:
    """Both ends of one stream; each message is handed over as it is sent, unless `is_cut`."""

    def __init__(self, generator: AnyGenerator, *, expires: float | None = None) -> None:
        self.sent: list[tuple[Kind, int]] = []
        self.told: list[int] = []
        self.cancelled = 0
        self.abandoned = 0
        self.num_refusals = 0
        """How often the way out has no room."""
        self.is_cut = False
        self.source = StreamSource(generator, self.send, describe=self.describe, what=WHAT, expires=expires)
        self.feed = StreamFeed(WHAT, send_more=self.more, cancel=self.cancel, abandon=self.abandon)

    def send(self, kind: Kind, count: int, content: SerializedValue, may_wait: bool) -> bool:
        if self.is_cut:
            return not may_wait
        if self.num_refusals and not may_wait:
            self.num_refusals -= 1
            return False
        self.sent.append((kind, count))
        match kind:
            case Kind.ITEM:
                self.feed.push(count, content.body, content.buffers)
            case Kind.RESULT:
                self.feed.end(count)
            case Kind.ERROR:
                self.feed.fail(rebuild(content.body, WHAT))
        return True

    def describe(self, error: BaseException) -> SerializedValue:
        return SerializedValue(describe(error, worker="b", node="n1", ours={}), [])

    def more(self, count: int) -> None:
        self.told.append(count)
        self.source.more(count)

    def cancel(self) -> None:
        self.cancelled += 1
        self.source.close()

    def abandon(self) -> None:
        self.abandoned += 1
        self.source.close()

    @property
    def num_items(self) -> int:
        return sum(kind is Kind.ITEM for kind, _ in self.sent)

    def advance(self) -> Step:
        """As far as it goes without waiting."""
        while (step := self.source.advance()) is Step.SENT:
            pass
        return step


def count(number: int, seen: list[str] | None = None) -> Generator[int, None, None]:
    try:
        yield from range(number)
    except GeneratorExit:
        (seen if seen is not None else []).append("exit")
        raise
    finally:
        (seen if seen is not None else []).append("finally")


async def count_async(number: int, seen: list[str] | None = None) -> AsyncGenerator[int, None]:
    try:
        for i in range(number):
            yield i
    except BaseException as error:
        (seen if seen is not None else []).append(type(error).__name__)
        raise
    finally:
        await asyncio.sleep(0)
        (seen if seen is not None else []).append("finally")
