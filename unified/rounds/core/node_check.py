"""Node checks before a round: which nodes measure a collective together, and the verdict on each.

A collective of two nodes that fails, or is slow, accuses both. Accused nodes meet other nodes in a second attempt. The
smallest set of nodes that explains all failures is at fault, if there is only one. A node with a successful collective
is never at fault. A node is slow if all its attempts were slow. (DLRover checks by pairs, too.) Nodes are named by
their rank among the nodes of the round.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from unified.values import Value

SLOW = 2.0
"""A node that takes more than this many times the median of the nodes is slow."""
MAX_SUSPECTS = 12
"""Explanations are searched for at most this many nodes that failed with one another."""
NOISE_S = 0.1
"""Time above the median that is never called slow."""


class DeviceMeasure(Value, frozen=True, kw_only=True):
    node: int
    matmul_s: float = 0.0
    copy_s: float = 0.0
    error: str = ""


class LinkMeasure(Value, frozen=True, kw_only=True):
    """Measurement of a collective by one rank, together with all ranks of its node and of others."""

    seconds: float = 0.0
    error: str = ""


class LinkAttempt(NamedTuple):
    """Collectives of groups of nodes."""

    groups: Sequence[Sequence[int]] = ()
    links: Mapping[int, LinkMeasure] = MappingProxyType({})
    """Measurements by node."""


class CheckVerdict(Value, frozen=True, kw_only=True):
    faulty: dict[int, str] = {}
    """Nodes at fault, and why."""
    undecided: dict[int, str] = {}
    """Nodes that cannot work together, while none of them is known to be at fault, and why."""
    slow: dict[int, dict[str, float]] = {}
    """Slow nodes: by name of the measurement, how many times the median they took."""

    @property
    def is_good(self) -> bool:
        """True if the round may begin."""
        return not self.faulty and not self.undecided


def broken_devices(devices: Mapping[int, DeviceMeasure], nodes: Mapping[int, int]) -> dict[int, str]:
    """Return the nodes with a rank whose device failed, or that did not answer. `nodes`: the node of each rank."""
    faulty: dict[int, str] = {}
    for rank, node in sorted(nodes.items()):
        measure = devices.get(rank)
        if measure is None:
            faulty.setdefault(node, f"rank {rank} did not finish the check of its device in time")
        elif measure.error:
            faulty.setdefault(node, f"the device of rank {rank}: {measure.error}")
    return faulty


def first_pairs(nodes: Iterable[int]) -> list[list[int]]:
    """Return pairs of nodes. The last of an odd number is left over, and gets a partner in the second attempt."""
    ordered = sorted(nodes)
    return [ordered[at : at + 2] for at in range(0, len(ordered) - 1, 2)]


def second_pairs(nodes: Iterable[int], first: Sequence[Sequence[int]], accused: Collection[int]) -> list[list[int]]:
    """Return pairs in which each accused or left-over node meets a node that it has not met.

    Prefer a partner that nobody accused; otherwise pair these nodes. A node without a new partner is left out.
    """
    met = {node: other for one, another in first for node, other in ((one, another), (another, one))}
    waiting = [node for node in sorted(nodes) if node in accused or node not in met]
    free = [node for node in met if node not in accused]
    pairs: list[list[int]] = []
    while waiting:
        node = waiting.pop(0)
        for others in (free, waiting):
            partner = next((other for other in reversed(others) if met.get(node) != other), None)
            if partner is not None:
                others.remove(partner)
                pairs.append([node, partner])
                break
    return pairs


def links_of_nodes(
    groups: Sequence[Sequence[int]], nodes: Mapping[int, int], links: Mapping[int, LinkMeasure]
) -> dict[int, LinkMeasure]:
    """Return one measurement a node: its slowest rank's, or an error if any rank has one or did not answer."""
    found: dict[int, LinkMeasure] = {}
    for node in sorted({node for group in groups for node in group}):
        own = {rank: links.get(rank) for rank, where in nodes.items() if where == node}
        wrong = [
            f"rank {rank}: {link.error if link is not None else 'no answer in time'}"
            for rank, link in sorted(own.items())
            if link is None or link.error
        ]
        seconds = max((link.seconds for link in own.values() if link is not None), default=0.0)
        found[node] = LinkMeasure(seconds=seconds, error=wrong[0] if wrong else "")
    return found


