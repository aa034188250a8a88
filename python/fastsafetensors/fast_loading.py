# SPDX-License-Identifier: Apache-2.0
"""Helpers for training programs: load, save, shard, cache.

    from fastsafetensors.fast_loading import load_safetensors, save_safetensors

    weights = load_safetensors("base.safetensors", num_threads=8)
    save_safetensors(lora_weights, "lora.safetensors", metadata={"lora_rank": "16"})
    save_embeddings_safetensors({"prompt": prompt, "pooled": [a, None]}, "cache.safetensors")

Names and defaults (`num_threads`, `output_dir`, files of at most 10 GiB) are those that existing
trainers pass. In new programs, load_file(), save_file() and CheckpointManager do the same with the
names of the rest of this package.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

from ._base.argument_types import Path
from ._base.errors import printable, shown
from ._base.options import check_count, check_location, name_list
from ._base.progress import Progress
from ._base.regular_files import open_regular
from ._core import Model, SafetensorError
from ._loading.load import load_from
from ._loading.open_arguments import check_device, check_path, is_meta
from ._loading.verified_open import open_files
from ._saving.save_options import (
    compress_word,
    manifest_options,
    promise_word,
    save_rows,
    ties_of,
    with_ties,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ._saving.save_handles import SaveHandle, StagingPool

__all__ = [
    "is_fastsafetensors_available",
    "load_embeddings_safetensors",
    "load_safetensors",
    "load_safetensors_mmap",
    "load_safetensors_sharded",
    "save_embeddings_safetensors",
    "save_safetensors",
    "save_safetensors_sharded",
    "save_safetensors_sharded_async",
]

# The metadata key with the structure of embeddings, as JSON.
_STRUCTURE_KEY = "fastsafetensors.structure"


def is_fastsafetensors_available() -> bool:
    """Tell whether this package can be used.

    Returns:
        True.
    """
    return True


def load_safetensors(
    path: Path, num_threads: int = 8, device: Any = "cpu"
) -> dict[str, Tensor]:
    """Load all tensors of a file into owned memory.

    Args:
        path: a file, an index or a folder.
        num_threads: maximum number of threads; small loads use fewer. 0: one per CPU that the
            process may use, at most 16.
        device: of the tensors, as in fastsafetensors.torch.load_file.

    Returns:
        {name: tensor} in file order.

    Raises:
        SafetensorError: an invalid file.
        FileNotFoundError: a missing one.
        TypeError: an argument of another type.
    """
    from .torch import load_file

    check_count("num_threads", num_threads)
    if is_meta(device):
        return load_file(path, "meta")
    return load_file(path, device, mode="load", threads=num_threads)


def save_safetensors(
    state_dict: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Save tensors. The checks, errors and promises are those of fastsafetensors.torch.save_file.

    Args:
        state_dict: {name: tensor}.
        path: of the file.
        metadata: text only; {"format": "pt"} by default.
    """
    from .torch import save_file

    check_location("path", path)
    save_file(state_dict, path, {"format": "pt"} if metadata is None else metadata)


def load_safetensors_mmap(
    path: Path, keys: list[str] | None = None, device: Any = "cpu"
) -> dict[str, Tensor]:
    """Load only the named tensors, as memory-mapped views: pages are read when they are accessed.

    Args:
        path: a file, an index or a folder.
        keys: names; None means all, [] none.
        device: of the tensors, as in fastsafetensors.torch.load_file.

    Returns:
        {name: tensor} in the order of the keys.

    Raises:
        KeyError: a name that the file lacks.
        TypeError: an argument of another type.
    """
    from ._torch.gpu import load_options
    from ._torch.torch_tensors import export, meta_tensors

    check_path(path)
    names = None if keys is None else name_list("keys", keys)
    with contextlib.closing(open_files(path)) as model:
        for name in names or ():
            if model.find(name) < 0:
                raise KeyError(f"{name!r} is not in {printable(os.fsdecode(path))}")
        if is_meta(device):
            return meta_tensors(model, names)
        device = check_device(device)
        options = {"mode": "map", "order": "request", **load_options(device)}
        return load_from(model, lambda loader: export(loader, device), names, **options)


# ---- sharded models ----


