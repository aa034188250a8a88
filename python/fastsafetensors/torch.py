# SPDX-License-Identifier: Apache-2.0
"""safetensors files as torch tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ._base.argument_types import Path, Paths
from ._base.dtypes import dtype_word
from ._base.lazy_names import lazy_names
from ._base.options import (
    check_load_options,
    check_load_progress,
    check_location,
    check_switch,
    check_switches,
    check_word,
    share_options,
)
from ._base.progress import Progress
from ._core import serialize
from ._loading.load import load_bytes, load_from
from ._loading.open_arguments import check_backend, check_device, check_path, is_meta
from ._loading.request import choose_names
from ._loading.verified_open import Verify, open_files
from ._saving.save_handles import Hooks, SaveHandle, Staging, StagingPool, start_rows
from ._saving.save_options import file_options, save_rows
from ._torch.gpu import check_present, is_gpu, load_options, report_gds
from ._torch.tensor_memory import storage_ptr, storage_size, watch_changes
from ._torch.torch_state import check_tensors, make_rows, model_state
from ._torch.torch_tensors import PackedTensor, export, load_meta, wrap

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from ._loading.open import safe_open as safe_open
    from ._loading.stream import TensorStream

__all__ = [
    "PackedTensor",
    "load",
    "load_file",
    "load_model",
    "open_stream",
    "save",
    "save_file",
    "save_file_async",
    "save_model",
    "save_model_async",
    "storage_ptr",
    "storage_size",
]

if not TYPE_CHECKING:  # programs import it from safetensors' module too
    __getattr__, __dir__ = lazy_names(globals(), {"safe_open": "_loading.open"})


def _check_options(options: dict[str, Any], progress: Any, is_meta: bool) -> None:
    """TypeError or ValueError for an option of load_file() that is wrong or has no effect."""
    check_load_options({name: value for name, value in options.items() if name != "backend"})
    check_load_progress(progress)
    check_switch("pin_memory", options["pin_memory"])
    check_word("allocator", options["allocator"], ("own", "torch"))
    if options["pin_memory"] and options["mode"] == "map":
        raise ValueError('mode="map" returns views of the file, which pin_memory cannot pin: use '
                         'mode="load"')
    if not is_meta:
        return
    usual = {"mode": "auto", "backend": "mmap", "cache": "auto", "engine": "auto", "threads": 0,
             "gds": "auto", "allocator": "torch", "pin_memory": False, "share": "off"}
    set_here = [name for name, value in usual.items() if options[name] != value]
    if progress:
        set_here.append("progress")
    if set_here:
        name = "backend" if options["backend"] != "mmap" else set_here[0]
        raise ValueError(f'{name} has no effect with device="meta", which reads nothing')


def _target(device: Any, gds: str, allocator: str, pin_memory: bool) -> dict[str, Any]:
    """Options of Model.load() for the tensors' device."""
    if allocator == "own" and not is_gpu(device):
        raise ValueError(f'allocator="own" needs a GPU, and device is {str(device)!r}')
    if pin_memory and is_gpu(device):
        raise ValueError("pin_memory is for tensors on the CPU")
    if pin_memory:
        return {"device": "pinned", "mode": "load"}
    return load_options(device, gds, allocator)


