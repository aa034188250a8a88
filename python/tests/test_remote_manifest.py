# SPDX-License-Identifier: Apache-2.0
"""Manifests of saves to stores: written with the model, and never for another one."""

from __future__ import annotations

import pathlib
import subprocess

import numpy
import pytest
from object_store import KINDS, PLACES, ObjectStore, failure, object_store, use_store
from web_server import Answer, Request

from fastsafetensors import SafetensorError
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Writer

pytestmark = pytest.mark.usefixtures("own_home")
MIB = 1 << 20


def save_set(folder: str, files: int, seed: int, manifest: bytes | None, size: int = 1000) -> None:
    """Save a sharded model whose bytes depend on the seed."""
    value = numpy.full(size, seed, numpy.uint8)
    rows = [(f"t{i}", "U8", value.shape, value.ctypes.data, value.nbytes) for i in range(6)]
    where = [i % files for i in range(6)]
    writer = Writer(folder, rows, None, file_of=where, file_count=files, manifest=manifest)
    try:
        writer.commit()
    finally:
        writer.close()


def manifests(server: ObjectStore) -> list[str]:
    """The manifests in the store."""
    return [name for name in server.objects if name.endswith(".manifest")]


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_model_with_manifest(kind: str, files: int, command: str) -> None:
    """The manifest describes the stored model, after repeated saves of large and small models over
    each other."""
    folder = f"{kind}://box/m"
    with object_store() as server:
        use_store(server, kind)
        for seed, count, size in ((1, 3, 1000), (2, files, 5 * MIB + 7), (3, files, 99)):
            save_set(folder, count, seed, b"", size)
            loaded = fst_numpy.load_file(folder + "/", verify=True)
            assert all((v == seed).all() for v in loaded.values())
            assert manifests(server) == [PLACES[kind] + "model.manifest"]
        [shard, *_] = [n for n in server.objects if n.endswith(".safetensors")]
        data, mark = server.objects[shard]
        server.objects[shard] = (data[:-1] + b"\0", mark)
        with pytest.raises(SafetensorError, match="digest"):
            fst_numpy.load_file(folder + "/", verify=True)


