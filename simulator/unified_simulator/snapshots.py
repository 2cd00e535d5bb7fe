"""Snapshots in the memory of simulated nodes. After every restore: the newest state was found, or its loss was said.

The agreement of the ranks and the nodes that the master names are the real ones. Servers and copies are a model: a copy
is there at once, or never. Snapshots do not expire.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from unified.protocol.agent_master import DesiredJob, RunOrder
from unified.protocol.snapshots import (
    NO_STAMP,
    HeldElsewhere,
    HeldSnapshot,
    RankReport,
    ServerAddress,
    SnapshotAgreement,
    SnapshotStamp,
)
from unified.snapshot.core.agreement import agree, partner_of
from unified_simulator.agent import SimulatedAgent

Role = tuple[str, str]
"""Job and role."""


class _Rank(msgspec.Struct, frozen=True):
    """Place of one rank in a round."""

    agent: SimulatedAgent
    order: RunOrder


class _RoleState(msgspec.Struct):
    """Newest state of a role that no loss of one node takes away, and the round that goes on from there."""

    stamp: SnapshotStamp = NO_STAMP
    world_size: int = 0
    round: int = -1
    """Last round whose ranks have restored."""
    step: int = 0


class SimulatedSnapshots:
    """Snapshots of all elastic roles, in the memory of the agents' nodes.

    Args:
        agents: by node.
        silent: nodes that others cannot reach.
    """

    def __init__(self, agents: Mapping[str, object], silent: set[str]) -> None:
        self._agents = agents
        self._silent = silent
        self._held: dict[SimulatedAgent, dict[Role, list[HeldSnapshot]]] = defaultdict(lambda: defaultdict(list))
        self._roles: dict[Role, _RoleState] = defaultdict(_RoleState)
        self.num_restored = 0
        """Restores that found a state."""

    def advance(self, role: Role, ranks: list[_Rank], *, is_whole: bool) -> None:
        """Let a round restore if it has not yet; then let its ranks take a snapshot, some of them or all."""
        state = self._roles[role]
        servers = [self._server(role, each.agent) for each in ranks]
        order = ranks[0].order
        if state.round < order.round:
            self._restore(role, ranks, servers)
        elif is_whole:
            state.step += 1
            state.stamp, state.world_size = SnapshotStamp(order.round, state.step), len(ranks)
            for rank in range(len(ranks)):
                self._write(role, ranks, servers, rank, with_copy=True)
        else:  # the round breaks before all ranks have this one
            self._write(role, ranks, servers, 0, with_copy=False, ahead=1)

    def check(self) -> None:
        """Let all rounds whose ranks run restore."""
        for role, ranks in self.rounds():
            if self._roles[role].round < ranks[0].order.round:
                self.advance(role, ranks, is_whole=True)

    def rounds(self) -> list[tuple[Role, list[_Rank]]]:
        """Return the rounds of which all ranks run and reach one another, and their ranks."""
        found: dict[tuple[Role, int], dict[int, _Rank]] = defaultdict(dict)
        for agent in filter(None, map(self._reached, self._agents)):
            for process in agent.incarnations.values():
                order, launch = process.order, process.launch
                if order is None or not order.store_host or not process.is_running or process.left_round >= order.round:
                    continue
                role = launch.job_id, launch.role
                found[role, order.round][order.rank] = _Rank(agent, order)
        return [
            (role, [ranks[rank] for rank in range(len(ranks))])
            for (role, _), ranks in sorted(found.items(), key=lambda item: item[0])
            if len(ranks) == next(iter(ranks.values())).order.world_size > 1  # a lone rank has no copies
        ]

    def _restore(self, role: Role, ranks: list[_Rank], servers: list[ServerAddress]) -> None:
        state, order = self._roles[role], ranks[0].order
        nodes = [each.agent.node for each in ranks]
        reports = [
            RankReport(
                server=servers[rank],
                held=self._held[each.agent][role] if nodes.index(each.agent.node) == rank else [],
                elsewhere=self._elsewhere(role, each.agent) if rank == 0 else [],
            )
            for rank, each in enumerate(ranks)
        ]
        found = agree(reports, *role)
        self._check(role, len(ranks), found)
        stamp = NO_STAMP if found.snapshot is None else found.snapshot.stamp
        self.num_restored += found.snapshot is not None
        for each in ranks:  # later snapshots are dropped on the nodes of the round
            self._held[each.agent][role] = [held for held in self._held[each.agent][role] if held.stamp <= stamp]
        for rank, source in enumerate(found.sources):
            held = HeldSnapshot(world_size=len(ranks), rank=rank, stamp=stamp, length=1, is_copy=source.is_copy)
            if source.server is not None and source.server.node != nodes[rank]:
                self._keep(ranks[rank].agent, role, held, floor=stamp)
        state.round, state.stamp, state.world_size = order.round, stamp, len(ranks)
        state.step = max(stamp.step, 0)

    def _check(self, role: Role, world_size: int, found: SnapshotAgreement) -> None:
        """AssertionError unless the ranks found the newest state, or were told that it is lost."""
        newest = self._roles[role]
        chosen = NO_STAMP if found.snapshot is None else found.snapshot.stamp
        what = f"{'/'.join(role)} of {world_size} ranks took {chosen} ({found.note or 'and nothing was said'})"
        there = self._complete(role, world_size)
        best = max(there, default=NO_STAMP)
        assert chosen >= best, f"{what}, and living nodes hold {best}"
        is_said = found.note or found.snapshot is None
        assert is_said or chosen >= newest.stamp, f"{what}, and {newest.stamp} of {newest.world_size} ranks is lost"

    def _complete(self, role: Role, world_size: int) -> set[SnapshotStamp]:
        """Return the snapshots that living, reachable nodes hold for every rank."""
        ranks: dict[SnapshotStamp, set[int]] = defaultdict(set)
        for agent, held in self._held.items():
            if self._reached(agent.node) is agent:
                for each in held[role]:
                    if each.world_size == world_size:
                        ranks[each.stamp].add(each.rank)
        return {stamp for stamp, found in ranks.items() if len(found) == world_size}

    def _elsewhere(self, role: Role, asker: SimulatedAgent) -> list[HeldElsewhere]:
        """Return what the nodes answer that the master has named to the agent of rank 0."""
        job = asker.jobs.get(role[0], DesiredJob(job_id=role[0]))
        asked = [(each.server, each.round) for each in job.earlier_nodes if each.role == role[1]]
        if job.copy_node is not None:
            asked.append((job.copy_node, -1))
        answers = []
        for server, last_round in asked:
            agent = self._reached(server.node)
            if agent is not None and self._server(role, agent) == server:
                answers.append(HeldElsewhere(server, held=self._held[agent][role]))
            else:  # an agent that was started again has another token
                answers.append(HeldElsewhere(server, lost_round=last_round))
        return answers

    def _write(
        self,
        role: Role,
        ranks: list[_Rank],
        servers: list[ServerAddress],
        rank: int,
        *,
        with_copy: bool,
        ahead: int = 0,
    ) -> None:
        state, agent = self._roles[role], ranks[rank].agent
        stamp = SnapshotStamp(state.round, state.step + ahead)
        floor = state.stamp
        self._keep(agent, role, HeldSnapshot(world_size=len(ranks), rank=rank, stamp=stamp, length=1), floor=floor)
        partner = partner_of(rank, servers)
        if len({server.node for server in servers}) == 1 and (job := agent.jobs.get(role[0])) is not None:
            partner = job.copy_node
        other = None if partner is None else self._reached(partner.node)
        if with_copy and other is not None:
            copy = HeldSnapshot(world_size=len(ranks), rank=rank, stamp=stamp, length=1, is_copy=True)
            self._keep(other, role, copy, floor=floor)

    def _keep(self, agent: SimulatedAgent, role: Role, new: HeldSnapshot, *, floor: SnapshotStamp) -> None:
        """Keep a snapshot on a node; of its series, only the floor stays beside it."""
        series = (new.world_size, new.rank, new.is_copy)
        held = self._held[agent][role]
        rest = [each for each in held if (each.world_size, each.rank, each.is_copy) != series or each.stamp == floor]
        self._held[agent][role] = [*(each for each in rest if each.stamp != new.stamp or each.rank != new.rank), new]

    def _reached(self, node: str) -> SimulatedAgent | None:
        agent = self._agents.get(node)
        return agent if isinstance(agent, SimulatedAgent) and node not in self._silent else None

    def _server(self, role: Role, agent: SimulatedAgent) -> ServerAddress:
        assert agent.snapshots is not None
        return agent.snapshots.address(agent.node, role[0])
