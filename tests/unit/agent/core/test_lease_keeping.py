"""The keeping of a lease: who is renewed in whose stead, and whose workers end before the master replaces them."""

import random

import pytest

from tests.support.agent_core import W0, Driver, launched, sent, started, wanted
from unified.protocol.agent_master import AgentRegistered, DesiredWorkers, MasterStopping, RegisterAgent
from unified_agent.core.lease import NodeLease, request_id_at
from unified_agent.core.lease_keeping import Contact, Kill, LeaseKeeping, Probe, Renew, TellAgent
from unified_agent.core.messages import LeaseLost, MasterReached, SendMaster, SignalWorker, WorkerExited

LEASE_S = 15.0


class Node:
    """An agent that is answered until `cut_at` and turns until `stopped_at`, and its keeper.

    Attributes:
        did: actions and their times.
    """

    def __init__(
        self,
        *,
        cut_at: float = 1e9,
        stopped_at: float = 1e9,
        contact: Contact = Contact.NONE,
        is_locked_out: bool = False,
    ) -> None:
        self.is_locked_out = float(is_locked_out)
        self.core = LeaseKeeping()
        self.cut_at, self.stopped_at, self.contact = cut_at, stopped_at, contact
        self.healed_at = 1e9
        self.did: list[tuple[float, object]] = []
        self.heard = [0.0]
        """Times at which the master heard of this node."""

    @property
    def renewed_at(self) -> float:
        return self.heard[-1]

    def run(self, until: float, step_s: float = 0.5) -> None:
        now = 0.0
        beat = turned = 0.0
        while now < until:
            is_cut = self.cut_at <= now < self.healed_at
            if now < self.stopped_at:
                turned = now
                if not is_cut and now - beat >= 1.0:
                    beat = now
                    self.heard.append(now)
            for action in self.core.step(now, NodeLease(LEASE_S, 1.0, beat, turned, self.is_locked_out)):
                self.did.append((now, action))
                if isinstance(action, Renew) and not is_cut:
                    self.heard.append(now)
                    self.core.answered(action.request_id)
                if isinstance(action, Probe):
                    self.core.contact(now, Contact.ACCEPTED if not is_cut else self.contact)
            now += step_s

    def first(self, kind: type) -> float | None:
        return next((at for at, action in self.did if isinstance(action, kind)), None)


def test_nothing_is_done_for_an_agent_that_is_heard() -> None:
    node = Node()
    node.run(100)
    assert node.did == []


def test_a_host_that_stood_still_loses_its_workers_and_keeps_its_agent_unless_that_hangs() -> None:
    core = LeaseKeeping()
    assert all(core.step(float(at), NodeLease(LEASE_S, 1.0, at, at)) == [] for at in range(21))
    resumed = [core.step(80.0 + at / 2, NodeLease(LEASE_S, 1.0, 20.0, 20.0)) for at in range(40)]
    killed = [(at / 2, each.who) for at, actions in enumerate(resumed) for each in actions if isinstance(each, Kill)]
    assert killed == [(0.0, "workers"), (15.5, "agent")]


def test_nothing_is_done_before_the_master_has_ever_answered() -> None:
    assert LeaseKeeping().step(1000.0, NodeLease()) == []


def test_a_busy_agent_is_spoken_for_as_long_as_a_lease() -> None:
    node = Node(stopped_at=20)
    node.run(34)
    assert {type(action) for _, action in node.did} == {Renew}
    assert node.renewed_at >= 33


def test_an_agent_that_hangs_is_killed_before_the_master_gives_it_up() -> None:
    node = Node(stopped_at=20)
    node.run(100)
    [(at, kill)] = [(at, action) for at, action in node.did if isinstance(action, Kill)]
    assert isinstance(kill, Kill)
    assert kill.who == "agent"
    assert "has done nothing for" in kill.reason
    assert node.renewed_at < at < node.renewed_at + LEASE_S


def test_a_node_that_is_cut_off_ends_its_workers_within_the_lease() -> None:
    node = Node(cut_at=20)
    node.run(60)
    told, killed = node.first(TellAgent), node.first(Kill)
    assert told is not None
    assert killed is not None
    assert node.renewed_at < told < killed < node.renewed_at + LEASE_S
    assert sum(isinstance(action, TellAgent | Kill) for _, action in node.did) == 2, "each once"


def test_a_node_that_is_cut_off_while_its_agent_is_stopped_ends_its_workers_too() -> None:
    node = Node(cut_at=20, stopped_at=18)
    node.run(60)
    killed = node.first(Kill)
    assert killed is not None
    assert node.renewed_at < killed < node.renewed_at + LEASE_S


