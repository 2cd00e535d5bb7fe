"""`JobInfo`: facts of a job for its own code."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from unified.job.enums import AcceleratorType
from unified.job.payload import decode
from unified.job.spec import Blob


class JobInfo:
    """The job this worker belongs to.

    Attributes:
        name: name as submitted.
        job_id: unique in the cluster: the name and a number.
        accelerator_type: `AcceleratorType.GPU`, `CPU` or `TPU`; equal to the string of that name.
    """

    def __init__(self, *, name: str, job_id: str, accelerator_type: str, user_config: Any) -> None:
        self.name = name
        self.job_id = job_id
        self.accelerator_type = AcceleratorType(accelerator_type)
        self._given = user_config

    @cached_property
    def user_config(self) -> Any:
        """Config that the driver gave to `config(…)`: a resolved DictConfig, or the object. Decoded at first use."""
        return decode(self._given) if isinstance(self._given, Blob) else self._given

    def __repr__(self) -> str:
        try:
            config = repr(self.user_config)
        except Exception as error:  # a config that cannot be decoded here must not make this unprintable
            config = f"<cannot be decoded: {error}>"
        return (
            f"JobInfo(name={self.name!r}, job_id={self.job_id!r}, "
            f"accelerator_type={self.accelerator_type.value!r}, user_config={config})"
        )
