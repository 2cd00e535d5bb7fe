"""Nodes: agents that register, renew their leases, leave and are lost."""

from __future__ import annotations

import math
import re

import msgspec

from unified.protocol import agent_master
from unified.protocol.client_master import Refused
from unified.protocol.records import NODE_MOVES, NodeState
from unified.values import Value
from unified_master.core import copy_nodes, desired
from unified_master.core.changes import ChangedPart
from unified_master.core.rounds import exclusion, moving, recovery
from unified_master.core.state import NodeRecord
from unified_master.core.step import MasterStep, count

FORGET_S = 3600.0
"""Time for which a lost node is shown."""
GRACE_LEASES = 3
"""Number of leases in which nodes must come back after a restart of the master."""
GRACE_HEARTBEATS = 3
"""Number of further heartbeats that an agent may miss because the master itself was late."""
MAX_REPLACED = 16
REBORN = "its agent was started again"
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


class NodeMemory(Value, frozen=True, kw_only=True):
    """The part of a node's record that the store keeps."""

    info: agent_master.RegisterAgent
    state: NodeState
    reason: str
    drained: str | None = None
    check: str = ""


def register(step: MasterStep, peer: bytes, request_id: int, info: agent_master.RegisterAgent) -> None:
    """Register an agent, or tell it why not."""
    known = step.cluster.nodes.get(info.node)
    refusal = _refusal(known, info)
    if refusal:
        step.report("agent-refused", refusal, node=info.node)
        step.send(peer, agent_master.AgentRefused(reason=refusal), request_id)
        return
    loss = ""
    if known is not None and known.state is NodeState.ALIVE:
        loss = REBORN if known.info.incarnation != info.incarnation else info.cut_off
    if known is not None and loss:
        _mark_lost(step, known, loss)
    node = _join(step, known, info, peer)
    if loss:
        _recover(step, node, loss)  # after the join, so that its workers may come back to it
    copy_nodes.on_change(step, node)
    step.cluster.leases.renew(node.name, step.now)
    times, relay = step.cluster.intervals, step.cluster.relay
    step.send(
        peer,
        agent_master.AgentRegistered(lease_s=times.lease_s, heartbeat_s=times.heartbeat_s, relay=relay),
        request_id,
    )
    step.touch_node(node.name)
    step.wants_schedule = True


def heartbeat(step: MasterStep, peer: bytes, request_id: int, message: agent_master.AgentHeartbeat) -> None:
    """Renew a lease; send the desired set again if the agent seems to have missed it."""
    node = renew(step, message.node, message.incarnation)
    if node is None:
        step.send(peer, agent_master.RegisterAgain(), request_id)
        return
    step.send(peer, agent_master.HeartbeatSeen(), request_id)
    if node.peer != peer:
        # A new connection: messages in transit on the old one may be lost, in both directions.
        node.peer = peer
        node.notified.clear()
        step.send(peer, agent_master.RegisterAgain())
    elif message.generation < node.generation and step.now - node.sent_at > 2 * step.cluster.intervals.heartbeat_s:
        desired.send_again(step, node)
    catch_up(step, node, message.generation)
    if message.stops and not node.stops:
        _vacate(step, node, message.stops, message.stops_in_s)


def pulse(step: MasterStep, peer: bytes, request_id: int, message: agent_master.AgentPulse) -> None:
    """Renew the lease of a busy agent, whose lease keeper sends this message."""
    if renew(step, message.node, message.incarnation) is not None:
        step.send(peer, agent_master.HeartbeatSeen(), request_id)


def died(step: MasterStep, peer: bytes, request_id: int, message: agent_master.AgentDied) -> None:
    """Mark the node of an ended agent process as lost. A message about an earlier agent changes nothing."""
    node = step.cluster.nodes.get(message.node)
    if node is not None and node.state is NodeState.ALIVE and node.info.incarnation == message.incarnation:
        lose(step, node, message.reason)
    step.send(peer, agent_master.HeartbeatSeen(), request_id)


def renew(step: MasterStep, name: str, incarnation: str) -> NodeRecord | None:
    """Renew the lease of the node that sent a message, and return the node; None if it must register (again)."""
    node = step.cluster.nodes.get(name)
    if node is None or not node.is_connected or node.info.incarnation != incarnation:
        return None
    node.seen_at = step.now
    step.cluster.leases.renew(name, step.now)
    return node


