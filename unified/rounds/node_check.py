"""The check of a round's nodes by its ranks, before the process group is made.

Each rank times a product of matrices and a copy on its device; then pairs of nodes time a collective in process groups
of their own. Measurements are exchanged through the round's store, so that all ranks come to the same verdict
(`unified.rounds.core.node_check`), even if some have stopped answering.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from unified.protocol.agent_master import RunOrder
from unified.protocol.records import NodeCheckReport
from unified.rounds import process_group
from unified.rounds.core.node_check import (
    CheckVerdict,
    DeviceMeasure,
    LinkAttempt,
    LinkMeasure,
    accused,
    broken_devices,
    first_pairs,
    judge,
    links_of_nodes,
    second_pairs,
)
from unified.rounds.meeting import RoundMeeting, RoundMember
from unified.rounds.rendezvous_store import connect
from unified.values import Value

if TYPE_CHECKING:
    import torch

DEVICE_WITHIN_S = 60.0
LINK_WITHIN_S = 20.0
"""Time in which two nodes have to connect and to finish a collective."""
SLACK_S = 5.0
TIMES = 3
"""Attempts at each measurement, of which the best counts."""
CPU_SIZE, ACCELERATOR_SIZE = 256, 4096
"""Rows of the matrices."""
CPU_BYTES, ACCELERATOR_BYTES = 8 << 20, 256 << 20
LINK_BYTES = 64 << 10, 512 << 10, 4 << 20
"""Sizes of the collectives of a link, in order, up to the first that takes longer than `SLOW_LINK_S`. A link that is
too slow for the last size is slow, but not faulty."""
SLOW_LINK_S = 2.0
V = TypeVar("V", bound=Value)


class _Introduction(Value, frozen=True, kw_only=True):
    node: str
    measure: DeviceMeasure


class NodeCheck:
    """One rank's part in the check of a round.

    Args:
        port: port of the round's store.
        node: name of this rank's node.
        device: torch's name of the rank's device.
        backend: as the role says it.
    """

    def __init__(self, order: RunOrder, port: int, node: str, device: str, backend: str) -> None:
        import torch.distributed as distributed

        self._order = order
        self._node = node
        self._device = device
        self._backend = process_group.choose_backend(backend, device)
        longest_s = max(DEVICE_WITHIN_S, LINK_WITHIN_S) + 2 * SLACK_S
        self._store: Any = distributed.PrefixStore(  # type: ignore[attr-defined]  # torch exports it without saying so
            f"unified/check/{order.round}", connect(order.store_host, port, longest_s)
        )

    def run(self) -> NodeCheckReport:
        """Measure, and return this rank's times with the verdict of all ranks."""
        everyone = range(self._order.world_size)
        own = measure_device(self._device)
        said = self._exchange(
            "device", everyone, _Introduction(node=self._node, measure=own), _Introduction, DEVICE_WITHIN_S
        )
        names = list(dict.fromkeys(said[rank].node for rank in sorted(said)))
        # A silent rank counts as a node of its own; the master knows its real node.
        nodes = {rank: names.index(said[rank].node) if rank in said else len(names) + rank for rank in everyone}
        devices = {rank: msgspec.structs.replace(each.measure, node=nodes[rank]) for rank, each in said.items()}
        if broken := broken_devices(devices, nodes):
            return self._reported(CheckVerdict(faulty=broken), nodes, own, [])
        first = self._attempt("first", first_pairs(set(nodes.values())), nodes)
        pairs = second_pairs(set(nodes.values()), first.groups, accused(first.links))
        second = self._attempt("second", pairs, nodes)
        here = nodes[self._order.rank]
        links = [attempt.links[here] for attempt in (first, second) if here in attempt.links]
        times = [link.seconds for link in links if not link.error]
        return self._reported(judge(devices, first, second), nodes, own, times)

    def _attempt(self, name: str, pairs: Sequence[Sequence[int]], nodes: Mapping[int, int]) -> LinkAttempt:
        """Take part in the collectives of pairs of nodes, if this rank's node is among them."""
        if not pairs or "hccl" in self._backend:
            return LinkAttempt()
        measure = None
        for number, pair in enumerate(pairs):
            if nodes[self._order.rank] in pair:
                ranks = sorted(rank for rank, node in nodes.items() if node in pair)
                measure = self._measure_link(f"{name}/{number}", ranks)
        ranks = sorted(rank for rank, node in nodes.items() if any(node in pair for pair in pairs))
        links = self._exchange(name, ranks, measure, LinkMeasure, LINK_WITHIN_S + SLACK_S)
        return LinkAttempt(pairs, links_of_nodes(pairs, nodes, links))

    def _measure_link(self, name: str, ranks: Sequence[int]) -> LinkMeasure:
        import torch.distributed as distributed

        store = distributed.PrefixStore(name, self._store)  # type: ignore[attr-defined]  # as above
        try:
            seconds = measure_link(store, ranks.index(self._order.rank), len(ranks), self._backend, self._device)
        except Exception as error:  # a transport's or a driver's error may be of any class
            return LinkMeasure(error=_first_line(error))
        return LinkMeasure(seconds=seconds)

    def _exchange(self, name: str, ranks: Sequence[int], own: V | None, kind: type[V], within_s: float) -> dict[int, V]:
        """Give `own`, and return the values that these ranks gave, the same for all callers."""
        member = RoundMember(self._order.round, self._order.rank, self._order.world_size)
        meeting = RoundMeeting(self._store, name, member, within_s)
        said = meeting.hear(ranks, None if own is None else msgspec.msgpack.encode(own), SLACK_S)
        return {rank: msgspec.msgpack.decode(data, type=kind) for rank, data in said.items()}

    def _reported(
        self, verdict: CheckVerdict, nodes: Mapping[int, int], own: DeviceMeasure, times: Sequence[float]
    ) -> NodeCheckReport:
        return NodeCheckReport(
            round=self._order.round,
            matmul_s=own.matmul_s,
            copy_s=own.copy_s,
            collective_s=min(times, default=0.0),
            slow=verdict.slow.get(nodes[self._order.rank], {}),
            faulty={rank: verdict.faulty[node] for rank, node in nodes.items() if node in verdict.faulty},
            undecided={rank: verdict.undecided[node] for rank, node in nodes.items() if node in verdict.undecided},
        )


