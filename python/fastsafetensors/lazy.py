# SPDX-License-Identifier: Apache-2.0
"""Models whose tensors are read when they are used, and only the used parts. For torch.

    from fastsafetensors.lazy import LazyModel

    with LazyModel(folder) as model:
        for name, tensor in model:                    # nothing is read
            part = tensor.narrow(0, 4096, 4096)       # nothing is read
            parameter.copy_(part)                     # reads these rows
        print(model.stats())

The tensors are torch tensors of a special class. Functions that create views (narrow, slices, view,
transpose, chunk, unbind, ...) return another such tensor; other functions read the smallest range
that covers what they use, once. A copy to the meta device reads nothing. Accesses to one layer are
used to read the next ones ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from ._base.argument_types import Paths
from ._base.errors import add_location, printable, shown
from ._base.options import check_callable, check_load_options, check_switch, parse_limit
from ._base.representation import format_contents, format_paths
from ._core import error_class
from ._lazy.lazy_reads import MEMORY_LIMIT_BYTES, Habits, LazyReads, in_layers
from ._lazy.lazy_tensor import LazyTensor, make_lazy
from ._loading.load import close_load, open_load
from ._loading.open_arguments import absolute_path, check_device, check_path
from ._loading.request import choose_names
from ._loading.verified_open import Verify, chosen, open_files
from ._torch.gpu import check_present, load_options
from ._torch.torch_tensors import make_item

__all__ = ["Habits", "LazyModel", "LazyTensor"]


class LazyModel:
    """Lazily loaded tensors of a model, in layer order. They stay valid after it is closed.

    Args:
        filename: a file, an index, a folder, or a list of files (names must then be unique).
        device: of the tensors that are read: "cpu" or a GPU. "meta" is refused, because nothing
            would be read.
        mode: as in load_file; None: "auto".
        threads: of a load; 0: one per CPU that the process may use, at most 16.
        cache: "keep", "bypass" or "auto", as in load_file.
        gds: GPUDirect Storage: "auto", "off" or "strict".
        memory: maximum bytes of readahead, a number or "256MiB"; 0: none.
        ahead: False disables readahead.
        names: the tensors to include.
        filter: name -> whether to keep it.
        habits: the access order of an earlier load of the same model (its habits), to start with.
        expects: name -> whether it will be used; other tensors are not read ahead.
        verify: as in load_file; a slice is verified by its complete chunks.

    Raises:
        SafetensorError: an invalid file, or an unknown name (also a KeyError). Also raised on use.
        TypeError, ValueError: an argument of another type, or an invalid one.
        OSError: the matching subclass, if a system call fails.
    """

    def __init__(
        self,
        filename: Paths,
        device: Any = "cpu",
        *,
        ahead: bool = True,
        habits: Habits | None = None,
        expects: Callable[[str], bool] | None = None,
        names: Iterable[str] | None = None,
        filter: Callable[[str], bool] | None = None,
        mode: str | None = None,
        memory: int | str = MEMORY_LIMIT_BYTES,
        cache: str = "auto",
        gds: str = "auto",
        threads: int = 0,
        verify: Verify | None = None,
    ) -> None:
        """Open the files and read their headers; no tensor data is read yet."""
        check_path(filename)
        check_switch("ahead", ahead)
        check_callable("expects", expects)
        if habits is not None and not isinstance(habits, dict):
            raise TypeError(f"habits must be a dict, not {shown(habits)}")
        mode = "auto" if mode is None else mode
        check_load_options({"mode": mode, "threads": threads, "cache": cache})
        limit = parse_limit("memory", memory)
        device = check_device(device)
        if device != "cpu" and not load_options(device):
            check_present(device)
            raise ValueError(f"device must be the CPU or a GPU, not {printable(device)}")
        verify = chosen(verify)
        self._model = open_files(filename, verify, parts=True)
        wanted = choose_names(self._model, names, filter)
        order = in_layers(self._model.names() if wanted is None else wanted)
        self._opened = absolute_path(filename), device, {
            "mode": mode, "threads": threads, "gds": gds, "cache": cache,
            "memory": limit, "ahead": ahead, "verify": verify,
            "names": None if wanted is None else list(wanted),
        }
        self._options = {"mode": mode, "threads": threads, "cache": cache,
                         **load_options(device, gds)}
        self.habits: Habits = {} if habits is None else habits
        self._reads = LazyReads(
            self._model, self._options, names=order, memory_limit=limit, ahead=ahead,
            habits=self.habits, expects=expects,
        )
        self._reads.check_options()

    def __repr__(self) -> str:
        """Return the path, the number of tensors and their dtypes."""
        contents = format_contents(stored.format_dtype for stored in self._reads.stored.values())
        return f"<{type(self).__name__} {format_paths(self._opened[0])}: {contents}>"

    def __reduce__(self) -> Any:
        """Pickle as the paths and options, to be opened again in another process or folder.

        `names` and `filter` become the resulting names; `expects` is left out.
        """
        return _reopen, (type(self), self._opened, dict(self.habits))

    def keys(self) -> list[str]:
        """Names of all tensors in the order of iteration."""
        return list(self._reads.stored)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._reads.stored)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name."""
        return name in self._reads.stored

    def __getitem__(self, name: str) -> Any:
        """Return the tensor of that name. Dtypes that torch lacks are read at once, as bytes."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, not {shown(name)}")
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
            close_load(loader)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, tensor): first those without a layer, then layer by layer."""
        for name in self._reads.stored:
            yield name, self[name]

    @property
    def largest_bytes(self) -> int:
        """Size of the largest tensor."""
        return max((stored.nbytes for stored in self._reads.stored.values()), default=0)

    @property
    def bytes_needed(self) -> int:
        """Bytes of the parts that were used."""
        return self._reads.bytes_needed

    def stats(self) -> dict[str, int]:
        """Return counts: bytes_needed (used parts), bytes_read, loads, parts read ahead."""
        reads = self._reads
        return {"bytes_needed": reads.bytes_needed, "bytes_read": reads.bytes_read,
                "loads": reads.loads, "boxes_ahead": reads.boxes_ahead}

    def check(self) -> None:
        """Raise SafetensorError if a file was changed in place since it was opened.

        Data used until then may be mixed, so call it at the end if that matters. Leaving a `with`
        block calls it.
        """
        try:
            self._model.check()
        except (error_class(), OSError) as error:
            add_location(error)
            raise

    def close(self) -> None:
        """Drop readahead. Tensors stay valid, and keep the files open."""
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
        """Close it. SafetensorError if a file was changed in place meanwhile."""
        self.close()
        if kind is None:
            self.check()


def _reopen(kind: type[LazyModel], opened: tuple[Any, ...], habits: Habits) -> LazyModel:
    """Open a pickled LazyModel."""
    filename, device, options = opened
    return kind(filename, device, habits=habits, **options)
