# SPDX-License-Identifier: Apache-2.0
"""safetensors files as torch tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch as _torch

from ._core import DTYPES, Model, Tensor, dlpack_probe, serialize
from ._gpu import is_gpu, load_options, retrying, stream_of, tell_gds, torch_memory
from ._memory import open_bytes
from ._open import check_backend, check_device, check_path
from ._progress import Progress, wait
from ._saving import save_rows, without_collections
from ._tensor_memory import find_tied, storage_ptr, storage_size
from ._torch_state import (
    TORCH_NAMES,
    check_tensors,
    dtype_name,
    make_rows,
    plain,
    torch_dtype,
)
from ._types import Path, Paths

__all__ = [
    "load",
    "load_file",
    "load_model",
    "save",
    "save_file",
    "save_model",
    "storage_ptr",
    "storage_size",
]

# The importer behind torch.from_dlpack, without its checks of objects that are no capsules.
_import_capsule = getattr(_torch._C, "_from_dlpack", _torch.utils.dlpack.from_dlpack)


@cache
def capsule_mask() -> int:
    """Which dtypes this torch imports as they are: bit d for dtype d, found by trying each."""
    mask = 0
    for number, dtype in enumerate(DTYPES):
        try:
            imported = _import_capsule(dlpack_probe(dtype))
        except (RuntimeError, BufferError, TypeError):
            continue
        if imported.dtype is torch_dtype(dtype) and dtype != "F4":
            mask |= 1 << number
    return mask


def _device_of(tensor: Tensor) -> str:
    """What torch calls the place of a tensor: its "cuda" is ROCm's as well."""
    kind, _, number = tensor.device.partition(":")
    return f"cuda:{number}" if kind in ("cuda", "hip") else "cpu"


def wrap(tensor: Tensor) -> Any:
    """A torch tensor on the memory of `tensor`, whatever its dtype: no bytes are copied.

    Dtypes that torch can't import come as bytes and are viewed; 6-bit floats stay bytes (one
    dimension), and so does what this version of torch does not know. A 4-bit float tensor halves
    its last dimension, because torch counts pairs.
    """
    number = DTYPES.index(tensor.dtype)
    if capsule_mask() >> number & 1:
        return _import_capsule(tensor.__dlpack__())
    target = torch_dtype(tensor.dtype)
    shape = list(tensor.shape)
    if tensor.nbytes == 0:
        if tensor.dtype == "F4" and shape and shape[-1] % 2 == 0:
            shape[-1] //= 2
        return _torch.empty(shape, dtype=target or _torch.uint8, device=_device_of(tensor))
    data = _import_capsule(tensor.__dlpack__(as_bytes=True))
    if tensor.dtype == "F4":
        if target is None or not shape or shape[-1] % 2:
            return data
        shape[-1] //= 2
    elif target is None:
        return data
    return data.view(target).reshape(shape)


def export(loader: Any, device: Any = "cpu") -> dict[str, Any]:
    """All tensors of a load as {name: torch tensor} on `device`, to which it may have gone."""
    tensors: dict[str, Any] = loader.export(_import_capsule, wrap, capsule_mask())
    if device == "cpu" or load_options(device) or _torch.device(device).type == "cpu":
        return tensors
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def make_item(loader: Any, index: int) -> Any:
    """Item `index` of a load as a torch tensor, once its bytes are there."""
    return loader.make(index, _import_capsule, wrap, capsule_mask())


def _target(device: Any, gds: str, memory: str, pin_memory: bool) -> dict[str, Any]:
    """Options of Model.load() for where the tensors go."""
    if memory not in ("own", "torch"):
        raise ValueError(f'memory must be "own" or "torch", not {memory!r}')
    if pin_memory and is_gpu(device):
        raise ValueError("pin_memory is for tensors on the CPU")
    if pin_memory:
        return {"device": "pinned", "mode": "load"}
    options = load_options(device, gds)
    if options and memory == "torch":
        options.update(torch_memory(device))
    return options


