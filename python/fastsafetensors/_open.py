# SPDX-License-Identifier: Apache-2.0
"""safe_open: random access to the tensors of a model."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ._core import Model, SafetensorError
from ._types import Paths

_FRAMEWORKS = {
    "pt": "torch",
    "torch": "torch",
    "pytorch": "torch",
    "np": "numpy",
    "numpy": "numpy",
}


class safe_open:
    """Open a model and read its tensors one by one, whole or in part.

        with safe_open("model.safetensors", framework="pt", device="cpu") as f:
            for name in f.keys():
                tensor = f.get_tensor(name)
            rows = f.get_slice("weight")[16:32]

    filename: a file, an index, a folder, or a list of files. framework: "pt" (torch) or "np".
    device: where torch tensors go. mode: as in load_file.

    Tensors stay valid after the model is closed. Usable from several threads at once.
    """

    def __init__(
        self,
        filename: Paths,
        framework: str,
        device: Any = "cpu",
        *,
        mode: str = "auto",
    ) -> None:
        """Open the files and read their headers; no tensor data is read yet."""
        name = _FRAMEWORKS.get(framework)
        if name is None:
            raise SafetensorError(f"framework {framework} is invalid")
        if name == "numpy" and str(device) != "cpu":
            raise SafetensorError(f"Device {device} is not supported for framework numpy")
        self._adapter: Any = importlib.import_module(f"fastsafetensors.{name}")
        self._device = device
        self._mode = mode
        self._model = Model(filename)

    def __enter__(self) -> safe_open:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files; tensors stay valid, and closing twice is fine."""
        self._model.close()

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._model.names())

    def offset_keys(self) -> list[str]:
        """Names of all tensors in the order in which their bytes lie in the files."""
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
        """Return the __metadata__ of the first file, or None where it has none."""
        return self._model.metadata(0) if self._model.file_count else None

    def _find(self, name: str) -> int:
        index = self._model.find(name)
        if index < 0:
            raise SafetensorError(f"File does not contain tensor {name}{self._hint(name)}")
        return index

    def _hint(self, name: str) -> str:
        import difflib

        names = self._model.names()
        close = difflib.get_close_matches(name, names, n=3) if len(names) <= 20000 else []
        return f" (close matches: {', '.join(close)})" if close else ""

    def _read(self, item: str | tuple[str, list[int], list[int]]) -> Any:
        loader = self._model.load([item], mode=self._mode)
        try:
            tensor = self._adapter.wrap(next(loader))
        finally:
            loader.close()
        return tensor if str(self._device) == "cpu" else tensor.to(self._device)

    def get_tensor(self, name: str) -> Any:
        """Read one tensor. SafetensorError names close matches when there is none."""
        self._find(name)
        return self._read(name)

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object that reads only what it is indexed with: ``f.get_slice(n)[2:4, :8]``."""
        return TensorSlice(self, name, self._find(name))


class TensorSlice:
    """A tensor of an open model that is read when it is indexed."""

    def __init__(self, file: safe_open, name: str, index: int) -> None:
        """Made by safe_open.get_slice()."""
        self._file = file
        self._name = name
        self._dtype, self._shape, *_ = file._model.info(index)

    def get_shape(self) -> list[int]:
        """Shape in elements."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the format's name of the dtype, e.g. "BF16"."""
        return self._dtype

    def __getitem__(self, key: Any) -> Any:
        """Read the part that `key` selects.

        Integers and step-1 slices are read exactly; for anything else the tensor is read whole
        and indexed by the framework.
        """
        plan = self._plan(key if isinstance(key, tuple) else (key,))
        if plan is None:
            return self._file._read(self._name)[key]
        begin, end, squeeze = plan
        result = self._file._read((self._name, begin, end))
        return result[squeeze] if any(part == 0 for part in squeeze) else result

    def _plan(self, key: tuple[Any, ...]) -> tuple[list[int], list[int], tuple[Any, ...]] | None:
        """Begin and end of every dimension, and the index that drops integer dimensions."""
        shape = self._shape
        if self._dtype in ("F4", "F6_E2M3", "F6_E3M2") or not shape:
            return None
        if sum(part is Ellipsis for part in key) == 1:
            at = next(i for i, part in enumerate(key) if part is Ellipsis)
            fill = (slice(None),) * (len(shape) - len(key) + 1)
            key = key[:at] + fill + key[at + 1 :]
        if len(key) > len(shape):
            return None
        key += (slice(None),) * (len(shape) - len(key))
        begin: list[int] = []
        end: list[int] = []
        squeeze: list[Any] = []
        for part, size in zip(key, shape, strict=True):
            if isinstance(part, int) and not isinstance(part, bool):
                if not -size <= part < size:
                    return None
                part %= size
                begin.append(part)
                end.append(part + 1)
                squeeze.append(0)
            elif isinstance(part, slice) and part.step in (None, 1):
                first, last, _ = part.indices(size)
                begin.append(first)
                end.append(max(first, last))
                squeeze.append(slice(None))
            else:
                return None
        return begin, end, tuple(squeeze)
