# SPDX-License-Identifier: Apache-2.0
"""Faster ``from_pretrained``: the safetensors reads of libraries, done by this package.

    from fastsafetensors.integrations import accelerate_from_pretrained

    with accelerate_from_pretrained():                  # for a while
        model = AutoModel.from_pretrained(folder)

    @accelerate_from_pretrained()                       # for a function
    def load(): ...

    accelerate_from_pretrained().enable()               # for the process; .disable() ends it

Works with what reads through the safetensors package: transformers, diffusers, peft, accelerate,
timm. Device maps, dtypes and everything else are the library's own, and the tensors are the same.
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

from ._core import error_class
from ._open import TensorSlice, safe_open
from ._verify import chosen

__all__ = ["Acceleration", "accelerate_from_pretrained"]

# Libraries whose modules bind the reference's functions under names of their own.
LIBRARIES = ("transformers", "diffusers", "peft", "accelerate", "timm")

# What is replaced in the reference's own modules.
_TARGETS = {
    "safetensors": ("safe_open",),
    "safetensors.torch": ("load_file", "load", "load_model"),
}

# Promises that all became what is stored: a promise costs time, the others are read at once.
_KEPT_PROMISES = 8

# Slices that a program collects without reading one: it is about to read them all.
_COLLECTED_SLICES = 8


class _State:
    """The process's switch: how many are on, what was put where, and whether we have warned."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0
        self.threads = 0
        self.mode: str | None = None
        self.converts = True
        self.settings: list[tuple[int, str | None, bool]] = []  # of those who are on
        self.reads = 0  # files opened or loaded by this package while switched on
        self.warned = False
        self.wrappers: dict[int, tuple[Any, Any]] = {}  # id of original: (original, wrapper)
        self.replaced: list[tuple[ModuleType, str, Any]] = []
        # Modules of the libraries that were looked through, and the globals found in them.
        self.scanned: set[str] = set()
        self.places: list[tuple[ModuleType, str]] = []
        self.begun: weakref.ref[_File] | None = None  # the file that was read before it was asked


_state = _State()


def _warn(error: BaseException) -> None:
    if not _state.warned:
        _state.warned = True
        warnings.warn(
            f"fastsafetensors could not do a read and left it to safetensors: {error!r}",
            RuntimeWarning,
            stacklevel=4,
        )


def _try(ours: Callable[[], Any], original: Callable[[], Any]) -> Any:
    """Do it our way; on any error the original's, with its result or its error.

    But where loads are to be verified: the original would hand out what ours has refused.
    """
    try:
        return ours()
    except Exception as error:
        if chosen(None):
            raise
        result = original()
        _warn(error)
        return result


def _is_called_by_transformers() -> bool:
    """Tell whether transformers 5 asks: it gives what it gets a device and a dtype at once."""
    return bool(sys._getframe(2).f_globals.get("__name__") == "transformers.core_model_loading")


def _is_a_rank() -> bool:
    """Tell whether this is one of several processes, which may want parts of tensors only."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


class _GuardedReads:
    """Reads of promises which are left to the original where ours fail."""

    keeps_promises = False

    def __init__(self, reads: Any, original: Callable[[str], Any]) -> None:
        self._reads = reads
        self.device = reads.device
        self._original = original
        self.kept: dict[str, int] = {}  # promises that became what is stored, by its dtype

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
        self, ours: TensorSlice, original: Callable[[], Any], promise: Callable[[str], Any]
    ) -> None:
        self._ours = ours
        self._original = original
        self._promise = promise

    def get_shape(self) -> list[int]:
        """Shape in elements."""
        return self._ours.get_shape()

    def get_dtype(self) -> str:
        """Return the format's name of the dtype."""
        return self._ours.get_dtype()

    def __getitem__(self, key: Any) -> Any:
        """Read a part; all of it when transformers says what is to become of it."""
        if key is Ellipsis and _is_called_by_transformers():
            promise = self._promise(self._ours.get_dtype())
            if promise is not None:
                return promise
        return _try(lambda: self._ours[key], lambda: self._original()[key])


