"""Constants of ``dlrover.python.unified.common.constant`` that mean something here."""

from __future__ import annotations

JOB_OPTIONS_ENV_PREFIX = "DLROVER_UNIFIED_"
"""Prefix of a variable that sets an option of `submit`; the option's name in capitals follows."""


class InternalDLWorkloadRole:
    """Names that roles have when a job gives them none."""

    ELASTIC_ROLE = "ELASTIC"
    GLOBAL_ROLE = "GLOBAL"


class DLWorkloadEnv:
    """Names of environment variables of workers."""

    JOB = "JOB"
    NAME = "NAME"
    ROLE = "ROLE"
    RANK = "RANK"
    WORLD_SIZE = "WORLD_SIZE"
    LOCAL_RANK = "LOCAL_RANK"
    LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
    NODE_RANK = "NODE_RANK"
    MASTER_ADDR = "MASTER_ADDR"
    MASTER_PORT = "MASTER_PORT"
    WORKING_DIR = "DLROVER_WORKING_DIR"
    RAY_NOSET_VISIBLE_DEVICES_ENVS = {
        f"RAY_EXPERIMENTAL_NOSET_{kind}": "true"
        for kind in (
            "CUDA_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "ASCEND_RT_VISIBLE_DEVICES",
            "HABANA_VISIBLE_MODULES",
            "NEURON_RT_VISIBLE_CORES",
            "TPU_VISIBLE_CHIPS",
            "ONEAPI_DEVICE_SELECTOR",
        )
    }
    """In a role's `env`: its workers see every device of their node, as with `disable_ray_auto_visible_device()`."""
