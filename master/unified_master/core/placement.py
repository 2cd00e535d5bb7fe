"""Which worker goes where: all of a job's units at once, or none and a sentence that says why."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import msgspec

from unified.job.spec import JobSpec, Resources, Value
from unified_master.core.room import EPSILON, Member, Room, Unit, open_room
from unified_master.core.state import Cluster, JobRecord, NodeRecord, SeatClaim, needs_of
from unified_master.core.turn import count

Fitness = tuple[float, float, str]
"""Of a room for a unit, lower is better; the room's node is last."""


class Seat(Value, frozen=True, kw_only=True):
    """A place for one worker."""

    worker: str
    node: str
    claim: SeatClaim


class Plan(Value, frozen=True, kw_only=True):
    """Seats for every worker asked for, or none and the reason."""

    seats: tuple[Seat, ...] = ()
    reason: str = ""
    """Why it does not fit; empty if it does."""

    @property
    def fits(self) -> bool:
        return not self.reason


def units_of(spec: JobSpec) -> list[Unit]:
    """The job cut into units: group i of each collocation, or of a role alone."""
    together: dict[str, list[str]] = {}
    for role in spec.roles:
        together.setdefault(f"@{role.collocation}" if role.collocation else role.name, []).append(role.name)
    units: list[Unit] = []
    for names in together.values():
        roles = [spec.role(name) for name in names]
        number = max(role.num_groups for role in roles)
        label = f"role {names[0]}" if len(names) == 1 else f"roles {', '.join(names)} (collocated)"
        for index in range(number):
            members = [
                Member(worker=role.worker(rank), role=role.name, local_rank=rank % role.per_group, needs=needs)
                for role, needs in ((role, needs_of(spec, role)) for role in roles)
                for rank in range(index * role.per_group, min((index + 1) * role.per_group, role.total))
            ]
            if members:
                units.append(Unit(label=label, index=index, count=number, members=tuple(members)))
    return units


def plan(units: Sequence[Unit], rooms: Iterable[Room]) -> Plan:
    """Seats for all units, largest units first, each on the node where it leaves the least behind."""
    left = {room.node: room for room in rooms}
    if not left and units:
        return Plan(reason="no node may take it")
    seats: list[Seat] = []
    placed: dict[str, int] = {}
    shape: list[tuple[int, Resources]] = []
    offers: list[Fitness] = []
    for unit in sorted(units, key=_size, reverse=True):
        # Units of one shape come in a row, and a seat changes one room alone: each room is looked at once a shape and
        # once a seat, not once a unit.
        if (its_shape := [(member.local_rank, member.needs) for member in unit.members]) != shape:
            shape = its_shape
            offers = [offer for room in left.values() if (offer := _offer(room, unit)) is not None]
            heapq.heapify(offers)
        if not offers:
            return Plan(reason=_shortage(unit, units, list(left.values()), placed.get(unit.label, 0)))
        room = left[heapq.heappop(offers)[-1]]
        for worker, claim in (room.seat(unit) or {}).items():
            room.take(claim, is_own=True)
            seats.append(Seat(worker=worker, node=room.node, claim=claim))
        if (offer := _offer(room, unit)) is not None:
            heapq.heappush(offers, offer)
        placed[unit.label] = placed.get(unit.label, 0) + 1
    return Plan(seats=tuple(seats))


def place(cluster: Cluster, job: JobRecord, units: Sequence[Unit], *, is_empty: bool = False) -> Plan:
    """A plan on the nodes that the job may use; with `is_empty`, on the alive cluster as if nothing ran on it."""
    nodes = cluster.alive_nodes() if is_empty else cluster.usable_nodes()
    allowed = [node for node in nodes if node.name not in job.excluded]
    found = plan(units, _rooms(allowed, job, is_empty=is_empty))
    if found.fits:
        return found
    if not nodes:
        return Plan(reason=_no_nodes(cluster))
    if len(allowed) < len(nodes):
        left_out = ", ".join(node.name for node in nodes if node.name in job.excluded)
        return msgspec.structs.replace(found, reason=f"{found.reason} ({left_out} failed too often for this job)")
    return found


def _no_nodes(cluster: Cluster) -> str:
    if cluster.alive_nodes():
        return "no node has come back yet since the master restarted"
    return "no node is alive; start an agent with `unified-agent --master …`"


def _rooms(nodes: Sequence[NodeRecord], job: JobRecord, *, is_empty: bool) -> list[Room]:
    spec = job.spec
    return [
        open_room(node, job.job_id, spec.accelerator_type, spec.device_per_node, is_empty=is_empty) for node in nodes
    ]


