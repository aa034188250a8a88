# SPDX-License-Identifier: Apache-2.0
"""safe_open: an open model whose tensors are read on demand."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

from .._base.argument_types import Paths
from .._base.closing import Closing
from .._base.errors import refuse, unknown_tensor
from .._base.options import check_count, check_load_options
from .._base.representation import format_model, format_paths, with_plain_hints
from .load import OpenLoad, close_load, load_from, open_load
from .open_arguments import absolute_path, check_backend, check_device, check_path
from .readahead import ReadAhead
from .slicing import keeps_rows, plan_numpy, plan_torch
from .verified_open import Verify, chosen, open_files

# This package's module for each framework name.
_FRAMEWORKS = {
    "pt": "torch",
    "torch": "torch",
    "pytorch": "torch",
    "np": "numpy",
    "numpy": "numpy",
    "tf": "tensorflow",
    "tensorflow": "tensorflow",
    "jax": "flax",
    "flax": "flax",
    "mlx": "mlx",
    "paddle": "paddle",
}


class safe_open:  # noqa: N801 - the name that programs know
    """Open a model and read tensors one by one, whole or in part.

        with safe_open("model.safetensors", framework="pt", device="cpu") as f:
            for name in f.keys():
                tensor = f.get_tensor(name)
            rows = f.get_slice("weight")[16:32]

    Args:
        filename: a file, an index, a folder, or a list of files.
        framework: "pt" (torch), "np" (numpy), "jax" or "flax", "tf", "mlx", "paddle".
        device: of the tensors: "cpu", "cuda", "cuda:1", a torch.device, or the number of a GPU;
            "meta" is refused, because nothing would be read (see load_file).
        backend: "mmap" (views of the file) or "pread" (reads into owned memory).
        mode: load_file's name for the same; takes precedence.
        cache: as in load_file.
        verify: as in load_file; a tensor or slice is verified by its complete chunks.

    Tensors are writable and stay valid after the model is closed. Thread-safe, and usable after a
    fork.

    Raises:
        SafetensorError: an invalid file, or an unknown name (also a KeyError).
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """

    def __init__(
        self,
        filename: Paths,
        framework: str,
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        mode: str | None = None,
        cache: str = "auto",
        verify: Verify | None = None,
    ) -> None:
        """Open the files and read their headers; no tensor data is read yet."""
        check_path(filename)
        verify = chosen(verify)  # also for pickling
        self._opened = (absolute_path(filename), framework, device, backend, mode, cache, verify)
        name = _FRAMEWORKS.get(framework) if isinstance(framework, str) else None
        if name is None:
            refuse(f"framework {framework} is invalid")
        self._options: dict[str, Any] = {
            "mode": check_backend(backend) if mode is None else mode, "cache": cache,
        }
        check_load_options(self._options)
        self._device = check_device(device)
        if name != "torch" and self._device != "cpu":
            refuse(f"Device {device} is not supported for framework {name}")
        self._is_torch = name == "torch"
        adapter = "_torch.torch_tensors" if self._is_torch else name
        self._adapter: Any = importlib.import_module(f"fastsafetensors.{adapter}")
        if self._is_torch:
            from .._torch.gpu import load_options

            self._options.update(load_options(self._device))
        # Small cached parts are copied on the CPU, unless an engine was requested.
        copies = cache == "auto" and self._device == "cpu"
        copies = copies and self._options["mode"] != "load"
        self._from_bytes = getattr(self._adapter, "from_bytes", None) if copies else None
        self._model = open_files(filename, verify)
        self._ahead = ReadAhead(self._model, self._options)

    def __enter__(self) -> safe_open:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files. After Ctrl-C does not wait for reads in flight."""
        self._ahead.close(waits=kind is None or issubclass(kind, Exception))
        self._model.close()

    def __repr__(self) -> str:
        """Return the path, the number of tensors and their dtypes."""
        return format_model(type(self).__name__, self._opened[0], self._model)

    def __reduce__(self) -> Any:
        """Pickle as the paths and options, to be opened again in another process or folder."""
        self._model.names()  # raises an error once closed
        return _reopen, (type(self), self._opened)

    def close(self) -> None:
        """Close the files; tensors stay valid, and closing twice is fine."""
        self._ahead.close()
        self._model.close()

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._model.names())

    def offset_keys(self) -> list[str]:
        """Names of all tensors in file order, as in safetensors."""
        return self._model.names()

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._model)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, sorted."""
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name."""
        return isinstance(name, str) and self._model.find(name) >= 0

    def __getitem__(self, name: str) -> Any:
        """Return the tensor of that name."""
        return self.get_tensor(name)

    def metadata(self) -> dict[str, str] | None:
        """Return the __metadata__ of the first file, or None."""
        return self._model.metadata(0) if self._model.file_count else None

    def _find(self, name: str) -> int:
        if not isinstance(name, str):
            raise TypeError(f"argument 'name' must be a str, not {type(name).__name__}")
        index = self._model.find(name)
        if index < 0:
            names = self._model.names()
            raise unknown_tensor(name, f"File does not contain tensor {name}", names)
        return index

    def _place(self, tensor: Any) -> Any:
        is_on_device = self._device == "cpu" or "device" in self._options
        return tensor if is_on_device else tensor.to(self._device)

    def _read(self, item: str | tuple[str, list[int], list[int]]) -> Any:
        with OpenLoad(self._model, [item], **self._options) as loader:
            return self._place(self._adapter.make_item(loader, 0))

    def get_tensor(self, name: str) -> Any:
        """Read one tensor. SafetensorError names close matches for an unknown name."""
        return self._read_whole(self._find(name), name)

    def _read_whole(self, index: int, name: str) -> Any:
        """Return a whole tensor, from readahead or by a separate read."""
        found = self._ahead.take(index)
        if found is None:
            return self._read(name)
        return self._place(self._adapter.make_item(*found))

    def read_ahead(self, threads: int = 0) -> None:
        """Announce that all tensors will be read, one by one and roughly in order.

        The first read then starts readahead. Without this call it starts after several tensors were
        read in order. threads: of a load; 0: one per CPU that the process may use.
        """
        check_load_options({**self._options, "threads": threads})
        self._ahead = ReadAhead(self._model, self._options, threads, eager=True)

    def get_tensors(self) -> dict[str, Any]:
        """Read all tensors: {name: tensor} in file order."""
        tensors = load_from(self._model, self._adapter.export, **self._options)
        return {name: self._place(tensor) for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object that reads only the indexed part: ``f.get_slice(n)[2:4, :8]``."""
        return TensorSlice(self, name, self._find(name))

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Return a tensor's entry in the header, as in safetensors 0.9.

        data_offsets are relative to the data section.
        """
        dtype, shape, size, file, offset = self._model.info(self._find(name))
        begin = offset - self._model.file(file)[2]
        return TensorMeta(dtype, list(shape), (begin, begin + size))

    def prefetch(
        self, plan: dict[str, Any] | None = None, *, device: Any = None, threads: int = 8
    ) -> PrefetchLoader:
        """Start loading to a GPU, as in safetensors 0.9.

        plan: {name: None or a slice of dimension 0}; None for all tensors.

        torch and CUDA only.
        """
        where = self._device if device is None else check_device(device)
        kind = "cuda" if isinstance(where, int) else str(where).partition(":")[0]
        if not self._is_torch or kind != "cuda":
            refuse(f"prefetch loads to cuda devices, not {where}")
        check_count("threads", threads)
        wanted = dict.fromkeys(self.offset_keys()) if plan is None else dict(plan)
        for name, part in wanted.items():
            self._find(name)
            if part is not None and (not isinstance(part, slice) or part.step not in (None, 1)):
                refuse(f"prefetch takes slices of step 1, not {part!r} for {name}")
        return PrefetchLoader(self, wanted, where, threads)


def _reopen(kind: type[safe_open], opened: tuple[Any, ...]) -> safe_open:
    """Open a pickled safe_open again."""
    filename, framework, device, backend, mode, cache, verify = opened
    return kind(filename, framework, device, backend=backend, mode=mode, cache=cache,
                verify=verify)


@with_plain_hints
class TensorMeta(NamedTuple):
    """A tensor's entry in the header, as in safetensors 0.9."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class PrefetchLoader(Closing):
    """Tensors being loaded to a GPU, as in safetensors 0.9. Each can be taken once."""

    def __init__(
        self, file: safe_open, plan: dict[str, Any], device: Any, threads: int
    ) -> None:
        """Start reading. Created by safe_open.prefetch()."""
        items: list[Any] = []
        for name, part in plan.items():
            shape = list(file._model.info(file._find(name))[1])
            begin, end = [0] * len(shape), list(shape)
            if part is not None and shape:
                first, last, _ = part.indices(shape[0])
                begin[0], end[0] = first, max(first, last)
            items.append((name, begin, end) if part is not None else name)
        self._path = file._opened[0]
        self._names = list(plan)
        self._left = dict.fromkeys(self._names)
        self._device = device
        self._adapter = file._adapter
        from .._torch.gpu import load_options

        options = {"mode": "load", **load_options(device)}
        self._is_there = "device" in options
        self._loader: Any = (
            open_load(file._model, items, order="request", threads=threads, **options)
            if items else None
        )

    def __repr__(self) -> str:
        """Return the path and the number of remaining tensors."""
        left = "closed" if self._loader is None and self._names else f"{len(self._left)} left"
        return f"<PrefetchLoader {format_paths(self._path)}: {len(self._names)} tensors, {left}>"

    def names(self) -> list[str]:
        """Requested names."""
        return list(self._names)

    def __len__(self) -> int:
        """Return the number of requested tensors."""
        return len(self._names)

    def take(self, name: str) -> Any:
        """Return a tensor on the device, waiting for its bytes. Once per tensor."""
        if self._loader is None:
            refuse("prefetch is closed")
        if name not in self._left:
            refuse(f"{name} was taken, or was not asked for")
        del self._left[name]
        tensor = self._adapter.wrap(self._loader.item(self._names.index(name)))
        return tensor if self._is_there else tensor.to(self._device)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, tensor) of the remaining tensors."""
        for name in list(self._left):
            yield name, self.take(name)

    def close(self) -> None:
        """Cancel and free the rest. Tensors that were taken stay valid."""
        if self._loader is not None:
            close_load(self._loader)
        self._loader = None


def _safe_open_handle(f: Any, framework: str, device: Any = "cpu", **options: Any) -> safe_open:
    """Open a Python file object: by its descriptor or, if it has none, by its bytes."""
    import io

    try:
        return safe_open(f"/proc/self/fd/{f.fileno()}", framework, device, **options)
    except (AttributeError, io.UnsupportedOperation):
        data = f.read()
    fd = os.memfd_create("safetensors")
    try:
        with open(fd, "wb", closefd=False) as copy:
            copy.write(data)
        return safe_open(f"/proc/self/fd/{fd}", framework, device, **options)
    finally:
        os.close(fd)


class TensorSlice:
    """A tensor of an open model, read when it is indexed."""

    def __init__(self, file: safe_open, name: str, index: int) -> None:
        """Created by safe_open.get_slice()."""
        self._file = file
        self._name = name
        self._index = index
        self._model = file._model
        self._from_bytes = file._from_bytes
        # stored, to be available after closing
        self._dtype, self._shape, *_ = self._model.info(index)

    def __repr__(self) -> str:
        """Return the tensor's name, the path, shape and dtype."""
        where = f"{self._name!r} of {format_paths(self._file._opened[0])}"
        return f"<{type(self).__name__} {where}: shape {self.get_shape()}, {self._dtype}>"

    def __reduce__(self) -> Any:
        """Pickle as a part of the same file, to be opened again."""
        return type(self._file).get_slice, (self._file, self._name)

    def get_shape(self) -> list[int]:
        """Shape in elements."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the format's name of the dtype, e.g. "BF16"."""
        return self._dtype

    def _copy(self, key: Any) -> Any:
        """Copy a small cached part, which is faster than a load. None if that is not possible."""
        if self._from_bytes is None:
            return None
        found = self._model.copy_slice(self._index, key)
        return None if found is None else self._from_bytes(found[0], self._dtype, found[1])

    def _read_packed(self, key: Any, parts: tuple[Any, ...]) -> Any:
        """Read elements that share bytes: all, or whole rows of torch's pairs of F4."""
        if all(part is Ellipsis or part == slice(None) for part in parts):
            return self._file._read_whole(self._index, self._name)
        may_cut = self._file._is_torch and self._dtype == "F4" and keeps_rows(parts, self._shape)
        tensor = self._file._read_whole(self._index, self._name) if may_cut else None
        if tensor is None or hasattr(tensor, "format_dtype"):
            refuse(f"tensor {self._name} is {self._dtype}, whose elements share bytes: it can't be "
                   "sliced so; get_tensor() gives all of it")
        return tensor[key]

    def __getitem__(self, key: Any) -> Any:
        """Read the part that `key` selects.

        For integers and slices only the selected range is read, including skipped elements for
        slices with steps. For lists, index tensors and similar (torch) the whole tensor is read.
        """
        copied = self._copy(key)
        if copied is not None:
            return copied
        parts = key if isinstance(key, tuple) else (key,)
        plan = (plan_torch if self._file._is_torch else plan_numpy)(parts, self._shape)
        if self._dtype in ("F4", "F6_E2M3", "F6_E3M2"):
            return self._read_packed(key, parts)
        if plan is None:
            return self._file._read_whole(self._index, self._name)[key]
        if plan.rest is None and plan.end == list(self._shape) and not any(plan.begin):
            return self._file._read_whole(self._index, self._name)
        try:
            result = self._copy(tuple(map(slice, plan.begin, plan.end)))
            if result is None:
                result = self._file._read((self._name, plan.begin, plan.end))
        except ValueError:  # millions of pieces: reading the whole tensor is cheaper
            return self._file._read_whole(self._index, self._name)[key]
        return result[plan.rest] if plan.rest is not None else result