def measure_device(name: str) -> DeviceMeasure:
    """Time a product of two matrices and a copy on a device; an error is part of the result."""
    import torch

    try:
        device = torch.device(name)
        size, nbytes = (CPU_SIZE, CPU_BYTES) if device.type == "cpu" else (ACCELERATOR_SIZE, ACCELERATOR_BYTES)
        matrix = torch.ones(size, size, device=device)
        source = torch.ones(nbytes // 4, device=device)
        target = torch.empty_like(source)
        product = matrix @ matrix
        if product[0, 0].item() != size or product[-1, -1].item() != size:
            return DeviceMeasure(node=0, error=f"a product of matrices of ones is {product[0, 0].item():g}, not {size}")
        matmul_s = _best(lambda: matrix @ matrix, device)
        copy_s = _best(lambda: target.copy_(source), device)
    except Exception as error:  # a driver's error may be of any class
        return DeviceMeasure(node=0, error=_first_line(error))
    return DeviceMeasure(node=0, matmul_s=matmul_s, copy_s=copy_s)


def measure_link(store: Any, rank: int, size: int, backend: str, device: str) -> float:
    """Return the seconds of the quickest of several all_reduce of the largest size, in a process group of its own.

    On a slow link they are extrapolated from a smaller size.
    """
    import torch
    import torch.distributed as distributed

    within = timedelta(seconds=LINK_WITHIN_S)
    group: Any
    if "nccl" in backend:
        place = torch.device(device)
        torch.cuda.set_device(place)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = within
        group = distributed.ProcessGroupNCCL(store, rank, size, options)
    else:
        place = torch.device("cpu")
        group = distributed.ProcessGroupGloo(store, rank, size, within)
    # Keep the tensors longer than the group: Gloo's thread would need the GIL to free one, while the end of the group
    # holds the GIL and waits for that thread (torch 2.13).
    data, slowest = [torch.ones(nbytes // 4, device=place) for nbytes in LINK_BYTES], torch.zeros(1, device=place)
    together = distributed.AllreduceOptions()
    together.reduceOp = distributed.ReduceOp(distributed.ReduceOp.MAX)
    group.allreduce([slowest], together).wait()  # NCCL connects only now

    def reduce(tensor: torch.Tensor, times: int) -> float:
        return _best(lambda: group.allreduce([tensor]).wait(), place, times)

    for each in data:
        seconds = reduce(each, 1)
        slowest[0] = seconds
        group.allreduce([slowest], together).wait()
        if slowest.item() > SLOW_LINK_S:
            break
    else:
        seconds = min(seconds, reduce(each, TIMES - 1))
    if "nccl" in backend:
        group.abort()
    group = None
    return round(seconds * data[-1].nbytes / each.nbytes, 6)


def _best(work: Callable[[], object], device: torch.device, times: int = TIMES) -> float:
    import torch

    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        seconds.append(time.perf_counter() - began)
    return round(min(seconds), 6)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
