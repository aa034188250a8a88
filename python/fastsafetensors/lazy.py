# SPDX-License-Identifier: Apache-2.0
"""Models whose tensors are read when they are used, and only as far as they are. For torch.

    from fastsafetensors.lazy import LazyModel

    with LazyModel(folder) as model:
        for name, tensor in model:                    # nothing is read
            part = tensor.narrow(0, 4096, 4096)       # nothing is read
            parameter.copy_(part)                     # these rows are
        print(model.stats())

The tensors are torch tensors, of a class of their own. What gives views of plain tensors (narrow,
slices, view, transpose, chunk, unbind, ..) gives another such tensor; anything else reads the
smallest box that covers what is used, once. A copy to the meta device reads nothing. What is taken
of one layer is read ahead of the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from ._core import error_class
from ._errors import add_place
from ._gpu import check_present, load_options
from ._lazy_reads import MEMORY_LIMIT_BYTES, Habits, LazyReads, in_layers
from ._lazy_tensor import LazyTensor, make_lazy
from ._load import open_load
from ._open import check_device, check_path
from ._request import choose_names
from ._torch_tensors import make_item
from ._types import Paths
from ._verify import Verify, open_files

__all__ = ["LazyModel", "LazyTensor"]


class LazyModel:
    """A model's tensors as promises, layer by layer; they stay valid when it is closed.

    Args:
        filename: a file, an index, a folder, or a list of files (names must then be unique).
        device: where what is read goes: "cpu" or a GPU.
        mode: as in load_file.
        threads: of a load; 0: as many as the process may use, at most 16.
        gds, cache: as in load_file.
        memory_limit: bytes that may be read ahead of their use; 0: nothing is.
        ahead: False: nothing is read but what is used.
        names: which tensors; all others are left out.
        filter: name -> whether to keep it.
        habits: what an earlier load of the same model has taken (its habits), to begin with.
        expects: name -> whether it will be used, for all that is known: nothing else is read ahead.
        verify: as in load_file; a box needs its chunks, whole.

    Raises:
        SafetensorError: a bad file; an unknown name (a KeyError as well). A use raises it, too.
        OSError: of its kind, for what the system refuses.
    """

    def __init__(
        self,
        filename: Paths,
        device: Any = "cpu",
        *,
        mode: str = "auto",
        threads: int = 0,
        gds: str = "auto",
        cache: str = "auto",
        memory_limit: int = MEMORY_LIMIT_BYTES,
        ahead: bool = True,
        names: Iterable[str] | None = None,
        filter: Callable[[str], bool] | None = None,
        habits: Habits | None = None,
        expects: Callable[[str], bool] | None = None,
        verify: Verify | None = None,
    ) -> None:
        """Open the files and read their headers; no tensor data is read yet."""
        check_path(filename)
        if memory_limit < 0:
            raise ValueError(f"memory_limit must not be negative, not {memory_limit}")
        device = check_device(device)
        if device != "cpu" and not load_options(device):
            check_present(device)
            raise ValueError(f"device must be the CPU or a GPU, not {device}")
        self._model = open_files(filename, verify)
        chosen = choose_names(self._model, names, filter)
        order = in_layers(self._model.names() if chosen is None else chosen)
        self._options = {"mode": mode, "threads": threads, "cache": cache,
                         **load_options(device, gds)}
        self.habits: Habits = {} if habits is None else habits
        self._reads = LazyReads(
            self._model, self._options, names=order, memory_limit=memory_limit, ahead=ahead,
            habits=self.habits, expects=expects,
        )
        self._reads.check_options()

    def keys(self) -> list[str]:
        """Names of all tensors in the order in which iteration gives them."""
        return list(self._reads.stored)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._reads.stored)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name."""
        return name in self._reads.stored

    def __getitem__(self, name: str) -> Any:
        """Return the tensor of that name; what torch has no dtype for is read at once, as bytes."""
        if name not in self._reads.stored:
            choose_names(self._model, [name], None)
            raise KeyError(name)
        stored = self._reads.stored[name]
        if stored.dtype is not None:
            return make_lazy(self._reads, stored)
        loader = open_load(self._model, [name], **self._options)
        try:
            return make_item(loader, 0)
        finally:
            loader.close()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, tensor), what is in no layer first, then layer by layer."""
        for name in self._reads.stored:
            yield name, self[name]

    @property
    def bytes_needed(self) -> int:
        """Bytes of the boxes that were used."""
        return self._reads.bytes_needed

    def stats(self) -> dict[str, int]:
        """Return counts: bytes_needed (of boxes used), bytes_read, loads, boxes read ahead."""
        reads = self._reads
        return {"bytes_needed": reads.bytes_needed, "bytes_read": reads.bytes_read,
                "loads": reads.loads, "boxes_ahead": reads.boxes_ahead}

    def check(self) -> None:
        """Raise a SafetensorError where a file was changed in place since it was opened.

        What was used by then may be of either: end with it where that matters. Leaving a `with`
        does.
        """
        try:
            self._model.check()
        except (error_class(), OSError) as error:
            add_place(error)
            raise

    def close(self) -> None:
        """Let go of what was read ahead. Tensors stay valid, and the files open while they do."""
        self._reads.close()

    def __enter__(self) -> LazyModel:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; a SafetensorError where a file was changed in place meanwhile."""
        self.close()
        if kind is None:
            self.check()
