# SPDX-License-Identifier: Apache-2.0
"""Faster ``from_pretrained``: this package does the safetensors reads of libraries.

    from fastsafetensors.integrations import accelerate_from_pretrained

    with accelerate_from_pretrained():                  # within a context
        model = AutoModel.from_pretrained(folder)

    @accelerate_from_pretrained()                       # for a function
    def load(): ...

    accelerate_from_pretrained().enable()               # process-wide; .disable() ends it

Works with libraries that read through the safetensors package: transformers, diffusers, peft,
accelerate, timm. Device maps, dtypes and all other behaviour stay the library's, and the tensors
are the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ._base.options import check_load_options
from ._core import error_class
from ._loading.open import TensorSlice, safe_open
from ._loading.verified_open import chosen

__all__ = ["Acceleration", "accelerate_from_pretrained"]

# Libraries whose modules import the reference's functions by name.
LIBRARIES = ("transformers", "diffusers", "peft", "accelerate", "timm")

# Names to replace in the reference's own modules.
_TARGETS = {
    "safetensors": ("safe_open",),
    "safetensors.torch": ("load_file", "load", "load_model"),
}

# After this many lazy tensors that were not converted, read directly, because lazy tensors cost
# time.
_RETAINED_READS = 8

# After collecting this many slices without reading one, a program is about to read them all.
_COLLECTED_SLICES = 8


class _State:
    """The state of the process.

    How many switches are on, the replaced names, and whether a warning was issued.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0
        self.threads = 0
        self.mode: str | None = None
        self.converts = True
        self.settings: list[tuple[int, str | None, bool]] = []  # the active switches
        self.reads = 0  # files opened or loaded by this package while active
        self.warned = False
        self.wrappers: dict[int, tuple[Any, Any]] = {}  # id of original: (original, wrapper)
        self.replaced: list[tuple[ModuleType, str, Any]] = []
        # Modules of the libraries that were searched, and globals found in them.
        self.scanned: set[str] = set()
        self.places: list[tuple[ModuleType, str]] = []
        # the file that was read ahead of its first use
        self.begun: weakref.ref[_File] | None = None


_state = _State()


def _warn(error: BaseException) -> None:
    if not _state.warned:
        _state.warned = True
        warnings.warn(
            f"fastsafetensors could not do a read and left it to safetensors: {error!r}",
            RuntimeWarning,
            stacklevel=4,
        )


def _try(replacement: Callable[[], Any], original: Callable[[], Any]) -> Any:
    """Use this package; on any error use the original, with its result or error.

    Not with verification: the original would return what this package has refused.
    """
    try:
        return replacement()
    except Exception as error:
        if chosen(None):
            raise
        result = original()
        _warn(error)
        return result


def _is_called_by_transformers() -> bool:
    """Tell whether transformers 5 is calling, which converts and moves what it reads at once."""
    return bool(sys._getframe(2).f_globals.get("__name__") == "transformers.core_model_loading")


def _is_a_rank() -> bool:
    """Tell whether this is one of several processes, which may read only parts of tensors."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


class _GuardedReads:
    """Reads of lazy tensors that fall back to the original."""

    stays_lazy = False

    def __init__(self, reads: Any, original: Callable[[str], Any]) -> None:
        self._reads = reads
        self.device = reads.device
        self._original = original
        self.kept: dict[str, int] = {}  # lazy tensors that were not converted, by dtype

    def read(self, stored: Any, bounds: Any, to_copy: bool = False) -> Any:
        self.kept[stored.format_dtype] = self.kept.get(stored.format_dtype, 0) + 1
        part = tuple(map(slice, *bounds))
        return _try(lambda: self._reads.read(stored, bounds),
                    lambda: (self._original(stored.name)[part], None, False))

    def convert(self, stored: Any, view: Any, dtype: Any) -> Any:
        return _try(lambda: self._reads.convert(stored, view, dtype),
                    lambda: self._original(stored.name)[...].to(dtype))


class _Slice:
    """A slice of an accelerated file."""

    def __init__(
        self, replacement: TensorSlice, original: Callable[[], Any], promise: Callable[[str], Any]
    ) -> None:
        self._replacement = replacement
        self._original = original
        self._lazy_tensor = promise

    def get_shape(self) -> list[int]:
        """Shape in elements."""
        return self._replacement.get_shape()

    def get_dtype(self) -> str:
        """Return the format's name of the dtype."""
        return self._replacement.get_dtype()

    def __getitem__(self, key: Any) -> Any:
        """Read a part; read the whole tensor lazily if transformers converts it next."""
        if key is Ellipsis and _is_called_by_transformers():
            promise = self._lazy_tensor(self._replacement.get_dtype())
            if promise is not None:
                return promise
        return _try(lambda: self._replacement[key], lambda: self._original()[key])


