# SPDX-License-Identifier: Apache-2.0
"""safetensors files as torch tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ._core import serialize
from ._dtypes import dtype_word
from ._gpu import check_present, is_gpu, load_options, tell_gds
from ._load import load_bytes, load_from
from ._module_weights import ModuleLoad
from ._open import check_backend, check_device, check_path
from ._progress import Progress
from ._request import choose_names
from ._saving import compress_word, manifest_options, save_rows
from ._tensor_memory import find_tied, settled, storage_ptr, storage_size
from ._torch_state import check_tensors, make_rows, plain
from ._torch_tensors import export, load_meta
from ._types import Path, Paths
from ._verify import Verify, open_files

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

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
    verify: Verify | None = None,
) -> dict[str, Tensor]:
    """Load a model's tensors.

    On the CPU, tensors are views of the file unless something else is asked for (mode, dtype,
    pin_memory, cache="bypass"), whatever the page cache holds. A program that writes into that file
    (rather than put another in its place, as every save here does) changes them, and one that makes
    it shorter takes their bytes away (SIGBUS). Of mode="load" neither is so.

    Args:
        filename: a file, an index, a folder, or a list of files (names must then be unique).
        device: where the tensors go, as torch takes it; "meta": shapes and dtypes only. To GPUs
            ("cuda", "cuda:1", 1) bytes go by the library's own pipeline, and the tensors may be
            used on any stream at once.
        backend: the safetensors package's word for mode: "mmap" is "auto", "pread" is "load".
        mode: "load" reads into memory of our own; "map" gives views of the file (writes stay
            private); "auto" gives views where they can be what is asked for, and loads elsewhere.
        engine: forces how "load" reads; see `fastsafetensors engines` for what works.
        threads: of "load"; 0: as many as the process may use, at most 16.
        dtype: what elements become on the way: a torch dtype, its name ("bfloat16"), the format's
            ("BF16"), or None and "auto" for the file's. Floats become any float type (rounded to
            nearest even), integers wider ones. A wish for floats leaves other tensors as they are;
            what can't become the dtype that is wished for it is an error.
        progress: called in this thread with (bytes done, bytes in all, tensors done, tensors in
            all) ten times a second and at the end, an exception ends the load; False for nothing,
            None for a bar (bytes, GB/s) on terminals when the load takes more than a second and
            tqdm is installed.
        gds: GPUDirect Storage: "auto", where a probe on the file shows that it is real, "off", or
            "strict": RuntimeError (with "gds" in its text) where it is not.
        memory: of GPUs: "own", freed with the last tensor, or "torch": its caching allocator's.
        pin_memory: tensors on the CPU lie in memory that is page-locked for GPUs.
        names: which tensors; nothing else is read. Neighbours in the file share memory: keeping one
            keeps up to 64 MiB of them (of views the mapping, whose pages the system takes back when
            it wants them; on a GPU its file), so ask for what you want rather than drop the rest.
        filter: name -> whether to load it.
        cache: whether what is read stays in the page cache, where the next start finds it: "keep",
            "bypass", or "auto", by whether it fits the memory that is left (of mode="load" on the
            CPU twice; above 512 MiB, and parts of models above 128 MiB, go around the cache).
        verify: True holds every byte that is loaded against the manifest beside the model (none is
            an error), a path against that one, SignedBy() against a signed one; a tensor
            that touches a chunk whose digest differs is not handed out. None: as verifying() says,
            else False.

    Returns:
        {name: tensor} in the order of the file. Tensors may be written to, and outlive everything.

    Raises:
        SafetensorError: a bad file; an unknown name (a KeyError as well).
        ValueError: a dtype that is none, or that a tensor can't become.
        OSError: of its kind, for what the system refuses.
        MemoryError: memory, or the GPU's, that is not there.
    """
    check_path(filename)
    if str(device) == "meta":
        return load_meta(filename, names, filter, dtype_word(dtype), verify)
    device = check_device(device)
    check_present(device)
    chosen = check_backend(backend) if mode is None else mode
    options = {"mode": chosen, **_target(device, gds, memory, pin_memory)}
    watch = (lambda loader: tell_gds(loader.stats()["reason"])) if "device" in options else None
    with contextlib.closing(open_files(filename, verify)) as model:
        chosen_names = choose_names(model, names, filter)
        return load_from(
            model, lambda loader: export(loader, device), chosen_names, progress=progress,
            watch=watch, engine=engine, threads=threads, dtype=dtype_word(dtype), cache=cache,
            **options,
        )


def load(data: Any) -> dict[str, Tensor]:
    """Load all tensors of a file's bytes, which are copied once.

    Args:
        data: any bytes-like object.

    Returns:
        {name: tensor}; the tensors own their memory and may be written to.

    Raises:
        SafetensorError: bytes that are no such file.
    """
    return load_bytes(data, export)


def load_model(
    model: Module,
    filename: Paths,
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    assign: bool = False,
    threads: int = 0,
    verify: Verify | None = None,
    changed: Iterable[str] | None = None,
) -> tuple[set[str], list[str]]:
    """Load a model's parameters and buffers from a file.

    The bytes are read straight into the parameters' own memory, converted on the way where their
    dtype differs: there is never a second copy of the model.

    Args:
        model: a torch module.
        filename: a file, an index, a folder, or a list of files.
        strict: a missing or unexpected name is a RuntimeError, in torch's words. Names whose bytes
            belong to tensors that the file has are not missing.
        device: where tensors go that assign makes.
        backend: of assign: "mmap" or "pread", as in load_file.
        assign: the parameters become the loaded tensors instead (the way for a model on the meta
            device); tied ones stay tied, and views of others stay views. Of DTensors each rank
            reads its own part.
        threads: of the load; 0: as many as the process may use, at most 16.
        verify: True holds every byte that is loaded against the manifest beside the model (none is
            an error), a path against that one, SignedBy() against a signed one; a tensor
            that touches a chunk whose digest differs is not handed out. None: as verifying() says,
            else False.
        changed: names of the file; only these are read and written, all else of the model stays as
            it is. changed_tensors() finds them by digests. What a load that fails has written by
            then is written; names, shapes and sizes are looked at before.

    Returns:
        (missing names, unexpected names).

    Raises:
        RuntimeError: names, if strict; a shape that differs; a model on the meta device, without
            assign.
        SafetensorError: a bad file.
        OSError: of its kind, for what the system refuses.
    """
    check_path(filename)
    views = check_backend(backend)
    device = check_device(device)
    with contextlib.closing(open_files(filename, verify)) as file:
        return ModuleLoad(file, model, assign, threads, device, views).run(strict, changed)


def save_file(
    tensors: dict[str, Tensor],
    filename: Path,
    metadata: dict[str, str] | None = None,
    *,
    durable: bool = False,
    alignment: int = 0,
    engine: str = "auto",
    progress: Progress | None = None,
    compress: bool | str = False,
    manifest: bool | Path = False,
) -> None:
    """Save tensors to a file.

    The file is byte for byte the reference writer's (its order of metadata keys is random, ours
    the dict's). It comes into place in one step, when it is complete: until then, and after any
    error or crash, the old file is there. Permissions of an existing file are kept, symbolic links
    followed. No tensor is copied that is packed in CPU memory.

    Args:
        tensors: {name: tensor}, on any device.
        filename: where the file comes to.
        metadata: text only.
        durable: wait until file and folder are on the device; else a power cut (not a crash) may
            lose the new file.
        alignment: begin tensors at multiples of this many bytes; 0: of their dtype's.
            Where sizes are no multiples, fillers stand between: this package leaves them out,
            other readers see U8 tensors ``__padding__.N``.
        engine: "auto", "buffered", "direct" or "uring".
        progress: called now and then with (bytes done, bytes in all, tensors done, tensors in all);
            an exception ends the save.
        compress: True: tensors of floats are written compressed, without loss, where that saves
            something; "all": integers, too. This package loads such a file as it was; other
            readers open it and see U8 vectors of reserved names. It needs libzstd, and free space
            for the plain file as well while it is written.
        manifest: True: a manifest of the file is made of the bytes as they are written, and comes
            with it, as FILE.manifest: verify=True finds it. "blake3" or "sha256": the same by that
            algorithm, against forgery as well; else its path. Without one a manifest of the old
            file, which it does not fit any more, goes with that.

    Raises:
        ValueError: what is no dense, packed tensor.
        RuntimeError: tensors that share memory (see save_model), or have none of their own.
        TypeError: names or metadata that are not text.
        SafetensorError: what the system refuses; it is an OSError of its kind as well.
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
        compress=compress_word(compress),
        **manifest_options(manifest),
    )


