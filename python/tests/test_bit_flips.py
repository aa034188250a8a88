# SPDX-License-Identifier: Apache-2.0
"""Flipped bits in verified models: no load and no check accepts one."""

import json
import pathlib
import random
import subprocess

import pytest
import torch
from test_sign import make_keys, run

from fastsafetensors import SafetensorError, SignedBy, safe_open, write_manifest
from fastsafetensors import numpy as fast_numpy
from fastsafetensors import torch as fast_torch

COUNT = 300


@pytest.fixture()
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A model of a few chunks, with a manifest that can be signed."""
    path = tmp_path / "folder" / "model.safetensors"
    path.parent.mkdir()
    fast_torch.save_file({f"t{i}": torch.arange(90000.0) + i for i in range(8)}, path)
    write_manifest(path, algorithm="blake3")
    return path


def flip(path: pathlib.Path, bit: int) -> None:
    """Change one bit in place."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def chosen(begin: int, end: int, count: int = COUNT) -> list[int]:
    """Positions of bits in the bytes [begin, end): the first, the last, and some in between."""
    bits = range(8 * begin, 8 * end)
    some = random.Random(begin + end).sample(bits, min(count, len(bits)))
    return [bits[0], bits[-1], *some]


def data_begin(path: pathlib.Path) -> int:
    """Where the header ends."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_flips_of_a_file(model: pathlib.Path) -> None:
    """Flip bits of header and data, and load by every API. Tensors in other chunks still load."""
    header, size = data_begin(model), model.stat().st_size
    for number, bit in enumerate([*chosen(0, header), *chosen(header, size)]):
        flip(model, bit)
        with pytest.raises(SafetensorError) as caught:
            if number % 3 == 0:
                fast_torch.load_file(model, verify=True)
            elif number % 3 == 1:
                fast_numpy.load_file(model, verify=True)
            else:
                with safe_open(model, "pt", verify=True) as file:
                    for name in list(file.keys()):
                        file.get_tensor(name)
        assert caught.value.tag == "DigestMismatch", (bit, caught.value)
        flip(model, bit)
    assert len(fast_torch.load_file(model, verify=True)) == 8


def test_flips_of_a_manifest(model: pathlib.Path) -> None:
    """A manifest with a flipped bit is rejected, whatever its text means."""
    manifest = model.with_name("model.safetensors.manifest")
    for bit in chosen(0, manifest.stat().st_size):
        flip(manifest, bit)
        with pytest.raises(SafetensorError):
            fast_torch.load_file(model, verify=True)
        flip(manifest, bit)
    assert len(fast_torch.load_file(model, verify=True)) == 8


def test_flips_of_a_bundle(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A flipped bit in statement, signature or key hint is an error before any tensor is loaded."""
    private, public = make_keys(tmp_path, "prime256v1")
    assert run("sign", "--private-key", private, model.parent).returncode == 0
    bundle = model.with_name("model.sig")
    text = bundle.read_bytes()
    fields = json.loads(text)
    for part in (fields["dsseEnvelope"]["payload"],
                 fields["dsseEnvelope"]["signatures"][0]["sig"],
                 fields["verificationMaterial"]["publicKey"]["hint"]):
        begin = text.index(part.encode())
        for bit in chosen(begin, begin + len(part)):
            flip(bundle, bit)
            with pytest.raises(SafetensorError):
                fast_torch.load_file(model, verify=SignedBy(public))
            flip(bundle, bit)
    assert len(fast_torch.load_file(model, verify=SignedBy(public))) == 8


def test_flips_by_the_command(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The command exits with 1 for a flipped bit, with a manifest, a checksum list and a
    signature."""
    private, public = make_keys(tmp_path, "prime256v1")
    assert run("hash", "--sums", "--output", tmp_path / "sums", model.parent).returncode == 0
    assert run("sign", "--private-key", private, model.parent).returncode == 0
    checks: list[tuple[object, ...]] = [
        ("verify", "--manifest", model),
        ("verify", f"--manifest={tmp_path / 'sums'}", model.parent),
        ("verify", "--signature", model.with_name("model.sig"), "--public-key", public,
         model.parent)]
    header, size = data_begin(model), model.stat().st_size
    for number, bit in enumerate([*chosen(0, header, 100), *chosen(header, size, 100)]):
        flip(model, bit)
        done: subprocess.CompletedProcess[str] = run(*checks[number % len(checks)])
        assert done.returncode == 1, (bit, done)
        flip(model, bit)
    for check in checks:
        assert run(*check).returncode == 0, check
