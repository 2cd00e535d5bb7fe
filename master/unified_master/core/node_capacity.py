"""The free capacity of a node for one job, and the units of workers that fit into it."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping

from unified.errors import InvariantError
from unified.job.spec import Resources
from unified.protocol.records import NodeResources
from unified.values import Value

EPSILON = 1e-6
DeviceKey = tuple[str, int]
"""(``device``, index among the node's devices) or (``slot``, number of a CPU core that stands in for one)."""
Rank = tuple[int, float, DeviceKey]
"""Sort key of devices: first begun ones, of the same unit (0), the job (1), others (2), the fullest first; then whole
ones (3)."""


class Allocation(Value, frozen=True, kw_only=True):
    """The part of a node's resources that one worker holds."""

    cpu: float = 0.0
    memory_mb: float = 0.0
    disk_mb: float = 0.0
    user_defined: dict[str, float] = {}
    devices: tuple[DeviceKey, ...] = ()
    share: float = 0.0
    """The part of each of `devices`."""


class Member(Value, frozen=True, kw_only=True):
    worker: str
    role: str
    local_rank: int
    needs: Resources


class Unit(Value, frozen=True, kw_only=True):
    """Workers that must land on one node together: a group, with the groups collocated with it."""

    label: str
    """``role trainer`` or ``roles actor, rollout``."""
    members: tuple[Member, ...]
    isolation: str = ""
    """Resource (each member takes 1) or label (also ``key=value``) that the unit's node must have; empty: any node."""
    elastic: tuple[str, ...] = ()
    """Elastic roles of its members."""
    max_ranks: int = 0
    """Most ranks of these roles on a node, if no resource that they need bounds the number; 0: any number."""
    is_control: bool = False
    """True for the job's store host, which does not count among the nodes that the job uses."""

    def total(self, field: str) -> float:
        return float(sum(getattr(member.needs, field) for member in self.members))

    def user_total(self) -> dict[str, float]:
        """Return the user-defined resources of all members, by name."""
        total: dict[str, float] = {}
        for member in self.members:
            for name, amount in member.needs.user_defined.items():
                total[name] = total.get(name, 0.0) + amount
        return total


class PlacementAttempt(Value, frozen=True, kw_only=True):
    """An attempt to place a job, which failed."""

    capacity_version: int
    """The cluster's `capacity_version` at that time."""
    reason: str
    nodes: int
    """Hash of the cluster's `num_node_changes` and of the job's excluded nodes."""
    could_fit: bool | None = None
    """True if the job would fit onto the nodes if they were empty; None: not known."""


class NodeCapacity:
    """The free part of a node, as one job sees it. `subtract` makes it smaller."""

    def __init__(
        self,
        name: str,
        resources: NodeResources,
        accelerator_type: str,
        device_cap: int,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.labels = labels or {}
        self.resources = resources
        """The node's resources, taken or not."""
        self.device_cap = device_cap
        self.cpu = resources.cpu
        self.memory_mb = resources.memory_mb
        self.disk_mb = resources.disk_mb
        self.user_defined = dict(resources.user_defined)
        self.num_workers = 0
        self.devices: dict[DeviceKey, float] = dict.fromkeys(_pool(resources, accelerator_type), 1.0)
        self._ranks: dict[DeviceKey, Rank] = {key: (3, 0.0, key) for key in self.devices}
        self._order = sorted(self._ranks.values())
        """The ranks in order, so that no choice looks at all devices."""
        self.num_free = len(self.devices)
        """Wholly free devices."""
        self.device_share = float(self.num_free)
        """Free part of all devices together."""
        self.own: set[DeviceKey] = set()
        """Devices that the job uses already."""
        self.is_used = False
        """True if the job has workers here."""
        self.ranks: dict[str, int] = {}
        """Number of the job's workers here, by role."""
        self.is_shared = False
        """True if others read this object, too: only a copy may be made smaller."""
        self._state: tuple[object, ...] = ()
        """Cache of `state`, valid if this is shared."""

    def shared(self) -> NodeCapacity:
        """Mark this object as shared, and return it."""
        self.is_shared = True
        return self

    def copy(self) -> NodeCapacity:
        """Return a copy, which may be made smaller."""
        other = copy.copy(self)
        other.is_shared = False
        other.user_defined, other.devices = dict(self.user_defined), dict(self.devices)
        other.own, other.ranks = set(self.own), dict(self.ranks)
        other._ranks, other._order = dict(self._ranks), list(self._order)
        return other

    def state(self) -> tuple[object, ...]:
        """Return all that `fit` and an offer depend on; nodes with equal states differ only in their names."""
        if self.is_shared and self._state:
            return self._state
        self._state = (
            (self.cpu, self.memory_mb, self.disk_mb, self.num_workers, self.device_cap, self.num_free, self.is_used),
            tuple(self.devices.items()),
            frozenset(self.own),
            *(tuple(sorted(part.items())) for part in (self.user_defined, self.ranks, self.labels)),
            (*self.resources.user_defined, self.resources.max_workers),
        )
        return self._state

    def grants(self, isolation: str) -> dict[str, float] | None:
        """Return what `isolation` takes of the node for each member of a unit; None if the node is not allowed."""
        key, is_pair, value = isolation.partition("=")
        if is_pair:
            return {} if self.labels.get(key) == value else None
        if isolation in self.resources.user_defined:
            return {isolation: 1.0}
        return {} if not isolation or isolation in self.labels else None

    def allocate(self, unit: Unit, allocations: Mapping[str, Allocation]) -> None:
        """Subtract the allocations of a unit of the job, as `fit` returned them."""
        for allocation in allocations.values():
            self.subtract(allocation)
            self.note_own_devices(allocation.devices)
        if not unit.is_control:
            for member in unit.members:
                self.note_own(member.role)

    def note_own(self, role: str) -> None:
        """Count a worker of the job that is here."""
        self.is_used = True
        self.ranks[role] = self.ranks.get(role, 0) + 1

    def note_own_devices(self, keys: Collection[DeviceKey]) -> None:
        """Count devices that a worker of the job holds here."""
        self.own.update(keys)
        for key in keys:
            if key in self.devices:
                self._change(key, self.devices[key], 1)

    def _change(self, key: DeviceKey, left: float, kind: int) -> None:
        """Set the free part of a device, and its rank."""
        del self._order[bisect_left(self._order, self._ranks[key])]
        self.devices[key] = left
        self._ranks[key] = (3, 0.0, key) if left > 1 - EPSILON else (kind, left, key)
        insort(self._order, self._ranks[key])

    def subtract(self, allocation: Allocation) -> None:
        self.cpu -= allocation.cpu
        self.memory_mb -= allocation.memory_mb
        self.disk_mb -= allocation.disk_mb
        for name, amount in allocation.user_defined.items():
            self.user_defined[name] = self.user_defined.get(name, 0.0) - amount
        for key in allocation.devices:
            if key in self.devices:
                before = self.devices[key]
                self.num_free -= before > 1 - EPSILON
                self._change(key, max(0.0, before - allocation.share), 1 if key in self.own else 2)
                self.device_share -= before - self.devices[key]
        self.num_workers += 1

    @property
    def free_devices(self) -> int:
        """Wholly free devices that the job may still take here."""
        return min(self.num_free, max(0, self.device_cap - len(self.own)))

    @property
    def num_free_workers(self) -> float:
        """Processes that may still run here."""
        return self.resources.max_workers - self.num_workers if self.resources.max_workers else math.inf

    def fit(self, unit: Unit) -> dict[str, Allocation] | None:
        """Return what each worker of the unit would hold, or None if the unit does not fit. Nothing is subtracted."""
        amounts = self.grants(unit.isolation)
        has_capacity = unit.is_control or len(unit.members) <= self.num_free_workers
        if amounts is None or not has_capacity or not self.may_hold(unit) or not self._has_amounts(unit, amounts):
            return None
        chosen = self.choose_devices(unit)
        if chosen is None:
            return None
        return {member.worker: _allocation(member, chosen[member.worker], amounts) for member in unit.members}

    def may_hold(self, unit: Unit) -> bool:
        """Return True if the job may have the ranks of the unit here, beside its other ranks."""
        there = sum(self.ranks.get(role, 0) for role in unit.elastic)
        return not unit.max_ranks or there + len(unit.members) <= unit.max_ranks

    def _has_amounts(self, unit: Unit, amounts: Mapping[str, float]) -> bool:
        for field in ("cpu", "memory_mb", "disk_mb"):
            need = unit.total(field)
            if need > 0 and need > getattr(self, field) + EPSILON:
                return False
        wanted = unit.user_total()
        for name, amount in amounts.items():
            wanted[name] = wanted.get(name, 0.0) + amount * len(unit.members)
        return all(
            amount <= self.user_defined.get(name, 0.0) + EPSILON for name, amount in wanted.items() if amount > 0
        )

    def choose_devices(self, unit: Unit) -> dict[str, tuple[DeviceKey, ...]] | None:
        """Return devices for each worker of the unit, or None if there are too few.

        Workers are served by local rank, so that collocated workers of one local rank share a device.
        """
        chosen: dict[str, tuple[DeviceKey, ...]] = {}
        before: dict[DeviceKey, tuple[float, int]] = {}
        room = self.device_cap - len(self.own)
        members = sorted(unit.members, key=lambda member: member.local_rank)
        for member in members:
            share, count = share_of(member.needs.accelerator), math.ceil(member.needs.accelerator - EPSILON)
            keys = self._best(share, max(1, count) if member.needs.accelerator > 0 else 0, room)
            if keys is None:
                break
            chosen[member.worker] = keys
            for key in keys if member is not members[-1] else ():
                if key not in before:
                    before[key] = self.devices[key], self._ranks[key][0]
                    room -= key not in self.own
                self._change(key, self.devices[key] - share, 0)
        for key, (left, kind) in before.items():
            self._change(key, left, kind)
        return chosen if len(chosen) == len(unit.members) else None

    def _best(self, share: float, count: int, room: int) -> tuple[DeviceKey, ...] | None:
        """Return the devices of least rank with that share free, of which `room` may be new to the job."""
        keys: list[DeviceKey] = []
        most = count
        for kind in range(4):
            if kind == 2:
                most = min(count, len(keys) + room)
            at = bisect_left(self._order, (kind, share - EPSILON if kind < 3 else 0.0))
            while len(keys) < most and at < len(self._order) and self._order[at][0] == kind:
                keys.append(self._order[at][2])
                at += 1
        return tuple(keys) if len(keys) == count else None


def share_of(accelerator: float) -> float:
    """Return the part of each device that a worker takes: all of it from one device upwards."""
    return accelerator if accelerator < 1 - EPSILON else 1.0


def _pool(resources: NodeResources, accelerator_type: str) -> list[DeviceKey]:
    virtual = [("device", device.index) for device in resources.devices if device.kind == "virtual"]
    if accelerator_type == "CPU":
        return virtual or [("slot", number) for number in range(int(resources.cpu))]
    if accelerator_type not in ("GPU", "TPU"):
        raise InvariantError(f"accelerator type {accelerator_type!r} was accepted, but only GPU, CPU and TPU exist.")
    return [("device", device.index) for device in resources.devices if device.kind != "virtual"] or virtual


def _allocation(member: Member, devices: tuple[DeviceKey, ...], amounts: Mapping[str, float]) -> Allocation:
    needs = member.needs
    user_defined = {**needs.user_defined, **{name: needs.user_defined.get(name, 0.0) + 1 for name in amounts}}
    return Allocation(
        cpu=needs.cpu,
        memory_mb=needs.memory_mb,
        disk_mb=needs.disk_mb,
        user_defined=user_defined,
        devices=devices,
        share=share_of(needs.accelerator) if devices else 0.0,
    )