def load_file(
    filename: Paths,
    device: Any = "cpu",
    *,
    names: Iterable[str] | None = None,
    filter: Callable[[str], bool] | None = None,
    dtype: Any = None,
    backend: str = "mmap",
    mode: str | None = None,
    allocator: str = "torch",
    pin_memory: bool = False,
    share: str = "off",
    share_grace: int = 0,
    cache: str = "auto",
    engine: str = "auto",
    gds: str = "auto",
    threads: int = 0,
    verify: Verify | None = None,
    progress: Progress | bool | None = None,
) -> dict[str, Tensor]:
    """Load a model's tensors.

    By default, tensors on the CPU are memory-mapped views of the file, whether it is cached or not,
    unless the request needs a copy (mode, dtype, pin_memory, cache="bypass"). A program that
    overwrites the file in place (saves of this package replace it instead) changes the tensors, and
    one that truncates it causes SIGBUS. With mode="load" neither can happen.

    Args:
        filename: a file, an index, a folder, or a list of files (names must then be unique).
        device: of the tensors, in torch's form. Loads to GPUs ("cuda", "cuda:1", 1) use the
            library's own pipeline, and the tensors can be used on any stream at once. "meta":
            shapes and dtypes only, from the headers; options of reads are then refused.
        names: the tensors to load; nothing else is read. Neighbouring tensors share memory: keeping
            one alive keeps up to 64 MiB (for views the mapping, whose pages the system can reclaim;
            on a GPU the whole file), so select tensors instead of dropping others.
        filter: name -> whether to load it.
        dtype: convert to this dtype while loading: a torch dtype, its name ("bfloat16"), the
            format's ("BF16"), or None and "auto" for the file's. Floats are converted to any float
            type (rounding to nearest even, F64 to F32 first), integers to wider ones. A float dtype
            leaves other tensors unchanged; an unsupported conversion is an error.
        backend: the safetensors package's name for mode: "mmap" is "auto", "pread" is "load".
        mode: "load" reads into owned memory; "map" returns views of the file (writes are private);
            "auto" returns views if the request allows it, and loads otherwise.
        allocator: of GPU memory: "own", freed with the last tensor, or "torch", whose cache keeps
            it. "own" is refused for the CPU.
        pin_memory: CPU tensors are in pinned (page-locked) memory. Refused with mode="map".
        share: "node": processes of one user that load the same tensors read every byte from storage
            once and hold it once, in a file in /dev/shm that each maps privately. For loads into
            owned memory on the CPU; views share the page cache anyway. If it is impossible, the
            load has its own memory (docs/howto/share-weights-on-a-node.md).
        share_grace: seconds that this memory outlives its last process, for programs that restart.
            0: FASTSAFETENSORS_SHARE_GRACE, or none.
        cache: whether bytes that are read stay in the page cache for later loads: "keep", "bypass",
            or "auto" if they fit in free memory (twice for mode="load" on the CPU; above 512 MiB,
            and for less than half of a model above 128 MiB, the cache is bypassed).
        engine: forces the engine of "load"; `fastsafetensors engines` lists those that work.
        gds: GPUDirect Storage: "auto" if a probe of the file shows that it works, "off", or
            "strict": RuntimeError (with "gds" in its text) if it does not.
        threads: of "load"; 0: one per CPU the process may use, at most 16 (GPUs: 8).
        verify: True verifies every loaded byte against the manifest next to the model (an error
            without one), a path against that manifest, SignedBy() against a signed one. A tensor in
            a chunk whose digest differs is never returned. None: the current verifying() context,
            else False.
        progress: called on this thread with (bytes done, total bytes, tensors done, total tensors)
            ten times a second and at the end; an exception cancels the load. False for nothing,
            None for a bar (bytes, GB/s) on terminals if the load takes more than a second and tqdm
            is installed.

    Returns:
        {name: tensor} in file order. Tensors are writable and stay valid independently.

    Raises:
        SafetensorError: an invalid file, an invalid device, or an unknown name (also a KeyError).
        TypeError: an argument of another type.
        ValueError: an invalid dtype, an unsupported conversion, or an option without effect.
        OSError: the matching subclass, if a system call fails.
        MemoryError: not enough memory on the CPU or GPU.
    """
    check_path(filename)
    chosen = check_backend(backend) if mode is None else mode
    _check_options({"mode": chosen, "backend": backend, "cache": cache, "engine": engine,
                    "threads": threads, "gds": gds, "allocator": allocator,
                    "pin_memory": pin_memory, "share": share, "share_grace": share_grace},
                   progress, is_meta(device))
    if is_meta(device):
        return load_meta(filename, names, filter, dtype_word(dtype), verify)
    device = check_device(device)
    check_present(device)
    options = {"mode": chosen, **_target(device, gds, allocator, pin_memory),
               **share_options(share, share_grace, device, pin_memory)}
    watch = (lambda loader: report_gds(loader.stats()["reason"])) if "device" in options else None
    with contextlib.closing(open_files(filename, verify)) as model:
        chosen_names = choose_names(model, names, filter)
        return load_from(
            model, lambda loader: export(loader, device), chosen_names, progress=progress,
            watch=watch, engine=engine, threads=threads, dtype=dtype_word(dtype), cache=cache,
            **options,
        )


