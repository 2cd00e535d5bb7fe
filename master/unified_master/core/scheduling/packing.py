"""Packs units of workers onto nodes: the largest unit first, each on the node that suits it best.

If a unit has no place, the plan says why in a sentence.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from unified.job.spec import Resources
from unified.values import Value
from unified_master.core.node_capacity import EPSILON, Allocation, NodeCapacity, Unit
from unified_master.core.state import STORE
from unified_master.core.step import count

_AMOUNTS = (("cpu", "CPU cores"), ("memory_mb", "MB of memory"), ("disk_mb", "MB of disk"))
Fitness = tuple[float, float, float, str]
"""Sort key of nodes for a unit, lower is better; its last item is the node's name."""
Shape = tuple[str, tuple[str, ...], list[tuple[int, Resources]]]
"""Properties of a unit; two units with equal properties fit and suit the same nodes."""
MAX_LOOKED_AT = 16
"""Number of nodes with the least free devices, and of those with the most, that are tried for each further node."""


class Assignment(Value, frozen=True, kw_only=True):
    """The place of one worker."""

    worker: str
    node: str
    allocation: Allocation


class PlacementPlan(Value, frozen=True, kw_only=True):
    """Places for all workers of a request, or none and the reason."""

    assignments: tuple[Assignment, ...] = ()
    reason: str = ""
    """The sentence that says why the plan does not fit; empty if it does."""

    @property
    def fits(self) -> bool:
        return not self.reason

    @property
    def num_nodes(self) -> int:
        return len({assignment.node for assignment in self.assignments if assignment.worker != STORE})


def plan(
    units: Sequence[Unit], open_nodes: Callable[[], list[NodeCapacity]], max_nodes: int | None = None
) -> PlacementPlan:
    """Return places for all units, or none and a sentence that says why.

    Units of an elastic role are spread over nodes if all units then find a place. Other units with devices are packed,
    others without are spread.

    Args:
        open_nodes: returns the nodes that may be used, new at each call: a failed attempt has used them up in part.
        max_nodes: most nodes that the job's workers may be on, including those in use; None: all.
    """
    if not (nodes := open_nodes()):
        return PlacementPlan(reason="no node may take it" if units else "")
    is_bound = max_nodes is not None and max_nodes < len(nodes)
    bound = max_nodes if max_nodes is not None and is_bound else len(nodes)
    has_control = any(unit.is_control for unit in units)
    failed: PlacementPlan | None = None
    orders = (False, True) if has_control else (False,)
    for control_first in orders:
        for is_spread in (True, False) if any(unit.elastic for unit in units) else (False,):
            found = _attempt(
                units,
                nodes or open_nodes(),
                bound,
                is_spread=is_spread,
                control_first=control_first,
                says_why=failed is None and not is_bound,
            )
            if found.fits:
                return found
            failed, nodes = failed or found, []
    if not is_bound:
        assert failed is not None
        return failed
    if not (everywhere := plan(units, open_nodes)).fits:
        return everywhere
    if _may_fit(units, open_nodes(), bound):
        for control_first in orders:
            if (found := _few_nodes(units, open_nodes(), bound, control_first=control_first)).fits:
                return found
    packed = _attempt(units, open_nodes(), len(open_nodes()), is_spread=False, control_first=False, says_why=False)
    used = count((packed if packed.fits else everywhere).num_nodes, "node")
    return PlacementPlan(reason=f"it fits on {used}, and may use {bound} (node_num)")


