# SPDX-License-Identifier: Apache-2.0
"""Checksum lists are applied to the file of that name at that path, and to no other."""

import shutil
import threading

import pytest
import torch
from test_sign import make_keys

import fastsafetensors
from fastsafetensors import (
    SafetensorError,
    SignedBy,
    changed_tensors,
    check_manifest,
    sign_folder,
    verifying,
    write_manifest,
    write_sums,
)
from fastsafetensors.torch import load_file, save_file


@pytest.fixture
def nested(tmp_path):
    """A signed folder with a model in it and another one in a folder below; and the signature."""
    private, public = make_keys(tmp_path, "prime256v1")
    folder = tmp_path / "nest"
    (folder / "enc").mkdir(parents=True)
    save_file({"a": torch.zeros(4)}, folder / "model.safetensors")
    save_file({"a": torch.ones(4)}, folder / "enc/model.safetensors")
    sign_folder(folder, private)
    return folder, SignedBy(public, signature=folder / "model.sig")


def test_bundle_names_are_relative_to_its_folder(nested, monkeypatch):
    """A file in a subfolder is not confused with the file of the same name above."""
    folder, signed = nested
    assert load_file(folder / "enc/model.safetensors", verify=signed)["a"].sum() == 4
    assert load_file(folder / "model.safetensors", verify=signed)["a"].sum() == 0
    monkeypatch.chdir(folder / "enc")
    assert load_file("model.safetensors", verify=signed)["a"].sum() == 4
    assert load_file("../enc/../model.safetensors", verify=signed)["a"].sum() == 0
    shutil.copy(folder / "model.safetensors", folder / "enc/model.safetensors")
    for path in ("model.safetensors", folder / "enc/model.safetensors"):
        with pytest.raises(SafetensorError) as caught:
            load_file(path, verify=signed)
        assert caught.value.tag == "DigestMismatch"


@pytest.mark.parametrize("has_manifests", [False, True])
def test_a_link_out_of_the_folder_does_not_change_a_name(nested, tmp_path, has_manifests):
    """The file that a link points to is checked under the link's name."""
    folder, signed = nested
    if has_manifests:
        for place in (folder, folder / "enc"):
            write_manifest(place / "model.safetensors", place / "model.manifest",
                           algorithm="sha256")
        sign_folder(folder, tmp_path / "prime256v1.key")
        assert load_file(folder / "enc/model.safetensors", verify=signed)["a"].sum() == 4
    shutil.rmtree(folder / "enc")
    (tmp_path / "evil").mkdir()
    for path in folder.glob("model.[sm]a*"):
        shutil.copy(path, tmp_path / "evil")
    (folder / "enc").symlink_to("../evil")
    with pytest.raises(SafetensorError):
        load_file(folder / "enc/model.safetensors", verify=signed)


@pytest.mark.parametrize("index", ["{", None, "folder", '{"weight_map": {"b": "b.safetensors"}}'])
@pytest.mark.parametrize("by", ["manifest", "sums"])
def test_added_index_does_not_hide_files(tmp_path, index, by):
    """An unlisted model is also reported next to an invalid index."""
    for name in "abc":
        save_file({name: torch.zeros(300)}, tmp_path / f"{name}.safetensors")
    write_manifest(tmp_path, algorithm="sha256")
    write_sums(tmp_path)
    manifest = None if by == "manifest" else tmp_path / "SHA256SUMS"
    assert check_manifest(tmp_path, manifest) == []
    save_file({"x": torch.ones(4)}, tmp_path / "unlisted.safetensors")
    if index == "folder":
        (tmp_path / "zzz.safetensors.index.json").mkdir()
    elif index is not None:
        (tmp_path / "zzz.safetensors.index.json").write_text(index)
    problems = check_manifest(tmp_path, manifest)
    assert "unlisted.safetensors" in str(problems)
    (tmp_path / "unlisted.safetensors").unlink()
    if index not in (None, "folder"):
        assert "zzz.safetensors.index.json" in str(check_manifest(tmp_path, manifest))


def test_invalid_list_is_an_error(tmp_path):
    """An unreadable list is an error. No weaker source of digests is used instead."""
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    fastsafetensors.hash_file(path)
    for name, text in (("m.safetensors.sha256", ""), ("m.safetensors.sha256", "0" * 64 + "\n"),
                       ("SHA256SUMS", "hello\n"), ("m.safetensors.digest", "junk")):
        (tmp_path / name).write_text(text)
        with pytest.raises(SafetensorError) as caught:
            load_file(path, verify=True)
        assert caught.value.tag == "InvalidManifest" and name in str(caught.value)
        (tmp_path / name).unlink()
    write_sums(path)
    load_file(path, verify=True)
    (tmp_path / "m.safetensors.manifest").symlink_to("nowhere")
    with pytest.raises(OSError, match=r"m\.safetensors\.manifest"):
        load_file(path, verify=True)


def test_threads_verify_independently(tmp_path):
    """verifying(False) applies to loads of the same thread only."""
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    write_manifest(path)
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    inside, done = threading.Event(), threading.Event()
    loaded = []

    def other():
        with verifying(False):
            loaded.append(load_file(path))
            inside.set()
            done.wait(300)

    thread = threading.Thread(target=other)
    with verifying():
        thread.start()
        assert inside.wait(300)
        with pytest.raises(SafetensorError):
            load_file(path)
        with verifying(False):
            load_file(path)
        done.set()
        thread.join()
    assert len(loaded) == 1
    with pytest.raises(TypeError), verifying(None):  # type: ignore[arg-type]
        pass


def test_older_manifest_must_be_complete(tmp_path):
    """The checksum line of an older manifest is verified, and the current manifest must match the
    file."""
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(400000), "b": torch.zeros(400000)}, path)
    write_manifest(path, tmp_path / "old")
    save_file({"a": torch.ones(400000), "b": torch.zeros(400000)}, path)
    write_manifest(path)
    assert "a" in changed_tensors(path, tmp_path / "old")
    lines = (tmp_path / "m.safetensors.manifest").read_text().splitlines(keepends=True)
    old = (tmp_path / "old").read_text().splitlines(keepends=True)
    (tmp_path / "old").write_text("".join([*lines[:-1], old[-1]]))
    with pytest.raises(SafetensorError) as caught:
        changed_tensors(path, tmp_path / "old")
    assert caught.value.tag == "InvalidManifest"


def test_only_folders_with_files_are_signed(tmp_path):
    private, _ = make_keys(tmp_path, "prime256v1")
    (tmp_path / "empty").mkdir()
    save_file({"a": torch.zeros(4)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="has no file"):
        sign_folder(tmp_path / "empty", private)
    with pytest.raises(ValueError, match="not a folder"):
        sign_folder(tmp_path / "a.safetensors", private)
    with pytest.raises(FileNotFoundError):
        sign_folder(tmp_path / "absent", private)
    assert not list((tmp_path / "empty").iterdir())


def test_a_manifest_knows_both_names_of_xxh3(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / "a.safetensors")
    made = [write_manifest(tmp_path / "a.safetensors", algorithm=name)
            for name in ("xxh3", "xxh3-128")]
    assert [one.algorithm for one in made] == ["xxh3-128", "xxh3-128"]