def open_stream(
    filename: Paths,
    device: Any = "cpu",
    *,
    names: Iterable[str] | None = None,
    filter: Callable[[str], bool] | None = None,
    dtype: Any = None,
    mode: str | None = None,
    memory: int | str = 0,
    share: str = "off",
    share_grace: int = 0,
    cache: str = "auto",
    engine: str = "auto",
    gds: str = "auto",
    threads: int = 0,
    verify: Verify | None = None,
) -> TensorStream:
    """Go through a model tensor by tensor, in file order, while the next ones are being read.

    By default tensors on the CPU are memory-mapped views, as in load_file(). With a memory limit
    they are copies, and the library holds at most that many bytes that were read and not yet
    returned, not counting tensors that the program keeps.

        with open_stream("model.safetensors", memory="1GiB") as stream:
            for name, tensor in stream:
                ...

    Args:
        filename: a file, an index, a folder, or a list of files (names must then be unique).
        device: of the tensors, in torch's form; "meta" is refused, because nothing would be read.
        names: the tensors to load; nothing else is read.
        filter: name -> whether to load it.
        dtype: convert to this dtype while loading, as in load_file().
        mode: "load" copies into owned memory; "map" returns views of the file, which `memory`
            refuses; "auto" as above.
        memory: limit of the bytes that were read and not yet returned, a number or "1GiB"; the
            largest tensor, in `dtype` and with up to 2 MiB around it, must fit. 0: no limit.
        share: "node" shares memory between processes, as in load_file(); not with `memory`.
        share_grace: as in load_file().
        cache: "keep", "bypass" or "auto".
        engine: forces the engine of reads into memory.
        gds: GPUDirect Storage: "auto", "off" or "strict".
        threads: of the load; 0: one per CPU the process may use, at most 16 (GPUs: 8).
        verify: as in load_file().

    Returns:
        An iterator of (name, tensor), and a context manager.

    Raises:
        SafetensorError: an invalid file, an unknown name (also a KeyError). Damaged bytes
            raise it from the iteration.
        TypeError: an argument of another type.
        ValueError: an invalid argument, or a tensor that does not fit in `memory`.
        MemoryError: not enough memory for half a second while the program waited.
        OSError: the matching subclass, if a system call fails.
    """
    from ._loading.stream import TensorStream

    device = check_device(device)
    check_present(device)
    check_load_options({"share": share, "share_grace": share_grace})
    options = {**load_options(device, gds), **share_options(share, share_grace, device)}
    is_copied = device != "cpu" and "device" not in options
    return TensorStream(
        filename, (lambda tensor: wrap(tensor).to(device)) if is_copied else wrap, limit=memory,
        names=names, filter=filter, verify=verify, engine=engine, threads=threads, cache=cache,
        dtype=dtype_word(dtype), **{"mode": mode, **options})


def load(data: Any) -> dict[str, Tensor]:
    """Load all tensors from the bytes of a file, which are copied once.

    Args:
        data: any bytes-like object.

    Returns:
        {name: tensor}. The tensors own their memory and are writable.

    Raises:
        SafetensorError: bytes that are not a valid file.
        TypeError: an argument of another type.
    """
    return load_bytes(data, export)


def load_model(
    model: Module,
    filename: Paths,
    strict: bool = True,
    device: Any = "cpu",
    *,
    changed: Iterable[str] | None = None,
    backend: str = "mmap",
    mode: str | None = None,
    assign: bool = False,
    share: str = "off",
    share_grace: int = 0,
    threads: int = 0,
    verify: Verify | None = None,
) -> tuple[set[str], list[str]]:
    """Load a model's parameters and buffers from a file.

    The bytes are read directly into the parameters' own memory, and converted while reading if the
    dtype differs, so there is never a second copy of the model.

    Args:
        model: a torch module.
        filename: a file, an index, a folder, or a list of files.
        strict: a missing or unexpected name is a RuntimeError with torch's message. Names whose
            bytes belong to tensors in the file are not missing.
        device: of assigned tensors; "meta" is refused, because nothing would be read.
        changed: names in the file; only these are read and written. changed_tensors() finds them by
            digests. A load that fails leaves what it has written; names, shapes and sizes are
            checked before.
        backend: of assigned tensors: "mmap" or "pread", as in load_file.
        mode: load_file's name for the same; takes precedence. ValueError without `assign`.
        assign: replace the parameters by the loaded tensors (required for a model on the meta
            device). Tied ones stay tied, and views stay views. For DTensors each rank reads its own
            part.
        share: "node" shares the memory of assigned tensors between processes, as in load_file().
            ValueError without `assign`.
        share_grace: as in load_file().
        threads: of the load; 0: one per CPU the process may use, at most 16 (GPUs: 8).
        verify: True verifies every loaded byte against the manifest next to the model (an error
            without one), a path against that manifest, SignedBy() against a signed one. A tensor in
            a chunk whose digest differs is never returned. None: the current verifying() context,
            else False.

    Returns:
        (missing names, unexpected names).

    Raises:
        RuntimeError: names, if strict; a different shape; a model on the meta device without
            assign.
        TypeError: a model that is no torch module, or another argument of the wrong type.
        SafetensorError: an invalid file.
        OSError: the matching subclass, if a system call fails.
    """
    from ._loading.module_weights import ModuleLoad, check_module

    check_path(filename)
    check_switches(strict=strict, assign=assign)
    check_module(model)
    views = check_backend(backend) if mode is None else mode
    check_load_options({"mode": views, "threads": threads, "share": share,
                        "share_grace": share_grace})
    if (mode is not None or share != "off") and not assign:
        name = "share" if mode is None else "mode"
        raise ValueError(f"{name} has no effect without assign=True: the bytes are read into the "
                         "model's memory")
    device = check_device(device)
    check_present(device)
    shared = share_options(share, share_grace, device)
    with contextlib.closing(open_files(filename, verify)) as file:
        load = ModuleLoad(file, model, assign, threads, device, {"mode": views, **shared})
        return load.run(strict, changed)


