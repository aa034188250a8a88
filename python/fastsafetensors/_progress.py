# SPDX-License-Identifier: Apache-2.0
"""Progress bars: only on terminals, only for loads that take a while, only on rank 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

# (bytes done, bytes in all, tensors done, tensors in all)
Progress = Callable[[int, int, int, int], object]

# Loads shorter than this show nothing.
_DELAY_SECONDS = 1.0


def is_first_rank() -> bool:
    """Tell whether this process is alone or rank 0 of its torch.distributed job."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank() == 0)


def enable_tqdm(use_tqdm_on_load: bool, framework: Any = None) -> bool:
    """Tell whether progress is shown: asked for, tqdm installed, and rank 0 of the job."""
    if not use_tqdm_on_load:
        return False
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    return is_first_rank()


def _on_terminal() -> bool:
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # no stderr, or a closed one
        return False


class LoadBar:
    """Bytes, speed and files of a load that waits; made when the load has taken a second."""

    def __init__(self, file_count: int) -> None:
        """Note when the load began."""
        self._begin = time.monotonic()
        self._title = f"Loading {file_count} file{'s' if file_count != 1 else ''}"
        self._bar: Any = None

    def _open(self, total: int) -> Any:
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=self._title, unit="B", unit_scale=True, leave=False)

    def __call__(self, done: int, total: int, tensors_done: int, tensors_total: int) -> None:
        """Show how far the load is."""
        if self._bar is None:
            if done >= total or time.monotonic() - self._begin < _DELAY_SECONDS:
                return
            self._bar = self._open(total)
        self._bar.set_postfix_str(f"{tensors_done}/{tensors_total} tensors", refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()


class BatchBar:
    """Batches and GB/s of an iteration; nothing where progress is not wanted."""

    def __init__(self, title: str, batch_count: int, wanted: bool) -> None:
        """Make the bar, if it is wanted and stderr is a terminal."""
        self._bar: Any = None
        self._begin, self._bytes = time.monotonic(), 0
        if batch_count and _on_terminal() and enable_tqdm(wanted):
            from tqdm.auto import tqdm

            self._bar = tqdm(total=batch_count, desc=title)

    def tick(self, size_bytes: Callable[[], int]) -> None:
        """One batch is done; size_bytes is asked only where the bar is shown."""
        if self._bar is not None:
            self._bytes += size_bytes()
            rate = self._bytes / 1e9 / max(time.monotonic() - self._begin, 1e-9)
            self._bar.set_postfix_str(f"{rate:.2f} GB/s", refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def wait(loader: Any, file_count: int, progress: Progress | bool | None = None) -> None:
    """Wait for a load with its progress shown.

    progress: a callable (bytes done, bytes in all, tensors done, tensors in all), called in this
    thread; False for none; True or None for a bar where stderr is a terminal and tqdm installed.
    """
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress is a callable, True or False, not {type(progress).__name__}")
    if callable(progress):
        loader.wait(progress)
    elif progress is False or not _on_terminal() or not enable_tqdm(True):
        loader.wait()
    else:
        bar = LoadBar(file_count)
        try:
            loader.wait(bar)
        finally:
            bar.close()