def _attempt(
    units: Sequence[Unit],
    nodes: list[NodeCapacity],
    bound: int,
    *,
    is_spread: bool,
    control_first: bool,
    says_why: bool,
) -> PlacementPlan:
    """Place each unit on the node that suits it best, on at most `bound` nodes.

    The reason why a unit has no place costs a look at each node, so it is found only with `says_why`.
    """
    every = {node.name: node for node in nodes}
    num_used = sum(node.is_used for node in nodes)
    left = list(every) if num_used < bound else _used(every)
    assignments: list[Assignment] = []
    placed: dict[str, int] = {}
    shape: Shape | None = None
    offers: list[Fitness] = []
    for unit in _in_order(units, control_first=control_first):
        if unit.is_control:
            node = _node_for_control(every.values(), unit)
            if node is None:
                return _no_place(unit, units, every.values(), 0, says_why=says_why)
            assignments += _assign(every, node.name, unit)
            shape = None
            continue
        # Units of one shape come in a row, and an assignment changes only one node. So all nodes are looked at once a
        # shape, and then only the assigned node.
        if (its_shape := _shape(unit)) != shape:
            shape = its_shape
            offers = _offers((every[name] for name in left), unit, is_spread=is_spread)
            heapq.heapify(offers)
        if not offers:
            there = (every[name] for name in left)
            return _no_place(unit, units, there, placed.get(unit.label, 0), says_why=says_why)
        name = heapq.heappop(offers)[-1]
        is_last = not every[name].is_used and num_used + 1 == bound
        num_used += not every[name].is_used
        assignments += _assign(every, name, unit)
        placed[unit.label] = placed.get(unit.label, 0) + 1
        if is_last:
            left, shape = _used(every), None
        elif (offer := _offer(every[name], unit, is_spread=is_spread)) is not None:
            heapq.heappush(offers, offer)
    return PlacementPlan(assignments=tuple(assignments))


def _no_place(
    unit: Unit, units: Sequence[Unit], nodes: Iterable[NodeCapacity], num_placed: int, *, says_why: bool
) -> PlacementPlan:
    return PlacementPlan(reason=_shortage(unit, units, list(nodes), num_placed) if says_why else f"no {unit.label}")


def _few_nodes(units: Sequence[Unit], nodes: list[NodeCapacity], bound: int, *, control_first: bool) -> PlacementPlan:
    """Fill each node as far as possible: first the nodes in use, then repeatedly the node that takes the most units."""
    control = next((unit for unit in units if unit.is_control), None)
    left = _by_shape([unit for unit in _in_order(units, control_first=False) if not unit.is_control])
    assignments: list[Assignment] = []
    every = {node.name: node for node in nodes}
    if control is not None and control_first and (node := _node_for_control(nodes, control)) is not None:
        assignments += _assign(every, node.name, control)
    used = _used(every)
    for name in sorted(used):
        left = _fill(every, name, left, assignments)
    while left and len(used) < bound:
        best = _roomiest([node for node in every.values() if not node.is_used], left)
        if best is None:
            break
        left = _fill(every, best, left, assignments)
        used.append(best)
    if control is not None and not control_first and (node := _node_for_control(every.values(), control)) is not None:
        assignments += _assign(every, node.name, control)
    is_whole = len(assignments) == sum(len(unit.members) for unit in units)
    return PlacementPlan(assignments=tuple(assignments)) if is_whole else PlacementPlan(reason="it needs more nodes")


def _may_fit(units: Sequence[Unit], nodes: list[NodeCapacity], bound: int) -> bool:
    """Return True if the nodes with the most devices and cores have enough; a quick no saves a search."""
    devices = sum(_whole_devices(unit) for unit in units)
    cpu = sum(unit.total("cpu") for unit in units if not unit.is_control)
    has_devices = sum(heapq.nlargest(bound, (node.free_devices for node in nodes)))
    has_cpu = sum(heapq.nlargest(bound, (node.cpu for node in nodes)))
    return devices <= has_devices and (cpu <= 0 or cpu <= has_cpu + EPSILON)


def _by_shape(units: list[Unit]) -> list[list[Unit]]:
    """Group units with the same needs; the last unit of each list is placed next."""
    found: list[list[Unit]] = []
    shape = None
    for unit in units:
        if (its_shape := _shape(unit)) != shape:
            shape = its_shape
            found.append([])
        found[-1].append(unit)
    return [alike[::-1] for alike in found]


def _shape(unit: Unit) -> Shape:
    return (unit.isolation, unit.elastic, [(member.local_rank, member.needs) for member in unit.members])


def _roomiest(nodes: list[NodeCapacity], left: list[list[Unit]]) -> str | None:
    """Return the name of the node that takes most of the units; if several take all, the one with least to spare."""
    units = [unit for alike in left for unit in alike]
    devices = sum(_whole_devices(unit) for unit in units)
    cpu = sum(unit.total("cpu") for unit in units)
    by_free = sorted(nodes, key=lambda node: (node.num_free, node.num_workers, node.name))
    may_hold = [node for node in by_free if node.free_devices >= devices and (node.cpu + EPSILON >= cpu or cpu <= 0)]
    best, most = None, 0
    for node in [*may_hold[:MAX_LOOKED_AT], *by_free[: -MAX_LOOKED_AT - 1 : -1]]:
        taken = len(units) - sum(map(len, _fill({node.name: node.copy()}, node.name, left, [])))
        if taken > most:
            best, most = node.name, taken
        if most == len(units):
            break
    return best


