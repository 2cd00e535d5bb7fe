"""Parts of a state in the order of their changes, so that finding new changes costs no more than their number."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple

MAX_GONE = 1000
"""Most removals that are remembered. A client that missed more starts anew."""


class ChangedPart(NamedTuple):
    """A part of the state: ``("job", job_id)``, ``("worker", job_id, name)``, ``("node", "", name)``."""

    kind: str
    job_id: str
    name: str = ""


class ChangeLog:
    """Version of each part: the number of its last change.

    Args:
        first: version of the state without parts. Versions rise from there.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = self.version = first
        self.floor = first
        """Oldest version since which all changes are known."""
        self._versions: dict[ChangedPart, int] = {}  # in the order of their versions
        self._of_job: dict[str, dict[ChangedPart, int]] = {}
        self._gone: deque[ChangedPart] = deque()

    def tick(self) -> int:
        """Raise the version without a change of a part, and return it."""
        self.version += 1
        return self.version

    def touch(self, part: ChangedPart) -> None:
        """Note a change of a part, or a new one."""
        version = self.tick()
        for versions in (self._versions, self._of_job.setdefault(part.job_id, {})):
            versions.pop(part, None)
            versions[part] = version

    def remove(self, part: ChangedPart) -> None:
        """Forget a part, and with a job all its parts. A part of the kind ``gone-…`` replaces it."""
        belongings = self._of_job.pop(part.job_id, {}) if part.kind == "job" else [part]
        for each in belongings:
            self._versions.pop(each, None)
        gone = part._replace(kind=f"gone-{part.kind}")
        self._versions.pop(gone, None)
        self._versions[gone] = self.tick()
        self._gone.append(gone)
        while len(self._gone) > MAX_GONE:
            self.floor = max(self.floor, self._versions.pop(self._gone.popleft(), 0))

    def version_of(self, part: ChangedPart) -> int:
        """Return the version of a part; 0 for an unknown part."""
        return self._versions.get(part, 0)

    def has_changed(self, version: int, job_id: str = "") -> bool:
        """Return True if anything, or anything of this job, changed since a version."""
        if not job_id:
            return self.version > version
        return next(reversed(self._of_job.get(job_id, {"": 0}).values())) > version

    def since(self, version: int, limit: int, job_id: str = "") -> tuple[list[ChangedPart], int]:
        """Return the parts that changed since a version, oldest first, and the version that they lead to.

        Args:
            limit: most parts to return. If more have changed, the returned version is not the newest. The limit is
                exceeded if that version would otherwise be older than `floor`, and so useless.
            job_id: job whose parts are returned; empty: all.
        """
        versions = self._of_job.get(job_id, {}) if job_id else self._versions
        newer = list(takewhile(lambda item: item[1] > version, reversed(versions.items())))[::-1]
        limit = max(limit, bisect_right(newer, self.floor, key=itemgetter(1)))
        reached = max(newer[limit - 1][1], self.floor) if len(newer) > limit else self.version
        return [part for part, _ in newer[:limit]], reached
