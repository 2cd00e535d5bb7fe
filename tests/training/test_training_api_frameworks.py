"""The training API with frameworks that need libraries of their own: the runs of `tests/cluster`, for hf and nemo."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import training_scenarios
from tests.support.training_api import Service, document, payload_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]  # each rank imports transformers or Lightning: seconds

DOCUMENT = document(Path(__file__).parents[2])


def run(service: Service, framework: str, run_id: str, **changes: Any) -> dict[str, Any]:
    return payload_of({**DOCUMENT, "framework": framework}, service.bucket, f"{run_id}_{framework}", **changes)


def test_a_run_ends_and_leaves_the_layout_of_the_document(service: Service, framework: str) -> None:
    training_scenarios.run_to_its_end(service, run(service, framework, "layout_v4"))


def test_killed_runs_go_on_from_the_highest_complete_step(service: Service, framework: str) -> None:
    training_scenarios.killed_runs_go_on(service, run(service, framework, "killed_v4"))


def test_a_model_that_does_not_exist_ends_in_one_line(service: Service, framework: str) -> None:
    """No hub can be reached here, and the error is the one that a user of a closed network sees."""
    payload = run(
        *(service, framework, "no_such_model"),
        num_nodes=1,
        model_id="nobody/no-such-model",
        env={"HF_HUB_OFFLINE": "1"},
    )
    status = service.api.ended(service.api.submit(payload)["name"])
    assert status["status"] == "failed"
    assert "nobody/no-such-model" in status["detail"]
    assert "\n" not in status["detail"]


@pytest.mark.parametrize("framework", ["hf"], indirect=True)
def test_a_wrong_argument_of_the_trainer_names_the_nearest(service: Service, framework: str) -> None:
    """The gateway has no transformers to ask; the run has."""
    payload = run(service, framework, "wrong_argument", num_nodes=1, extra_args={"lr_scheduler_typ": "cosine"})
    status = service.api.ended(service.api.submit(payload)["name"])
    assert status["status"] == "failed"
    assert "lr_scheduler_type" in status["detail"]
