"""A sender and receivers on real sockets, each of which knows of the others."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.bus import DEADLINE_S, World, entry
from unified.bus.endpoint import BusEndpoint
from unified.protocol.records import DirectoryEntry, Inbox, Reachability
from unified.weights.handshake import SyncOptions
from unified.weights.receiver import WeightsReceiver
from unified.weights.sender import WeightsSender
from unified.weights.versions import SyncReport

ORDER = SyncOptions(
    version=None, dtype=None, bucket_bytes=1 << 20, timeout=DEADLINE_S, wait=True, force=False, collective=None
)


SMALL = 50_000
"""Bytes: a model of `model_of` is several buckets."""

one_route = pytest.mark.parametrize("world", ["auto"], indirect=True)
"""For tests of what does not depend on the route."""


class Cast:
    """Workers of a job by name. `node` of each is what `place` said; else they share the sender's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.buses: dict[str, BusEndpoint] = {}
        self.entries: dict[str, DirectoryEntry] = {}
        self.receivers: dict[str, WeightsReceiver] = {}
        self.nodes: dict[str, str] = {}
        self.synced = SyncReport(0, (), {})

    def worker(self, name: str, incarnation: int = 0) -> BusEndpoint:
        """A new incarnation of a worker, known to all and knowing all."""
        bus, inbox = self.world.endpoint(name, {}, incarnation)
        self.buses[name] = bus
        self.tell(name, inbox, incarnation)
        bus.update_directory(list(self.entries.values()))
        return bus

    def receiver(self, name: str, incarnation: int = 0, *, copy: bool | None = None) -> WeightsReceiver:
        self.receivers[name] = WeightsReceiver(bus=self.worker(name, incarnation), copy=copy)
        return self.receivers[name]

    def sender(self, name: str = "trainer", incarnation: int = 0) -> WeightsSender:
        return WeightsSender(self.worker(name, incarnation), "here", "rollout", "default")

    def die(self, name: str, state: Reachability = Reachability.DEAD) -> None:
        """A worker's incarnation is over: its sockets are gone, and then everybody hears of it."""
        bus = self.buses.pop(name)
        bus.close()
        if name in self.receivers:
            self.receivers.pop(name).close()
        self.tell(name, None, bus.incarnation, state)

    def tell(self, name: str, inbox: Inbox | None, incarnation: int, state: Reachability = Reachability.ALIVE) -> None:
        self.entries[name] = entry(name, inbox, incarnation, state, "it was killed")
        for bus in self.buses.values():
            bus.update_directory([self.entries[name]])

    def send(self, sender: WeightsSender, weights: Any, *targets: str, **order: Any) -> int:
        """Send a version; `synced` has the report."""
        nodes = {name: self.nodes.get(name, "here") for name in targets or self.receivers}
        self.synced = sender.send(weights, nodes, ORDER._replace(**order))
        return self.synced.version

    def close(self) -> None:
        for receiver in self.receivers.values():
            receiver.close()


def model_of(value: float, num_layers: int = 6, size: int = 100) -> torch.nn.Module:
    """All its parameters and buffers have this value."""
    layers = [torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.BatchNorm1d(size)) for _ in range(num_layers)]
    model = torch.nn.Sequential(*layers)
    fill(model, value)
    return model


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)


def values_of(state: dict[str, Any]) -> set[float]:
    """The different values in it: one, if nothing is torn."""
    return {value for tensor in state.values() for value in tensor.unique().tolist()}


@pytest.fixture
def cast(world: World) -> Iterator[Cast]:
    cast = Cast(world)
    yield cast
    cast.close()
