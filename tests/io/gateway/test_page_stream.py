"""The stream of the page, from a real gateway before a master whose changes a test adds."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.fake_master import FakeMaster, worker_status
from tests.support.gateway_process import TOKEN, GatewayUnderTest, StartGateway
from tests.support.page import WatchedCluster, browser, job, stream
from tests.support.ports import unused_port
from unified.protocol.client_master import WatchCluster
from unified.protocol.records import EventRecord, Progress, Stage, WorkerState
from unified.security.curve import new_key
from unified.security.keys import write_key
from unified.testing import eventually

pytestmark = pytest.mark.processes


@pytest.fixture
def cluster(fake_master: FakeMaster) -> WatchedCluster:
    cluster = WatchedCluster()
    fake_master.respond = cluster.respond
    return cluster


@pytest.fixture
def gateway(cluster: WatchedCluster, fake_master: FakeMaster, start_gateway: StartGateway) -> GatewayUnderTest:
    return start_gateway("--master", fake_master.address)


@pytest.fixture
def client(gateway: GatewayUnderTest) -> Iterator[httpx.Client]:
    with browser(gateway.url, TOKEN) as client:
        yield client


def test_a_viewer_is_told_the_whole_and_then_what_changes(client: httpx.Client, cluster: WatchedCluster) -> None:
    with stream(client) as events:
        first = next(events)
        assert first.name == "whole"
        assert (first.data["version"], [row["job_id"] for row in first.data["jobs"]]) == (1, ["gpt-1"])
        assert first.data["nodes"]["node"] == ["n1"]
        event = EventRecord(at=2.0, event="job-stops", reason="stopped: by me", job="gpt-1", sequence=2)
        cluster.change(jobs=[job(Stage.STOPPING)], events=[event])
        told = next(events)
        assert (told.name, told.data["version"], told.data["nodes"]) == ("changes", 2, {})
        assert told.data["jobs"][0]["stage"] == "STOPPING"
        assert [each["reason"] for each in told.data["events"]] == ["stopped: by me"]


def test_one_job_is_told_with_its_workers(client: httpx.Client, cluster: WatchedCluster) -> None:
    with stream(client, "gpt-1") as events:
        first = next(events)
        assert (first.data["job"]["job_id"], first.data["workers"]["rank"]) == ("gpt-1", [0, 1])
        progress = Progress(step=7, total=9)
        cluster.change(jobs=[job(job_id="other")])  # no news of this one
        cluster.change(workers=[worker_status(1, node="n1", state=WorkerState.FINISHED, progress=progress)])
        told = next(events)
        assert told.name == "changes"
        assert (told.data["workers"]["rank"], told.data["workers"]["state"]) == ([1], ["FINISHED"])
        assert told.data["job"]["summary"]["trainer"]["step"]["fastest"] == 7
    with stream(client, "nobody") as events:
        assert next(events).data["job"] is None


def test_a_master_that_is_down_is_told_and_that_it_is_back(client: httpx.Client, cluster: WatchedCluster) -> None:
    with stream(client) as events:
        assert next(events).name == "whole"
        cluster.is_silent = True
        told = next(events)
        assert (told.name, told.data["up"]) == ("master", False)
        assert told.data["since"] > 0
        assert "no master answers" in told.data["reason"]
        with stream(client, "gpt-1") as others:  # the old state, and that it is old
            assert [next(others).name, next(others).name] == ["master", "whole"]
        cluster.is_silent = False
        assert next(events) == ("master", {"up": True})


def test_a_poll_ends_once_it_has_told_the_state(client: httpx.Client, cluster: WatchedCluster) -> None:
    """For browsers behind a proxy that holds an answer back until it has ended."""

    def told() -> list[str]:
        answer = client.get("/page/stream?poll=1&job=", headers={"X-Unified": ""})
        return [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]

    assert told() == ["whole"]
    assert told() == ["whole"]
    cluster.is_silent = True
    eventually(lambda: told() == ["master", "whole"], timeout=100)
    cluster.is_silent = False
    eventually(lambda: told() == ["whole"], timeout=100)


async def read_until(reader: asyncio.StreamReader, mark: bytes) -> bytes:
    return await asyncio.wait_for(reader.readuntil(mark), 100)


@asynccontextmanager
async def open_streams(
    gateway: GatewayUnderTest, client: httpx.Client, number: int
) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Open streams with the session of `client`, and close them."""
    url = urlsplit(gateway.url)
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    head = f"GET /page/stream HTTP/1.1\r\nHost: {url.netloc}\r\nSec-Fetch-Site: same-origin\r\nCookie: {cookie}\r\n\r\n"
    opened = [await asyncio.open_connection(url.hostname, url.port, limit=4_000_000) for _ in range(number)]
    try:
        for _, writer in opened:
            writer.write(head.encode())
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in opened), return_exceptions=True)


