"""What the gateway's benchmark says of its figures, and a client of its load."""

import socket
import threading

import pytest

from benchmarks.gateway import load, report


def words(**figures: tuple[float, float]) -> dict[str, str]:
    found = {
        contender: {name: pair[place] for name, pair in figures.items()}
        for place, contender in enumerate(("gateway", "fastapi"))
    }
    return {str(verdict).partition(":")[0]: verdict.word for verdict in report.verdicts(found)}


def test_half_of_the_bare_rate_is_enough_and_a_query_a_second_the_most() -> None:
    assert [*words(reads=(500, 1000), queries=(1.2, 0), idle_queries=(0, 0)).values()] == ["pass"] * 3
    assert [*words(reads=(499, 1000), queries=(1.3, 0), idle_queries=(1, 0)).values()] == ["FAIL"] * 3
    assert set(words().values()) == {"not measured"}


def test_a_line_has_both_figures_and_the_floor() -> None:
    found = {"gateway": {"reads": 1500.0, "read_p50": 900.0}, "fastapi": {"reads": 2000.0, "read_p50": 450.0}}
    reads, p50 = report.lines(found)
    assert reads[1:] == ["1 500", "2 000", "0.75", "≥ 0.5 × bare"]
    assert p50[1:] == ["900", "450", "0.50", "–"]
    assert len(reads) == len(report.HEADINGS)


@pytest.mark.parametrize("parts", [1, 7])
def test_an_answer_may_come_in_parts(parts: int) -> None:
    answer = b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"a": 12}'
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(2):
                    connection.recv(4096)
                    for at in range(0, len(answer), -(-len(answer) // parts)):
                        connection.sendall(answer[at : at - (-len(answer) // parts)])

        thread = threading.Thread(target=serve)
        thread.start()
        client = load.HttpClient(server.getsockname()[1], "/")
        with client.socket:
            assert [client.ask(), client.ask()] == [b'{"a": 12}'] * 2
        thread.join()


def test_any_other_answer_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server:
        client = load.HttpClient(server.getsockname()[1], "/")
        client.socket.close()
        client.socket = ours
        theirs.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        with pytest.raises(load.WrongAnswerError, match="401"):
            client.receive()
