# SPDX-License-Identifier: Apache-2.0
"""Paths that are kept for later, when the program may have changed its current folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def absolute_path(path: str | bytes | os.PathLike[Any]) -> Path:
    """Return a path that leads to the same place when the program changes its current folder.

    It is not normalised: behind a symbolic link, a parent is not the folder that the text names.
    """
    from pathlib import Path  # takes 10 ms to import

    return Path(os.fsdecode(path)).absolute()


def fixed_location(location: Any) -> Any:
    """Return a path or a list of paths like absolute_path(); a URL unchanged."""
    if isinstance(location, (list, tuple)):
        return [fixed_location(one) for one in location]
    return location if "://" in os.fsdecode(location) else os.fspath(absolute_path(location))
