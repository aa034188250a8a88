# SPDX-License-Identifier: Apache-2.0
"""Compressed files as bytes: in memory, in pipes, and for custom readers."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import stat
import struct
import subprocess
import sys

import pytest
from conftest import zstd_or_skip

torch = pytest.importorskip("torch")
zstd_or_skip()

import fastsafetensors.numpy as fst_numpy  # noqa: E402
import fastsafetensors.torch as fst_torch  # noqa: E402
from fastsafetensors import (  # noqa: E402
    SafeTensorsMetadata,
    changed_tensors,
    read_header,
    write_manifest,
)
from fastsafetensors._saving.serialize import deserialize  # noqa: E402


@pytest.fixture(name="pair", scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """Return the paths of a plain file and its compressed form, with an unnamed tensor and
    incompressible ones."""
    torch.manual_seed(0)
    tensors = {
        "": (torch.randn(40000) * 0.02).bfloat16(),
        "w": (torch.randn(1000, 300) * 0.02).bfloat16(),
        "numbers": torch.arange(30000),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 7),
    }
    folder = tmp_path_factory.mktemp("bytes")
    paths = folder / "plain.safetensors", folder / "packed.safetensors"
    fst_torch.save_file(tensors, paths[0])
    fst_torch.save_file(tensors, paths[1], compress=True)
    assert paths[1].stat().st_size < 0.9 * paths[0].stat().st_size
    return paths


def test_bytes_in_memory_load(pair: tuple[pathlib.Path, pathlib.Path]) -> None:
    """load() of both modules and deserialize() return the same for compressed bytes."""
    plain, packed = (path.read_bytes() for path in pair)
    assert deserialize(packed) == deserialize(plain)
    for module in (fst_torch, fst_numpy):
        one, other = module.load(plain), module.load(packed)
        assert list(one) == list(other) and len(one) == 5
        for name in one:
            wanted, got = (tensors[name].reshape(-1).view(torch.uint8 if module is fst_torch
                                                          else "u1") for tensors in (one, other))
            assert bytes(memoryview(wanted.numpy() if module is fst_torch else wanted)) == bytes(
                memoryview(got.numpy() if module is fst_torch else got))
    own = fst_torch.load(packed)["w"]
    own[0] = 0  # the tensors own their memory, so it is writable
    assert fst_torch.load(packed)["w"][0].any()


def test_custom_readers_are_refused(pair: tuple[pathlib.Path, pathlib.Path]) -> None:
    """APIs that give a caller file offsets refuse compressed files, whose bytes are not the
    weights."""
    plain, packed = (SafeTensorsMetadata.from_file(str(path)) for path in pair)
    assert plain.select_byte_ranges(lambda name: True)
    with pytest.raises(RuntimeError, match="is compressed"):
        packed.select_byte_ranges(lambda name: True)
    with pytest.raises(RuntimeError, match="is compressed"):
        packed.get_tensors(None, None, 0)  # type: ignore[arg-type]


def test_header_digests_cover_the_whole_header(tmp_path: pathlib.Path) -> None:
    """Compressed files whose headers only differ near the end have different digests."""
    found = []
    for first in (1, 2):
        path = tmp_path / str(first)
        values = (torch.arange(1 << 16) // 4096 % first).bfloat16()
        others = {f"v{i}": torch.ones(1 << 16, dtype=torch.bfloat16) for i in range(3)}
        fst_torch.save_file({**others, "w": values}, path, compress=True)
        found.append(SafeTensorsMetadata.from_file(str(path)).digest())
    assert found[0] != found[1]


def test_unnamed_tensor_round_trips(
    pair: tuple[pathlib.Path, pathlib.Path], command: str, tmp_path: pathlib.Path
) -> None:
    """A tensor with an empty name is compressed and decompressed like others."""
    stored = json.loads(pair[1].read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert "__packed__." in stored
    back = tmp_path / "back"
    subprocess.run([command, "convert", "--decompress", pair[1], back], check=True,
                   stdout=subprocess.DEVNULL)
    assert back.read_bytes() == pair[0].read_bytes()
    assert sorted(read_header(str(pair[1])).tensors) == ["", "empty", "numbers", "scalar", "w"]


def test_damage_exits_with_1(
    pair: tuple[pathlib.Path, pathlib.Path], command: str, tmp_path: pathlib.Path
) -> None:
    """Damaged data exits with 1 (invalid), like a damaged header, and not with 2 (unreadable)."""
    data = bytearray(pair[1].read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + size])["__packed__.w"]
    data[8 + size + entry["data_offsets"][0] + 3000] ^= 4
    path = tmp_path / "damaged"
    path.write_bytes(data)
    done = subprocess.run([command, "verify", path], capture_output=True, text=True)
    assert done.returncode == 1 and "`w`" in done.stderr


def respace(data: bytes) -> bytes:
    """Rewrite the file's header with other whitespace."""
    (size,) = struct.unpack("<Q", data[:8])
    text = json.dumps(json.loads(data[8 : 8 + size]), separators=(" , ", " : ")).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


