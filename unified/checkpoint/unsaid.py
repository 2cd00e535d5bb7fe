"""What a coordinator has still to be told of checkpoints. Pure."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from unified.protocol.coordinator import NotifyCheckpoint, TellEvent

MAX_EVENTS = 16

Word = NotifyCheckpoint | TellEvent


class Unsaid:
    """At most one checkpoint, the latest, as no other matters to who asks for that; and some events, in order."""

    def __init__(self) -> None:
        self._notice: NotifyCheckpoint | None = None
        self._events: deque[TellEvent] = deque(maxlen=MAX_EVENTS)

    def __bool__(self) -> bool:
        return self._notice is not None or bool(self._events)

    def add(self, word: Word) -> None:
        """To be said. Of two checkpoints of one step the later counts; of too many events the newest."""
        if isinstance(word, TellEvent):
            self._events.append(word)
        elif self._notice is None or word.goes_back:
            self._notice = word
        elif word.step >= self._notice.step:
            self._notice = replace(word, goes_back=self._notice.goes_back)

    def take(self) -> Word | None:
        """What to say next."""
        if self._events:
            return self._events.popleft()
        notice, self._notice = self._notice, None
        return notice

    def put_back(self, word: Word) -> None:
        """It could not be said: it comes before what was added meanwhile."""
        if isinstance(word, TellEvent):
            if len(self._events) < MAX_EVENTS:
                self._events.appendleft(word)
        elif self._notice is None:
            self._notice = word
        elif word.goes_back:
            self._notice = replace(self._notice, goes_back=True)
        elif word.step > self._notice.step and not self._notice.goes_back:
            self._notice = word
