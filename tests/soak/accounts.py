"""The books of a soak, closed: what the journals say, held against what may be; one page of words, one picture.

An item is consumed when a consumer kept it and acknowledged it. What follows from the queue's promise:

- what was put (`put!`) is delivered, kept and acknowledged, once;
- a put that ended in doubt, or that its producer did not live to see the end of, may be in or not, but not twice;
- an item is delivered again only after the consumer that had it was killed, and then with certainty, unless that one
  had begun to acknowledge it: then nobody can know, and both are right.
"""

import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tests.soak.health import Sample
from tests.soak.journal import Fact, Incarnation

NEWS_S = 5.0
"""How long after a death a call may still be made that ends in it: the news has to travel."""
CLOCK_S = 0.05
AWAY_S = 10.0
"""How long after the death of a queue's owner a get may yet end without having reached the next."""
MOST_SHOWN = 20
OWNERS = {"durable": "vault-0"}
"""Of the queues whose owner is killed."""


class Kill(NamedTuple):
    at: float
    incarnation: Incarnation


@dataclass
class Delivery:
    """One item, once handed to one consumer."""

    incarnation: Incarnation
    taken_at: float
    kept_at: float = 0.0
    ack_begun_at: float = 0.0
    acked_at: float = 0.0
    is_doubtful: bool = False
    """Its acknowledgement ended in an error."""


@dataclass
class Story:
    """Everything that happened to one item."""

    queue: str
    put_begun: bool = False
    put_done: bool = False
    deliveries: list[Delivery] = field(default_factory=list)


@dataclass
class Accounts:
    """What came out."""

    wrong: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    calls_by_second: Counter[int] = field(default_factory=Counter)
    items: Counter[str] = field(default_factory=Counter)
    longest_lateness_s: float = 0.0

    @property
    def num_calls(self) -> int:
        return sum(self.calls.values())

    def shown(self) -> list[str]:
        """What is wrong, not all of it if it is much."""
        more = len(self.wrong) - MOST_SHOWN
        return [*self.wrong[:MOST_SHOWN], *([f"… and {more} more"] if more > 0 else [])]


def close(facts: Iterable[Fact], kills: Iterable[Kill], began_at: float = 0.0) -> Accounts:
    """Go through everything that was written down.

    Args:
        began_at: of the soak, so that what is wrong can say when.
    """
    accounts = Accounts()
    killed = {kill.incarnation: kill.at for kill in kills}
    deaths: dict[str, list[float]] = defaultdict(list)
    for incarnation, at in killed.items():
        deaths[incarnation.worker].append(at)
    stories: dict[str, Story] = {}
    for fact in facts:
        if fact.word == "calls":
            accounts.calls.update(fact.rest[0])
            accounts.calls_by_second[int(fact.at)] += sum(fact.rest[0].values())
            accounts.longest_lateness_s = max(accounts.longest_lateness_s, fact.rest[1])
        elif fact.word == "wrong":
            accounts.wrong.append(f"{fact.at - began_at:.1f} s, {named(fact.incarnation)}: {fact.rest[0]}")
        elif fact.word == "died":
            _check_death(accounts, fact, deaths, began_at)
        elif fact.word != "start":
            _note(accounts, stories, fact, deaths, began_at)
    for item_id, story in stories.items():
        _check_item(accounts, item_id, story, killed)
    return accounts


def _check_death(accounts: Accounts, fact: Fact, deaths: Mapping[str, list[float]], began_at: float) -> None:
    """A call may end in the death of whom it asked only if that one did die."""
    name, began, error = fact.rest
    targets = list(deaths) if name == "*" else [_short(name)]
    if not any(began - NEWS_S <= at <= fact.at + CLOCK_S for target in targets for at in deaths.get(target, ())):
        who = named(fact.incarnation)
        ago = min((fact.at - at for target in targets for at in deaths.get(target, ()) if at < fact.at), default=None)
        made = f"the call was made {fact.at - began:.1f} s ago"
        when = "nobody killed it" if ago is None else f"it was killed {ago:.1f} s ago and {made}"
        accounts.wrong.append(
            f"{fact.at - began_at:.1f} s, {who}: a call to {name} ended in its death, but {when}: {error}"
        )


def _note(
    accounts: Accounts,
    stories: dict[str, Story],
    fact: Fact,
    deaths: Mapping[str, list[float]],
    began_at: float,
) -> None:
    queue, ids = fact.rest[0], fact.rest[1]
    if fact.word == "doubt":
        accounts.wrong.append(f"{fact.at - began_at:.1f} s, {named(fact.incarnation)}: queue {queue}: {fact.rest[2]}")
    for item_id in ids:
        story = stories.setdefault(item_id, Story(queue))
        own = next((each for each in reversed(story.deliveries) if each.incarnation == fact.incarnation), None)
        match fact.word, own:
            case "put?", _:
                story.put_begun = True
            case "put!", _:
                story.put_done = True
            case "take", _:
                story.deliveries.append(Delivery(fact.incarnation, fact.at))
            case "keep", Delivery():
                own.kept_at = fact.at
            case "ack?", Delivery():
                own.ack_begun_at = fact.at
            case "ack!", Delivery():
                own.acked_at = fact.at
            case "ack~", Delivery():
                away = deaths.get(OWNERS.get(queue, ""), ())
                if not any(own.ack_begun_at - AWAY_S < at < fact.at for at in away):
                    own.acked_at = fact.at
            case "doubt", Delivery():
                own.is_doubtful = True


