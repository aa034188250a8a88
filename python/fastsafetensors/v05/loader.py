# SPDX-License-Identifier: Apache-2.0
"""SafeTensorsFileLoader, for paths or for a process group, and fastsafe_open.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, overload

from .._base.argument_types import Paths
from .._base.closing import Closing
from .._base.errors import printable, shown
from .._base.options import check_count, check_switches
from .._base.representation import format_contents, format_model, format_paths, shown_as
from .._core import Model, error_class
from .._loading.load import load_from, open_load
from .._loading.verified_open import open_files
from .._ranks.agreement import Agreement
from .._ranks.rank_parts import STRATEGIES
from .common import LoaderFrames, SafeTensorsMetadata, SingleGroup, check_one_save, device_of
from .copier.registry import create_copier_constructor, get_copier_class, is_built_in
from .file_buffer import FilesBufferOnDevice, LoadedFile
from .frameworks import get_framework_op
from .st_types import Device, DType

__all__ = ["BaseSafeTensorsFileLoader", "SafeTensorsFileLoader", "fastsafe_open"]

_MAX_BLOCK = 16 * 1024**3
_logger = logging.getLogger(__name__)

# Values of FASTSAFETENSORS_ODIRECT.
_ENGINES = {"0": "pread", "1": "direct"}


@cache
def _warn_of_rejection() -> None:
    """A cached function, so that the warning is issued once."""


def _warn_once(path: str, error: Exception) -> None:
    if not _warn_of_rejection.cache_info().currsize:
        _warn_of_rejection()
        _logger.warning("filesystem rejected O_DIRECT for %s: %s", printable(path),
                        printable(error))


@shown_as("SafeTensorsFileLoader")
class _PathLoader(Closing):
    """Load a model eagerly into aligned, owned memory.

        tensors = SafeTensorsFileLoader("model.safetensors", num_threads=8).load()

    path: a file, an index, a folder, or a list of files (a name in two of them is an error).
    num_threads: maximum number of threads; small loads use fewer.
    """

    def __init__(self, path: Paths, num_threads: int = 8, **others: Any) -> None:
        """Open the files and read their headers."""
        if others or not isinstance(num_threads, int):
            raise TypeError(
                "SafeTensorsFileLoader(path) takes num_threads and nothing else; "
                f"{', '.join(others) or 'a device'} goes with a process group as first argument: "
                "SafeTensorsFileLoader(SingleGroup(), device, ...)")
        self._threads = check_count("num_threads", num_threads, 1)
        self._path = path
        self._model: Model | None = open_files(path)
        self._stats: dict[str, Any] = {}

    def __repr__(self) -> str:
        """Return the path, the number of tensors and their dtypes."""
        return format_model("SafeTensorsFileLoader", self._path, self._model)

    def load(self) -> dict[str, Any]:
        """Read all tensors: {name: torch.Tensor} in file order, valid after close()."""
        from .._torch.torch_tensors import export

        if self._model is None:
            raise error_class()("SafeTensorsFileLoader is closed")
        def note(loader: Any) -> None:
            self._stats = loader.stats()

        return load_from(self._model, export, progress=None, watch=note, mode="load",
                         threads=self._threads)

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics of the last load(); empty before the first."""
        return dict(self._stats)

    def close(self) -> None:
        """Close the files; tensors stay valid, and closing twice is fine."""
        if self._model is not None:
            self._model.close()
        self._model = None


