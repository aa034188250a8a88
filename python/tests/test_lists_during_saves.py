# SPDX-License-Identifier: Apache-2.0
"""Lists of files while a save replaces their set: every reader gets one save or an error."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import (  # noqa: E402
    SafetensorError,
    numpy,
    safe_open,
    write_manifest,
    write_sums,
)
from fastsafetensors.fast_loading import save_safetensors_sharded  # noqa: E402
from fastsafetensors.lazy import LazyModel  # noqa: E402
from fastsafetensors.loader import SafeTensorsFileLoader, SingleGroup  # noqa: E402
from fastsafetensors.parallel_loader import ParallelLoader  # noqa: E402
from fastsafetensors.torch import load_file, save_file  # noqa: E402
from fastsafetensors.v05 import common  # noqa: E402

INDEX = "model.safetensors.index.json"


def save(folder: Path, value: float, order: tuple[int, ...] = (0, 1, 2)) -> None:
    tensors = {f"w{i}": torch.full((64, 64), value) for i in order}
    save_safetensors_sharded(tensors, folder, max_shard_size=20_000)


def files_of(folder: Path) -> list[str]:
    return sorted(map(str, folder.glob("model-*.safetensors")))


def load_lazily(files: list[str]) -> dict[str, Any]:
    with LazyModel(files) as model:
        return {name: tensor.clone() for name, tensor in model}


def load_from_safe_open(files: list[str]) -> dict[str, Any]:
    with safe_open(files, "pt") as model:
        return {name: model.get_tensor(name) for name in model.keys()}  # noqa: SIM118


def load_in_group(files: list[str]) -> dict[str, Any]:
    with SafeTensorsFileLoader(SingleGroup(), "cpu") as loader:
        loader.add_filenames({0: files[:1]})
        loader.add_filenames({0: files[1:]})
        buffer = loader.copy_files_to_device()
        return {name: buffer.get_tensor(name).clone() for name in loader.get_keys()}


def load_in_parallel(files: list[str]) -> dict[str, Any]:
    with contextlib.closing(ParallelLoader(None, files, use_tqdm_on_load=False)) as loader:
        return dict(loader.iterate_weights())


READERS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "load_file": load_file,
    "numpy.load_file": lambda files: {name: torch.from_numpy(array.copy())
                                      for name, array in numpy.load_file(files).items()},
    "LazyModel": load_lazily,
    "safe_open": load_from_safe_open,
    "SafeTensorsFileLoader": lambda files: SafeTensorsFileLoader(files).load(),
    "SafeTensorsFileLoader of a group": load_in_group,
    "ParallelLoader": load_in_parallel,
}


def values(tensors: dict[str, Any]) -> set[float]:
    return {float(part) for tensor in tensors.values() for part in (tensor[0, 0], tensor[-1, -1])}


class HalfPublished:
    """A sharded model whose next save has stopped after the first of its files was renamed."""

    def __init__(self, folder: Path, spare: Path, order: tuple[int, ...] = (0, 1, 2)) -> None:
        save(folder, 1.0)
        save(spare, 2.0, order)
        self.folder, self.spare = folder, spare
        self.names = [Path(name).name for name in files_of(folder)]
        self.hidden = {name: f".{name}.{number:016x}.tmp" for number, name in enumerate(self.names)}
        assert len(self.names) > 1

    def begin(self) -> None:
        text = (self.spare / INDEX).read_text()
        for name, hidden in self.hidden.items():
            os.link(self.spare / name, self.folder / hidden)
            text = text.replace(name, hidden)
        (self.folder / "interim").write_text(text)
        os.replace(self.folder / "interim", self.folder / INDEX)
        self.place(self.names[:1])

    def place(self, names: list[str]) -> None:
        for name in names:
            os.replace(self.spare / name, self.folder / name)

    def end(self) -> None:
        self.place(self.names[1:])
        os.replace(self.spare / INDEX, self.folder / INDEX)


@pytest.fixture
def half(tmp_path: Path) -> HalfPublished:
    return HalfPublished(tmp_path / "set", tmp_path / "spare")


@pytest.mark.parametrize("name", READERS)
def test_a_list_of_an_unfinished_save_is_refused(name: str, half: HalfPublished) -> None:
    files = files_of(half.folder)
    assert values(READERS[name](files)) == {1.0}
    half.begin()
    with pytest.raises(SafetensorError, match="save of this model did not finish") as caught:
        READERS[name](files)
    assert INDEX in str(caught.value)
    assert values(load_file(half.folder)) == {2.0}  # the index leads to one save all the same
    half.end()
    assert values(READERS[name](files)) == {2.0}


@pytest.mark.parametrize("name", READERS)
def test_a_tensor_in_two_files_because_of_an_unfinished_save(name: str, tmp_path: Path) -> None:
    """The save moves a tensor to another file: the error is that of the save, which is retried."""
    half = HalfPublished(tmp_path / "set", tmp_path / "spare", (1, 2, 0))
    files = files_of(half.folder)
    half.begin()
    with pytest.raises(SafetensorError, match="a save of this model did not finish") as caught:
        READERS[name](files)
    assert caught.value.tag == "FileChanged"
    half.end()
    assert values(READERS[name](files)) == {2.0}


@pytest.mark.parametrize("name", ["SafeTensorsFileLoader of a group", "ParallelLoader"])
def test_files_opened_one_by_one_are_reopened_after_a_concurrent_save(
    name: str, half: HalfPublished, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    from_file = common.SafeTensorsMetadata.from_file.__func__  # type: ignore[attr-defined]

    def open_and_save(kind: Any, path: Any, framework: Any = None) -> Any:
        made = from_file(kind, path, framework)
        opened.append(path)
        if len(opened) == 1:
            half.begin()
            half.end()
        return made

    monkeypatch.setattr(common.SafeTensorsMetadata, "from_file", classmethod(open_and_save))
    assert values(READERS[name](files_of(half.folder))) == {2.0}
    assert len(opened) > len(half.names)


TRAINER = """
import os, sys, torch
from pathlib import Path
from fastsafetensors.fast_loading import save_safetensors_sharded
step = 1
while os.getppid() != 1 and not os.path.exists(sys.argv[2]):
    tensors = {f"w{i}": torch.full((64, 64), float(step)) for i in range(3)}
    save_safetensors_sharded(tensors, Path(sys.argv[1]), max_shard_size=20_000)
    step = step % 250 + 1
