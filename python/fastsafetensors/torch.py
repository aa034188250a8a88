# SPDX-License-Identifier: Apache-2.0
"""safetensors files as torch tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from ._core import Model, serialize
from ._gpu import check_present, is_gpu, load_options, tell_gds
from ._load import load_bytes, load_from
from ._module_weights import ModuleLoad
from ._open import check_backend, check_device, check_path
from ._progress import Progress
from ._request import choose_names, dtype_word
from ._saving import save_rows
from ._tensor_memory import find_tied, storage_ptr, storage_size
from ._torch_state import check_tensors, make_rows, plain
from ._torch_tensors import export, load_meta
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

def _target(device: Any, gds: str, memory: str, pin_memory: bool) -> dict[str, Any]:
    """Options of Model.load() for where the tensors go."""
    if memory not in ("own", "torch"):
        raise ValueError(f'memory must be "own" or "torch", not {memory!r}')
    if pin_memory and is_gpu(device):
        raise ValueError("pin_memory is for tensors on the CPU")
    if pin_memory:
        return {"device": "pinned", "mode": "load"}
    return load_options(device, gds, memory)


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
    memory: str = "torch",
    pin_memory: bool = False,
    names: Iterable[str] | None = None,
    filter: Callable[[str], bool] | None = None,
    cache: str = "auto",
) -> dict[str, Any]:
    """Load a model's tensors: {name: torch.Tensor} in file order.

    filename: a file, an index, a folder, or a list of files (names must then be unique).
    names, filter: which tensors, all without; nothing else is read, and an unknown name is a
    SafetensorError that is a KeyError. Neighbours in the file share memory: keeping one keeps up to
    64 MiB of them (of views the mapping, whose pages the system takes back when it wants them; on
    a GPU its file), so ask for what you want rather than drop the rest.
    device: where the tensors go, as torch takes it; "meta": shapes and dtypes only. To GPUs
    ("cuda", "cuda:1", 1) bytes go by the library's own pipeline, and the tensors may be used on any
    stream at once.
    gds: GPUDirect Storage: "auto", where a probe on the file shows that it is real, "off", or
    "strict": RuntimeError (with "gds" in its text) where it is not.
    memory: of GPUs: "torch": from its caching allocator, in order with the stream that is current
    now, as torch's own tensors are; or "own": the library's, which torch does not count.
    pin_memory: tensors on the CPU lie in memory that is page-locked for GPUs.
    mode: "load" reads into memory of our own; "map" gives views of the file (writes stay
    private); "auto" maps what is in the page cache nearly whole and loads everything else.
    backend: the safetensors package's word for it: "mmap" is "auto", "pread" is "load".
    dtype: what elements become on the way: a torch dtype, its name ("bfloat16"), the format's
    ("BF16"), or None and "auto" for the file's. Floats become any float type (rounded to nearest
    even), integers wider ones; other tensors stay.
    cache: whether what is read stays in the page cache, where the next start finds it: "keep",
    "bypass", or "auto", by whether it fits the memory that is left.
    engine, threads: force how "load" reads; see `fastsafetensors engines` for what works.
    progress: called in this thread with (bytes done, bytes in all, tensors done, tensors in all)
    ten times a second, an exception ends the load; False for nothing, None for a bar (bytes, GB/s)
    on terminals when the load takes more than a second and tqdm is installed.

    By default, tensors on the CPU may be views of a file that is in the page cache: a program that
    writes into that file (rather than put another in its place, as every save here does) changes
    them, and one that makes it shorter takes their bytes away (SIGBUS). mode="load" never does.

    Raises SafetensorError for a bad file, OSError of its kind for what the system refuses.
    """
    check_path(filename)
    if str(device) == "meta":
        return load_meta(filename, names, filter, dtype_word(dtype))
    device = check_device(device)
    check_present(device)
    chosen = check_backend(backend) if mode is None else mode
    options = {"mode": chosen, **_target(device, gds, memory, pin_memory)}
    watch = (lambda loader: tell_gds(loader.stats()["reason"])) if "device" in options else None
    with contextlib.closing(Model(filename)) as model:
        chosen_names = choose_names(model, names, filter)
        return load_from(
            model, lambda loader: export(loader, device), chosen_names, progress=progress,
            watch=watch, engine=engine, threads=threads, dtype=dtype_word(dtype), cache=cache,
            **options,
        )


def load(data: Any) -> dict[str, Any]:
    """Load all tensors of a file's bytes (any bytes-like object): {name: torch.Tensor}.

    The bytes are copied once; the tensors own their memory and may be written to.
    """
    return load_bytes(data, export)


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
    become the loaded tensors instead (the way for a model on the meta device), on `device`; tied
    ones stay tied, and views of others stay views. Of DTensors each rank reads its own part.

    strict: a missing or unexpected name is a RuntimeError, in torch's words; a shape that differs
    always is, and so is a model on the meta device without assign. Names whose bytes belong to
    tensors that the file has are not missing.
    """
    check_path(filename)
    views = check_backend(backend)
    device = check_device(device)
    with contextlib.closing(Model(filename)) as file:
        return ModuleLoad(file, model, assign, threads, device, views).run(strict)


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