def load_file(
    filename: Paths,
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    mode: str | None = None,
    engine: str = "auto",
    threads: int = 0,
    dtype: Any = None,
    progress: Progress | bool | None = None,
    gds: str = "auto",
    memory: str = "own",
    pin_memory: bool = False,
) -> dict[str, Any]:
    """Load all tensors of a model: {name: torch.Tensor} in file order.

    filename: a file, an index, a folder, or a list of files (names must then be unique).
    device: where the tensors go, as torch takes it. To GPUs ("cuda", "cuda:1", 1) bytes go by the
    library's own pipeline, and the tensors may be used on any stream at once.
    gds: GPUDirect Storage: "auto", where a probe on the file shows that it is real, "off", or
    "strict": RuntimeError (with "gds" in its text) where it is not.
    memory: of GPUs: "own", freed with the last tensor, or "torch": from torch's caching allocator.
    pin_memory: tensors on the CPU lie in memory that is page-locked for GPUs.
    mode: "load" reads into memory of our own; "map" gives views of the file (writes stay
    private); "auto" maps what is in the page cache nearly whole and loads everything else.
    backend: the safetensors package's word for it: "mmap" is "auto", "pread" is "load".
    dtype: what elements become on the way, a torch dtype or the format's name ("BF16"): floats
    become any float type (rounded to nearest even), integers wider ones; other tensors stay.
    engine, threads: force how "load" reads; see `fastsafetensors engines` for what works.
    progress: called in this thread with (bytes done, bytes in all, tensors done, tensors in all)
    ten times a second, an exception ends the load; False for nothing, None for a bar (bytes, GB/s)
    on terminals when the load takes more than a second and tqdm is installed.

    The tensors own their memory. Raises SafetensorError for a bad file, OSError of its kind for
    what the system refuses.
    """
    check_path(filename)
    device = check_device(device)
    chosen = check_backend(backend) if mode is None else mode
    options = {"mode": chosen, **_target(device, gds, memory, pin_memory)}
    model = Model(filename)

    def load_all() -> dict[str, Any]:
        loader = model.load(engine=engine, threads=threads, dtype=dtype_name(dtype), **options)
        try:
            wait(loader, model.file_count, progress)
            if "device" in options:
                tell_gds(loader.stats()["reason"])
            return export(loader, device)
        finally:
            loader.close()

    try:
        return retrying(load_all)
    finally:
        model.close()


def load(data: Any) -> dict[str, Any]:
    """Load all tensors of a file's bytes (any bytes-like object): {name: torch.Tensor}.

    The bytes are copied once; the tensors own their memory and may be written to.
    """
    with open_bytes(data) as model:
        loader = model.load(mode="map")
        try:
            return export(loader)
        finally:
            loader.close()


def _shares_storage(tensor: Any, others: list[Any]) -> bool:
    """Tell whether a tensor is the same memory as one of the others (tied weights)."""
    return any(
        tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape
        for other in others
        if tensor.numel()
    )


def _compare_names(
    state: dict[str, Any], names: list[str]
) -> tuple[set[str], list[str]]:
    """Names that the model has and the file lacks (tied ones do not count), and the reverse."""
    present = set(names)
    loaded = [tensor for name, tensor in state.items() if name in present]
    missing = {
        name
        for name, tensor in state.items()
        if name not in present and not _shares_storage(tensor, loaded)
    }
    return missing, [name for name in names if name not in state]


def _raise_if_strict(model: Any, missing: set[str], unexpected: list[str], faults: list[str],
                     strict: bool) -> None:
    """Raise what torch raises for a state that does not fit."""
    lines = list(faults)
    if strict and unexpected:
        names = ", ".join(f'"{name}"' for name in sorted(unexpected))
        lines.insert(0, f"Unexpected key(s) in state_dict: {names}")
    if strict and missing:
        names = ", ".join(f'"{name}"' for name in sorted(missing))
        lines.insert(0, f"Missing key(s) in state_dict: {names}")
    if lines:
        title = f"Error(s) in loading state_dict for {type(model).__name__}:"
        raise RuntimeError("\n    ".join([title, *lines]))


def _takes_direct_reads(module: Any) -> bool:
    """Tell whether a module takes its state as it is: nothing of its own or hooked in between."""
    base = _torch.nn.Module
    return all(
        type(part)._load_from_state_dict is base._load_from_state_dict
        and not part._load_state_dict_pre_hooks
        and not part._load_state_dict_post_hooks
        for part in module.modules()
    )


def _place(tensor: Any, dtype: str) -> bool:
    """Tell whether bytes of the file may be read straight into a tensor."""
    return bool(
        (tensor.device.type == "cpu" or load_options(tensor.device))
        and tensor.is_contiguous()
        and tensor.numel()
        and not tensor.is_quantized
        and dtype in TORCH_NAMES
        and dtype != "F4"
    )


def _read_in_place(file: Model, state: dict[str, Any], names: list[str], threads: int) -> list[str]:
    """Read tensors into the memory of the model's own; return the names that it could not.

    Tensors of another dtype than the file's are converted on the way where that is possible.
    """
    groups: dict[tuple[str | None, Any], list[tuple[str, int, int]]] = {}
    rest = []
    for name in names:
        tensor, dtype = state[name], file.info(file.find(name))[0]
        same = torch_dtype(dtype) is tensor.dtype
        floats = tensor.dtype.is_floating_point and dtype[0] in "FB" and dtype != "BOOL"
        if not _place(tensor, dtype) or not (same or floats):
            rest.append(name)
            continue
        target = None if same else dtype_name(tensor.dtype)
        place = (name, tensor.data_ptr(), tensor.nbytes)
        groups.setdefault((target, tensor.device), []).append(place)
    for (target, device), items in groups.items():
        options = {"mode": "load", **load_options(device)}
        if "device" in options:
            options["stream"] = stream_of(device)  # which may still use the parameters
        loader = file.load(items, threads=threads, dtype=target, **options)
        try:
            loader.wait()
        finally:
            loader.close()
    return rest


