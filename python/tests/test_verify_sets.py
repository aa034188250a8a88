# SPDX-License-Identifier: Apache-2.0
"""Folders that lack files listed in their manifest or list."""

import json
import pathlib
import shutil
import subprocess

import pytest
import torch
from web_server import web_server

from fastsafetensors import (
    SafetensorError,
    SignedBy,
    hash_file,
    sign_folder,
    verify_file,
    write_manifest,
    write_sums,
)
from fastsafetensors import torch as fast_torch
from fastsafetensors._loading.verified_open import Verify
from fastsafetensors.fast_loading import save_safetensors_sharded

INDEX = "model.safetensors.index.json"


def make_set(folder: pathlib.Path, *, index: bool) -> None:
    """Two files whose names do not say how many they are."""
    folder.mkdir(parents=True)
    for name in ("base", "more"):
        fast_torch.save_file({name: torch.ones(1000)}, folder / f"{name}.safetensors")
    files = {name: f"{name}.safetensors" for name in ("base", "more")}
    if index:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def make_keys(folder: pathlib.Path) -> SignedBy:
    """A key, and a bundle of the folder by it."""
    private, public = folder.parent / "key.pem", folder.parent / "pub.pem"
    for words in (["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private],
                  ["ec", "-in", private, "-pubout", "-out", public]):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    sign_folder(folder, private)
    return SignedBy(public)


def make_list(folder: pathlib.Path, source: str) -> Verify:
    """The digests that loads of the folder are verified with."""
    if source in ("manifest", "signed"):
        write_manifest(folder, algorithm="sha256")
    if source == "sums":
        write_sums(folder)
    if source == "sidecar":
        hash_file(folder, "sha256", write=True)
    if source not in ("signed", "bundle"):
        return True
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes keys, is not installed")
    return make_keys(folder)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("source", ["manifest", "sums", "sidecar", "signed", "bundle"])
def test_folder_with_a_missing_file(tmp_path, source, index) -> None:
    """A missing file is an error, although the remaining files are unchanged."""
    folder = tmp_path / "set"
    make_set(folder, index=index)
    verify = make_list(folder, source)
    assert set(fast_torch.load_file(folder, verify=verify)) == {"base", "more"}
    (folder / "more.safetensors").unlink()
    if index:
        (folder / INDEX).unlink()
    with pytest.raises(SafetensorError, match=r"lists .*, which is missing") as caught:
        fast_torch.load_file(folder, verify=verify)
    assert caught.value.tag == "DigestMismatch"
    # A path of one file only loads that file.
    if source != "sidecar":
        one = fast_torch.load_file(folder / "base.safetensors", verify=verify)
        assert set(one) == {"base"}


@pytest.mark.parametrize("write", [write_manifest, write_sums])
def test_lists_of_incomplete_sets_are_not_made(tmp_path, write) -> None:
    """Files that the index lists must exist: else a list would call the rest complete."""
    folder = tmp_path / "set"
    make_set(folder, index=True)
    (folder / "more.safetensors").unlink()
    for path in (folder, folder / INDEX):
        with pytest.raises(FileNotFoundError, match="more.safetensors"):
            write(path)
    assert sorted(path.name for path in folder.iterdir()) == ["base.safetensors", INDEX]


def test_a_folder_of_two_indexes(tmp_path) -> None:
    """It is refused as by a load."""
    folder = tmp_path / "set"
    make_set(folder, index=True)
    shutil.copy(folder / INDEX, folder / "other.safetensors.index.json")
    for call in (verify_file, fast_torch.load_file):
        with pytest.raises(ValueError, match="the folder has 2 index files"):
            call(folder)


def test_deleted_index(tmp_path) -> None:
    """A deleted index is an error although all shards exist, because only the index lists the
    model's tensors."""
    folder = tmp_path / "set"
    make_set(folder, index=True)
    write_manifest(folder)
    (folder / INDEX).unlink()
    with pytest.raises(SafetensorError, match=INDEX):
        fast_torch.load_file(folder, verify=True)


def test_a_bundle_of_the_folder_above(tmp_path) -> None:
    """Names in a bundle are relative to its folder, and files outside of the model are not
    required."""
    top = tmp_path / "top"
    for name in ("set", "set.more"):
        make_set(top / name, index=False)
    key = make_list(top, "bundle")
    assert isinstance(key, SignedBy)
    verify = SignedBy(key.public_key, top / "model.sig")
    assert set(fast_torch.load_file(top / "set", verify=verify)) == {"base", "more"}
    (top / "set.more" / "more.safetensors").unlink()
    assert set(fast_torch.load_file(top / "set", verify=verify)) == {"base", "more"}
    (top / "set" / "more.safetensors").unlink()
    with pytest.raises(SafetensorError, match="lists more.safetensors"):
        fast_torch.load_file(top / "set", verify=verify)


def test_remote_index(tmp_path) -> None:
    """A remote index is verified with the manifest, like its files."""
    folder = tmp_path / "set"
    make_set(folder, index=True)
    kept = tmp_path / "model.manifest"
    write_manifest(folder, kept)
    with web_server(folder) as server:
        assert set(fast_torch.load_file(server.url + INDEX, verify=kept)) == {"base", "more"}
        index = json.loads((folder / INDEX).read_text())
        del index["weight_map"]["more"]
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(SafetensorError, match=INDEX) as caught:
            fast_torch.load_file(server.url + INDEX, verify=kept)
    assert caught.value.tag == "DigestMismatch"


def test_a_digest_file_lists_what_an_index_must_name(tmp_path) -> None:
    """A .digest file does not cover the index, but the files that it lists must be there."""
    folder = tmp_path / "set"
    make_set(folder, index=True)
    made = hash_file(folder, write=True)
    assert made == hash_file(folder) and set(made.files) == {
        "base.safetensors", "more.safetensors"}
    assert set(fast_torch.load_file(folder, verify=True)) == {"base", "more"}
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["more"]
    (folder / INDEX).write_text(json.dumps(index))
    for gone in (False, True):
        if gone:
            (folder / "more.safetensors").unlink()
        for verify in (True, tmp_path / "set.digest"):
            with pytest.raises(SafetensorError, match="lists more.safetensors") as caught:
                fast_torch.load_file(folder, verify=verify)
            assert caught.value.tag == "DigestMismatch"


@pytest.mark.parametrize("spelling", [".", "../set/.", "../set/../set", "../link"])
def test_digests_of_a_folder_lie_next_to_it(tmp_path, monkeypatch, spelling) -> None:
    """However it is spelled: there saves delete them, and loads find them."""
    folder = tmp_path / "set"
    make_set(folder, index=False)
    (tmp_path / "link").symlink_to("set")
    monkeypatch.chdir(folder)
    hash_file(spelling, write=True)
    assert (tmp_path / "set.digest").exists() and len(list(folder.iterdir())) == 2
    assert verify_file(spelling, digests=True) == []
    for path in (spelling, folder):
        assert set(fast_torch.load_file(path, verify=True)) == {"base", "more"}
    save_safetensors_sharded({"base": torch.ones(3)}, spelling)
    assert not (tmp_path / "set.digest").exists()


@pytest.mark.parametrize("names", [
    ["a.st", "b.st"], [".a.safetensors", ".b.safetensors"], ["s/a.safetensors", "s/b.safetensors"],
    ["s/a.safetensors", "t/a.safetensors"], ["x.safetensors", "s/a"],
    ["sub/a.safetensors", "a.safetensors"], ["y/x/a", "x/a"]])
@pytest.mark.parametrize("has_folder", [True, False])
def test_digests_of_files_with_any_names(tmp_path, monkeypatch, names, has_folder) -> None:
    """An index may name any file below its folder, and may be opened by its name alone."""
    folder = tmp_path / "set"
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        fast_torch.save_file({f"t{number}": torch.ones(3)}, folder / name)
    kept = {"t0": names[0], "t1": names[1]}
    (folder / INDEX).write_text(json.dumps({"weight_map": kept}))
    monkeypatch.chdir(folder)
    path = folder if has_folder else INDEX
    assert set(hash_file(path, write=True).files) == set(names)
    assert verify_file(path, digests=True) == []
    assert set(fast_torch.load_file(path, verify=True)) == {"t0", "t1"}
    (folder / names[1]).unlink()
    del kept["t1"]
    (folder / INDEX).write_text(json.dumps({"weight_map": kept}))
    with pytest.raises(SafetensorError, match="lists .* which is missing"):
        fast_torch.load_file(path, verify=True)
