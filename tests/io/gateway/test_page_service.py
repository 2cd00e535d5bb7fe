"""The page of a real gateway before a real master: who gets in, what is refused, and what is written down."""

import http.client
import json
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fake_master import FakeMaster
from tests.support.gateway_process import PAYLOAD, TOKEN, GatewayUnderTest, StartGateway
from tests.support.master_process import StartMaster
from tests.support.page import OWN, WatchedCluster, browser, stream
from unified.client.connection import MasterConnection
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.client_master import (
    Accepted,
    ClientToMaster,
    Explain,
    LogChunk,
    MasterAnswer,
    ReadLog,
    Refused,
    Story,
    SubmitJob,
)
from unified.security.curve import new_key
from unified.security.keys import write_key
from unified.testing import eventually
from unified_gateway.page.guard import CSP

pytestmark = pytest.mark.processes


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text("alice: token-of-alice\nbob: token-of-bob  read\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def master(start_master: StartMaster) -> Iterator[MasterConnection]:
    with MasterConnection(start_master().address) as connection:
        yield connection


@pytest.fixture
def gateway(master: MasterConnection, start_gateway: StartGateway, tokens: Path) -> GatewayUnderTest:
    return start_gateway("--master", master.address, "--token-file", str(tokens))


def submit(master: MasterConnection, name: str = "waits") -> str:
    role = RoleSpec(name="trainer", kind="simple", entry_point=EntryPoint(kind="module", target="x"), total=1)
    return master.ask(SubmitJob(spec=JobSpec(name=name, roles=[role])), Accepted).job_id


def reasons(master: MasterConnection, job: str) -> list[str]:
    return [event.reason for event in master.ask(Explain(job=job), Story).events]


def test_what_is_asked_is_done_and_written_down(gateway: GatewayUnderTest, master: MasterConnection) -> None:
    job = submit(master)
    with browser(gateway.url, "token-of-alice") as alice:
        for word, note in (("suspend", "suspended"), ("resume", "resumed"), ("stop", "stops")):
            answer = alice.post(f"/page/jobs/{job}/{word}", json={})
            assert (answer.status_code, note in answer.json()["note"]) == (200, True), answer.text
        told = reasons(master, job)
        assert "suspended: asked on the page by alice" in told
        assert "resumed, asked on the page by alice: it waits for room" in told
        assert "stopped: asked on the page by alice" in told
        assert alice.post(f"/page/jobs/{job}/suspend").status_code == 409  # it has ended
        assert alice.post("/page/nodes/n9/drain", json={"reason": "fan"}).status_code == 404
        assert alice.post("/page/nodes/n9/drain", content=b"[").status_code == 400
        assert alice.post(f"/page/jobs/{job}/stop", json={"force": "yes"}).status_code == 400


@pytest.mark.smoke
def test_a_token_for_reading_changes_nothing(gateway: GatewayUnderTest, master: MasterConnection) -> None:
    job = submit(master)
    with browser(gateway.url, "token-of-bob") as bob:
        assert bob.get("/page/session").json()["write"] is False
        paths = [f"jobs/{job}/{word}" for word in ("stop", "suspend", "resume", "profile")]
        for path in (*paths, "nodes/n1/drain", "nodes/n1/undrain"):
            assert bob.post(f"/page/{path}").status_code == 403
        with stream(bob, job) as events:
            assert next(events).data["job"]["stage"] == "INIT"
    headers = {"X-TRAINER-TOKEN": "token-of-bob"}
    assert httpx.get(f"{gateway.url}/train", headers=headers).status_code == 200
    assert httpx.post(f"{gateway.url}/train", json=PAYLOAD, headers=headers).status_code == 403
    assert httpx.delete(f"{gateway.url}/train/x", headers=headers).status_code == 403


def test_without_a_session_nothing_is_told(gateway: GatewayUnderTest, master: MasterConnection) -> None:
    job = submit(master)
    with browser(gateway.url) as client:
        for path in ("session", "about", "tasks", "datasets", f"jobs/{job}/explain", f"jobs/{job}/logs?worker=x"):
            assert client.get(f"/page/{path}").status_code == 401, path
        assert client.get("/page/stream", headers={"X-Unified": ""}).status_code == 401
        assert client.post(f"/page/jobs/{job}/stop").status_code == 401
        assert client.post("/page/session", json={"ticket": "wrong"}).status_code == 401
        assert client.post("/page/session", json={"tickets": 1}).status_code == 400
        assert client.get("/page/nothing").status_code == 404
    assert httpx.get(f"{gateway.url}/page/about", headers={**OWN, "X-TRAINER-TOKEN": TOKEN}).status_code == 401
    assert not [reason for reason in reasons(master, job) if "page" in reason]


def test_cookies_of_other_programs_on_the_host_do_not_hide_the_session(gateway: GatewayUnderTest) -> None:
    with browser(gateway.url, "token-of-alice") as client:
        ((name, value),) = client.cookies.items()
        client.cookies.clear()
        for other in ("foo", 'p={"a":1}', "a=b c", "a[b]=1", 'q="', f'b="{chr(92) * 4000}'):
            for cookie in (f"{other}; {name}={value}", f"{name}={value};{other}"):
                assert client.get("/page/session", headers={"Cookie": cookie}).status_code == 200, cookie[:50]
        assert client.get("/page/session", headers={"Cookie": f"x{name}={value}"}).status_code == 401


def test_a_body_is_read_of_those_alone_who_may_send_one(gateway: GatewayUnderTest) -> None:
    """Neither memory nor time of the gateway is to be had without a session."""
    url = httpx.URL(gateway.url)
    own = "".join(f"{name}: {value}\r\n" for name, value in {"Host": url.netloc.decode(), **OWN}.items())
    for path, size, status in (("jobs/x/stop", 1000, b"401"), ("session", 100_000_000, b"413")):
        with socket.create_connection((url.host, url.port), 100) as connection:
            head = f"POST /page/{path} HTTP/1.1\r\n{own}Content-Length: {size}\r\n\r\n"
            connection.sendall(head.encode())  # and nothing of the body
            assert connection.recv(64).split()[1] == status
    with browser(gateway.url, "token-of-alice") as client:
        assert client.post("/page/jobs/x/stop", content=b" " * 20_000).status_code == 413


def test_a_request_without_a_path_is_not_found(gateway: GatewayUnderTest) -> None:
    url = httpx.URL(gateway.url)
    with socket.create_connection((url.host, url.port), 100) as connection:
        connection.sendall(f"OPTIONS * HTTP/1.1\r\nHost: {url.host}\r\nConnection: close\r\n\r\n".encode())
        assert int(connection.recv(64).split()[1]) < 500


def test_pages_of_other_sites_get_nothing_though_the_browser_is_signed_in(gateway: GatewayUnderTest) -> None:
    with browser(gateway.url, "token-of-alice") as client:
        assert client.get("/page/about").status_code == 200
        for headers in (
            {"X-Unified": ""},
            {"Origin": "https://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Host": "evil.example"},
            {"Host": f"evil.example:{httpx.URL(gateway.url).port}", "Origin": "http://evil.example"},
        ):
            for path in ("/page/about", "/page/stream"):
                if path == "/page/stream" and headers == {"X-Unified": ""}:
                    continue
                answer = client.get(path, headers=headers)
                assert (answer.status_code, "error" in answer.json()) == (403, True), headers
            assert client.post("/page/jobs/x/stop", headers=headers).status_code == 403
        assert client.get("/", headers={"Host": "evil.example", "Accept": "text/html"}).status_code == 403


def test_answers_have_the_headers_that_keep_browsers_safe(gateway: GatewayUnderTest) -> None:
    with browser(gateway.url) as client:
        for path in ("/page/session", "/", "/static/nothing.js"):
            headers = client.get(path, headers={"Accept": "text/html"}).headers
            assert headers["content-security-policy"] == CSP
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
        assert client.get("/page/session").headers["cache-control"] == "no-store"
        assert client.get("/").text.startswith("<!doctype html>")  # as curl asks, which accepts anything
        assert client.get("/jobs").status_code == 401  # a path of the API
    for path in ("/static/../cli.py", "/static/%2e%2e/cli.py", "/static//etc/passwd", "/static/%2fetc/passwd"):
        connection = http.client.HTTPConnection(httpx.URL(gateway.url).netloc.decode(), timeout=100)
        connection.request("GET", path)  # as it is
        assert connection.getresponse().status == 404, path
        connection.close()


@pytest.mark.slow
def test_sign_ins_are_limited(gateway: GatewayUnderTest) -> None:
    """A thousand; tests/unit/gateway/test_page_session.py reckons with ten times as many."""
    with browser(gateway.url) as client:
        found = [client.post("/page/session", json={"ticket": f"guess {number}"}).status_code for number in range(1000)]
        assert set(found) == {401, 429}
        assert found.count(401) < 500  # ten at once, and one a second
        late = client.post("/page/session", json={"ticket": "token-of-alice"})
        assert (late.status_code, int(late.headers["retry-after"]) >= 1) == (429, True)


def test_who_signs_out_is_out(gateway: GatewayUnderTest) -> None:
    with browser(gateway.url, "token-of-alice") as client:
        kept = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        assert client.delete("/page/session").status_code == 200
        assert not client.cookies
        assert client.get("/page/session", headers={"Cookie": kept}).status_code == 401


def test_the_story_is_told_by_pages(gateway: GatewayUnderTest, master: MasterConnection) -> None:
    job = submit(master)
    with browser(gateway.url, "token-of-alice") as client:
        for _ in range(3):
            client.post(f"/page/jobs/{job}/suspend")
            client.post(f"/page/jobs/{job}/resume")
        everything = client.get(f"/page/jobs/{job}/explain").json()["events"]
        last = client.get(f"/page/jobs/{job}/explain", params={"limit": 2}).json()["events"]
        assert last == everything[-2:]
        before = last[0]["sequence"]
        rest = client.get(f"/page/jobs/{job}/explain", params={"before": before}).json()["events"]
        assert rest + last == everything
        assert client.get(f"/page/jobs/{job}/explain", params={"before": "x"}).status_code == 400


def test_training_runs_datasets_and_the_release_are_told(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    headers = {"X-TRAINER-TOKEN": "token-of-alice"}
    payload = {**PAYLOAD, "checkpoint_base_uri": f"file://{tmp_path}/saved"}
    assert httpx.post(f"{gateway.url}/train", json=payload, headers=headers).status_code == 201
    with browser(gateway.url, "token-of-alice") as client:

        def run() -> dict[str, object] | None:
            (found,) = client.get("/page/tasks").json()["tasks"]
            return found if found["checkpoints"] is not None else None

        task = eventually(run, timeout=100)
        assert task is not None
        assert (task["name"], task["status"], task["checkpoints"]) == ("train-tiny", "submitted", [])
        assert (task["step"], task["loss"]) == (None, None)
        assert isinstance(task["submitted_at"], float)
        assert client.get("/page/datasets").json().keys() == {"datasets", "barriers", "checkpoints", "workers"}
        about = client.get("/page/about").json()
        assert set(about) == {"release", "python", "protocol", "master", "key", "licences", "uptime_s"}
        assert about["key"] == "none"


def test_a_keyed_gateway_that_was_killed_keeps_its_sessions(
    start_master: StartMaster, start_gateway: StartGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_key(tmp_path / "cluster.key", new_key())
    monkeypatch.setenv("UNIFIED_KEY_FILE", str(tmp_path / "cluster.key"))
    master = start_master()
    first = start_gateway("--master", master.address)
    port = httpx.URL(first.url).port
    assert port is not None
    with browser(first.url, TOKEN) as client:
        with stream(client) as events:
            assert next(events).name == "whole"
            first.kill()
            with pytest.raises(httpx.HTTPError):
                next(events)
        assert start_gateway("--master", master.address, port=port).url == first.url
        with stream(client) as events:
            assert next(events).name == "whole"
        assert client.get("/page/about").json()["key"].startswith("SHA256:")


def test_beyond_loopback_the_page_needs_tls_and_the_training_api_goes_on(
    master: MasterConnection, start_gateway: StartGateway, tmp_path: Path
) -> None:
    plain = start_gateway("--master", master.address, "--host", "0.0.0.0")
    port = httpx.URL(plain.url).port
    assert httpx.post(f"http://127.0.0.1:{port}/page/session", headers=OWN, json={}).status_code == 401  # of the API
    assert httpx.get(f"http://127.0.0.1:{port}/train", headers={"X-TRAINER-TOKEN": TOKEN}).status_code == 200
    assert "event=page-off" in plain.log.read_text()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--host", "0.0.0.0"]
    safe = start_gateway("--master", master.address, *flags)
    port = httpx.URL(safe.url).port
    context = ssl.create_default_context(cafile=str(cert))
    with browser(f"https://127.0.0.1:{port}", TOKEN, verify=context) as client:
        (name,) = client.cookies
        assert name.startswith("__Host-unified-")
        assert client.get("/page/session").status_code == 200


def test_behind_a_proxy_the_names_that_are_allowed_count(master: MasterConnection, start_gateway: StartGateway) -> None:
    flags = ["--behind-proxy", "--allow-host", "gw.example"]
    url = start_gateway("--master", master.address, *flags).url
    proxied = {**OWN, "Host": "gw.example", "X-Forwarded-For": "10.0.0.9"}
    answer = httpx.post(f"{url}/page/session", json={"ticket": TOKEN}, headers=proxied)
    assert answer.status_code == 200
    assert "; Secure" in answer.headers["set-cookie"]
    for _ in range(30):  # of another client, which has all its tries to itself
        httpx.post(f"{url}/page/session", json={"ticket": "x"}, headers={**proxied, "X-Forwarded-For": "a, 10.0.0.8"})
    assert httpx.post(f"{url}/page/session", json={"ticket": TOKEN}, headers=proxied).status_code == 200


def test_a_unix_socket_is_for_its_owner_and_gone_at_the_end(
    master: MasterConnection, start_gateway: StartGateway, tmp_path: Path
) -> None:
    path = tmp_path / "page.sock"
    gateway = start_gateway("--master", master.address, "--uds", str(path))
    assert gateway.url == f"http+unix://{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    transport = httpx.HTTPTransport(uds=str(path))
    with browser("http://localhost:8265", TOKEN, transport=transport) as client, stream(client) as events:
        assert next(events).name == "whole"
    second = start_gateway("--master", master.address, "--uds", str(path))
    assert second.process.wait(100) == 1
    assert "it is there already" in gateway.log.read_text()
    gateway.kill()
    third = start_gateway("--master", master.address, "--uds", str(path))
    assert third.url == gateway.url  # what a killed gateway left is in nobody's way
    third.stop()
    assert not path.exists()


def test_without_a_token_the_log_says_how_to_get_in(master: MasterConnection, start_gateway: StartGateway) -> None:
    gateway = start_gateway("--master", master.address, "--read-only", env={"TRAINER_API_TOKEN": ""})
    url = gateway.url
    line = next(line for line in gateway.log.read_text().splitlines() if "event=page-ready" in line)
    ticket = line.partition("/#ticket=")[2].split()[0]
    with browser(url, ticket) as client:
        assert client.get("/page/session").json()["write"] is False
    with browser(url) as client:
        assert client.post("/page/session", json={"ticket": ticket}).status_code == 401


def test_a_profile_is_pulled_whole(fake_master: FakeMaster, start_gateway: StartGateway) -> None:
    cluster, whole = WatchedCluster(), b"<svg>" + b" " * 3_000_000 + b"</svg>"

    def respond(message: ClientToMaster) -> MasterAnswer | None:
        if not isinstance(message, ReadLog):
            return cluster.respond(message)
        assert (message.worker, message.stream, message.take) == (
            ("w_1-0_1-0", "profile", None) if message.offset else ("trainer-0", "profile", "flamegraph")
        )
        data = whole[message.offset :][: message.max_bytes]
        return LogChunk(
            worker="w_1-0_1-0",
            incarnation=0,
            data=data,
            offset=message.offset,
            next_offset=message.offset + len(data),
            size=len(whole),
            is_final=False,
        )

    fake_master.respond = respond
    with browser(start_gateway("--master", fake_master.address).url, TOKEN) as client:
        answer = client.post("/page/jobs/x/profile", json={"worker": "trainer-0"})
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"worker": "trainer-0", "svg": whole.decode()}
        assert client.post("/page/jobs/x/profile", json={}).status_code == 400


def test_log_lines_of_the_worst_kind_are_text(fake_master: FakeMaster, start_gateway: StartGateway) -> None:
    printed = b"<img src=x onerror=alert(1)>\x00\n" + b"\x1b]8;;javascript:alert(1)\x07\n" + b"\xff" + b"y" * 200_000
    cluster = WatchedCluster()

    def respond(message: ClientToMaster) -> MasterAnswer | None:
        if isinstance(message, ReadLog):
            end = len(printed)
            return LogChunk(worker="w", incarnation=0, data=printed, offset=0, next_offset=end, size=end, is_final=True)
        return cluster.respond(message)

    fake_master.respond = respond
    with browser(start_gateway("--master", fake_master.address).url, TOKEN) as client:
        assert client.get("/page/jobs/gpt-1/logs", params={"stream": "both"}).status_code == 400
        answer = client.get("/page/jobs/gpt-1/logs", params={"worker": "trainer-0", "stream": "err"})
        assert answer.headers["content-type"] == "application/json"
        first, second, third = json.loads(answer.content)["text"].split("\n")
        assert first == r"<img src=x onerror=alert(1)>\x00"
        assert second == r"\x1b]8;;javascript:alert(1)\x07"
        assert third.startswith("\ufffdyyy")
        assert third.endswith("more characters")
        assert len(answer.content) < 20_000


def test_the_end_of_a_log_whose_node_is_gone_is_shown_without_times(
    fake_master: FakeMaster, start_gateway: StartGateway
) -> None:
    cluster = WatchedCluster()

    def respond(message: ClientToMaster) -> MasterAnswer | None:
        if not isinstance(message, ReadLog):
            return cluster.respond(message)
        if message.stream.endswith(".times"):
            return Refused(code="not-found", reason="the log is on node n1, which is not connected.")
        return LogChunk(worker="w", incarnation=0, data=b"one\n", offset=0, next_offset=4, size=4, is_final=True)

    fake_master.respond = respond
    with browser(start_gateway("--master", fake_master.address).url, TOKEN) as client:
        answer = client.get("/page/jobs/gpt-1/logs", params={"worker": "trainer-0", "times": "1"})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["text"], answer.json()["times"]) == ("one\n", [])


def test_a_client_that_says_half_a_request_holds_nothing(gateway: GatewayUnderTest) -> None:
    url = httpx.URL(gateway.url)
    with socket.create_connection((url.host, url.port), timeout=100) as client:
        client.sendall(b"POST /page/session HTTP/1.1\r\nHost: " + url.netloc + b"\r\nX-Unified: 1\r\n")
        with browser(gateway.url, "token-of-alice") as other:
            assert other.get("/page/session").status_code == 200
