"""Transfers of one object: from a bucket into memory; into a bucket in one request, or in parts, several at a time."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from random import SystemRandom
from typing import Any, NamedTuple

from unified.core.backoff import Backoff
from unified.errors import AlreadyExistsError, StorageDeniedError, StorageError, StorageUnavailableError
from unified.storage.backend import Source, Stat
from unified.storage.blocks import blocks_of, pieces_of, size_of
from unified.storage.s3_client import code_of, s3_errors, status_of

NUM_BROKEN = 5
"""Number of answers in a row that may break off without a byte; one more is an error."""
PAUSE = Backoff(first_s=0.1, limit_s=5.0)


class Download(NamedTuple):
    client: Any
    bucket: str
    name: str
    """The object's whole key."""
    etag: str = ""
    """The version to read; empty: the version of the first answer."""

    def fill(self, view: memoryview, start: int) -> int | None:
        """Fill `view` with the bytes from `start` on; return their number, or None if the version has changed.

        If an answer breaks off, the rest is requested again.
        """
        etag, num_read, num_broken = self.etag, 0, 0
        while True:
            before = num_read
            try:
                answer = self._ask(etag, start + num_read, start + len(view) - 1)
                if isinstance(answer, int):
                    return None if answer == 412 else num_read
                etag = answer["ETag"].strip('"')
                end = num_read + answer["ContentLength"]
                with s3_errors(self.bucket, self.name, "read"):
                    while num_read < end and (count := answer["Body"].readinto(view[num_read:end])):
                        num_read += count
                if num_read == end:
                    return num_read
                raise StorageUnavailableError(
                    f"cannot read s3://{self.bucket}/{self.name}: the answer ended {end - num_read} bytes early"
                )
            except StorageUnavailableError:
                num_broken = 1 if num_read > before else num_broken + 1
                if num_broken > NUM_BROKEN:
                    raise
                time.sleep(PAUSE.delay_s(num_broken, SystemRandom()))

    def _ask(self, etag: str, first: int, last: int) -> Any:
        """Return the answer, or the status 412 (another version) or 416 (the object ends before)."""
        from botocore.exceptions import ClientError

        condition = {"IfMatch": f'"{etag}"'} if etag else {}
        with s3_errors(self.bucket, self.name, "read"):
            try:
                return self.client.get_object(
                    Bucket=self.bucket, Key=self.name, Range=f"bytes={first}-{last}", **condition
                )
            except ClientError as error:
                if status_of(error) in (412, 416):
                    return status_of(error)
                raise


MIN_PART_NBYTES = 5 << 20
MAX_PARTS = 10_000
MAX_PART_NBYTES = 5 << 30
NUM_SAME_SIZE = 900
"""For an object of unknown size, the part size doubles after this number of parts: 5 TiB fit, the limit of S3."""
TOKEN = "unified-write"
"""Key in an object's metadata that tells which write made it."""