def _shape_faults(file: Model, state: dict[str, Any], names: list[str]) -> list[str]:
    """What torch says of parameters whose shape is not the file's."""
    faults = []
    for name in names:
        dtype, shape, *_ = file.info(file.find(name))
        if dtype != "F4" and tuple(state[name].shape) != shape:
            faults.append(
                f"size mismatch for {name}: copying a param with shape torch.Size({list(shape)}) "
                f"from checkpoint, the shape in current model is {state[name].shape}."
            )
    return faults


def load_model(
    model: Any,
    filename: Paths,
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    assign: bool = False,
    threads: int = 0,
) -> tuple[set[str], list[str]]:
    """Load a model's parameters and buffers from a file: (missing names, unexpected names).

    The bytes are read straight into the parameters' own memory, converted on the way where their
    dtype differs: there is never a second copy of the model. With assign=True the parameters
    become the loaded tensors instead (the way for a model on the meta device), on `device`.

    strict: a missing or unexpected name is a RuntimeError, in torch's words; a shape that differs
    always is. Names tied to one that the file has are not missing.
    """
    check_path(filename)
    views = check_backend(backend)
    device = check_device(device)
    file = Model(filename)
    try:
        state = model.state_dict(keep_vars=False)
        names = file.names()
        missing, unexpected = _compare_names(state, names)
        known = [name for name in names if name in state]
        _raise_if_strict(model, missing, unexpected, _shape_faults(file, state, known), strict)
        direct = not assign and _takes_direct_reads(model)
        rest = _read_in_place(file, state, known, threads) if direct else known
        if rest:
            where = load_options(device) if assign else {}
            options = {"mode": views if assign else "load", **where}
            loader = file.load(rest, threads=threads, **options)
            try:
                tensors = export(loader, device if assign else "cpu")
            finally:
                loader.close()
            model.load_state_dict(tensors, strict=False, assign=assign)
    finally:
        file.close()
    return missing, unexpected


def save_file(
    tensors: dict[str, Any],
    filename: Path,
    metadata: dict[str, str] | None = None,
    *,
    durable: bool = False,
    alignment: int = 0,
    engine: str = "auto",
    progress: Progress | None = None,
) -> None:
    """Save tensors to a file: {name: torch.Tensor}, on any device.

    The file is byte for byte the reference writer's (its order of metadata keys is random, ours
    the dict's). It comes into place in one step, when it is complete: until then, and after any
    error or crash, the old file is there. Permissions of an existing file are kept, symbolic links
    followed. No tensor is copied that is packed in CPU memory.

    metadata: text only. durable: wait until file and folder are on the device; else a power cut
    (not a crash) may lose the new file. alignment: begin tensors at multiples of this many bytes.
    engine: "auto", "buffered", "direct" or "uring". progress: called now and then with
    (bytes done, bytes in all, tensors done, tensors in all); an exception ends the save.

    ValueError for what is no dense, packed tensor, RuntimeError for tensors that share memory (see
    save_model), TypeError for names or metadata that are not text, and SafetensorError, which is
    an OSError as well, for what the system refuses.
    """
    with without_collections():
        check_tensors(tensors, metadata)
        rows, owners = make_rows(tensors, far=True)
    save_rows(
        filename,
        rows,
        metadata,
        promise="durable" if durable else "quick",
        alignment=alignment,
        engine=engine,
        progress=progress,
        owners=owners,
    )


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes that save_file would write."""
    check_tensors(tensors, metadata)
    rows, owners = make_rows(tensors)
    result = serialize(None, rows, metadata)
    del owners
    return result


def save_model(
    model: Any,
    filename: Path,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    durable: bool = False,
) -> None:
    """Save a module's parameters and buffers, each shared tensor once.

    Of names that are the same memory one is saved, the others go to the metadata ({left out:
    kept}); load_model ties them again. force_contiguous: pack tensors that are not, else they are
    a ValueError.
    """
    state = model.state_dict()
    tied = find_tied(state)
    if tied:
        metadata = {**(metadata or {})}
        for name, kept in tied.items():
            metadata.setdefault(name, kept)
    kept_tensors = {name: tensor for name, tensor in state.items() if name not in tied}
    if force_contiguous:
        kept_tensors = {name: plain(tensor) for name, tensor in kept_tensors.items()}
    save_file(kept_tensors, filename, metadata, durable=durable)