class _File:
    """An accelerated safe_open: this package's, with the original as a fallback."""

    def __init__(self, replacement: safe_open, original: Callable[[], Any]) -> None:
        self._replacement = replacement
        self._open_original = original
        self._fallback: Any = None
        self._closed = False
        self._reads: Any = None
        self._guarded: Any = None
        self._slice_count = 0
        self._lock = threading.Lock()

    def _original(self) -> Any:
        if self._closed:
            raise error_class()("File is closed")
        with self._lock:
            if self._fallback is None:
                self._fallback = self._open_original().__enter__()
            return self._fallback

    def get_tensor(self, name: str) -> Any:
        """Read a tensor."""
        return _try(
            lambda: self._replacement.get_tensor(name), lambda: self._original().get_tensor(name)
        )

    def _expect_all(self) -> None:
        """Start reading when a program first collects slices, because it then works on names.

        Only for one file; others are read when they are used.
        """
        other = _state.begun() if _state.begun is not None else None
        is_alone = other is None or other._closed
        if is_alone and self._replacement._device == "cpu" and not _is_a_rank():
            _state.begun = weakref.ref(self)
            with contextlib.suppress(Exception):  # errors occur again when the tensor is read
                self._replacement._ahead.begin()

    def get_slice(self, name: str) -> Any:
        """Return an object that reads only the indexed part."""
        self._slice_count += 1
        if self._slice_count == _COLLECTED_SLICES:
            self._expect_all()
        return _try(
            lambda: _Slice(self._replacement.get_slice(name),
                           lambda: self._original().get_slice(name),
                           lambda dtype: self._lazy_tensor(name, dtype)),
            lambda: self._original().get_slice(name),
        )

    def _lazy_tensor(self, name: str, dtype: str) -> Any:
        """Return the tensor as a lazy one, for torch on the CPU; else None."""
        plain = self._replacement._is_torch and self._replacement._device == "cpu"
        if not _state.converts or not plain or self._closed:
            return None
        from ._lazy.converted_reads import ConvertedReads

        with self._lock:
            if self._reads is None:
                def guard(reads: ConvertedReads) -> Any:
                    self._guarded = _GuardedReads(
                        reads, lambda name: self._original().get_slice(name))
                    return self._guarded

                self._reads = ConvertedReads(self._replacement, _state.threads, guard)
        if not self._reads.converts and self._guarded.kept.get(dtype, 0) >= _RETAINED_READS:
            return None
        return self._reads.promise(name)

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of this package's safe_open."""
        return getattr(self._replacement, name)

    def __getitem__(self, name: str) -> Any:
        """Read a tensor."""
        return self.get_tensor(name)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._replacement)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name."""
        return name in self._replacement

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._replacement)

    def __enter__(self) -> _File:
        """Return the object itself."""
        return self

    def __exit__(self, *failure: Any) -> None:
        """Close the files; tensors stay valid."""
        self._closed = True
        if self._reads is not None:
            self._reads.close()
        self._replacement.close()
        if self._fallback is not None:
            self._fallback.__exit__(*failure)
            self._fallback = None


class _Opener:
    """Replaces the reference's safe_open: callable, and usable for isinstance() and subclassing."""

    def __init__(self, original: Any) -> None:
        self._original = original
        functools.update_wrapper(self, original, updated=())

    def __call__(
        self, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any
    ) -> Any:
        """Open a file, with this package while active."""
        def original_reader() -> Any:
            return self._original(filename, framework, device, **options)

        def replacement() -> Any:
            file = safe_open(filename, framework, device, mode=_state.mode, **options)
            file.read_ahead(_state.threads)
            _state.reads += 1
            return _File(file, original_reader)

        return _try(replacement, original_reader) if _state.depth else original_reader()

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the original's."""
        return getattr(self._original, name)

    def __instancecheck__(self, thing: object) -> bool:
        """Files opened here count as instances of the original."""
        return isinstance(thing, (_File, self._original))

    def __subclasscheck__(self, kind: type) -> bool:
        """Subclasses of the original count, and this package's file."""
        return issubclass(kind, (_File, self._original))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """A subclass derives from the original."""
        return (self._original,)


def _wrap_function(original: Any) -> Any:
    name = original.__name__

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _state.depth:
            return original(*args, **kwargs)

        def replacement() -> Any:
            from . import torch as fst_torch

            options = dict(kwargs)
            if name == "load_file" and _state.mode is not None:
                options["mode"] = _state.mode
            if name in ("load_file", "load_model") and _state.threads:
                options["threads"] = _state.threads
            result = getattr(fst_torch, name)(*args, **options)
            _state.reads += 1
            return result

        return _try(replacement, lambda: original(*args, **kwargs))

    return call


def _wrapper_of(name: str, original: Any) -> Any:
    known = _state.wrappers.get(id(original))
    if known is None:
        wrapper = _Opener(original) if name == "safe_open" else _wrap_function(original)
        known = _state.wrappers[id(original)] = (original, wrapper)
    return known[1]