def save(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes that save_file would write.

    Args:
        tensors: {name: tensor}.
        metadata: text only.

    Returns:
        The file's bytes.

    Raises:
        ValueError: what is no dense, packed tensor.
        RuntimeError: tensors that share memory, or have none of their own.
        TypeError: names or metadata that are not text.
    """
    check_tensors(tensors, metadata)
    rows, owners = make_rows(tensors)
    result = serialize(None, rows, metadata)
    del owners
    return result


def save_model(
    model: Module,
    filename: Path,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    durable: bool = False,
    manifest: bool | Path = False,
) -> None:
    """Save a module's parameters and buffers, each shared tensor once.

    Of names that are the same memory one is saved, the others go to the metadata ({left out:
    kept}); load_model ties them again.

    Args:
        model: a torch module.
        filename: where the file comes to.
        metadata: text only.
        force_contiguous: pack tensors that are not; else they are a ValueError.
        durable: wait until file and folder are on the device.
        manifest: as in save_file.

    Raises:
        RuntimeError: tensors that share memory of which none holds all; others as in save_file.
        SafetensorError: what the system refuses; it is an OSError of its kind as well.
    """
    state = settled(model.state_dict())
    tied = find_tied(state)
    if tied:
        metadata = {**(metadata or {})}
        for name, kept in tied.items():
            metadata.setdefault(name, kept)
    kept_tensors = {name: tensor for name, tensor in state.items() if name not in tied}
    if force_contiguous:
        kept_tensors = {name: plain(tensor) for name, tensor in kept_tensors.items()}
    save_file(kept_tensors, filename, metadata, durable=durable, manifest=manifest)
