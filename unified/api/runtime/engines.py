"""The engines of a role as its callers see them: their addresses, and which one has the fewest open calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from unified.api.runtime.role_actor import RoleActor
from unified.errors import EngineError, RpcError, UsageError, listed
from unified.worker.context import current_worker

URL = "unified.engine.url"
"""Method that an engine's worker has while its engine is ready; it returns the address for this host and for others."""
AGAIN_S = 0.1
ANSWER_S = 5.0
_turns = itertools.count()
_ready: dict[str, tuple[int, tuple[str, str]]] = {}
"""Incarnations whose engines were ready, and the engines' addresses, by worker. An engine is ready until it ends."""


def ready_urls(actors: Sequence[RoleActor], require: int, timeout_s: float) -> dict[str, tuple[str, str]]:
    """Wait until `require` of the engines are ready; return the addresses of those that are, by worker.

    Raises:
        EngineError: they were not ready in time; names them.
    """
    others = [actor.name for actor in actors if actor.info.role_spec.engine is None]
    if others or not 1 <= require <= len(actors):
        what = f"{others[0]} has no engine" if others else f"there are {len(actors)} engines"
        raise UsageError(f"{require} ready engines of {len(actors)} workers are asked for, but {what}.")
    deadline = time.monotonic() + timeout_s
    while True:
        found = _look(actors)
        if len(found) >= require:
            return found
        if time.monotonic() >= deadline:
            late = listed(actor.name for actor in actors if actor.name not in found)
            raise EngineError(f"after {timeout_s:g} s {len(found)} of {require} engines are ready; not ready: {late}.")
        time.sleep(AGAIN_S)


def _look(actors: Sequence[RoleActor]) -> dict[str, tuple[str, str]]:
    bus = current_worker().bus
    alive = {
        actor.name: entry.incarnation
        for actor in actors
        if bus.directory.reachable(actor.name) is not None and (entry := bus.directory.get(actor.name)) is not None
    }
    asked = [name for name, incarnation in alive.items() if _ready.get(name, (-1, ()))[0] != incarnation]
    calls = bus.call_many(asked, URL, [], {}, timeout=ANSWER_S, incarnations=[alive[name] for name in asked])
    for name, call in zip(asked, calls, strict=True):
        try:
            _ready[name] = alive[name], call.result()
        except RpcError:  # its engine is not ready yet, or has just ended
            _ready.pop(name, None)
    return {name: each[1] for name in alive if (each := _ready.get(name)) is not None and each[0] == alive[name]}


def urls_from_here(actors: Sequence[RoleActor], require: int, timeout_s: float) -> list[str]:
    """Return the addresses at which a program of this host reaches ready engines, by rank."""
    directory = current_worker().bus.directory
    own = directory.reachable(current_worker().actor_info.name)
    urls = []
    for name, (local, remote) in ready_urls(actors, require, timeout_s).items():
        inbox = directory.reachable(name)
        is_here = own is not None and inbox is not None and inbox.host_id == own.host_id
        urls.append(local if is_here else remote)
    if not any(urls):
        raise UsageError(
            "the engines are on other hosts, and listen on loopback only. Send requests through their workers, "
            "RoleGroup(…).next().call('request', 'POST', path, body), or give the command --host 0.0.0.0."
        )
    return [url for url in urls if url]


def least_busy(actors: Sequence[RoleActor], timeout_s: float) -> RoleActor:
    """Return the worker to which this process has the fewest open calls; of several, each in its turn."""
    engines = [actor for actor in actors if actor.info.role_spec.engine is not None]
    ready = ready_urls(engines, 1, timeout_s) if engines else {actor.name for actor in actors}
    bus, turn, usable = current_worker().bus, next(_turns), [actor for actor in actors if actor.name in ready]
    turned = usable[turn % len(usable) :] + usable[: turn % len(usable)]
    return min(turned, key=lambda actor: bus.num_open(actor.name))
