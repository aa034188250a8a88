# SPDX-License-Identifier: Apache-2.0
"""Forwards the library's log lines to Python's logging: logger "fastsafetensors"."""

from __future__ import annotations

import atexit
import os
import sys

from .._core import log_drain, log_start, log_stop

_LOGGER = "fastsafetensors"
_LEVELS = {0: 30, 1: 20, 2: 10}  # WARNING, INFO and DEBUG of logging

_level = -1
_process = 0


def _emit(level: int, text: str) -> None:
    import logging

    logging.getLogger(_LOGGER).log(_LEVELS[level], "%s", text)


def follow_logging() -> None:
    """Enable the levels that the logger wants now, and forward lines since the last call.

    Called by functions that open or save files. If the program has not imported logging, only
    warnings are enabled.
    """
    global _level
    if os.getpid() != _process:
        return  # a forked child logs nothing
    # A signal handler that interrupts the import of logging finds an incomplete module.
    find_logger = getattr(sys.modules.get("logging"), "getLogger", None)
    level = 0
    if find_logger is not None:
        logger = find_logger(_LOGGER)
        level = 2 if logger.isEnabledFor(10) else 1 if logger.isEnabledFor(20) else 0
    if level != _level:
        log_start(_emit, level)
        _level = level
    log_drain()


def start() -> None:
    """Called when the package is imported. Only the main interpreter logs."""
    global _process
    try:
        log_start(_emit, 0)
    except RuntimeError:
        return
    _process = os.getpid()
    atexit.register(log_stop)
