# SPDX-License-Identifier: Apache-2.0
"""Shared by all functions that save."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .._base import counters
from .._base.argument_types import Path
from .._base.errors import serialization_error, shown
from .._base.log import follow_logging
from .._base.options import check_save_options, check_switch
from .._base.paths import absolute_path
from .._core import Writer, log_drain

# Options of a file whose tensors may become those of another one: if their sizes are multiples of a
# block of the file system, they begin at multiples, as the file system requires of shared blocks.
WITH_WHOLE_BLOCKS: dict[str, Any] = {"header_alignment": 4096}


# The metadata key with names of tensors that were saved under another name: JSON of {left out:
# kept}.
_TIED_KEY = "fastsafetensors.tied"


def with_ties(metadata: dict[str, str], tied: dict[str, str]) -> dict[str, str]:
    """Return the metadata with an entry for tensors that have several names."""
    import json

    return {**metadata, _TIED_KEY: json.dumps(tied, sort_keys=True)} if tied else metadata


def ties_of(metadata: dict[str, str] | None) -> dict[str, str]:
    """Return the names from with_ties(); {} if there is no valid entry."""
    import json

    try:
        found = json.loads((metadata or {}).get(_TIED_KEY, "{}"))
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: kept for name, kept in found.items() if isinstance(kept, str)}


def save_rows(path: Path, rows: list[Any], metadata: dict[str, str] | None, **options: Any) -> Any:
    """Write rows to a file, or to shards in a folder; return (paths, statistics)."""
    options = check_save_options(options)
    follow_logging()
    try:
        writer = Writer(path, rows, metadata, **options)
        try:
            writer.commit()
            stats = writer.stats()
            if counters.is_on:
                counters.add_save(stats)
            return writer.paths(), stats
        finally:
            writer.close()
    except OSError as error:
        raise serialization_error(error) from error
    finally:
        log_drain()


def refuse_address(path: Path) -> None:
    """Raise NotImplementedError for a URL, which would otherwise be taken for a folder name."""
    if os.fsdecode(path).lower().startswith(("s3:/", "gs:/", "az:/", "hf:/", "http:/", "https:/")):
        raise NotImplementedError(
            "ranks share the files of a set, which addresses don't have: save to a folder that all "
            "ranks see, and copy it there"
        )


def promise_word(durable: bool) -> str:
    """The library's name of the option `durable`."""
    check_switch("durable", durable)
    return "durable" if durable else "quick"


def compress_word(compress: bool | str) -> str:
    """The library's name of the option: "none", "float" (True) or "all"."""
    if isinstance(compress, bool):
        return "float" if compress else "none"
    if compress not in ("float", "all", "none"):
        kind = ValueError if isinstance(compress, str) else TypeError
        raise kind(f"compress must be True, False, 'float', 'all' or 'none', not {shown(compress)}")
    return compress


# The names that manifests know, and the algorithm of each.
MANIFEST_ALGORITHMS = {"xxh3": "xxh3-128", "xxh3-128": "xxh3-128", "blake3": "blake3",
                       "sha256": "sha256"}
# Names that are meant as an algorithm, not as a path.
_OTHER_ALGORITHMS = {"md5", "sha1", "sha512", "crc32", "xxh64", "adler32", "true", "false"}


def manifest_options(manifest: bool | Path) -> dict[str, Any]:
    """Convert the argument ``manifest`` to Writer's: a path and an algorithm."""
    if isinstance(manifest, bool):
        return {"manifest": b""} if manifest else {}
    if isinstance(manifest, str) and manifest in MANIFEST_ALGORITHMS:
        return {"manifest": b"", "digest": MANIFEST_ALGORITHMS[manifest]}
    if isinstance(manifest, str) and not {"/", "."} & set(manifest):
        import difflib

        close = difflib.get_close_matches(manifest.lower(), MANIFEST_ALGORITHMS, n=1, cutoff=0.7)
        if close or manifest.lower() in _OTHER_ALGORITHMS:
            names = close[0] if close else ", ".join(MANIFEST_ALGORITHMS)
            raise ValueError(f"unknown algorithm {shown(manifest)}; expected {names}. For a path "
                             f"write {shown(f'./{manifest}')}")
    try:
        path = os.fsencode(manifest)
    except TypeError:
        raise TypeError(f"manifest must be True, False, the name of an algorithm, or a path, not "
                        f"{shown(manifest)}") from None
    if not path:
        raise ValueError("manifest must be True, the name of an algorithm, or a path")
    return {"manifest": path}


def fixed_manifest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return manifest_options() whose path stays the same in another current folder."""
    path = options.get("manifest")
    return {**options, "manifest": os.fsencode(absolute_path(path))} if path else dict(options)


def file_options(
    durable: bool, alignment: int | str, engine: str, compress: bool | str, manifest: bool | Path
) -> dict[str, Any]:
    """Options of save_rows() and start_rows() for the arguments that all save functions share."""
    return {"promise": promise_word(durable), "alignment": alignment, "engine": engine,
            "compress": compress_word(compress), **manifest_options(manifest)}
