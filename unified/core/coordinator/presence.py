"""Whether a life of a worker is there, and that it was heard."""

from __future__ import annotations

from unified.core.coordinator.records import Presence
from unified.core.coordinator.state import Space

REPLACED = "has a newer life, which registered after this one: this one should end."


def heard(space: Space, presence: Presence, now: float) -> None:
    """Its life goes on for another `timeout_s`."""
    presence.seen_at = now
    space.clocks.leases.renew(presence, now, lease_s=presence.worker.timeout_s)


def current(space: Space, worker_id: str, session: str) -> Presence | tuple[str, str]:
    """This life, if it is there; else what to refuse it with: code and reason."""
    presence = space.present.get(worker_id)
    if presence is None:
        return absent(space, worker_id)
    return presence if presence.session == session else ("replaced", f"worker {worker_id} {REPLACED}")


def displaced(space: Space, member: str, session: str) -> tuple[str, str] | None:
    """What to refuse a life with that asks about its own shards, if it is over: code and reason.

    A session that was never registered here is as none: such a worker is known by its id alone.
    """
    worker_id = space.id_of(member)
    presence = space.present.get(worker_id)
    if presence is not None:
        is_over = session not in ("", presence.session)
        return ("replaced", f"worker {worker_id} {REPLACED}") if is_over else None
    gone = space.gone.get(worker_id)
    if gone is not None and session and session in (gone.info.session, *gone.past_sessions):
        return absent(space, worker_id)
    return None


def absent(space: Space, worker_id: str) -> tuple[str, str]:
    """What to refuse a worker with that is not there: code and reason."""
    gone = space.gone.get(worker_id)
    if gone is None:
        return "unknown-worker", f"worker {worker_id} is not registered: register it first."
    return "unknown-worker", f"worker {worker_id} is not registered any more, as {gone.reason}: register it again."
