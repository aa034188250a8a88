# SPDX-License-Identifier: Apache-2.0
"""Untrusted environment variables and libraries do not affect the library."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from fake_gpu import fakes_folder


def test_libraries_in_the_working_folder_are_not_loaded(command, tmp_path):
    """A planted libcuda.so.1 is not loaded from where the program is started."""
    for name in ("libcuda.so.1", "libamdhip64.so", "libcufile.so.0"):
        shutil.copy(os.path.join(fakes_folder(), name), tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run([command, "engines"], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, timeout=600, check=True)
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "Fake GPU" not in done.stdout and "cuda" in rows and "hip" in rows
    planted = {**environment, "LD_LIBRARY_PATH": os.fspath(tmp_path)}
    done = subprocess.run([command, "engines"], cwd=tmp_path, env=planted, text=True,
                          capture_output=True, timeout=600, check=True)
    assert "Fake GPU" in done.stdout  # only the dynamic linker's search path counts


PLANTED = ("torch", "pickle", "fastsafetensors", "numpy", "sys", "argparse", "sitecustomize")


def test_modules_next_to_a_model_are_not_run(command, tmp_path, torch):
    """Converting a downloaded torch file runs no code from its folder."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    torch.save({"a": torch.arange(3.0)}, folder / "pytorch_model.bin")
    for name in PLANTED:
        (folder / name).mkdir()
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            path.write_text(f"open({os.fspath(tmp_path / 'owned')!r}, 'w').close()\n")
    planted = folder / "python3"
    planted.write_text(f"#!/bin/sh\ntouch {tmp_path / 'owned'}\n")
    planted.chmod(0o755)
    python = os.path.dirname(sys.executable)
    usual = f"{python}:/usr/bin:/bin"
    for path, modules in ((usual, None), (f".:{usual}", None), (f":{usual}", None),
                          (usual, "."), (usual, ":/nonexistent"), (usual, "/nonexistent:")):
        environment = {**os.environ, "PATH": path, **({"PYTHONPATH": modules} if modules else {})}
        done = subprocess.run([command, "convert", "pytorch_model.bin", "out"], cwd=folder,
                              env=environment, text=True, capture_output=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "owned").exists()
        (folder / "out").unlink()


def test_missing_torch_is_named(command, tmp_path, torch):
    """Without Python, or with a Python without torch, the exit code is 4 and the message names the
    package to install."""
    torch.save({"a": torch.arange(3.0)}, tmp_path / "old.bin")
    bare = tmp_path / "bin"
    bare.mkdir()
    for words, python in (("no python3", None), ("pip install", "#!/bin/sh\nexec %s -I -S \"$@\"")):
        if python:
            (bare / "python3").write_text(python % sys.executable)
            (bare / "python3").chmod(0o755)
        done = subprocess.run([command, "convert", "old.bin", "new"], cwd=tmp_path, text=True,
                              env={"PATH": os.fspath(bare)}, capture_output=True, timeout=600)
        assert done.returncode == 4 and words in done.stderr, done.stderr


def test_digests_are_not_written_through_planted_links(command, model, tmp_path):
    """A link or a pipe with the name of PATH.digest, or of its temporary file, is not written
    to."""
    path, victim = tmp_path / "m.safetensors", tmp_path / "victim"
    shutil.copy(model[0], path)
    for name in ("m.safetensors.digest", "m.safetensors.digest.new"):
        victim.write_text("mine")
        (tmp_path / name).symlink_to(victim)
        done = subprocess.run([command, "hash", "--write", path], capture_output=True, text=True)
        if done.returncode == 4:
            pytest.skip(done.stderr)
        assert done.returncode == 0 and victim.read_text() == "mine"
        digest = tmp_path / "m.safetensors.digest"
        assert not digest.is_symlink() and digest.read_text().startswith("fastsafetensors-digest")
        left = {entry.name for entry in tmp_path.iterdir()}
        assert left <= {"m.safetensors", "victim", digest.name, name}
        os.unlink(tmp_path / name)
    digest.unlink(missing_ok=True)
    os.mkfifo(digest)
    done = subprocess.run([command, "verify", "--hash", path], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 1 and "no stored digests" in done.stdout
    os.mkfifo(tmp_path / "pipe")
    done = subprocess.run([command, "convert", tmp_path / "pipe", tmp_path / "out"],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "FIFO" in done.stderr


def test_the_c_library_reads_no_environment():
    """The only use of getenv is for URLs, and it ignores the environment of set-user-ID
    programs."""
    if not shutil.which("nm"):
        pytest.skip("no nm")
    path = ROOT / "build/test/src/libfastsafetensors.so"
    path = path if path.exists() else ROOT / "build/release/src/libfastsafetensors.so"
    if not path.exists():
        pytest.skip("the C library is not built")
    symbols = subprocess.run(["nm", "-D", "--undefined-only", path], text=True,
                             capture_output=True, check=True).stdout
    assert "dlopen" in symbols and "environ" not in symbols
    assert {name for name in symbols.split() if "getenv" in name} == {"secure_getenv@GLIBC_2.17"}