@pytest.mark.parametrize("contact", [Contact.REFUSED, Contact.ACCEPTED])
def test_a_master_that_is_down_or_hangs_costs_no_worker(contact: Contact) -> None:
    node = Node(cut_at=20, contact=contact)
    node.run(2000)
    assert {type(action) for _, action in node.did} == {Renew, Probe}


def test_a_master_that_refuses_the_key_decides_about_the_node_so_its_workers_end_with_the_lease() -> None:
    node = Node(cut_at=20, contact=Contact.ACCEPTED, is_locked_out=True)
    node.run(60)
    told, killed = node.first(TellAgent), node.first(Kill)
    assert told is not None
    assert killed is not None
    assert node.renewed_at < told < killed < node.renewed_at + LEASE_S
    down = Node(cut_at=20, contact=Contact.REFUSED, is_locked_out=True)
    down.run(2000)
    assert down.first(Kill) is None, "a master that is down since decides nothing"


def test_a_second_cut_is_one_of_its_own() -> None:
    node = Node(cut_at=20)
    node.healed_at = 60
    node.run(61)
    node.cut_at, node.healed_at, before = 70.0, 1e9, len(node.did)
    node.run(100)
    assert any(isinstance(action, Kill) for at, action in node.did[before:] if at > 70)


@pytest.mark.parametrize("seed", range(200))
def test_no_worker_outlives_the_lease_and_none_ends_while_the_node_is_heard(seed: int) -> None:
    rng = random.Random(seed)
    node = Node(cut_at=rng.uniform(1, 40), stopped_at=rng.choice((1e9, rng.uniform(1, 40))))
    node.healed_at = node.cut_at + rng.uniform(0, 40)
    node.run(120, step_s=rng.choice((0.1, 0.3, 0.5)))
    silent_s = max(later - earlier for earlier, later in zip(node.heard, [*node.heard[1:], 120.0], strict=True))
    killed = node.first(Kill)
    assert killed is not None or silent_s < 0.9 * LEASE_S + 0.5
    assert killed is None or silent_s >= 0.9 * LEASE_S


def test_an_agent_whose_lease_ended_kills_all_and_comes_back_as_one_without_workers() -> None:
    driver = launched(wanted(W0, run=1))
    driver.step(LeaseLost(reason="cut off for 12.0 s"))
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]
    driver.step(WorkerExited(incarnation=W0, code=-9))
    driver.pass_time(1.1)
    asked = [action.message for action in driver.take() if isinstance(action, SendMaster)]
    assert {type(message) for message in asked} == {RegisterAgent}
    assert {message.cut_off for message in asked if isinstance(message, RegisterAgent)} == {"cut off for 12.0 s"}


def test_orders_from_before_the_end_of_a_lease_are_void() -> None:
    driver = launched(wanted(W0, run=1))
    driver.step(LeaseLost(reason="cut off for 12.0 s"))
    driver.step(WorkerExited(incarnation=W0, code=-9))
    driver.desire(wanted(W0._replace(number=1)))
    assert started(driver.take()) == []
    driver.step(MasterReached())
    assert sent(driver.take()) == ["RegisterAgent"]
    driver.hear(AgentRegistered(lease_s=15, heartbeat_s=1))
    driver.pass_time(0.1)
    assert started(driver.take()) == [], "what was desired before is not desired now"
    driver.hear(DesiredWorkers(generation=1, workers=[], jobs=[]))
    driver.desire(wanted(W0._replace(number=2)))
    assert started(driver.take()) == [W0._replace(number=2)]


def test_the_lease_counts_from_the_sending_of_what_was_answered() -> None:
    driver = Driver()
    assert driver.core.membership.lease(driver.now).lease_s == 0, "no answer has said which request it is to"
    driver.core.membership.answered(request_id_at(98.5))
    driver.core.membership.answered(request_id_at(97.0))
    assert driver.core.membership.lease(driver.now) == NodeLease(15, 1, 98.5, driver.now)
    driver.core.membership.answered(request_id_at(1e9))
    assert driver.core.membership.lease(driver.now).answered_at <= driver.now, "a strange number is no longer lease"


def test_a_master_that_stops_in_order_leaves_the_workers_their_time() -> None:
    driver = launched(wanted(W0, run=1))
    driver.core.membership.answered(request_id_at(99))
    driver.take()
    driver.hear(MasterStopping(away_s=300))
    assert sent(driver.take()) == ["AgentHeartbeat"], "the master waits for an answer"
    lease = driver.core.membership.lease(driver.now)
    keeper = LeaseKeeping()
    assert keeper.step(driver.now + 285, lease._replace(turned_at=driver.now + 285)) == []
    late = keeper.step(driver.now + 299, lease._replace(turned_at=driver.now + 299))
    assert any(isinstance(action, Kill) for action in late)
    driver.hear(AgentRegistered(lease_s=15, heartbeat_s=1))
    assert driver.core.membership.lease(driver.now).answered_at == 99, "a master is there again"
