"""The master under seeded random faults: its invariants hold after every step, all ends well when the faults end,
and what it saved is all that it knew.
"""

import msgspec
import pytest

from tests.support.master import simple
from tests.support.sim.chaos import FAILURES, Chaos
from unified.job.spec import JobSpec
from unified.protocol.client_master import SubmitJob
from unified.protocol.records import Stage
from unified_master.core.master import MasterCore
from unified_master.core.state import WorkerRecord
from unified_simulator.invariants.master import check


@pytest.mark.parametrize("is_real", [False, True], ids=["stand-in", "real-agents"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_invariants_hold_and_all_jobs_end(seed: int, is_real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:  # work in batches, as in a large cluster
        monkeypatch.setattr("unified_master.core.step.BATCH_FROM", 1)
    chaos = Chaos(seed, is_real=is_real)
    chaos.run(220)
    chaos.calm()
    chaos.check_names()
    for _ in range(20):
        chaos.claim()
    chaos.check_names()
    chaos.finish_all()
    chaos.check_end()


@pytest.mark.parametrize("is_real", [False, True], ids=["stand-in", "real-agents"])
@pytest.mark.parametrize("seed", range(20))
def test_of_many_that_claim_a_name_at_once_one_gets_it(seed: int, is_real: bool) -> None:
    """On slow and quick connections, while the master is killed, and again when the holder has died."""
    chaos = Chaos(seed, is_real=is_real)
    chaos.world.run(1.0)
    spec = JobSpec(name="contest", roles=[simple("r", 9)], failover_exec=2, stop_grace_s=0)
    chaos.world.ask(SubmitJob(spec=spec))
    for _ in range(4):
        chaos.world.until_stage("contest", Stage.RUNNING)
        chaos.world.run(10.0)
        claimants = chaos.living()
        assert len(claimants) == 9
        chaos.rng.shuffle(claimants)
        for number, (job, worker, agent) in enumerate(claimants):
            chaos.world.say(agent.node, agent.claim(job.job_id, worker.name, ["x"]))
            chaos.world.run(chaos.rng.choice((0.0, 0.0, 0.001)))
            if number == 4 and seed % 2:
                chaos.world.restart_master()
        chaos.check_names()
        job = chaos.world.job("contest")
        refused = [worker.name for worker in job.workers.values() if "x" in worker.refused]
        assert sorted([*refused, job.holders["x"]]) == sorted(job.workers)
        for job, worker, agent in chaos.living():
            if worker.name == job.holders["x"]:
                chaos.world.say(agent.node, agent.end(job.job_id, worker.name, FAILURES[0]))
            else:
                chaos.world.say(agent.node, agent.claim(job.job_id, worker.name, []))


@pytest.mark.parametrize("seed", range(100, 103))
def test_a_restored_master_knows_what_the_old_one_knew(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(25):
        chaos.run(5)
        old = chaos.world.core.cluster
        core = MasterCore(chaos.world.intervals)
        records = [(kind, key, data) for (kind, key), data in chaos.world.stored.items()]
        core.restore(chaos.world.now, records, chaos.world.log)
        new = core.cluster
        assert check(new) == []
        assert new.term == old.term + 1
        assert new.next_sequence == old.next_sequence
        assert {name: node.state for name, node in new.nodes.items()} == {n: o.state for n, o in old.nodes.items()}
        assert list(new.jobs) == list(old.jobs)
        for job_id, job in new.jobs.items():
            assert job.spec == old.jobs[job_id].spec
            assert job.holders == old.jobs[job_id].holders
            if job.is_waiting:  # says now that no node has come back yet
                job.reason = old.jobs[job_id].reason
            before, after = old.jobs[job_id].account, job.account
            assert after.is_whole is before.is_whole, "what steps have said is not saved by itself"
            assert sum(after.spent.seconds.values()) == pytest.approx(after.spent.since - job.submitted_at)
            job.account = before
            assert job.saved() == old.jobs[job_id].saved()
            known = {name: _lasting(worker) for name, worker in old.jobs[job_id].workers.items()}
            assert {name: _lasting(worker) for name, worker in job.workers.items()} == known
            assert [name for name in job.workers if name != "store"] == [name for name in known if name != "store"]
            story = list(old.events.get(job_id, ()))
            assert list(new.events.get(job_id, ()))[: len(story)] == story


def _lasting(worker: WorkerRecord) -> WorkerRecord:
    """Progress is not kept: it comes again with the next report."""
    return msgspec.structs.replace(worker, progress=None)
