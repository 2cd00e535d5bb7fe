"""The cluster key: one file with a copy on every host of a cluster, which only its owner may read.

Anybody with the key can command the cluster, so it travels by hand (scp, a secret store). On one host, an agent passes
it to its workers through the socket pair that they inherit: never in an environment, a command line or a log.
`unified.security.curve` puts it on sockets; the cores of the daemons never see it.

A file may have a second pair, the successor, and the time at which it becomes the key (``unified key rotate``). A
successor that a process has learnt of (`learn`) holds for each object in the process that has the older pair.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from unified.config import settings
from unified.config.addresses import split_address
from unified.config.clusters import living_clusters
from unified.errors import KeyFileError, UsageError

logger = logging.getLogger(__name__)
KEY_VARIABLE = "UNIFIED_KEY_FILE"
INSECURE_VARIABLE = "UNIFIED_INSECURE"
_FIELD = re.compile(r'^\s*(public|secret)-key\s*=\s*"([^"\s]{40})"\s*$', re.MULTILINE)
_NEXT = re.compile(r'^next\s*\n\s*from\s*=\s*"([^"\s]+)"\s*$', re.MULTILINE)
_MAX_BYTES = 65536
CLOCK_SKEW_S = 60.0
"""Time around a change of keys in which both pairs are accepted: clocks of hosts differ."""
LISTENER_S = 7 * 86400.0
"""Time after a change of keys in which a master may still listen with the older pair; then clients refuse it."""
_TEXT = """\
# A cluster key of Unified, as ZeroMQ's own tools write theirs. Anybody who can read this file can command the cluster:
# keep it at mode 0600, copy it to every host, and never put it into a repository or an image.
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""
_NEXT_TEXT = """\
# The next key. From this time on it is the cluster's, and the one above is refused.
next
    from = "{since}"
    public-key = "{public}"
    secret-key = "{secret}"
"""


class ClusterKey(msgspec.Struct, frozen=True):
    """A CURVE key pair that all members of one cluster share. Its text hides the secret, and it cannot be pickled."""

    public: str
    """Public half: 40 characters of Z85, as ZeroMQ writes keys."""
    secret: str
    successor: ClusterKey | None = None
    """Pair that replaces this one; None: none is known."""
    replaced_at: float = 0.0
    """Time at which `successor` becomes the key, in seconds since 1970."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint: ``SHA256:`` and 16 hexadecimal digits, which help nobody to guess the key."""
        return f"SHA256:{hashlib.sha256(self.public.encode()).hexdigest()[:16]}"

    def __repr__(self) -> str:
        return f"ClusterKey({self.fingerprint})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # msgspec's own shows all fields
        return [("fingerprint", self.fingerprint)]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster key cannot be pickled or copied: pass the path of its file.")


_learnt: dict[str, ClusterKey] = {}
"""Keys with a successor that this process knows of, by public half."""
_met: set[str] = set()
"""Public halves that a master has proven to have: older pairs are not tried again."""


def learn(key: ClusterKey | None) -> bool:
    """Note that a key has a successor, for all holders of the key in this process; return True if that is news."""
    if key is None or key.successor is None or _learnt.get(key.public) == key:
        return False
    _learnt[key.public] = key
    return True


def current(key: ClusterKey, now: float | None = None) -> ClusterKey:
    """Return the pair to use now: `key`, or the pair that has replaced it.

    Args:
        now: seconds since 1970. Default: the clock's time.
    """
    return _around(key, time.time() if now is None else now)[1]


def master_listener(key: ClusterKey | None, attempt: int = 0) -> str:
    """Return the public half that a master, or its relay, may listen with; empty where there is no key.

    A master takes a new key when it starts again. So attempts 0, 1, 2, … try both pairs in turn, until it has shown the
    newer one, and for `LISTENER_S` at most.
    """
    if key is None:
        return ""
    at = time.time()
    older, now, newer = _around(key, at)
    other = newer if newer is not None and at > now.replaced_at - CLOCK_SKEW_S else None
    if older is not None and at < older.replaced_at + LISTENER_S and now.public not in _met:
        other = older
    return other.public if other is not None and attempt % 2 else now.public


def met(public: str) -> None:
    """Note that a master has proven to have this pair."""
    _met.add(public)


