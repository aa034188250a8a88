# SPDX-License-Identifier: Apache-2.0
"""SHA-256 lists: sha256sum accepts ours, and we accept its lists."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess

import pytest
import torch

from fastsafetensors import SafetensorError, check_manifest, safe_open
from fastsafetensors import torch as fast_torch
from fastsafetensors._base.command import find_command

ODD_NAMES = ("back\\slash", "new\nline", "ret\rurn", "sp ace", "*star", "é", "#1")


def run(*arguments: object, cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = find_command()
    assert command is not None
    return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True, cwd=cwd)


def sha256sum(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run sha256sum in a folder."""
    if shutil.which("sha256sum") is None:
        pytest.skip("the sha256sum command is not installed")
    return subprocess.run(["sha256sum", *arguments], capture_output=True, text=True, cwd=folder)


@pytest.fixture()
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A model's folder, and files whose names a list has to escape."""
    path = tmp_path / "model"
    path.mkdir()
    fast_torch.save_file({"a": torch.arange(70000.0)}, path / "model.safetensors")
    for number, name in enumerate(ODD_NAMES):
        (path / name).write_text(f"words {number}")
    return path


def check(folder: pathlib.Path, sums: pathlib.Path) -> tuple[int, list[str]]:
    """The exit code of a check, and the files that it reports."""
    done = run("verify", "--json", f"--manifest={sums}", folder)
    return done.returncode, [row["file"] for row in json.loads(done.stdout)["errors"]]


def test_sha256sum_reads_written_lists(folder: pathlib.Path) -> None:
    """sha256sum accepts our lists of a folder and of a file with any name. A list does not contain
    itself."""
    for _ in range(2):
        done = run("hash", "--json", "--sums", folder)
        assert json.loads(done.stdout)["files"] == 1 + len(ODD_NAMES), done
        done = sha256sum(folder, "-c", "--strict", "SHA256SUMS")
        assert done.returncode == 0 and done.stdout.count("OK") == 1 + len(ODD_NAMES), done
    assert run("hash", "--sums", "model.safetensors", cwd=folder).returncode == 0
    assert sha256sum(folder, "-c", "--strict", "model.safetensors.sha256").returncode == 0
    done = run("hash", "--sums", "--algorithm", "sha256", "--output", folder / "other", folder)
    assert done.returncode == 0 and sha256sum(folder, "-c", "--strict", "other").returncode == 0


@pytest.mark.parametrize("options", [(), ("--binary",), ("--tag",)])
def test_lists_of_sha256sum_are_read(options: tuple[str, ...], folder: pathlib.Path,
                                      tmp_path: pathlib.Path) -> None:
    """We accept both formats and the binary mark. All files are read, and each difference is
    reported."""
    names = ["./model.safetensors", *(f"./{name}" for name in ODD_NAMES)]
    sums = tmp_path / "sums.txt"
    sums.write_text("# a comment\n" + sha256sum(folder, *options, *names).stdout, newline="")
    assert check(folder, sums) == (0, [])
    assert check(folder / "model.safetensors", sums) == (0, [])
    assert check_manifest(folder, sums) == []
    (folder / "new\nline").write_text("other")
    os.remove(folder / "back\\slash")
    fast_torch.save_file({"b": torch.arange(7.0)}, folder / "more.safetensors")
    code, told = check(folder, sums)
    assert code == 1 and sorted(told) == ["back\\slash", "more.safetensors", "new\nline"]


def test_endings_and_letters(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Upper-case digits, Windows line ends and a missing last line end are accepted. A flipped bit
    is found."""
    path = folder / "model.safetensors"
    digest = hashlib.sha256(path.read_bytes()).hexdigest().upper()
    sums = tmp_path / "sums.txt"
    sums.write_bytes(f"{digest}  model.safetensors\r\n\r\n{digest} *model.safetensors".encode())
    assert check(folder, sums) == (0, [])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert check(folder, sums)[0] == 1


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a\0b", "", "a\\tb"])
def test_lists_that_are_refused(name: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Names outside of the folder, and lines that sha256sum does not write, are errors."""
    sums = tmp_path / "sums.txt"
    start = "\\" if "\\" in name else ""
    digest = "0" * 64
    sums.write_text(f"{digest}  model.safetensors\n{start}{digest}  {name}\n")
    done = run("verify", f"--manifest={sums}", folder)
    assert done.returncode == 1 and "inside the folder" in done.stderr, done
    assert run("verify", f"--manifest={tmp_path / 'none'}", folder).returncode == 2


def test_two_digests_of_one_file(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two different digests of a file are an error."""
    sums = tmp_path / "sums.txt"
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    for other in ("0" * 64 + "  model.safetensors", "0" * 64 + " *./model.safetensors"):
        own = f"{digest}  model.safetensors"
        for lines in ((own, other), (other, own)):
            sums.write_text("\n".join(lines) + "\n")
            done = run("verify", f"--manifest={sums}", folder)
            assert done.returncode == 1 and "two different checksums" in done.stderr, done
            with pytest.raises(SafetensorError, match="two different checksums"):
                safe_open(folder / "model.safetensors", "pt", verify=sums)


def test_options_with_checksum_lists(folder: pathlib.Path) -> None:
    """An option without an effect is an error."""
    for more in (("--tensors",), ("--chunk", "1M"), ("--algorithm", "blake3"), ("--manifest",),
                 ("--keep", "x"), ("--write",)):
        assert run("hash", "--sums", *more, folder).returncode == 3, more


def test_loads_report_checksum_lists(folder: pathlib.Path) -> None:
    """Without a checksum list verify=True is an error; with one it is used."""
    path = folder / "model.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        fast_torch.load_file(path, verify=True)
    assert "hash --manifest" in str(caught.value)
    assert run("hash", "--sums", folder).returncode == 0
    fast_torch.load_file(path, verify=True)
    fast_torch.load_file(path, verify=folder / "SHA256SUMS")
    assert run("verify", "--manifest", folder).returncode == 0
