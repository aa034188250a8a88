# SPDX-License-Identifier: Apache-2.0
"""Errors: their classes, messages and attributes, pickling, and cost."""

import copy
import difflib
import gc
import json
import pickle
import sys
import weakref

import pytest

from fastsafetensors import SafetensorError, SafeTensorsFileLoader, SingleGroup, _core, safe_open
from fastsafetensors.torch import load_file, save_file


@pytest.fixture
def path(tmp_path, torch):
    """A file of one tensor."""
    save_file({"layer.weight": torch.arange(12.0).reshape(3, 4)}, tmp_path / "w.st")
    return tmp_path / "w.st"


def _missing(path):
    loader = SafeTensorsFileLoader(SingleGroup())
    loader.add_filenames({0: [str(path)]})
    buffer = loader.copy_files_to_device()
    with safe_open(path, "pt") as f:
        for ask in (f.get_tensor, f.get_slice, buffer.get_tensor, buffer.get_shape):
            with pytest.raises(SafetensorError) as caught:
                ask("layer.weigth")
            yield caught.value


def test_unknown_name_error_has_all_expected_classes(path):
    for error in _missing(path):
        assert isinstance(error, KeyError) and isinstance(error, ValueError)
        assert "close matches: layer.weight" in str(error) and error.tensor == "layer.weigth"
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, KeyError) and str(again) == str(error)


def test_close_matches_are_sought_when_the_error_is_shown(path, monkeypatch):
    calls = []
    original = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches",
                        lambda *args, **options: calls.append(1) or original(*args, **options))
    errors = list(_missing(path))
    assert not calls
    str(errors[0])
    assert calls == [1]


def test_close_matches_among_many_names(monkeypatch):
    from fastsafetensors._base.errors import unknown_tensor

    looked = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda word, names, n: looked.append(names)
                        or names[:1])
    names = [f"model.layers.{i}.{kind}" for i in range(10000) for kind in ("weight", "bias")]
    str(unknown_tensor("model.layer.3.bias", "unknown", names))
    assert len(looked[0]) <= 500 and all(name.endswith(".bias") for name in looked[0])


def test_every_error_has_its_attributes(path, tmp_path):
    for work in (lambda: safe_open(path, "xx"), lambda: safe_open(path, "pt", device="zz"),
                 lambda: safe_open(path, "pt", backend="zz")):
        with pytest.raises(SafetensorError) as caught:
            work()
        error = caught.value
        assert (error.tag, error.file, error.tensor, error.byte_offset) == ("", "", "", None)


def test_an_edit_that_changes_nothing_is_an_error(tmp_path, torch):
    from fastsafetensors import edit_header, read_header

    path = tmp_path / "m"
    save_file({"a": torch.ones(2)}, path, {"known": "1"})
    before = path.stat().st_ino
    with pytest.raises(KeyError, match=r"has no metadata 'knwon' \(close matches: known\)"):
        edit_header(path, {"knwon": None})
    with pytest.raises(ValueError, match="nothing to change"):
        edit_header(path)
    assert path.stat().st_ino == before
    edit_header(path, {"known": None, "new": "2"})
    assert list(read_header(path).metadata.values()) == [{"new": "2"}]


def test_system_errors_have_their_class(tmp_path, torch):
    target = tmp_path / "none" / "m.st"
    with pytest.raises(SafetensorError) as caught:
        save_file({"w": torch.ones(1)}, target)
    error = caught.value
    assert isinstance(error, FileNotFoundError) and error.errno == 2
    assert str(target) in str(error) and error.filename == str(target)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, FileNotFoundError) and isinstance(again, SafetensorError)
    assert str(again) == str(error)


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_numbers_of_numpy_are_indices(framework, path, torch):
    np = pytest.importorskip("numpy")
    with safe_open(path, framework) as f:
        part = f.get_slice("layer.weight")
        assert part[np.int64(2)].tolist() == [8.0, 9.0, 10.0, 11.0]
        assert part[np.int32(-1), np.uint8(1)] == 9.0
        if framework == "pt":
            read = []
            original, f._read_whole = f._read_whole, lambda *a: read.append(a) or original(*a)
            assert part[np.int64(1)].tolist() == [4.0, 5.0, 6.0, 7.0]
            assert part[torch.tensor(1)].tolist() == [4.0, 5.0, 6.0, 7.0]
            assert not read  # the row alone


def test_a_path_in_other_spellings_is_one_path(path, tmp_path, torch):
    save_file({"b": torch.ones(1)}, tmp_path / "b.st")
    loader = SafeTensorsFileLoader(SingleGroup())
    loader.add_filenames({0: [str(path), path, bytes(path), tmp_path / "b.st"]})
    buffer = loader.copy_files_to_device()
    assert set(buffer.key_to_rank_lidx) == {"layer.weight", "b"}
    assert buffer.get_filename("layer.weight") == str(path)
    loader = SafeTensorsFileLoader(SingleGroup())
    loader.add_filenames({0: [bytes(path), tmp_path / "b.st"]})
    assert loader.copy_files_to_device().get_filename("layer.weight") == str(path)