def _size(unit: Unit) -> tuple[float, float, float, float]:
    scarce = sum(unit.user_total().values())
    return (scarce, unit.total("accelerator"), unit.total("cpu"), unit.total("memory_mb"))


def _offer(room: Room, unit: Unit) -> Fitness | None:
    """How well the unit would sit in this room; None if it does not fit."""
    if _whole_devices(unit) > room.free_devices:  # most rooms of a full cluster are ruled out by this alone
        return None
    claims = room.seat(unit)
    return None if claims is None else _fitness(room, unit, claims)


def _fitness(room: Room, unit: Unit, claims: dict[str, SeatClaim]) -> Fitness:
    """Lower is better. Units with devices are packed; those without are spread over the nodes."""
    if unit.total("accelerator") <= 0:
        return (float(room.num_workers), 0.0, room.node)
    begun = {key for claim in claims.values() for key in claim.devices}
    whole = sum(1 for key in begun if room.devices[key] > 1 - EPSILON)
    return (float(room.num_free - whole), -float(len(room.own)), room.node)


def _shortage(unit: Unit, units: Sequence[Unit], rooms: list[Room], num_placed: int) -> str:
    """Why this unit has no place: the first thing of which no node has enough."""
    number = sum(1 for other in units if other.label == unit.label)
    need = _devices_needed(unit)
    if need > 0 and all(room.choose_devices(unit) is None for room in rooms):
        whole = math.ceil(need - EPSILON)
        wanted = f"{unit.label} needs {count(number, 'group')} of {_devices(need)}"
        if whole > (cap := rooms[0].device_cap):
            return f"{wanted}; the job may use {cap} of a node (device_per_node)"
        free = {room.node: float(room.free_devices) for room in rooms}
        total = {room.node: float(len(room.devices)) for room in rooms}
        return f"{wanted}; {_at_most(whole, '', free, total, num_placed)}"
    for field, word in _AMOUNTS:
        amount = unit.total(field)
        free = {room.node: getattr(room, field) for room in rooms}
        if amount > 0 and amount > max(free.values()) + EPSILON:
            total = {room.node: getattr(room.resources, field) for room in rooms}
            wanted = f"{unit.label} needs {count(number, 'group')} of {amount:g} {word}"
            return f"{wanted}; {_at_most(amount, f' {word}', free, total, num_placed)}"
    rooms_left = f"there is room for {num_placed} of them, and " if num_placed else ""
    for name, amount in sorted(unit.user_total().items()):
        richest = max(rooms, key=lambda room: (room.user_defined.get(name, 0.0), _reversed(room.node)))
        has = richest.user_defined.get(name, 0.0)
        if amount > 0 and amount > has + EPSILON:
            where = f"the node with most, {richest.node}, has {max(0.0, has):g}" if has > 0 else "no node has any left"
            return f"{unit.label} needs {count(number, 'group')} of {amount:g} {name}; {rooms_left}{where}"
    return f"{unit.label} needs {count(number, 'group')}; {rooms_left}no node has all that one needs at once"


def _at_most(need: float, word: str, free: dict[str, float], total: dict[str, float], num_placed: int) -> str:
    """What there is of a resource, by node, where no node has `need` free."""
    largest = max(total, key=lambda node: (total[node], _reversed(node)))
    if need > total[largest] + EPSILON:
        return f"no node of this cluster has {need:g}{word} (the largest, {largest}, has {total[largest]:g})"
    freest = max(free, key=lambda node: (free[node], _reversed(node)))
    has = f"the largest free node {freest} has {max(0.0, free[freest]):g}"
    return f"there is room for {num_placed} of them, after which {has}" if num_placed else has


_AMOUNTS = (("cpu", "CPU cores"), ("memory_mb", "MB of memory"), ("disk_mb", "MB of disk"))


def _devices_needed(unit: Unit) -> float:
    """Devices of one unit: whole ones, and the sum of the shares."""
    shares = [member.needs.accelerator for member in unit.members if 0 < member.needs.accelerator < 1 - EPSILON]
    return _whole_devices(unit) + sum(shares)


def _whole_devices(unit: Unit) -> int:
    needs = (member.needs.accelerator for member in unit.members)
    return sum(math.ceil(need - EPSILON) for need in needs if need >= 1 - EPSILON)


def _devices(need: float) -> str:
    return "1 device" if abs(need - 1) < EPSILON else f"{round(need, 4):g} devices"


def _reversed(name: str) -> tuple[int, ...]:
    """Makes `max` prefer the name that sorts first."""
    return tuple(-ord(letter) for letter in name)
