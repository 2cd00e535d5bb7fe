"""The code of jobs that a master keeps: what it takes, what it gives, and what it lets go."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from unified.config.settings import Intervals
from unified.job.spec import EntryPoint, JobSpec, RoleSpec, ShippedCode
from unified.protocol.client_master import CodePart, CodeState, FindCode, PutCode, ReadCode, Refused, SubmitJob
from unified_master import code_store
from unified_master.code_store import CodeStore
from unified_master.core.master import MasterCore
from unified_master.core.messages import Received


@pytest.fixture
def core() -> MasterCore:
    core = MasterCore(Intervals())
    core.restore(0.0, [], [])
    return core


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(store: CodeStore, core: MasterCore, data: bytes, size: int = 0, offset: int = 0, **named: Any) -> Any:
    digest = named.get("digest", digest_of(data))
    return store.answer(PutCode(digest=digest, size=size or len(data), offset=offset, data=data), core)


def test_an_archive_comes_in_parts_and_is_given_in_parts(
    tmp_path: Path, core: MasterCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_store, "BLOCK", 4)
    store, data = CodeStore(tmp_path / "code"), b"an archive"
    digest = digest_of(data)
    assert store.answer(FindCode(digest=digest), core) == CodeState(num_bytes=0)
    assert put(store, core, data[:4], 10, digest=digest) == CodeState(num_bytes=4)
    assert put(store, core, data[:4], 10, digest=digest) == CodeState(num_bytes=4), "sent twice"
    assert put(store, core, data[6:], 10, 6, digest=digest) == CodeState(num_bytes=4), "there is a gap"
    assert CodeStore(tmp_path / "code").answer(FindCode(digest=digest), core) == CodeState(num_bytes=4), "a new master"
    assert isinstance(store.answer(ReadCode(digest=digest, offset=0), core), Refused)
    assert put(store, core, data[4:], 10, 4, digest=digest) == CodeState(num_bytes=10, is_whole=True)
    assert put(store, core, b"more", 10, 10, digest=digest) == CodeState(num_bytes=10, is_whole=True)
    parts = [store.answer(ReadCode(digest=digest, offset=offset), core) for offset in (0, 4, 8, 12, -5, 1 << 63)]
    assert parts == [CodePart(data=part, size=10) for part in (b"an a", b"rchi", b"ve", b"", b"an a", b"")]
    assert [path.name for path in (tmp_path / "code").iterdir()] == [digest]


def test_other_bytes_than_announced_are_refused(tmp_path: Path, core: MasterCore) -> None:
    store = CodeStore(tmp_path / "code")
    refusal = put(store, core, b"other bytes", digest="0" * 64)
    assert isinstance(refusal, Refused)
    assert "has other bytes than announced" in refusal.reason
    assert not list((tmp_path / "code").iterdir())


@pytest.mark.parametrize("size", [0, -1, (1 << 30) + 1])
def test_a_size_that_no_archive_has_is_refused(tmp_path: Path, core: MasterCore, size: int) -> None:
    answer = CodeStore(tmp_path / "code").answer(PutCode(digest="0" * 64, size=size, offset=0, data=b"x"), core)
    assert isinstance(answer, Refused)
    assert not (tmp_path / "code").exists()


def test_what_no_living_job_has_goes_first(tmp_path: Path, core: MasterCore) -> None:
    store = CodeStore(tmp_path / "code", kept_bytes=25)
    archives = [bytes([number]) * 10 for number in range(4)]
    for number, data in enumerate(archives[:2]):
        put(store, core, data)
        os.utime(tmp_path / "code" / digest_of(data), (number, number))
    role = RoleSpec(name="r", kind="simple", entry_point=EntryPoint(kind="module", target="x"), total=1)
    code = ShippedCode(digest=digest_of(archives[0]), size=10, root="/laptop")
    core.step(
        1.0, Received(peer=b"p", request_id=1, message=SubmitJob(spec=JobSpec(name="j", roles=[role], code=code)))
    )
    for data in archives[2:]:
        put(store, core, data)
    left = {path.name for path in (tmp_path / "code").iterdir()}
    assert digest_of(archives[0]) in left, "the oldest, of a living job"
    assert digest_of(archives[3]) in left
    assert len(left) == 2


def test_a_disk_that_takes_nothing_is_said(tmp_path: Path, core: MasterCore) -> None:
    (tmp_path / "code").write_text("a file")
    refusal = put(CodeStore(tmp_path / "code"), core, b"x")
    assert isinstance(refusal, Refused)
    assert refusal.code == "unavailable"
    assert f"the master cannot keep the code of jobs in {tmp_path / 'code'}" in refusal.reason
