"""Addresses of torch's store that a script sets itself."""

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from unified.errors import UsageError
from unified.rounds import own_store

ROUND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "40001", own_store.AGENT_STORE: "True", "RANK": "1"}


@pytest.fixture(autouse=True)
def round_store() -> Iterator[None]:
    own_store.learn("10.0.0.1", 40001)
    yield
    own_store._of_round = None


def uses_agent_store(arguments: dict[str, Any], **changed: str) -> str:
    environ = {**ROUND, **changed}
    with own_store.own_store(arguments, environ):
        inside = environ[own_store.AGENT_STORE]
    assert environ[own_store.AGENT_STORE] == "True"
    return inside


@pytest.mark.parametrize(
    "arguments",
    [{}, {"init_method": "env://"}, {"init_method": "file:///tmp/x"}, {"init_method": "tcp://10.0.0.1:40001"}],
)
def test_the_store_of_the_round_stays(arguments: dict[str, Any]) -> None:
    assert uses_agent_store(arguments) == "True"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", socket.gethostname()])
def test_the_round_s_port_at_another_name_of_its_host_is_the_round_s_store(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own_store.learn("127.0.0.1", 40001)
    environ = {**ROUND, "MASTER_ADDR": name, "RANK": "0"}
    arguments = {"init_method": f"tcp://{f'[{name}]' if ':' in name else name}:40001/?x=1"}
    with own_store.own_store({}, environ):
        assert (environ["MASTER_ADDR"], environ[own_store.AGENT_STORE]) == ("127.0.0.1", "True")
    with own_store.own_store(arguments, environ):
        assert environ[own_store.AGENT_STORE] == "True"
    assert arguments == {"init_method": "tcp://127.0.0.1:40001/?x=1"}
    assert capsys.readouterr().err == ""


def test_a_name_of_the_store_s_host_is_known_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"h0": "10.0.0.1", "10.0.0.1": "10.0.0.1", "h1": "10.0.0.2"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(2, 1, 6, "", (hosts[host], 0))])
    environ = {**ROUND, "MASTER_ADDR": "h0"}
    with own_store.own_store({}, environ):
        assert (environ["MASTER_ADDR"], environ[own_store.AGENT_STORE]) == ("10.0.0.1", "True")
    assert uses_agent_store({}, MASTER_ADDR="h1") == "False"


def test_a_store_that_is_given_stays() -> None:
    assert uses_agent_store({"store": object()}, MASTER_ADDR="localhost") == "True"


def test_on_one_host_rank_0_serves_the_store_that_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    own_store.learn("127.0.0.1", 40001)
    assert uses_agent_store({}, MASTER_ADDR="localhost", MASTER_PORT="12355") == "False"
    assert capsys.readouterr().err == ""
    assert uses_agent_store({"init_method": "tcp://127.0.0.1:12355"}, RANK="0") == "False"
    assert capsys.readouterr().err == (
        "unified: this script sets MASTER_ADDR=127.0.0.1 and MASTER_PORT=12355 itself, so rank 0 serves the store "
        "there. Without that the runtime's is used.\n"
    )


def test_loopback_cannot_be_reached_from_other_hosts() -> None:
    message = (
        "this script sets MASTER_ADDR=localhost and MASTER_PORT=12355 itself, which ranks of other hosts cannot reach. "
        "Delete the two lines: the runtime has set MASTER_ADDR=10.0.0.1 and MASTER_PORT=40001."
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        uses_agent_store({}, MASTER_ADDR="localhost", MASTER_PORT="12355")


def test_over_several_hosts_rank_0_looks_whether_the_address_is_its_own() -> None:
    assert uses_agent_store({}, MASTER_ADDR="192.0.2.7", MASTER_PORT="12355") == "False"  # rank 0 will look
    with pytest.raises(UsageError, match="which is no address of the host of rank 0"):
        uses_agent_store({"rank": 0}, MASTER_ADDR="192.0.2.7", MASTER_PORT="12355")
    assert uses_agent_store({"rank": 0}, MASTER_ADDR="0.0.0.0", MASTER_PORT="12355") == "False"


def test_a_variable_that_was_not_set_is_not_set_afterwards() -> None:
    environ = {name: value for name, value in ROUND.items() if name != own_store.AGENT_STORE}
    environ.update(MASTER_ADDR="192.0.2.7", MASTER_PORT="12355")
    with own_store.own_store({}, environ):
        assert environ[own_store.AGENT_STORE] == "False"
    assert own_store.AGENT_STORE not in environ
