# SPDX-License-Identifier: Apache-2.0
"""The low-level names of fastsafetensors 0.5's extension, for scripts that call them directly.

For old code on CPU memory: reads with system calls on threads. New programs should use the loaders,
which are faster and report errors. Addresses are plain integers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .._base.errors import printable
from .._base.regular_files import open_regular

_logger = logging.getLogger("fastsafetensors.cpp")

# Block size for distributing a read over threads.
_BLOCK = 16 << 20
_PAGE = 4096


class _Allocations:
    """Memory returned by cpu_malloc, by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, Any] = {}

    def add(self, size: int) -> int:
        if size < 0:
            raise ValueError(f"size must not be negative, not {size}")
        memory = (ctypes.c_char * (size + _PAGE))()
        address = -(-ctypes.addressof(memory) // _PAGE) * _PAGE
        with self._lock:
            self._kept[address] = memory
        return address

    def drop(self, address: int) -> None:
        with self._lock:
            self._kept.pop(address, None)


_allocations = _Allocations()


def load_library_functions(cudart_lib_name: str = "") -> None:
    """Do nothing, because libraries are loaded on demand."""


def is_cuda_found() -> bool:
    """Tell whether this module uses CUDA: no, only the loaders do."""
    return False


def is_hip_found() -> bool:
    """Tell whether this module uses HIP: no."""
    return False


def is_cufile_found() -> bool:
    """Tell whether this module uses cuFile: no."""
    return False


def is_fgds_found() -> bool:
    """Tell whether libfgds is available: no."""
    return False


def is_gds_supported(device_id: int) -> int:
    """-1 for an invalid device, 0 if direct reads into it are not possible."""
    return -1 if device_id < 0 else 0


def init_gds() -> int:
    """Return 0: there is nothing to start."""
    return 0


def close_gds() -> int:
    """Return 0: there is nothing to stop."""
    return 0


def get_alignment_size() -> int:
    """Alignment of direct reads in bytes."""
    return _PAGE


def set_debug_log(enabled: bool) -> None:
    """Enable or disable the log messages of this module."""
    _logger.setLevel(logging.DEBUG if enabled else logging.NOTSET)


def get_gil_release() -> bool:
    """Tell whether waits release the GIL: they always do."""
    return True


def set_gil_release(enabled: bool) -> None:
    """Accepted and without effect: waits always release the GIL."""


def set_numa_node(node: int) -> int:
    """Return 0, because loads place their own threads."""
    return 0


def cpu_malloc(size: int) -> int:
    """Address of `size` bytes, page-aligned; free it with cpu_free."""
    return _allocations.add(size)


def cpu_free(address: int) -> None:
    """Free memory from cpu_malloc; unknown addresses are ignored."""
    _allocations.drop(address)


def gpu_malloc(size: int) -> int:
    """Raise RuntimeError, because device memory comes from the framework."""
    raise RuntimeError("gds: this shim can't allocate GPU memory. Allocate with the framework")


def gpu_free(address: int) -> None:
    """Raise RuntimeError, as gpu_malloc does."""
    raise RuntimeError("gds: this shim can't free GPU memory. Free with the framework")


def read_buffer(address: int, size: int) -> bytes:
    """Copy `size` bytes from an address."""
    return ctypes.string_at(address, size)


class cpp_metrics:  # noqa: N801  0.5's name
    """Counters of the readers of this module."""

    bounce_buffer_bytes = 0  # reads go directly to their destination


def get_cpp_metrics() -> cpp_metrics:
    """Counters; there are no bounce buffers."""
    return cpp_metrics()


class gds_device_buffer:  # noqa: N801
    """A range of memory as the target of reads. Does not own it."""

    def __init__(self, base_address: int, length: int, use_cuda: bool) -> None:
        """Store address and length. RuntimeError for device memory."""
        if use_cuda:
            raise RuntimeError("gds: this shim only reads to CPU memory. Use the loaders")
        self._base, self._length = base_address, length

    def get_base_address(self) -> int:
        """Address of the first byte."""
        return self._base

    def get_length(self) -> int:
        """Bytes."""
        return self._length

    def cufile_register(self, offset: int, length: int) -> int:
        """Return 0, because CPU memory needs no registration."""
        return 0

    def cufile_deregister(self, offset: int) -> int:
        """Return 0."""
        return 0

    def memmove(
        self, dst_offset: int, src_offset: int, tmp: gds_device_buffer, length: int
    ) -> int:
        """Move bytes inside the buffer, overlapping or not: 0, or -1 for a bad range."""
        bad = min(dst_offset, src_offset, length) < 0 or length > tmp.get_length()
        if bad or max(dst_offset, src_offset) + length > self._length:
            _logger.error(
                "gds_device_buffer.memmove: %d bytes do not fit in %d of tmp and %d of the buffer",
                length, tmp.get_length(), self._length,
            )
            return -1
        ctypes.memmove(self._base + dst_offset, self._base + src_offset, length)
        return 0


class gds_file_handle:  # noqa: N801
    """An open file, closed when garbage-collected."""

    def __init__(self, path: str, o_direct: bool, use_cuda: bool) -> None:
        """Open for reading. RuntimeError with the system's error."""
        self._fd = -1
        try:
            # Always through the page cache, because ranges may be unaligned.
            self._fd = open_regular(path)
        except OSError as error:
            raise RuntimeError(
                f"gds_file_handle: open {printable(path)} returned an error = {error.errno}"
            ) from error

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def __del__(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _read_block(fd: int, offset: int, address: int, length: int) -> int:
    """Bytes read, fewer at the end of the file."""
    memory = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
    done = 0
    while done < length:
        count = os.preadv(fd, [memory[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


class _Reader:
    """Reads on threads; each read has a number."""

    def __init__(self, max_threads: int) -> None:
        if max_threads <= 0:
            raise ValueError("max_threads must be positive")
        self._pool = ThreadPoolExecutor(max_threads, "fastsafetensors-cpp")
        self._lock = threading.Lock()
        self._next = 1
        self._waiting: dict[int, tuple[list[Future[int]], int, int, int]] = {}

    def __del__(self) -> None:
        """Wait for running reads, which write to memory that may be freed next."""
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.shutdown(wait=True)

    def _submit(self, fd: int, dst: gds_device_buffer, offset: int, length: int, at: int) -> int:
        if min(offset, length, at) < 0 or at + length > dst.get_length():
            raise ValueError(f"{length} bytes at {at} do not fit in {dst.get_length()}")
        base = dst.get_base_address() + at
        parts = [
            self._pool.submit(_read_block, fd, offset + i, base + i, min(_BLOCK, length - i))
            for i in range(0, length, _BLOCK)
        ]
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._waiting[number] = (parts, length, base, offset)
        return number

    def _wait(self, number: int) -> tuple[int, int]:
        """(bytes read, address) of a read; 0 bytes if it failed or the file is too short."""
        with self._lock:
            if number not in self._waiting:
                raise IndexError(f"unknown read number {number}")
            parts, length, base, offset = self._waiting.pop(number)
        try:
            count = sum(part.result() for part in parts)
        except OSError as error:
            _logger.error("read of %d bytes at %d failed: %s", length, offset, printable(error))
            return 0, base
        if count < length:
            _logger.error("short read: %d of %d bytes at %d", count, length, offset)
            return 0, base
        return count, base


class nogds_file_reader(_Reader):  # noqa: N801
    """Reads from descriptors."""

    def __init__(
        self, use_mmap: bool, bbuf_size_kb: int, max_threads: int, use_cuda: bool,
        device_id: int, numa_node: int = -1,
    ) -> None:
        """Start with at most max_threads threads."""
        super().__init__(max_threads)

    def submit_read(
        self, fd: int, dst: gds_device_buffer, offset: int, length: int, ptr_off: int,
        track_progress: bool = False,
    ) -> int:
        """Start reading `length` bytes of the file at `offset` to dst + ptr_off; return its
        number.
        """
        return self._submit(fd, dst, offset, length, ptr_off)

    def wait_read(self, request: int) -> int:
        """Address of the bytes, 0 if they could not be read completely."""
        count, address = self._wait(request)
        return address if count else 0


class gds_file_reader(_Reader):  # noqa: N801
    """Reads from file handles."""

    def __init__(
        self, max_threads: int, use_cuda: bool, device_id: int, block_size: int = _BLOCK,
        numa_node: int = -1,
    ) -> None:
        """Start with at most max_threads threads."""
        super().__init__(max_threads)
        self._files: dict[int, gds_file_handle] = {}

    def submit_read(
        self, fh: gds_file_handle, dst: gds_device_buffer, offset: int, length: int, ptr_off: int,
        file_length: int, track_progress: bool = False,
    ) -> int:
        """Start reading to dst + ptr_off, at most to the end of the file; return its number."""
        number = self._submit(fh.fileno(), dst, offset, min(length, file_length - offset), ptr_off)
        self._files[number] = fh  # stays open until the read ends
        return number

    def wait_read(self, request: int) -> int:
        """Bytes read, 0 if it failed."""
        try:
            return self._wait(request)[0]
        finally:
            self._files.pop(request, None)