def test_pickle_of_an_open_file(path):
    with safe_open(path, "np") as f:
        again = pickle.loads(pickle.dumps(f))
        part = pickle.loads(pickle.dumps(f.get_slice("layer.weight")))
    assert again.get_tensor("layer.weight").shape == (3, 4) and part[0].shape == (4,)
    with pytest.raises(SafetensorError, match="closed"):
        pickle.dumps(f)


def test_missing_device_is_found_first(path, torch, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    opened = []
    monkeypatch.setattr("fastsafetensors.torch.open_files", lambda *args: opened.append(args))
    with pytest.raises((RuntimeError, AssertionError)):
        load_file(path, device="cuda")
    assert not opened


@pytest.mark.parametrize("name", ["F6_E2M3", "F6_E3M2", "F4"])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_packed_floats_are_unchanged(framework, name, raw, torch, tmp_path):
    """Tensors of a dtype that the framework lacks are loaded as bytes, and saved with their
    original dtype."""
    import importlib

    module = importlib.import_module(f"fastsafetensors.{framework}")
    bits = 4 if name == "F4" else 6
    source = raw('{"w":{"dtype":"%s","shape":[2,8],"data_offsets":[0,%d]}}' % (name, 2 * bits),
                 bytes(range(2 * bits)))
    tensors = module.load_file(source)
    module.save_file(tensors, tmp_path / "again")
    with safe_open(tmp_path / "again", "np") as f:
        meta = f.get_tensor_meta("w")
    assert (meta.dtype, meta.shape) == (name, [2, 8])
    assert (tmp_path / "again").read_bytes()[-2 * bits :] == bytes(range(2 * bits))


COPIES = {
    "clone": lambda t: t.clone(), "detach": lambda t: t.detach(), "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu", copy=True), "contiguous": lambda t: t.contiguous(),
    "data": lambda t: t.data, "torch.clone": lambda t: sys.modules["torch"].clone(t),
    "deepcopy": copy.deepcopy, "pickle": lambda t: pickle.loads(pickle.dumps(t)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["F6_E2M3", "F6_E3M2", "F4"])
def test_copies_of_packed_elements_are_packed(raw, torch, name, how, tmp_path):
    """F6, and F4 with an odd last dimension: torch and numpy have no dtype for them."""
    import fastsafetensors.numpy as fst_numpy

    shape, size = ([4, 3] if name == "F4" else [8]), 6
    path = raw(json.dumps({"w": {"dtype": name, "shape": shape, "data_offsets": [0, size]}}),
               bytes(range(size)))
    same = COPIES[how](load_file(path)["w"])
    save_file({"w": same}, tmp_path / "again.st")
    assert (tmp_path / "again.st").read_bytes()[-size:] == bytes(range(size))
    with safe_open(tmp_path / "again.st", "pt") as f:
        assert (f.get_slice("w").get_dtype(), f.get_slice("w").get_shape()) == (name, shape)
    assert not hasattr(same[1:], "format_dtype") and not hasattr(same + 1, "format_dtype")
    assert not hasattr(same.to(torch.float32), "format_dtype")
    if how in ("deepcopy", "pickle"):
        array = COPIES[how](fst_numpy.load_file(path)["w"])
        fst_numpy.save_file({"w": array.copy()}, tmp_path / "again.st")
        with safe_open(tmp_path / "again.st", "np") as f:
            assert (f.get_slice("w").get_dtype(), f.get_slice("w").get_shape()) == (name, shape)
        assert array[1:].format_dtype is None and (array + 1).format_dtype is None


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_packed_elements_are_not_split(raw, torch, framework):
    """Indices count elements, several of which share a byte. A slice along a dimension of packed
    elements is an error."""
    path = raw(json.dumps({"a": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]},
                           "b": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [4, 7]}}),
               bytes([0x10, 0x32, 0x54, 0x76, 1, 2, 3]))
    with safe_open(path, framework) as f:
        a, b = f.get_slice("a"), f.get_slice("b")
        for index in ((slice(None), slice(0, 2)), (slice(None), slice(1, 3)), (..., 0), (0, 0)):
            with pytest.raises(SafetensorError, match="share bytes"):
                a[index]
        for index in (slice(0, 2), 0):
            with pytest.raises(SafetensorError, match="share bytes"):
                b[index]
        assert len(a[...].view("u1" if framework == "np" else torch.uint8).reshape(-1)) == 4
        if framework == "pt":
            assert a[1].view(torch.uint8).tolist() == [0x54, 0x76]
            assert a[:1].view(torch.uint8).tolist() == [[0x10, 0x32]]


