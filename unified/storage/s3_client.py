"""The client of botocore (the core of boto3) for any S3 store, and its errors as storage errors."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from unified.errors import (
    AlreadyExistsError,
    NotFoundError,
    StorageDeniedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UsageError,
)

_DENIED = {
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
}
_FULL = {"EntityTooLarge", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_BUSY = {"ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestTimeout", "SlowDown", "Throttling"}
NOT_INSTALLED = "S3 needs botocore: pip install 'unified-runtime[s3]'"
_CREDENTIALS = "the environment, the AWS configuration files, or the machine's role"


class S3Settings(msgspec.Struct, frozen=True, kw_only=True):
    bucket: str
    region: str | None
    endpoint_url: str | None
    max_attempts: int
    num_connections: int
    timeout_s: float


def check_installed() -> None:
    """Raise ImportError if botocore is not installed; do not import it."""
    if "botocore" not in sys.modules and importlib.util.find_spec("botocore") is None:
        raise ImportError(NOT_INSTALLED)


def make_client(settings: S3Settings) -> Any:
    """Return a new client. Credentials come from the standard chain when the first request is made."""
    try:
        from botocore.config import Config
        from botocore.session import get_session
    except ImportError as error:
        raise ImportError(NOT_INSTALLED) from error
    _keep_credentials_out_of_logs()
    # A new session each time: a session must not make clients in several threads at once.
    session = get_session()
    session.register_component("data_loader", _descriptions())
    options: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": settings.max_attempts},
        "max_pool_connections": settings.num_connections,
        "connect_timeout": settings.timeout_s,
        "read_timeout": settings.timeout_s,
        "tcp_keepalive": True,
        "user_agent_extra": "unified-runtime",
    }

    def build() -> Any:
        with s3_errors(settings.bucket, "", "reach"):
            return session.create_client(
                "s3", region_name=settings.region, endpoint_url=settings.endpoint_url, config=Config(**options)
            )

    client = build()
    if not _is_amazon(client.meta.endpoint_url):
        # Other stores are seldom reachable as bucket.host, and many do not know Amazon's checksum headers of 2025.
        options["s3"] = {"addressing_style": "path"}
        for name in ("request_checksum_calculation", "response_checksum_validation"):
            if f"AWS_{name.upper()}" not in os.environ:
                options[name] = "when_required"
        client.close()
        client = build()
    return client


@functools.cache
def _descriptions() -> Any:
    """Return botocore's descriptions of S3's calls. Reading them takes nine tenths of the time for a new client."""
    from botocore.loaders import create_loader

    return create_loader()


def check_endpoint(url: str | None) -> str | None:
    """Return `url`; raise UsageError if it is no address, or holds a password, which logs would show."""
    if url is None:
        return None
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise UsageError(f"an endpoint_url holds no user and no password; credentials are looked for in {_CREDENTIALS}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no address of a store: write it as https://host or http://host:port")
    return url


@contextlib.contextmanager
def s3_errors(bucket: str, key: str, action: str) -> Iterator[None]:
    """Turn errors of botocore into storage errors. `key` includes the prefix; empty: the error is about the bucket."""
    from botocore import exceptions as boto

    what = f"cannot {action} s3://{bucket}/{key}"
    try:
        yield
    except boto.ClientError as error:
        raise _refusal(what, bucket, error) from error
    except (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.CredentialRetrievalError,
        boto.ProfileNotFound,
        boto.TokenRetrievalError,
        boto.SSOError,
        boto.UnauthorizedSSOTokenError,
    ) as error:
        raise StorageDeniedError(f"{what}: no usable credentials in {_CREDENTIALS}: {error}") from error
    except (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError) as error:
        raise StorageUnavailableError(f"{what}: {error}; check the endpoint and the network, or try later") from error
    except (boto.ParamValidationError, boto.InvalidRegionError, ValueError) as error:
        raise UsageError(f"{what}: {str(error).strip()}") from error
    except boto.BotoCoreError as error:
        raise StorageError(f"{what}: {error}") from error


def code_of(error: Any) -> str:
    """Return S3's code of the error, such as ``"NoSuchKey"``; a bare number if the answer had no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _refusal(what: str, bucket: str, error: Any) -> StorageError:
    code, status = code_of(error), status_of(error)
    named = f"HTTP {status}" if code.isdigit() else f"{code} (HTTP {status})"
    said = f"{what}: {named}: {error.response.get('Error', {}).get('Message', '')}".rstrip(": ")
    if code == "NoSuchBucket":
        return NotFoundError(f"{what}: there is no bucket {bucket!r} at this endpoint; make it, or check the name")
    if status == 404:
        return NotFoundError(f"{what}: it is not there")
    if status == 412:
        return AlreadyExistsError(f"{what}: it is there already")
    if code in _DENIED or status in (401, 403):
        return StorageDeniedError(f"{said}; check the credentials ({_CREDENTIALS}) and the bucket's policy")
    if code in _FULL or status == 507:
        return StorageFullError(said)
    if status == 501:
        return StorageError(f"{said}; this store does not support the request")
    if code in _BUSY or status >= 500 or status == 429:
        return StorageUnavailableError(f"{said}; try later")
    return StorageError(said)


def _is_amazon(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu"))


def _keep_credentials_out_of_logs() -> None:
    """Turn off botocore's DEBUG log, which shows each request's headers, session token included."""
    logger = logging.getLogger("botocore")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
