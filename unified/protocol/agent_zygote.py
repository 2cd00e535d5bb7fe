"""Messages between an agent and its zygote, over a Unix socket pair that also passes descriptors."""

from __future__ import annotations

from msgspec.msgpack import Decoder

from unified.values import Value


class Fork(Value, tag_field="type", tag="fork", frozen=True, kw_only=True):
    """Fork a child. Three descriptors travel with it: its control socket, its stdout, its stderr."""

    child: int
    """Number of the child, which the agent never uses twice."""
    fresh: bool = False
    """Replace the child by a new interpreter at once (``start_method="spawn"``)."""
    env: dict[str, str] = {}
    """Environment variables of the new interpreter, above the zygote's own environment."""


class ZygoteWord(Value, tag_field="type", frozen=True, kw_only=True):
    """Base of messages from the zygote."""


class ZygoteUp(ZygoteWord, tag="zygote-up", frozen=True, kw_only=True):
    """Readiness of a zygote: its imports are done, and it can fork."""

    pid: int
    has_torch: bool
    protocol_version: int = 0
    """Protocol version of `unified` in its interpreter. The agent cannot use a zygote with another version."""


class Forked(ZygoteWord, tag="forked", frozen=True, kw_only=True):
    child: int
    pid: int


class ForkFailed(ZygoteWord, tag="fork-failed", frozen=True, kw_only=True):
    child: int
    error: str


class ChildExited(ZygoteWord, tag="child-exited", frozen=True, kw_only=True):
    """End of a child that was reaped. `code` is its exit code, or minus the signal that ended it."""

    child: int
    pid: int
    code: int
    peak_kb: int = 0
    """Peak of its resident memory, in KiB."""


ZygoteToAgent = ZygoteUp | Forked | ForkFailed | ChildExited
zygote_to_agent: Decoder[ZygoteToAgent] = Decoder(ZygoteToAgent)
agent_to_zygote: Decoder[Fork] = Decoder(Fork)
