# SPDX-License-Identifier: Apache-2.0
"""safetensors files as numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from ._base.argument_types import Path, Paths
from ._base.dtypes import WORDS, dtype_word
from ._base.errors import printable
from ._base.lazy_names import lazy_names
from ._base.numpy_installed import numpy as _np
from ._base.options import check_location, check_names
from ._base.progress import Progress
from ._core import Tensor, error_class, serialize
from ._loading.load import load_bytes, load_paths
from ._loading.open_arguments import check_backend, check_path
from ._loading.verified_open import Verify
from ._saving.save_handles import SaveHandle, Staging, StagingPool, start_rows
from ._saving.save_options import file_options, save_rows

if TYPE_CHECKING:
    from ._loading.open import safe_open as safe_open
    from ._loading.stream import TensorStream

__all__ = ["PackedArray", "load", "load_file", "open_stream", "save", "save_file",
           "save_file_async"]

if not TYPE_CHECKING:  # programs import it from safetensors' module too
    __getattr__, __dir__ = lazy_names(globals(), {"safe_open": "_loading.open"})


# Dtypes of arrays by numpy's names, and those that the ml_dtypes package adds.
_FORMAT_NAMES = {word: name for name, word in WORDS.items() if name != "F4"}
_ML_NAMES = {name: word for word, name in _FORMAT_NAMES.items() if not hasattr(_np, word)}


@cache
def _ml_dtype(name: str) -> Any:
    """Return a dtype of the ml_dtypes package."""
    import ml_dtypes

    return _np.dtype(getattr(ml_dtypes, name))


class PackedArray(_np.ndarray[Any, Any]):
    """Bytes of elements without a numpy dtype. When saved, they get their original dtype.

    format_dtype, format_shape: the format's. Copies and pickles keep them; parts and computed
    results are bytes.
    """

    format_dtype: str | None = None
    format_shape: tuple[int, ...] = ()

    def copy(self, order: Any = "C") -> Any:
        """Copy the bytes and their format."""
        return _packed(super().copy(order), self.format_dtype, self.format_shape)

    def __copy__(self) -> Any:
        """Copy the bytes and their format."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any] | None) -> Any:
        """Copy the bytes and their format."""
        return self.copy()

    def __reduce__(self) -> Any:
        """Pickle the bytes and their format."""
        return _packed, (_np.array(self), self.format_dtype, self.format_shape)


def _packed(array: Any, dtype: str | None, shape: tuple[int, ...]) -> Any:
    packed = array.view(PackedArray)
    packed.format_dtype, packed.format_shape = dtype, shape
    return packed


def wrap(tensor: Tensor) -> Any:
    """Return a numpy array for `tensor`, without copying bytes.

    bfloat16 and 8-bit floats need the ml_dtypes package (ImportError without it). 4- and 6-bit
    floats, for which numpy has no packed form, are returned as bytes: a PackedArray of one
    dimension.
    """
    if tensor.nbytes == 0:
        array = _np.empty(tensor.shape, dtype=tensor.__array_interface__["typestr"])
    else:
        array = _np.asarray(tensor)
    name = _ML_NAMES.get(tensor.dtype)
    if tensor.dtype in ("F4", "F6_E2M3", "F6_E3M2"):
        return _packed(array, tensor.dtype, tensor.shape)
    if name is None:
        return array
    try:
        dtype = _ml_dtype(name)
    except ImportError as error:
        raise ImportError(
            f"tensor {tensor.name!r} is {tensor.dtype}, which numpy lacks: pip install ml_dtypes"
        ) from error
    return array.view(dtype)


@cache
def _own_dtype(dtype: str) -> Any | None:
    """Return the dtype of arrays for the format's `dtype`; None if numpy has no such dtype."""
    try:
        return _ml_dtype(_ML_NAMES[dtype]) if dtype in _ML_NAMES else _np.dtype(WORDS[dtype])
    except (ImportError, KeyError):
        return None


def from_bytes(data: bytearray, dtype: str, shape: tuple[int, ...]) -> Any | None:
    """Return an array over `data`, which it keeps alive; None if numpy lacks the dtype."""
    own = _own_dtype(dtype)
    return None if own is None else _np.ndarray(shape, own, data)


def export(loader: Any) -> dict[str, Any]:
    """All tensors of a load as {name: numpy array}."""
    tensors: dict[str, Any] = loader.export(wrap, wrap, 0)
    return tensors