def accepted(key: ClusterKey, now: float | None = None) -> list[ClusterKey]:
    """Return the pairs that a client may show: the current one, its successor, and for a while the replaced one."""
    at = time.time() if now is None else now
    older, found, newer = _around(key, at)
    is_near = older is not None and at < older.replaced_at + CLOCK_SKEW_S
    return [found, *([older] if is_near and older is not None else []), *([newer] if newer is not None else [])]


def _around(key: ClusterKey, now: float) -> tuple[ClusterKey | None, ClusterKey, ClusterKey | None]:
    """Return the pair before the current one, the current one, and the one that comes next."""
    older, found = None, _learnt.get(key.public, key)
    while found.successor is not None and found.replaced_at <= now:
        older, found = found, _learnt.get(found.successor.public, found.successor)
    return older, found, found.successor


def default_key_file(env: Mapping[str, str] | None = None) -> Path:
    """Return ``$XDG_CONFIG_HOME/unified/cluster.key``, else ``~/.config/unified/cluster.key``; without a home,
    ``cluster.key`` in the folder of state."""
    return (settings.user_folder("XDG_CONFIG_HOME", ".config", env) or settings.home()) / "cluster.key"


def find_key(address: str, env: Mapping[str, str] | None = None) -> ClusterKey | None:
    """Return the key to use with the master at, or listening on, `address`; None: no key.

    ``UNIFIED_KEY_FILE`` names its file; empty means no key. If the variable is not set, the default file is used beyond
    loopback, if it exists: so clusters on one host need no key, even if their user has one. The cluster of
    ``unified up`` has a key of its own, which is found by its address, and not by the variable.

    Raises:
        KeyFileError: the named file is missing, or a file is open to others, or holds no key.
    """
    if env is None and is_loopback(address):
        own = next((found.key_file for found in living_clusters() if found.address == address), "")
        if own:
            return load_key(Path(own))
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
        # O_NONBLOCK: do not wait for the writer of a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            found = os.fstat(file.fileno())
            _check_private(path, found)
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise KeyFileError(
            f"the cluster key {path} cannot be read: {error.strerror}. `unified key new` makes a key; "
            f"{KEY_VARIABLE} names its file; an empty value means no key."
        ) from None
    if (key := parse_key(text)) is None:
        raise KeyFileError(f"{path} is no cluster key: copy it anew from the host where `unified key new` made it.")
    return key


def receive_key(descriptor: int, timeout_s: float = 60.0) -> ClusterKey:
    """Read the text of a key file from a pipe, which may stay open; KeyFileError: no key came in time."""
    deadline, text, poll = time.monotonic() + timeout_s, b"", select.poll()
    try:
        poll.register(descriptor, select.POLLIN)
        while (key := parse_key(text.decode(errors="replace"))) is None:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise KeyFileError(f"no cluster key came through descriptor {descriptor} within {timeout_s:g} s.")
            if not (part := os.read(descriptor, _MAX_BYTES)) or len(text) > _MAX_BYTES:
                raise KeyFileError(f"descriptor {descriptor} did not deliver a cluster key.")
            text += part
    except OSError as error:
        raise KeyFileError(f"the cluster key cannot be read from descriptor {descriptor}: {error.strerror}.") from None
    return key


def parse_key(text: str) -> ClusterKey | None:
    """Return the key of a key file's text; None if there is none."""
    first, *rest = _NEXT.split(text)
    fields = dict(_FIELD.findall(first))
    if set(fields) != {"public", "secret"}:
        return None
    if not rest:
        return ClusterKey(public=fields["public"], secret=fields["secret"])
    try:
        replaced_at = datetime.fromisoformat(rest[0]).timestamp()
    except ValueError:
        return None
    successor = parse_key(rest[1]) if len(rest) == 2 else None
    if successor is None:
        return None
    return ClusterKey(fields["public"], fields["secret"], successor, replaced_at)


def key_text(key: ClusterKey) -> str:
    """Return a key, and its successor, as the text of a key file."""
    text = _TEXT.format(public=key.public, secret=key.secret)
    if key.successor is not None:
        since = time_text(key.replaced_at)
        text += _NEXT_TEXT.format(since=since, public=key.successor.public, secret=key.successor.secret)
    return text


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
        os.fchmod(descriptor, 0o600)  # for any umask
        file.write(key_text(key))
        file.flush()
        os.fsync(descriptor)


