"""The training API under random requests, made from its own OpenAPI: none may end in an error of the server.

The master has no node, so that each run that is submitted waits. Half of the names in paths are that of a run, and half
of the payloads have valid required fields, so that many requests come further than the first check.
"""

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.support.gateway_process import PAYLOAD, TOKEN, GatewayUnderTest
from tests.support.master_process import MasterProcess
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from unified_gateway.app import create_app
from unified_gateway.options import GatewayOptions
from unified_gateway.tokens import Tokens

schemathesis: Any = pytest.importorskip(
    "schemathesis", reason="random requests: pip install 'unified-runtime[training]'"
)
of_openapi: Any = pytest.importorskip("schemathesis.specs.openapi.checks")
CHECKS = [
    schemathesis.checks.not_a_server_error,
    of_openapi.content_type_conformance,
    of_openapi.response_schema_conformance,
]
EXAMPLES = 500
"""Requests to each route."""
TRUE = {"1", "t", "true", "on", "y", "yes"}
VALID = {
    "framework": PAYLOAD["framework"],
    "model_id": PAYLOAD["model_id"],
    "checkpoint_base_uri": "s3://bucket-of-nobody/runs",
    "dataset_uri": "s3://bucket-of-nobody/rows.jsonl",
}


@pytest.fixture(scope="module")
def gateway(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayUnderTest]:
    env = {
        "TRAINER_API_WRITES_PER_S": "0",
        "UNIFIED_CONNECT_S": "10",  # the default: to take a run of 100 000 ranks keeps the master busy for a second
        "AWS_ENDPOINT_URL_S3": s3_server.url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    folder = tmp_path_factory.mktemp("fuzz")
    master = MasterProcess(folder)
    try:
        gateway = GatewayUnderTest(folder, "--master", master.address, env=env)
        try:
            yield gateway
        finally:
            gateway.stop()
    finally:
        master.kill()


@pytest.fixture(scope="module")
def run_name(gateway: GatewayUnderTest) -> str:
    answer = gateway.client.post("/train", json={**PAYLOAD, **VALID})
    name: str = answer.raise_for_status().json()["name"]
    return name


schema = schemathesis.openapi.from_dict(create_app(GatewayOptions(), Tokens({})).openapi())


@schema.parametrize()
@pytest.mark.timeout(600)
@hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
def test_no_request_ends_in_an_error_of_the_server(case: Any, gateway: GatewayUnderTest, run_name: str) -> None:
    case.headers["X-TRAINER-TOKEN"] = TOKEN  # else a third of the requests would end there
    if len(str(case.path_parameters.get("name", ""))) % 2:
        case.path_parameters["name"] = run_name
    if isinstance(case.body, dict) and case.path == "/train" and len(case.body) % 2:
        case.body |= {**VALID, "run_id": f"fuzz-{len(str(case.body))}"}
    if str(case.query.get("follow", "")).lower() in TRUE:
        case.query["follow"] = "false"  # the end of a run that waits does not come
    case.call_and_validate(
        checks=CHECKS,
        base_url=gateway.url,
    )
