"""What coordinators need of a connection: to be told of an answer, and to give one up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from unified.client import connection as connection_module
from unified.client.connection import MasterConnection, Reply
from unified.errors import MasterUnreachableError
from unified.protocol.client_master import JobList, ListJobs, ListNodes
from unified.testing import eventually

if TYPE_CHECKING:
    from .conftest import FakeMaster
else:
    FakeMaster = Any


def test_an_answer_is_told_and_so_is_an_error(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: JobList(jobs=[])
    told: list[Reply] = []
    is_told = threading.Event()

    def tell(reply: Reply) -> None:
        told.append(reply)
        is_told.set()

    connection = MasterConnection(fake_master.address)
    connection.send(ListJobs(), when_done=tell)
    assert is_told.wait(10)
    assert told[0].result() == JobList(jobs=[])
    connection.close()
    connection.send(ListJobs(), when_done=tell)
    with pytest.raises(MasterUnreachableError, match="closed"):
        told[1].result()


def test_what_was_given_up_is_not_asked_again(fake_master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "RESEND_S", 0.05)
    fake_master.respond = lambda message: None
    told: list[Reply] = []
    with MasterConnection(fake_master.address) as connection:
        reply = connection.send(ListJobs(), timeout_s=30, when_done=told.append)
        other = connection.send(ListNodes(), timeout_s=30)
        eventually(lambda: len(fake_master.requests_of(ListJobs)) > 2)
        connection.abandon(reply)
        seen = len(fake_master.requests_of(ListNodes))
        eventually(lambda: len(fake_master.requests_of(ListNodes)) > seen + 1)
        settled = len(fake_master.requests_of(ListJobs))
        seen = len(fake_master.requests_of(ListNodes))
        eventually(lambda: len(fake_master.requests_of(ListNodes)) > seen + 3)
        assert len(fake_master.requests_of(ListJobs)) == settled
        assert not told
        connection.abandon(other)