class _File:
    """An accelerated safe_open: ours, with the original at hand when ours fails."""

    def __init__(self, ours: safe_open, original: Callable[[], Any]) -> None:
        self._ours = ours
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
            lambda: self._ours.get_tensor(name), lambda: self._original().get_tensor(name)
        )

    def _expect_all(self) -> None:
        """Begin to read where a program collects slices first: meanwhile it works on their names.

        Of one file only: others are read when their turn comes.
        """
        other = _state.begun() if _state.begun is not None else None
        is_alone = other is None or other._closed
        if is_alone and self._ours._device == "cpu" and not _is_a_rank():
            _state.begun = weakref.ref(self)
            with contextlib.suppress(Exception):  # what fails here fails again when it is taken
                self._ours._ahead.begin()

    def get_slice(self, name: str) -> Any:
        """Return what reads only what it is indexed with."""
        self._slice_count += 1
        if self._slice_count == _COLLECTED_SLICES:
            self._expect_all()
        return _try(
            lambda: _Slice(self._ours.get_slice(name), lambda: self._original().get_slice(name),
                           lambda dtype: self._promise(name, dtype)),
            lambda: self._original().get_slice(name),
        )

    def _promise(self, name: str, dtype: str) -> Any:
        """Return the tensor as a promise, of torch and the CPU; else None."""
        plain = self._ours._is_torch and self._ours._device == "cpu"
        if not _state.converts or not plain or self._closed:
            return None
        from ._converted_reads import ConvertedReads

        with self._lock:
            if self._reads is None:
                def guard(reads: ConvertedReads) -> Any:
                    self._guarded = _GuardedReads(
                        reads, lambda name: self._original().get_slice(name))
                    return self._guarded

                self._reads = ConvertedReads(self._ours, _state.threads, guard)
        if not self._reads.converts and self._guarded.kept.get(dtype, 0) >= _KEPT_PROMISES:
            return None
        return self._reads.promise(name)

    def __getattr__(self, name: str) -> Any:
        """Everything else is our safe_open's."""
        return getattr(self._ours, name)

    def __getitem__(self, name: str) -> Any:
        """Read a tensor."""
        return self.get_tensor(name)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._ours)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name."""
        return name in self._ours

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._ours)

    def __enter__(self) -> _File:
        """Return the object itself."""
        return self

    def __exit__(self, *failure: Any) -> None:
        """Close the files; tensors stay valid."""
        self._closed = True
        if self._reads is not None:
            self._reads.close()
        self._ours.close()
        if self._fallback is not None:
            self._fallback.__exit__(*failure)
            self._fallback = None


class _Opener:
    """What stands where the reference's safe_open stood: called, asked for, derived from."""

    def __init__(self, original: Any) -> None:
        self._original = original
        functools.update_wrapper(self, original, updated=())

    def __call__(
        self, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any
    ) -> Any:
        """Open a file, our way while that is on."""
        def theirs() -> Any:
            return self._original(filename, framework, device, **options)

        def ours() -> Any:
            file = safe_open(filename, framework, device, mode=_state.mode, **options)
            file.read_ahead(_state.threads)
            _state.reads += 1
            return _File(file, theirs)

        return _try(ours, theirs) if _state.depth else theirs()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the original's."""
        return getattr(self._original, name)

    def __instancecheck__(self, thing: object) -> bool:
        """Files opened here are what the original's files are."""
        return isinstance(thing, (_File, self._original))

    def __subclasscheck__(self, kind: type) -> bool:
        """Classes derived from the original are, and our file's."""
        return issubclass(kind, (_File, self._original))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """A class that derives from it derives from the original."""
        return (self._original,)


def _wrap_function(original: Any) -> Any:
    name = original.__name__

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _state.depth:
            return original(*args, **kwargs)

        def ours() -> Any:
            from . import torch as fst_torch

            options = dict(kwargs)
            if name == "load_file" and _state.mode is not None:
                options["mode"] = _state.mode
            if name in ("load_file", "load_model") and _state.threads:
                options["threads"] = _state.threads
            result = getattr(fst_torch, name)(*args, **options)
            _state.reads += 1
            return result

        return _try(ours, lambda: original(*args, **kwargs))

    return call


