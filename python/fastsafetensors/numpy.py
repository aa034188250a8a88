# SPDX-License-Identifier: Apache-2.0
"""safetensors files as numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from ._core import Tensor, error_class, serialize
from ._dtypes import WORDS, dtype_word
from ._load import load_bytes, load_paths
from ._numpy_installed import numpy as _np
from ._open import check_backend, check_path
from ._progress import Progress
from ._saving import check_names, compress_word, manifest_options, save_rows
from ._types import Path, Paths
from ._verify import Verify

__all__ = ["load", "load_file", "save", "save_file"]

# The dtypes that an array can have, by numpy's names, and those of them that the ml_dtypes package
# adds.
_FORMAT_NAMES = {word: name for name, word in WORDS.items() if name != "F4"}
_ML_NAMES = {name: word for word, name in _FORMAT_NAMES.items() if not hasattr(_np, word)}


@cache
def _ml_dtype(name: str) -> Any:
    """Return a dtype of the ml_dtypes package."""
    import ml_dtypes

    return _np.dtype(getattr(ml_dtypes, name))


class PackedArray(_np.ndarray[Any, Any]):
    """Bytes of elements that numpy has no dtype for: saved, they are again what they were.

    format_dtype, format_shape: the format's. Copies and pickles are what the array is; parts of it,
    and what is computed from it, are bytes.
    """

    format_dtype: str | None = None
    format_shape: tuple[int, ...] = ()

    def copy(self, order: Any = "C") -> Any:
        """Copy the bytes and what they are."""
        return _packed(super().copy(order), self.format_dtype, self.format_shape)

    def __copy__(self) -> Any:
        """Copy the bytes and what they are."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any] | None) -> Any:
        """Copy the bytes and what they are."""
        return self.copy()

    def __reduce__(self) -> Any:
        """Pickle the bytes and what they are."""
        return _packed, (_np.array(self), self.format_dtype, self.format_shape)


def _packed(array: Any, dtype: str | None, shape: tuple[int, ...]) -> Any:
    packed = array.view(PackedArray)
    packed.format_dtype, packed.format_shape = dtype, shape
    return packed


def wrap(tensor: Tensor) -> Any:
    """A numpy array on the memory of `tensor`: no bytes are copied.

    bfloat16 and 8-bit floats need the ml_dtypes package (ImportError says so). 4- and 6-bit
    floats, which numpy has no packed form for, come as their bytes: a PackedArray of one dimension.
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
    """Return the dtype that arrays of the format's `dtype` have; None where there is none here."""
    try:
        return _ml_dtype(_ML_NAMES[dtype]) if dtype in _ML_NAMES else _np.dtype(WORDS[dtype])
    except (ImportError, KeyError):
        return None


def from_bytes(data: bytearray, dtype: str, shape: tuple[int, ...]) -> Any | None:
    """Return an array of `data`, which it keeps; None where numpy has no such dtype."""
    own = _own_dtype(dtype)
    return None if own is None else _np.ndarray(shape, own, data)


def export(loader: Any) -> dict[str, Any]:
    """All tensors of a load as {name: numpy array}."""
    tensors: dict[str, Any] = loader.export(wrap, wrap, 0)
    return tensors


def make_item(loader: Any, index: int) -> Any:
    """Item `index` of a load as an array, once its bytes are there."""
    return wrap(loader.item(index))


