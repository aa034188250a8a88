# SPDX-License-Identifier: Apache-2.0
"""ParallelLoader: iterates over a model's tensors while the next files are being read.

For programs written for fastsafetensors 0.5.

The C library does the readahead: a batch is a load that runs in the background, so there is no
Python thread, and leaving the loop at any point stops everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._base.closing import Closing
from .._base.errors import printable
from .._base.progress import BatchBar, enable_tqdm
from .._base.representation import format_contents, format_paths
from .._core import error_class, keep_memory
from .._ranks.agreement import Agreement
from .batch_plan import Batch, BudgetInfeasibleError, Planner, PlanRules
from .common import SafeTensorsMetadata, check_one_save, device_of
from .copier.registry import is_built_in
from .file_buffer import FilesBufferOnDevice, LoadedFile
from .frameworks import get_framework_op
from .loader import BaseSafeTensorsFileLoader, _GroupLoader
from .stop_watch import TimingContext, parse_time

__all__ = [
    "BudgetInfeasibleError",
    "FileBatch",
    "ParallelLoader",
    "PipelineParallel",
    "TimingContext",
    "enable_tqdm",
    "parse_time",
]

_TITLE = "Loading fastsafetensors checkpoint shards"


_logger = logging.getLogger("fastsafetensors.parallel_loader")


@dataclass
class FileBatch:
    """A batch that was read: its buffer, its names, its number."""

    fb: FilesBufferOnDevice
    keys: list[str]
    batch_id: int


def _check_options(options: dict[str, Any], ranks: int) -> None:
    """Raise ValueError for settings that exclude each other."""
    limited = options["max_batch_bytes"] is not None or options["device_memory_budget"] is not None
    if options["max_concurrent_producers"] != 1:
        raise ValueError("max_concurrent_producers must be 1")
    if options["tensor_filter"] is not None and ranks > 1 and not options["all_local"]:
        raise ValueError(
            "tensor_filter requires a single-process loader group or all_local=True: ranks of a "
            "group must read the same tensors"
        )
    for name in ("max_batch_bytes", "device_memory_budget"):
        if options[name] is not None and options[name] <= 0:
            raise ValueError(f"{printable(name)} must be positive, not {options[name]}")
    if options["use_chunk_budget_as_allocation_size"] and not limited:
        raise ValueError(
            "use_chunk_budget_as_allocation_size needs max_batch_bytes or device_memory_budget"
        )
    if options["resident_tensor"] is not None and not options["accumulate_resident"]:
        raise ValueError("resident_tensor contradicts accumulate_resident=False")
    if options["borrowed_tensors"] and (options["accumulate_resident"] or ranks > 1):
        raise ValueError("borrowed_tensors needs accumulate_resident=False and a group of one")
    for name in ("broadcast_run_bytes", "broadcast_run_tensors"):
        if options[name] < 0:
            raise ValueError(f"{printable(name)} must not be negative")


class PipelineParallel(Closing):
    """Iterate over (name, tensor) of files with readahead, n files at a time in a group of n.

    loader: a SafeTensorsFileLoader (of a group) with device, framework and reader.
    """

    def __init__(
        self,
        pg: Any,
        loader: BaseSafeTensorsFileLoader,
        hf_weights_files: Sequence[Any],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        tensor_filter: Callable[[str], bool] | None = None,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        all_local: bool = False,
    ) -> None:
        """Check the settings; with a memory limit, read the headers and plan."""
        self.loader = loader
        self.pg = loader.pg
        self.need_clone = False  # tensors own their memory
        self._local = all_local or self.pg.size() == 1
        single = loader.framework.get_process_group(None)
        self._agreement = Agreement(single if self._local else self.pg)
        _check_options(dict(locals()), self.pg.size())
        self.queue_size = queue_size
        self._filter = tensor_filter
        self._overlap = overlap_io
        runs = resident_tensor is None and broadcast_run_bytes > 0 and broadcast_run_tensors > 0
        self._run_bytes = broadcast_run_bytes if runs else 0
        self._run_tensors = broadcast_run_tensors if runs else 1
        self._tqdm = use_tqdm_on_load
        self._limited = max_batch_bytes is not None or device_memory_budget is not None
        self._keep_chunks = use_chunk_budget_as_allocation_size
        resident = (lambda name: False) if not accumulate_resident else (
            resident_tensor or (lambda name: True))
        copier = loader.copier_class
        if isinstance(hf_weights_files, (str, bytes, os.PathLike)):
            raise TypeError("hf_weights_files must be a list of files, such as [path]")
        files = list(hf_weights_files)
        paths = [os.fsdecode(path) for path in files]
        self._rules = PlanRules(
            ranks=1 if self._local else self.pg.size(),
            queue_size=queue_size,
            max_batch_bytes=max_batch_bytes,
            budget=device_memory_budget,
            resident=resident,
            multiplier=copier.chunk_transient_multiplier(paths),
            chunk_overhead=copier.chunk_device_overhead(paths),
            fixed_overhead=copier.fixed_device_overhead(paths),
        )
        step = 1 if self._local else self.pg.size()
        self.weight_files_batches = [files[i : i + step] for i in range(0, len(files), step)]
        self._batches: list[Batch] | None = None
        self._metadata: dict[Any, SafeTensorsMetadata] = {}
        self._open: deque[tuple[Batch, FilesBufferOnDevice]] = deque()
        self._closed = False
        self._running: Any = None
        # The run whose collective has started and that is not returned yet.
        self._sent: tuple[list[str], Callable[[], Iterable[Any]]] | None = None
        if self._limited:
            self._plan()

    def __repr__(self) -> str:
        """Return the files, and the tensors and dtypes once the headers are read."""
        files = [path for batch in self.weight_files_batches for path in batch]
        state = "headers not read yet"
        if self._closed:
            state = "closed"
        elif self._metadata:
            frames = [frame for metadata in self._metadata.values()
                      for frame in metadata.tensors.values()]
            state = format_contents(str(getattr(frame.dtype, "value", frame.dtype))
                                    for frame in frames)
        return f"<{type(self).__name__} {format_paths(files)}: {state}>"

    def _names(self, metadata: SafeTensorsMetadata) -> list[str]:
        names = metadata.tensors.names
        return names if self._filter is None else [name for name in names if self._filter(name)]

    def _plan(self) -> list[Batch]:
        """Read all headers and divide them into batches, the same on all ranks."""
        if self._batches is None:
            try:
                self._batches = self._make_batches()
            except Exception as error:
                self._agreement.agree("the plan", error=error)
                raise
            self._agreement.agree("the plan", self._describe())
        return self._batches

    def _describe(self) -> list[str]:
        """Properties on which all ranks must agree before reading."""
        if self._local:
            return []
        lines = [f"runs of {self._run_bytes} bytes, {self._run_tensors} tensors"]
        lines += [
            f"{os.path.basename(os.fsdecode(path))} ({metadata.size_bytes} bytes, header "
            f"{metadata.digest()})"
            for path, metadata in self._metadata.items()
        ]
        for batch in self._batches or []:
            parts = {rank: (len(names), names[:1]) for rank, (_, names) in batch.parts.items()}
            lines.append(f"a batch of {parts}")
        return lines

    def _open_all(self) -> list[SafeTensorsMetadata]:
        """Open all files."""
        self._metadata = {
            path: SafeTensorsMetadata.from_file(path, self.loader.framework)
            for files in self.weight_files_batches for path in files
        }
        return list(self._metadata.values())

    def _make_batches(self) -> list[Batch]:
        """Read all headers and divide them into batches."""
        check_one_save(self._open_all)
        groups = []
        for files in self.weight_files_batches:
            headers = [(path, self._metadata[path]) for path in files]
            groups.append({rank: (path, metadata, self._names(metadata))
                           for rank, (path, metadata) in enumerate(headers)})
        planner = Planner(self._rules)
        batches = planner.plan(groups)
        self.queue_size = planner.queue_size
        if self._keep_chunks:
            largest = self._rules.max_batch_bytes or self._rules.budget or 0
            keep_memory(min(largest, self._rules.budget or largest) * 2)
        return batches

    def _start(self, batch: Batch) -> FilesBufferOnDevice:
        """Start reading a batch in the background."""
        files: dict[int, list[LoadedFile]] = {}
        for rank, (path, names) in batch.parts.items():
            owner = self.pg.rank() if self._local else rank
            files.setdefault(owner, []).append(LoadedFile(self._metadata[path], owner, names))
        loader = self.loader
        single = get_framework_op(loader.framework.get_name()).get_process_group(None)
        buffer = FilesBufferOnDevice(
            files if not self._local else {0: next(iter(files.values()), [])},
            single if self._local else self.pg,
            loader.framework,
            device=loader.device,
            agreement=self._agreement,
        )
        from .st_types import DType

        try:
            for file in files.get(self.pg.rank(), []):
                if is_built_in(loader.copier_type):
                    loader._read(file, DType.AUTO, False, 1 << 34)
                    continue
                copier = loader.copier_constructor(file.metadata, loader.device, loader.framework)
                if self._limited or self._filter is not None:
                    wanted = set(file.names)
                    ranges = file.metadata.select_byte_ranges(wanted.__contains__)
                    if self._limited:
                        copier.set_chunk(ranges, file.names)
                    else:
                        copier.set_byte_ranges(ranges)
                tensors = copier.wait_io(copier.submit_io(False, 1 << 34))
                copier.finish_io()
                file.tensors = {name: tensors[name] for name in file.names}
        except BaseException:
            buffer.close()
            raise
        return buffer

    def _fill(self, waiting: deque[Batch]) -> None:
        """Keep as many batches in progress as the queue allows."""
        depth = 1 if self.queue_size < 0 else self.queue_size + 2
        while waiting and len(self._open) < depth:
            batch = waiting[0]
            try:
                buffer = self._start(batch)
            except Exception as error:
                self._agreement.agree("a batch", error=error)
                raise
            self._open.append((waiting.popleft(), buffer))

    def _batch_runs(self, batch: Batch) -> Iterator[list[str]]:
        """Neighbouring tensors that share a collective; in a group of one a whole file."""
        single = self._local or self.pg.size() == 1
        for path, names in batch.parts.values():
            if single:
                yield names
                continue
            metadata, run, size = self._metadata[path], list[str](), 0
            for name in names:
                nbytes = metadata.tensor_bytes(name)
                full = len(run) >= self._run_tensors or size + nbytes > self._run_bytes
                if run and full:
                    yield run
                    run, size = [], 0
                run.append(name)
                size += nbytes
            if run:
                yield run

    def _batch_bytes(self, batch: Batch) -> int:
        return sum(
            self._metadata[path].tensor_bytes(name)
            for path, names in batch.parts.values()
            for name in names
        )

    def _tensors(self, batch: Batch, buffer: FilesBufferOnDevice) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of a batch; in a group the next run is sent while one is returned."""
        for run in self._batch_runs(batch):
            before, self._sent = self._sent, (run, buffer.begin_run(run))
            if before is not None:
                yield from zip(before[0], before[1](), strict=True)
            if buffer.pg.size() == 1:
                run, finish = self._sent
                self._sent = None
                yield from zip(run, finish(), strict=True)
        last, self._sent = self._sent, None
        if last is not None:
            yield from zip(last[0], last[1](), strict=True)

    def iterate_weights(self) -> Generator[tuple[str, Any], None, None]:
        """Iterate over (name, tensor), files in list order, tensors by offset.

        Tensors own their memory and stay valid. Leaving the loop stops reading. A second call
        starts again, after the first one has ended. SafetensorError once closed.
        """
        if self._closed:
            raise error_class()(f"{type(self).__name__} is closed")
        return self._iterate()

    def _iterate(self) -> Generator[tuple[str, Any], None, None]:
        if self._running is not None:
            raise RuntimeError("an iteration over the weights is already running")
        self._running = True
        bar = None
        try:
            waiting = deque(self._plan())
            bar = BatchBar(_TITLE, len(waiting), self._tqdm)
            while waiting or self._open:
                self._fill(waiting)
                batch, buffer = self._open[0]
                if not self._overlap:
                    buffer.wait()
                for name, tensor in self._tensors(batch, buffer):
                    yield name, tensor
                    if self._closed:
                        raise error_class()(f"{type(self).__name__} is closed")
                    del tensor
                self._open.popleft()
                buffer.close()
                bar.tick(partial(self._batch_bytes, batch))
            self._running = None
            self._agreement.end()
        except GeneratorExit:
            self._leave("it broke out of its loop")
            raise
        except KeyboardInterrupt:
            self._abandon()
            raise
        finally:
            self._running = self._sent = None
            if bar is not None:
                bar.close()
            self._stop()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, tensor)."""
        return self.iterate_weights()

    async def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        """Iterate over (name, tensor) without blocking the event loop during reads."""
        weights = self.iterate_weights()
        step: asyncio.Future[list[tuple[str, Any]]] | None = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(_take_batch, weights))
                items = await asyncio.shield(step)
                if not items:
                    break
                for item in items:
                    yield item
        finally:
            if step is not None and not step.done():
                self._cancel()
                await _settle(step)
            weights.close()

    def _leave(self, why: str) -> None:
        """Notify the other ranks, once, that this one stops."""
        if self._running is None or self._local:
            return
        self._running = None
        try:
            sent, self._sent = self._sent, None
            if sent is not None:
                sent[1]()  # all ranks are in this collective
            self._agreement.leave(why)
        except RuntimeError as error:  # the group or the other ranks may be gone
            _logger.debug("the other ranks were not informed: %s", printable(error))

    def _cancel(self) -> None:
        """Make waiting callers fail soon."""
        for loader in self._loads():
            loader.cancel()

    def _loads(self) -> list[Any]:
        files = [f for _, buffer in list(self._open) for f in buffer.rank_loaders.values()]
        return [file.loader for part in files for file in part if file.loader is not None]

    def _abandon(self) -> None:
        """Do not wait for reads in flight."""
        for loader in self._loads():
            loader.abandon()

    def _stop(self) -> None:
        while self._open:
            self._open.popleft()[1].close()

    def close(self) -> None:
        """Stop and free everything. Returned tensors stay valid. Repeated calls are harmless."""
        self._closed = True
        self._leave("it closed its loader")
        self._stop()
        self._metadata = {}
        self.loader.close()


# Time limit for collecting tensors for an asynchronous loop in one thread call.
_TURN_SECONDS = 0.005


def _take_batch(weights: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the next tensors that arrive soon after each other; nothing at the end."""
    until = time.monotonic() + _TURN_SECONDS
    items: list[tuple[str, Any]] = []
    for item in weights:
        items.append(item)
        if time.monotonic() >= until:
            break
    return items


