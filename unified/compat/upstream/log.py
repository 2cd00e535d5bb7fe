"""Counterpart of ``dlrover.python.common.log``: a logger that shows on stderr what begins at ``DLROVER_LOG_LEVEL``."""

from __future__ import annotations

import logging
import os

from unified.config.logging import log_from, log_level

default_logger = logging.getLogger("dlrover")
log_from(log_level(os.environ), default_logger.name)
