# SPDX-License-Identifier: Apache-2.0
"""What all front ends share when they save."""

from __future__ import annotations

import json
import os
from typing import Any

from ._core import Writer
from ._errors import serialization_error
from ._types import Path


def check_names(names: Any, metadata: Any) -> None:
    """Raise TypeError for names or metadata that are not text."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"tensor names must be str, not {type(name).__name__}: {name!r}")
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict of str to str, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be a dict of str to str: {key!r}: {value!r}")


# The metadata's entry that names the tensors saved under another name: JSON of {left out: kept}.
_TIED_KEY = "fastsafetensors.tied"


def with_ties(metadata: dict[str, str], tied: dict[str, str]) -> dict[str, str]:
    """Return the metadata with an entry for tensors that are known under several names."""
    return {**metadata, _TIED_KEY: json.dumps(tied, sort_keys=True)} if tied else metadata


def ties_of(metadata: dict[str, str] | None) -> dict[str, str]:
    """Return what with_ties() has put there; {} where there is none, or it is not ours."""
    try:
        found = json.loads((metadata or {}).get(_TIED_KEY, "{}"))
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: kept for name, kept in found.items() if isinstance(kept, str)}


def save_rows(path: Path, rows: list[Any], metadata: dict[str, str] | None, **options: Any) -> Any:
    """Write rows to a file, or to a set of files in a folder; return (paths, statistics)."""
    try:
        writer = Writer(path, rows, metadata, **options)
        try:
            writer.commit()
            return writer.paths(), writer.stats()
        finally:
            writer.close()
    except OSError as error:
        raise serialization_error(error) from error


def refuse_address(path: Path) -> None:
    """Raise NotImplementedError for an address: as a path it would be a folder of that name."""
    if os.fsdecode(path).lower().startswith(("s3:/", "gs:/", "az:/", "hf:/", "http:/", "https:/")):
        raise NotImplementedError(
            "ranks share the files of a set, which addresses don't have: save to a folder that all "
            "ranks see, and copy it there"
        )


def compress_word(compress: bool | str) -> str:
    """What the library calls it: "none", "float" (True) or "all"."""
    if isinstance(compress, str):
        return compress
    return "float" if compress else "none"


_ALGORITHMS = {"xxh3": "xxh3-128", "xxh3-128": "xxh3-128", "blake3": "blake3", "sha256": "sha256"}


def manifest_options(manifest: bool | Path) -> dict[str, Any]:
    """What a front's argument ``manifest`` is in Writer's: a place and an algorithm."""
    if isinstance(manifest, bool):
        return {"manifest": b""} if manifest else {}
    if isinstance(manifest, str) and manifest in _ALGORITHMS:
        return {"manifest": b"", "digest": _ALGORITHMS[manifest]}
    path = os.fsencode(manifest)
    if not path:
        raise ValueError("manifest: True, the name of an algorithm, or a path")
    return {"manifest": path}


def parse_size(size: int | str) -> int:
    """Bytes of 5000, "5GB" (10^9 to the unit) or "5GiB" (2^30)."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size <= 0:
            raise ValueError(f"a size must be positive, not {size}")
        return size
    units = {
        **{unit: 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB"))},
        **{unit: 1024**power for power, unit in enumerate(("B", "KIB", "MIB", "GIB", "TIB"))},
    }
    text = size.strip().upper() if isinstance(size, str) else ""
    digits = text.rstrip("BIKMGT ")
    unit = text[len(digits) :].strip()
    try:
        value = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"not a size: {size!r}; say 5000000000, '5GB' or '5GiB'") from None
    if not 1 <= value < 2**63:
        raise ValueError(f"a size must be positive and finite, not {size!r}")
    return int(value)
