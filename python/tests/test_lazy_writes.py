# SPDX-License-Identifier: Apache-2.0
"""Lazy tensors: writes, changed files, unusual orders."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import zstd_or_skip
from test_rank_faults import LEAVE_BEFORE_SHUTDOWN

torch = pytest.importorskip("torch")

import fastsafetensors._lazy.lazy_reads as lazy_reads  # noqa: E402
from fastsafetensors import SafetensorError  # noqa: E402
from fastsafetensors.lazy import LazyModel  # noqa: E402
from fastsafetensors.torch import load_file, save_file, save_model  # noqa: E402

ROWS, COLUMNS, LAYERS = 12, 8, 40
ALL = ROWS * COLUMNS * 4


def tensor(number: int, rows: int = ROWS) -> Any:
    return torch.arange(number, number + rows * COLUMNS * 1.0).reshape(rows, COLUMNS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({f"layers.{i}.w": tensor(i) for i in range(LAYERS)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


W = "layers.3.w"


def fill_numpy(t: Any) -> None:
    t.numpy()[:] = 7


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda t: t.mul_(2),
    "item": lambda t: t.__setitem__(1, 0),
    "operator": lambda t: t.__iadd__(1),
    "of a part": lambda t: t[1:3].zero_(),
    "of a part that was read": lambda t: (t.sum(), t[1:3].zero_()),
    "data": lambda t: t.data.fill_(5),
    "out": lambda t: torch.add(t.clone(), 1, out=t),
    "numpy": fill_numpy,
    "what float() gives": lambda t: t.float().mul_(2),
    "other dtype's view": lambda t: t.view(torch.int32).zero_(),
    "many at once": lambda t: torch._foreach_zero_([t]),
    "relu": lambda t: torch.nn.functional.leaky_relu(t, -3.0, inplace=True),
    "relu of what is negative": lambda t: torch.nn.functional.relu(t.neg_(), inplace=True),
    "overload": lambda t: torch.ops.aten.add_.Tensor(t, 1),
    "overload of a part": lambda t: torch.ops.aten.fill_.Scalar(t[1], 7),
    "packet": lambda t: torch.ops.aten.mul_(t, 2),
    "out of an overload": lambda t: torch.ops.aten.add.out(torch.ones(2), torch.ones(2), out=t),
    "statistics": lambda t: batch_norm(t[0], t[1].abs()),
    "statistics by torch": lambda t: torch.batch_norm(
        torch.randn(32, COLUMNS), None, None, t[0], t[1], True, 0.1, 1e-5, False),
    "statistics of a module": lambda t: train_step(t[0], t[1]),
    "norms of embeddings": lambda t: torch.nn.functional.embedding(
        torch.tensor([0, 1]), t, max_norm=1.0),
    "norms of a module": lambda t: torch.nn.Embedding.from_pretrained(t, max_norm=1.0)(
        torch.tensor([0, 1])),
    "script": lambda t: halve(t),
    "copy": lambda t: copy.copy(t).zero_(),
    "copy of a parameter": lambda t: copy.copy(
        torch.nn.Parameter(t, requires_grad=False)).zero_(),
    "values of a sparse one": lambda t: torch.sparse_coo_tensor(
        torch.arange(ROWS)[None], t, (ROWS, COLUMNS), is_coalesced=True).values().zero_(),
    "parts of a nested one": lambda t: torch.nested.nested_tensor_from_jagged(
        t, torch.tensor([0, 4, ROWS])).values().zero_(),
    "custom operator": lambda t: torch.ops.fst_test.fill(t),
}


def batch_norm(mean: Any, variance: Any) -> None:
    torch.nn.functional.batch_norm(torch.randn(32, COLUMNS), mean, variance, training=True)


def train_step(mean: Any, variance: Any) -> None:
    norm = torch.nn.BatchNorm1d(COLUMNS)
    state = {**norm.state_dict(), "running_mean": mean, "running_var": variance}
    norm.load_state_dict(state, assign=True)
    norm(torch.randn(32, COLUMNS)).sum().backward()


@torch.jit.script
def halve(t: torch.Tensor) -> torch.Tensor:
    return t.mul_(0.5)


OPERATORS = torch.library.Library("fst_test", "DEF")
OPERATORS.define("fill(Tensor(a!) t) -> ()")
OPERATORS.impl("fill", lambda t: (t.fill_(9), None)[1], "CPU")


@pytest.mark.parametrize("mode", ["auto", "map", "load"])
@pytest.mark.parametrize("write", WRITES, ids=str)
def test_writes_are_private(path: Path, write: str, mode: str) -> None:
    model = LazyModel(path, mode=mode)
    first, other = model[W], model[W]
    WRITES[write](first)
    assert torch.equal(other + 0, tensor(3)) and torch.equal(model[W].clone(), tensor(3))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "data": lambda t: setattr(t, "data", torch.ones(2, 3)),
    "resize_": lambda t: t.resize_(3, 4),
    "mul_ of data": lambda t: t.data.mul_(2),
    "mul_ of detach()": lambda t: t.detach().mul_(2),
    "mul_ after a use": lambda t: (t.sum(), t.mul_(2)),
    "requires_grad": lambda t: setattr(t, "requires_grad", True),
    "gradient": lambda t: (t.requires_grad_(), (t * 2).sum().backward()),
    "setter of what is detached": lambda t: (t.detach(), setattr(t, "requires_grad", True)),
    "out that is resized": lambda t: torch.add(torch.ones(5), 1, out=t.resize_(0)),
    "data of another dtype": lambda t: setattr(t, "data", t.data.half()),
    "t_ twice": lambda t: t.t_().t_(),
    "shifted": lambda t: t.__ilshift__(1) if not t.is_floating_point() else t.mul_(2),
}


@pytest.mark.parametrize("mode", ["auto", "load"])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_in_place_changes_equal_plain_tensors(path: Path, change: str, mode: str) -> None:
    lazy, plain = LazyModel(path, mode=mode)[W], tensor(3)
    number = hash(lazy)
    CHANGES[change](lazy)
    CHANGES[change](plain)
    assert lazy.shape == plain.shape and lazy.dim() == plain.dim() and hash(lazy) == number
    assert lazy.dtype == plain.dtype and lazy.stride() == plain.stride()
    assert lazy.is_contiguous() == plain.is_contiguous() and lazy.nbytes == plain.nbytes
    assert lazy.requires_grad == plain.requires_grad and torch.equal(lazy + 0, plain + 0)
    assert plain.grad is None and lazy.grad is None or torch.equal(lazy.grad, plain.grad)


@pytest.mark.parametrize("mode", ["auto", "map", "load"])
def test_functions_that_read_copy_nothing(path: Path, mode: str) -> None:
    """Only functions that may write are watched. Functions that read get the file's pages."""
    model = LazyModel(path, mode=mode)
    functional = torch.nn.functional
    uses: list[Callable[[Any], Any]] = [
        lambda t: functional.linear(torch.ones(COLUMNS), t), lambda t: t + 1, lambda t: 1 - t,
        lambda t: functional.layer_norm(torch.ones(2, COLUMNS), (COLUMNS,), t[0], t[1]),
        lambda t: functional.embedding(torch.tensor([1]), t), torch.sum, lambda t: t == 1,
        lambda t: functional.batch_norm(torch.ones(2, COLUMNS), t[0], t[1], training=False),
        lambda t: torch.stack([t, t]), lambda t: torch.einsum("ij,kj->ik", t, t)]
    for use in uses:
        lazy = model[W]
        assert torch.equal(use(lazy).float(), use(tensor(3)).float())
        assert lazy._lazy.tensor is None or lazy._lazy.is_shared is (mode != "load")


