# SPDX-License-Identifier: Apache-2.0
"""Opens, waits for and closes loads, and converts results to tensors, for all load functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .._base import counters
from .._base.argument_types import Paths
from .._base.dtypes import check_dtype
from .._base.options import check_load_options, check_load_progress, parse_limit
from .._base.progress import Progress, wait
from .._core import Loader, Model, log_drain
from .._core import keep_memory as _keep_memory
from .memory_models import open_bytes
from .request import choose_names
from .verified_open import Verify, open_files

# Creates a framework's tensors from all items of a load: {name: tensor}.
Export = Callable[[Loader], dict[str, Any]]


def keep_memory(size: int | str) -> None:
    """Keep up to this much memory of released tensors for the next loads, in all threads.

    Args:
        size: bytes, or text such as "2GiB"; 0, which is also the setting at start, keeps nothing.
            Memory above a new limit is freed.

    Raises:
        TypeError, ValueError: not a size.
    """
    _keep_memory(parse_limit("size", size))


def _is_on_gpu(options: dict[str, Any]) -> bool:
    return options.get("device", "cpu") not in ("cpu", "pinned")


def _dtypes(model: Model, items: Sequence[Any] | None) -> Iterator[tuple[str, str]]:
    """(name, dtype) of the tensors to load. Unknown names are refused by the load."""
    for item in model.names() if items is None else items:
        name = item if isinstance(item, str) else item[0]
        index = model.find(name)
        if index >= 0:
            yield name, model.info(index)[0]


def open_load(model: Model, items: Sequence[Any] | None = None, **options: Any) -> Loader:
    """Start a load. Takes the options of Model.load(), and `memory` for loads to a device.

    memory: "own", or "torch" (its caching allocator, unless the device shares the CPU's memory).
    """
    memory = options.pop("memory", "own")
    check_load_options(options)
    if options.get("dtype") is not None:
        check_dtype(_dtypes(model, items), options["dtype"])
    if not _is_on_gpu(options):
        return model.load(items, **options)
    from .._torch.gpu import retrying, shares_memory, torch_memory

    number = int(options["device"].partition(":")[2])
    if memory == "torch" and not shares_memory(number, options.get("unified", "auto")):
        options.update(torch_memory(number))
    return retrying(lambda: model.load(items, **options))


def close_load(loader: Loader) -> None:
    """Close a load, count it if requested, and forward its log lines."""
    if counters.is_on:
        with contextlib.suppress(Exception):  # closed before, or of the parent process
            counters.add_load(loader.stats())
    loader.close()
    log_drain()


class OpenLoad:
    """A load as a context manager. After Ctrl-C, closing does not wait."""

    def __init__(self, model: Model, items: Sequence[Any] | None = None, **options: Any) -> None:
        """Start the load; options of open_load()."""
        self._loader = open_load(model, items, **options)

    def __enter__(self) -> Loader:
        """Return the load."""
        return self._loader

    def __exit__(self, *failure: object) -> None:
        """Close it."""
        close_load(self._loader)


def load_from(
    model: Model,
    export: Export,
    names: Sequence[Any] | None = None,
    *,
    keep: Callable[[str], bool] | None = None,
    watch: Callable[[Loader], object] | None = None,
    progress: Progress | bool | None = False,
    **options: Any,
) -> dict[str, Any]:
    """Load items of a model, or all (None): {name: tensor}, in file order.

    keep: name -> bool, which items to load (items are then names). watch: called with the finished
    load. options: of open_load().
    """
    check_load_options(options)
    check_load_progress(progress)
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

    if not _is_on_gpu(options):
        return load()
    from .._torch.gpu import retrying

    return retrying(load)


def load_paths(
    filename: Paths,
    export: Export,
    names: Iterable[str] | None = None,
    verify: Verify | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Load a model's tensors, all or by name; options as in load_from()."""
    with contextlib.closing(open_files(filename, verify)) as model:
        return load_from(model, export, choose_names(model, names, None), **options)


def load_bytes(data: Any, export: Export) -> dict[str, Any]:
    """Load all tensors from the bytes of a file, which are copied once."""
    with open_bytes(data) as model:  # decoded tensors cannot be views
        return load_from(model, export, mode="load" if model.is_compressed else "map")