"""


@pytest.fixture
def saved_again_and_again(tmp_path: Path) -> Iterator[Path]:
    folder, stop = tmp_path / "set", tmp_path / "stop"
    save(folder, 0.0)
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(folder), str(stop)])
    yield folder
    stop.touch()
    assert trainer.wait(120) == 0


def test_readers_of_lists_never_mix_steps_while_a_trainer_saves(
    saved_again_and_again: Path,
) -> None:
    folder = saved_again_and_again
    end, seen, number = time.monotonic() + 120, set[float](), 0
    while len(seen) <= 20 and time.monotonic() < end:
        reader = list(READERS.values())[number % len(READERS)]
        number += 1
        try:
            got = values(reader(files_of(folder)))
        except (SafetensorError, OSError):
            continue
        assert len(got) == 1
        seen |= got
    assert len(seen) > 1


def link_files(half: HalfPublished, folder: Path, ending: str = "") -> list[str]:
    """Links to the set's files in another folder, with a copy of its index."""
    folder.mkdir()
    for name in half.names:
        (folder / f"{name[:-12]}{ending}.safetensors").symlink_to(half.folder / name)
    (folder / INDEX).write_text((half.folder / INDEX).read_text())
    return files_of(folder)


@pytest.mark.parametrize("ending", ["", "-linked"])
@pytest.mark.parametrize("reader", READERS)
def test_links_to_files_of_an_unfinished_save(
    reader: str, ending: str, half: HalfPublished, tmp_path: Path
) -> None:
    """The index next to the files counts, not the one next to the links."""
    files = link_files(half, tmp_path / "links", ending)
    assert values(READERS[reader](files)) == {1.0}
    half.begin()
    with pytest.raises(SafetensorError, match="a save of this model did not finish"):
        READERS[reader](files)
    half.end()
    assert values(READERS[reader](files)) == {2.0}


