# SPDX-License-Identifier: Apache-2.0
"""The timer of 0.5, for programs that use it."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable

_log = logging.getLogger("fastsafetensors.parallel_loader")


def parse_time(timestamp_ms: float) -> str:
    """Format a time as "2026-01-31 12:00:00.000", in UTC. The unit is seconds, as in 0.5."""
    moment = datetime.datetime.fromtimestamp(timestamp_ms, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{moment.microsecond // 1000:03d}"


class TimingContext:
    """Times a block: `elapsed_ms` afterwards, and a log line.

    logger: called with the line; None: the package's own, at INFO. batch_id starts the line. Blocks
    shorter than threshold_ms are not logged.
    """

    def __init__(
        self,
        name: str,
        logger: Callable[[str], object] | None = None,
        batch_id: int | None = None,
        threshold_ms: float = 0,
        log_on_exit: bool = True,
    ) -> None:
        """Store the settings."""
        self.name = name
        self.logger = logger
        self.batch_id = batch_id
        self.threshold_ms = threshold_ms
        self.log_on_exit = log_on_exit
        self.start_time: float | None = None
        self.elapsed_ms: float = 0

    def __enter__(self) -> TimingContext:
        """Start."""
        self.start_time = time.time()
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        """Stop. Exceptions are not suppressed."""
        self.elapsed_ms = (time.time() - (self.start_time or 0)) * 1000
        if not self.log_on_exit or self.elapsed_ms < self.threshold_ms:
            return
        batch = "" if self.batch_id is None else f"Batch {self.batch_id}: "
        (self.logger or _log.info)(f"{batch}{self.name} took {self.elapsed_ms:.3f} ms")
