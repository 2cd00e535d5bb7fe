"""Evidence of ends, from a made-up /proc."""

import os
from pathlib import Path

import pytest

from tests.support.agent_core import W0
from unified.config import cgroups
from unified.protocol.records import Evidence, MemorySample
from unified_agent.measure.evidence import SAMPLE_S, EvidenceCollector, ProcessEnd

KILLED = ProcessEnd(-9, peak_kb=4096)


class Host:
    """A process, its memory and its control group, as files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.group, self.proc, self.vmstat = root / "group", root / "proc", root / "vmstat"
        (self.proc / "7").mkdir(parents=True)
        self.group.mkdir()
        monkeypatch.setattr("unified_agent.measure.evidence._HOST", self.vmstat)
        monkeypatch.setattr(cgroups, "_groups", lambda proc: iter([self.group]))
        self.count("memory.events", 2)
        self.vmstat.write_text("nr_free 5\noom_kill 4\n")
        self.memory(10)
        (self.proc / "7" / "cgroup").write_text("0::/group\n")

    def memory(self, mb: int) -> None:
        (self.proc / "7" / "statm").write_text(f"9999 {mb * 2**20 // os.sysconf('SC_PAGE_SIZE')} 1 1 0 1 0\n")

    def count(self, name: str, number: int) -> None:
        (self.group / name).write_text(f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {number}\n")

    def collector(self) -> EvidenceCollector:
        return EvidenceCollector(lambda: self.now, proc=self.proc, kernel_log=self.proc / "none")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_the_memory_of_the_last_minute_is_kept(host: Host) -> None:
    evidence = host.collector()
    assert evidence.next_deadline is None
    evidence.began(W0, 7)
    for mb in range(11, 40):
        assert evidence.next_deadline == host.now + SAMPLE_S
        host.now += SAMPLE_S
        host.memory(mb)
        evidence.sample()
    host.now += 1
    found = evidence.ended(W0, KILLED)
    assert found.memory == [MemorySample(1.0 + SAMPLE_S * age, 39 - age) for age in range(11, -1, -1)]
    assert (found.peak_mb, found.out_of_memory, found.is_memory_counted) == (4, "", True)
    host.now += SAMPLE_S
    evidence.sample()
    assert evidence.next_deadline is None


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_a_kill_that_its_control_group_counts(host: Host, name: str) -> None:
    (host.group / "memory.events").unlink()
    host.count(name, 2)
    evidence = host.collector()
    evidence.began(W0, 7)
    host.count(name, 3)
    found = evidence.ended(W0, KILLED).out_of_memory
    assert found == f"the kernel's out-of-memory kills of its control group {host.group} rose from 2 to 3"


def test_a_kill_that_only_the_host_counts_may_be_anybodys(host: Host) -> None:
    evidence = host.collector()
    evidence.began(W0, 7)
    host.vmstat.write_text("oom_kill 5\n")
    found = evidence.ended(W0, KILLED)
    assert found.out_of_memory == ""
    assert found.out_of_memory_here == "the kernel's out-of-memory kills of this host rose from 4 to 5"


@pytest.mark.parametrize("end", [ProcessEnd(-9, killed_for="it reads nothing"), ProcessEnd(-15), ProcessEnd(1)])
def test_only_a_kill_that_the_agent_did_not_send_may_be_the_kernels(host: Host, end: ProcessEnd) -> None:
    evidence = host.collector()
    evidence.began(W0, 7)
    host.count("memory.events", 3)
    found = evidence.ended(W0, end)
    assert (found.out_of_memory, found.killed_for) == ("", end.killed_for)


def test_a_kill_long_ago_is_no_evidence(host: Host) -> None:
    evidence = host.collector()
    evidence.began(W0, 7)
    host.count("memory.events", 3)
    host.vmstat.write_text("oom_kill 5\n")
    host.now += SAMPLE_S
    evidence.sample()
    assert evidence.ended(W0, KILLED).out_of_memory == ""


def test_nothing_has_to_be_readable(host: Host) -> None:
    host.vmstat.unlink()
    (host.group / "memory.events").unlink()
    evidence = host.collector()
    evidence.began(W0, 8)
    evidence.sample()
    assert evidence.ended(W0, ProcessEnd(-9)) == Evidence()
    assert evidence.ended(W0, ProcessEnd(-9)) == Evidence()
    evidence.close()


@pytest.mark.parametrize(("pid", "is_named"), [(7, True), (8, False)])
def test_the_kernels_own_record_is_the_best_evidence(
    host: Host, pid: int, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it can be read and does not name the process, another one's kill on this host is no hint."""
    read, write = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setattr("unified_agent.measure.evidence._open_at_end", lambda path: read)
    evidence = host.collector()
    evidence.began(W0, 7)
    killed = f"Killed process {pid} (python) total-vm:9kB, anon-rss:8kB, UID:0 pgtables:196kB oom_score_adj:0"
    os.write(write, f"4,1186,47666564925,-;Memory cgroup out of memory: {killed}\n SUBSYSTEM=x\n".encode())
    host.vmstat.write_text("oom_kill 5\n")
    found = evidence.ended(W0, KILLED)
    record = "Memory cgroup out of memory: killed process 7 (python) total-vm:9kB, anon-rss:8kB"
    assert (found.out_of_memory, found.out_of_memory_here) == (record if is_named else "", "")
    evidence.close()
    os.close(write)