def test_a_folder_of_links(half: HalfPublished, tmp_path: Path) -> None:
    """A folder with its own index is checked, too, because its shards are links."""
    folder = tmp_path / "links"
    link_files(half, folder)
    assert values(load_file(folder)) == {1.0}
    half.begin()
    for path in (folder, folder / INDEX):
        with pytest.raises(SafetensorError, match="a save of this model did not finish"):
            load_file(path)
    half.end()
    assert values(load_file(folder)) == {2.0}


@pytest.mark.parametrize("layout", ["second index", "subfolder", "link to the folder"])
def test_other_indexes_of_an_unfinished_save(
    layout: str, half: HalfPublished, tmp_path: Path
) -> None:
    """An index that the save does not replace leads to one save, or to an error."""
    text = (half.folder / INDEX).read_text()
    if layout == "second index":
        index = half.folder / "copy.safetensors.index.json"
    else:
        index, inside = half.folder.parent / "own.safetensors.index.json", half.folder.name
        if layout == "link to the folder":
            inside = "linked"
            (tmp_path / inside).symlink_to(half.folder)
        text = text.replace("model-", f"{inside}/model-")
    index.write_text(text)
    assert values(load_file(index)) == {1.0}
    half.begin()
    with pytest.raises(SafetensorError, match="a save of this model did not finish"):
        load_file(index)
    half.end()
    assert values(load_file(index)) == {2.0}


def test_no_list_of_an_unfinished_save(half: HalfPublished) -> None:
    """The index names hidden files, so a list would be of other files than the model's."""
    half.begin()
    for write in (write_manifest, write_sums):
        with pytest.raises((SafetensorError, OSError), match="did not finish"):
            write(half.folder)
    half.end()
    write_manifest(half.folder)


TAG = "-0123456789abcdef"  # of a save at a store


@pytest.fixture(params=["other count", "same tensors", "one file", "a tag", "two tags"])
def leftovers(request, tmp_path: Path) -> list[str]:
    """Files of a save and of the one before it, which a kill has left when the index was final."""
    size = 200_000 if request.param == "one file" else 20_000
    new = "old" if request.param == "same tensors" else "new"
    rows = [{f"{name}{i}": torch.full((64, 64), value) for i in range(3)}
            for name, value in (("old", 1.0), (new, 2.0))]
    save_safetensors_sharded(rows[0], tmp_path, max_shard_size=20_000)
    kept = {path: path.read_bytes() for path in tmp_path.glob("model-*.safetensors")}
    if "tag" not in request.param:
        del rows[1][f"{new}2"]
    save_safetensors_sharded(rows[1], tmp_path, max_shard_size=size)
    if "tag" in request.param:
        for path in kept:
            path.rename(path.with_stem(path.stem + TAG))
        before = "" if request.param == "a tag" else "-" + TAG[:0:-1]
        kept = {path.with_stem(path.stem + before): data for path, data in kept.items()}
    for path, data in list(kept.items())[1:]:
        path.write_bytes(data)
    return sorted(map(str, tmp_path.glob("*.safetensors")))


@pytest.mark.parametrize("name", READERS)
def test_names_of_two_saves(name: str, leftovers: list[str]) -> None:
    """File names show two saves: two numbers of shards, two tags, or a single file and shards."""
    with pytest.raises(SafetensorError, match="is of another save of this model") as caught:
        READERS[name](leftovers)
    assert caught.value.tag == "FileChanged"


def test_names_of_two_saves_in_a_linked_folder(leftovers: list[str]) -> None:
    """The same if the paths spell the folder in several ways."""
    folder = os.path.dirname(leftovers[0])
    os.symlink(folder, f"{folder}-linked")
    names = map(os.path.basename, leftovers[1:])
    spelled = [leftovers[0], *(f"{folder}-linked//{name}" for name in names)]
    with pytest.raises(SafetensorError, match="is of another save of this model"):
        load_file(spelled)


