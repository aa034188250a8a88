# SPDX-License-Identifier: Apache-2.0
"""Headers, frames and helpers of fastsafetensors 0.5."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .._base.errors import printable
from .._base.regular_files import open_regular
from .._core import Model, check_save, engines, error_class
from .._loading.memory_models import model_of_bytes
from .._loading.verified_open import open_files
from .._ranks.process_group import SingleGroup
from .st_types import Device, DType, converted

__all__ = [
    "SafeTensorsMetadata",
    "SingleGroup",
    "TensorFrame",
    "get_device_numa_node",
    "get_fs_type",
    "init_logger",
    "is_gpu_found",
]


ODIRECT_HINT = "FASTSAFETENSORS_ODIRECT=0 makes reads go through the page cache"


def is_debug(logger: logging.Logger) -> bool:
    """Tell whether a logger logs details of loads."""
    return logger.isEnabledFor(logging.DEBUG)


def set_debug() -> None:
    """Make the package's loggers log details of loads."""
    logging.getLogger("fastsafetensors").setLevel(logging.DEBUG)


def is_odirect_enabled(path: str, buffered_ram_fs: bool = False) -> bool:
    """Tell whether reads of a file may bypass the page cache.

    FASTSAFETENSORS_ODIRECT decides; otherwise a probe of the file system.
    """
    requested = os.environ.get("FASTSAFETENSORS_ODIRECT")
    if requested in ("0", "1"):
        return requested == "1"
    return any(works for name, works, _, _ in engines(path) if name == "direct")


def resolve_runtime_lib_name(framework: Any = None) -> str:
    """Return "", because the library finds drivers itself."""
    return ""


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module; nothing is printed unless a program asks logging to."""
    return logging.getLogger(name)


def is_gpu_found() -> bool:
    """Tell whether a GPU runtime and a device are available."""
    try:
        import torch

        return bool(torch.cuda.is_available())
    except ImportError:
        return False


def get_device_numa_node(device: int | None) -> int | None:
    """Return the NUMA node of a GPU, or None if unknown.

    For programs written for fastsafetensors 0.5.
    """
    if device is None:
        return None
    try:
        import torch

        properties = torch.cuda.get_device_properties(device)
        address = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
            f"{properties.pci_device_id:02x}.0"
        )
        with open(f"/sys/bus/pci/devices/{address}/numa_node") as file:
            node = int(file.read())
        return node if node >= 0 else None
    except Exception:  # no torch, no GPU or no such file: unknown
        return None


def get_fs_type(path: str | os.PathLike[str], mounts_file: str = "/proc/mounts") -> str:
    """Return the type of a path's file system ("ext4"), or ""."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open(mounts_file) as file:
            for line in file:
                parts = line.split()
                if len(parts) < 3:
                    continue
                point = parts[1].replace("\\040", " ")
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, parts[2]
    except OSError:
        return ""
    return kind


