# SPDX-License-Identifier: Apache-2.0
"""SafeTensorsFileLoader: a whole model into memory of its own."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ._core import Model, SafetensorError
from ._types import Paths


class SafeTensorsFileLoader:
    """Load a model eagerly: every byte is read, into aligned memory that the tensors own.

        tensors = SafeTensorsFileLoader("model.safetensors", num_threads=8).load()

    path: a file, an index, a folder, or a list of files (a name in two of them is an error).
    num_threads: a wish; a load uses no more threads than it has work for.
    """

    def __init__(self, path: Paths, num_threads: int = 8) -> None:
        """Open the files and read their headers."""
        if num_threads <= 0:
            raise ValueError(f"num_threads must be positive, not {num_threads}")
        self._threads = num_threads
        self._model: Model | None = Model(path)
        self._stats: dict[str, Any] = {}

    def load(self) -> dict[str, Any]:
        """Read all tensors: {name: torch.Tensor} in file order, valid after close()."""
        from .torch import export

        if self._model is None:
            raise SafetensorError("SafeTensorsFileLoader is closed")
        loader = self._model.load(mode="load", threads=self._threads)
        try:
            tensors = export(loader)
            self._stats = loader.stats()
        finally:
            loader.close()
        return tensors

    @property
    def stats(self) -> dict[str, Any]:
        """What the last load() did and why; empty before the first."""
        return dict(self._stats)

    def close(self) -> None:
        """Close the files; tensors stay valid, and closing twice is fine."""
        if self._model is not None:
            self._model.close()
        self._model = None

    def __enter__(self) -> SafeTensorsFileLoader:
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
