"""Transfers of one object: from a bucket into memory; into a bucket in one request, or in parts, several at a time."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from email.utils import parsedate_to_datetime
from random import SystemRandom
from typing import Any, NamedTuple

from unified.core.backoff import Backoff
from unified.errors import AlreadyExistsError, StorageDeniedError, StorageError, StorageUnavailableError
from unified.storage.backend import Source
from unified.storage.blocks import blocks_of, pieces_of, size_of
from unified.storage.s3_client import code_of, s3_errors, status_of

NUM_BROKEN = 5
"""Number of answers that may break off without any byte having come, before it is given up."""
PAUSE = Backoff(first_s=0.1, limit_s=5.0)


class Download:
    """A reader of one object.

    Args:
        name: the object's whole key.
        etag: the version that is wanted; empty: that of the first answer.
    """

    def __init__(self, client: Any, bucket: str, name: str, etag: str = "") -> None:
        self._client = client
        self._bucket = bucket
        self._name = name
        self._etag = etag

    def fill(self, view: memoryview, start: int) -> int | None:
        """Fill `view` with the bytes from `start` on; return their number, or None: it is another version by now.

        An answer that breaks off is asked for again from there.
        """
        etag, num_read, num_broken = self._etag, 0, 0
        while True:
            before = num_read
            try:
                answer = self._ask(etag, start + num_read, start + len(view) - 1)
                if isinstance(answer, int):
                    return None if answer == 412 else num_read
                etag = answer["ETag"].strip('"')
                end = num_read + answer["ContentLength"]
                with s3_errors(self._bucket, self._name, "read"):
                    while num_read < end and (count := answer["Body"].readinto(view[num_read:end])):
                        num_read += count
                if num_read == end:
                    return num_read
                raise StorageUnavailableError(
                    f"cannot read s3://{self._bucket}/{self._name}: the answer ended {end - num_read} bytes early"
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
        with s3_errors(self._bucket, self._name, "read"):
            try:
                return self._client.get_object(
                    Bucket=self._bucket, Key=self._name, Range=f"bytes={first}-{last}", **condition
                )
            except ClientError as error:
                if status_of(error) in (412, 416):
                    return status_of(error)
                raise


MIN_PART_NBYTES = 5 << 20
MAX_PARTS = 10_000
MAX_PART_NBYTES = 5 << 30
NUM_SAME_SIZE = 900
"""Number of parts of an object of unknown size after which parts are twice as large: so 5 TiB fit, the limit of S3."""
TOKEN = "unified-write"
"""Key in an object's metadata that tells which write made it."""


class Sent(NamedTuple):
    nbytes: int
    etag: str
    at: float
    """Seconds since the epoch, by the store's clock."""


