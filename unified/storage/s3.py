"""The S3 backend: objects in a bucket of any S3 store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from unified.errors import StorageError, UsageError
from unified.storage.backend import Source, Stat, StorageBackend, check_key, check_start
from unified.storage.s3_client import S3Settings, check_endpoint, check_installed, make_client, s3_errors
from unified.storage.s3_transfer import MIN_PART_NBYTES, Download, Upload
from unified.threads import after_fork

LIST_PAGE = 1000
"""Number of objects in one answer of the store, which is also the limit of S3."""
NUM_VERSIONS = 10
"""Number of tries to read an object that is replaced meanwhile."""


class S3Backend(StorageBackend):
    """Objects in a bucket of Amazon S3 or any compatible store.

    Credentials come from the standard chain (environment, AWS configuration files, the machine's role); they are
    neither arguments nor logged. Large objects are sent and fetched in parts, several at once. Requests with a
    transient error are repeated. A killed process may leave parts that no listing shows and the store may charge for:
    give the bucket a rule that ends incomplete uploads.

    Args:
        bucket: its name; it must exist.
        region: of the bucket, such as ``"us-west-2"``; by default from the environment or the configuration.
        endpoint_url: of a store other than Amazon's; by default from ``AWS_ENDPOINT_URL_S3`` or the configuration.
        prefix: put before each key, with a `/` between.
        part_nbytes: bytes of one part, at least 5 MiB; grows by itself for objects of more than 10 000 parts.
        num_parallel: parts in flight at one time. Memory for one more is held, also between two writes.
        max_attempts: number of attempts of a request in all; the waits between them grow up to 20 s.
        timeout_s: for a connection, and for the next bytes of an answer.

    Raises:
        ImportError: botocore is not installed.
        UsageError: an argument is invalid. Errors of the store come with the first request.
    """

    def __init__(
        self,
        bucket: str,
        region: str | None = None,
        *,
        endpoint_url: str | None = None,
        prefix: str = "",
        part_nbytes: int = 16 << 20,
        num_parallel: int = 4,
        max_attempts: int = 5,
        timeout_s: float = 60.0,
    ) -> None:
        check_installed()
        if not bucket or "/" in bucket:
            raise UsageError(f"{bucket!r} is no name of a bucket: write s3://bucket/prefix, or S3Backend('bucket')")
        if part_nbytes < MIN_PART_NBYTES:
            raise UsageError(f"part_nbytes={part_nbytes} is too little for S3: give at least {MIN_PART_NBYTES} (5 MiB)")
        if num_parallel < 1 or max_attempts < 1 or timeout_s <= 0:
            raise UsageError("num_parallel and max_attempts must be at least 1, and timeout_s more than 0")
        self.bucket = bucket
        self.prefix = check_key(prefix.strip("/")) if prefix.strip("/") else ""
        self._part_nbytes = part_nbytes
        self._num_parallel = num_parallel
        self._settings = S3Settings(
            bucket=bucket,
            region=region,
            endpoint_url=check_endpoint(endpoint_url),
            max_attempts=max_attempts,
            # Several readers may share the backend. A connection beyond this number works, but is not kept.
            num_connections=2 * num_parallel,
            timeout_s=timeout_s,
        )
        self._begin()

    def __repr__(self) -> str:
        url = self._settings.endpoint_url
        where = f", endpoint_url={url!r}" if url else ""
        return f"S3Backend({self.bucket!r}, {self._settings.region!r}, prefix={self.prefix!r}{where})"

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name not in ("_lock", "_client", "_threads", "_spare")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _begin(self) -> None:
        """Share no connection, thread or lock with the parent of a fork: a shared connection mixes up answers."""
        self._lock = threading.Lock()
        self._client: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._spare: list[bytearray] = []
        after_fork(self._begin)

    def write(self, key: str, data: Source, *, if_absent: bool = False) -> Stat:
        return self._send(key, data, if_absent=if_absent)

    def replace(self, key: str, data: Source, etag: str) -> Stat:
        """See `StorageBackend`. In a store that ignores ``If-Match``, a concurrent write may be lost."""
        return self._send(key, data, if_match=etag)

    def _send(self, key: str, data: Source, *, if_absent: bool = False, if_match: str | None = None) -> Stat:
        name = self._name(key)
        client, threads = self._connect()
        where = {"Bucket": self.bucket, "Key": name}
        upload = Upload(client, threads, where, self._part_nbytes, self._num_parallel, self._spare)
        return upload.send(data, if_absent=if_absent, if_match=if_match)._replace(key=key)

    def read(self, key: str) -> bytes:
        for _ in range(NUM_VERSIONS):
            found = self.stat(key)
            buffer = bytearray(found.nbytes)
            if self._fill(key, memoryview(buffer), 0, found.etag):
                return bytes(buffer)
        raise self._restless(key)

    def read_into(self, key: str, buffer: bytearray | memoryview, start: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        check_start(start)
        if 0 < len(view) <= self._part_nbytes:  # one request
            for _ in range(NUM_VERSIONS):
                num_read = Download(self._connect()[0], self.bucket, self._name(key)).fill(view, start)
                if num_read is not None:
                    return num_read
            raise self._restless(key)
        for _ in range(NUM_VERSIONS):
            found = self.stat(key)
            wanted = view[: max(0, min(len(view), found.nbytes - start))]
            if self._fill(key, wanted, start, found.etag):
                return len(wanted)
        raise self._restless(key)

    def list(self, prefix: str = "") -> list[Stat]:
        client, _ = self._connect()
        cut = len(self.prefix) + 1 if self.prefix else 0
        start = f"{self.prefix}/{prefix}" if self.prefix else prefix
        found = []
        with s3_errors(self.bucket, start, "list"):
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=start, PaginationConfig={"PageSize": LIST_PAGE}
            )
            for page in pages:
                for each in page.get("Contents", ()):
                    key = each["Key"][cut:]
                    if not key.endswith("/"):  # some tools mark a folder so
                        found.append(Stat(key, each["Size"], each["LastModified"].timestamp(), each["ETag"].strip('"')))
        return sorted(found, key=lambda stat: stat.key.encode())

    def delete(self, key: str) -> None:
        name = self._name(key)
        client, _ = self._connect()
        with s3_errors(self.bucket, name, "delete"):
            client.delete_object(Bucket=self.bucket, Key=name)

    def stat(self, key: str) -> Stat:
        name = self._name(key)
        client, _ = self._connect()
        with s3_errors(self.bucket, name, "stat"):
            found = client.head_object(Bucket=self.bucket, Key=name)
        return Stat(key, found["ContentLength"], found["LastModified"].timestamp(), found["ETag"].strip('"'))

    def close(self) -> None:
        with self._lock:
            client, threads = self._client, self._threads
            self._client = None
            self._threads = None
            self._spare.clear()
        if threads is not None:
            threads.shutdown(wait=True)
        if client is not None:
            client.close()

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)

    def _connect(self) -> tuple[Any, ThreadPoolExecutor]:
        with self._lock:
            if self._client is None or self._threads is None:
                self._client = make_client(self._settings)
                self._threads = ThreadPoolExecutor(self._num_parallel, thread_name_prefix="unified-s3")
            return self._client, self._threads

    def _fill(self, key: str, view: memoryview, start: int, etag: str) -> bool:
        """Fetch the version `etag` into all of `view`, in parts; return False if the version has changed."""
        client, threads = self._connect()
        download = Download(client, self.bucket, self._name(key), etag)
        offsets = range(0, len(view), self._part_nbytes)
        if len(offsets) == 1:
            return download.fill(view, start) == len(view)
        parts = [view[offset : offset + self._part_nbytes] for offset in offsets]
        running = [
            threads.submit(download.fill, part, start + offset) for part, offset in zip(parts, offsets, strict=True)
        ]
        try:
            return all(each.result() == len(part) for each, part in zip(running, parts, strict=True))
        finally:
            for each in running:
                each.cancel()
            wait(running)  # nothing may write into the caller's buffer after this

    def _restless(self, key: str) -> StorageError:
        return StorageError(f"cannot read s3://{self.bucket}/{self._name(key)}: it was replaced during each try")