def catch_up(step: MasterStep, node: NodeRecord, generation: int) -> None:
    """Go past the generation of an agent that is ahead, since its master lost its state: else it would ignore us."""
    if generation > node.generation:
        node.generation = generation
        node.notified.clear()
        step.touch_node(node.name)


def leave(step: MasterStep, message: agent_master.AgentLeaving) -> None:
    """Mark the node of an agent that stopped in order as lost; its workers are gone."""
    node = renew(step, message.node, message.incarnation)
    if node is not None:
        lose(step, node, f"its agent stopped: {message.reason}")


def expire(step: MasterStep, name: str, late_s: float = 0.0) -> None:
    """Mark a node whose lease ran out as lost.

    The master itself may be `late_s` behind (its process was stopped, its host is busy, its disk hung). Messages of the
    agent may then be in transit, so the lease is extended by that time and some heartbeats, once in each silence.
    """
    node = step.cluster.nodes[name]
    if node.state is not NodeState.ALIVE:
        return
    heartbeat_s = step.cluster.intervals.heartbeat_s
    if late_s > heartbeat_s and node.grace_at != node.seen_at:
        node.grace_at = node.seen_at
        step.cluster.leases.renew(name, step.now, lease_s=late_s + GRACE_HEARTBEATS * heartbeat_s)
        return
    lose(step, node, f"nothing was heard from its agent for {step.now - node.seen_at:.1f} s")


def stop(step: MasterStep) -> None:
    """Let agents keep their workers while no master runs, and save until when they do."""
    until = step.now + step.cluster.intervals.away_s
    step.save("meta", "away_until", repr(until).encode())
    for node in step.cluster.nodes.values():
        if node.is_connected:
            step.send(node.peer, agent_master.MasterStopping(away_s=step.cluster.intervals.away_s))


def lose(step: MasterStep, node: NodeRecord, reason: str) -> None:
    """Mark a node as lost, with all that ran on it, and recover."""
    _mark_lost(step, node, reason)
    _recover(step, node, reason)


def _mark_lost(step: MasterStep, node: NodeRecord, reason: str) -> None:
    node.state = NODE_MOVES.check(node.name, node.state, NodeState.LOST)
    node.reason = reason
    node.is_registered = node.has_reported = False
    step.cluster.leases.drop(node.name)
    step.cluster.timers.arm(("forget", node.name), step.now + FORGET_S)
    step.report("node-lost", reason, node=node.name)
    remember(step, node)
    for incarnation in list(node.leaving):  # the next incarnation may wait for this end
        step.to_advance[incarnation.job_id] = None
        step.cluster.remove_leaving(node, incarnation)
    step.cluster.num_node_changes += 1
    copy_nodes.on_change(step, node)
    step.touch_ending_jobs()
    _answer_reads(step, node, reason)
    step.wants_schedule = True


def _recover(step: MasterStep, node: NodeRecord, reason: str) -> None:
    """Replace the workers that were lost with the node, oldest job first."""
    for job in sorted(step.cluster.jobs.values(), key=lambda job: job.sequence):
        if any(worker.node == node.name for worker in job.workers.values()):
            recovery.on_node_lost(step, job, node, reason)


def drain(step: MasterStep, name: str, reason: str, *, is_over: bool = False) -> None:
    """Take a node out of service, with a reason, or put it back."""
    node = step.cluster.nodes[name]
    if (node.drained is None) is is_over:
        return
    node.drained = None if is_over else reason
    step.cluster.num_node_changes += 1
    remember(step, node)
    copy_nodes.on_change(step, node)
    step.wants_schedule = True
    if is_over:
        step.report("node-undrained", f"it is in service again: {reason}", node=name)
        if node.state is NodeState.LOST:
            step.cluster.timers.arm(("forget", name), step.now + FORGET_S)
        return
    step.report("node-drained", reason, node=name)
    _move_away(step, node, step.cluster.intervals.change_s)


def _vacate(step: MasterStep, node: NodeRecord, reason: str, within_s: float) -> None:
    """Take a node out of service whose agent stops in `within_s` seconds, with all workers that are still there."""
    node.stops = reason
    step.show_node(node.name)
    step.wants_schedule = True
    step.report("node-stops", f"its agent stops: {reason}; its workers have {within_s:g} s to move", node=node.name)
    _move_away(step, node, min(within_s, step.cluster.intervals.change_s))