class BaseSafeTensorsFileLoader(Closing):
    """Load files into a FilesBufferOnDevice, with a reader of any registered type.

    pg: a process group, SingleGroup() or None. In a group, all ranks must make the same calls in
    the same order; if a rank fails or calls something else, the others raise RankError. timeout:
    seconds of each wait for other ranks; None: the group's own. strategy: how get_sharded() gets a
    part in a group: "slice": each rank reads its own from the file; "broadcast" or "scatter": the
    file's rank reads it and sends it whole or in parts; "auto": scatter, but small tensors whole.
    The reader's factory gets framework=, set_numa= and the extra keywords.
    """

    def __init__(
        self,
        pg: Any,
        device: Any,
        copier_type: str,
        set_numa: bool = True,
        disable_cache: bool = True,
        framework: str = "pytorch",
        timeout: float | None = None,
        strategy: str = "auto",
        **kwargs: Any,
    ) -> None:
        """Check the settings, without reading."""
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
        self.strategy = strategy
        self.framework = get_framework_op(framework)
        self.pg = self.framework.get_process_group(pg, timeout)
        self.agreement = Agreement(self.pg)
        self._failure: Exception | None = None
        self.max_threads = 16
        self.gds = "off" if copier_type == "nogds" else "auto"
        self.debug_log = os.environ.get("FASTSAFETENSORS_DEBUG", "") == "true"
        self.device: Device = device_of(device)
        self.copier_type = copier_type
        self.copier_constructor = create_copier_constructor(
            copier_type, self.device, framework=self.framework, set_numa=set_numa, **kwargs)
        self.copier_class = get_copier_class(copier_type)
        self.meta: dict[str, tuple[SafeTensorsMetadata, int]] = {}
        self._paths: set[str] = set()
        self.frames = LoaderFrames()
        self._filter: Callable[[str], bool] | None = None
        self._closed = False

    @classmethod
    def process_extension_config(
        cls, ext_config: Mapping[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        """Return the keywords for a section of a configuration file."""
        result = {**ext_config, **kwargs}
        result.pop("copier_type", None)
        kind = ext_config.get("copier_type")
        if kind == "gds":
            result["nogds"] = False
        elif kind == "fgds":
            result["use_fgds"] = True
        elif kind is not None:
            result["nogds"] = True
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise error_class()(f"{type(self).__name__} is closed")

    def add_filenames(self, filenames: Mapping[int, Any]) -> None:
        """Add {rank: [paths]} and read the headers. Repeated paths count once."""
        self._check_open()
        try:
            self._add_all(filenames)
        except Exception as error:
            self._failure = error
            # The error's traceback refers to this frame, and files must not stay open until a
            # collection.
            self.meta.clear()
            self.frames = LoaderFrames()
            self.agreement.agree("the files", error=error)

    def _add_all(self, filenames: Mapping[int, Any]) -> None:
        for rank, paths in filenames.items():
            if not hasattr(rank, "__index__"):
                raise TypeError(f"the keys of filenames must be ranks, not {shown(rank)}")
            if not 0 <= rank < self.pg.size():
                raise ValueError(f"rank {rank} is not in the group of {self.pg.size()}")
            if isinstance(paths, (str, bytes, os.PathLike)):
                raise TypeError(f"expected a list of paths for rank {rank}, not one path")
        # Round-robin over the ranks, because they read in parallel.
        queues = {rank: list(paths) for rank, paths in sorted(filenames.items())}
        added: list[tuple[Any, int]] = []
        while any(queues.values()):
            for rank, queue in queues.items():
                if queue:
                    path = queue.pop(0)
                    if os.fsdecode(path) not in self._paths:
                        self._paths.add(os.fsdecode(path))
                        added.append((path, rank))
        known = [(path, rank) for path, (_, rank) in self.meta.items()]
        if added:
            check_one_save(partial(self._open_all, known, added))

    def _open_all(
        self, known: list[tuple[Any, int]], added: list[tuple[Any, int]]
    ) -> list[SafeTensorsMetadata]:
        """Open files; a second call also reopens earlier ones, so that all belong to one save."""
        if len(self.meta) > len(known):
            self.meta, self.frames = {}, LoaderFrames()
        for path, rank in added if len(self.meta) == len(known) else known + added:
            self._add(path, rank)
        return [metadata for metadata, _ in self.meta.values()]

    def _add(self, path: Any, rank: int) -> None:
        """Open one file. A separate function, so that an error's frame keeps no other file open."""
        metadata = SafeTensorsMetadata.from_file(path, self.framework)
        self.meta[path] = (metadata, rank)
        self.frames.add(metadata.tensors)

    def set_tensor_filter(self, keep_tensor: Callable[[str], bool] | None) -> None:
        """Load only names for which `keep_tensor` returns True; None: all."""
        self._filter = keep_tensor

    def _keeps(self, name: str) -> bool:
        return self._filter is None or bool(self._filter(name))

    def get_keys(self) -> list[str]:
        """Names in the order of registration, inside a file by offset."""
        return [name for name in self.frames if self._keeps(name)]

    def get_shape(self, tensor_name: str) -> list[int]:
        """Return a tensor's shape. KeyError for an unknown name, ValueError for a filtered one."""
        frame = self.frames[tensor_name]
        if not self._keeps(tensor_name):
            raise ValueError(f"get_shape: key {printable(tensor_name)} is filtered out")
        return list(frame.shape)

    def _make_files(self) -> dict[int, list[LoadedFile]]:
        files: dict[int, list[LoadedFile]] = {}
        for _, (metadata, rank) in sorted(self.meta.items(), key=lambda item: os.fsdecode(item[0])):
            names = metadata.tensors.names
            if self._filter is not None:
                names = [name for name in names if self._keeps(name)]
            files.setdefault(rank, []).append(LoadedFile(metadata, rank, names))
        return files

    def _start(self, file: LoadedFile, requested: str | None) -> None:
        """Start reading a file with the library's pipeline."""
        whole = file.names is file.metadata.tensors.names
        names = None if whole else file.names
        model, limit = file.metadata.model, self.max_threads
        threads = limit if limit < min(16, len(os.sched_getaffinity(0))) else 0
        engine = _ENGINES.get(os.environ.get("FASTSAFETENSORS_ODIRECT", ""), "auto")
        file.log_level = logging.INFO if self.debug_log else logging.DEBUG
        options = {"mode": "load", **self.framework.load_options(self.device, self.gds)}
        file.is_on_gpu = "device" in options
        try:
            file.loader = open_load(
                model, names, dtype=requested, threads=threads, engine=engine, **options)
        except RuntimeError as error:
            if engine != "direct" or "gds" in str(error):
                raise
            _warn_once(file.metadata.src, error)
            file.loader = open_load(model, names, dtype=requested, threads=threads, **options)

    def _read(self, file: LoadedFile, dtype: DType, register: bool, block: int) -> None:
        """Start reading a file of this rank; a custom reader finishes here."""
        if not file.names:
            return
        if is_built_in(self.copier_type):
            self._start(file, None if dtype is DType.AUTO else dtype.value)
            return
        copier = self.copier_constructor(file.metadata, self.device, self.framework)
        if self._filter is not None:
            copier.set_byte_ranges(file.metadata.select_byte_ranges(self._keeps))
        tensors = copier.wait_io(copier.submit_io(register, block), dtype)
        copier.finish_io()
        file.tensors = {name: tensors[name] for name in file.names}

    def copy_files_to_device(
        self,
        dtype: Any = DType.AUTO,
        use_buf_register: bool = True,
        max_copy_block_size: int = _MAX_BLOCK,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """Read this rank's files; return the buffer with all ranks' files.

        dtype: convert floats to this dtype while loading; other tensors are unchanged.
        allow_inflight: return at once, and wait in get_tensor(); otherwise block until everything
        is read.
        """
        self._check_open()
        if self._failure is not None:
            raise self._failure
        try:
            if max_copy_block_size <= 0:
                raise ValueError(f"max_copy_block_size must be positive, not {max_copy_block_size}")
            if borrowed_tensors and self.pg.size() > 1:
                raise ValueError("borrowed_tensors needs a group of one")
            wanted = dtype if isinstance(dtype, DType) else _dtype_of(dtype)
            files = self._make_files()
            buffer = FilesBufferOnDevice(
                files, self.pg, self.framework, device=self.device, dtype=wanted,
                agreement=self.agreement, strategy=self.strategy,
            )
        except Exception as error:
            self.agreement.agree("the load", error=error)
            raise
        for rank_files in files.values():
            for file in rank_files:
                file.dtype = wanted
        self.agreement.agree("the load", self._describe(wanted))
        failure: Exception | None = None
        try:
            for file in files.get(self.pg.rank(), []) if not buffer.reads_slices else []:
                self._read(file, wanted, use_buf_register, max_copy_block_size)
        except Exception as error:
            failure = error
        if failure is not None or not (allow_inflight and wanted is DType.AUTO):
            buffer.settle(failure)
        return buffer

    def _describe(self, dtype: DType) -> list[str]:
        """Properties on which all ranks must agree before reading."""
        if self.pg.size() == 1:
            return []
        lines = [f"dtype {dtype.value}", f"strategy {self.strategy}"]
        for path, (metadata, rank) in self.meta.items():
            name = os.path.basename(os.fsdecode(path))
            lines.append(
                f"{name} for rank {rank} ({metadata.size_bytes} bytes, header {metadata.digest()})"
            )
        if self._filter is not None:
            kept = "\n".join(self.get_keys()).encode(errors="surrogatepass")
            lines.append(f"a filter that keeps {hashlib.blake2b(kept, digest_size=8).hexdigest()}")
        return lines

    copy_file_to_device = copy_files_to_device

    def __repr__(self) -> str:
        """Return the paths, the number of tensors and their dtypes."""
        if self._closed:
            return f"<{type(self).__name__}: closed>"
        dtypes = (frame.dtype for frame in self.frames.values())
        contents = format_contents(str(getattr(dtype, "value", dtype)) for dtype in dtypes)
        return f"<{type(self).__name__} {format_paths(list(self.meta))}: {contents}>"

    def reset(self) -> None:
        """Remove the files, so that the loader can be used again."""
        self.meta = {}
        self._paths = set()
        self.frames = LoaderFrames()

    def close(self) -> None:
        """Remove the files. Buffers and tensors stay valid. Repeated calls are harmless."""
        self.reset()
        self._closed = True


def _dtype_of(dtype: Any) -> DType:
    from .frameworks._torch import fst_dtype

    return DType.AUTO if dtype is None else fst_dtype(dtype)


@shown_as("SafeTensorsFileLoader")
class _GroupLoader(BaseSafeTensorsFileLoader):
    """Load files into a FilesBufferOnDevice.

        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu")
        loader.add_filenames({0: ["a.safetensors", "b.safetensors"]})
        buffer = loader.copy_files_to_device()
        tensor = buffer.get_tensor("weight")

    nogds=False uses GPUDirect Storage if a probe shows that it works; with strict=True, a load
    without it is a RuntimeError with "gds" in its text. use_fgds, bbuf_size_kb, set_numa and
    disable_cache have no effect, because the library chooses engines and buffer sizes. max_threads
    limits its threads. debug_log (and FASTSAFETENSORS_DEBUG=true for all loaders) logs each load at
    INFO instead of DEBUG. FASTSAFETENSORS_ODIRECT=0 reads through the page cache, 1 bypasses it.
    """

    def __init__(
        self,
        pg: Any,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
        timeout: float | None = None,
        strategy: str = "auto",
        strict: bool = False,
    ) -> None:
        """Check the settings, without reading."""
        check_switches(nogds=nogds, use_fgds=use_fgds, strict=strict)
        if strict and nogds:
            raise ValueError("strict requires GPUDirect Storage, but nogds disables it")
        if bbuf_size_kb <= 0 or max_threads <= 0:
            raise ValueError(
                f"bbuf_size_kb and max_threads must be positive, not {bbuf_size_kb}, {max_threads}"
            )
        kind = "nogds" if nogds else "fgds" if use_fgds else "gds"
        super().__init__(
            pg, device, kind, set_numa, disable_cache, framework, timeout, strategy,
            bbuf_size_kb=bbuf_size_kb, max_threads=max_threads,
        )
        self.max_threads = max_threads
        if strict:
            self.gds = "strict"
        self.debug_log = self.debug_log or debug_log


class _EitherLoader(type):
    """One name for two classes: instances of both are SafeTensorsFileLoaders."""

    def __instancecheck__(cls, instance: Any) -> bool:
        """Tell whether SafeTensorsFileLoader() created an object."""
        if cls is SafeTensorsFileLoader:
            return isinstance(instance, (_PathLoader, _GroupLoader))
        return super().__instancecheck__(instance)


def _is_path(first: Any) -> bool:
    return isinstance(first, (str, bytes, os.PathLike)) or (
        isinstance(first, (list, tuple)) and bool(first)
    )


class SafeTensorsFileLoader(_GroupLoader, metaclass=_EitherLoader):
    """Load files: by path, or with the API of fastsafetensors 0.5.

    For programs written for fastsafetensors 0.5. New ones use load_file() or open_stream().

        tensors = SafeTensorsFileLoader("model.safetensors", num_threads=8).load()

        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu")
        loader.add_filenames({0: ["a.safetensors", "b.safetensors"]})
        buffer = loader.copy_files_to_device()
        tensor = buffer.get_tensor("weight")
        loader.close()

    The first argument is a path (or a list of them), or a process group (None, SingleGroup() or a
    framework group). Tensors own their memory: loader or buffer need not be closed, and closing
    never invalidates tensors.
    """

    # Programs for 0.5 inspect the signature of its form.
    __signature__ = inspect.signature(_GroupLoader)

    if TYPE_CHECKING:

        @overload
        def __new__(  # type: ignore[misc]
            cls, path: Paths, num_threads: int = 8
        ) -> _PathLoader: ...
        @overload
        def __new__(cls, pg: Any, *args: Any, **kwargs: Any) -> SafeTensorsFileLoader: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a loader of paths, or one of a process group."""
        first = args[0] if args else kwargs.get("path", kwargs.get("pg"))
        if cls is SafeTensorsFileLoader and _is_path(first):
            return _PathLoader(*args, **kwargs)
        return super().__new__(cls)


class fastsafe_open(Closing):  # noqa: N801 - the name that programs know
    """Load files at once and read their tensors by name.

    For programs written for fastsafetensors 0.5. New ones use safe_open().

        with fastsafe_open(filenames=["model.safetensors"], device="cpu") as f:
            for name in f.keys():
                tensor = f.get_tensor(name)

    filenames: a path, a list of paths, or {rank: [paths]}. Usable without `with`; tensors stay
    valid afterwards. metadata(): {filename: its metadata}.
    """

    def __init__(
        self,
        filenames: Any,
        framework: str = "pt",
        pg: Any = None,
        device: Any = "cpu",
        nogds: bool = False,
        debug_log: bool = False,
        max_copy_block_size: int = _MAX_BLOCK,
        use_fgds: bool = False,
    ) -> None:
        """Load everything."""
        if isinstance(filenames, (str, bytes, os.PathLike)):
            filenames = {0: [filenames]}
        elif isinstance(filenames, (list, tuple)):
            filenames = {0: list(filenames)}
        elif not isinstance(filenames, dict):
            raise TypeError(
                "filenames must be a path, a list of paths or {rank: [paths]}, not "
                f"{type(filenames).__name__}"
            )
        self.loader = _GroupLoader(
            SingleGroup() if pg is None else pg, device, nogds=nogds, debug_log=debug_log,
            framework=framework, use_fgds=use_fgds,
        )
        self.loader.add_filenames(filenames)
        self.fb = self.loader.copy_files_to_device(max_copy_block_size=max_copy_block_size)

    def __repr__(self) -> str:
        """Return the paths, the number of tensors and their dtypes."""
        return repr(self.loader).replace(type(self.loader).__name__, type(self).__name__, 1)

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self.fb.key_to_rank_lidx)

    get_keys = keys

    def get_tensor(self, name: str) -> Any:
        """Return a framework tensor."""
        return self.fb.get_tensor(name)

    def get_tensor_wrapped(self, name: str) -> Any:
        """Return a tensor as a TensorBase."""
        return self.fb.get_tensor_wrapped(name)

    def metadata(self) -> dict[str, Any]:
        """Return {filename: metadata}; "" for a file without one; {} once closed."""
        return {os.fsdecode(path): meta.metadata for path, (meta, _) in self.loader.meta.items()}

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name."""
        return name in self.fb.key_to_rank_lidx

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.fb.key_to_rank_lidx)

    def __iter__(self) -> Any:
        """Iterate over the names."""
        return iter(self.keys())

    def __getitem__(self, name: str) -> Any:
        """Return a framework tensor."""
        return self.get_tensor(name)

    def close(self) -> None:
        """Close loader and buffer. Tensors stay valid. Repeated calls are harmless."""
        self.fb.close()
        self.loader.close()