def save_file(
    tensors: dict[str, Tensor],
    filename: Path,
    metadata: dict[str, str] | None = None,
    *,
    alignment: int | str = 0,
    compress: bool | str = False,
    engine: str = "auto",
    durable: bool = False,
    manifest: bool | Path = False,
    progress: Progress | None = None,
) -> None:
    """Save tensors to a file.

    The file is byte for byte the reference writer's (whose order of metadata keys is random; here
    it is the dict's). It is published atomically when it is complete: until then, and after any
    error or crash, the old file is there. Permissions of an existing file are kept, symbolic links
    followed. Tensors that are packed in CPU memory are not copied.

    Args:
        tensors: {name: tensor}, on any device.
        filename: of the file.
        metadata: text only.
        alignment: align tensors to this many bytes; 0: to their dtype. If sizes are not multiples,
            padding tensors are added: this package hides them, other readers see U8 tensors
            ``__padding__.N``.
        compress: True compresses float tensors losslessly, if that saves space; "all": integers
            too. This package loads such a file like the original; other readers can open it and see
            U8 vectors with reserved names. Needs libzstd, and free space for the uncompressed file
            while saving.
        engine: "auto", "buffered", "direct" or "uring".
        durable: wait until file and folder are on the device; otherwise a power cut (not a crash)
            may lose the new file.
        manifest: True writes a manifest of the file as FILE.manifest, where verify=True finds it,
            computed while saving. "blake3" or "sha256": the same with that algorithm, which also
            protects against forgery; other text is a path. Without it, the manifest of an old file
            is deleted, because it no longer matches.
        progress: called regularly with (bytes done, total bytes, tensors done, total tensors); an
            exception cancels the save.

    Raises:
        ValueError: a tensor that is not dense and packed.
        RuntimeError: tensors that share memory (see save_model), or have no storage.
        TypeError: names or metadata that are not text.
        SafetensorError: a failed system call; also the matching OSError subclass.
    """
    check_location("filename", filename)
    check_tensors(tensors, metadata)
    rows, owners = make_rows(tensors, on_device=True)
    save_rows(filename, rows, metadata, progress=progress, owners=owners,
              **file_options(durable, alignment, engine, compress, manifest))


def save_file_async(
    tensors: dict[str, Tensor],
    filename: Path,
    metadata: dict[str, str] | None = None,
    *,
    alignment: int | str = 0,
    compress: bool | str = False,
    stage: str = "copy",
    memory: int | str | None = None,
    pool: StagingPool | None = None,
    engine: str = "auto",
    copy_threads: int = 0,
    nice: int = 0,
    durable: bool = False,
    manifest: bool | Path = False,
    overlap: str = "order",
    at_exit: str = "wait",
) -> SaveHandle:
    """Start to save tensors to a file, and return while threads of the library write it.

    The file has the state at the call, and the bytes that save_file() would write. When
    it is complete, it replaces the old file atomically; after any error the old file is unchanged.

    Args:
        tensors: {name: tensor}, on any device.
        filename: where the file is saved: a path or a URL.
        metadata: text only.
        alignment: as in save_file.
        compress: as in save_file.
        stage: "copy": the call returns when every tensor is copied. "lazy": it returns at once, and
            a thread copies; tensors must not change before ``handle.wait_staged()`` has returned
            (``optimizer.register_step_pre_hook(handle.before_step)``). A change before that makes
            the save fail. It is noticed by torch's version counters, and by samples of the bytes
            (2 KiB of every 2 MiB, and the ends of each tensor); a change of a few elements that
            torch does not count (by ``tensor.data`` or NumPy) may be missed. "none": tensors are
            read while they are written, through 32 MiB of memory, and must not change until the
            save has ended; `memory` and `copy_threads` must not be given.
        memory: the most staging memory that this save uses, bytes or "1GiB", at least 32 MiB. With
            less than the tensors take, copying waits for the disk: the call blocks for longer.
            None: the pool's limit.
        pool: a StagingPool that provides the memory; None: a pool of the process, which grows to
            what the largest save needs and keeps it (fastsafetensors.async_save.release_staging()).
        engine: as in save_file.
        copy_threads: threads that copy; 0: up to 4 for "copy", 1 for "lazy".
        nice: lowers the priority of the writing threads, 0 to 19.
        durable: the file is on the device when the save has ended.
        manifest: as in save_file.
        overlap: what happens to a save of the same pool, or to the same file, that has not ended.
            "order": this one is written after it. "supersede": it is cancelled. save_file() and
            other calls that block wait for the save if they replace its file.
        at_exit: whether the interpreter's exit waits for the save ("wait") or cancels it
            ("cancel").

    Returns:
        The handle: wait(), done(), cancel(), progress, stats, exception(), wait_staged().

    Raises:
        ValueError: a tensor that is not dense and packed; an invalid option.
        RuntimeError: tensors that share memory, or have none; for "lazy" and "none", tensors
            without version counters (made in inference mode).
        TypeError: names or metadata that are not text.
        MemoryError: there are not even 32 MiB of memory.
    """
    staging = Staging(stage, memory, pool, overlap, copy_threads, nice, at_exit)
    check_location("filename", filename)
    check_tensors(tensors, metadata)
    is_unchanged = None if stage == "copy" else watch_changes(tensors)
    rows, owners = make_rows(tensors, on_device=True)
    return start_rows(filename, rows, metadata, staging, Hooks(is_unchanged), owners=owners,
                      **file_options(durable, alignment, engine, compress, manifest))


