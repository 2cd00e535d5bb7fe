"""The gateway as a process, before a real master: tokens, bad requests, one job a run, and the deaths of both."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.support.fake_master import FakeMaster
from tests.support.gateway_process import PAYLOAD, TOKEN, GatewayUnderTest, StartGateway
from tests.support.master_process import MasterProcess, StartMaster
from tests.support.ports import unused_port
from unified.client.connection import MasterConnection
from unified.process import every_process, is_alive
from unified.protocol.client_master import JobList, ListJobs
from unified.testing import eventually

pytestmark = pytest.mark.processes


@pytest.fixture
def gateway(start_master: StartMaster, start_gateway: StartGateway) -> GatewayUnderTest:
    return start_gateway("--master", start_master().address)


@pytest.fixture(scope="module")
def idle_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayUnderTest]:
    """One that is asked for nothing that it could do."""
    folder = tmp_path_factory.mktemp("idle")
    master = MasterProcess(folder)
    gateway = GatewayUnderTest(folder, "--master", master.address)
    yield gateway
    assert gateway.client.get("/train").json()["total"] == 0
    gateway.stop()
    master.kill()


def post(gateway: GatewayUnderTest, **fields: Any) -> httpx.Response:
    return gateway.client.post("/train", json={**PAYLOAD, **fields})


def jobs(address: str) -> list[str]:
    with MasterConnection(address) as connection:
        return [line.name for line in connection.ask(ListJobs(), JobList).jobs]


def test_only_a_token_opens_anything_but_the_health_check(gateway: GatewayUnderTest) -> None:
    url = gateway.url
    assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
    for path in ("/train", "/train/x", "/metrics", "/openapi.json", "/docs", "/nothing"):
        missing = httpx.get(f"{url}{path}")
        assert (missing.status_code, missing.json()) == (
            401,
            {"detail": "the token in the header X-TRAINER-TOKEN is missing."},
        )
    wrong = httpx.post(f"{url}/train", json=PAYLOAD, headers={"X-TRAINER-TOKEN": TOKEN + "x"})
    assert (wrong.status_code, "is wrong" in wrong.json()["detail"]) == (401, True)
    assert gateway.client.get("/train").json() == {"items": [], "total": 0, "next": None}


def test_several_tokens_have_names_which_the_log_tells(
    start_master: StartMaster, start_gateway: StartGateway, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ci: token-of-ci\nbob: token-of-bob\n")
    tokens.chmod(0o600)
    gateway = start_gateway("--master", start_master().address, "--token-file", str(tokens))
    for token in ("token-of-ci", "token-of-bob", TOKEN):
        headers = {"X-TRAINER-TOKEN": token}
        assert httpx.post(f"{gateway.url}/train", json=PAYLOAD, headers=headers).status_code in (200, 201)
    log = gateway.log.read_text()
    assert all(f"client={name} method=POST" in log for name in ("ci", "bob", "default"))
    assert "token-of" not in log


def test_a_gateway_without_a_token_does_not_listen_beyond_loopback() -> None:
    command = [sys.executable, "-m", "unified_gateway", "--host", "0.0.0.0", "--port", "0"]
    env = {"PATH": "/usr/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("unified-gateway: unified-gateway would listen on 0.0.0.0, which other hosts reach")
    assert "TRAINER_API_TOKEN" in done.stderr


def test_without_a_token_a_browser_that_was_led_here_is_turned_away(
    start_master: StartMaster, start_gateway: StartGateway
) -> None:
    url = start_gateway("--master", start_master().address, env={"TRAINER_API_TOKEN": ""}).url
    assert httpx.get(f"{url}/train").status_code == 200
    assert httpx.get(f"{url}/train", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.smoke
def test_a_run_is_submitted_listed_shown_stopped_and_resumed(gateway: GatewayUnderTest) -> None:
    made = post(gateway, labels={"team": "fraud"})
    assert (made.status_code, made.headers["location"]) == (201, "/train/train-tiny")
    status = made.json()
    assert (status["status"], status["name"]) == ("submitted", "train-tiny")
    assert status["job_id"].startswith("train-tiny-1-")
    assert (status["labels"], status["namespace"], status["exit_code"]) == ({"team": "fraud"}, "default", None)
    assert gateway.client.get("/train/train-tiny").json() == status
    assert post(gateway, labels={"team": "fraud"}).status_code == 200
    assert gateway.client.get("/train", params={"label": "team=fraud", "status": "submitted"}).json()["total"] == 1
    assert gateway.client.get("/train", params={"label": "team=other"}).json()["items"] == []
    assert gateway.client.post("/train/train-tiny/resume").status_code == 409
    stopped = gateway.client.delete("/train/train-tiny")
    assert (stopped.status_code, stopped.json()["status"], stopped.json()["exit_code"]) == (202, "failed", 130)
    assert "stopped: asked through the training API" in stopped.json()["detail"]
    resumed = gateway.client.post("/train/train-tiny/resume", json={"extra_args": {"max_steps": 7}})
    assert resumed.status_code == 201
    everything = gateway.client.get("/train", params={"all_attempts": True}).json()
    assert [run["job_id"] for run in everything["items"]] == [resumed.json()["job_id"], status["job_id"]]
    events = gateway.client.get("/train/train-tiny/events").json()["items"]
    assert events[0]["event"] == "job-submitted"
    assert gateway.client.get("/train/train-tiny/metrics").json() == {"items": [], "num_thinned": 0}
    assert gateway.client.get("/train/train-tiny/checkpoints").json()["items"] == []
    assert gateway.client.get("/train/train-tiny/logs").text == ""


def test_a_list_comes_in_pages(gateway: GatewayUnderTest) -> None:
    for number in range(7):
        assert post(gateway, run_id=f"r{number}").status_code == 201
    names: list[str] = []
    cursor = None
    while True:
        page = gateway.client.get("/train", params={"limit": 3, **({"cursor": cursor} if cursor else {})}).json()
        names += [run["run_id"] for run in page["items"]]
        assert page["total"] == 7
        if (cursor := page["next"]) is None:
            break
    assert names == [f"r{number}" for number in reversed(range(7))]


def test_secrets_of_a_run_are_kept_by_the_cluster_and_shown_to_nobody(gateway: GatewayUnderTest) -> None:
    secret = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI"}
    answers = [post(gateway, env=secret), gateway.client.post("/train?dry_run=true", json={**PAYLOAD, "env": secret})]
    conflict = post(gateway, env={"AWS_SECRET_ACCESS_KEY": "other"})
    assert (conflict.status_code, conflict.json()["differences"]) == (
        409,
        {"env.AWS_SECRET_ACCESS_KEY": {"submitted": "set", "requested": "set to another value"}},
    )
    bad = post(gateway, env={"RUN_ID": "wJalrXUtnFEMI"})
    answers += [conflict, bad, gateway.client.get("/train/train-tiny"), gateway.client.get("/train/train-tiny/events")]
    assert not any("wJalrXUtnFEMI" in answer.text for answer in answers)
    gateway.client.delete("/train/train-tiny")
    assert gateway.client.post("/train/train-tiny/resume").status_code == 201
    assert post(gateway, env=secret, resume_from_checkpoint=True).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 422, "JSON decode error"),
        (b"[]", 422, "valid dictionary"),
        (b'{"framework": "meta"}', 422, "Field required"),
        (b'{"framework": "jax"}', 422, "'nemo', 'hf' or 'meta'"),
        (b'{"framwork": "meta"}', 422, "there is no field 'framwork'. Did you mean 'framework'?"),
        (b'{"\\ud800": 1}', 422, "unable to parse raw data as a unicode string"),
        (b"[" * 100_000, 4, ""),
        (b'{"a": NaN}', 422, ""),
        (b"\xff\xfe", 4, ""),
        (b"", 422, "Field required"),
        (b" " * (2 << 20), 413, "larger than 1048576 bytes"),
        (b" " * (50 << 20), 413, "larger than 1048576 bytes"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_body_is_a_clear_refusal(idle_gateway: GatewayUnderTest, body: bytes, status: int, text: str) -> None:
    headers = {"content-type": "application/json"}
    answer = idle_gateway.client.post("/train", content=body, headers=headers)
    assert answer.status_code == status or answer.status_code // 100 == status
    assert text in str(answer.json()["detail"])


def test_a_body_in_chunks_is_counted_too(idle_gateway: GatewayUnderTest) -> None:
    parts = (b" " * 65536 for _ in range(100))
    answer = idle_gateway.client.post("/train", content=parts, headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_body_that_is_no_json_is_named(idle_gateway: GatewayUnderTest) -> None:
    answer = idle_gateway.client.post("/train", data={"framework": "meta"})
    assert (answer.status_code, "application/x-www-form-urlencoded" in answer.json()["detail"]) == (415, True)


@pytest.mark.parametrize(
    ("fields", "location"),
    [
        ({"run_id": "../x"}, ["body", "run_id"]),
        ({"num_nodes": 0}, ["body", "num_nodes"]),
        ({"extra_args": {"max_steps": "many"}}, ["body"]),
        ({"extra_args": {"hub_token": "x"}}, ["body", "extra_args"]),
        ({"env": {"A B": "x"}}, ["body", "env"]),
        ({"gpus": 1}, ["body", "gpus"]),
    ],
)
def test_a_bad_field_is_named(idle_gateway: GatewayUnderTest, fields: dict[str, Any], location: list[str]) -> None:
    answer = post(idle_gateway, **fields)
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, location)


def test_what_is_not_there_is_404(idle_gateway: GatewayUnderTest) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/resume"), ("GET", "/logs"), ("GET", "/events")):
        answer = idle_gateway.client.request(method, f"/train/none{path}")
        assert (answer.status_code, answer.json()["detail"].startswith("there is no run 'none'")) == (404, True)
    assert idle_gateway.client.get("/nothing").status_code == 404
    assert idle_gateway.client.put("/train").status_code == 405


def test_of_200_submissions_of_one_run_at_once_there_is_one_job(
    start_master: StartMaster, start_gateway: StartGateway
) -> None:
    address = start_master().address
    gateways = [start_gateway("--master", address) for _ in range(2)]
    urls = [gateway.url for gateway in gateways]
    with httpx.Client(headers={"X-TRAINER-TOKEN": TOKEN}, timeout=100) as client, ThreadPoolExecutor(40) as threads:
        answers = list(threads.map(lambda turn: client.post(f"{urls[turn % 2]}/train", json=PAYLOAD), range(200)))
    assert sorted({answer.status_code for answer in answers}) == [200, 201]
    assert sum(answer.status_code == 201 for answer in answers) == 1
    assert len({answer.json()["job_id"] for answer in answers}) == 1
    assert jobs(address) == ["train-tiny"]


def test_a_client_that_writes_too_fast_is_slowed_down(start_master: StartMaster, start_gateway: StartGateway) -> None:
    env = {"TRAINER_API_WRITES_PER_S": "0.02"}
    gateway = start_gateway("--master", start_master().address, env=env)
    assert post(gateway).status_code == 201
    answer = post(gateway)
    assert (answer.status_code, "client 'default'" in answer.json()["detail"]) == (429, True)
    assert 1 <= int(answer.headers["retry-after"]) <= 51
    assert gateway.client.get("/train/train-tiny").status_code == 200


@pytest.mark.slow
def test_while_the_master_is_away_requests_fail_soon_and_say_so_and_then_go_on(
    start_master: StartMaster, start_gateway: StartGateway
) -> None:
    master = start_master()
    address = master.address
    gateway = start_gateway("--master", address)
    assert post(gateway).status_code == 201
    master.kill()
    for method, path, body in (
        ("POST", "/train", {**PAYLOAD, "run_id": "other"}),
        ("DELETE", "/train/train-tiny", None),
    ):
        answer = gateway.client.request(method, path, json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "no master answers" in answer.json()["detail"]
    time.sleep(1.1)  # what was known of runs is too old
    assert gateway.client.get("/train/train-tiny").status_code == 503
    assert "unified_gateway_backend_up 0.0" in gateway.client.get("/metrics").text
    assert gateway.client.get("/healthz").status_code == 200
    start_master(bind=address)
    status = eventually(
        lambda: _ok(gateway.client.get("/train/train-tiny")), 100, "the gateway did not find its master"
    )
    assert status["status"] == "submitted"
    assert post(gateway).status_code == 200


def test_a_gateway_that_is_killed_and_comes_back_knows_all_that_it_knew(
    start_master: StartMaster, start_gateway: StartGateway
) -> None:
    address = start_master().address
    gateway = start_gateway("--master", address)
    before = post(gateway, env={"A": "1"}).json()
    port = httpx.URL(gateway.url).port
    gateway.kill()
    again = start_gateway("--master", address, port=port or 0)
    assert again.client.get("/train/train-tiny").json() == before
    assert post(again, env={"A": "1"}).status_code == 200
    assert post(again, env={"A": "2"}).status_code == 409


@pytest.mark.slow
def test_however_many_ask_for_status_the_master_is_asked_once_a_second(
    fake_master: FakeMaster, start_gateway: StartGateway
) -> None:
    fake_master.respond = lambda message: JobList(jobs=[])
    gateway = start_gateway("--master", fake_master.address)
    url = gateway.url
    stop = threading.Event()

    answers: list[int] = []

    def ask(_: int) -> None:
        with httpx.Client(headers={"X-TRAINER-TOKEN": TOKEN}, timeout=100) as client:
            while not stop.is_set():
                answers.append(client.get(f"{url}/train").status_code)

    with ThreadPoolExecutor(8) as threads:
        began = time.monotonic()
        counting = [threads.submit(ask, number) for number in range(8)]
        try:
            eventually(lambda: len(answers) > 50 and len(fake_master.requests) >= 3, 100)
        finally:
            stop.set()
        for each in counting:
            each.result()
        seconds = time.monotonic() - began
    assert set(answers) == {200}
    assert 3 <= len(fake_master.requests) <= seconds + 1
    assert set(map(type, fake_master.requests)) == {ListJobs}
    seen = len(fake_master.requests)
    time.sleep(1.5)
    assert len(fake_master.requests) == seen  # nobody asks any more


def test_the_service_describes_itself_and_counts_its_requests(gateway: GatewayUnderTest) -> None:
    schema = gateway.client.get("/openapi.json").json()
    assert {"/train", "/train/{name}", "/healthz", "/train/{name}/logs", "/metrics"} <= schema["paths"].keys()
    assert schema["components"]["securitySchemes"]["token"]["name"] == "X-TRAINER-TOKEN"
    assert schema["paths"]["/healthz"]["get"]["security"] == []
    post(gateway)
    gateway.client.get("/train/train-tiny")
    text = gateway.client.get("/metrics").text
    assert 'unified_gateway_requests_total{method="GET",route="/train/{name}",status="200"} 1.0' in text
    assert 'unified_gateway_runs{status="submitted"} 1.0' in text


@pytest.mark.slow
def test_a_master_starts_its_gateway_again_and_takes_it_along(start_master: StartMaster, tmp_path: Path) -> None:
    port = unused_port()
    master = start_master("--http", str(port))
    url = f"http://127.0.0.1:{port}"
    eventually(lambda: _is_up(url), 100, "the master started no gateway")
    assert httpx.post(f"{url}/train", json=PAYLOAD).status_code == 201
    assert jobs(master.address) == ["train-tiny"]
    (first,) = children_of(master.process.pid)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: children_of(master.process.pid) not in ([], [first]), 100, "the gateway was not started again")
    eventually(lambda: _is_up(url), 100, "the gateway did not come back")
    assert httpx.get(f"{url}/train/train-tiny").json()["status"] == "submitted"
    (second,) = children_of(master.process.pid)
    master.process.terminate()
    assert master.process.wait(100) == 0
    assert not is_alive(second)
    assert "event=gateway-ended" in master.log.read_text()


def test_a_gateway_ends_with_its_master(start_master: StartMaster) -> None:
    master = start_master("--http", "127.0.0.1:0")
    (gateway,) = eventually(lambda: children_of(master.process.pid), 100, "the master started no gateway")
    eventually(lambda: "gateway-ready" in master.log.read_text(), 100, "the gateway was not ready")
    master.kill()
    eventually(lambda: not is_alive(gateway), 100, "the gateway outlived its master")


def test_an_address_for_the_gateway_that_is_none_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unified_master", "--http", "x:y", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (
        2,
        "unified-master: --http 'x:y' is no address: write PORT or HOST:PORT.\n",
    )


def children_of(pid: int) -> list[int]:
    return [process.pid for process in every_process() if process.parent == pid and process.is_alive]


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_the_coordinator_is_served_beside_it(start_master: StartMaster, start_gateway: StartGateway) -> None:
    gateway = start_gateway("--master", start_master().address, "--grpc-port", "0")
    assert gateway.client.get("/healthz").status_code == 200
    found = re.search(r"event=grpc-ready port=(\d+)", gateway.log.read_text())
    assert found is not None
    with grpc.insecure_channel(f"127.0.0.1:{found[1]}") as channel:
        grpc.channel_ready_future(channel).result(timeout=100)


def test_a_gateway_that_cannot_serve_is_not_started_again(start_master: StartMaster) -> None:
    master = start_master("--http", "0.0.0.0:0")
    eventually(lambda: "event=gateway-refused" in master.log.read_text(), 100, "the master said nothing")
    assert "TRAINER_API_TOKEN" in master.log.read_text()
    assert children_of(master.process.pid) == []
    assert jobs(master.address) == []


def test_a_signal_ends_the_gateway_in_order(start_gateway: StartGateway, tmp_path: Path) -> None:
    env = {"UNIFIED_HOME": str(tmp_path / "home")}
    gateway = start_gateway("--devices", "1", env=env)
    assert post(gateway, run_id="r").status_code == 201
    daemons = [pid for child in children_of(gateway.process.pid) for pid in (child, *children_of(child))]
    assert daemons
    gateway.process.terminate()
    assert gateway.process.wait(100) == 0
    assert not [pid for pid in daemons if is_alive(pid)]


def test_a_signal_ends_a_gateway_that_is_still_starting(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway = start_gateway("--devices", "1", env={"UNIFIED_HOME": str(tmp_path / "home")})
    daemons = eventually(lambda: children_of(gateway.process.pid), 100, "no cluster was started")
    gateway.process.terminate()
    assert gateway.process.wait(100) == 0
    assert not [pid for pid in daemons if is_alive(pid)]
    assert "Traceback" not in gateway.log.read_text()


@pytest.mark.slow
def test_a_connection_that_brings_no_request_is_closed(start_master: StartMaster, start_gateway: StartGateway) -> None:
    gateway = start_gateway("--master", start_master().address, env={"TRAINER_API_HEAD_WITHIN_S": "1"})
    url = httpx.URL(gateway.url)
    for said in (b"", b"GET /heal"):
        with socket.create_connection((url.host, url.port or 0), timeout=100) as silent:
            silent.sendall(said)
            assert silent.recv(1000) == b""
    with httpx.Client(base_url=gateway.url) as client:  # and one that goes on is not
        for _ in range(4):
            assert client.get("/healthz").status_code == 200
            time.sleep(0.5)


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_that_is_none_is_refused(flag: str) -> None:
    command = [sys.executable, "-m", "unified_gateway", flag, "99999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, "'99999' is no port" in done.stderr) == (2, True)


def test_a_dry_run_shows_the_job_and_begins_nothing(idle_gateway: GatewayUnderTest) -> None:
    answer = idle_gateway.client.post("/train?dry_run=true", json={**PAYLOAD, "image": "x", "gpus_per_node": 4})
    found = answer.json()
    assert (answer.status_code, found["backend"], found["job"]["ranks_per_node"]) == (200, "master", 4)
    assert found["job"]["notes"] == ["image is not used: workers run in the environment of their agents."]
    assert found["arguments"]["pretrain"]["lr_scheduler_type"] == "cosine"
    assert idle_gateway.client.get("/train").json()["total"] == 0


def test_a_port_that_is_taken_is_told_in_a_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "unified_gateway", "--master", "127.0.0.1:1", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"127.0.0.1:{port} cannot be listened on: Address already in use. Choose another --port." in done.stderr


def _ok(answer: httpx.Response) -> Any:
    return answer.json() if answer.status_code == 200 else None
