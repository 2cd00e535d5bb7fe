"""One object, or a part of it, from a bucket into memory."""

from __future__ import annotations

import time
from random import SystemRandom
from typing import Any

from unified.core.backoff import Backoff
from unified.errors import StorageUnavailableError
from unified.storage.s3_client import s3_errors, status_of

NUM_BROKEN = 5
"""Answers that may break off without any byte having come, before it is given up."""
PAUSE = Backoff(first_s=0.1, limit_s=5.0)


class Download:
    """Reads from one object.

    Args:
        name: the object's whole key.
        etag: of the version that is wanted; empty: the one that the first answer is of.
    """

    def __init__(self, client: Any, bucket: str, name: str, etag: str = "") -> None:
        self._client = client
        self._bucket = bucket
        self._name = name
        self._etag = etag

    def fill(self, view: memoryview, start: int) -> int | None:
        """Fill `view` with the bytes from `start` on: how many there were, or None: it is another version by now.

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
        """The answer, or the status 412 (another version) or 416 (the object ends before)."""
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
