"""The gateway's application: what it lets in, and which status and words each error has."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from tests.support.training_backend import MemoryBackend
from tests.unit.gateway.test_gateway_schemas import LEAST
from unified.errors import (
    KeyRefusedError,
    MasterUnreachableError,
    ProtocolError,
    RefusedError,
    StorageDeniedError,
    StorageUnavailableError,
    UsageError,
)
from unified_gateway import service as service_module
from unified_gateway.app import create_app
from unified_gateway.http import admission
from unified_gateway.http.log_stream import encode_event, stream_events
from unified_gateway.options import GatewayOptions
from unified_gateway.schemas import TrainingRequest
from unified_gateway.tokens import Tokens

TOKEN = "trainer-demo-token"
RUN = {**LEAST, "run_id": "r"}


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
async def client(backend: MemoryBackend) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(GatewayOptions(), Tokens({"ci": TOKEN}), backend)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://gateway", headers={"X-TRAINER-TOKEN": TOKEN}) as client,
    ):
        yield client
    assert backend.is_closed


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MasterUnreachableError("no master answers"), 503),
        (RefusedError("unavailable", "the node is away"), 503),
        (RefusedError("not-found", "there is no such worker"), 404),
        (RefusedError("bad-request", "role is bad"), 422),
        (RefusedError("does-not-fit", "too large"), 409),
        (KeyRefusedError("not the same key"), 503),
        (StorageUnavailableError("the store is away"), 503),
        (StorageDeniedError("no right to read"), 424),
        (ProtocolError("it is no master"), 502),
        (UsageError("no such rank"), 422),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_each_error_has_its_status_and_its_words(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    async def fail(self: MemoryBackend, name: str, *, limit: int) -> None:
        raise error

    await client.post("/train", json=RUN)
    monkeypatch.setattr(MemoryBackend, "events", fail)
    answer = await client.get("/train/train-r/events")
    assert (answer.status_code, answer.json()) == (status, {"detail": str(error)})
    assert ("retry-after" in answer.headers) == (status == 503)


@pytest.mark.parametrize("bad", ["s3cret\0", "s3cret\ud800", ["s3cret"]])
async def test_a_value_of_env_that_is_refused_is_not_repeated(client: httpx.AsyncClient, bad: object) -> None:
    body = json.dumps({**RUN, "env": {"WANDB_API_KEY": bad}})
    answer = await client.post("/train", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert "env" in answer.text
    assert "s3cret" not in answer.text


async def test_a_defect_is_500_without_its_words_and_is_counted(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: MemoryBackend, name: str, *, limit: int) -> None:
        raise KeyError("a secret")

    await client.post("/train", json=RUN)
    monkeypatch.setattr(MemoryBackend, "events", fail)
    answer = await client.get("/train/train-r/events")
    assert answer.status_code == 500
    assert "KeyError" in answer.json()["detail"]
    assert "a secret" not in answer.text
    counted = 'unified_gateway_requests_total{method="GET",route="/train/{name}/events",status="500"} 1.0'
    assert counted in (await client.get("/metrics")).text


async def test_words_that_clients_make_up_are_no_series_of_their_own(client: httpx.AsyncClient) -> None:
    for number in range(5):
        await client.request(f"WORD{number}", f"/path-{number}")
    text = (await client.get("/metrics")).text
    assert 'unified_gateway_requests_total{method="other",route="(none)",status="404"} 5.0' in text


async def test_a_conflict_shows_the_other_run_and_the_differences(client: httpx.AsyncClient) -> None:
    made = (await client.post("/train", json=RUN)).json()
    answer = await client.post("/train", json={**RUN, "num_nodes": 2})
    assert answer.status_code == 409
    assert answer.json()["run"] == made
    assert answer.json()["differences"] == {"num_nodes": {"submitted": 1, "requested": 2}}


async def test_the_same_payload_of_a_run_that_failed_says_how_to_go_on(
    client: httpx.AsyncClient, backend: MemoryBackend
) -> None:
    await client.post("/train", json=RUN)
    backend.end("train-r")
    again = await client.post("/train", json=RUN)
    assert again.status_code == 200
    assert again.json()["detail"] == ("ValueError: boom. POST /train/train-r/resume goes on from its checkpoints.")


async def test_logs_are_lines_or_events(client: httpx.AsyncClient, backend: MemoryBackend) -> None:
    await client.post("/train", json=RUN)
    backend.lines = ["[trainer-0] one", "[trainer-1] zwei ü"]
    backend.more.set()
    plain = await client.get("/train/train-r/logs")
    assert (plain.text, plain.headers["content-type"]) == (
        "[trainer-0] one\n[trainer-1] zwei ü\n",
        "text/plain; charset=utf-8",
    )
    events = await client.get("/train/train-r/logs", params={"follow": True})
    assert events.headers["content-type"].startswith("text/event-stream")
    comment, first, second, end, rest = events.text.split("\n\n")
    assert (comment, first) == (": connected", "event: line\ndata: [trainer-0] one")
    assert second == "event: line\ndata: [trainer-1] zwei ü"
    assert json.loads(end.removeprefix("event: end\ndata: "))["name"] == "train-r"
    assert rest == ""
    assert "unified_gateway_log_followers 0.0" in (await client.get("/metrics")).text


async def one_follows(client: httpx.AsyncClient) -> None:
    while "unified_gateway_log_followers 1.0" not in (await client.get("/metrics")).text:
        pass


async def test_a_follower_of_logs_is_told_why_they_end_early(client: httpx.AsyncClient, backend: MemoryBackend) -> None:
    await client.post("/train", json=RUN)
    answer = asyncio.create_task(client.get("/train/train-r/logs", params={"follow": True}))
    await one_follows(client)
    backend.is_away = True
    backend.more.set()
    assert (await answer).text.endswith("event: error\ndata: no master answers\n\n")


async def test_there_are_only_so_many_followers(
    client: httpx.AsyncClient, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAX_FOLLOWERS", 1)
    await client.post("/train", json=RUN)
    first = asyncio.create_task(client.get("/train/train-r/logs", params={"follow": True}))
    await one_follows(client)
    assert (await client.get("/train/train-r/logs")).status_code == 503
    backend.more.set()
    assert (await first).status_code == 200
    assert (await client.get("/train/train-r/logs")).status_code == 200


async def test_a_body_that_does_not_come_is_not_waited_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(10)

    monkeypatch.setattr(admission, "BODY_TIMEOUT_S", 0.05)
    answer = await client.post("/train", content=body(), headers={"content-type": "application/json"})
    assert (answer.status_code, "was not there within 0.05 s" in answer.json()["detail"]) == (408, True)


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=501",
        "cursor=x",
        "cursor=[1]",
        'cursor=["a",1]',
        "status=done",
        "label=a",
        "all_attempts=maybe",
    ],
)
async def test_a_query_that_is_none_is_refused(client: httpx.AsyncClient, query: str) -> None:
    assert (await client.get(f"/train?{query}")).status_code == 422


@pytest.mark.parametrize("cursor", [f'[1{"0" * 180},"a"]', "[" * 199, "x" * 300, '[1e999,"a"]'])
async def test_a_cursor_of_any_kind_is_no_defect(client: httpx.AsyncClient, cursor: str) -> None:
    assert (await client.get("/train", params={"cursor": cursor})).status_code in (200, 422)


async def test_the_health_check_alone_is_open(client: httpx.AsyncClient) -> None:
    none = {"X-TRAINER-TOKEN": ""}
    assert (await client.get("/healthz", headers=none)).status_code == 200
    assert (await client.post("/healthz", headers=none, content=b"x" * 1000)).status_code == 401


async def test_wrong_tokens_are_slowed_down(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "REJECTED_BURST", 3.0)
    monkeypatch.setattr(admission, "REJECTED_PER_S", 0.001)
    app = create_app(GatewayOptions(), Tokens({"ci": TOKEN}), backend)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        codes = [(await client.get("/train")).status_code for _ in range(6)]
        assert codes == [401, 401, 401, 429, 429, 429]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 201),
        ({"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1"}, 201),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:3000"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
async def test_without_a_token_pages_of_other_sites_may_not_write(
    backend: MemoryBackend, headers: dict[str, str], status: int
) -> None:
    app = create_app(GatewayOptions(), Tokens({}), backend)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client,
    ):
        assert (await client.post("/train", json=RUN, headers=headers)).status_code == status


async def test_a_reader_that_takes_nothing_does_not_keep_its_place(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SEND_WITHIN_S", 0.05)
    app = create_app(GatewayOptions(), Tokens({"ci": TOKEN}), backend)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/train/train-r/logs",
        "raw_path": b"/train/train-r/logs",
        "root_path": "",
        "query_string": b"follow=true",
        "headers": [(b"x-trainer-token", TOKEN.encode())],
        "server": ("127.0.0.1", 80),
    }

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async with app.router.lifespan_context(app):
        await app.state.gateway.runs.submit(TrainingRequest.model_validate(RUN))
        with pytest.raises((ClientDisconnect, TimeoutError)):
            await app(scope, receive, send)
        assert b"unified_gateway_log_followers 0.0" in app.state.gateway.telemetry.render([])


async def test_metrics_and_events_of_a_run(client: httpx.AsyncClient) -> None:
    await client.post("/train", json=RUN)
    (row,) = (await client.get("/train/train-r/metrics")).json()["items"]
    assert (row["step"], row["total"], row["metrics"]) == (1, 3, {"loss": 0.5})
    (event,) = (await client.get("/train/train-r/events")).json()["items"]
    assert (event["event"], event["at"]) == ("job-submitted", "1970-01-01T00:00:01Z")


async def test_a_run_of_another_store_has_no_checkpoints_to_show(client: httpx.AsyncClient, tmp_path: Any) -> None:
    await client.post("/train", json={**RUN, "checkpoint_base_uri": str(tmp_path / "runs")})
    answer = (await client.get("/train/train-r/checkpoints")).json()
    assert answer == {"prefix": f"{tmp_path}/runs/r/framework=hf", "items": []}


async def never() -> AsyncIterator[str]:
    yield "one"
    await asyncio.Event().wait()


async def test_a_stream_without_lines_is_kept_alive() -> None:
    async def final() -> str:
        return ""

    events = stream_events(never(), final, keep_alive_s=0.01)
    got = [await anext(events) for _ in range(4)]
    assert got == [b": connected\n\n", encode_event("line", "one"), b": waiting\n\n", b": waiting\n\n"]
    await events.aclose()


async def test_lines_that_nobody_takes_are_not_read_ahead_without_end() -> None:
    num_read = 0

    async def endless() -> AsyncIterator[str]:
        nonlocal num_read
        while True:
            num_read += 1
            yield "x"

    async def final() -> str:
        return ""

    events = stream_events(endless(), final)
    await anext(events)
    await asyncio.sleep(0.05)
    assert num_read < 1100
    await events.aclose()


def test_an_event_of_several_lines_has_a_field_for_each() -> None:
    assert encode_event("end", "a\nb") == b"event: end\ndata: a\ndata: b\n\n"
    assert encode_event("end", "") == b"event: end\ndata: \n\n"


def test_options_come_from_the_environment() -> None:
    env = {
        "UNIFIED_MASTER": "tcp://m:1",
        "TRAINER_API_NAMESPACES": "a, b",
        "TRAINER_API_WRITES_PER_S": "2.5",
        "TRAINER_API_TOKEN": TOKEN,
    }
    options = GatewayOptions.from_environment(env)
    assert (options.master, options.namespaces, options.writes_per_s, options.devices) == (
        "tcp://m:1",
        ("a", "b"),
        2.5,
        None,
    )
    for name, text in (
        ("WRITES_PER_S", "many"),
        ("NODES", "0"),
        ("NODES", "1.5"),
        ("NAMESPACES", ","),
        ("BACKEND", "slurm"),
        ("READS_PER_S", "-1"),
    ):
        with pytest.raises(UsageError, match=f"TRAINER_API_{name}='{text}'"):
            GatewayOptions.from_environment({f"TRAINER_API_{name}": text})
