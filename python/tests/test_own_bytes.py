# SPDX-License-Identifier: Apache-2.0
"""What a rank brings into the page cache when it loads its part of a cold model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_slices import cached_bytes

torch = pytest.importorskip("torch")

from fastsafetensors.lazy import LazyModel  # noqa: E402

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def cold(tmp_path: Path) -> Callable[[dict[str, list[int]]], Path]:
    """Make a file of U8 tensors of zeros, none of it in the page cache."""
    def make(shapes: dict[str, list[int]]) -> Path:
        path, end, entries = tmp_path / "model.safetensors", 0, {}
        for name, (rows, columns) in shapes.items():
            begin, end = end, end + rows * columns
            entries[name] = {"dtype": "U8", "shape": [rows, columns], "data_offsets": [begin, end]}
        header = json.dumps(entries).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + end)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(path) > 0:
            pytest.skip("this file system is in memory")
        return path
    return make


LAYERS, EXPERTS = 6, 8
UP = {f"layers.{layer}.experts.{expert}.up": [768, 256]
      for layer in range(LAYERS) for expert in range(EXPERTS)}


def half_of_rows(name: str, tensor: Any) -> Any:
    return tensor.chunk(2, 0)[1]


def every_second_expert(name: str, tensor: Any) -> Any:
    return tensor if int(name.split(".")[3]) % 2 else None


@pytest.mark.parametrize("mode", ["auto", "load"])
@pytest.mark.parametrize("part", [half_of_rows, every_second_expert])
def test_a_rank_reads_its_own_pages(part: Any, mode: str, cold: Any) -> None:
    """Whatever the readahead of the device: the pages of its parts, and the header's."""
    path = cold(UP)
    own = count = 0
    with LazyModel(path, mode=mode) as model:
        for name, tensor in model:
            wanted = part(name, tensor)
            if wanted is not None:
                own += wanted.clone().nbytes
                count += 1
    assert count >= LAYERS * EXPERTS / 2
    # A part begins and ends within a page. Once per load: the header, and one gap.
    assert cached_bytes(path) <= own + count * PAGE + (256 << 10)


def test_narrow_rows_stay_in_the_page_cache(cold: Any) -> None:
    """The other ranks of a host find what a rank had to read of their columns."""
    rows, columns = 4096, 2048
    path = cold({"narrow": [rows, columns], "others": [132 << 10, 1 << 10]})
    with LazyModel(path, ahead=False) as model:
        assert not model["narrow"].chunk(2, 1)[0].clone().any()
    assert cached_bytes(path) >= rows * columns
