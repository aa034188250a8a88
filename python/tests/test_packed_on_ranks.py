# SPDX-License-Identifier: Apache-2.0
"""F4 and F6, whose elements share bytes, on the ranks of a group, and read lazily."""

import json

import pytest
from conftest import write_raw
from test_rank_faults import COMMON, run_ranks

pytest.importorskip("torch")
import torch  # noqa: E402

from fastsafetensors.checkpoint import FastSafetensorsReader  # noqa: E402
from fastsafetensors.distributed import load_sharded  # noqa: E402
from fastsafetensors.lazy import LazyModel  # noqa: E402

HEADER = {"even": {"dtype": "F4", "shape": [4, 6], "data_offsets": [0, 12]},
          "odd": {"dtype": "F4", "shape": [4, 3], "data_offsets": [12, 18]},
          "f6": {"dtype": "F6_E2M3", "shape": [4, 4], "data_offsets": [18, 30]},
          "none": {"dtype": "F4", "shape": [0, 3], "data_offsets": [30, 30]}}

LOADERS = COMMON + """
from fastsafetensors import ParallelLoader, SafeTensorsFileLoader
path = f"{folder}/m.safetensors"
numbers = torch.arange(30, dtype=torch.uint8)
flat = {"even": numbers[:12], "odd": numbers[12:18], "f6": numbers[18:], "none": numbers[:0]}

def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(-1)

def check(name, tensor):
    assert torch.equal(bytes_of(tensor), flat[name]), (name, tensor)
    if name in ("odd", "f6"):
        assert tensor.format_dtype == ("F4" if name == "odd" else "F6_E2M3")

for strategy in ("auto", "slice", "broadcast", "scatter"):
    loader = SafeTensorsFileLoader(WORLD, "cpu", nogds=True, strategy=strategy)
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    for name in flat:
        check(name, buffer.get_tensor(name))
        check(name, buffer.get_sharded(name, -1))
        pushed = buffer.push_tensor(name, 1)
        assert (pushed is not None) == (rank == 1)
    even = flat["even"].reshape(4, 3)
    parts = buffer.get_sharded("even", 0), buffer.get_sharded("even", 1)
    assert torch.equal(parts[0].view(torch.uint8), even[rank * 2:rank * 2 + 2])
    assert torch.equal(parts[1].view(torch.uint8), even[:, rank * 2:rank * 2 + 2])
    for name in ("odd", "f6"):
        try:
            buffer.get_sharded(name, 0)
        except (ValueError, RuntimeError) as error:
            assert "share bytes" in str(error), error
        else:
            raise AssertionError("was divided")
for count in (0, 1, 64):
    loader = ParallelLoader(WORLD, (one for one in [path]), use_tqdm_on_load=False, nogds=True,
                            broadcast_run_tensors=count)
    found = dict(loader.iterate_weights())
    assert sorted(found) == sorted(flat)
    for name, tensor in found.items():
        check(name, tensor)
"""


@pytest.fixture
def path(tmp_path):
    return write_raw(tmp_path / "m.safetensors", json.dumps(HEADER), bytes(range(30)))


def test_programs_for_05(path):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no F4")
    run_ranks(LOADERS, path.parent, 2)


@pytest.mark.parametrize("strategy", ["auto", "slice", "broadcast", "scatter"])
def test_a_whole_tensor_on_one_rank(path, strategy):
    found = load_sharded(path, {"odd": None, "f6": None}, strategy=strategy)
    assert found["odd"].tolist() == list(range(12, 18))
    assert found["f6"].format_shape == (4, 4)


def test_lazily(path):
    """Bytes that torch cannot name are read at once, as F6 is."""
    odd = LazyModel(path)["odd"]
    assert odd.format_dtype == "F4" and odd.tolist() == list(range(12, 18))


def test_a_checkpoint_reader_names_the_tensor(path):
    with pytest.raises(ValueError, match="odd: this torch has no dtype for F4 of shape"):
        FastSafetensorsReader(path).read_metadata()
