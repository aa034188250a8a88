# SPDX-License-Identifier: Apache-2.0
"""Opening a load, waiting for it, making tensors of it, and closing it: what every front does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ._core import Loader, Model
from ._dtypes import check_wish
from ._memory import open_bytes
from ._progress import Progress, wait
from ._request import choose_names
from ._types import Paths
from ._verify import Verify, open_files

# Makes a framework's tensors of all items of a load: {name: tensor}.
Export = Callable[[Loader], dict[str, Any]]


def _goes_far(options: dict[str, Any]) -> bool:
    return options.get("device", "cpu") not in ("cpu", "pinned")


def _dtypes(model: Model, items: Sequence[Any] | None) -> Iterator[tuple[str, str]]:
    """(name, dtype) of what is to be loaded; unknown names are the load's to refuse."""
    for item in model.names() if items is None else items:
        name = item if isinstance(item, str) else item[0]
        index = model.find(name)
        if index >= 0:
            yield name, model.info(index)[0]


def open_load(model: Model, items: Sequence[Any] | None = None, **options: Any) -> Loader:
    """Begin to load; options of Model.load(), and for a device:

    memory: "own", or "torch": its caching allocator's, but where the device shares the processors'
    memory.
    """
    memory = options.pop("memory", "own")
    if options.get("dtype") is not None:
        check_wish(_dtypes(model, items), options["dtype"])
    if not _goes_far(options):
        return model.load(items, **options)
    from ._gpu import shares_memory, torch_memory

    number = int(options["device"].partition(":")[2])
    if memory == "torch" and not shares_memory(number, options.get("unified", "auto")):
        options.update(torch_memory(number))
    return model.load(items, **options)


class OpenLoad:
    """A load for the length of a `with`; where Ctrl-C has ended a wait, closing does not wait."""

    def __init__(self, model: Model, items: Sequence[Any] | None = None, **options: Any) -> None:
        """Begin to load; options of open_load()."""
        self._loader = open_load(model, items, **options)

    def __enter__(self) -> Loader:
        """Return the load."""
        return self._loader

    def __exit__(self, *failure: object) -> None:
        """Close it."""
        self._loader.close()


def load_from(
    model: Model,
    export: Export,
    names: Sequence[Any] | None = None,
    *,
    keep: Callable[[str], bool] | None = None,
    progress: Progress | bool | None = False,
    watch: Callable[[Loader], object] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Load items of a model, None for all: {name: tensor}, in the order of the files.

    keep: name -> bool, which of them (then items are names). watch: called with the load when all
    is there. options: of open_load().
    """
    if keep is not None:
        names = choose_names(model, names, keep)
    if names is not None and not len(names):
        return {}

    def load() -> dict[str, Any]:
        with OpenLoad(model, names, **options) as loader:
            wait(loader, model.file_count, progress)
            if watch is not None:
                watch(loader)
            return export(loader)

    if not _goes_far(options) or options.get("memory") == "torch":
        return load()  # where a device is full, torch's memory is asked for twice
    from ._gpu import retrying

    return retrying(load)


def load_paths(
    filename: Paths,
    export: Export,
    names: Iterable[str] | None = None,
    verify: Verify | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Load a model's tensors, all or the named ones; options as in load_from()."""
    with contextlib.closing(open_files(filename, verify)) as model:
        return load_from(model, export, choose_names(model, names, None), **options)


def load_bytes(data: Any, export: Export) -> dict[str, Any]:
    """Load all tensors of a file's bytes, which are copied once."""
    with open_bytes(data) as model:  # what is decoded is no view
        return load_from(model, export, mode="load" if model.is_compressed else "map")