def make_item(loader: Any, index: int) -> Any:
    """Return item `index` of a load as an array, waiting for its bytes."""
    return wrap(loader.item(index))


def load_file(
    filename: Paths,
    *,
    names: Iterable[str] | None = None,
    filter: Callable[[str], bool] | None = None,
    dtype: Any = None,
    backend: str = "mmap",
    mode: str | None = None,
    share: str = "off",
    share_grace: int = 0,
    cache: str = "auto",
    engine: str = "auto",
    threads: int = 0,
    verify: Verify | None = None,
    progress: Progress | bool | None = None,
) -> dict[str, _np.ndarray[Any, Any]]:
    """Load a model's tensors; the arguments are those of fastsafetensors.torch.load_file.

    Args:
        filename: a file, an index, a folder, or a list of files.
        names: the tensors to load; nothing else is read.
        filter: name -> whether to load it.
        dtype: convert to this dtype while loading: numpy's, its name, or the format's.
        backend: the safetensors package's name for mode: "mmap" or "pread".
        mode: "auto", "load" or "map".
        share: "node" shares the memory of loads into owned memory between processes.
        share_grace: seconds that shared memory outlives its last process.
        cache: "keep", "bypass" or "auto".
        engine: forces the engine of "load".
        threads: of "load"; 0: one per CPU that the process may use, at most 16.
        verify: True verifies every loaded byte against the manifest next to the model (an error
            without one), a path against that manifest, SignedBy() against a signed one. A tensor in
            a chunk whose digest differs is never returned. None: the current verifying() context,
            else False.
        progress: called with (bytes done, total bytes, tensors done, total tensors).

    Returns:
        {name: array} in file order. They are writable.

    Raises:
        SafetensorError: an invalid file, or an unknown name (also a KeyError).
        OSError: the matching subclass, if a system call fails.
        ImportError: for bfloat16 and 8-bit floats, without the ml_dtypes package.
        TypeError: an argument of another type.
    """
    check_path(filename)
    chosen = check_backend(backend) if mode is None else mode
    return load_paths(filename, export, names, keep=filter, progress=progress, mode=chosen,
                      engine=engine, threads=threads, dtype=dtype_word(dtype), cache=cache,
                      share=share, share_grace=share_grace, verify=verify)


