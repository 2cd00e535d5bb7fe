"""Tokens that clients of the gateway show, each with a name for logs, limits and metrics.

A client's token is compared with every known token, as digests and with `hmac.compare_digest`: the time that this takes
tells nothing about the tokens. Neither logs nor errors show a token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from unified.errors import UsageError
from unified.security.keys import is_loopback

TOKEN_VARIABLE = "TRAINER_API_TOKEN"
TOKEN_FILE_VARIABLE = "TRAINER_API_TOKEN_FILE"
TOKEN_HEADER = "X-TRAINER-TOKEN"
ANYONE = "anyone"
"""Name of all clients of a gateway without tokens."""
OF_ENVIRONMENT = "default"
"""Name of the token that the environment gives."""
MIN_LENGTH = 8
_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})\s*:\s*(?P<token>\S+)(?P<read>\s+read)?")
_TOKEN = re.compile(r"[\x21-\x7e]+")


class Tokens:
    """The tokens of one gateway, by name. Without tokens it serves everybody, and may listen on loopback only.

    Args:
        tokens: tokens by name.
        readers: names of tokens that may only read.
    """

    def __init__(self, tokens: Mapping[str, str], readers: Collection[str] = ()) -> None:
        self._readers = frozenset(readers)
        for name, token in tokens.items():
            if not _TOKEN.fullmatch(token) or len(token) < MIN_LENGTH:
                which = f"in {TOKEN_VARIABLE}" if name == OF_ENVIRONMENT else f"named {name!r}"
                raise UsageError(
                    f"the token {which} cannot be used: a token has {MIN_LENGTH} characters or more, each of them a "
                    "letter, digit or other visible sign of ASCII."
                )
        self._digests = {name: _digest(token) for name, token in tokens.items()}
        if len(set(self._digests.values())) < len(self._digests):
            raise UsageError("two names have the same token: give each client one of its own.")

    @classmethod
    def load(cls, file: Path | None, env: Mapping[str, str] | None = None) -> Tokens:
        """Return the tokens of a file and of ``TRAINER_API_TOKEN``.

        A line of the file is ``name: token``, or ``name: token read`` for a token that may only read; ``#``
        begins a comment.

        Args:
            file: None: the file that the variable ``TRAINER_API_TOKEN_FILE`` names, if it is set.

        Raises:
            UsageError: the file cannot be read, is open to others, or has a line that is no token.
        """
        env = os.environ if env is None else env
        path = file or (Path(env[TOKEN_FILE_VARIABLE]) if env.get(TOKEN_FILE_VARIABLE) else None)
        tokens, readers = _read(path) if path is not None else ({}, set())
        if token := env.get(TOKEN_VARIABLE, "").strip():
            if OF_ENVIRONMENT in tokens:
                raise UsageError(f"{path} names a token {OF_ENVIRONMENT!r}, which is the name of {TOKEN_VARIABLE}.")
            tokens[OF_ENVIRONMENT] = token
        return cls(tokens, readers)

    @property
    def are_needed(self) -> bool:
        return bool(self._digests)

    def client_of(self, shown: str | None) -> str | None:
        """Return the name of the client that shows this token, or None if the token is unknown."""
        if not self._digests:
            return ANYONE
        digest = _digest(shown or "")
        found = [name for name, known in self._digests.items() if hmac.compare_digest(known, digest)]
        return found[0] if found else None

    def may_write(self, client: str) -> bool:
        """Return False for a client whose token is for reading alone."""
        return client not in self._readers

    def digest(self, client: str) -> bytes | None:
        """Return the digest of a client's token; None: there is no such client."""
        return self._digests.get(client)

    def check_listening(self, who: str, address: str) -> None:
        """Raise UsageError if `who` would listen where other hosts reach it, without a token."""
        if not self._digests and not is_loopback(address):
            raise UsageError(
                f"{who} would listen on {address}, which other hosts reach, and there is no token: anybody could run "
                f"programs on the cluster. Set {TOKEN_VARIABLE}, or give --token-file; or listen on 127.0.0.1."
            )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _read(path: Path) -> tuple[dict[str, str], set[str]]:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the token file {path} cannot be read: {reason}.") from None
    if mode & stat.S_IROTH:  # its group may read it: Kubernetes mounts a secret for the group `fsGroup`
        raise UsageError(f"the token file {path} can be read by everybody on this host: `chmod o-r {path}`.")
    tokens: dict[str, str] = {}
    readers: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise UsageError(f"{path}, line {number}, is no token: write `name: token`, or `name: token read`.")
        if found["name"] in tokens:
            raise UsageError(f"{path}, line {number}: there is a token {found['name']!r} already.")
        tokens[found["name"]] = found["token"]
        if found["read"]:
            readers.add(found["name"])
    return tokens, readers
