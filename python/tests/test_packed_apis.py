# SPDX-License-Identifier: Apache-2.0
"""Compressed files through every interface: the same tensors as from the plain file."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
from contextlib import closing
from typing import Any

import pytest
from conftest import zstd_or_skip
from web_server import web_server

torch = pytest.importorskip("torch")
zstd_or_skip()

from fastsafetensors import (  # noqa: E402
    ParallelLoader,
    SafeTensorsFileLoader,
    _core,
    fastsafe_open,
    remote,
    safe_open,
)
from fastsafetensors._engine_weights import EngineOptions, iterate  # noqa: E402
from fastsafetensors.lazy import LazyModel  # noqa: E402
from fastsafetensors.sharded import load_sharded  # noqa: E402
from fastsafetensors.torch import load_file, load_model, open_stream, save_file  # noqa: E402

Tensors = dict[str, Any]
ROWS = 900
OPTIONS = EngineOptions(mode="load", progress=False)


def weights(first: int) -> Tensors:
    """Two layers, numbered from `first`, that shrink, and an integer tensor that does not."""
    torch.manual_seed(first)
    made: Tensors = {}
    for i in range(first, first + 2):
        made[f"layers.{i}.w"] = (torch.randn(ROWS, 601) * 0.02).bfloat16()
        made[f"layers.{i}.h"] = (torch.randn(301, 400) * 0.1).half()
    made[f"ids.{first}"] = torch.randint(1 << 62, (3000,))
    return made


def raw(tensor: Any) -> bytes:
    """A tensor's bytes."""
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def same(one: Tensors, other: Tensors) -> bool:
    """Whether names, dtypes, shapes and bytes agree."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and raw(one[name]) == raw(other[name])
        for name in one
    )


@pytest.fixture(name="folder", scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A set whose first shard is compressed and whose second is plain, with an index."""
    folder = tmp_path_factory.mktemp("mixed")
    shards = {}
    for number in range(2):
        name = f"{number}.safetensors"
        save_file(weights(2 * number), folder / name, compress=number == 0)
        shards |= dict.fromkeys(weights(2 * number), name)
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = [(folder / f"{number}.safetensors").stat().st_size for number in range(2)]
    assert sizes[0] < 0.85 * sizes[1]
    return folder


@pytest.fixture(name="packed", scope="module")
def find_packed(folder: pathlib.Path) -> str:
    """Return the compressed file of a folder."""
    return str(folder / "0.safetensors")


class Layers(torch.nn.Module):  # type: ignore[name-defined, misc]
    """A module whose parameters have the names of weights(0)."""

    def __init__(self) -> None:
        """Zeros everywhere."""
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
        for layer in self.layers:
            layer.w = torch.nn.Parameter(torch.zeros(ROWS, 601, dtype=torch.bfloat16))
            layer.h = torch.nn.Parameter(torch.zeros(301, 400, dtype=torch.float16))
        self.ids = torch.nn.Module()
        self.ids.register_buffer("0", torch.zeros(3000, dtype=torch.int64))


def test_sets_of_compressed_and_plain_files(folder: pathlib.Path) -> None:
    """The index has the original names. Complete tensors and slices load, twice in a row."""
    index = folder / "model.safetensors.index.json"
    for _ in range(2):
        assert same(load_file(index), weights(0) | weights(2))
    with safe_open(index, "pt") as file:
        for name, tensor in (weights(0) | weights(2)).items():
            assert raw(file.get_slice(name)[1:-1]) == raw(tensor[1:-1])


@pytest.mark.parametrize("engine", ["pread", "direct", "uring", "mmap"])
def test_every_engine_decodes_or_says_why_not(packed: str, engine: Any) -> None:
    """Engines that cannot read compressed files raise an error with the file's name. All others
    return the same bytes."""
    try:
        assert same(load_file(packed, mode="load", engine=engine), weights(0))
    except RuntimeError as error:
        assert engine != "pread" and "compressed" in str(error) and packed in str(error), error