def accused(first: Mapping[int, LinkMeasure]) -> set[int]:
    """Return the nodes whose first collective failed or was slow."""
    return {node for node, link in first.items() if link.error} | set(
        _slow({node: link.seconds for node, link in first.items() if not link.error})
    )


def judge(devices: Mapping[int, DeviceMeasure], first: LinkAttempt, second: LinkAttempt) -> CheckVerdict:
    """Return the verdict, from measurements of devices (by rank, none broken) and of links (by node)."""
    attempts = (first, second)
    works = {node for attempt in attempts for node, link in attempt.links.items() if not link.error}
    failed = [set(pair) for attempt in attempts for pair in attempt.groups if not works.issuperset(pair)]
    errors = {node: link.error for attempt in attempts for node, link in attempt.links.items() if link.error}
    faulty: set[int] = set()
    undecided: set[int] = set()
    for pairs in _connected(failed, works):
        explanations = _smallest_covers(pairs, works)
        if len(explanations) == 1:
            faulty |= explanations[0]
        else:
            undecided |= {node for pair in pairs for node in pair} - works
    slow: dict[int, dict[str, float]] = {}
    for name, seconds in (
        ("matmul", _by_node(devices, "matmul_s")),
        ("copy", _by_node(devices, "copy_s")),
        ("collective", _best(attempts)),
    ):
        for node, factor in _slow(seconds).items():
            slow.setdefault(node, {})[name] = factor
    return CheckVerdict(
        faulty={node: errors[node] for node in sorted(faulty)},
        undecided={node: errors[node] for node in sorted(undecided)},
        slow=slow,
    )


def _connected(pairs: Iterable[set[int]], works: Collection[int]) -> list[list[set[int]]]:
    """Group failed pairs that share a node not proven healthy."""
    parts: list[list[set[int]]] = []
    for pair in pairs:
        near = [part for part in parts if any((pair & other) - set(works) for other in part)]
        parts = [part for part in parts if part not in near]
        parts.append([pair, *(other for part in near for other in part)])
    return parts


def _smallest_covers(pairs: Sequence[set[int]], works: Collection[int]) -> list[set[int]]:
    """Return the smallest sets of suspects with a node of each pair; none if there are too many suspects."""
    suspects = sorted({node for pair in pairs for node in pair} - set(works))
    for size in range(1, len(suspects) + 1 if len(suspects) <= MAX_SUSPECTS else 1):
        found = [
            set(nodes) for nodes in itertools.combinations(suspects, size) if all(pair & set(nodes) for pair in pairs)
        ]
        if found:
            return found
    return []


def _best(attempts: Iterable[LinkAttempt]) -> dict[int, float]:
    """Return the time of each node's better attempt that succeeded."""
    found: dict[int, float] = {}
    for attempt in attempts:
        for node, link in attempt.links.items():
            if not link.error:
                found[node] = min(link.seconds, found.get(node, link.seconds))
    return found


def _by_node(devices: Mapping[int, DeviceMeasure], field: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for measure in devices.values():
        found[measure.node] = max(found.get(measure.node, 0.0), getattr(measure, field))
    return found


def _slow(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return the slow nodes and how many times the median they took; of two nodes the quicker one is the median."""
    if len(seconds) < 2:
        return {}
    median = statistics.median_low(seconds.values())
    return {
        node: round(value / median, 1) if median else float("inf")
        for node, value in sorted(seconds.items())
        if value > SLOW * median and value - median > NOISE_S
    }
