# SPDX-License-Identifier: Apache-2.0
"""Distributes tensors of a model over the files of a set."""

from __future__ import annotations

from typing import Any

from .._base.argument_types import Path
from .._base.errors import shown
from .._base.options import check_names, parse_size
from .._core import assign_shards
from .._saving.save_handles import FileSave, Hooks, Staging, start_rows
from .._saving.save_options import with_ties
from .._torch.tensor_memory import find_same, settled, storage_ptr, watch_changes
from .._torch.torch_state import check_kinds, make_rows


def _storage_groups(tensors: dict[str, Any]) -> list[int]:
    """A number per tensor, equal for tensors that share memory.

    Tensors without elements have no address, which Hugging Face's splitter takes for shared.
    """
    keys = [(str(tensor.device), storage_ptr(tensor)) for tensor in tensors.values()]
    counts: dict[tuple[str, int], int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    numbers: dict[tuple[str, int], int] = {}
    return [
        numbers.setdefault(key, len(numbers) + 1) if counts[key] > 1 else 0
        for key in keys
    ]


def stem_of(pattern: str) -> str:
    """The file name stem before the number; an error for an invalid filename_pattern."""
    text = pattern if isinstance(pattern, str) else ""
    stem, found, ending = text.partition("{suffix}")
    if not found or ending != ".safetensors" or not stem or "/" in stem or stem.startswith("."):
        kind = ValueError if isinstance(pattern, str) else TypeError
        raise kind(f"filename_pattern must be 'NAME{{suffix}}.safetensors', not {shown(pattern)}")
    return stem


def plan_shards(
    state_dict: dict[str, Any],
    max_shard_size: int | str,
    filename_pattern: str,
    metadata: dict[str, str] | None,
) -> tuple[list[Any], dict[str, Any], dict[str, str]]:
    """The rows of a sharded save, the writer's options, and {left out: kept} of tied tensors."""
    limit = parse_size("max_shard_size", max_shard_size)
    stem = stem_of(filename_pattern)
    check_kinds(state_dict)
    check_names(state_dict, metadata)
    state_dict = settled(state_dict)
    tied = find_same(state_dict)
    kept = {name: tensor for name, tensor in state_dict.items() if name not in tied}
    rows, owners = make_rows(kept, on_device=True)
    sizes = [row[4] for row in rows]
    file_of, file_count = assign_shards(sizes, _storage_groups(kept), limit)
    options = {"file_of": file_of, "file_count": max(file_count, 1), "stem": stem,
               "owners": owners}
    return rows, options, tied


def start_shards(
    output_dir: Path,
    state_dict: dict[str, Any],
    metadata: dict[str, str],
    staging: Staging,
    max_shard_size: int | str,
    filename_pattern: str,
    **options: Any,
) -> FileSave:
    """Start a sharded save; return its handle. The options are start_rows()'s."""
    check_kinds(state_dict)
    is_unchanged = None if staging.stage == "copy" else watch_changes(state_dict)
    rows, more, tied = plan_shards(state_dict, max_shard_size, filename_pattern, metadata)
    return start_rows(output_dir, rows, with_ties(metadata, tied), staging, Hooks(is_unchanged),
                      **more, **options)
