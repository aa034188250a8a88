# SPDX-License-Identifier: Apache-2.0
"""Time limits of gpu_check.py, and its commands, which have one."""

from __future__ import annotations

import os
import subprocess
import time


class Clock:
    """The time that is left."""

    def __init__(self, minutes: float) -> None:
        """Start."""
        self.end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


class NoTimeError(RuntimeError):
    """The time of the whole check ended before a step did."""


def run_tests(command: list, environment: dict, limit: float,
              clock: Clock) -> subprocess.CompletedProcess:
    """Run tests. NoTimeError if they end neither in the time that is left nor within 5 s."""
    left = max(clock.left(), 5)
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True,
                              timeout=min(limit, left), check=False)
    except subprocess.TimeoutExpired as error:
        if left < limit:
            raise NoTimeError("no time left") from error
        raise


def run(command: list, seconds: float, **options: object) -> str:
    """Run a command and return its output."""
    return subprocess.run([os.fspath(part) for part in command], check=True, capture_output=True,
                          text=True, errors="replace", timeout=max(seconds, 1), **options).stdout


def words_of(error: Exception) -> str:
    """What a failed step said. With --json, the command writes its error to the standard output."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it did not end within {error.timeout:.0f} s"
    return str(getattr(error, "stderr", None) or getattr(error, "stdout", None) or error)