def test_rows_of_packed_pairs_are_slices(raw, torch):
    """Any index that leaves the last dimension whole; with an odd one, torch gets only bytes."""
    path = raw(json.dumps({"even": {"dtype": "F4", "shape": [2, 3, 4], "data_offsets": [0, 12]},
                           "odd": {"dtype": "F4", "shape": [4, 3], "data_offsets": [12, 18]},
                           "f6": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [18, 21]}}),
               bytes(range(21)))
    with safe_open(path, "pt") as f:
        even = f.get_slice("even")
        pairs = torch.arange(12, dtype=torch.uint8).reshape(2, 3, 2)
        for index in ((0, ...), (slice(0, 2), ...), (slice(0, 2), slice(1, 3), slice(None)),
                      (..., slice(0, 4)), (None, 1), (1, 2)):
            wanted = pairs[index[:-1]] if index[-1] == slice(0, 4) else pairs[index]
            assert torch.equal(even[index].view(torch.uint8), wanted), index
        for index in ([0, 1], torch.tensor([0]), [True, False]):
            with pytest.raises(SafetensorError, match="share bytes"):
                f.get_slice("even")[index]
        for index in (0, slice(0, 2), None, (0, ...), [0]):
            with pytest.raises(SafetensorError, match="share bytes"):
                f.get_slice("odd")[index]
        for name in ("odd", "f6"):
            for index in (..., slice(None), ()):
                same = f.get_slice(name)[index]
                assert same.format_shape == tuple(f.get_slice(name).get_shape())


def test_errors_of_bytes_have_the_same_detail(torch):
    """Errors of loads from bytes have the same attributes as those of files."""
    import fastsafetensors.torch as front

    with pytest.raises(SafetensorError) as caught:
        front.load(b"nonsense")
    assert caught.value.tag == "HeaderTooLarge" and caught.value.file == "memory"
    assert "/proc" not in str(caught.value)


class _Watching(dict):
    """Tensors that record whether the garbage collector was enabled when they were accessed."""

    def items(self):
        assert gc.isenabled()
        return super().items()


def test_garbage_collector_stays_enabled(path, torch, tmp_path):
    """The collector belongs to the process, and another thread may be changing its state."""
    save_file(_Watching({"a": torch.ones(3)}), tmp_path / "a.st")
    loader = _core.Model(path).load()
    seen = []
    loader.export(None, lambda tensor: seen.append(gc.isenabled()), 0)
    assert seen == [True]


def test_caller_memory_is_released(path):
    """An allocator that refers to its load does not keep it alive."""
    class Give:
        def __call__(self, size):
            import torch

            base = torch.empty(size + 4096, dtype=torch.uint8)
            return base[-base.data_ptr() % 4096:][:size]

    give = Give()
    give.load = _core.Model(path).load(mode="load", allocator=give)
    tensor = give.load.item(0)
    seen = weakref.ref(give)
    del give
    gc.collect()
    assert seen() is None and tensor.shape == (3, 4)


@pytest.mark.parametrize("index", [True, False, (True, 1), (0, True), (0, 1), (..., 2), ()])
def test_numpy_indices_are_the_references(path, index):
    np = pytest.importorskip("numpy")
    reference = pytest.importorskip("safetensors")
    with reference.safe_open(path, "np") as theirs, safe_open(path, "np") as ours:
        wanted, got = theirs.get_slice("layer.weight")[index], ours.get_slice("layer.weight")[index]
    assert isinstance(got, np.ndarray) and isinstance(wanted, np.ndarray)
    assert got.shape == wanted.shape and (got == wanted).all()


@pytest.mark.parametrize("kind", ["nested", "jagged", "name", "metadata"])
def test_reference_refusals(torch, kind):
    """Errors have the same class as in the reference."""
    reference = pytest.importorskip("safetensors.torch")
    import fastsafetensors.torch as ours

    parts, metadata = [torch.ones(2), torch.ones(3)], None
    tensors = {"a": torch.ones(2)}
    if kind in ("nested", "jagged"):
        layout = torch.jagged if kind == "jagged" else torch.strided
        tensors = {"a": torch.nested.nested_tensor(parts, layout=layout)}
    elif kind == "name":
        tensors = {"a\ud800": torch.ones(2)}
    else:
        metadata = {"k": "\ud800"}
    with pytest.raises(Exception) as wanted:
        reference.save(tensors, metadata)
    with pytest.raises(wanted.type):
        ours.save(tensors, metadata)


@pytest.mark.parametrize("name", ["index", "folder"])
def test_an_index_or_a_folder_in_a_list_of_files_is_named(name, tmp_path):
    torch = pytest.importorskip("torch")
    from fastsafetensors import ParallelLoader, SafetensorError
    from fastsafetensors.fast_loading import save_safetensors_sharded
    from fastsafetensors.lazy import LazyModel
    from fastsafetensors.torch import load_file

    save_safetensors_sharded({f"w{i}": torch.ones(64, 64) for i in range(3)}, tmp_path,
                             max_shard_size=20_000)
    path = tmp_path / "model.safetensors.index.json" if name == "index" else tmp_path
    words = "it is an index of shards" if name == "index" else "a folder \\(to load"
    for load in (load_file, LazyModel,
                 lambda files: list(ParallelLoader(None, files, use_tqdm_on_load=False))):
        with pytest.raises((SafetensorError, OSError), match=words):
            load([path])