def test_tagged_files_of_one_save(leftovers: list[str], tmp_path: Path) -> None:
    """A copy of a store without its index: the files of one tag are a model, if all are there."""
    tagged = [path for path in leftovers if TAG in path]
    if not tagged:
        pytest.skip("these files have no tags")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises((SafetensorError, FileNotFoundError), match="another save|missing"):
        load_file(tmp_path)
    tagged = [path for path in tagged if path.endswith(f"{TAG}.safetensors")]
    for path in set(leftovers) - set(tagged):
        os.remove(path)
    assert values(load_file(tmp_path)) == values(load_file(tagged)) == {2.0}
    os.remove(tagged[1])
    with pytest.raises(FileNotFoundError, match="of the 3 files .* 1 is missing: number 00002"):
        load_file(tmp_path)


def test_links_of_other_names_to_two_saves(leftovers: list[str], tmp_path: Path) -> None:
    """The names of the files count that the links lead to."""
    (tmp_path / "links").mkdir()
    links = [tmp_path / "links" / f"part{i}.safetensors" for i in range(len(leftovers))]
    for link, file in zip(links, leftovers, strict=True):
        link.symlink_to(file)
    for source in (tmp_path / "links", links):
        with pytest.raises(SafetensorError, match="is of another save of this model"):
            load_file(source)


def test_links_to_files_whose_names_are_hashes(tmp_path: Path) -> None:
    """The cache of Hugging Face: no name of a linked file says anything about saves."""
    save(tmp_path / "blobs", 1.0)
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(files_of(tmp_path / "blobs")):
        blob = Path(path).rename(tmp_path / "blobs" / f"{number:064x}")
        (tmp_path / "snapshot" / Path(path).name).symlink_to(blob)
    for source in (tmp_path / "snapshot", files_of(tmp_path / "snapshot")):
        assert values(load_file(source)) == {1.0}


# How other programs number the files of a model: the name, and the first number.
NUMBERINGS = {"from 0": ("model-{:05}-of-{:05}", 0), "longer count": ("model-{:05}-of-{:06}", 1)}


def save_numbered(folder: Path, numbering: str, count: int) -> list[Path]:
    form, first = NUMBERINGS[numbering]
    paths = [folder / f"{form.format(first + i, count)}.safetensors" for i in range(count)]
    for number, path in enumerate(paths):
        save_file({f"{count}.w{number}": torch.full((4, 4), float(count))}, path)
    return paths


@pytest.mark.parametrize("count", [1, 2, 12])
@pytest.mark.parametrize("numbering", NUMBERINGS)
def test_numbers_of_other_programs(numbering: str, count: int, tmp_path: Path) -> None:
    """A folder without an index: complete sets load, and others are errors."""
    paths = save_numbered(tmp_path, numbering, count)
    assert len(load_file(tmp_path)) == len(load_file(paths)) == count
    if count == 12:
        paths[5].unlink()
        with pytest.raises(FileNotFoundError, match="of the 12 files .* 1 is missing: number 0*"
                           f"{5 + NUMBERINGS[numbering][1]}"):
            load_file(tmp_path)


@pytest.mark.parametrize("numbering", NUMBERINGS)
def test_two_saves_numbered_by_other_programs(numbering: str, tmp_path: Path) -> None:
    paths = save_numbered(tmp_path, numbering, 2) + save_numbered(tmp_path, numbering, 3)
    for source in (tmp_path, paths):
        with pytest.raises(SafetensorError, match="is of another save of this model"):
            load_file(source)


def test_a_name_with_an_impossible_count_is_an_error_at_once(tmp_path: Path) -> None:
    """Only the files that are there are looked at, not all that the name counts."""
    save_file({"w": torch.zeros(4)}, tmp_path / "a-00001-of-999999999.safetensors")
    with pytest.raises(FileNotFoundError, match="of the 999999999 files .* 999999998 are missing: "
                       "number 00002, 00003, 00004, 00005, 00006, "):
        load_file(tmp_path)


@pytest.mark.parametrize("name", ["lora-epoch-3-of-10", "model-rank-0-of-4", "step-500-of-1000"])
def test_few_digits_are_not_a_shard_of_a_set(name: str, tmp_path: Path) -> None:
    """They count epochs, ranks or steps; the other files need not be here."""
    save_file({"w": torch.ones(4)}, tmp_path / f"{name}.safetensors")
    assert len(load_file(tmp_path)) == len(load_file([tmp_path / f"{name}.safetensors"])) == 1
