"""What viewers of the page are told while an answer of the master comes in several parts, and for how long."""

import asyncio
import json
from typing import Any

from tests.support.page import changes, job, node
from unified.protocol.client_master import Changes
from unified.protocol.records import NodeState
from unified_gateway.page.watcher import ClusterWatcher


class ScriptedMaster:
    """A master that answers what a test puts."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Changes] = asyncio.Queue()

    async def ask(self, *_: object, **__: object) -> Changes:
        return await self.answers.get()


def read(message: bytes) -> tuple[str, dict[str, Any]]:
    event, data, *_ = message.decode().split("\n")
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_who_comes_between_two_parts_of_an_answer_takes_nothing_from_the_others() -> None:
    master = ScriptedMaster()
    watcher = ClusterWatcher(master)  # type: ignore[arg-type]
    old = watcher.messages(watcher.join())
    assert (await anext(old)).startswith(b"retry")
    master.answers.put_nowait(changes(1, is_whole=True, jobs=[job()], nodes=[node("a")]))
    assert read(await anext(old))[0] == "whole"
    master.answers.put_nowait(changes(2, nodes=[node("a", state=NodeState.LOST)], is_last=False))
    await asyncio.sleep(0.01)
    assert watcher.mirror.version == 2
    new = watcher.messages(watcher.join())
    await anext(new)
    first_of_new = asyncio.ensure_future(anext(new))
    await asyncio.sleep(0.01)
    assert not first_of_new.done(), "half an answer is told to nobody"
    master.answers.put_nowait(changes(3, jobs=[job(reason="news")]))
    name, told = read(await anext(old))
    assert (name, told["attention"]["total"], told["nodes"]["node"]) == ("changes", 1, ["a"])
    assert read(await first_of_new)[0] == "whole"
    await watcher.close()
    assert [part async for part in old] == []


async def test_a_stream_ends_with_its_session() -> None:
    master = ScriptedMaster()
    watcher = ClusterWatcher(master)  # type: ignore[arg-type]
    is_over = asyncio.Event()
    told = watcher.messages(watcher.join(), is_over=is_over.is_set)
    await anext(told)
    for version in (1, 2):
        master.answers.put_nowait(changes(version, is_whole=version == 1, jobs=[job(reason=str(version))]))
        assert read(await anext(told))[1]["version"] == version
    is_over.set()
    master.answers.put_nowait(changes(3, jobs=[job(reason="3")]))
    assert [part async for part in told] == []
    await watcher.close()
