# SPDX-License-Identifier: Apache-2.0
"""How models behind addresses are asked for: whatever takes a path to read takes an address."""

from __future__ import annotations

from os import PathLike
from typing import Any

from ._core import cache_objects as _cache_objects
from ._core import cache_prune as _cache_prune
from ._core import configure_remote


def configure(**settings: Any) -> None:
    """Say how objects are asked for that this process opens from now on.

    What is not given has its default: the environment, as the stores' own tools read it. Each call
    replaces all of the one before; configure() takes everything back.

    endpoint: of s3://, gs://, az:// or hf://, such as "http://127.0.0.1:9000".
    region, access_key, secret_key, session_token: of s3:// (keys also of gs://).
    bearer_token: of gs:// and hf://. account, account_key, sas_token: of az://.
    anonymous: nothing is signed, and no credentials are looked for.
    bucket_style: "path", "host" or "auto". ca_file: certificates to trust.
    connect_ms, first_byte_ms, stall_ms: patience. tries_max, retry_base_ms, retry_cap_ms: tries in
    a row without progress, and the waits between them. connections_max: at one host.
    no_overwrite: save only where no object is there (else FileExistsError).
    cache_dir: a folder to keep on disk what is read, for all processes of this user; "auto" (by
    FASTSAFETENSORS_CACHE_DIR, XDG_CACHE_HOME or ~/.cache) or "off". cache_bytes_max: that it may
    take; 0: four fifths of what its disk has for it. cache_required: a cache that can't be used is
    an error. cache_offline: no server is asked, and what is not in the cache is an error.
    """
    configure_remote(**settings)


def cache_objects(cache_dir: str | PathLike[str] | None = None) -> list[dict[str, Any]]:
    """List the objects of the cache on disk, the one that was used least recently first.

    address (without its query), size_bytes, kept_bytes (of it that are there), disk_bytes (that its
    files take), used_s (Unix time), is_whole, in_use. cache_dir: None is the one of configure().
    """
    return _cache_objects(cache_dir)


def cache_prune(bytes_max: int = 0, cache_dir: str | PathLike[str] | None = None) -> dict[str, int]:
    """Remove what was used least recently until the cache takes at most `bytes_max`; 0: all.

    What is in use stays. Returns removed_count, removed_bytes, left_count and left_bytes.
    """
    return _cache_prune(bytes_max, cache_dir)