def rotate_key(path: Path, successor: ClusterKey, replaced_at: float) -> ClusterKey:
    """Add a successor to a key file, and remove a pair that was replaced before; return the pair it replaces.

    Raises:
        KeyFileError: the file cannot be read or written, or has a successor whose time has not come yet.
    """
    path = path.resolve()  # so that a link to a file that hosts share stays a link
    found = current(load_key(path))
    if found.successor is not None:
        raise KeyFileError(
            f"{path} has a successor already, {found.successor.fingerprint}, from {time_text(found.replaced_at)} on: "
            "rotate again after that time."
        )
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        old = path.stat()
        write_key(part, ClusterKey(found.public, found.secret, successor, replaced_at))
        os.chmod(part, stat.S_IMODE(old.st_mode))
        if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(part, old.st_uid, old.st_gid)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise KeyFileError(f"the cluster key {path} cannot be replaced: {error.strerror}.") from None
    return found


def time_text(moment: float) -> str:
    """Return a time, in seconds since 1970, as ``2026-11-26T10:00:00+00:00``."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


class KeyWatch:
    """Watch that looks every `LOOK_S` for a successor of a daemon's key, so that no daemon has to be started again.

    Args:
        key: the daemon's key; None: it has none, and the watch does nothing.
        find: reads the key file again; None: the watch does nothing.
    """

    LOOK_S = 5.0

    def __init__(self, key: ClusterKey | None, find: Callable[[], ClusterKey | None] | None) -> None:
        learn(key)
        self._key = key
        self._find = find
        self._said = ""
        self.next_deadline = None if key is None or find is None else time.monotonic() + self.LOOK_S
        """Time of the monotonic clock at which `look` is due; None: never."""

    def look(self) -> ClusterKey | None:
        """Return the key with its successor, if that is news."""
        if self._key is None or self._find is None:
            return None
        self.next_deadline = time.monotonic() + self.LOOK_S
        try:
            found = self._find()
        except (KeyFileError, OSError) as error:
            self._say(str(error))
            return None
        now = current(self._key)
        if found == ClusterKey(now.public, now.secret) and now.successor is not None:
            self._say("the key file no longer has the successor; daemons that know it keep it as the next key")
            return None
        if found is None or now.public not in (found.public, found.successor.public if found.successor else ""):
            self._say("the key file now has an unrelated key; this daemon keeps its own")
        elif learn(found) and found.successor is not None:
            since = time_text(found.replaced_at)
            prints = found.fingerprint, found.successor.fingerprint
            logger.info("event=key-successor key=%s successor=%s from=%s", *prints, since)
            return found
        return None

    def _say(self, reason: str) -> None:
        if reason != self._said:
            logger.warning("event=key-unread reason=%r", reason)
        self._said = reason


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach an address: ``127.0.0.1``, ``tcp://localhost:7077``, ``[::1]:0``.

    A name is not looked up: every name except ``localhost``, and a wildcard, counts as reachable for others.
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
    """Check that `who`, or the workers it starts, may listen there: beyond loopback only with a key, or if
    `insecure`. Return a warning for the log if they listen there without a key."""
    beyond = [address for address in addresses if not is_loopback(address)]
    if key is not None or not beyond:
        return None
    where = " and ".join(dict.fromkeys(beyond))
    if not insecure:
        raise UsageError(
            f"{who} would listen on {where}, which other hosts reach, without a cluster key: anybody who reaches it "
            f"could run programs here. Make a key with `unified key new`, copy its file to every host and name it with "
            f"{KEY_VARIABLE}; or say --insecure ({INSECURE_VARIABLE}=1) where you trust everybody on that network."
        )
    return f"{who} listens on {where} without a cluster key: anybody who reaches it can run programs here"


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"the cluster key {path} is not a plain file.")
    # A Secret that Kubernetes mounts for a group (fsGroup): only root may write it, and the group may read it.
    # Or a credential of systemd: owner and group are root, and an ACL, shown as the group's bits, allows to read it.
    groups = {0, os.getegid(), *os.getgroups()}
    is_mounted = found.st_uid == 0 and found.st_gid in groups and bool(os.geteuid() or found.st_gid)
    if found.st_uid != os.geteuid() and not is_mounted:
        raise KeyFileError(
            f"the cluster key {path} belongs to uid {found.st_uid}, not to uid {os.geteuid()}: "
            f"`chown {os.geteuid()} {path}`, or make a copy of your own."
        )
    if found.st_mode & (0o037 if is_mounted else 0o077):
        mend = "give its Secret `defaultMode: 0440`" if is_mounted else f"`chmod 600 {path}`"
        raise KeyFileError(
            f"the cluster key {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}): {mend}. "
            "If anybody may have read it, make a new one."
        )
