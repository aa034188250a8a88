# SPDX-License-Identifier: Apache-2.0
"""The files that gpu_check.py loads, and the speed of their disk."""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import struct
import time
from concurrent.futures import ThreadPoolExecutor

MIB = 1 << 20


def write_model(path: pathlib.Path, sizes: list[int], first: int = 0) -> None:
    """Write a file of BF16 tensors of these sizes, even numbers of random bytes."""
    begin, rows = 0, {}
    for number, size in enumerate(sizes, first):
        rows[f"layers.{number}.weight"] = {
            "dtype": "BF16", "shape": [size // 2], "data_offsets": [begin, begin + size]}
        begin += size
    header = json.dumps(rows).encode()
    header += b" " * (-len(header) % 8)
    block = os.urandom(8 * MIB)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        left = begin
        while left > 0:
            left -= file.write(block[:left])
        file.flush()
        if "/dev/shm" not in os.fspath(path):
            os.fsync(file.fileno())


def write_shards(folder: pathlib.Path, count: int, sizes: list[int]) -> None:
    """A model of `count` files of these sizes each."""
    folder.mkdir()
    for number in range(count):
        write_model(folder / f"model-{number + 1:05}-of-{count:05}.safetensors", sizes,
                    number * len(sizes))


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of a model."""
    return sorted(path.iterdir()) if path.is_dir() else [path]


def prepare(path: pathlib.Path, state: str) -> None:
    """Bring the model's files into the page cache, or out of it."""
    for one in files_of(path):
        with open(one, "rb") as file:
            if state == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while state != "cold" and file.read(16 * MIB):
                pass


def measure_disk(path: pathlib.Path) -> float:
    """GB/s of direct reads, 8 at a time."""
    size = path.stat().st_size
    prepare(path, "cold")

    def read(part: int) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, 8 * MIB)
        for at in range(part * 8 * MIB, size - 8 * MIB, 64 * MIB):
            os.preadv(fd, [buffer], at)
        os.close(fd)

    start = time.perf_counter()
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(8)))
    except OSError:
        return 0.0
    return size / (time.perf_counter() - start) / 1e9
