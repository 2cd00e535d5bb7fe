"""`unified ui` as a process: its URL answers, and its end leaves nothing."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fake_master import FakeMaster
from tests.support.master_process import StartMaster
from tests.support.page import WatchedCluster, browser, stream
from unified.cli.ui import lines
from unified.process import every_process, has_environment
from unified.protocol.client_master import JobList, ListJobs, WatchCluster
from unified.testing import eventually

pytestmark = pytest.mark.processes

Start = Callable[..., "Ui"]


class Ui:
    """The command, and what it has said."""

    def __init__(self, mark: str, master: str, *flags: str, **variables: str) -> None:
        self.mark = f"UNIFIED_TEST_MARK={mark}"
        env = {**os.environ, "UNIFIED_TEST_MARK": mark, "UNIFIED_CONNECT_S": "5", **variables}
        command = [sys.executable, "-m", "unified", "ui", "--master", master, *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True, start_new_session=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def sign_in(self) -> tuple[str, str]:
        """Return the URL and its ticket."""
        found = re.search(r"(http://\S+)/#ticket=(\S+)", self.line())
        assert found is not None
        return found[1], found[2]

    def left(self) -> list[int]:
        """Return its processes."""
        return [each.pid for each in every_process() if each.is_alive and has_environment(each.pid, self.mark)]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        code = self.process.wait(100)
        eventually(lambda: not self.left(), timeout=100, message="something is left")
        return code


@pytest.fixture
def start(start_master: StartMaster, tmp_path: Path) -> Iterator[Start]:
    master = start_master().address
    started: list[Ui] = []

    def begin(*flags: str, **variables: str) -> Ui:
        started.append(Ui(f"{tmp_path}-{len(started)}", variables.pop("master", master), *flags, **variables))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            each.end(signal.SIGKILL)
        each.process.communicate(timeout=100)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_its_url_answers_and_its_end_leaves_nothing(start: Start, number: int) -> None:
    ui = start()
    url, ticket = ui.sign_in()
    with browser(url, ticket) as client:
        assert client.get("/page/session").json()["write"] is True
        with stream(client) as events:
            assert next(events).name == "whole"
            code = ui.end(number)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_it_asks_for_the_cluster_before_its_url_is_opened(start: Start, fake_master: FakeMaster) -> None:
    cluster = WatchedCluster()
    no_jobs = JobList(jobs=[])
    fake_master.respond = lambda asked: no_jobs if isinstance(asked, ListJobs) else cluster.respond(asked)
    start(master=fake_master.address).sign_in()
    eventually(lambda: fake_master.requests_of(WatchCluster), timeout=100, message="the master was not asked")


def test_it_serves_the_page_alone(start: Start) -> None:
    """The training API would let everybody on this host run programs, as it has no token here."""
    url, ticket = start("--read-only", TRAINER_API_TOKEN="of-another-gateway").sign_in()
    assert httpx.get(f"{url}/healthz").status_code == 200
    for path in ("/train", "/metrics", "/docs"):
        assert httpx.get(f"{url}{path}", headers={"X-TRAINER-TOKEN": "of-another-gateway"}).status_code == 404
    with browser(url, ticket) as client:
        assert client.get("/page/session").json()["write"] is False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_unix_socket_goes_with_it(start: Start, tmp_path: Path, number: int) -> None:
    path = tmp_path / "own.sock"
    ui = start("--uds", str(path))
    assert f"ssh -N -L 8265:{path} " in ui.line()
    url, ticket = ui.sign_in()
    with browser(url, ticket, transport=httpx.HTTPTransport(uds=str(path))) as client:
        assert client.get("/page/session").status_code == 200
    ui.end(number)
    assert not path.exists()


def test_what_is_wrong_is_said_in_a_line(start: Start, tmp_path: Path) -> None:
    taken = start()
    url, _ = taken.sign_in()
    for ui, code, text in (
        (start(master="tcp://127.0.0.1:1"), 1, "no master answers at tcp://127.0.0.1:1"),
        (start("--port", str(httpx.URL(url).port)), 1, "cannot be listened on: Address already in use"),
        (start("--uds", str(tmp_path / "none" / "x.sock")), 1, "cannot be listened on: No such file or directory"),
        (start("--port", "1", "--uds", "x"), 2, "not allowed with argument"),
    ):
        _, said = ui.process.communicate(timeout=100)
        assert (ui.process.returncode, text in said, "Traceback" in said) == (code, True, False), said


def test_without_the_extra_it_says_which_to_install(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['uvicorn'] = None\n")
    ui = start(PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    _, said = ui.process.communicate(timeout=100)
    assert (ui.process.returncode, said) == (2, "unified-gateway needs uvicorn: pip install 'unified-runtime[http]'.\n")


def test_on_a_remote_host_the_way_there_is_said() -> None:
    remote = {"SSH_CONNECTION": "10.1.1.1 50000 10.2.2.2 22"}
    tunnel, page = lines("http://127.0.0.1:4000", "t" * 43, remote)
    assert re.fullmatch(r"on your own computer, first: ssh -N -L 4000:127\.0\.0\.1:4000 \S+@10\.2\.2\.2", tunnel)
    assert page.startswith(f"the page: http://127.0.0.1:4000/#ticket={'t' * 43} ")
    assert len(lines("http://127.0.0.1:4000", "t", {})) == 1