def test_trained_parameters_are_plain(path: Path) -> None:
    """A trained parameter becomes plain and stays the same object. A frozen one stays lazy until
    its gradient is needed."""
    import pickle

    model = LazyModel(path)
    lazy = model[W]
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.load_state_dict({"weight": lazy}, assign=True)
    if hasattr(torch.utils, "swap_tensors"):
        assert type(linear.weight) is torch.nn.Parameter
    assert isinstance(linear.weight, torch.nn.Parameter) and linear.weight.is_leaf
    assert torch.equal(linear.weight.data, tensor(3)) and torch.equal(lazy + 0, tensor(3))
    frozen = torch.nn.Parameter(model["layers.4.w"], requires_grad=False)
    frozen.loader = "mine"  # engines record the loader in this way
    assert isinstance(frozen, torch.nn.Parameter) and frozen._lazy.tensor is None
    for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert type(twin) is torch.nn.Parameter and not twin.requires_grad
        assert torch.equal(twin, tensor(4))
    other = type(frozen)(torch.ones(2), requires_grad=False)  # accelerate's offloading does this
    assert type(other) is torch.nn.Parameter and not other.requires_grad
    part = model["layers.5.w"][0]
    assert len(pickle.dumps(part)) < ALL * LAYERS // 2  # of it alone, not of the file
    frozen.requires_grad_(True)
    assert frozen.loader == "mine"
    (frozen * 3).sum().backward()
    assert torch.equal(frozen.grad, torch.full((ROWS, COLUMNS), 3.0))
    assert isinstance(frozen, torch.nn.Parameter) and torch.equal(frozen.detach(), tensor(4))
    assert torch.equal(model["layers.4.w"].clone(), tensor(4))


