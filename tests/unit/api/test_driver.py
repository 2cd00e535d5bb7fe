"""`DLJob.submit`: what reaches the client."""

import os
from functools import partial
from typing import Any, assert_type

import pytest

import unified.client.submission
from unified.api import driver
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle
from unified.errors import JobError, JobNameError, OptionError, UsageError
from unified.job import JobConfig
from unified.job.driver import Driver
from unified.job.spec import JobSpec
from unified.job.to_spec import to_spec


class Submission:
    """Stands for `run_job` and `submit_job`, and keeps what they were given."""

    spec: JobSpec
    options: dict[str, Any]

    def __call__(self, spec: JobSpec, **options: Any) -> int:
        self.spec, self.options = spec, options
        return 7


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Submission:
    for name in [name for name in os.environ if "UNIFIED_" in name]:
        monkeypatch.delenv(name)
    submission = Submission()
    monkeypatch.setattr(unified.client.submission, "run_job", partial(submission, blocking=True))
    monkeypatch.setattr(unified.client.submission, "submit_job", partial(submission, blocking=False))
    return submission


JOB = DLJobBuilder().node_num(2).device_per_node(4).config({"a": 1}).train("m.f").build()


def test_a_name_and_nothing_else(sent: Submission) -> None:
    assert JOB.submit("x") == 7
    assert (sent.spec.name, sent.spec.node_num, sent.spec.device_per_node) == ("x", 2, 4)
    assert sent.options == {"master": None, "blocking": True, "wait": True}


def test_a_type_checker_knows_what_a_submit_gives(sent: Submission) -> None:
    config = JobConfig(job_name="x", dl_config=JOB)
    assert_type(driver.submit(config), int)
    assert_type(driver.submit(config, blocking=False), JobHandle)


def test_the_name_as_a_keyword_and_other_options(sent: Submission) -> None:
    JOB.submit(job_name="y", blocking=False, master="tcp://h:1", wait=False, master_memory=128, stop_grace_s=1)
    assert (sent.spec.name, sent.spec.master_memory_mb, sent.spec.stop_grace_s) == ("y", 128, 1)
    assert sent.options == {"master": "tcp://h:1", "blocking": False, "wait": False}


def test_the_environment_counts(sent: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_UNIFIED_JOB_NAME", "from-env")
    monkeypatch.setenv("UNIFIED_MASTER", "tcp://env:1")
    JOB.submit()
    assert (sent.spec.name, sent.options["master"]) == ("from-env", "tcp://env:1")
    JOB.submit("x", False)
    assert sent.spec.name == "x"
    assert sent.options["blocking"] is False


def test_two_names_are_one_too_many(sent: Submission) -> None:
    with pytest.raises(OptionError, match="two names"):
        JOB.submit("x", job_name="y")


def test_wrong_options_and_names_never_reach_the_client(sent: Submission) -> None:
    with pytest.raises(OptionError, match="Did you mean 'job_max_restart'"):
        JOB.submit("x", job_max_restarts=1)  # type: ignore[call-overload]
    with pytest.raises(JobNameError):
        JOB.submit("a/b")
    assert not hasattr(sent, "spec")


def test_a_job_as_json(sent: Submission) -> None:
    """As upstream's `driver.main` takes it."""
    config = JobConfig(job_name="x", dl_config=JOB, master="tcp://h:1")
    assert driver.main([config.model_dump_json()]) == 7
    assert sent.spec == to_spec(config, Driver.here())
    assert sent.options == {"master": "tcp://h:1", "blocking": True, "wait": True}
    driver.main([config.model_dump_json()], blocking=False)
    assert sent.options["blocking"] is False


def test_a_job_as_json_that_is_none(sent: Submission) -> None:
    with pytest.raises(UsageError, match="as JSON"):
        driver.main([])
    with pytest.raises(JobError, match="dl_config"):
        driver.main(['{"job_name": "x"}'])
    assert not hasattr(sent, "spec")
