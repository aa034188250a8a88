# SPDX-License-Identifier: Apache-2.0
"""Settings for remote models. Every function that reads a path also accepts a URL."""

from __future__ import annotations

import os
from os import PathLike
from typing import Any

from ._base.options import check_count, check_location, check_optional_paths, parse_limit
from ._core import cache_objects as _cache_objects
from ._core import cache_prune as _cache_prune
from ._core import configure_remote as _configure

_SWITCHES = {"anonymous", "cache_required", "create_only", "offline", "private_redirects"}
_TEXTS = ("endpoint", "region", "access_key", "secret_key", "session_token", "bearer_token",
          "sas_token", "account", "account_key", "bucket_style", "ca_file")
_COUNTS = ("connect_ms", "first_byte_ms", "stall_ms", "tries_max", "retry_base_ms",
           "retry_cap_ms", "connections_max")

__all__ = ["cache_objects", "cache_prune", "configure"]


def configure(
    *,
    endpoint: str | None = None,
    region: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    bearer_token: str | None = None,
    sas_token: str | None = None,
    account: str | None = None,
    account_key: str | None = None,
    anonymous: bool = False,
    bucket_style: str = "auto",
    ca_file: str | PathLike[str] | None = None,
    connect_ms: int = 0,
    first_byte_ms: int = 0,
    stall_ms: int = 0,
    tries_max: int = 0,
    retry_base_ms: int = 0,
    retry_cap_ms: int = 0,
    connections_max: int = 0,
    create_only: bool = False,
    cache_dir: str | PathLike[str] | None = None,
    cache_bytes_max: int | str = 0,
    cache_required: bool = False,
    offline: bool = False,
    private_redirects: bool = False,
) -> None:
    """Set the options for remote objects that this process opens from now on.

    Options that are not given use the environment variables of the stores' own tools. Each call
    replaces the previous one; configure() restores the defaults.

    Args:
        endpoint: for s3://, gs://, az:// or hf://, such as "http://127.0.0.1:9000".
        region: for s3://.
        access_key: for s3:// and gs://, together with secret_key.
        secret_key: for s3:// and gs://.
        session_token: for s3://.
        bearer_token: for gs:// and hf://.
        sas_token: for az://.
        account: for az://.
        account_key: for az://, in base64.
        anonymous: send unsigned requests without looking for credentials.
        bucket_style: "path", "host" or "auto".
        ca_file: certificates to trust instead of the system's.
        connect_ms: time limit to connect; 0: 5,000.
        first_byte_ms: time limit for the first byte of an answer; 0: 10,000.
        stall_ms: time limit without a byte; 0: 5,000.
        tries_max: consecutive tries without progress; 0: 8.
        retry_base_ms: the first retry waits at most twice this; 0: 100.
        retry_cap_ms: the longest wait before a retry; 0: 20,000.
        connections_max: to one host; 0: 64.
        create_only: save only if no object exists (else FileExistsError).
        cache_dir: a folder for caching remote data on disk, shared by all processes of this user;
            "auto" (FASTSAFETENSORS_CACHE_DIR, XDG_CACHE_HOME or ~/.cache) or "off".
        cache_bytes_max: its maximum size, a number or text such as "200GiB"; 0: four fifths of the
            space available to it.
        cache_required: an unusable cache is an error.
        offline: send no requests, neither to servers nor to metadata services, and do not check
            cached objects for newer versions. Cached objects are served; any other URL is a
            FileNotFoundError. FASTSAFETENSORS_OFFLINE=1 has the same effect, whatever this option
            says.
        private_redirects: follow redirects to private, link-local and loopback addresses of another
            host, which are an OSError otherwise.

    Raises:
        ValueError: text that can't be a setting, half of a key pair, or a number out of range.
        TypeError: a value of another type.
        OSError: ca_file can't be read.
    """
    settings = dict(locals())
    for name in _SWITCHES:
        if not isinstance(settings[name], bool):
            raise TypeError(f"{name} must be True or False, not {settings[name]!r}")
    for name in _COUNTS:
        check_count(name, settings[name], high=2**32 - 1)
    check_optional_paths(ca_file=ca_file)
    settings["ca_file"] = None if ca_file is None else os.fsdecode(ca_file)
    for name in _TEXTS:
        if settings[name] is not None and not isinstance(settings[name], str):
            raise TypeError(f"{name} must be text or None, not {settings[name]!r}")
    if cache_dir is not None:
        check_location("cache_dir", cache_dir)
    settings["cache_bytes_max"] = parse_limit("cache_bytes_max", cache_bytes_max)
    _configure(**settings)


def cache_objects(cache_dir: str | PathLike[str] | None = None) -> list[dict[str, Any]]:
    """List the objects in the disk cache, least recently used first.

    address (without its query), size_bytes, kept_bytes (cached part), disk_bytes (size of its
    files), used_s (Unix time), is_whole, in_use. cache_dir: None is the one of configure().
    """
    check_optional_paths(cache_dir=cache_dir)
    return _cache_objects(cache_dir)


def cache_prune(
    bytes_max: int | str, cache_dir: str | PathLike[str] | None = None
) -> dict[str, int]:
    """Evict least recently used objects until the cache has at most `bytes_max` bytes.

    `bytes_max` is a number or text such as "200GiB"; 0 evicts all. Objects in use are kept.
    Returns removed_count, removed_bytes, left_count and left_bytes.
    """
    check_optional_paths(cache_dir=cache_dir)
    return _cache_prune(parse_limit("bytes_max", bytes_max), cache_dir)