@dataclass
class TensorFrame:
    """A tensor's location: dtype, shape, bytes relative to the data section, strides in elements.

    For programs written for fastsafetensors 0.5.

    offsets: first element of each dimension of a slice; sliced: whether it is a slice.
    """

    dtype: DType
    shape: list[int]
    data_offsets: list[int]
    strides: list[int]
    offsets: list[int]
    sliced: bool

    @classmethod
    def from_buffer(cls, entry: dict[str, Any]) -> TensorFrame:
        """Create one from a header entry."""
        shape = list(entry["shape"])
        strides = [1] * len(shape)
        for at in range(len(shape) - 2, -1, -1):
            strides[at] = strides[at + 1] * shape[at + 1]
        zeros = [0] * len(shape)
        return cls(DType(entry["dtype"]), shape, list(entry["data_offsets"]), strides, zeros, False)

    def __getitem__(self, key: Any) -> TensorFrame:
        """Return the frame of a slice: integers keep their dimension, of size 1."""
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) > len(self.shape):
            raise IndexError(f"too many indices for tensor of dimension {len(self.shape)}")
        shape, strides, offsets = list(self.shape), list(self.strides), list(self.offsets)
        for at, part in enumerate(parts):
            size = self.shape[at]
            if isinstance(part, slice):
                first, last, step = part.indices(size)
                if step <= 0:
                    raise ValueError("step must be greater than zero")
                shape[at] = max(0, -(-(last - first) // step))
                strides[at] *= step
            elif not -size <= part < size:
                raise IndexError(
                    f"index {part} is out of bounds for dimension {at} with size {size}"
                )
            else:
                first, shape[at] = part % size, 1
            offsets[at] += first
        return TensorFrame(self.dtype, shape, list(self.data_offsets), strides, offsets, True)


class FileFrames(Mapping[str, TensorFrame]):
    """{name: TensorFrame} of one file, by offset; frames are created on demand."""

    def __init__(self, model: Model, header_length: int) -> None:
        """Read the names."""
        self._model = model
        self._header_length = header_length
        self.names = model.names()
        self._made: dict[str, TensorFrame] = {}

    def __getitem__(self, name: str) -> TensorFrame:
        """Return a tensor's frame, the same each time. KeyError for an unknown name."""
        frame = self._made.get(name)
        if frame is None:
            index = self._model.find(name) if isinstance(name, str) else -1
            if index < 0:
                raise KeyError(name)
            dtype, shape, size, _, offset = self._model.info(index)
            begin = offset - self._header_length
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
            frame = self._made.setdefault(name, TensorFrame.from_buffer(entry))
        return frame

    def __contains__(self, name: object) -> bool:
        """Tell whether the file has a tensor of that name."""
        return isinstance(name, str) and self._model.find(name) >= 0

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.names)

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return self._model.nbytes(self._model.find(name))


class LoaderFrames(Mapping[str, TensorFrame]):
    """The frames of several files. If two files have a name, the last one counts."""

    def __init__(self) -> None:
        """Start without files."""
        self._files: list[FileFrames] = []

    def add(self, frames: FileFrames) -> None:
        """Add a file's frames."""
        self._files.append(frames)

    def __getitem__(self, name: str) -> TensorFrame:
        """Return a tensor's frame."""
        for frames in reversed(self._files):
            if name in frames:
                return frames[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of registration."""
        if len(self._files) == 1:
            return iter(self._files[0])
        return iter(dict.fromkeys(name for frames in self._files for name in frames))

    def __len__(self) -> int:
        """Return the number of names."""
        return len(list(iter(self)))


class SafeTensorsMetadata:
    """A file's header.

    For programs written for fastsafetensors 0.5.

    tensors: {name: TensorFrame} by offset; metadata: the file's, or ""; header_length: bytes before
    the data section; size_bytes: of the file; src: its path; aligned: whether the data section
    starts at a multiple of 8 bytes.
    """

    def __init__(self, model: Model, src: str, framework: Any = None) -> None:
        """Take the header of an open model with one file."""
        self.framework = framework
        _, self.size_bytes, self.header_length, _, _ = model.file(0)
        self.src = src
        self.metadata: Any = model.metadata(0) or ""
        self.tensors = FileFrames(model, self.header_length)
        self.aligned = self.header_length % 8 == 0
        self.model = model

    def _check_bytes(self) -> None:
        """Refuse functions that access the file's own bytes if these are compressed."""
        if self.model.is_compressed:
            raise RuntimeError(
                f"{printable(self.src)} is compressed: its bytes are not those of its tensors, "
                "and only the readers of this package decode them"
            )

    @classmethod
    def from_file(
        cls, filename: str | os.PathLike[str], framework: Any = None
    ) -> SafeTensorsMetadata:
        """Read a file's header. Bytes after the data are accepted, as the loaders do."""
        src = os.fsdecode(filename)
        return cls(open_model(src), src, framework)

    @classmethod
    def from_fd(
        cls, fd: int, filename: str, framework: Any = None, keep_orig_dict: bool = False
    ) -> SafeTensorsMetadata:
        """Read the header of an open file."""
        return cls(open_model(f"/proc/self/fd/{fd}", filename), filename, framework)

    @classmethod
    def from_buffer(
        cls, buf: int, buffer_len: int, filename: str, framework: Any = None
    ) -> SafeTensorsMetadata:
        """Read a header from memory that contains the whole file."""
        data = (ctypes.c_char * buffer_len).from_address(buf)
        return cls(model_of_bytes(data), filename, framework)

    def select_byte_ranges(
        self, keep_tensor: Callable[[str], bool], merge_gap: int = 4096
    ) -> list[tuple[int, int]]:
        """Return [(begin, end)] from the start of the file with the selected tensors.

        Ranges at most merge_gap bytes apart are merged. RuntimeError for a compressed file.
        """
        self._check_bytes()
        ranges: list[tuple[int, int]] = []
        for name, frame in self.tensors.items():
            begin, end = (self.header_length + offset for offset in frame.data_offsets)
            if begin == end or not keep_tensor(name):
                continue
            if ranges and begin - ranges[-1][1] <= merge_gap:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
        return ranges

    def get_tensors(
        self,
        gbuf: Any,
        device: Device,
        copy_start_offset: int,
        dtype: DType = DType.AUTO,
        owner: Any = None,
    ) -> dict[str, Any]:
        """Return {name: TensorBase} over a buffer that the caller's reader has filled.

        copy_start_offset: file offset of the buffer's first byte. The tensors are views of the
        buffer and keep `owner`, or else `gbuf`, alive; with a dtype, floats are converted.
        RuntimeError for a compressed file.
        """
        self._check_bytes()
        if self.framework is None:
            raise ValueError("the metadata was read without a framework")
        views = self.framework.iter_buffer_views(
            self, gbuf, device, copy_start_offset, self.tensors.names, owner
        )
        return {
            name: tensor.to(dtype=converted(tensor.dtype, dtype))
            if converted(tensor.dtype, dtype) is not tensor.dtype else tensor
            for name, tensor in views
        }

    def digest(self) -> str:
        """Return a digest of the header, equal for equal files at any path."""
        try:
            # the stored header of a compressed file is another one
            with open(open_regular(self.src), "rb") as file:
                length = file.read(8)
                header = file.read(min(int.from_bytes(length, "little"), 100_000_000))
                return hashlib.blake2b(length + header, digest_size=16).hexdigest()
        except OSError as error:
            return f"unreadable ({error.strerror})"

    def tensor_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return self.tensors.nbytes(name)


def open_model(path: str, shown: str | None = None) -> Model:
    """Open one file like the 0.5 loaders: leniently, with the error's name in the message."""
    try:
        return open_files([path], lenient=True)
    except error_class() as error:
        tag = getattr(error, "tag", "")
        text = str(error).replace("Error while deserializing header: ", "", 1)
        if shown is not None:
            text = text.replace(path, shown)
        raised = error_class()(f"{tag}: {text}" if tag and tag not in text else text)
        for name in ("tag", "file", "tensor", "byte_offset"):
            setattr(raised, name, getattr(error, name, None))
        raise raised from None


# Files are reopened while a save replaces them, for at least two seconds.
_TRIES = 40


def check_one_save(open_all: Callable[[], Collection[SafeTensorsMetadata]]) -> None:
    """Open files until they belong to one save.

    open_all: opens all files and returns their headers. It is called again while a save replaces
    some of them.

    Raises:
        SafetensorError: the files were replaced at each attempt, or a save of them was left
            unfinished.
    """
    for tries in range(_TRIES):
        try:
            check_save([metadata.model for metadata in open_all()])
            return
        except error_class() as error:
            if getattr(error, "tag", None) != "FileChanged" or tries == _TRIES - 1:
                raise
        time.sleep(min(0.001 * 2**tries, 0.064))


def device_of(device: Any) -> Device:
    """Convert anything that names a device to a Device. Raises an error for a missing GPU."""
    found = Device.of(device)
    if not found.is_cpu and not is_gpu_found():
        raise RuntimeError(
            f"[FAIL] GPU runtime library not found (no usable GPU for device {found.as_str()})"
        )
    return found
