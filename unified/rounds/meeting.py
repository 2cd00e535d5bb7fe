"""Meetings of a round's ranks, over the TCPStore of the round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from msgspec import msgpack

from unified.errors import RoundMeetingError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it without saying so

MAX_NAMED = 8
_decode_said = msgpack.Decoder(dict[int, bytes]).decode


class RoundMember(NamedTuple):
    round: int
    rank: int
    world_size: int


class RoundMeeting:
    """One meeting: each rank comes once, and waits for the others.

    Args:
        name: key in the store, unique among the meetings of the round.
        within_s: longest wait.
        purpose: what the ranks come to do: words after "for all ranks to" in the error of a timeout.
        hint: sentence of that error that says what to do.
    """

    def __init__(
        self, store: Store, name: str, member: RoundMember, within_s: float, purpose: str = "meet", hint: str = ""
    ) -> None:
        self._store = store
        self._name = name
        self._member = member
        self._within_s = within_s
        self._purpose = purpose
        self._hint = hint
        self._outcome = f"{name}/outcome"

    def wait_for_all(self) -> None:
        """Return once all ranks have called this.

        Raises:
            RoundMeetingError: some ranks did not call it in time, or the store is gone.
        """
        self._say(b"here")
        if self._store.add(f"{self._name}/num-here", 1) == self._member.world_size:
            self._store.set(self._outcome, "all")
        self._wait([self._outcome])

    def gather(self, own: bytes) -> list[bytes]:
        """Give `own`; return all values by rank on rank 0, none on others. RoundMeetingError: as in `wait_for_all`."""
        self._say(own)
        if self._member.rank != 0:
            return []
        keys = [self._key(rank) for rank in range(self._member.world_size)]
        self._wait(keys)
        return [self._store.get(key) for key in keys]

    def conclude(self, decision: bytes | None) -> bytes:
        """Return what rank 0 decides after `gather`; the other ranks give None. RoundMeetingError: as there."""
        if decision is None:
            self._wait([self._outcome])
        else:
            self._set(self._outcome, decision)
        return self._store.get(self._outcome)

    def hear(self, ranks: Sequence[int], own: bytes | None, slack_s: float) -> dict[int, bytes]:
        """Give `own`, unless it is None; return the values that these ranks gave in time.

        All callers get the same result. Rank 0 collects it; if it has not done so within `slack_s` more, another rank
        does. The first result counts.
        """
        if own is not None:
            self._say(own)
        with contextlib.suppress(RoundMeetingError):
            if self._member.rank == 0:
                self._wait([self._key(rank) for rank in ranks])
            else:
                self._wait([self._outcome], slack_s)
        if not self._store.check([self._outcome]):
            said = {rank: self._store.get(self._key(rank)) for rank in ranks if self._store.check([self._key(rank)])}
            self._store.compare_set(self._outcome, "", msgpack.encode(said))  # type: ignore[arg-type]  # as below
        return _decode_said(self._store.get(self._outcome))

    def _say(self, data: bytes) -> None:
        self._set(self._key(self._member.rank), data)

    def _set(self, key: str, data: bytes) -> None:
        self._store.set(key, data)  # type: ignore[arg-type]  # the stubs know only text

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def _wait(self, keys: list[str], slack_s: float = 0.0) -> None:
        from torch.distributed import DistError

        began = time.monotonic()
        try:
            self._store.wait(keys, timedelta(seconds=self._within_s + slack_s))
        except DistError as error:
            raise self._error(time.monotonic() - began) from error

    def _error(self, waited_s: float) -> RoundMeetingError:
        from torch.distributed import DistError

        round_, own_rank, world_size = self._member
        hint, missing = self._hint, list[int]()
        try:
            missing = [rank for rank in range(world_size) if not self._store.check([self._key(rank)])]
            found = f"{_named(missing)} not" if missing else "all have, but rank 0 has not published its decision"
        except DistError:
            found, hint = "the round's store is gone", "Check that the job's store process is running."
        return RoundMeetingError(
            f"round {round_}: rank {own_rank} waited {waited_s:.3g} s for all {world_size} ranks to {self._purpose}: "
            f"{found}. {hint}",
            missing,
        )


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    shown, num_more = ranks[:MAX_NAMED], len(ranks) - MAX_NAMED
    names = ", ".join(map(str, shown))
    return f"ranks {names} and {num_more} more have" if num_more > 0 else f"ranks {names} have"