def save_safetensors_sharded(
    state_dict: dict[str, Tensor],
    output_dir: Path,
    max_shard_size: int | str = 10 * 1024**3,
    metadata: dict[str, str] | None = None,
    *,
    compress: bool | str = False,
    filename_pattern: str = "model{suffix}.safetensors",
    threads: int = 0,
    durable: bool = False,
    manifest: bool | Path = False,
    progress: Progress | None = None,
) -> str:
    """Save tensors like Hugging Face's libraries: numbered files and their index.

    Shards are written in parallel. The index is published last, and files of an earlier save are
    deleted after that, so readers find the old or the new model. A tensor with several names is
    saved once, and the metadata has its other names. Different views of one storage are each saved.

    Args:
        state_dict: {name: tensor}.
        output_dir: a folder, created if missing.
        max_shard_size: maximum bytes of tensors per file (an int, or "5GB"), filled in the dict's
            order; a larger tensor gets its own file. If everything fits in one file, there is no
            index.
        metadata: of every file; {"format": "pt"} by default.
        compress: as in fastsafetensors.torch.save_file; max_shard_size counts uncompressed bytes.
        filename_pattern: for file names, where {suffix} is the number
            ("diffusion_pytorch_model.fp16{suffix}.safetensors").
        threads: that write; 0: one per CPU that the process may use.
        durable: wait until files and folder are on the device.
        manifest: as in fastsafetensors.torch.save_file, for all files: model.manifest in the
            folder.
        progress: called with (bytes done, total bytes, tensors done, total tensors).

    Returns:
        The path of the index, or of the only file.

    Raises:
        ValueError: an invalid size or pattern, or an error of save_file.
        SafetensorError: a failed system call; also the matching OSError subclass.
        TypeError: an argument of another type.
    """
    check_location("output_dir", output_dir)
    from ._ranks.shard_rows import plan_shards

    rows, options, tied = plan_shards(state_dict, max_shard_size, filename_pattern, metadata)
    paths, _ = save_rows(
        output_dir,
        rows,
        with_ties({"format": "pt"} if metadata is None else metadata, tied),
        promise=promise_word(durable),
        threads=threads,
        progress=progress,
        compress=compress_word(compress),
        **options,
        **manifest_options(manifest),
    )
    return str(paths[-1])


def save_safetensors_sharded_async(
    state_dict: dict[str, Tensor],
    output_dir: Path,
    max_shard_size: int | str = 10 * 1024**3,
    metadata: dict[str, str] | None = None,
    *,
    compress: bool | str = False,
    filename_pattern: str = "model{suffix}.safetensors",
    stage: str = "copy",
    memory: int | str | None = None,
    pool: StagingPool | None = None,
    threads: int = 0,
    copy_threads: int = 0,
    nice: int = 0,
    durable: bool = False,
    manifest: bool | Path = False,
    overlap: str = "order",
    at_exit: str = "wait",
) -> SaveHandle:
    """Start to save tensors as numbered files and their index, and return while they are written.

    The files are those of save_safetensors_sharded(), with the state at the call.

    Args:
        state_dict: {name: tensor}.
        output_dir: a folder, created if missing, or a URL.
        max_shard_size: as in save_safetensors_sharded.
        metadata: of every file; without it, {"format": "pt"}.
        compress: as in save_safetensors_sharded.
        filename_pattern: as in save_safetensors_sharded.
        stage: "copy", "lazy" or "none", as in fastsafetensors.torch.save_file_async.
        memory: as in fastsafetensors.torch.save_file_async, like the next parameters.
        pool: a StagingPool that provides the memory.
        threads: threads that write; 0: one per CPU that the process may use.
        copy_threads: threads that copy.
        nice: lowers the priority of the writing threads.
        durable: files and folder are on the device when the save has ended.
        manifest: as in save_safetensors_sharded.
        overlap: "order" or "supersede".
        at_exit: "wait" or "cancel".

    Returns:
        The handle.

    Raises:
        ValueError: an invalid size or pattern, and tensors that save_file can't save.
        TypeError: an argument of another type.
    """
    from ._ranks.shard_rows import start_shards
    from ._saving.save_handles import Staging

    how = Staging(stage, memory, pool, overlap, copy_threads, nice, at_exit)
    check_location("output_dir", output_dir)
    return start_shards(
        output_dir,
        state_dict,
        {"format": "pt"} if metadata is None else metadata,
        how,
        max_shard_size,
        filename_pattern,
        promise=promise_word(durable),
        threads=threads,
        compress=compress_word(compress),
        **manifest_options(manifest),
    )


