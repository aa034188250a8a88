# SPDX-License-Identifier: Apache-2.0
"""Helpers for training programs: load, save, shard, cache.

    from fastsafetensors.fast_loading import load_safetensors, save_safetensors

    weights = load_safetensors("base.safetensors", num_threads=8)
    save_safetensors(lora_weights, "lora.safetensors", metadata={"lora_rank": "16"})
    save_embeddings_safetensors({"prompt": prompt, "pooled": [a, None]}, "cache.safetensors")
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

from ._core import Model, SafetensorError, assign_shards
from ._load import load_from
from ._progress import Progress
from ._saving import (
    check_names,
    compress_word,
    manifest_options,
    parse_size,
    save_rows,
    ties_of,
    with_ties,
)
from ._verify import open_files

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "is_fastsafetensors_available",
    "load_embeddings_safetensors",
    "load_safetensors",
    "load_safetensors_mmap",
    "load_safetensors_sharded",
    "save_embeddings_safetensors",
    "save_safetensors",
    "save_safetensors_sharded",
]

_Path_ = str | os.PathLike[str]

# Metadata entry that holds the structure of embeddings, as JSON.
_STRUCTURE_KEY = "fastsafetensors.structure"


def is_fastsafetensors_available() -> bool:
    """Tell whether this package can be used: it is being used.

    Returns:
        True.
    """
    return True


def load_safetensors(
    path: _Path_, num_threads: int = 8, device: Any = "cpu"
) -> dict[str, Tensor]:
    """Load all tensors of a file into memory of their own.

    Args:
        path: a file, an index or a folder.
        num_threads: a wish: a load uses no more threads than it has work for.
        device: where the tensors go.

    Returns:
        {name: tensor} in the order of the file.

    Raises:
        SafetensorError: a bad file.
        FileNotFoundError: a missing one.
    """
    from .torch import load_file

    if num_threads <= 0:
        raise ValueError(f"num_threads must be positive, not {num_threads}")
    return load_file(path, device, mode="load", threads=num_threads)


def save_safetensors(
    state_dict: dict[str, Tensor], path: _Path_, metadata: dict[str, str] | None = None
) -> None:
    """Save tensors; the checks, errors and promises are fastsafetensors.torch.save_file's.

    Args:
        state_dict: {name: tensor}.
        path: where the file comes to.
        metadata: text only; without it, {"format": "pt"} is written.
    """
    from .torch import save_file

    save_file(state_dict, path, {"format": "pt"} if metadata is None else metadata)


def load_safetensors_mmap(
    path: _Path_, keys: list[str] | None = None, device: Any = "cpu"
) -> dict[str, Tensor]:
    """Load only the named tensors, as views of the file: pages come when they are touched.

    Args:
        path: a file, an index or a folder.
        keys: names; None means all, [] none.
        device: where the tensors go.

    Returns:
        {name: tensor} in the order of the keys.

    Raises:
        KeyError: a name that the file lacks.
    """
    from ._gpu import load_options
    from ._torch_tensors import export

    with contextlib.closing(open_files(path)) as model:
        for name in keys or ():
            if model.find(name) < 0:
                raise KeyError(f"{name!r} is not in {os.fspath(path)}")
        options = {"mode": "map", "order": "request", **load_options(device)}
        return load_from(model, lambda loader: export(loader, device), keys, **options)


# ---- sharded models ----


def _storage_groups(tensors: dict[str, Any]) -> list[int]:
    """A number for each tensor: that of its memory, where it shares it with another.

    Tensors without elements have no memory, which Hugging Face's splitter takes for shared.
    """
    from ._tensor_memory import storage_ptr

    keys = [(str(tensor.device), storage_ptr(tensor)) for tensor in tensors.values()]
    counts: dict[tuple[str, int], int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    numbers: dict[tuple[str, int], int] = {}
    return [
        numbers.setdefault(key, len(numbers) + 1) if counts[key] > 1 else 0
        for key in keys
    ]


def _stem_of(pattern: str) -> str:
    """What files are called before their number; ValueError for what is no pattern of names."""
    stem, found, ending = pattern.partition("{suffix}")
    if not found or ending != ".safetensors" or not stem or "/" in stem or stem.startswith("."):
        raise ValueError(f"a pattern is NAME{{suffix}}.safetensors, not {pattern!r}")
    return stem


def save_safetensors_sharded(
    state_dict: dict[str, Tensor],
    output_dir: _Path_,
    max_shard_size: int | str = 10 * 1024**3,
    metadata: dict[str, str] | None = None,
    *,
    durable: bool = False,
    threads: int = 0,
    progress: Progress | None = None,
    filename_pattern: str = "model{suffix}.safetensors",
    compress: bool | str = False,
    manifest: bool | _Path_ = False,
) -> str:
    """Save tensors as Hugging Face's libraries do: numbered files and their index.

    Shards are written in parallel; the index comes into place last, and files of an earlier save go
    after that, so that a reader finds the old set or the new one. A tensor that has several names
    is saved once, and the metadata says under which others it is known; different views of one
    memory are saved each with its bytes.

    Args:
        state_dict: {name: tensor}.
        output_dir: a folder, which is made.
        max_shard_size: most bytes of tensors in a file (an int, or "5GB"), in the dict's order; a
            larger tensor is alone. What fits in one file becomes one without an index.
        metadata: of every file; without it, {"format": "pt"}.
        durable: wait until files and folder are on the device.
        threads: that write; 0: as many as the process may use.
        progress: called with (bytes done, bytes in all, tensors done, tensors in all).
        filename_pattern: of the files' names, {suffix} being the number
            ("diffusion_pytorch_model.fp16{suffix}.safetensors").
        compress: as in fastsafetensors.torch.save_file; max_shard_size counts bytes before that.
        manifest: as in fastsafetensors.torch.save_file, of the set: model.manifest in the folder.

    Returns:
        The path of the index, or of the one file.

    Raises:
        ValueError: a size or a pattern that is none, and what save_file can't save.
        SafetensorError: what the system refuses; it is an OSError of its kind as well.
    """
    from ._tensor_memory import find_same, settled
    from ._torch_state import make_rows

    limit = parse_size(max_shard_size)
    stem = _stem_of(filename_pattern)
    check_names(state_dict, metadata)
    state_dict = settled(state_dict)
    tied = find_same(state_dict)
    kept = {name: tensor for name, tensor in state_dict.items() if name not in tied}
    rows, owners = make_rows(kept)
    sizes = [row[4] for row in rows]
    file_of, file_count = assign_shards(sizes, _storage_groups(kept), limit)
    paths, _ = save_rows(
        output_dir,
        rows,
        with_ties({"format": "pt"} if metadata is None else metadata, tied),
        promise="durable" if durable else "quick",
        file_of=file_of,
        file_count=max(file_count, 1),
        stem=stem,
        threads=threads,
        progress=progress,
        owners=owners,
        compress=compress_word(compress),
        **manifest_options(manifest),
    )
    return str(paths[-1])


def _add_tied(model: Model, tensors: dict[str, Any]) -> None:
    """Names that were saved once for several: the metadata says which."""
    for index in range(model.file_count):
        for name, kept in ties_of(model.metadata(index)).items():
            if kept in tensors and name not in tensors:
                tensors[name] = tensors[kept]


def _variant_of(folder: _Path_, variant: str | None) -> Any:
    """The files of a folder that are of a variant ("fp16"); the folder itself without one."""
    if variant is None:
        return folder
    indexes = sorted(_Path(folder).glob(f"*.safetensors.index.{variant}.json"))
    indexes += sorted(_Path(folder).glob(f"*.{variant}.safetensors.index.json"))
    files = sorted(_Path(folder).glob(f"*.{variant}.safetensors"))
    files += sorted(_Path(folder).glob(f"*.{variant}-?????-of-?????.safetensors"))
    if len(indexes) > 1 or not (indexes or files):
        raise FileNotFoundError(
            2, f"{len(indexes) or 'no'} models of variant {variant!r} here", os.fspath(folder)
        )
    return indexes[0] if indexes else [os.fspath(path) for path in files]


def load_safetensors_sharded(
    model_dir: _Path_, device: Any = "cpu", *, variant: str | None = None
) -> dict[str, Tensor]:
    """Load a folder: by its index, or, without one, all its *.safetensors files, sorted.

    Args:
        model_dir: the folder.
        device: where the tensors go.
        variant: only the files of that variant (NAME.VARIANT.safetensors and its index), as
            diffusers names them.

    Returns:
        {name: tensor}. Names that were saved as tied to another are there, as the same tensor.

    Raises:
        SafetensorError: a bad file, or one that lacks a tensor; it is named.
        FileNotFoundError: an empty folder, or a shard that is not there.
    """
    from ._gpu import load_options
    from ._torch_tensors import export

    options = {"mode": "load", **load_options(device)}
    with contextlib.closing(open_files(_variant_of(model_dir, variant))) as model:
        tensors = load_from(model, lambda loader: export(loader, device), progress=None, **options)
        _add_tied(model, tensors)
        return tensors


# ---- embeddings ----


class _Flattener:
    """Turns a structure of tensors into named tensors and a description of the structure."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def _name(self, tensor: Any, place: str) -> str:
        """Return the tensor's name: the same one for the same memory seen the same way."""
        from ._tensor_memory import extent_of

        layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device),
                  tensor.is_conj(), tensor.is_neg())
        key = (extent_of(tensor) or id(tensor), layout)
        if key not in self._names:
            base = name = place or "embeddings"
            number = 2
            while name in self.tensors or name == "__metadata__":
                name, number = f"{base}#{number}", number + 1
            self._names[key] = name
            self.tensors[name] = tensor
        return self._names[key]

    def describe(self, value: Any, place: str) -> Any:
        """Describe a value, adding its tensors."""
        import torch

        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return {"tensor": self._name(value, place)}
        join = f"{place}." if place else ""
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"a key must be str, not {key!r}, at {place or 'the top'}")
            return {"dict": [[k, self.describe(v, f"{join}{k}")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.describe(v, f"{join}{i}") for i, v in enumerate(value)]}
        raise TypeError(
            f"embeddings are tensors, None, and lists, tuples and dicts of them, not "
            f"{type(value).__name__}, at {place or 'the top'}"
        )


def save_embeddings_safetensors(embeddings: Any, path: _Path_) -> None:
    """Save a tensor, or nested lists, tuples and dicts of tensors and None, on any device.

    The file is a plain safetensors file: tensors are named by their place ("prompt",
    "pooled.0"), and the structure is kept in the metadata. A tensor that comes twice is stored
    once.

    Args:
        embeddings: the structure.
        path: where the file comes to.

    Raises:
        TypeError: anything else in it, with its place.
    """
    from ._tensor_memory import find_shared, settled
    from ._torch_state import make_rows

    flattener = _Flattener()
    structure = json.dumps(flattener.describe(embeddings, ""))
    tensors = settled(flattener.tensors)
    for group in find_shared(tensors):
        for name in group:  # different views of one memory: each gets its own bytes
            tensors[name] = tensors[name].clone()
    rows, owners = make_rows(tensors)
    metadata = {"format": "pt", "type": "embeddings", _STRUCTURE_KEY: structure}
    save_rows(path, rows, metadata, owners=owners)


def _rebuild(node: Any, tensors: dict[str, Any]) -> Any:
    """Undo describe(); KeyError, TypeError or ValueError where the description is broken."""
    if node is None:
        return None
    ((kind, value),) = node.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _rebuild(part, tensors) for key, part in value}
    if kind in ("list", "tuple"):
        parts = [_rebuild(part, tensors) for part in value]
        return parts if kind == "list" else tuple(parts)
    raise ValueError(f"unknown kind {kind!r}")


def load_embeddings_safetensors(path: _Path_, device: Any = "cpu") -> Any:
    """Load what save_embeddings_safetensors saved, with its types and order.

    Args:
        path: the file. Where there is none but one of the same name that ends in .pt, that cache of
            an earlier program is read (by torch's restricted loader).
        device: where the tensors go.

    Returns:
        The structure; of a file without one, the plain dict.

    Raises:
        SafetensorError: a bad file, or a structure that does not fit it.
    """
    from ._gpu import load_options
    from ._torch_tensors import export

    older = _Path(path).with_suffix(".pt")
    if not os.path.exists(path) and older.exists():
        import torch

        return torch.load(older, map_location=device, weights_only=True)
    options = {"mode": "load", **load_options(device)}
    with contextlib.closing(open_files(path)) as model:
        tensors = load_from(model, lambda loader: export(loader, device), progress=None, **options)
        structure = (model.metadata(0) or {}).get(_STRUCTURE_KEY)
    if structure is None:
        return tensors
    try:
        return _rebuild(json.loads(structure), tensors)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        text = f"broken structure of embeddings in {os.fspath(path)}: {error}"
        raise SafetensorError(text) from None