def _find_places() -> None:
    """Find globals of the libraries' modules that are the reference's functions or the
    replacements.
    """
    wanted = {id(thing) for pair in _state.wrappers.values() for thing in pair}
    # Imports on other threads may change the table meanwhile.
    new = set(list(sys.modules)) - _state.scanned
    _state.scanned |= new
    beginnings = {name[:4] for name in LIBRARIES}  # of thousands of names very few match
    for module_name in [name for name in new if name[:4] in beginnings]:
        module = sys.modules.get(module_name)
        if isinstance(module, ModuleType) and module_name.partition(".")[0] in LIBRARIES:
            # Use the module's dict, because lazy modules import attributes on access.
            table = vars(module).copy()
            if not wanted.isdisjoint(map(id, table.values())):
                names = [name for name, value in table.items() if id(value) in wanted]
                _state.places.extend((module, name) for name in names)


def _exchange(pairs: dict[int, Any], note: bool) -> None:
    """Replace every global in the libraries' modules whose id is in `pairs`."""
    _find_places()
    for module, name in _state.places:
        value = vars(module).get(name)
        other = pairs.get(id(value))
        if other is not None:
            setattr(module, name, other)
            if note:
                _state.replaced.append((module, name, value))


def _install() -> None:
    originals: dict[int, Any] = {}
    # Import all of them first: one imported later would take a wrapper for the original.
    modules = [importlib.import_module(name) for name in _TARGETS]
    for module, names in zip(modules, _TARGETS.values(), strict=True):
        for name in names:
            original = getattr(module, name)
            wrapper = _wrapper_of(name, original)
            originals[id(original)] = wrapper
            _state.replaced.append((module, name, original))
            setattr(module, name, wrapper)
    _exchange(originals, note=True)


def _uninstall() -> None:
    for module, name, original in reversed(_state.replaced):
        setattr(module, name, original)
    _state.replaced.clear()
    # Modules imported meanwhile have the wrappers.
    _exchange({id(wrapper): original for original, wrapper in _state.wrappers.values()}, note=False)


class Acceleration(contextlib.ContextDecorator):
    """A switch: context manager, decorator, or enable() and disable().

    Process-wide, nestable and thread-safe. The original names are restored when the last switch is
    off.
    """

    def __init__(
        self, *, converts: bool = True, mode: str | None = None, threads: int = 0
    ) -> None:
        """Store the settings; see accelerate_from_pretrained()."""
        check_load_options({"mode": "auto" if mode is None else mode, "threads": threads})
        self._settings = (threads, mode, converts)
        self._enabled = False
        # transformers reads on several threads, which would wait for this import together.
        if converts and "transformers" in sys.modules:
            with contextlib.suppress(ImportError):
                from ._lazy import converted_reads  # noqa: F401

    @property
    def reads(self) -> int:
        """Files that this package has opened or loaded for libraries in this process."""
        return _state.reads

    def __enter__(self) -> Acceleration:
        """Switch on."""
        with _state.lock:
            if not _state.depth:
                _install()
            _state.depth += 1
            _state.settings.append(self._settings)
            _state.threads, _state.mode, _state.converts = self._settings
        return self

    def __exit__(self, *failure: Any) -> None:
        """Switch off."""
        with _state.lock:
            # Threads may end in another order than they started.
            at = len(_state.settings) - 1 - _state.settings[::-1].index(self._settings)
            del _state.settings[at]
            left = _state.settings[-1] if _state.settings else (0, None, True)
            _state.threads, _state.mode, _state.converts = left
            _state.depth -= 1
            if not _state.depth:
                _uninstall()

    def enable(self) -> Acceleration:
        """Switch on until disable(). Repeated calls are harmless."""
        with _state.lock:
            if not self._enabled:
                self._enabled = True
                self.__enter__()
        return self

    def disable(self) -> None:
        """Undo enable(). Repeated calls are harmless."""
        with _state.lock:
            if self._enabled:
                self._enabled = False
                self.__exit__(None, None, None)


def accelerate_from_pretrained(
    *, converts: bool = True, mode: str | None = None, threads: int = 0
) -> Acceleration:
    """Let libraries read safetensors files through this package while it is on.

    If a read fails, it falls back to safetensors, with one RuntimeWarning per process.

    Args:
        converts: if transformers 5 requests another float dtype than the file's, on the CPU, the
            load converts: about a third less peak memory, and faster, unless a virtual machine's
            host must first allocate the memory. False: leave it to torch.
        mode: "map" and "auto" for views of the file, "load" for owned memory.
        threads: of a load; 0: one per CPU that the process may use.

    Returns:
        The switch: a context manager and a decorator, with enable() and disable().

    Raises:
        ImportError: when switched on without the safetensors package, which the libraries use.
    """
    return Acceleration(threads=threads, mode=mode, converts=converts)


if "torch" in sys.modules:  # import it now, so that the first read does not wait for it
    with contextlib.suppress(ImportError):
        from ._torch import torch_tensors  # noqa: F401
