"""The weights receiver, through which a worker gets the weights that another role sends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from unified.errors import UsageError
from unified.lazy import needed_by
from unified.values import ClosedOnExit
from unified.worker.context import current_worker

if TYPE_CHECKING:
    import torch

    from unified.bus.endpoint import BusEndpoint
    from unified.weights.state_dict import VersionedStateDict


class WeightsReceiver(ClosedOnExit):
    """Receives the weights that another role sends with `RoleGroup.sync_weights`. Make one when the worker starts.

    A new receiver first gets the newest version that a member of its role has, if one has any: so a worker that starts
    again answers no call with older weights than the others have.

    A version becomes visible in one moment, when it is complete. A version that was read stays unchanged. Only
    `load_into` loads a version into a model.

    Args:
        name: for a worker that receives several models; `sync_weights(…, name=…)` gives the same name.
        copy: True: copy each version into memory of this process as it comes. False: keep it where it arrives, which
            on the sender's host is shared memory of the sender. None: keep it, unless the sender says that its model is
            too large for that. See docs/weights.md for the costs.
        load: called with each version before its sender learns that it is here: `sync_weights` returns when all
            receivers have loaded it.
        bus: for tests; by default this worker's own.

    Raises:
        UsageError: this process has a receiver of that name already.
        NotInWorkerError: this process is not a worker.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        copy: bool | None = None,
        load: Callable[[VersionedStateDict], object] | None = None,
        bus: BusEndpoint | None = None,
    ) -> None:
        with needed_by("WeightsReceiver"):
            from unified.weights.receive_service import ReceiveService  # imports torch

        if not isinstance(name, str) or not name:
            raise UsageError(f"WeightsReceiver({name!r}): the name must be a non-empty string.")
        self.name = name
        if bus is None:
            worker = current_worker()
            bus, node, members = worker.bus, worker.actor_info.node, worker.actor_info.role_spec.workers
        else:
            node, members = "", [each.worker for each in bus.directory.entries]
        self._service = ReceiveService(bus, name, copy=copy, node=node, members=members, load=load)

    @property
    def version(self) -> int:
        """The number of the newest complete version; 0: none has come in this incarnation of the worker."""
        return self._service.version

    def wait(self, min_version: int | None = None, timeout: float | None = None) -> int:
        """Wait until a version of at least `min_version` (None: any) is complete; return its number.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            WeightsTimeoutError: it did not come in time; the message names the complete version and those under way.
            WeightsError: the receiver was closed.
        """
        return self._wait(min_version, timeout).version

    def state_dict(self) -> VersionedStateDict:
        """Return the newest complete version, without a copy: a state dict with its number as `.version`.

        Do not change its tensors: ``.clone()`` them first. They stay unchanged for as long as they are kept.

        Raises:
            WeightsTimeoutError: no version has come yet.
        """
        from unified.weights.state_dict import VersionedStateDict

        latest = self._wait(None, 0)
        state = VersionedStateDict(latest)
        state.version = latest.version
        if hasattr(latest, "_metadata"):
            state._metadata = latest._metadata
        return state

    def load_into(
        self,
        model: torch.nn.Module | MutableMapping[str, Any],
        min_version: int | None = None,
        timeout: float | None = None,
        strict: bool = True,
        *,
        lock: AbstractContextManager[Any] | None = None,
    ) -> int:
        """Wait as `wait` does, and copy that version into the model: always all of one version.

        Args:
            model: its parameters and buffers are written to, on their own device and in their own dtype; a sharded one
                (FSDP2, a DTensor) takes its own part. Or a state dict of tensors to write to.
            strict: the model must have exactly the keys that were sent. Else only the common keys are loaded.
            lock: held while the model is changed, but not during the wait; for threads that compute with the model.

        Returns:
            The version's number, `min_version` or higher.

        Raises:
            WeightsMismatchError: the version does not fit the model; names the keys. Nothing was changed.
            WeightsTimeoutError, WeightsError: as `wait`.
        """
        from unified.weights.state_dict import load

        latest = self._wait(min_version, timeout)
        with lock if lock is not None else contextlib.nullcontext():
            load(latest, model, strict=strict, what=f"version {latest.version} of weights {self.name!r}")
        return latest.version

    def close(self) -> None:
        """Stop receiving and drop all versions. Waiting calls raise WeightsError; senders are told that there is no
        receiver. Can be called twice."""
        self._service.close()

    def _wait(self, min_version: int | None, timeout: float | None) -> VersionedStateDict:
        return self._service.wait(1 if min_version is None else min_version, timeout)