def load_file(
    filename: Paths,
    *,
    backend: str = "mmap",
    mode: str | None = None,
    engine: str = "auto",
    threads: int = 0,
    dtype: Any = None,
    progress: Progress | bool | None = None,
    names: Iterable[str] | None = None,
    filter: Callable[[str], bool] | None = None,
    cache: str = "auto",
    verify: Verify | None = None,
) -> dict[str, _np.ndarray[Any, Any]]:
    """Load a model's tensors; the arguments are those of fastsafetensors.torch.load_file.

    Args:
        filename: a file, an index, a folder, or a list of files.
        backend: "mmap" or "pread", mode in other words.
        mode: "auto", "load" or "map".
        engine: forces how "load" reads.
        threads: of "load"; 0: as many as the process may use, at most 16.
        dtype: what elements become: one of numpy's, its name, or the format's.
        progress: called with (bytes done, bytes in all, tensors done, tensors in all).
        names: which tensors; nothing else is read.
        filter: name -> whether to load it.
        cache: "keep", "bypass" or "auto".
        verify: True holds every byte that is loaded against the manifest beside the model (none is
            an error), a path against that one, SignedBy() against a signed one; a tensor
            that touches a chunk whose digest differs is not handed out. None: as verifying() says,
            else False.

    Returns:
        {name: array} in the order of the file; they may be written to.

    Raises:
        SafetensorError: a bad file; an unknown name (a KeyError as well).
        OSError: of its kind, for what the system refuses.
        ImportError: of bfloat16 and 8-bit floats, without the ml_dtypes package.
    """
    check_path(filename)
    chosen = check_backend(backend) if mode is None else mode
    return load_paths(filename, export, names, keep=filter, progress=progress, mode=chosen,
                      engine=engine, threads=threads, dtype=dtype_word(dtype), cache=cache,
                      verify=verify)


def load(data: Any) -> dict[str, _np.ndarray[Any, Any]]:
    """Load all tensors of a file's bytes, which are copied once.

    Args:
        data: any bytes-like object.

    Returns:
        {name: array}.

    Raises:
        SafetensorError: bytes that are no such file.
    """
    return load_bytes(data, export)


def _make_rows(tensor_dict: Any, metadata: Any) -> tuple[list[Any], list[Any]]:
    """(rows, arrays that keep the memory) of a dict of arrays."""
    if not isinstance(tensor_dict, dict):
        raise TypeError(f"expected a dict of str to numpy.ndarray, not {type(tensor_dict)}")
    check_names(tensor_dict, metadata)
    rows, owners = [], []
    for name, given in tensor_dict.items():
        if not isinstance(given, (_np.ndarray, _np.generic)):
            raise TypeError(f"`{name}` is no numpy array but {type(given)}")
        array = _np.asarray(given)
        dtype = _FORMAT_NAMES.get(array.dtype.name)
        if dtype is None:
            known = ", ".join(_FORMAT_NAMES)
            raise error_class()(
                f'Unknown dtype "{array.dtype.name}". Supported dtypes: {known} (`{name}`)'
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
    durable: bool = False,
    alignment: int = 0,
    engine: str = "auto",
    progress: Progress | None = None,
    compress: bool | str = False,
    manifest: bool | Path = False,
) -> None:
    """Save arrays to a file; everything as in fastsafetensors.torch.save_file.

    Arrays that are not packed or not in the machine's byte order are normalised.

    Args:
        tensor_dict: {name: array}.
        filename: where the file comes to.
        metadata: text only.
        durable: wait until file and folder are on the device.
        alignment: begin tensors at multiples of this many bytes.
            Where sizes are no multiples, fillers stand between: this package leaves them out,
            other readers see U8 tensors ``__padding__.N``.
        engine: "auto", "buffered", "direct" or "uring".
        progress: called with (bytes done, bytes in all, tensors done, tensors in all).
        compress: True: tensors of floats are written compressed, without loss, where that saves
            something; "all": integers, too. This package loads such a file as it was; other
            readers open it and see U8 vectors of reserved names. It needs libzstd, and free space
            for the plain file as well while it is written.
        manifest: True: a manifest of the file is made of the bytes as they are written, and comes
            with it, as FILE.manifest: verify=True finds it. "blake3" or "sha256": the same by that
            algorithm, against forgery as well; else its path. Without one a manifest of the old
            file, which it does not fit any more, goes with that.

    Raises:
        SafetensorError: dtypes that the format lacks; what the system refuses (an OSError as well).
        TypeError: names or metadata that are not text, and what is no array.
    """
    rows, owners = _make_rows(tensor_dict, metadata)
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
        SafetensorError: dtypes that the format lacks.
    """
    rows, owners = _make_rows(tensor_dict, metadata)
    result = serialize(None, rows, metadata)
    del owners
    return result