@dataclass(frozen=True, eq=False)
class Upload:
    client: Any
    threads: ThreadPoolExecutor
    """Threads that send parts."""
    where: dict[str, str]
    """Bucket and whole key, as requests name them."""
    part_nbytes: int
    num_parallel: int
    spare: list[bytearray]
    """Memory of sent parts, which later parts and the next write reuse: new memory takes time."""
    token: str = field(default_factory=partial(secrets.token_hex, 16))
    """Mark of this write. If an answer is lost, the repeated request is refused, because the object exists already."""

    def send(self, data: Source, *, if_absent: bool = False, if_match: str | None = None) -> Stat:
        """Send the object; raise AlreadyExistsError only with `if_absent` or `if_match`, an etag."""
        condition: dict[str, str] = {}
        if if_absent or if_match is not None:
            # Some stores ignore the condition below, others refuse only after gigabytes were sent.
            with contextlib.suppress(StorageDeniedError):  # a writer may lack the right to read
                found = self._head()
                if (found and found["ETag"].strip('"')) != if_match:
                    raise self._taken()
            condition = {"IfNoneMatch": "*"} if if_match is None else {"IfMatch": if_match}
        blocks = blocks_of(pieces_of(data), part_sizes(self.part_nbytes, size_of(data)), self.spare)
        first = next(blocks, bytearray())
        second = next(blocks, None)
        if second is None:
            put = partial(self.client.put_object, Body=first, Metadata={TOKEN: self.token}, **self.where, **condition)
            return self._finish(put, len(first))
        return self._send_parts(itertools.chain((first, second), blocks), condition)

    def _send_parts(self, blocks: Iterator[bytearray], condition: dict[str, str]) -> Stat:
        with self._errors():
            begun = self.client.create_multipart_upload(**self.where, Metadata={TOKEN: self.token})
        upload = {**self.where, "UploadId": begun["UploadId"]}
        running: set[Future[None]] = set()
        parts: dict[int, str] = {}

        def send_part(number: int, body: bytearray) -> None:
            with self._errors():
                answer = self.client.upload_part(**upload, PartNumber=number, Body=body)
            parts[number] = answer["ETag"]
            if len(body) == self.part_nbytes and len(self.spare) <= self.num_parallel:
                self.spare.append(body)

        def complete() -> Any:
            listed = [{"PartNumber": number, "ETag": parts[number]} for number in sorted(parts)]
            return self.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed}, **condition)

        nbytes = 0
        try:
            for number, body in enumerate(blocks, 1):
                nbytes += len(body)
                running.add(self.threads.submit(send_part, number, body))
                if len(running) >= self.num_parallel:
                    running = _await_some(running)
            while running:
                running = _await_some(running)
            return self._finish(complete, nbytes)
        except BaseException:
            for each in running:
                each.cancel()
            # A part that arrives after the abort would stay, and be charged for.
            wait(running)
            with contextlib.suppress(Exception):
                self.client.abort_multipart_upload(**upload)
            raise

    def _finish(self, request: Callable[[], Any], nbytes: int) -> Stat:
        """Make the request that completes the object."""
        from botocore.exceptions import ClientError

        with self._errors():
            try:
                answer = request()
            except ClientError as error:
                refused = status_of(error) in (409, 412) or code_of(error) == "NoSuchUpload"
                found = self._head() if refused else None
                if found is not None and found["Metadata"].get(TOKEN) == self.token:
                    return Stat(self.where["Key"], nbytes, found["LastModified"].timestamp(), found["ETag"].strip('"'))
                # NoSuchKey: the object to replace is gone.
                if (found is not None and status_of(error) in (409, 412)) or code_of(error) == "NoSuchKey":
                    raise self._taken() from error
                raise
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        at = parsedate_to_datetime(date).timestamp() if date else time.time()
        return Stat(self.where["Key"], nbytes, at, answer["ETag"].strip('"'))

    def _head(self) -> Any:
        """Return the headers of the existing object; None: there is none."""
        from botocore.exceptions import ClientError

        with self._errors():
            try:
                return self.client.head_object(**self.where)
            except ClientError as error:
                if status_of(error) == 404:  # also for a missing bucket, which the write reports
                    return None
                raise

    def _taken(self) -> StorageError:
        return AlreadyExistsError(
            f"cannot write s3://{self.where['Bucket']}/{self.where['Key']}: it is there already, by another write"
        )

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return s3_errors(self.where["Bucket"], self.where["Key"], "write")


def part_sizes(part_nbytes: int, nbytes: int | None) -> Iterator[int]:
    """Yield the size of each part of an object of `nbytes`, or of unknown size, so that 10 000 parts are enough."""
    if nbytes is not None:
        return itertools.repeat(max(part_nbytes, -(-nbytes // MAX_PARTS)))
    return (min(part_nbytes << (index // NUM_SAME_SIZE), MAX_PART_NBYTES) for index in itertools.count())


def _await_some(running: set[Future[None]]) -> set[Future[None]]:
    """Wait until at least one has ended, and raise its error; return those that still run."""
    done, others = wait(running, return_when=FIRST_COMPLETED)
    for each in done:
        each.result()
    return others