class Upload:
    """A writer of one object, once.

    Args:
        threads: to send parts with.
        name: the object's whole key.
        spare: memory of parts that were sent, to be used again: by the next write too, for new memory takes time.
    """

    def __init__(
        self,
        client: Any,
        threads: ThreadPoolExecutor,
        bucket: str,
        name: str,
        part_nbytes: int,
        num_parallel: int,
        spare: list[bytearray],
    ) -> None:
        self._client = client
        self._threads = threads
        self._where = {"Bucket": bucket, "Key": name}
        self._part_nbytes = part_nbytes
        self._num_parallel = num_parallel
        self._spare = spare
        # An answer may be lost, and the repeated request is refused by what the first one made: this tells whose it is.
        self._token = secrets.token_hex(16)

    def send(self, data: Source, *, if_absent: bool = False, if_match: str | None = None) -> Sent:
        """Send the object; raise AlreadyExistsError only with `if_absent` or `if_match`, an etag."""
        condition: dict[str, str] = {}
        if if_absent or if_match is not None:
            # Some stores ignore the condition below; and nobody wants to send gigabytes to be refused at the end.
            with contextlib.suppress(StorageDeniedError):  # who may write may not always read
                found = self._head()
                if (found and found["ETag"].strip('"')) != if_match:
                    raise self._taken()
            condition = {"IfNoneMatch": "*"} if if_match is None else {"IfMatch": if_match}
        blocks = blocks_of(pieces_of(data), part_sizes(self._part_nbytes, size_of(data)), self._spare)
        first = next(blocks, bytearray())
        second = next(blocks, None)
        if second is None:
            return self._put(first, condition)
        return self._send_parts(itertools.chain((first, second), blocks), condition)

    def _put(self, body: bytearray, condition: dict[str, str]) -> Sent:
        def put() -> Any:
            return self._client.put_object(**self._where, Body=body, Metadata={TOKEN: self._token}, **condition)

        return self._finish(put, len(body))

    def _send_parts(self, blocks: Iterator[bytearray], condition: dict[str, str]) -> Sent:
        with self._errors():
            begun = self._client.create_multipart_upload(**self._where, Metadata={TOKEN: self._token})
        upload = {**self._where, "UploadId": begun["UploadId"]}
        running: set[Future[None]] = set()
        parts: dict[int, str] = {}

        def send_part(number: int, body: bytearray) -> None:
            with self._errors():
                answer = self._client.upload_part(**upload, PartNumber=number, Body=body)
            parts[number] = answer["ETag"]
            if len(body) == self._part_nbytes and len(self._spare) <= self._num_parallel:
                self._spare.append(body)

        def complete() -> Any:
            listed = [{"PartNumber": number, "ETag": parts[number]} for number in sorted(parts)]
            return self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed}, **condition)

        nbytes = 0
        try:
            for number, body in enumerate(blocks, 1):
                nbytes += len(body)
                running.add(self._threads.submit(send_part, number, body))
                if len(running) >= self._num_parallel:
                    running = _await_some(running)
            while running:
                running = _await_some(running)
            return self._finish(complete, nbytes)
        except BaseException:
            for each in running:
                each.cancel()
            # Parts that come after the end of the upload would stay, and be charged for.
            wait(running)
            with contextlib.suppress(Exception):
                self._client.abort_multipart_upload(**upload)
            raise

    def _finish(self, request: Any, nbytes: int) -> Sent:
        """Make the request that completes the object."""
        from botocore.exceptions import ClientError

        with self._errors():
            try:
                answer = request()
            except ClientError as error:
                refused = status_of(error) in (409, 412) or code_of(error) == "NoSuchUpload"
                found = self._head() if refused else None
                if found is not None and found["Metadata"].get(TOKEN) == self._token:
                    return Sent(nbytes, found["ETag"].strip('"'), found["LastModified"].timestamp())
                # "No such key" is said of one that was to be replaced, and is gone.
                if (found is not None and status_of(error) in (409, 412)) or code_of(error) == "NoSuchKey":
                    raise self._taken() from error
                raise
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        at = parsedate_to_datetime(date).timestamp() if date else time.time()
        return Sent(nbytes, answer["ETag"].strip('"'), at)

    def _head(self) -> Any:
        """Return the object that is there; None: none."""
        from botocore.exceptions import ClientError

        with self._errors():
            try:
                return self._client.head_object(**self._where)
            except ClientError as error:
                if status_of(error) == 404:  # also for a bucket that is not there, which the write will say
                    return None
                raise

    def _taken(self) -> StorageError:
        return AlreadyExistsError(
            f"cannot write s3://{self._where['Bucket']}/{self._where['Key']}: it is there already, by another write"
        )

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return s3_errors(self._where["Bucket"], self._where["Key"], "write")


def part_sizes(part_nbytes: int, nbytes: int | None) -> Iterator[int]:
    """Yield the size of each part of an object of `nbytes`, or of unknown size, so that 10 000 parts are enough."""
    if nbytes is not None:
        return itertools.repeat(max(part_nbytes, -(-nbytes // MAX_PARTS)))
    return (min(part_nbytes << (index // NUM_SAME_SIZE), MAX_PART_NBYTES) for index in itertools.count())


def _await_some(running: set[Future[None]]) -> set[Future[None]]:
    """Wait until one has ended; return those that have not. An error of an ended one is raised."""
    done, others = wait(running, return_when=FIRST_COMPLETED)
    for each in done:
        each.result()
    return others