def save(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes that save_file would write.

    Args:
        tensors: {name: tensor}.
        metadata: text only.

    Returns:
        The file's bytes.

    Raises:
        ValueError: a tensor that is not dense and packed.
        RuntimeError: tensors that share memory, or have no storage.
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
    alignment: int | str = 0,
    compress: bool | str = False,
    engine: str = "auto",
    durable: bool = False,
    manifest: bool | Path = False,
    progress: Progress | None = None,
) -> None:
    """Save a module's parameters and buffers, each shared tensor once.

    Of several names for the same memory one is saved, and the metadata has the others ({left out:
    kept}); load_model ties them again.

    Args:
        model: a torch module.
        filename: of the file.
        metadata: text only.
        force_contiguous: pack tensors that are not packed; otherwise they are a ValueError.
        alignment: as in save_file, like the following.
        compress: True or "all".
        engine: "auto", "buffered", "direct" or "uring".
        durable: wait until file and folder are on the device.
        manifest: as in save_file.
        progress: as in save_file.

    Raises:
        RuntimeError: tensors that share memory which no single one covers; others as in save_file.
        SafetensorError: a failed system call; also the matching OSError subclass.
        TypeError: an argument of another type.
    """
    kept, metadata = model_state(model, metadata, force_contiguous)
    save_file(kept, filename, metadata, alignment=alignment, compress=compress, engine=engine,
              durable=durable, manifest=manifest, progress=progress)


def save_model_async(
    model: Module,
    filename: Path,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    alignment: int | str = 0,
    compress: bool | str = False,
    stage: str = "copy",
    memory: int | str | None = None,
    pool: StagingPool | None = None,
    engine: str = "auto",
    copy_threads: int = 0,
    nice: int = 0,
    durable: bool = False,
    manifest: bool | Path = False,
    overlap: str = "order",
    at_exit: str = "wait",
) -> SaveHandle:
    """Start saving the parameters and buffers of a module: save_model() in the background.

    Args:
        model: a torch module.
        filename: where the file is saved: a path or a URL.
        metadata: text only.
        force_contiguous: pack tensors that are not; else they are a ValueError.
        alignment: as in save_file.
        compress: as in save_file.
        stage: as in save_file_async, like the following.
        memory: the most staging memory that this save uses.
        pool: a StagingPool that provides the memory.
        engine: as in save_file.
        copy_threads: threads that copy.
        nice: lowers the priority of the writing threads.
        durable: the file is on the device when the save has ended.
        manifest: as in save_file.
        overlap: "order" or "supersede".
        at_exit: "wait" or "cancel".

    Returns:
        The handle.

    Raises:
        ValueError: a parameter is not contiguous and force_contiguous is false, or an option is
            invalid.
        TypeError: names or metadata are not text.
    """
    kept, metadata = model_state(model, metadata, force_contiguous)
    return save_file_async(
        kept, filename, metadata, stage=stage, memory=memory, pool=pool, copy_threads=copy_threads,
        nice=nice, overlap=overlap, at_exit=at_exit, durable=durable, alignment=alignment,
        engine=engine, compress=compress, manifest=manifest)