def _add_tied(model: Model, tensors: dict[str, Any]) -> None:
    """Other names of tensors that were saved once, from the metadata."""
    for index in range(model.file_count):
        for name, kept in ties_of(model.metadata(index)).items():
            if kept in tensors and name not in tensors:
                tensors[name] = tensors[kept]


def _variant_of(folder: Path, variant: str | None) -> Any:
    """The files of a folder that belong to a variant ("fp16"); the folder itself without a
    variant.
    """
    if variant is None:
        return folder
    if not isinstance(variant, str):
        raise TypeError(f"variant must be a str or None, not {shown(variant)}")
    check_location("model_dir", folder)
    here = _Path(os.fsdecode(folder))
    indexes = sorted(here.glob(f"*.safetensors.index.{variant}.json"))
    indexes += sorted(here.glob(f"*.{variant}.safetensors.index.json"))
    files = sorted(here.glob(f"*.{variant}.safetensors"))
    files += sorted(here.glob(f"*.{variant}-?????-of-?????.safetensors"))
    if len(indexes) > 1 or not (indexes or files):
        raise FileNotFoundError(
            2, f"{len(indexes) or 'no'} models of variant {variant!r} here", os.fspath(folder)
        )
    return indexes[0] if indexes else [os.fspath(path) for path in files]


def load_safetensors_sharded(
    model_dir: Path, device: Any = "cpu", *, variant: str | None = None
) -> dict[str, Tensor]:
    """Load a folder: by its index, or else all its *.safetensors files, sorted.

    Args:
        model_dir: the folder.
        device: of the tensors.
        variant: only the files of that variant (NAME.VARIANT.safetensors and its index), named as
            in diffusers.

    Returns:
        {name: tensor}. Tied names are included, as the same tensor.

    Raises:
        SafetensorError: an invalid file, or one that lacks a tensor (named).
        FileNotFoundError: an empty folder, or a missing shard.
        TypeError: an argument of another type.
    """
    from ._torch.gpu import load_options
    from ._torch.torch_tensors import export, meta_tensors

    files = _variant_of(model_dir, variant)
    check_path(files)
    with contextlib.closing(open_files(files)) as model:
        if is_meta(device):
            tensors = meta_tensors(model)
            _add_tied(model, tensors)
            return tensors
        device = check_device(device)
        options = {"mode": "load", **load_options(device)}
        tensors = load_from(model, lambda loader: export(loader, device), progress=None, **options)
        _add_tied(model, tensors)
        return tensors


# ---- embeddings ----


class _Flattener:
    """Converts a structure of tensors to named tensors and a description of the structure."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def _name(self, tensor: Any, place: str) -> str:
        """Return the tensor's name, which is the same for identical tensors."""
        from ._torch.tensor_memory import extent_of
        from ._torch.torch_state import check_nested

        check_nested(place or "embeddings", tensor)
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
        """Describe a value and add its tensors."""
        import torch
        from torch.nn.parameter import is_lazy

        if value is None:
            return None
        is_empty = isinstance(value, torch.Tensor) and is_lazy(value)
        if isinstance(value, torch.nn.Parameter) and not is_empty:
            return {"parameter": self._name(value, place), "grad": value.requires_grad}
        if isinstance(value, torch.Tensor) and not is_empty:
            return {"tensor": self._name(value, place)}
        return self._describe_container(value, place)

    def _describe_container(self, value: Any, place: str) -> Any:
        import torch

        if type(value) is torch.Size:
            return {"size": list(value)}
        join = f"{place}." if place else ""
        if type(value) in (dict, OrderedDict):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"a key must be str, not {shown(key)}, at "
                                    f"{printable(place or 'the top')}")
            kind = "dict" if type(value) is dict else "ordered"
            return {kind: [[k, self.describe(v, f"{join}{k}")] for k, v in value.items()]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.describe(v, f"{join}{i}")
                                           for i, v in enumerate(value)]}
        # A file must not name a class, because loading it would import what the file says.
        raise TypeError(
            f"embeddings are tensors, Parameters, torch.Size, None, and list, tuple, dict and "
            f"OrderedDict of them, not {type(value).__name__}, at "
            f"{printable(place or 'the top')}. Convert it "
            "first, e.g. a namedtuple by tuple(), a defaultdict by dict()"
        )


