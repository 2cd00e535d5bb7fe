"""A store for each round, asked for in the job's own store."""

import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import psutil
import pytest

from tests.support.ports import unused_port
from unified.errors import ClusterError
from unified.protocol.agent_master import RunOrder
from unified.rounds.rendezvous_store import RoundStores, connect, listen, open_round

pytest.importorskip("torch")


class Host:
    def __init__(self, ports: Mapping[str, int] = MappingProxyType({})) -> None:
        self.stores = RoundStores("127.0.0.1", ports)
        self._threads: list[threading.Thread] = []

    def answer(self, requests: int) -> None:
        def serve() -> None:
            for _ in range(requests):
                self.stores.serve_one()

        thread = threading.Thread(target=serve)
        thread.start()
        self._threads.append(thread)

    def order(self, prefix: str, rank: int = 0) -> RunOrder:
        return RunOrder(
            round=1, rank=rank, world_size=2, store_host="127.0.0.1", store_port=self.stores.port, store_prefix=prefix
        )

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.join()


def test_ranks_of_a_round_share_a_store_and_rounds_do_not(host: Host) -> None:
    host.answer(2)
    first = [open_round(host.order("a", rank), "trainer", 10) for rank in range(2)]
    second = open_round(host.order("b"), "trainer", 10)
    assert first[0] == first[1]
    assert len({first[0], second, host.stores.port}) == 3
    connect("127.0.0.1", first[0], 10).set("address", "stale")
    assert not connect("127.0.0.1", second, 10).check(["address"])


def test_roles_that_ask_at_once_are_all_answered(host: Host) -> None:
    host.answer(8)
    with ThreadPoolExecutor(8) as pool:
        ports = list(pool.map(lambda i: open_round(host.order(f"role{i}"), f"role{i}", 10), range(8)))
    assert len(set(ports)) == 8


def test_asking_twice_gives_the_same_store(host: Host) -> None:
    host.answer(1)
    assert open_round(host.order("a"), "trainer", 10) == open_round(host.order("a"), "trainer", 10)


def test_only_the_newest_rounds_of_a_role_stay_open(host: Host) -> None:
    host.answer(4)
    other = open_round(host.order("x"), "actor", 10)
    ports = [open_round(host.order(prefix), "trainer", 10) for prefix in "abc"]
    for port in (other, *ports[1:]):
        connect("127.0.0.1", port, 10)
    with pytest.raises(RuntimeError, match="timed out"):
        connect("127.0.0.1", ports[0], 0.1)


def test_rank_that_waits_in_vain_is_told_for_whom(host: Host) -> None:
    with pytest.raises(ClusterError, match=r"rank 1 waited \d.*that rank 0 reached this point"):
        open_round(host.order("nobody-asks", rank=1), "trainer", 0.2)


def test_a_port_that_was_chosen_is_that_of_every_round() -> None:
    port = unused_port()
    host = Host({"trainer": port})
    host.answer(3)
    rounds = [open_round(host.order(prefix), "trainer", 10) for prefix in ("a", "b")]
    assert rounds == [port, port]
    connect("127.0.0.1", port, 10).set("address", "fresh")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        host.stores._fixed = {"trainer": taken.getsockname()[1]}
        with pytest.raises(ClusterError, match=r"port \d+ of 127.0.0.1 cannot be used: .*Choose another --master-port"):
            open_round(host.order("c"), "trainer", 10)
    host.join()


def test_a_store_listens_at_one_address_alone() -> None:
    host = Host()
    host.answer(1)
    ports = {host.stores.port, open_round(host.order("a"), "trainer", 10)}
    host.join()
    listeners = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {each.laddr.ip for each in listeners if each.laddr.port in ports} == {"127.0.0.1"}
    assert len([each for each in listeners if each.laddr.port in ports]) == 2


def test_an_address_that_is_not_this_hosts_own_is_listened_at_by_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Peers may reach a host at an address that a router translates."""
    with listen("192.0.2.1", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert "192.0.2.1 is not an address of this host" in capsys.readouterr().err
