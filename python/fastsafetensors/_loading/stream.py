# SPDX-License-Identifier: Apache-2.0
"""TensorStream: a model's tensors one by one, while the library reads the next ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._base.argument_types import Paths
from .._base.closing import Closing
from .._base.options import check_load_options, parse_limit
from .._base.representation import format_paths
from .._core import Loader, Tensor, error_class
from .load import close_load, open_load
from .open_arguments import check_path
from .request import choose_names
from .verified_open import Verify, open_files


class TensorStream(Iterator[tuple[str, Any]], Closing):
    """(name, tensor) of each tensor, in file order. Made by open_stream().

    Leaving its ``with`` block, or close(), stops the reads. Tensors that were returned stay valid.
    One thread at a time: RuntimeError in a thread that asks for a tensor while another one waits
    for it. close() may be called by any thread: after it, asking for a tensor that was not returned
    yet is a RuntimeError.
    """

    def __init__(
        self,
        filename: Paths,
        wrap: Callable[[Tensor], Any],
        *,
        names: Iterable[str] | None = None,
        filter: Callable[[str], bool] | None = None,
        mode: str | None = "auto",
        limit: int | str = 0,
        verify: Verify | None = None,
        **options: Any,
    ) -> None:
        """Start to read; see open_stream(), where the limit is `memory`. options: of open_load().
        """
        check_path(filename)
        mode = "auto" if mode is None else mode
        check_load_options({"mode": mode, **options})
        budget = parse_limit("memory", limit)
        if budget and mode == "map":
            raise ValueError('mode="map" returns views of the file, which have no memory limit: '
                             'use mode="load" with memory=')
        self._path, self._wrap = filename, wrap
        self._stats: dict[str, Any] = {}
        self._loader: Loader | None = None
        with contextlib.closing(open_files(filename, verify)) as model:
            chosen = choose_names(model, names, filter)
            self._count = len(model) if chosen is None else len(chosen)
            self._left = self._count
            self._is_finished = self._count == 0
            if self._count:
                chosen_mode = "load" if budget else mode
                self._loader = open_load(
                    model, chosen, **{"mode": chosen_mode, "budget": budget, **options})

    def __repr__(self) -> str:
        """Return the path and the number of remaining tensors."""
        is_closed = self._loader is None and not self._is_finished
        left = "closed" if is_closed else f"{self._left} left"
        tensors = "1 tensor" if self._count == 1 else f"{self._count} tensors"
        return f"<TensorStream {format_paths(self._path)}: {tensors}, {left}>"

    def __len__(self) -> int:
        """Return the number of tensors that the stream has in all."""
        return self._count

    def __next__(self) -> tuple[str, Any]:
        """Return the next tensor and its name, waiting for its bytes."""
        loader = self._loader  # another thread may close the stream
        if self._is_finished:
            raise StopIteration
        if loader is None:
            raise RuntimeError("the stream was closed before its last tensor was returned")
        try:
            tensor = next(loader)
        except StopIteration:
            self._is_finished = True
            self.close()
            raise
        self._left -= 1
        return tensor.name, self._wrap(tensor)

    @property
    def stats(self) -> dict[str, Any]:
        """What the load did so far, and why: bytes, seconds, mode, engine, reason."""
        loader = self._loader
        return dict(self._stats) if loader is None else loader.stats()

    def close(self) -> None:
        """Stop the reads and close the files; repeated calls are fine."""
        loader, self._loader = self._loader, None
        if loader is not None:
            # RuntimeError: of the parent process. The other: another thread closes it as well.
            with contextlib.suppress(RuntimeError, error_class()):
                self._stats = loader.stats()
            close_load(loader)