def _fill(
    nodes: dict[str, NodeCapacity], name: str, left: list[list[Unit]], assignments: list[Assignment]
) -> list[list[Unit]]:
    """Assign units that fit to one of the nodes; return the others."""
    over = []
    for alike in left:
        number = len(alike)
        while number and nodes[name].fit(alike[number - 1]) is not None:
            number -= 1
            assignments += _assign(nodes, name, alike[number])
        if number:
            over.append(alike[:number])
    return over


def _used(nodes: dict[str, NodeCapacity]) -> list[str]:
    """Return the names of the nodes on which the job has workers."""
    return [name for name, node in nodes.items() if node.is_used]


def _assign(nodes: dict[str, NodeCapacity], name: str, unit: Unit) -> list[Assignment]:
    if nodes[name].is_shared:
        nodes[name] = nodes[name].copy()
    node = nodes[name]
    allocations = node.fit(unit) or {}
    node.allocate(unit, allocations)
    return [Assignment(worker=worker, node=node.name, allocation=one) for worker, one in allocations.items()]


def _node_for_control(nodes: Iterable[NodeCapacity], unit: Unit) -> NodeCapacity | None:
    """Return a node for the unit, one with the job's own workers if possible; None if no node fits."""
    fitting = (node for node in nodes if node.fit(unit) is not None)
    return min(fitting, key=lambda node: (not node.is_used, node.num_workers, node.name), default=None)


def _in_order(units: Sequence[Unit], *, control_first: bool) -> list[Unit]:
    """Sort the largest first, because small ones find a place later; units of one shape stay in a row."""
    largest_first = sorted(units, key=_size, reverse=True)
    return sorted(largest_first, key=lambda unit: unit.is_control != control_first)


def _size(unit: Unit) -> tuple[float, float, float, float]:
    scarce = sum(unit.user_total().values()) + (len(unit.members) if unit.isolation else 0)
    return (scarce, unit.total("accelerator"), unit.total("cpu"), unit.total("memory_mb"))


def _offers(nodes: Iterable[NodeCapacity], unit: Unit, *, is_spread: bool) -> list[Fitness]:
    """Return the offers of all nodes that have one. Nodes with equal states are looked at once."""
    found: list[Fitness] = []
    known: dict[tuple[object, ...], Fitness | None] = {}
    whole = _whole_devices(unit)
    for node in nodes:
        if whole > node.free_devices:
            continue
        if (state := node.state()) not in known:
            known[state] = _offer(node, unit, is_spread=is_spread)
        if (offer := known[state]) is not None:
            found.append((*offer[:-1], node.name))
    return found


def _offer(node: NodeCapacity, unit: Unit, *, is_spread: bool) -> Fitness | None:
    """Return how well the unit would fit on this node; None if it does not."""
    if _whole_devices(unit) > node.free_devices:  # this alone rules out most nodes of a full cluster
        return None
    allocations = node.fit(unit)
    return None if allocations is None else _fitness(node, unit, allocations, is_spread=is_spread)


def _fitness(node: NodeCapacity, unit: Unit, allocations: dict[str, Allocation], *, is_spread: bool) -> Fitness:
    """Return the sort key of a node that fits."""
    peers = float(max((node.ranks.get(role, 0) for role in unit.elastic), default=0)) if is_spread else 0.0
    if unit.total("accelerator") <= 0:
        return (peers, float(node.num_workers), 0.0, node.name)
    begun = {key for allocation in allocations.values() for key in allocation.devices}
    whole = sum(1 for key in begun if node.devices[key] > 1 - EPSILON)
    return (peers, float(node.num_free - whole), -float(len(node.own)), node.name)


