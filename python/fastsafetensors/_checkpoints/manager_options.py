# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of CheckpointManager."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .._base.errors import printable, shown
from .._base.options import check_count, check_no_empty_path, check_switches, parse_size
from .._saving.save_handles import Staging


def check_manager_options(
    folder: Any, retention: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise TypeError or ValueError for invalid arguments of CheckpointManager."""
    keep_last, keep_best = retention["keep_last"], retention["keep_best"]
    check_count("every", retention["every"], 1)
    check_count("keep_best", keep_best)
    if keep_last is not None:
        check_count("keep_last", keep_last, 1)
    elif keep_best:
        raise ValueError("keep_best has no effect without keep_last, because all checkpoints "
                         "are kept")
    check_switches(manifest=options["manifest"], durable=options["durable"])
    check_no_empty_path("folder", folder)
    if "://" in os.fsdecode(folder):
        raise ValueError(f"checkpoints are saved into a folder, not to "
                         f"{printable(os.fsdecode(folder))}")
    if retention["best"] not in ("min", "max"):
        raise ValueError(f"best must be 'min' or 'max', not {shown(retention['best'])}")
    if options["stage"] not in ("copy", "lazy"):
        raise ValueError(f"stage must be 'copy' or 'lazy', not {shown(options['stage'])}")
    Staging(options["stage"], overlap=options["overlap"], at_exit=options["at_exit"])
    parse_size("max_shard_size", options["max_shard_size"])
