# SPDX-License-Identifier: Apache-2.0
"""Signed folders: this package and the model_signing package verify each other's signatures."""

import base64
import json
import os
import pathlib
import pickle
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from fastsafetensors import SafetensorError, SignedBy, safe_open, verifying, write_manifest
from fastsafetensors import numpy as fast_numpy
from fastsafetensors import torch as fast_torch
from fastsafetensors._base.command import find_command


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = find_command()
    assert command is not None
    return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True)


def make_keys(folder: pathlib.Path, curve: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Return the paths of a private and a public key, made by the openssl command."""
    private, public = folder / f"{curve}.key", folder / f"{curve}.pub"
    try:
        subprocess.run(["openssl", "ecparam", "-name", curve, "-genkey", "-noout", "-out",
                        private], check=True, capture_output=True)
        subprocess.run(["openssl", "ec", "-in", private, "-pubout", "-out", public], check=True,
                       capture_output=True)
    except FileNotFoundError:
        pytest.skip("the openssl command, which makes keys, is not installed")
    return private, public


@pytest.fixture()
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A model's folder with a manifest that can be signed."""
    path = tmp_path / "model"
    (path / "below").mkdir(parents=True)
    fast_torch.save_file({"a": torch.arange(70000.0)}, path / "model.safetensors")
    (path / "README.md").write_text("hello")
    (path / "below" / "vocabulary \u00e9.txt").write_text("words")
    (path / ".gitignore").write_text("not signed")
    write_manifest(path, algorithm="sha256")
    return path


@pytest.mark.parametrize("curve", ["prime256v1", "secp384r1", "secp521r1"])
def test_sign_and_verify(curve: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Exit code 0 for a valid folder; 1 for a changed, missing or additional file or a wrong
    key.
    """
    private, public = make_keys(tmp_path, curve)
    signed = run("sign", "--json", "--private-key", private, folder)
    assert json.loads(signed.stdout)["files"] == 4, signed
    ask = ("verify", "--json", "--signature", folder / "model.sig", "--public-key")
    assert run(*ask, public, folder).returncode == 0
    other = make_keys(tmp_path, "secp384r1" if curve == "prime256v1" else "prime256v1")[1]
    wrong = run(*ask, other, folder)
    assert wrong.returncode == 1 and "InvalidSignature" in wrong.stdout
    (folder / "more.txt").write_text("unsigned")
    (folder / "README.md").write_text("jello")
    os.remove(folder / "below" / "vocabulary \u00e9.txt")
    answer = json.loads(run(*ask, public, folder).stdout)
    assert answer["valid"] is False
    assert sorted(row["file"] for row in answer["errors"]) == [
        "README.md", "below/vocabulary \u00e9.txt", "more.txt"]


@pytest.mark.parametrize("curve", ["secp256k1", "brainpoolP384r1"])
def test_other_curves_are_refused(
    curve: str, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Keys have as many bits as the key kinds of model signing."""
    try:
        private, _ = make_keys(tmp_path, curve)
    except subprocess.CalledProcessError:
        pytest.skip(f"this openssl has no {curve}")
    done = run("sign", "--private-key", private, folder)
    assert done.returncode != 0 and "P-256" in done.stderr, done


def test_file_named_like_a_bundle(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Only the bundle itself is not signed."""
    private, public = make_keys(tmp_path, "prime256v1")
    bundle = tmp_path / "signed.sig"
    assert run("sign", "--private-key", private, "--output", bundle, folder).returncode == 0
    ask = ("verify", "--json", "--signature", bundle, "--public-key", public, folder)
    assert run(*ask).returncode == 0
    (folder / "signed.sig").write_text("unsigned")
    answer = json.loads(run(*ask).stdout)
    assert [row["file"] for row in answer["errors"]] == ["signed.sig"]


def test_flipped_bits_of_a_bundle(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Every flipped bit of payload, signature and hint is rejected."""
    private, public = make_keys(tmp_path, "prime256v1")
    assert run("sign", "--private-key", private, folder).returncode == 0
    bundle = folder / "model.sig"
    good = bundle.read_bytes()
    fields = json.loads(good)
    envelope = fields["dsseEnvelope"]
    places = [good.index(text.encode()) + number
              for text in (envelope["payload"], envelope["signatures"][0]["sig"],
                           fields["verificationMaterial"]["publicKey"]["hint"])
              for number in range(0, len(text), 31)]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << place % 7
        bundle.write_bytes(bad)
        done = run("verify", "--signature", bundle, "--public-key", public, folder)
        assert done.returncode == 1, (place, done)
    bundle.write_bytes(good)
    assert run("verify", "--signature", bundle, "--public-key", public, folder).returncode == 0


def test_invalid_bundles_and_keys(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Other files are rejected with their kind."""
    private, public = make_keys(tmp_path, "prime256v1")
    assert run("sign", folder).returncode == 3
    assert run("verify", "--signature", "x", folder).returncode == 3
    assert run("sign", "--private-key", public, folder).returncode == 3
    assert run("sign", "--private-key", folder / "README.md", folder).returncode == 3
    (folder / "model.sig").write_text("{}")
    ask = ("verify", "--signature", folder / "model.sig", "--public-key", public, folder)
    assert run(*ask).returncode == 1
    statement = {"predicateType": "something/else", "padding": "x" * 200}
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    (folder / "model.sig").write_text(json.dumps({"dsseEnvelope": {
        "payload": payload, "payloadType": "application/vnd.in-toto+json",
        "signatures": [{"sig": "AAAA"}]}}))
    assert "model_signing" in run(*ask).stderr  # no key: certificates are that package's


def test_loads_by_key(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Every function with verify= accepts SignedBy(): key, then manifest, then each chunk."""
    private, public = make_keys(tmp_path, "prime256v1")
    other = make_keys(tmp_path, "secp384r1")[1]
    path = folder / "model.safetensors"
    with pytest.raises(FileNotFoundError):
        fast_torch.load_file(path, verify=SignedBy(public))
    assert run("sign", "--private-key", private, folder).returncode == 0
    signed = SignedBy(public)
    assert fast_torch.load_file(path, verify=signed)["a"][7] == 7
    assert fast_numpy.load_file(path, verify=signed)["a"][7] == 7
    assert len(fast_torch.load_file([path], verify=signed)) == 1
    with safe_open(folder, "pt", verify=signed) as file:
        assert file.get_tensor("a")[7] == 7
        assert pickle.loads(pickle.dumps(file)).get_tensor("a")[7] == 7
    with verifying(SignedBy(other)), pytest.raises(SafetensorError, match="a different key"):
        fast_torch.load_file(path)
    (tmp_path / "kept").mkdir()
    elsewhere = shutil.move(folder / "model.sig", tmp_path / "kept" / "model.sig")
    assert fast_torch.load_file(path, verify=SignedBy(str(public), elsewhere))["a"][7] == 7
    write_manifest(folder, algorithm="blake3")  # not the one that was signed
    with pytest.raises(SafetensorError, match="does not cover this manifest") as caught:
        fast_torch.load_file(path, verify=SignedBy(public, elsewhere))
    assert caught.value.tag == "InvalidSignature"


@pytest.fixture(scope="module")
def model_signing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the command of that package, which is installed into a folder of its own."""
    place = tmp_path_factory.mktemp("model_signing")
    try:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", place,
                        "model_signing", "pyOpenSSL"], check=True, capture_output=True, timeout=300)
    except (subprocess.SubprocessError, OSError):
        pytest.skip("model_signing could not be installed")

    def run_theirs(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "model_signing", *map(str, arguments)],
                              capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(place)})

    return run_theirs


@pytest.mark.parametrize("curve", ["prime256v1", "secp384r1", "secp521r1"])
def test_signatures_interoperate_with_model_signing(
        curve: str, folder: pathlib.Path, tmp_path: pathlib.Path,
        model_signing: Run) -> None:
    """The other package verifies our signatures, and the reverse."""
    private, public = make_keys(tmp_path, curve)

    bundle = tmp_path / "bundle.sig"
    assert run("sign", "--private-key", private, "--output", bundle, folder).returncode == 0
    verify = ("verify", "key", folder, "--signature", bundle, "--public_key", public)
    done = model_signing(*verify)
    assert done.returncode == 0, done
    (folder / "README.md").write_text("jello")
    assert model_signing(*verify).returncode != 0
    done = model_signing("sign", "key", folder, "--private_key", private, "--signature", bundle)
    assert done.returncode == 0, done
    ask = ("verify", "--signature", bundle, "--public-key", public, folder)
    assert run(*ask).returncode == 0
    (folder / "README.md").write_text("hello")
    assert run(*ask).returncode == 1


def sign_again(private: pathlib.Path, folder: pathlib.Path, old: pathlib.Path) -> dict[str, int]:
    """The counts of signing a folder again with an older bundle."""
    done = run("sign", "--json", "--private-key", private, "--keep", old, folder)
    assert done.returncode == 0, done
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.fixture()
def settled(folder: pathlib.Path) -> pathlib.Path:
    """A folder whose files have not changed recently: only such files get stamps."""
    time.sleep(4)
    return folder


def test_only_a_changed_readme_is_read_again(
    settled: pathlib.Path, tmp_path: pathlib.Path, model_signing: Run
) -> None:
    """Manifest and bundle are made again, and both reuse the digests of unchanged files."""
    private, public = make_keys(tmp_path, "prime256v1")
    bundle, manifest = settled / "model.sig", settled / "model.manifest"
    assert run("sign", "--private-key", private, settled).returncode == 0
    again = sign_again(private, settled, bundle)
    # and stamps are copied to the new manifest
    assert (again["files"], again["files_kept"], again["bytes"]) == (4, 4, 0)
    assert sign_again(private, settled, bundle)["files_kept"] == 4
    write_manifest(settled, algorithm="sha256")  # with stamps
    (settled / "README.md").write_text("other words")
    made = write_manifest(settled, algorithm="sha256", keep=manifest)
    again = sign_again(private, settled, bundle)
    assert again["bytes"] == manifest.stat().st_size + len("other words")
    assert made.bytes_read == len("other words")
    assert run("verify", "--signature", bundle, "--public-key", public, settled).returncode == 0
    # The stamps are stored in the bundle, in a field that the model_signing package ignores.
    payload = base64.b64decode(json.loads(bundle.read_bytes())["dsseEnvelope"]["payload"])
    assert b'"stamp"' in payload
    done = model_signing("verify", "key", settled, "--signature", bundle, "--public_key", public)
    assert done.returncode == 0, done


def test_touched_files_are_read_again(settled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Bytes changed with the same size and time, a swapped link, a copied folder."""
    private, public = make_keys(tmp_path, "prime256v1")
    model = settled / "model.safetensors"
    other = tmp_path / "other.safetensors"
    shutil.copy2(model, other)
    (settled / "linked.bin").symlink_to(model)
    assert run("sign", "--private-key", private, settled).returncode == 0
    old = shutil.copy(settled / "model.sig", tmp_path / "old.sig")
    # the path of a bundle does not matter
    assert sign_again(private, settled, old)["files_kept"] == 5
    before = model.stat()
    with open(model, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sign_again(private, settled, old)["files_kept"] == 3  # neither it nor the link to it
    ask = ("verify", "--signature", settled / "model.sig", "--public-key", public)
    assert run(*ask, settled).returncode == 0
    (settled / "linked.bin").unlink()
    (settled / "linked.bin").symlink_to(other)
    assert sign_again(private, settled, old)["files_kept"] == 3
    assert run(*ask, settled).returncode == 0
    copied = shutil.copytree(settled, tmp_path / "copied", symlinks=True)
    assert sign_again(private, copied, old)["files_kept"] == 0
    assert run("verify", "--signature", copied / "model.sig", "--public-key", public, copied
               ).returncode == 0


def test_only_a_valid_bundle_is_reused(settled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A bundle with another key or a flipped bit is not reused: it is an error."""
    private, _ = make_keys(tmp_path, "prime256v1")
    other, _ = make_keys(tmp_path, "secp384r1")
    bundle = settled / "model.sig"
    assert run("sign", "--private-key", private, settled).returncode == 0
    done = run("sign", "--private-key", other, "--keep", bundle, settled)
    assert done.returncode == 1 and "a different key" in done.stderr, done
    fields = json.loads(bundle.read_bytes())
    payload = base64.b64decode(fields["dsseEnvelope"]["payload"])
    digest = json.loads(payload)["predicate"]["resources"][0]["digest"].encode()
    forged = payload.replace(digest, b"0" * 64)
    fields["dsseEnvelope"]["payload"] = base64.b64encode(forged).decode()
    (tmp_path / "forged.sig").write_text(json.dumps(fields))
    before = bundle.read_bytes()
    done = run("sign", "--private-key", private, "--keep", tmp_path / "forged.sig", settled)
    assert done.returncode == 1 and "signature is invalid" in done.stderr, done
    assert run("sign", "--private-key", private, "--keep", "nowhere", settled).returncode == 2
    assert bundle.read_bytes() == before


def test_endless_trees(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Links to parent folders make a small tree endless, which is an error without a long
    search."""
    private, public = make_keys(tmp_path, "prime256v1")
    bundle = tmp_path / "kept.sig"
    assert run("sign", "--private-key", private, "--output", bundle, folder).returncode == 0
    (folder / "below" / "up").symlink_to(folder)
    done = run("sign", "--private-key", private, folder)
    assert done.returncode == 2 and "below/up" in done.stderr and "cannot be signed" in done.stderr
    done = run("verify", "--signature", bundle, "--public-key", public, folder)
    assert done.returncode == 1 and "below/up: not signed: a symbolic link to a folder" in \
        done.stdout, done
    for number in range(4):  # each level four times as wide as the one above
        (folder / "below" / f"again {number}").symlink_to(folder)
    done = run("sign", "--private-key", private, folder)
    assert done.returncode not in (0, 1) and done.stderr != "", done


def make_odd_entries(folder: pathlib.Path) -> dict[str, str]:
    """Entries without bytes to sign, and the message for each."""
    place = folder / "below"
    os.mkfifo(place / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(place)  # a path of a socket is short
        server.bind("socket")
        os.chdir(here)
    (place / "nowhere").symlink_to("not there")
    (place / "itself").symlink_to("itself")
    (place / "one").symlink_to("other")
    (place / "other").symlink_to("one")
    (place / "back").symlink_to(".")
    (place / "back twice").symlink_to("..")
    found = {"fifo": "a FIFO", "socket": "a socket", "nowhere": "a broken symbolic link",
             "itself": "a symbolic link in a loop", "one": "a symbolic link in a loop",
             "other": "a symbolic link in a loop",
             "back": "a symbolic link to a folder that contains it",
             "back twice": "a symbolic link to a folder that contains it"}
    try:
        os.mknod(place / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        found["device"] = "a character device"
    except OSError:
        pass  # only root may create one, and not on every system
    return found


def test_entries_without_bytes_are_differences(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """FIFOs, sockets, devices and broken links are each reported by name."""
    private, public = make_keys(tmp_path, "prime256v1")
    assert run("sign", "--private-key", private, folder).returncode == 0
    check = ("verify", "--signature", folder / "model.sig", "--public-key", public, folder)
    assert run(*check).returncode == 0
    for name, words in make_odd_entries(folder).items():
        kept = tmp_path / "kept"
        for other in (folder / "below").iterdir():  # each entry alone
            if other.name not in (name, "vocabulary \u00e9.txt"):
                kept.mkdir(exist_ok=True)
                other.rename(kept / other.name)
        alone = name not in ("one", "other")
        done = run(*check)
        assert done.returncode == 1, (name, done)
        wanted = words if alone else "a broken symbolic link"
        assert f"below/{name}: not signed: {wanted}" in done.stdout, (name, done)
        assert done.stdout.count("not signed") == 1
        done = run("sign", "--private-key", private, "--output", tmp_path / "new.sig", folder)
        assert done.returncode == 2 and f"below/{name}" in done.stderr and wanted in done.stderr
        for other in kept.iterdir():
            other.rename(folder / "below" / other.name)
    done = run(*check)
    assert done.returncode == 1 and "below/one: not signed: a symbolic link in a loop" in \
        done.stdout
    # In place of a file that was signed.
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to("README.md")
    done = run(*check)
    assert done.returncode == 1 and "README.md: a symbolic link in a loop" in done.stdout


def test_signature_and_key_paths(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Relative paths, paths through links, and missing paths."""
    private, public = make_keys(tmp_path, "prime256v1")
    assert run("sign", "--private-key", private, folder).returncode == 0
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    for place in (folder / "model.sig", linked / "model.sig", folder / "below/../model.sig"):
        done = run("verify", "--signature", place, "--public-key", public, folder)
        assert done.returncode == 0, done
        assert run("verify", "--signature", place, "--public-key", public, linked).returncode == 0
        signed = SignedBy(public, place)
        assert fast_torch.load_file(folder / "model.safetensors", verify=signed)["a"][7] == 7
        assert fast_torch.load_file(linked / "model.safetensors", verify=signed)["a"][7] == 7
    before = os.getcwd()
    try:
        os.chdir(folder)
        done = run("verify", "--signature", "model.sig", "--public-key", public, ".")
        assert done.returncode == 0
        assert fast_torch.load_file("model.safetensors", verify=SignedBy(public))["a"][7] == 7
    finally:
        os.chdir(before)
    done = run("verify", "--signature", tmp_path / "none.sig", "--public-key", public, folder)
    assert done.returncode == 2 and "none.sig" in done.stderr, done
    done = run("verify", "--signature", folder / "model.sig", "--public-key", "none.pub", folder)
    assert done.returncode == 2 and "none.pub" in done.stderr, done