def _check_item(accounts: Accounts, item_id: str, story: Story, killed: Mapping[Incarnation, float]) -> None:
    def wrong(what: str) -> None:
        accounts.items[what.partition(":")[0]] += 1
        accounts.wrong.append(f"item {item_id} of queue {story.queue}: {what}")

    deliveries = sorted(story.deliveries, key=lambda each: each.taken_at)
    accounts.items["put" if story.put_done else "put in doubt"] += 1
    accounts.items["delivered"] += len(deliveries)
    accounts.items["delivered again"] += max(0, len(deliveries) - 1)
    if deliveries and not story.put_begun:
        wrong("out of nowhere: it was delivered and never put")
    for earlier, later in itertools.pairwise(deliveries):
        died_at = killed.get(earlier.incarnation)
        who, again = named(earlier.incarnation), named(later.incarnation)
        if earlier.acked_at:
            after = later.taken_at - earlier.acked_at
            wrong(f"doubled: {who} had acknowledged it, and {again} was given it {after:.3f} s later")
        elif died_at is None and not earlier.is_doubtful:
            wrong(f"doubled: {who} has it and lives, and {again} was given it too")
        elif died_at is not None and later.taken_at < died_at - CLOCK_S:
            wrong(f"doubled: {again} was given it {died_at - later.taken_at:.3f} s before {who} died")
    if not deliveries:
        if story.put_done:
            wrong("lost: it was put and never delivered")
        return
    last = deliveries[-1]
    who = named(last.incarnation)
    is_known = bool(last.acked_at)
    may_be = bool(last.ack_begun_at) and (last.incarnation in killed or last.is_doubtful)
    if is_known or may_be:
        accounts.items["consumed" if is_known else "consumed, its acknowledgement cut off"] += 1
    elif last.incarnation in killed:
        wrong(f"lost: {who} died with it and nobody was given it again")
    else:
        wrong(f"left over: {who} has it and never acknowledged it")


def named(incarnation: Incarnation) -> str:
    return f"{incarnation.worker}#{incarnation.incarnation}"


def _short(name: str) -> str:
    """``role-rank`` of a full worker name."""
    from unified.job.names import parse_worker

    role, rank = parse_worker(name)
    return f"{role}-{rank}"


def show(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("", "", title=f"{result['seconds']:g} seconds", show_header=False)
    for title, value in summary(result).items():
        table.add_row(title, value)
    console.print(table)
    for line in result["shown"]:
        console.print(line, style="red", markup=False, highlight=False)
    console.print("passed" if result["passed"] else f"FAILED: {len(result['wrong'])} things are wrong")


def summary(result: dict[str, Any]) -> dict[str, str]:
    items, calls = result["items"], result["calls"]
    ends: Counter[str] = Counter()
    for name, count in calls.items():
        ends[name.partition("/")[2]] += count
    growths = {name: total for name, (total, _) in result["growth"].items()}
    most = sorted(growths, key=lambda name: growths[name], reverse=True)[:4]
    return {
        "calls": f"{sum(calls.values())}, {result['calls_per_s']:.0f}/s; " + _counts(ends),
        "longest after its deadline": f"{result['longest_lateness_s']:.3f} s",
        "queue items": _counts(items),
        "killed": _counts(result["kills_by_role"]),
        "memory of all": f"{result['pss_mib']:.0f} MiB at the end (PSS), shared {result['shared_mib']:.0f} MiB",
        "what grows most": ", ".join(f"{name} {growths[name]:+.1f}" for name in most) or "too short to tell",
    }


def plot(samples: Sequence[Sample], calls: Sequence[tuple[float, int]], kills: Sequence[float], file: Path) -> None:
    """Calls, memory and descriptors by time, with a line for each kill.

    Args:
        calls: seconds since the beginning, and calls that ended within that second.
        kills: seconds since the beginning.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (rate, memory, descriptors) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 9), layout="constrained")
    times = [sample.at for sample in samples]
    rate.plot([at for at, _ in calls], [count for _, count in calls], linewidth=0.8)
    rate.vlines(kills, 0, 1, transform=rate.get_xaxis_transform(), color="red", linewidth=0.4, alpha=0.5)
    rate.set_ylabel("calls ended a second\n(red: a worker is killed)")
    rate.set_ylim(bottom=0)
    memory.plot(times, [sample.pss_mib for sample in samples], label="all processes (PSS)", color="black")
    memory.plot(times, [sample.shared_mib for sample in samples], label="shared memory", color="grey")
    for name in sorted({name for sample in samples for name in sample.anonymous_mib}):
        memory.plot(times, [sample.anonymous_mib.get(name) for sample in samples], label=name, linewidth=0.8)
        descriptors.plot(times, [sample.descriptors.get(name) for sample in samples], label=name, linewidth=0.8)
    memory.set_ylabel("MiB (of one process: its own)")
    memory.set_yscale("log")
    memory.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    descriptors.set_ylabel("open descriptors")
    descriptors.set_xlabel("seconds")
    descriptors.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file)
    pyplot.close(figure)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1]))