def test_data_parallel_training_of_assigned_tensors(path: Path) -> None:
    """torch's code for data parallel training uses parameters from C++."""
    program = f"""
import torch, torch.distributed as dist
from fastsafetensors.lazy import LazyModel
dist.init_process_group("gloo", init_method="file://{path}.store", rank=0, world_size=1)
linear = torch.nn.Linear({COLUMNS}, {ROWS}, bias=False)
linear.load_state_dict({{"weight": LazyModel({str(path)!r})["{W}"]}}, assign=True)
ranks = torch.nn.parallel.DistributedDataParallel(linear)
ranks(torch.ones(2, {COLUMNS})).sum().backward()
assert torch.equal(linear.weight.grad, torch.full(({ROWS}, {COLUMNS}), 2.0))
dist.destroy_process_group()
"""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    done = subprocess.run([sys.executable, "-c", LEAVE_BEFORE_SHUTDOWN + program],
                          capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_gradients_end_at_detach(path: Path) -> None:
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.load_state_dict({"weight": LazyModel(path)[W]}, assign=True)
    weight = linear.weight
    (weight * weight.detach()).sum().backward()
    assert torch.equal(weight.grad, tensor(3))
    assert not weight.data.requires_grad and not linear.state_dict()["weight"].requires_grad
    weight.data.mul_(2)
    weight.detach().numpy()[0, 0] = -1
    assert weight[0, 0] == -1 and torch.equal(weight[1:] * 1, 2 * tensor(3)[1:])


@pytest.mark.parametrize("mode", ["auto", "load"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_modules_of_another_dtype_are_saved(path: Path, mode: str, dtype: Any) -> None:
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.load_state_dict({"weight": LazyModel(path, mode=mode)[W]}, assign=True)
    linear.to(dtype)
    assert linear.weight.dtype == dtype and linear.weight.element_size() == dtype.itemsize
    assert linear.weight.to(torch.float32).dtype == torch.float32
    for save, name in ((save_file, "s"), (lambda state, to: save_model(linear, to), "m")):
        save(linear.state_dict(), path.with_name(name))
        saved = load_file(path.with_name(name))["weight"]
        assert saved.dtype == dtype and torch.equal(saved, tensor(3).to(dtype))


@pytest.mark.parametrize("mode", ["auto", "map", "load"])
def test_lazy_tensors_are_saved(path: Path, mode: str, tmp_path: Path) -> None:
    """Every API saves their values, even to the file that they are read from."""
    from fastsafetensors.fast_loading import save_safetensors
    from fastsafetensors.torch import load, save

    expected = {f"layers.{i}.w": tensor(i) for i in range(LAYERS)}
    with LazyModel(path, mode=mode) as model:
        lazy_tensors = {**dict(model), "part": model[W][2:4]}
        lazy_tensors["layers.0.w"].sum()
        del lazy_tensors[W]  # the part's bytes are among these
        lazy_tensors["other"] = torch.ones(2)
        save_safetensors(lazy_tensors, str(tmp_path / "set"))
        results = [load(save(lazy_tensors)), load_file(tmp_path / "set")]
        save_file(lazy_tensors, path)
        results.append(load_file(path))
    for result in results:
        assert result.keys() == lazy_tensors.keys()
        assert torch.equal(result["part"], tensor(3)[2:4])
        assert all(torch.equal(result[n], t) for n, t in expected.items() if n != W)


def test_writes_are_visible_through_other_strides(path: Path) -> None:
    part = LazyModel(path)[W][:, 1:3]
    plain = tensor(3)[:, 1:3]
    for t in (part, plain):
        t.add_(1)
    seen, expected = (t.as_strided((3, 2), (4, 1), 1) for t in (part, plain))
    assert torch.equal(seen + 0, expected)


def test_window_dropped_during_a_read(
        path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If other threads replace the readahead window, a thread that waits for a slice of the old one
    reads it itself."""
    model = LazyModel(path, mode="load", memory=4 * ALL)
    make_item = lazy_reads.make_item
    dropped = []

    def drop_first(loader: Any, number: int) -> Any:
        window = model._reads._window
        while window is not None and window.loader is not loader:
            window = window.before
        if window is not None and len(dropped) < 3:
            dropped.append(window)
            model._reads._drop(window)
        return make_item(loader, number)

    monkeypatch.setattr(lazy_reads, "make_item", drop_first)
    for i in range(LAYERS):
        assert torch.equal(model[f"layers.{i}.w"].clone(), tensor(i))
    assert dropped


@pytest.mark.parametrize("mode", ["auto", "load"])
def test_strides_stay_those_of_the_file(path: Path, mode: str) -> None:
    rows, columns = LazyModel(path, mode=mode)[W][3:9], LazyModel(path, mode=mode)[W][:, 2:5]
    for part, plain in ((rows, tensor(3)[3:9]), (columns, tensor(3)[:, 2:5])):
        for _ in range(2):
            again = part.as_strided((2, 2), part.stride(), part.storage_offset())
            assert torch.equal(again + 0, plain[:2, :2])
            part.sum()


@pytest.mark.parametrize("needs", [False, True])
def test_parameters_from_lazy_tensors(path: Path, needs: bool) -> None:
    model = LazyModel(path)
    parameter = torch.nn.Parameter(model[W], requires_grad=needs)
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad == needs
    if needs:
        (parameter * 3).sum().backward()
        assert torch.equal(parameter.grad, torch.full((ROWS, COLUMNS), 3.0))
        torch.optim.SGD([parameter], 1.0).step()
        assert torch.equal(parameter.detach() + 3, tensor(3))
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.load_state_dict({"weight": model[W]}, assign=True)
    assert torch.equal(linear(torch.ones(COLUMNS)), tensor(3).sum(1))
    assert torch.equal(model[W].clone(), tensor(3))


def test_second_name_reads_nothing_more(path: Path) -> None:
    model = LazyModel(path, ahead=False, mode="load")
    first = model[W]
    second, third = first.detach(), first.data
    assert torch.equal(second + 0, first + 0) and torch.equal(third + 0, first + 0)
    assert model.stats()["bytes_needed"] == ALL and model.stats()["loads"] == 1


def test_attribute_queries_read_nothing(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    model, plain = LazyModel(path), tensor(3)
    lazy = model[W]
    assert lazy.type() == plain.type() and lazy._version == plain._version
    assert lazy.is_sparse_csr == plain.is_sparse_csr
    assert torch.empty(12, 8, device="meta").copy_(lazy, True).shape == plain.shape
    assert torch.zeros(8).expand_as(lazy).shape == plain.shape
    assert model.stats()["bytes_needed"] == 0
    assert torch.equal(lazy[numpy.int64(3)] + 0, plain[3])
    assert torch.equal(lazy[numpy.int64(3) : numpy.int32(5)] + 0, plain[3:5])
    assert model.stats()["bytes_needed"] == 3 * COLUMNS * 4


@pytest.mark.skipif(not hasattr(torch._C, "_set_throw_on_mutable_data_ptr"), reason="older torch")
def test_invalid_data_pointer_is_an_error(path: Path) -> None:
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.to_dlpack(LazyModel(path)[W])  # runs torch's own code


# ---- files that change, unexpected orders ----


@pytest.mark.parametrize("rows", [4, 4000])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["auto", "map", "load"])
def test_a_file_that_is_overwritten_is_an_error(
    tmp_path: Path, mode: str, ahead: bool, rows: int
) -> None:
    path, other = tmp_path / "m.safetensors", tmp_path / "other.safetensors"
    save_file({f"layers.{i}.w": tensor(i, rows) for i in range(8)}, path)
    save_file({f"layers.{i}.w": tensor(100 + i, rows) for i in range(8)}, other)

    def load() -> None:
        with LazyModel(path, mode=mode, ahead=ahead) as model:
            for number, (_, lazy) in enumerate(model):
                lazy.clone()
                if number == 3:
                    os.utime(path, (1, 1))
                    with open(path, "r+b") as file:
                        file.write(other.read_bytes())

    with pytest.raises(SafetensorError, match=r"m\.safetensors"):
        load()


def test_closed_model_reads_nothing_ahead(path: Path) -> None:
    model = LazyModel(path, mode="load")
    kept = dict(model)
    for number in range(3):
        kept[f"layers.{number}.w"].clone()
    model.close()
    ahead = model.stats()["boxes_ahead"]
    assert torch.equal(kept["layers.30.w"].clone(), tensor(30))
    assert model.stats()["boxes_ahead"] == ahead and model._reads._window is None


def test_reused_tensor_is_read_alone(path: Path) -> None:
    model = LazyModel(path, mode="load", memory=8 * ALL)
    for number in range(20):
        model[f"layers.{number}.w"].clone()
    before = model.stats()
    assert torch.equal(model["layers.0.w"].clone(), tensor(0))
    after = model.stats()
    assert after["boxes_ahead"] == before["boxes_ahead"] and after["loads"] == before["loads"] + 1
    for number in range(20, LAYERS):
        model[f"layers.{number}.w"].clone()
    assert model.stats()["loads"] <= after["loads"] + (LAYERS - 20) // 3


def test_second_access_order_is_read_ahead(path: Path) -> None:
    model = LazyModel(path, mode="load", memory=9 * ALL)  # two windows of 4
    for _ in range(2):
        for number in range(LAYERS):
            assert torch.equal(model[f"layers.{number}.w"].clone(), tensor(number))
    assert model.stats()["loads"] <= 2 * (LAYERS // 4 + 3)


def test_changed_access_order_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    made = {f"layers.{i}.w": torch.zeros(1 << 20, dtype=torch.uint8) for i in range(LAYERS)}
    made.update({f"layers.{i}.n": torch.full((8,), float(i)) for i in range(LAYERS)})
    save_file(made, path)
    first = LazyModel(path, mode="load")
    for _, lazy in first:
        lazy.clone()
    again = LazyModel(path, mode="load", habits=first.habits)
    for name, lazy in again:
        if name.endswith("n"):
            assert lazy[0] == int(name.split(".")[1])
    assert again.stats()["bytes_read"] <= 16 << 20  # not all of it


def test_out_of_memory_in_readahead_is_ignored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = lazy_reads.open_load

    def refuse(model: Any, items: Any, **options: Any) -> Any:
        if len(items) > 1:
            raise MemoryError("none left")
        return once(model, items, **options)

    monkeypatch.setattr(lazy_reads, "open_load", refuse)
    model = LazyModel(path, mode="load")
    for number in range(LAYERS):
        assert torch.equal(model[f"layers.{number}.w"].clone(), tensor(number))
    assert model.stats()["boxes_ahead"] == 0


@pytest.mark.parametrize("option", [{"mode": "fast"}, {"cache": "fast"}, {"threads": -1},
                                    {"threads": 1 << 80}], ids=str)
def test_bad_options_are_refused_at_once(path: Path, option: dict[str, Any]) -> None:
    with pytest.raises((ValueError, OverflowError, SafetensorError)):
        LazyModel(path, **option)


def test_zero_limit_disables_readahead(path: Path) -> None:
    model = LazyModel(path, mode="load", memory=0)
    for number in range(8):
        model[f"layers.{number}.w"].clone()
    stats = model.stats()
    assert stats["boxes_ahead"] == 0 and stats["bytes_read"] == stats["bytes_needed"] == 8 * ALL


# ---- resident tensors ----


def is_cached(path: Path) -> bool:
    model = LazyModel(path)
    model[W].clone()
    return model.stats()["loads"] == 0


def test_resident_tensors_are_not_read(path: Path) -> None:
    if not is_cached(path):
        pytest.skip("the kernel does not report residency")
    model, calls = LazyModel(path), 0
    target = torch.zeros(6, COLUMNS)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for number in range(LAYERS):
        if number == 20:
            sys.setprofile(count)
        target.copy_(model[f"layers.{number}.w"].narrow(0, 2, 6))
        sys.setprofile(None) if number == 20 else None
        assert torch.equal(target, tensor(number)[2:8])
    stats = model.stats()
    assert stats["loads"] == stats["bytes_read"] == stats["boxes_ahead"] == 0
    assert stats["bytes_needed"] == LAYERS * ALL // 2
    assert calls <= 70, calls  # the cost of one tensor, independent of the size of the model


def test_verified_tensors_are_read(path: Path) -> None:
    save_file({f"layers.{i}.w": tensor(i) for i in range(8)}, path, manifest=True)
    with open(path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(SafetensorError, match="digest"):
        LazyModel(path, verify=True)["layers.7.w"].clone()


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    header = (b'{"layers.0.w":{"dtype":"F32","shape":[2,2],"data_offsets":[1,17]},'
              b'"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}')
    data = tensor(5).reshape(-1)[:4].numpy().tobytes()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" + data)
    model = LazyModel(path)
    assert torch.equal(model["layers.0.w"][1:] + 0, torch.tensor([[7.0, 8.0]]))
    assert torch.equal(model["layers.0.w"] + 0, torch.tensor([[5.0, 6.0], [7.0, 8.0]]))


DTYPES = ("float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu "
          "float4_e2m1fn_x2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64")


@pytest.mark.parametrize("mode", ["auto", "load"])
@pytest.mark.parametrize("name", DTYPES.split())
def test_every_dtype(tmp_path: Path, name: str, mode: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this torch lacks the dtype")
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 2 if name == "bool" else 256, (6 * 4 * dtype.itemsize,),
                        dtype=torch.uint8, generator=generator)
    made = raw.view(dtype).reshape(6, 4)
    save_file({"layers.0.w": made, "odd": torch.zeros(3, dtype=torch.int8)},
              tmp_path / "m.safetensors")
    lazy = LazyModel(tmp_path / "m.safetensors", mode=mode)["layers.0.w"]
    assert lazy.dtype == dtype and lazy.shape == made.shape

    def bits(part: Any) -> list[int]:
        return part.contiguous().view(torch.uint8).tolist()

    assert bits(lazy[2:5].detach()) == bits(made[2:5]) and bits(lazy) == bits(made)
    assert bits(lazy.t()[1:3].contiguous()) == bits(made.t()[1:3].contiguous())


def test_misaligned_elements(tmp_path: Path) -> None:
    header = (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
              b'"b":{"dtype":"C64","shape":[2],"data_offsets":[4,20]},'
              b'"c":{"dtype":"U8","shape":[4],"data_offsets":[20,24]},'
              b'"d":{"dtype":"C64","shape":[2],"data_offsets":[24,40]}}')
    header += b" " * (-len(header) % 8)
    floats = torch.arange(10.0)
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + floats.numpy().tobytes())
    model = LazyModel(path)
    assert torch.view_as_real(model["b"].clone()).flatten().tolist() == [1, 2, 3, 4]
    assert torch.view_as_real(model["d"].clone()).flatten().tolist() == [6, 7, 8, 9]


def test_files_of_a_server(tmp_path: Path) -> None:
    from web_server import web_server

    made = {f"layers.{i}.w": tensor(i, 200) for i in range(6)}
    save_file(made, tmp_path / "m.safetensors")
    with web_server(tmp_path) as server, LazyModel(server.url + "m.safetensors") as model:
        for number, (_, lazy) in enumerate(model):
            assert torch.equal(lazy[10:30] + 0, tensor(number, 200)[10:30])


def test_compressed_files(tmp_path: Path) -> None:
    zstd_or_skip()
    save_file({f"layers.{i}.w": tensor(i, 200).bfloat16() for i in range(6)},
              tmp_path / "packed.safetensors", compress=True)
    with LazyModel(tmp_path / "packed.safetensors") as model:
        for number, (_, lazy) in enumerate(model):
            assert torch.equal(lazy[:, 2:4] + 0, tensor(number, 200).bfloat16()[:, 2:4])


def test_collectives_are_known_to_write() -> None:
    """Collectives that write are recognised by name, because their schemas do not declare it."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from fastsafetensors._lazy.lazy_writers import WRITES as WRITER
    from fastsafetensors._lazy.lazy_writers import write_kind_of

    for name in ("allreduce_", "reduce_", "broadcast_", "recv_", "reduce_scatter_"):
        assert write_kind_of(getattr(torch.ops.c10d, name).default, None) == WRITER, name
    assert write_kind_of(torch.ops.c10d.send.default, None) != WRITER


@pytest.mark.parametrize("mode", ["auto", "load"])
def test_gradients_stay(tmp_path: Path, mode: str) -> None:
    """Asking for gradients again, and memory with another layout, keep leaf and gradient."""
    save_file({"g": torch.ones(3, 4)}, tmp_path / "g")
    lazy, plain = LazyModel(tmp_path / "g", mode=mode)["g"], torch.ones(3, 4)
    for tensor in (lazy, plain):
        for _ in range(2):
            tensor.requires_grad_(True)
            (tensor * 3).sum().backward()
        sum_of_all = (tensor * 2).sum()
        tensor.as_strided((2,), (1,), 0)
        tensor.requires_grad = True
        sum_of_all.backward()
        with torch.no_grad():
            tensor.unsqueeze_(0)
        with pytest.raises(RuntimeError):
            tensor.resize_(5, 5)
        tensor.requires_grad_(False)
        tensor.requires_grad_(True)
    assert torch.equal(lazy.grad, plain.grad) and lazy.shape == plain.shape == (1, 3, 4)