def _wrapper_of(name: str, original: Any) -> Any:
    known = _state.wrappers.get(id(original))
    if known is None:
        wrapper = _Opener(original) if name == "safe_open" else _wrap_function(original)
        known = _state.wrappers[id(original)] = (original, wrapper)
    return known[1]


def _find_places() -> None:
    """Find the globals of the libraries' modules that are the reference's functions or ours."""
    wanted = {id(thing) for pair in _state.wrappers.values() for thing in pair}
    # Imports of other threads may change the table meanwhile.
    new = set(list(sys.modules)) - _state.scanned
    _state.scanned |= new
    beginnings = {name[:4] for name in LIBRARIES}  # of thousands of names nearly none has one
    for module_name in [name for name in new if name[:4] in beginnings]:
        module = sys.modules.get(module_name)
        if isinstance(module, ModuleType) and module_name.partition(".")[0] in LIBRARIES:
            # The module's own table: lazy modules make attributes on access. Nearly none has any.
            table = vars(module).copy()
            if not wanted.isdisjoint(map(id, table.values())):
                names = [name for name, value in table.items() if id(value) in wanted]
                _state.places.extend((module, name) for name in names)


def _exchange(pairs: dict[int, Any], note: bool) -> None:
    """In the libraries' modules, replace every global whose id is in `pairs`."""
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
    # All of them first: one that is imported later would take a wrapper for the original.
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
    # Modules that were imported meanwhile have bound our wrappers.
    _exchange({id(wrapper): original for original, wrapper in _state.wrappers.values()}, note=False)


class Acceleration(contextlib.ContextDecorator):
    """A switch: context manager, decorator, or enable() and disable().

    Process-wide while it is on, nestable, usable from several threads. What was put in place is
    taken back exactly when the last one goes off.
    """

    def __init__(
        self, threads: int = 0, mode: str | None = None, converts: bool = True
    ) -> None:
        """Keep the settings; see accelerate_from_pretrained()."""
        if threads < 0:
            raise ValueError(f"threads must not be negative, not {threads}")
        if mode not in (None, "auto", "load", "map"):
            raise ValueError(f"mode must be auto, load or map, not {mode!r}")
        self._settings = (threads, mode, converts)
        self._enabled = False

    @property
    def reads(self) -> int:
        """Files that this package has opened or loaded for libraries, in this process."""
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
            # Of several threads the one that began last need not be the first to end.
            at = len(_state.settings) - 1 - _state.settings[::-1].index(self._settings)
            del _state.settings[at]
            left = _state.settings[-1] if _state.settings else (0, None, True)
            _state.threads, _state.mode, _state.converts = left
            _state.depth -= 1
            if not _state.depth:
                _uninstall()

    def enable(self) -> Acceleration:
        """Switch on until disable(); twice is once."""
        with _state.lock:
            if not self._enabled:
                self._enabled = True
                self.__enter__()
        return self

    def disable(self) -> None:
        """Undo enable(); twice is fine."""
        with _state.lock:
            if self._enabled:
                self._enabled = False
                self.__exit__(None, None, None)


def accelerate_from_pretrained(
    threads: int = 0, mode: str | None = None, converts: bool = True
) -> Acceleration:
    """Let libraries read safetensors files through this package while it is on.

    A read that fails here is left to safetensors, with one RuntimeWarning a process.

    Args:
        threads: of a load; 0: as many as the process may use.
        mode: "map" and "auto" for views of the file, "load" for memory of the tensors' own.
        converts: where transformers 5 wants floats of another dtype than the file's, on the CPU,
            they are converted by the load: about a third less memory at the peak, and faster. In
            memory that a host must find first it may gain no time. False: left to torch.

    Returns:
        The switch: a context manager and a decorator, with enable() and disable().

    Raises:
        ImportError: when it goes on, where the safetensors package, which the libraries use, is
            not installed.
    """
    return Acceleration(threads, mode, converts)


if "torch" in sys.modules:  # what the first read needs, before somebody waits for it
    with contextlib.suppress(ImportError):
        from . import _converted_reads, _torch_tensors  # noqa: F401