def open_stream(
    filename: Paths,
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
    threads: int = 0,
    verify: Verify | None = None,
) -> TensorStream:
    """Go through a model array by array, in file order, while the next ones are being read.

    By default arrays are memory-mapped views, as in load_file(). With a memory limit they are
    copies, and the library holds at most that many bytes that were read and not yet returned, not
    counting arrays that the program keeps.

        with open_stream("model.safetensors", memory="1GiB") as stream:
            for name, array in stream:
                ...

    Args:
        filename: a file, an index, a folder, or a list of files (names must then be unique).
        names: the tensors to load; nothing else is read.
        filter: name -> whether to load it.
        dtype: convert to this dtype while loading, as in load_file().
        mode: "load" copies into owned memory; "map" returns views of the file, which `memory`
            refuses; "auto" as above.
        memory: limit of the bytes that were read and not yet returned, a number or "1GiB"; the
            largest tensor, with the pages around it, must fit. 0: no limit.
        share: "node" shares memory between processes, as in load_file(); not with `memory`.
        share_grace: as in load_file().
        cache: "keep", "bypass" or "auto".
        engine: forces the engine of reads into memory.
        threads: of the load; 0: one per CPU that the process may use, at most 16.
        verify: as in load_file().

    Returns:
        An iterator of (name, array), and a context manager.

    Raises:
        SafetensorError: as load_file(). For damaged bytes it is raised by the iteration.
        ValueError: an invalid argument, or a tensor that does not fit in `memory`.
        MemoryError: not enough memory for half a second while the program waited.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    from ._loading.stream import TensorStream

    return TensorStream(
        filename, wrap, limit=memory, names=names, filter=filter, verify=verify, mode=mode,
        engine=engine, threads=threads, dtype=dtype_word(dtype), cache=cache, share=share,
        share_grace=share_grace)


def load(data: Any) -> dict[str, _np.ndarray[Any, Any]]:
    """Load all tensors from the bytes of a file, which are copied once.

    Args:
        data: any bytes-like object.

    Returns:
        {name: array}.

    Raises:
        SafetensorError: bytes that are not a valid file.
        TypeError: an argument of another type.
    """
    return load_bytes(data, export)


def _make_rows(tensor_dict: Any, metadata: Any) -> tuple[list[Any], list[Any]]:
    """(rows, arrays that own the memory) of a dict of arrays."""
    if not isinstance(tensor_dict, dict):
        raise TypeError(f"expected a dict of str to numpy.ndarray, not {type(tensor_dict)}")
    check_names(tensor_dict, metadata)
    rows, owners = [], []
    for name, given in tensor_dict.items():
        if not isinstance(given, (_np.ndarray, _np.generic)):
            raise TypeError(f"`{printable(str(name))}` must be a numpy array, not {type(given)}")
        array = _np.asarray(given)
        dtype = _FORMAT_NAMES.get(array.dtype.name)
        if dtype is None:
            known = ", ".join(_FORMAT_NAMES)
            raise error_class()(
                f'Unknown dtype "{array.dtype.name}". Supported dtypes: {known} '
                f'(`{printable(name)}`)'
            )
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if not array.flags.c_contiguous:
            array = _np.ascontiguousarray(array)
        owners.append(array)
        address = array.__array_interface__["data"][0]
        if isinstance(given, PackedArray) and given.format_dtype is not None:
            rows.append((name, given.format_dtype, given.format_shape, address, array.nbytes))
        else:
            rows.append((name, dtype, array.shape, address, array.nbytes))
    return rows, owners


def save_file(
    tensor_dict: dict[str, _np.ndarray[Any, Any]],
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
    """Save arrays to a file, like fastsafetensors.torch.save_file.

    Arrays that are not packed, or not in the machine's byte order, are converted.

    Args:
        tensor_dict: {name: array}.
        filename: of the file.
        metadata: text only.
        alignment: align tensors to this many bytes. If sizes are not multiples, padding tensors are
            added: this package hides them, other readers see U8 tensors ``__padding__.N``.
        compress: True compresses float tensors losslessly, if that saves space; "all": integers
            too. This package loads such a file like the original; other readers can open it and see
            U8 vectors with reserved names. Needs libzstd, and free space for the uncompressed file
            while saving.
        engine: "auto", "buffered", "direct" or "uring".
        durable: wait until file and folder are on the device.
        manifest: True writes a manifest of the file as FILE.manifest, where verify=True finds it,
            computed while saving. "blake3" or "sha256": the same with that algorithm, which also
            protects against forgery; other text is a path. Without it, the manifest of an old file
            is deleted, because it no longer matches.
        progress: called with (bytes done, total bytes, tensors done, total tensors).

    Raises:
        SafetensorError: unsupported dtypes, or a failed system call (also an OSError).
        TypeError: names or metadata that are not text, or values that are not arrays.
    """
    check_location("filename", filename)
    rows, owners = _make_rows(tensor_dict, metadata)
    save_rows(filename, rows, metadata, progress=progress, owners=owners,
              **file_options(durable, alignment, engine, compress, manifest))


def save_file_async(
    tensor_dict: dict[str, _np.ndarray[Any, Any]],
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
    """Start to save arrays to a file; everything as in fastsafetensors.torch.save_file_async.

    Args:
        tensor_dict: {name: array}.
        filename: where the file is saved: a path or a URL.
        metadata: text only.
        alignment: as in save_file.
        compress: as in save_file.
        stage: "copy" or "none". Arrays count no changes, so that "lazy" is refused, and "none" is a
            promise of the caller.
        memory: as in fastsafetensors.torch.save_file_async, like the following.
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
        ValueError: an invalid option.
        SafetensorError: dtypes that the format lacks.
        TypeError: names or metadata that are not text, and values that are not arrays.
    """
    options = Staging(stage, memory, pool, overlap, copy_threads, nice, at_exit)
    check_location("filename", filename)
    if options.stage == "lazy":
        raise ValueError('arrays have no version counters, so changes during a save would go '
                         'unnoticed: use stage="copy"')
    rows, owners = _make_rows(tensor_dict, metadata)
    return start_rows(filename, rows, metadata, options, owners=owners,
                      **file_options(durable, alignment, engine, compress, manifest))


def save(
    tensor_dict: dict[str, _np.ndarray[Any, Any]], metadata: dict[str, str] | None = None
) -> bytes:
    """Return the bytes that save_file would write.

    Args:
        tensor_dict: {name: array}.
        metadata: text only.

    Returns:
        The file's bytes.

    Raises:
        SafetensorError: unsupported dtypes.
        TypeError: an argument of another type.
    """
    rows, owners = _make_rows(tensor_dict, metadata)
    result = serialize(None, rows, metadata)
    del owners
    return result