async def _settle(step: asyncio.Future[Any]) -> None:
    """Wait for a thread that was asked to stop, ignoring its result and repeated cancellation."""
    while not step.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([step])
    if not step.cancelled():
        step.exception()


class ParallelLoader(PipelineParallel):
    """Iterate over the tensors of a model's files while the next ones are being read.

    For programs written for fastsafetensors 0.5. New ones use open_stream().

        loader = ParallelLoader(SingleGroup(), sorted_files, device="cpu")
        for name, tensor in loader.iterate_weights():
            ...
        loader.close()

    pg: a process group, SingleGroup() or None (a single process, also in a distributed job). In a
    group of n, n files are read at a time, and every rank gets every tensor.
    queue_size: -1: one batch at a time; n: up to n + 2 in memory.
    tensor_filter: name -> bool, which to read; all_local: each rank reads everything it keeps.
    max_batch_bytes: batches are runs of tensors of at most this size. device_memory_budget: batches
    and queue are reduced until everything fits; BudgetInfeasibleError if it cannot.
    timeout: seconds of each wait for other ranks; None: the group's own. If a rank fails, or leaves
    the loop, the others raise RankError.
    accumulate_resident, resident_tensor: which tensors stay in memory after they were returned.
    """

    def __init__(
        self,
        pg: Any,
        hf_weights_files: Sequence[Any],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        tensor_filter: Callable[[str], bool] | None = None,
        all_local: bool = False,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        use_fgds: bool = False,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Check the settings; with a memory limit, read the headers and plan."""
        device_of(device)
        loader = _GroupLoader(
            pg, device, bbuf_size_kb, max_threads, nogds, set_numa,
            debug_log=debug_log, framework=framework, use_fgds=use_fgds, timeout=timeout,
        )
        super().__init__(
            pg, loader, hf_weights_files, max_concurrent_producers, queue_size, use_tqdm_on_load,
            tensor_filter, max_batch_bytes, use_chunk_budget_as_allocation_size,
            device_memory_budget, accumulate_resident, resident_tensor, broadcast_run_bytes,
            broadcast_run_tensors, overlap_io, borrowed_tensors, all_local,
        )
