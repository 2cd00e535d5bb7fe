"""Why a unit of workers has no place, as a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unified_master.core.scheduling.node_capacity import EPSILON, Room, Unit
from unified_master.core.step import count

_AMOUNTS = (("cpu", "CPU cores"), ("memory_mb", "MB of memory"), ("disk_mb", "MB of disk"))


def shortage(unit: Unit, units: Sequence[Unit], rooms: list[Room], num_placed: int) -> str:
    """Why this unit has no place: the first thing of which no node has enough."""
    number = sum(1 for other in units if other.label == unit.label)
    needs = f"{unit.label} needs" if unit.is_control else f"{unit.label} needs {count(number, 'group')} of"
    rooms = [room for room in rooms if room.grants(unit.isolation) is not None]
    if not rooms:
        pair = "label" if "=" in unit.isolation else "resource or label"
        return f"{unit.label} may only be on a node with the {pair} {unit.isolation!r}, and there is none"
    need = _devices_needed(unit)
    if need > 0 and all(room.choose_devices(unit) is None for room in rooms):
        whole = math.ceil(need - EPSILON)
        wanted = f"{needs} {_devices(need)}"
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
            return f"{needs} {amount:g} {word}; {_at_most(amount, f' {word}', free, total, num_placed)}"
    rooms_left = f"there is room for {num_placed} of them, and " if num_placed else ""
    named = unit.user_total()
    if any(room.grants(unit.isolation) for room in rooms):
        named[unit.isolation] = named.get(unit.isolation, 0.0) + len(unit.members)
    for name, amount in sorted(named.items()):
        richest = max(rooms, key=lambda room: (room.user_defined.get(name, 0.0), _reversed(room.node)))
        has = richest.user_defined.get(name, 0.0)
        if amount > 0 and amount > has + EPSILON:
            where = f"the node with most, {richest.node}, has {max(0.0, has):g}" if has > 0 else "no node has any left"
            return f"{needs} {amount:g} {name}; {rooms_left}{where}"
    one = "it" if unit.is_control else "one"
    return f"{needs.removesuffix(' of')}; {rooms_left}no node has all that {one} needs at once"


def whole_devices(unit: Unit) -> int:
    """Devices of a unit that nobody shares with it."""
    needs = (member.needs.accelerator for member in unit.members)
    return sum(math.ceil(need - EPSILON) for need in needs if need >= 1 - EPSILON)


def _at_most(need: float, word: str, free: dict[str, float], total: dict[str, float], num_placed: int) -> str:
    """What there is of a resource, by node, where no node has `need` free."""
    largest = max(total, key=lambda node: (total[node], _reversed(node)))
    if need > total[largest] + EPSILON:
        return f"no node of this cluster has {need:g}{word} (the largest, {largest}, has {total[largest]:g})"
    freest = max(free, key=lambda node: (free[node], _reversed(node)))
    has = f"the largest free node {freest} has {max(0.0, free[freest]):g}"
    return f"there is room for {num_placed} of them, after which {has}" if num_placed else has


def _devices_needed(unit: Unit) -> float:
    """Devices of one unit: whole ones, and the sum of the shares."""
    shares = [member.needs.accelerator for member in unit.members if 0 < member.needs.accelerator < 1 - EPSILON]
    return whole_devices(unit) + sum(shares)


def _devices(need: float) -> str:
    return "1 device" if abs(need - 1) < EPSILON else f"{round(need, 4):g} devices"


def _reversed(name: str) -> tuple[int, ...]:
    """Makes `max` prefer the name that sorts first."""
    return tuple(-ord(letter) for letter in name)
