"""The cluster key: one file that every host of a cluster has a copy of, and nobody but its owner may read.

Its owner may command the cluster, so it travels by hand (scp, a secret store) and, on one host, from an agent to its
workers through the socket pair that they inherit: never through an environment, a command line or a log.
`unified.security.curve` puts it on sockets; the cores of the daemons never see it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from unified.config.addresses import split_address
from unified.errors import KeyFileError, UsageError

KEY_VARIABLE = "UNIFIED_KEY_FILE"
INSECURE_VARIABLE = "UNIFIED_INSECURE"
_FIELD = re.compile(r'^\s*(public|secret)-key\s*=\s*"([^"\s]{40})"\s*$', re.MULTILINE)
_MAX_BYTES = 65536
_TEXT = """\
# A cluster key of Unified, as ZeroMQ's own tools write theirs. Whoever can read this file can command the cluster:
# keep it at mode 0600, copy it to every host, and never put it into a repository or an image.
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


class ClusterKey(msgspec.Struct, frozen=True):
    """A CURVE key pair that all members of one cluster share. Neither its text nor its pickle has the secret."""

    public: str
    """Public half: 40 characters of Z85, as ZeroMQ writes keys."""
    secret: str

    @property
    def fingerprint(self) -> str:
        """Fingerprint: ``SHA256:`` and 16 hexadecimal digits, which help nobody to guess the key."""
        return f"SHA256:{hashlib.sha256(self.public.encode()).hexdigest()[:16]}"

    def __repr__(self) -> str:
        return f"ClusterKey({self.fingerprint})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # msgspec's own shows all fields
        return [("fingerprint", self.fingerprint)]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster key is not to be pickled or copied: give others the path of its file.")


def default_key_file(env: Mapping[str, str] | None = None) -> Path:
    """Return ``$XDG_CONFIG_HOME/unified/cluster.key``, else ``~/.config/unified/cluster.key``."""
    env = os.environ if env is None else env
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "unified" / "cluster.key"


def find_key(address: str, env: Mapping[str, str] | None = None) -> ClusterKey | None:
    """Return the key to use with the master at, or listening on, `address`; None to do without.

    ``UNIFIED_KEY_FILE`` names its file, and empty means none. Where it is not set, the default file is used beyond
    loopback, if it is there: so the clusters that live on one host need no key, whether or not their user has one.

    Raises:
        KeyFileError: the file is missing though it was named, is open to others, or holds no key.
    """
    env = os.environ if env is None else env
    if KEY_VARIABLE in env:
        return load_key(Path(env[KEY_VARIABLE])) if env[KEY_VARIABLE] else None
    default = default_key_file(env)
    return load_key(default) if not is_loopback(address) and os.path.lexists(default) else None


def load_key(path: Path) -> ClusterKey:
    """Read a key file.

    Raises:
        KeyFileError: the file is missing, belongs to somebody else, is open to others, or holds no key.
    """
    try:
        # Without waiting, not even for the writer of a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            found = os.fstat(file.fileno())
            _check_private(path, found)
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise KeyFileError(
            f"the cluster key {path} cannot be read: {error.strerror}. `unified key new` makes a key; "
            f"{KEY_VARIABLE} names its file, and empty means to do without one."
        ) from None
    fields = dict(_FIELD.findall(text))
    if set(fields) != {"public", "secret"}:
        raise KeyFileError(f"{path} is no cluster key: copy it anew from the host where `unified key new` made it.")
    return ClusterKey(public=fields["public"], secret=fields["secret"])


def write_key(path: Path, key: ClusterKey) -> None:
    """Write a new key file, for its owner alone; KeyFileError if it is there already."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise KeyFileError(
            f"{path} is there already, and the hosts that have a copy of it need it: it is not overwritten. "
            "Give another path, or remove it yourself."
        ) from None
    except OSError as error:
        raise KeyFileError(f"the cluster key {path} cannot be written: {error.strerror}.") from None
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask says
        file.write(_TEXT.format(public=key.public, secret=key.secret))


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach an address: ``127.0.0.1``, ``tcp://localhost:7077``, ``[::1]:0``.

    A name is not looked up: any but ``localhost`` counts as beyond, and so does a wildcard.
    """
    try:
        host = split_address(address).bare_host
    except ValueError:  # such as an IPv6 address without brackets
        host = address
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def may_go_without(env: Mapping[str, str] | None = None) -> bool:
    """Return the value of ``UNIFIED_INSECURE``: 1 or true, 0 or false; UsageError if it is neither."""
    env = os.environ if env is None else env
    text = env.get(INSECURE_VARIABLE, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise UsageError(f"{INSECURE_VARIABLE}={env[INSECURE_VARIABLE]!r} is neither 1 nor 0.")


def check_listening(who: str, addresses: Iterable[str], key: ClusterKey | None, *, insecure: bool) -> str | None:
    """Check that `who`, or the workers it starts, may listen there: beyond loopback only with a key, or `insecure`,
    which comes with the warning for the log that is returned."""
    beyond = [address for address in addresses if not is_loopback(address)]
    if key is not None or not beyond:
        return None
    where = " and ".join(dict.fromkeys(beyond))
    if not insecure:
        raise UsageError(
            f"{who} would listen on {where}, which other hosts reach, without a cluster key: whoever reaches it could "
            f"run programs here. Make a key with `unified key new`, copy its file to every host and name it with "
            f"{KEY_VARIABLE}; or say --insecure ({INSECURE_VARIABLE}=1) where you trust everybody on that network."
        )
    return f"{who} listens on {where} without a cluster key: whoever reaches it can run programs here"


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"the cluster key {path} is not a plain file.")
    if found.st_uid != os.geteuid():
        raise KeyFileError(
            f"the cluster key {path} belongs to uid {found.st_uid}, not to uid {os.geteuid()}: "
            f"`chown {os.geteuid()} {path}`, or make a copy of your own."
        )
    if found.st_mode & 0o077:
        raise KeyFileError(
            f"the cluster key {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}): `chmod 600 {path}`. "
            "If anybody may have read it, make a new one."
        )
