# SPDX-License-Identifier: Apache-2.0
"""Progress bars: only on terminals, for long loads, on rank 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from .options import check_load_progress


class Progress(Protocol):
    """What a `progress` argument is: called while a load or save runs, and at its end.

    Its arguments are bytes done, total bytes, tensors done and total tensors. An exception cancels
    the load or save.
    """

    def __call__(
        self, bytes_done: int, bytes_total: int, tensors_done: int, tensors_total: int, /
    ) -> object:
        """Receive the progress."""


# Shorter loads show no bar.
_DELAY_SECONDS = 1.0


def is_first_rank() -> bool:
    """Tell whether this process is rank 0 of its torch.distributed job, or has no job."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank() == 0)


def enable_tqdm(use_tqdm_on_load: bool, framework: Any = None) -> bool:
    """Tell whether to show progress: requested, tqdm installed, and rank 0 of the job."""
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
    """A bar for a waiting load with bytes, speed and files, shown after a second."""

    def __init__(self, file_count: int) -> None:
        """Record when the load started."""
        self._begin = time.monotonic()
        self._title = f"Loading {file_count} file{'s' if file_count != 1 else ''}"
        self._bar: Any = None

    def _open(self, total: int) -> Any:
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=self._title, unit="B", unit_scale=True, leave=False)

    def __call__(self, done: int, total: int, tensors_done: int, tensors_total: int) -> None:
        """Show the progress."""
        if self._bar is None:
            if done >= total or time.monotonic() - self._begin < _DELAY_SECONDS:
                return
            self._bar = self._open(total)
        self._bar.set_postfix_str(f"{tensors_done}/{tensors_total} tensors", refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


class BatchBar:
    """Batches and GB/s of an iteration. Does nothing if progress is not requested."""

    def __init__(self, title: str, batch_count: int, wanted: bool) -> None:
        """Create the bar, if it is requested and stderr is a terminal."""
        self._bar: Any = None
        self._begin, self._bytes = time.monotonic(), 0
        if batch_count and _on_terminal() and enable_tqdm(wanted):
            from tqdm.auto import tqdm

            self._bar = tqdm(total=batch_count, desc=title)

    def tick(self, size_bytes: Callable[[], int]) -> None:
        """Count a finished batch. size_bytes is only called if the bar is shown."""
        if self._bar is not None:
            self._bytes += size_bytes()
            rate = self._bytes / 1e9 / max(time.monotonic() - self._begin, 1e-9)
            self._bar.set_postfix_str(f"{rate:.2f} GB/s", refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


def wait(loader: Any, file_count: int, progress: Progress | bool | None = None) -> None:
    """Wait for a load and show its progress.

    progress: a callable (bytes done, total bytes, tensors done, total tensors), called on this
    thread; False for nothing; True or None for a bar, if stderr is a terminal and tqdm is
    installed.
    """
    check_load_progress(progress)
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