async def test_twenty_viewers_cost_the_master_what_one_does(
    client: httpx.Client, cluster: WatchedCluster, gateway: GatewayUnderTest, fake_master: FakeMaster
) -> None:
    """Each version is asked for, and answered, once; all viewers are sent the same bytes."""

    async def versions_told(viewers: int, versions: range) -> list[int]:
        async with open_streams(gateway, client, viewers) as readers:
            for reader in readers:
                await read_until(reader, b"event: whole\n")
                await read_until(reader, b"\n\n")
            for version in versions:
                assert cluster.change(jobs=[job(reason=f"change {version}")]) == version
                told = [await read_until(reader, b"\n\n") for reader in readers]
                assert b'"version":%d,' % version in told[0]
                assert all(part == told[0] for part in told)
        return [cluster.told.count(version) for version in versions]

    assert await versions_told(1, range(2, 12)) == [1] * 10
    assert await versions_told(20, range(12, 22)) == [1] * 10
    assert not [request for request in fake_master.requests_of(WatchCluster) if request.job]


async def test_the_201st_stream_is_refused_until_one_is_closed(client: httpx.Client, gateway: GatewayUnderTest) -> None:
    async with open_streams(gateway, client, 300) as readers:
        heads = [await read_until(reader, b"\r\n") for reader in readers]
    assert heads.count(b"HTTP/1.1 200 OK\r\n") == 200
    assert heads.count(b"HTTP/1.1 503 Service Unavailable\r\n") == 100

    def is_let_in() -> bool:
        with client.stream("GET", "/page/stream", headers={"X-Unified": ""}) as answer:
            return answer.status_code == 200

    eventually(is_let_in, timeout=100)


async def test_a_viewer_that_reads_nothing_holds_nobody_up_and_then_gets_the_newest_state(
    client: httpx.Client, cluster: WatchedCluster, gateway: GatewayUnderTest
) -> None:
    text = "x" * 1_000_000  # of which a few fill all buffers between the two
    async with open_streams(gateway, client, 2) as (slow, quick):
        for reader in (slow, quick):
            await read_until(reader, b"event: whole\n")
            await read_until(reader, b"\n\n")
        for number in range(30):  # the slow one takes as much as its buffer holds
            version = cluster.change(jobs=[job(reason=f"{number} {text}")])
            assert b'"version":%d,' % version in await read_until(quick, b"\n\n")
        names: list[str] = []
        versions: list[int] = []
        while not versions or versions[-1] != version:
            part = await read_until(slow, b"\n\n")
            if b'"version":' in part:  # and not a ping
                names.append("whole" if b"event: whole" in part else "changes")
                versions.append(int(part.partition(b'"version":')[2].split(b",")[0]))
        assert "whole" in names, "it was left behind, and what it missed came at once"
        assert len(versions) < 30


def test_a_page_goes_on_when_its_gateway_was_killed_and_came_back(
    cluster: WatchedCluster,
    fake_master: FakeMaster,
    start_gateway: StartGateway,
    tmp_path: Path,
) -> None:
    key = tmp_path / "cluster.key"
    write_key(key, new_key())
    env, port = {"UNIFIED_KEY_FILE": str(key)}, unused_port()
    first = start_gateway("--master", fake_master.address, port=port, env=env)
    with browser(first.url, TOKEN) as client:
        first.kill()
        start_gateway("--master", fake_master.address, port=port, env=env).url  # noqa: B018 - waits until it is there
        answer = client.get("/page/session")
        assert (answer.status_code, answer.json()["write"]) == (200, True)


def test_streams_end_when_the_gateway_is_stopped(client: httpx.Client, gateway: GatewayUnderTest) -> None:
    with stream(client) as events:
        assert next(events).name == "whole"
        gateway.process.terminate()
        assert list(events) == []  # the end of the answer, in order
    assert gateway.process.wait(100) == 0