@pytest.mark.parametrize("mib", [0, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_file_with_manifest(tmp_path: pathlib.Path, kind: str, mib: int) -> None:
    """The manifest equals that of a local save. It can have another path, and the old one is
    deleted."""
    tensors = {"a": numpy.arange(mib * MIB // 4 + 3, dtype=numpy.int32)}
    fst_numpy.save_file(tensors, tmp_path / "m.safetensors", manifest=True)
    address = f"{kind}://box/m/m.safetensors"
    with object_store() as server:
        use_store(server, kind)
        fst_numpy.save_file(tensors, address, manifest=True)
        [place] = manifests(server)
        assert server.objects[place][0] == (tmp_path / "m.safetensors.manifest").read_bytes()
        assert fst_numpy.load_file(address, verify=True).keys() == tensors.keys()
        fst_numpy.save_file({"b": numpy.ones(3)}, address, manifest=True)
        assert list(fst_numpy.load_file(address, verify=True)) == ["b"]
        fst_numpy.save_file({"c": numpy.ones(3)}, address)
        assert manifests(server) == []
        fst_numpy.save_file(tensors, address, manifest=f"{kind}://box/lists/my.manifest")
        assert len(manifests(server)) == 1
        loaded = fst_numpy.load_file(address, verify=f"{kind}://box/lists/my.manifest")
        assert loaded.keys() == tensors.keys()
        fst_numpy.save_file(tensors, address, manifest=tmp_path / "local.manifest")
        assert fst_numpy.load_file(address, verify=tmp_path / "local.manifest").keys() == {"a"}
        with pytest.raises(Exception, match="would overwrite the model"):
            fst_numpy.save_file(tensors, address, manifest=address)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_manifest_is_replaced(kind: str) -> None:
    """A manifest never replaces a model, under whatever spelling of its URL, nor another object."""
    tensors = {"a": numpy.arange(7)}
    with object_store() as server:
        use_store(server, kind)
        for model, manifest in (("m%25x", "m%x"), ("n%2", "n%252"), ("k", "k")):
            address, target = f"{kind}://box/{model}", f"{kind}://box/{manifest}"
            with pytest.raises(ValueError, match="would overwrite the model"):
                fst_numpy.save_file(tensors, address, manifest=target)
            assert not any(data.startswith(b"fastsafetensors-manifest")
                           for data, _ in server.objects.values())
        fst_numpy.save_file(tensors, f"{kind}://box/keep")
        before = dict(server.objects)
        with pytest.raises(ValueError, match="not a manifest"):
            fst_numpy.save_file(tensors, f"{kind}://box/o.safetensors",
                                manifest=f"{kind}://box/keep")
        assert server.objects == before


def test_the_command_checks_a_sharded_model(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of a sharded model at a store are checked by its manifest."""
    folder = "s3://box/m"
    with object_store() as server:
        use_store(server, "s3")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        save_set(folder, 2, 1, b"")

        def check(path: str) -> int:
            words = [command, "verify", "--manifest", path]
            return subprocess.run(words, capture_output=True, check=False).returncode

        assert check(folder + "/") == 0
        assert check(folder + "/model.safetensors.index.json") == 0
        [shard, *_] = [n for n in server.objects if n.endswith(".safetensors")]
        data, mark = server.objects[shard]
        server.objects[shard] = (data[:-1] + b"\0", mark)
        assert check(folder + "/") == 1


def test_bytes_in_any_order() -> None:
    """Data is hashed while it is sent, in any order, because it cannot be read again."""
    size = 30 * MIB
    with object_store() as server:
        use_store(server, "s3")
        address = "s3://box/m/m.safetensors"
        writer = Writer(address, [("x", "U8", (size,), None, size)], None, manifest=b"")
        value = numpy.arange(size, dtype=numpy.uint32).astype(numpy.uint8)
        pieces = sorted(range(0, size, 700_001), key=lambda at: at * 7919 % 1000)
        for at in pieces:
            part = value[at : at + 700_001]
            writer.write(0, at, part.ctypes.data, part.nbytes)
        writer.commit()
        writer.close()
        assert (fst_numpy.load_file(address, verify=True)["x"] == value).all()


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_old_manifest_is_deleted(kind: str, files: int) -> None:
    """A save without a manifest deletes outdated ones; other files with such a name stay."""
    folder = f"{kind}://box/m"
    with object_store() as server:
        use_store(server, kind)
        save_set(folder, 3, 1, b"")
        other = PLACES[kind] + "model.safetensors.index.json.manifest"
        server.objects[other] = server.objects[PLACES[kind] + "model.manifest"]
        notes = PLACES[kind] + "notes.manifest"
        server.objects[notes] = (b"mine", '"n"')
        save_set(folder, files, 2, None)
        assert manifests(server) == [notes]
        server.objects[PLACES[kind] + "model.manifest"] = (b"mine as well", '"n"')
        save_set(folder, files, 3, None)
        assert len(manifests(server)) == 2


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("before", [1, 3])
def test_manifest_matches_the_model_at_every_step(before: int, files: int) -> None:
    """After every request of a save, a verified load either returns one complete model or fails
    because the manifest was deleted. A save that fails restores the old model's manifest."""
    folder, step, is_over = "s3://box/m", 0, False
    while not is_over:
        with object_store() as server:
            use_store(server, "s3")
            save_set(folder, before, 1, b"")
            seen, on = [0], [True]

            def look(
                request: Request, answer: Answer, on: list[bool] = on, server: ObjectStore = server
            ) -> Answer:
                if on[0] and request.method in ("PUT", "POST", "DELETE"):
                    on[0] = False
                    has_one = bool(manifests(server))
                    if has_one:
                        loaded = fst_numpy.load_file(folder + "/", verify=True)
                        assert len({int(v[0]) for v in loaded.values()}) == 1
                    on[0] = True
                return answer

            def refuse(
                request: Request, seen: list[int] = seen, step: int = step, on: list[bool] = on
            ) -> Answer | None:
                if not on[0] or request.method not in ("PUT", "POST", "DELETE"):
                    return None
                seen[0] += 1
                return failure("403 Forbidden", "No") if seen[0] == step + 1 else None

            server.fault, server.refuse = look, refuse
            failed = False
            try:
                save_set(folder, files, 2, b"")
            except PermissionError:
                failed = True
            on[0] = False
            is_over = seen[0] <= step
            if failed and before != 1:
                assert manifests(server)
                assert (fst_numpy.load_file(folder + "/", verify=True)["t0"] == 1).all()
            assert failed or (fst_numpy.load_file(folder + "/")["t0"] == 2).all()
            assert not is_over or manifests(server)
        step += 1


def test_the_command(tmp_path: pathlib.Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command accepts URLs: verify --manifest URL, and convert --manifest to a URL."""
    source = tmp_path / "source.safetensors"
    fst_numpy.save_file({"a": numpy.arange(1000)}, source)
    with object_store() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecretvalue")

        def run(*words: object) -> subprocess.CompletedProcess[str]:
            return subprocess.run([command, *map(str, words)], capture_output=True, text=True)

        made = run("convert", "--manifest", source, "s3://box/m/model.safetensors")
        assert made.returncode == 0, made.stderr
        for option in ("--manifest", "--manifest=s3://box/m/model.safetensors.manifest"):
            told = run("verify", option, "s3://box/m/model.safetensors")
            assert told.returncode == 0, told.stderr
            assert "matches its manifest" in told.stdout
        place = "/box/m/model.safetensors"
        data, _ = server.objects[place]
        server.objects[place] = (data[:-1] + b"\1", '"x"')
        for json in ([], ["--json"]):
            told = run("verify", "--manifest", *json, "s3://box/m/model.safetensors")
            assert told.returncode == 1
            assert "topsecretvalue" not in told.stdout + told.stderr
        server.objects.pop(place + ".manifest")
        told = run("verify", "--manifest", "s3://box/m/model.safetensors")
        assert told.returncode == 2 and "manifest" in told.stderr


ESCAPED = ("a%25b", "a%2Fb", "a%3Fb", "%C3%A9", "a%20b", "%6Dodel", "a%0Ab", "é", "a b")


@pytest.mark.parametrize("name", ESCAPED)
@pytest.mark.parametrize("kind", KINDS)
def test_manifest_of_a_file_whose_key_is_escaped(kind: str, name: str) -> None:
    """The manifest lists the name that a load looks for."""
    url = f"{kind}://box/m/{name}.safetensors"
    with object_store() as server:
        use_store(server, kind)
        fst_numpy.save_file({"a": numpy.arange(5.0)}, url, manifest=True)
        assert len(server.objects) == 2
        assert fst_numpy.load_file(url, verify=True)["a"][4] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_file_name_that_a_manifest_cannot_list(kind: str) -> None:
    """A key that is not UTF-8 is refused before anything is uploaded."""
    with object_store() as server:
        use_store(server, kind)
        with pytest.raises(ValueError, match="not UTF-8"):
            fst_numpy.save_file({"a": numpy.zeros(5)}, f"{kind}://box/a%FF.safetensors",
                                manifest=True)
        assert not server.objects


@pytest.mark.parametrize("stem", ["a b", "a%41", "100%", "é"])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_model_whose_stem_is_escaped(kind: str, stem: str) -> None:
    """Index and manifest list the names of the objects, not of the URLs."""
    value = numpy.arange(100, dtype=numpy.uint8)
    rows = [(f"t{i}", "U8", value.shape, value.ctypes.data, value.nbytes) for i in range(4)]
    with object_store() as server:
        use_store(server, kind)
        for _ in range(2):
            writer = Writer(f"{kind}://box/m", rows, None, file_of=[0, 0, 1, 1], file_count=2,
                            stem=stem, manifest=b"")
            try:
                writer.commit()
            finally:
                writer.close()
            loaded = fst_numpy.load_file(f"{kind}://box/m/", verify=True)
            assert all((loaded[f"t{i}"] == value).all() for i in range(4))
