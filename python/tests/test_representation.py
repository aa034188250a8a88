# SPDX-License-Identifier: Apache-2.0
"""repr() of objects that read files: the path, the number of tensors and their dtypes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import open_stream, safe_open  # noqa: E402
from fastsafetensors.auto_loader import AutoLoader  # noqa: E402
from fastsafetensors.lazy import LazyModel  # noqa: E402
from fastsafetensors.loader import (  # noqa: E402
    SafeTensorsFileLoader,
    SingleGroup,
    fastsafe_open,
)
from fastsafetensors.parallel_loader import ParallelLoader  # noqa: E402
from fastsafetensors.torch import save_file  # noqa: E402


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4), "n": torch.tensor([1])},
              tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def open_group_loader(path: str) -> Any:
    loader = SafeTensorsFileLoader(SingleGroup(), "cpu")
    loader.add_filenames({0: [path]})
    return loader


def open_parallel_loader(path: str) -> Any:
    loader = ParallelLoader(None, [path], use_tqdm_on_load=False)
    list(loader.iterate_weights())
    return loader


READERS: dict[str, Callable[[str], Any]] = {
    "safe_open": lambda path: safe_open(path, "pt"),
    "LazyModel": LazyModel,
    "SafeTensorsFileLoader": SafeTensorsFileLoader,
    "of a group": open_group_loader,
    "fastsafe_open": fastsafe_open,
    "ParallelLoader": open_parallel_loader,
}


@pytest.mark.parametrize("name", READERS)
def test_repr_has_path_tensors_and_dtypes(name: str, path: Path) -> None:
    reader = READERS[name](str(path))
    text = repr(reader)
    assert type(reader).__name__ in text or "SafeTensorsFileLoader" in text
    assert str(path) in text and "3 tensors" in text and "F32" in text and "I64" in text
    reader.close()
    assert str(path) in repr(reader) or "closed" in repr(reader)


def test_repr_of_a_list_has_first_file_and_count(path: Path) -> None:
    save_file({"c": torch.zeros(1)}, path.parent / "n.safetensors")
    files = [path, path.parent / "n.safetensors"]
    with LazyModel(files) as model:
        assert repr(model) == f"<LazyModel [{str(path)!r}, ... (2 files)]: 4 tensors of F32, I64>"
    assert "2 files" in repr(ParallelLoader(None, files, use_tqdm_on_load=False))
    assert "2 files" in repr(AutoLoader(None, files))


def test_repr_of_a_slice_names_its_tensor(path: Path) -> None:
    with safe_open(path, "pt") as file:
        text = repr(file.get_slice("a"))
    assert f"'a' of {str(path)!r}" in text and "[2, 3]" in text and "F32" in text


def test_repr_of_a_stream_counts_what_is_left(path: Path) -> None:
    with open_stream(path, names=["a", "n"]) as stream:
        next(stream)
        assert repr(stream) == f"<TensorStream {str(path)!r}: 2 tensors, 1 left>"
    assert repr(stream) == f"<TensorStream {str(path)!r}: 2 tensors, closed>"


def test_repr_has_no_query() -> None:
    from fastsafetensors._base.representation import format_paths

    assert format_paths("https://host/m.safetensors?token=secret") == "'https://host/m.safetensors'"


def test_a_lazy_model_is_pickled_as_its_files_and_choices(path: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    with LazyModel(path.name, mode="load", filter=lambda name: name != "n",
                   memory=1 << 20, expects=lambda name: True) as model:
        model["a"].sum()
        text = pickle.dumps(model)
        other = tmp_path / "elsewhere"
        other.mkdir()
        monkeypatch.chdir(other)
        for again in (pickle.loads(text), copy.copy(model)):
            assert again.keys() == model.keys() == ["a", "b"]
            assert torch.equal(again["a"].clone(), model["a"].clone())
            assert again._options == model._options and again.habits == model.habits


class Rows(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
    """A data set on a lazy model, for processes that get it by pickle."""

    def __init__(self, path: Path) -> None:
        self.model = LazyModel(path)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.model["b"][index].clone()


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_data_loader_reads_from_a_lazy_model(method: str, path: Path) -> None:
    loader = torch.utils.data.DataLoader(Rows(path), num_workers=1,
                                         multiprocessing_context=method)
    assert torch.cat(list(loader)).tolist() == [0.0] * 4