def _shortage(unit: Unit, units: Sequence[Unit], nodes: list[NodeCapacity], num_placed: int) -> str:
    """Return why this unit has no place: the first resource of which no node has enough."""
    number = sum(1 for other in units if other.label == unit.label)
    needs = f"{unit.label} needs" if unit.is_control else f"{unit.label} needs {count(number, 'group')} of"
    nodes = [node for node in nodes if node.grants(unit.isolation) is not None]
    if not nodes:
        pair = "label" if "=" in unit.isolation else "resource or label"
        return f"{unit.label} may only be on a node with the {pair} {unit.isolation!r}, and there is none"
    if all(node.num_free_workers < len(unit.members) for node in nodes):
        most = max(node.resources.max_workers for node in nodes)
        wanted = count(len(unit.members), "process", "processes")
        return f"{needs} {wanted}; a node has at most {most} (--max-workers of its agent)"
    shares = [member.needs.accelerator for member in unit.members if 0 < member.needs.accelerator < 1 - EPSILON]
    whole_devices = _whole_devices(unit)
    need = whole_devices + sum(shares)
    if need > 0 and all(node.free_devices < whole_devices or node.choose_devices(unit) is None for node in nodes):
        whole = math.ceil(need - EPSILON)
        wanted = f"{needs} {'1 device' if abs(need - 1) < EPSILON else f'{round(need, 4):g} devices'}"
        if whole > (cap := nodes[0].device_cap):
            return f"{wanted}; the job may use {cap} of a node (device_per_node)"
        free = {node.name: float(node.free_devices) for node in nodes}
        total = {node.name: float(len(node.devices)) for node in nodes}
        largest = max(total.values())
        hint = "; a role that needs no device says .resource(cpu=1)" if whole > largest else ""
        hint += ", and `--devices` gives nodes without GPUs virtual ones" if not largest else ""
        return f"{wanted}; {_at_most(whole, '', free, total, num_placed)}{hint}"
    for field, word in _AMOUNTS:
        amount = unit.total(field)
        free = {node.name: getattr(node, field) for node in nodes}
        if amount > 0 and amount > max(free.values()) + EPSILON:
            total = {node.name: getattr(node.resources, field) for node in nodes}
            return f"{needs} {amount:g} {word}; {_at_most(amount, f' {word}', free, total, num_placed)}"
    if not any(node.may_hold(unit) for node in nodes):
        ranks = count(len(unit.members), "rank")
        there = f"{count(len(nodes), 'node')} {'is' if len(nodes) == 1 else 'are'} there"
        return f"{needs} {ranks}; the job may have {unit.max_ranks} on a node (device_per_node), and {there}"
    rooms_left = f"there is room for {num_placed} of them, and " if num_placed else ""
    named = unit.user_total()
    if any(node.grants(unit.isolation) for node in nodes):
        named[unit.isolation] = named.get(unit.isolation, 0.0) + len(unit.members)
    for name, amount in sorted(named.items()):
        free = {node.name: node.user_defined.get(name, 0.0) for node in nodes}
        richest = _largest(free)
        has = free[richest]
        if amount > 0 and amount > has + EPSILON:
            where = f"the node with most, {richest}, has {max(0.0, has):g}" if has > 0 else "no node has any left"
            return f"{needs} {amount:g} {name}; {rooms_left}{where}"
    whom = "it" if unit.is_control else "one group"
    return f"{needs.removesuffix(' of')}; {rooms_left}no node has all resources of {whom} free at the same time"


def _whole_devices(unit: Unit) -> int:
    """Return the number of devices that a unit shares with no other."""
    needs = (member.needs.accelerator for member in unit.members)
    return sum(math.ceil(need - EPSILON) for need in needs if need >= 1 - EPSILON)


def _at_most(need: float, word: str, free: dict[str, float], total: dict[str, float], num_placed: int) -> str:
    """Return how much nodes have of a resource of which no node has `need` free."""
    largest = _largest(total)
    if need > total[largest] + EPSILON:
        return f"no node of this cluster has {need:g}{word} (the largest, {largest}, has {total[largest]:g})"
    freest = _largest(free)
    has = f"the largest free node {freest} has {max(0.0, free[freest]):g}"
    return f"there is room for {num_placed} of them, after which {has}" if num_placed else has


def _largest(amounts: dict[str, float]) -> str:
    """Return the name of the node that has most; of several, the one that sorts first."""
    most = max(amounts.values())
    return min(name for name, amount in amounts.items() if amount == most)