def _move_away(step: MasterStep, node: NodeRecord, within_s: float) -> None:
    for job in sorted(step.cluster.jobs.values(), key=lambda job: job.sequence):
        moving.move_away(step, job, node, within_s)


def forget(step: MasterStep, name: str) -> None:
    """Drop a node that was lost long ago. A drained node is kept until it is put back."""
    node = step.cluster.nodes.get(name)
    if node is not None and node.state is NodeState.LOST and node.drained is None:
        step.cluster.hosts.get(node.info.host_id, set()).discard(name)
        del step.cluster.nodes[name]
        step.cluster.changes.remove(ChangedPart("node", "", name))
        step.save("node", name, None)


def remember(step: MasterStep, node: NodeRecord) -> None:
    info = msgspec.structs.replace(node.info, snapshots=None)  # they have a secret, which is never saved
    memory = NodeMemory(info=info, state=node.state, reason=node.reason, drained=node.drained, check=node.check)
    step.save("node", node.name, msgspec.msgpack.encode(memory))
    step.show_node(node.name)


def _refusal(known: NodeRecord | None, info: agent_master.RegisterAgent) -> str:
    """Return why an agent may not register; empty if it may."""
    if not _NODE_NAME.match(info.node):
        return f"node id {info.node[:64]!r} is not allowed: at most 63 letters, digits and ._- only."
    amounts = [info.resources.cpu, info.resources.memory_mb, info.resources.disk_mb]
    amounts += info.resources.user_defined.values()
    if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
        return f"node {info.node} offers an amount of a resource that is not a number from 0 upwards."
    indices = [device.index for device in info.resources.devices]
    if len(set(indices)) != len(indices) or any(index < 0 for index in indices):
        return f"node {info.node} lists two devices with one index, or a negative index."
    if known is not None and info.incarnation in known.replaced:
        return (
            f"node id {info.node} was taken over by the agent on {known.info.hostname} with pid {known.info.pid}: "
            f"this one, with pid {info.pid}, must end. Give each agent its own --node-id."
        )
    is_other_host = known is not None and known.info.host_id != info.host_id
    if known is not None and known.state is NodeState.ALIVE and is_other_host:
        return (
            f"node id {info.node} is taken by the agent on {known.info.hostname} (pid {known.info.pid}), "
            f"which is alive: give this one, on {info.hostname}, another --node-id."
        )
    return ""


def _join(step: MasterStep, known: NodeRecord | None, info: agent_master.RegisterAgent, peer: bytes) -> NodeRecord:
    """Return the record of a node that registers, brought up to date."""
    node = known or NodeRecord(info=info, generation=step.cluster.first_number)
    step.cluster.nodes[info.node] = node
    if node.state is NodeState.LOST:
        node.state = NODE_MOVES.check(node.name, node.state, NodeState.ALIVE)
    is_news = not node.is_registered
    if node.info.incarnation != info.incarnation:
        node.replaced = [*node.replaced, node.info.incarnation][-MAX_REPLACED:]
    if known is None or node.info.incarnation != info.incarnation:
        node.has_reported = True  # a new incarnation of an agent has no workers
        node.stops = ""
        exclusion.on_agent_started(step, info.node)
    node.info = info
    node.capacities.clear()
    step.cluster.num_node_changes += 1
    step.cluster.hosts.setdefault(info.host_id, set()).add(node.name)
    node.peer = peer
    node.notified.clear()
    node.seen_at = step.now
    node.is_registered = True
    node.reason = ""
    step.cluster.timers.cancel(("forget", node.name))
    remember(step, node)
    if is_news:
        offer = info.resources
        devices = count(len(offer.devices), "device")
        text = f"{info.hostname} at {info.address}: {offer.cpu:g} CPU cores, {offer.memory_mb:.0f} MB, {devices}"
        step.report("node-joined", text, node=node.name)
    return node


def _answer_reads(step: MasterStep, node: NodeRecord, reason: str) -> None:
    """Refuse the reads that wait for this node's agent."""
    for number, read in list(step.cluster.reads.items()):
        if read.node == node.name:
            del step.cluster.reads[number]
            step.cluster.timers.cancel(("read", str(number)))
            text = f"the log of {read.incarnation.worker} is on node {node.name}, which was lost: {reason}."
            step.send(read.peer, Refused(code="unavailable", reason=text), read.request_id)
