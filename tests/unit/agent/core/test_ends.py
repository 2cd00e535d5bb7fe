"""Words for the end of a process: who sent the signal, the memory, the last words."""

from signal import SIGABRT, SIGKILL, SIGSEGV, SIGTERM
from typing import Any

import pytest

from tests.support.agent_core import W0, launched, wanted
from unified.protocol.records import Evidence, Failure, MemorySample
from unified.protocol.worker_agent import Failed, Running
from unified_agent.core.ends import how
from unified_agent.core.messages import WorkerExited

FAULT = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/job/train.py", line 3 in boom
  File "/job/train.py", line 9 in main
"""
COUNTED = Evidence(is_memory_counted=True)


@pytest.mark.parametrize(
    ("code", "evidence", "words"),
    [
        (-SIGKILL, COUNTED, ", which its agent did not send; the kernel counted no out-of-memory kill"),
        (-SIGKILL, Evidence(), ", which its agent did not send; out-of-memory kills cannot be read on this node"),
        (-SIGKILL, Evidence(killed_for="it reads nothing"), ": it reads nothing"),
        (-SIGKILL, Evidence(out_of_memory="R", peak_mb=9), ", out of memory: R; it had 9 MB of memory at most"),
        (-SIGKILL, Evidence(out_of_memory_here="H"), ", which its agent did not send; maybe out of memory: H"),
        (-SIGTERM, COUNTED, ", which its agent did not send"),
        (-SIGSEGV, COUNTED, ""),
        (3, COUNTED, ""),
    ],
)
def test_the_sender_of_a_signal_as_far_as_it_is_known(code: int, evidence: Evidence, words: str) -> None:
    assert how(WorkerExited(incarnation=W0, code=code, evidence=evidence)) == words


@pytest.mark.parametrize(
    ("samples", "peak_mb", "words"),
    [
        ([(50, 100), (5, 104)], 105, "; it had 105 MB of memory"),
        ([(50, 100), (5, 900)], 3900, "; it had 100 MB of memory 50 s before, and 3900 MB at most"),
        ([(50, 100), (5, 900)], 0, "; it had 100 MB of memory 50 s before, and 900 MB at most"),
        ([], 0, ""),
    ],
)
def test_the_memory_of_the_last_minute(samples: list[tuple[float, float]], peak_mb: float, words: str) -> None:
    memory = [MemorySample(*sample) for sample in samples]
    evidence = Evidence(out_of_memory="R", memory=memory, peak_mb=peak_mb)
    assert how(WorkerExited(incarnation=W0, code=-SIGKILL, evidence=evidence)) == f", out of memory: R{words}"


@pytest.mark.parametrize(
    ("lines", "error", "words"),
    [
        ("a warning\n\nno license found\n", "", "; its last output: no license found"),
        ("x" * 500, "", f"; its last output: {'x' * 160}"),
        (FAULT, "", '; its last output: File "/job/train.py", line 3 in boom'),
        ("no license found", "ValueError: no", ""),
        ("", "", ""),
    ],
)
def test_the_last_words(lines: str, error: str, words: str) -> None:
    for code in (3, -SIGABRT):
        assert how(WorkerExited(incarnation=W0, code=code, last_lines=lines, error=error, evidence=COUNTED)) == words


def ended(**facts: Any) -> Failure:
    driver = launched(wanted(W0, run=1))
    driver.say(W0, Running(round=1))
    if "said" in facts:
        driver.say(W0, Failed(failure=facts.pop("said")))
    driver.step(WorkerExited(incarnation=W0, **facts))
    failure = driver.observed()[f"{W0.worker}#0"].failure
    assert failure is not None
    return failure


def test_an_end_for_want_of_memory_is_a_category_of_its_own() -> None:
    failure = ended(code=-SIGKILL, evidence=Evidence(out_of_memory="R"))
    assert (failure.category, failure.summary) == ("oom", "killed by SIGKILL, out of memory: R")
    assert ended(code=-SIGKILL, evidence=COUNTED).category == "crash"


def test_a_failure_that_the_worker_told_itself_has_evidence_too() -> None:
    said = Failure(summary="MemoryError", exception_type="MemoryError")
    failure = ended(code=1, evidence=Evidence(peak_mb=9), said=said)
    assert (failure.summary, failure.category, failure.evidence) == ("MemoryError", "user", Evidence(peak_mb=9))
