"""The fixed sets of words in a job's description and in what the runtime says about it."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class AcceleratorType(StrEnum):
    """Values of `device_type`. GPU stands for any accelerator that torch drives."""

    CPU = "CPU"
    GPU = "GPU"
    TPU = "TPU"


ACCELERATOR_TYPE = AcceleratorType
"""The name of the reference API."""


class DLType(StrEnum):
    """Kind of a job; for people and for display."""

    PRE = "PRE"
    SFT = "SFT"
    RL = "RL"
    MULTIMODAL = "MULTIMODAL"


class DLStreamType(StrEnum):
    """Driver of a job: its own code, role by role (task), or the flow of data between roles."""

    TASK_STREAM = "TASK_STREAM"
    DATA_STREAM = "DATA_STREAM"


class RLRoleType(StrEnum):
    """The roles an `RLJob` may have."""

    TRAINER = "TRAINER"
    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    CRITIC = "CRITIC"


class FailoverTrigger(IntEnum):
    """Time at which a failure is acted on."""

    NEVER = 0
    WHEN_ROLE_IS_DONE = 1
    NOW = 2


class FailoverExec(IntEnum):
    """Action on a failure."""

    STOP_JOB = 0
    RESTART_JOB = 1
    RESTART_ROLE = 2


class WorkloadEntrypointType(StrEnum):
    """Forms of an entry point: `module.attr`, `file.py args`, `-m module args`, `--no-python program args`."""

    MODULE_FUNC = "MODULE_FUNC"
    PY_CMD = "PY_CMD"
    MODULE_CMD = "MODULE_CMD"
    PROGRAM_CMD = "PROGRAM_CMD"


class MasterStateBackendType(StrEnum):
    """Backend of the master's state: always its SQLite file. The others are names of the reference API."""

    SQLITE = "SQLITE"
    RAY_INTERNAL = "RAY_INTERNAL"
    HDFS = "HDFS"
    IN_MEMORY = "IN_MEMORY"


class MasterStage(StrEnum):
    """Stages of a job."""

    INIT = "INIT"
    """Submitted: the job waits for a place, or its workers are starting."""
    READY = "READY"
    """Placed, and every worker has answered."""
    RUNNING = "RUNNING"
    """Running: its workers have their orders to run; each running worker sees this stage."""
    STOPPING = "STOPPING"
    """Stopping: the outcome is decided, and workers are being stopped."""
    STOPPED = "STOPPED"


class ExecutionResultType(StrEnum):
    """Result of one run of an entry point."""

    SUCCESS = "SUCCESS"
    FAIL = "FAIL"