@pytest.mark.parametrize("spaced", [False, True])
def test_pipes_are_read_as_files_are(
    pair: tuple[pathlib.Path, pathlib.Path], command: str, tmp_path: pathlib.Path, spaced: bool
) -> None:
    """A compressed file from a pipe is valid and decompresses to the original, with a new file's
    permissions."""
    data = pair[1].read_bytes()
    data = respace(data) if spaced else data
    for arguments in (["verify", "-"], ["inspect", "-"]):
        subprocess.run([command, *arguments], input=data, check=True, stdout=subprocess.DEVNULL)
    mask = os.umask(0o022)
    os.umask(mask)
    for option, content in (("--decompress", data), ("--compress", pair[0].read_bytes())):
        target = tmp_path / option
        subprocess.run([command, "convert", option, "-", target], input=content, check=True,
                       stdout=subprocess.DEVNULL)
        assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask
    assert (tmp_path / "--decompress").read_bytes() == pair[0].read_bytes()


def test_digests_of_a_file_are_those_of_its_bytes(
    pair: tuple[pathlib.Path, pathlib.Path], command: str
) -> None:
    """A file's digest is sha256sum's; tensors have the digests of the uncompressed file."""
    lines = []
    for path in pair:
        done = subprocess.run([command, "hash", "--algorithm", "sha256", path], check=True,
                              capture_output=True, text=True)
        *tensors, file = done.stdout.splitlines()[1:]
        lines.append(tensors)
        assert file.split()[1] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert lines[0] == lines[1] and len(lines[0]) == 5


def test_verify_decodes_large_tensors_in_pieces(command: str, tmp_path: pathlib.Path) -> None:
    """Verifying a tensor of 256 MiB takes less than three quarters of its size in memory."""
    path = tmp_path / "large.safetensors"
    values = (torch.randn(1 << 20) * 0.02).bfloat16().repeat(128).reshape(-1, 4096)
    fst_torch.save_file({"w": values}, path, compress=True)
    # A child process starts with the peak memory of its parent. So a small process starts it.
    count = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
             "stdout=subprocess.DEVNULL); "
             "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    done = subprocess.run([sys.executable, "-c", count, command, "verify", path],
                          capture_output=True, text=True, check=True)
    assert int(done.stdout) << 10 < values.nbytes // 4 * 3


@pytest.mark.parametrize("listed", [False, True])
def test_changed_tensors_uses_only_the_given_file(
    tmp_path: pathlib.Path, listed: bool
) -> None:
    """Manifests describe stored bytes: a changed tensor is reported, wherever it is stored."""
    path, old = tmp_path / "model.safetensors", tmp_path / "old"
    torch.manual_seed(0)
    weights = (torch.randn(3_000_000) * 0.02).bfloat16()
    numbers = torch.arange(1_000_000)

    def changed(weights: torch.Tensor, numbers: torch.Tensor) -> list[str]:
        fst_torch.save_file({"w": weights, "i": numbers}, path, compress=True)
        write_manifest(path, tensors=listed)
        if not old.exists():
            old.write_bytes(path.with_name(f"{path.name}.manifest").read_bytes())
        names = changed_tensors(path, old)
        path.with_name(f"{path.name}.manifest").unlink()
        return names

    assert changed(weights, numbers) == []
    assert changed(weights, numbers + 1) == (["i"] if listed else ["i", "w"])
    swapped = weights.clone()
    swapped[-2:] = weights[[-1, -2]]
    assert changed(swapped, numbers) == (["w"] if listed else ["i", "w"])
