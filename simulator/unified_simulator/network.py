"""The network of a simulated cluster: delays, losses, and ordered connections that can break."""

from __future__ import annotations

import random

import msgspec

RETRANSMIT_S = 0.2
"""First timeout of TCP's retransmission; each further timeout is twice as long."""


class NetworkOptions(msgspec.Struct, frozen=True):
    """Properties of every connection between an agent and the master."""

    delays_s: tuple[float, ...] = (0.001,)
    """Possible delays: each message draws one."""
    loss: float = 0.0
    """Share of packets that TCP has to send again; later messages of the connection wait for them."""


SLOW_AND_QUICK = NetworkOptions(delays_s=(0.001, 0.001, 0.01, 0.2))


class Connection(msgspec.Struct):
    """The connection of a node to the master. Messages keep their order; its end loses the messages on their way."""

    number: int = 0
    is_up: bool = True
    arrival: dict[str, float] = {}
    """Time at which the last message arrives, by direction."""
    num_underway: int = 0
    """Messages that are on their way: they will be received or lost."""

    def renew(self) -> None:
        self.number += 1
        self.arrival = {}


def delay_s(options: NetworkOptions, rng: random.Random | None) -> float:
    """Return the time that the next message takes."""
    if rng is None:
        return options.delays_s[0]
    delay, timeout = rng.choice(options.delays_s), RETRANSMIT_S
    while options.loss and rng.random() < options.loss:
        delay += timeout
        timeout *= 2
    return delay
