"""Counterpart of ``dlrover.python.common.log``: a logger that shows on stderr all from ``DLROVER_LOG_LEVEL`` up."""

from __future__ import annotations

import logging
import os

from unified.config.logging import log_from, log_level

default_logger = logging.getLogger("dlrover")
log_from(log_level(os.environ), default_logger.name)