def save_embeddings_safetensors(embeddings: Any, path: Path) -> None:
    """Save a tensor, or nested lists, tuples and dicts of tensors and None, on any device.

    Parameters, torch.Size and OrderedDict keep their types. Other subclasses of Tensor are saved
    with their values and loaded as plain tensors.

    The result is a normal safetensors file: tensors are named by position ("prompt", "pooled.0"),
    and the metadata has the structure. A repeated tensor is stored once.

    Args:
        embeddings: the structure.
        path: of the file.

    Raises:
        TypeError: a value of another type (a namedtuple, a defaultdict, a subclass) that loading
            could not restore; names its position.
    """
    from ._torch.tensor_memory import find_shared, settled
    from ._torch.torch_state import make_rows

    check_location("path", path)
    flattener = _Flattener()
    structure = json.dumps(flattener.describe(embeddings, ""))
    tensors = settled(flattener.tensors)
    for group in find_shared(tensors):
        for name in group:  # different views of one storage: each is saved with its bytes
            tensors[name] = tensors[name].clone()
    rows, owners = make_rows(tensors)
    metadata = {"format": "pt", "type": "embeddings", _STRUCTURE_KEY: structure}
    save_rows(path, rows, metadata, owners=owners)


def _parameter(tensor: Any, requires_grad: Any) -> Any:
    from torch.nn import Parameter

    if type(requires_grad) is not bool:
        raise ValueError("requires_grad of a parameter must be true or false")
    return Parameter(tensor, requires_grad=requires_grad)


def _size(sizes: Any) -> Any:
    from torch import Size

    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"sizes must not be negative: {sizes!r}")
    return Size(sizes)


def _rebuild(node: Any, tensors: dict[str, Any]) -> Any:
    """Undo describe(). KeyError, TypeError or ValueError if the description is invalid."""
    if node is None:
        return None
    if "parameter" in node:
        return _parameter(tensors[node["parameter"]], node["grad"])
    ((kind, value),) = node.items()
    if kind == "tensor":
        return tensors[value]
    if kind in ("dict", "ordered"):
        pairs = [(key, _rebuild(part, tensors)) for key, part in value]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    if kind == "size":
        return _size(value)
    if kind in ("list", "tuple"):
        parts = [_rebuild(part, tensors) for part in value]
        return parts if kind == "list" else tuple(parts)
    raise ValueError(f"unknown kind {kind!r}")


def load_embeddings_safetensors(path: Path, device: Any = "cpu") -> Any:
    """Load a structure saved by save_embeddings_safetensors, with its types and order.

    Args:
        path: the file. If it is missing and a file of the same name ending in .pt exists, that
            older cache is read (by torch's restricted loader).
        device: of the tensors.

    Returns:
        The structure; for a file without one, the plain dict.

    Raises:
        SafetensorError: an invalid file, or a structure that does not match it.
        TypeError: an argument of another type.
    """
    from ._torch.gpu import load_options
    from ._torch.torch_tensors import export, meta_tensors

    check_location("path", path)
    to_meta = is_meta(device)
    device = "meta" if to_meta else check_device(device)
    older = _Path(os.fsdecode(path)).with_suffix(".pt")
    if not os.path.exists(path) and older.exists():
        import torch

        with open(open_regular(older), "rb") as file:
            return torch.load(file, map_location=device, weights_only=True)
    with contextlib.closing(open_files(path)) as model:
        if to_meta:
            tensors = meta_tensors(model)
        else:
            options = {"mode": "load", **load_options(device)}
            tensors = load_from(
                model, lambda loader: export(loader, device), progress=None, **options)
        structure = (model.metadata(0) or {}).get(_STRUCTURE_KEY)
    if structure is None:
        return tensors
    try:
        return _rebuild(json.loads(structure), tensors)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        text = f"broken structure of embeddings in {os.fsdecode(path)}: {error}"
        raise SafetensorError(printable(text)) from None