def test_plugins_take_whole_tensors_and_parts(folder: pathlib.Path) -> None:
    """The plug-ins of vLLM and SGLang load complete tensors and parts, also in a reload."""
    paths = [str(folder / f"{number}.safetensors") for number in range(2)]
    wanted = weights(0) | weights(2)
    for _ in range(2):
        got = {}
        for name, tensor in iterate(paths, OPTIONS, logging.getLogger("packed"), device="cpu"):
            half = len(wanted[name]) // 2
            got[name] = torch.empty_like(wanted[name][half:]).copy_(tensor[half:])
        assert same(got, {name: tensor[len(tensor) // 2 :] for name, tensor in wanted.items()})
        whole = iterate(paths, OPTIONS, logging.getLogger("packed"), device="cpu")
        assert same({name: tensor.clone() for name, tensor in whole}, wanted)


def test_lazy_tensors_read_their_chunks(packed: str) -> None:
    """Rows, columns and conversions of tensors that read when they are used."""
    for _ in range(2):
        with LazyModel([packed]) as model:
            lazy = dict(model)
            for name, tensor in weights(0).items():
                if tensor.dim() == 2:
                    assert raw(lazy[name][5:9].clone()) == raw(tensor[5:9])
                    assert raw(lazy[name][:, 7:90].clone()) == raw(tensor[:, 7:90])
                    assert raw(lazy[name].float()) == raw(tensor.float())
                assert raw(lazy[name].clone()) == raw(tensor)


def test_modules_take_all_or_what_changed(packed: str) -> None:
    """load_model() fills modules, with and without changed=."""
    module = Layers()
    load_model(module, packed)
    assert same(module.state_dict(), weights(0))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    load_model(module, packed, changed=["layers.1.w"])
    wanted = weights(0)
    now = module.state_dict()
    assert raw(now["layers.1.w"]) == raw(wanted["layers.1.w"])
    assert not now["layers.0.w"].any() and not now["layers.1.h"].any()


def test_loaders_of_05(folder: pathlib.Path, packed: str) -> None:
    """The interface of 0.5: fastsafe_open, files of ranks, batches within a budget."""
    paths = [str(folder / f"{number}.safetensors") for number in range(2)]
    wanted = weights(0) | weights(2)
    with fastsafe_open(packed, nogds=True, device="cpu") as file:
        assert same({name: file.get_tensor(name).clone() for name in file.keys()}, weights(0))
    with closing(SafeTensorsFileLoader(None, "cpu", nogds=True)) as loader:
        loader.add_filenames({0: paths})
        buffer = loader.copy_files_to_device()
        assert same({name: buffer.get_tensor(name).clone() for name in wanted}, wanted)
        assert raw(buffer.get_sharded("layers.0.w", 0)) == raw(wanted["layers.0.w"])
        buffer.close()
    for options in ({}, {"max_batch_bytes": 3 << 20}, {"device_memory_budget": 16 << 20}):
        batches = ParallelLoader(None, paths, use_tqdm_on_load=False, **options)
        assert same({name: tensor.clone() for name, tensor in batches.iterate_weights()}, wanted)


RANK = textwrap.dedent("""
    import os, sys
    import torch
    import torch.distributed as dist
    from fastsafetensors.sharded import load_sharded

    folder, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    expected = torch.load(f"{folder}/expected.pt")
    dims = {name: number % 3 if tensor.dim() > number % 3 else None
            for number, (name, tensor) in enumerate(expected.items())}
    raw = lambda tensor: bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    for strategy in ("slice", "broadcast", "scatter", "auto"):
        got = load_sharded(f"{folder}/m.safetensors", dims, dist.group.WORLD, strategy=strategy)
        for name, tensor in expected.items():
            dim = dims[name]
            if dim is not None:
                block = -(-tensor.shape[dim] // size)
                begin = min(rank * block, tensor.shape[dim])
                tensor = tensor.narrow(dim, begin, min(block, tensor.shape[dim] - begin))
            assert got[name].dtype == tensor.dtype, (strategy, name)
            assert raw(got[name]) == raw(tensor), (strategy, name)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
""")


def test_ranks_get_their_parts(tmp_path: pathlib.Path) -> None:
    """Two gloo ranks, every method of sharing the reads."""
    from test_rank_faults import run_ranks

    save_file(weights(0), tmp_path / "m.safetensors", compress=True)
    torch.save(weights(0), tmp_path / "expected.pt")
    run_ranks(RANK, tmp_path, 2)
    alone = load_sharded(tmp_path / "m.safetensors", {"layers.0.w": 1})
    assert raw(alone["layers.0.w"]) == raw(weights(0)["layers.0.w"])


def test_urls_and_the_disk_cache(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A compressed object needs fewer bytes from the server than its tensors have, and none with a
    filled cache."""
    stored = (folder / "0.safetensors").stat().st_size
    wanted = weights(0)
    try:
        with web_server(folder) as server:
            remote.configure(retry_base_ms=2)
            assert same(load_file(server.url + "0.safetensors"), wanted)
            assert server.sent_bytes <= stored + (64 << 10)
            sent = server.sent_bytes
            with safe_open(server.url + "0.safetensors", "pt") as file:
                assert raw(file.get_slice("layers.1.w")[:30]) == raw(wanted["layers.1.w"][:30])
            assert server.sent_bytes - sent < stored // 3
            index = server.url + "model.safetensors.index.json"
            assert same(load_file(index), wanted | weights(2))
            remote.configure(cache_dir=tmp_path / "cache", retry_base_ms=2)
            assert same(load_file(server.url + "0.safetensors"), wanted)
            sent = server.sent_bytes
            assert same(load_file(server.url + "0.safetensors"), wanted)
            assert server.sent_bytes == sent
    finally:
        remote.configure()


@pytest.mark.parametrize("verify", [False, True])
def test_small_tensors_are_read_together(tmp_path: pathlib.Path, verify: bool) -> None:
    """One read for many of them, and each digested piece of the file once by a thread."""
    path = tmp_path / "m.safetensors"
    torch.manual_seed(1)
    made = {f"l{i:03}": torch.randn(64, 256).bfloat16() for i in range(200)}
    made |= {f"l{i:03}.bias": torch.randn(64) for i in range(200)}  # too small to be compressed
    save_file(made, path, compress=True, manifest=True)
    with open_stream(path, mode="load", threads=1, verify=verify) as stream:
        assert same(dict(stream), made)
    size, stats = path.stat().st_size, stream.stats
    assert stats["stored_bytes"] <= size + (1 << 20)
    assert stats["verified_bytes"] == (stats["stored_bytes"] if verify else 0)
    assert (stats["digest_ns"] > 0) == verify
    with web_server(tmp_path) as server:
        with open_stream(server.url + "m.safetensors", threads=1, verify=verify) as stream:
            assert same(dict(stream), made)
        assert len(server.log) <= 20


def test_verified_pieces_are_read_once(tmp_path: pathlib.Path) -> None:
    """Also where compressed tensors alternate with uncompressed ones of more than 256 KiB."""
    path = tmp_path / "m.safetensors"
    torch.manual_seed(1)
    made = {f"w{i:02}": torch.randint(0, 65536, (132 << 10,)).to(torch.uint16).view(torch.bfloat16)
            if i % 2 else torch.randn(40_000).bfloat16() for i in range(40)}
    save_file(made, path, compress=True, manifest=True)
    with open_stream(path, mode="load", threads=1, verify=True) as stream:
        assert same(dict(stream), made)
    size, stats = path.stat().st_size, stream.stats
    assert stats["verified_bytes"] == stats["stored_bytes"] <= size + (2 << 20)


def test_budgets_count_what_threads_decompress_with(packed: str) -> None:
    """Streaming within a budget. If it is too small for a decoder, the error has both sizes."""
    with closing(_core.Model(packed)) as model:
        with closing(model.load(mode="load", budget=8 << 20)) as loader:
            assert sum(1 for _ in loader) == len(weights(0))
            stats = loader.stats()
            assert 4 << 20 < stats["buffer_bytes_peak"] <= 8 << 20
        with pytest.raises(ValueError, match="threads that decompress 4[0-9]{6} more"):
            model.load(mode="load", budget=2 << 20)


def test_rows_of_two_files_interleaved(tmp_path: pathlib.Path) -> None:
    """A decoded chunk that is kept for one file is not used for another file, even if that has
    replaced it at the same path."""
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    held = [weights(0)["layers.0.w"], weights(2)["layers.2.w"]]
    for path, tensor in zip(paths, held, strict=True):
        save_file({"w": tensor}, path, compress=True)
    with safe_open(paths[0], "pt") as one, safe_open(paths[1], "pt") as other:
        for row in range(0, ROWS - 100, 50):
            for file, tensor in ((one, held[0]), (other, held[1])):
                assert raw(file.get_slice("w")[row : row + 50]) == raw(tensor[row : row + 50])
        for turn in range(4):  # the first stays open, so that decoder workspaces are kept
            with safe_open(paths[turn % 2], "pt") as file:
                assert raw(file.get_slice("w")[3:50]) == raw(held[turn % 2][3:50])


def test_ctrl_c_ends_a_load(packed: str) -> None:
    """Ctrl-C in a progress callback raises KeyboardInterrupt. No thread remains, and the next load
    works."""
    code = f"""
import os, signal, threading
from fastsafetensors.torch import load_file
before = len(os.listdir("/proc/self/task"))
try:
    load_file({packed!r}, mode="load", progress=lambda *n: os.kill(os.getpid(), signal.SIGINT))
    print("ended")
except KeyboardInterrupt:
    print("interrupted", len(os.listdir("/proc/self/task")) <= before + 1)
print(len(load_file({packed!r}, mode="load")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["interrupted", "True", "5"], done.stdout + done.stderr


def become_other_user() -> None:
    """Change to another user, because root passes all permission checks."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def test_without_root(command: str, packed: str) -> None:
    """A user who only owns the folder compresses, reads and decompresses the file."""
    with tempfile.TemporaryDirectory() as name:
        place = pathlib.Path(name)
        place.chmod(0o777)
        shutil.copy(packed, place / "m.safetensors")
        (place / "m.safetensors").chmod(0o444)
        for words in (
            ["convert", "--decompress", "m.safetensors", "plain.safetensors"],
            ["convert", "--compress", "plain.safetensors", "again.safetensors"],
            ["verify", "again.safetensors"],
            ["load", "again.safetensors"],
        ):
            done = subprocess.run([command, *words], cwd=place, capture_output=True, text=True,
                                  preexec_fn=become_other_user, timeout=600)
            assert done.returncode == 0, (words, done.stderr)
        assert same(load_file(place / "again.safetensors"), weights(0))
        assert (place / "again.safetensors").stat().st_size < 0.9 * (
            place / "plain.safetensors").stat().st_size
