"""The key on real sockets: who is let in, who is not, and what each side is told of it."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from unified.security.curve import Gatekeeper, new_key, secure_client, secure_server
from unified.security.handshakes import EVENTS, Handshakes
from unified.security.keys import ClusterKey
from unified.testing import eventually

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
DEADLINE_MS = 10_000
KEY, OTHER = new_key(), new_key()
PUBLIC_ONLY = ClusterKey(public=KEY.public, secret=OTHER.secret)
CURVE_LOGGER = "unified.security.curve"


class Server:
    """A PULL that demands a key, in a context of its own."""

    def __init__(self, key: ClusterKey | None) -> None:
        self.context: Context = zmq.Context()
        self.gatekeeper = Gatekeeper(self.context, key, name="server")
        self.socket: Socket = self.context.socket(zmq.PULL)
        self.gatekeeper.guard(self.socket)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)

    def take(self) -> list[bytes]:
        assert self.socket.poll(DEADLINE_MS), "nothing came"
        return self.socket.recv_multipart()

    def close(self) -> None:
        self.gatekeeper.close()
        self.socket.close(0)
        self.context.term()


class Client:
    def __init__(self, address: str, key: ClusterKey | None, *, claims: ClusterKey | None = None) -> None:
        self.context: Context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RECONNECT_IVL, 20)
        secure_client(self.socket, key)
        if claims is not None:  # the server's public half is known, and a key pair of one's own
            self.socket.curve_publickey, self.socket.curve_secretkey = claims.public.encode(), claims.secret.encode()
        self.monitor = self.socket.get_monitor_socket(EVENTS)
        self.handshakes = Handshakes(address, key)
        self.socket.connect(address)
        self.socket.send(b"hello")

    def told(self) -> str:
        deadline = time.monotonic() + DEADLINE_MS / 1000
        while self.handshakes.refusal is None:
            assert time.monotonic() < deadline, "it is told nothing"
            if self.monitor.poll(100):
                self.handshakes.read(self.monitor)
        return self.handshakes.refusal

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def serve() -> Iterator[Callable[[ClusterKey | None], Server]]:
    servers: list[Server] = []

    def start(key: ClusterKey | None) -> Server:
        servers.append(Server(key))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
    assert eventually(lambda: not gatekeepers(), message="the gatekeeper's thread is left")


@pytest.fixture
def join() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def start(address: str, key: ClusterKey | None, *, claims: ClusterKey | None = None) -> Client:
        clients.append(Client(address, key, claims=claims))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


Serve = Callable[[ClusterKey | None], Server]
Join = Callable[..., Client]


def gatekeepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bus-gatekeeper"]


def test_the_same_key_is_let_in(serve: Serve, join: Join) -> None:
    server = serve(KEY)
    client = join(server.address, KEY)
    assert server.take() == [b"hello"]
    assert client.monitor.poll(DEADLINE_MS)
    assert client.handshakes.read(client.monitor)
    assert client.handshakes.refusal is None
    assert server.gatekeeper.num_refused == 0


@pytest.mark.parametrize(
    ("key", "claims", "server_says", "client_is_told"),
    [
        (None, None, "it has no cluster key|it broke off the handshake", "wants a cluster key: set UNIFIED_KEY_FILE"),
        (OTHER, None, "it has another cluster key", "refused this side's cluster key SHA256:"),
        (KEY, OTHER, "it has the public half", "refused this side's cluster key SHA256:"),
        (PUBLIC_ONLY, None, "it has another cluster key|it broke off", "refused this side's cluster key SHA256:"),
    ],
    ids=["no key", "another key", "the public half alone", "the public half, claimed without its secret"],
)
def test_whoever_has_not_the_key_is_refused_and_told(
    serve: Serve,
    join: Join,
    caplog: pytest.LogCaptureFixture,
    key: ClusterKey | None,
    claims: ClusterKey | None,
    server_says: str,
    client_is_told: str,
) -> None:
    server = serve(KEY)
    with caplog.at_level(logging.WARNING, CURVE_LOGGER):
        stranger = join(server.address, key, claims=claims)
        assert client_is_told in stranger.told()
        eventually(lambda: server.gatekeeper.num_refused, message="the server did not count it")
        member = join(server.address, KEY)
        assert server.take() == [b"hello"]
        assert member.handshakes.refusal is None
    assert not server.socket.poll(50), "a stranger's message came through"
    first = caplog.records[0].getMessage()
    assert "event=key-refused at='server' peer=" in first
    assert any(each in first for each in server_says.split("|"))


def test_what_is_refused_again_and_again_is_logged_once(
    serve: Serve, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(KEY)
    with caplog.at_level(logging.WARNING, CURVE_LOGGER):
        join(server.address, OTHER)
        join(server.address, OTHER)
        eventually(lambda: server.gatekeeper.num_refused >= 6, message="libzmq does not try again")
        eventually(lambda: "peer=127.0.0.1 " in caplog.text, message="it is not said who knocks")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines)) <= 2, "one for the address, and one more if its first look was too late"
    assert KEY.secret not in caplog.text
    assert OTHER.secret not in caplog.text


def test_a_client_with_a_key_is_told_of_a_server_that_has_none(serve: Serve, join: Join) -> None:
    server = serve(None)
    told = join(server.address, KEY).told()
    assert "has no cluster key, and this side has SHA256:" in told or "refused this side's cluster key" in told
    assert not gatekeepers(), "without a key nothing runs"


def test_without_a_gatekeeper_a_secured_server_lets_nobody_in(join: Join) -> None:
    context: Context = zmq.Context()
    socket = context.socket(zmq.PULL)
    secure_server(socket, KEY)
    socket.bind("tcp://127.0.0.1:*")
    join(socket.get_string(zmq.LAST_ENDPOINT), KEY)
    join(socket.get_string(zmq.LAST_ENDPOINT), KEY, claims=OTHER)
    assert not socket.poll(300)
    socket.close(0)
    context.term()


@pytest.mark.parametrize("first", ["gatekeeper", "socket"])
def test_it_closes_in_either_order_with_connections_open(join: Join, first: str) -> None:
    server = Server(KEY)
    join(server.address, KEY)
    join(server.address, OTHER)
    assert server.take() == [b"hello"]
    if first == "gatekeeper":
        server.gatekeeper.close()
        server.socket.close(0)
    else:
        server.socket.close(0)
        server.gatekeeper.close()
    server.context.term()
    assert not gatekeepers()


def test_one_gatekeeper_guards_several_sockets(serve: Serve, join: Join) -> None:
    server = serve(KEY)
    second = server.context.socket(zmq.PULL)
    server.gatekeeper.guard(second)
    second.bind("tcp://127.0.0.1:*")
    join(second.get_string(zmq.LAST_ENDPOINT), OTHER)
    join(second.get_string(zmq.LAST_ENDPOINT), KEY)
    assert second.poll(DEADLINE_MS)
    assert second.recv() == b"hello"
    eventually(lambda: server.gatekeeper.num_refused, message="nobody counted")
    assert len(gatekeepers()) == 1
    second.close(0)


def test_who_says_nothing_or_rubbish_disturbs_nobody(serve: Serve, join: Join) -> None:
    server = serve(KEY)
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as loud:
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        join(server.address, KEY)
        assert server.take() == [b"hello"]
        silent.close()
    eventually(lambda: server.gatekeeper.num_refused, message="the silent one was not counted")
