# SPDX-License-Identifier: Apache-2.0
"""Manifests of the versions that weight deltas lead to: they also cover the unchanged tensors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from ._errors import refuse
from ._types import Path
from ._verify import check_manifest

_NAME = "model.manifest"


def published_manifest(folders: Sequence[Path]) -> Path | None:
    """Return the manifest that the last version's folder has, if any."""
    path = os.path.join(os.fsdecode(folders[-1]), _NAME)
    return path if os.path.isfile(path) else None


def install_manifest(checkpoint: Path, manifest: Path, durable: bool) -> None:
    """Compare all files of an updated checkpoint with a manifest, and make it the checkpoint's own.

    Raises:
        SafetensorError: `tag` "DigestMismatch" for files with other bytes.
    """
    folder = os.fsdecode(checkpoint)
    problems = check_manifest(checkpoint, manifest)
    if problems:
        refuse(f"{folder}: the updated checkpoint differs from the manifest of its version: "
               f"{problems[0]}. Tensors that no delta changed differ: copy the checkpoint again",
               "DigestMismatch")
    target = os.path.join(folder, _NAME)
    if os.path.exists(target) and os.path.samefile(target, manifest):
        return
    temporary = f"{target}.tmp"
    shutil.copyfile(manifest, temporary)
    if durable:
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
    os.replace(temporary, target)
