# SPDX-License-Identifier: Apache-2.0
"""Lazy tensors: equal to plain tensors, and the bytes read by each use."""

from __future__ import annotations

import copy
import os
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import SafetensorError  # noqa: E402
from fastsafetensors.lazy import LazyModel, LazyTensor  # noqa: E402
from fastsafetensors.torch import save_file  # noqa: E402

ROWS, COLUMNS = 12, 8
ELEMENT = 4
ALL = ROWS * COLUMNS * ELEMENT


def tensors(layers: int = 1) -> dict[str, Any]:
    made = {f"layers.{i}.w": torch.arange(i, i + 96.0).reshape(ROWS, COLUMNS)
            for i in range(layers)}
    made["experts"] = torch.arange(48.0).reshape(2, 6, 4)
    made["scale"] = torch.tensor(3.5)
    made["empty"] = torch.empty(0, 4)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(tensors(8), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def fill(source: Any, shape: tuple[int, ...] | None = None) -> Any:
    return torch.zeros(shape or tuple(source.shape)).copy_(source)


# An operation, and the bytes that it needs of the tensor (None: not checked).
USES: dict[str, tuple[Callable[[Any], Any], int | None]] = {
    "narrow": (lambda t: fill(t.narrow(0, 3, 4)), 4 * 8 * 4),
    "narrow keyword": (lambda t: fill(t.narrow(dim=1, start=2, length=3)), 12 * 3 * 4),
    "narrow negative": (lambda t: fill(t.narrow(-1, -3, 2)), 12 * 2 * 4),
    "torch.narrow": (lambda t: fill(torch.narrow(t, 1, 2, 4)), 12 * 4 * 4),
    "narrow twice": (lambda t: fill(t.narrow(0, 2, 6).narrow(0, 1, 2)), 2 * 8 * 4),
    "narrow to nothing": (lambda t: fill(t.narrow(0, 2, 0)), 0),
    "both dimensions": (lambda t: fill(t.narrow(0, 6, 6).narrow(1, 4, 4)), 6 * 4 * 4),
    "row": (lambda t: fill(t[3]), 8 * 4),
    "last row": (lambda t: fill(t[-1]), 8 * 4),
    "element": (lambda t: t[3, 4].item(), 4),
    "rows": (lambda t: fill(t[2:5]), 3 * 8 * 4),
    "columns": (lambda t: fill(t[:, 2:5]), 12 * 3 * 4),
    "ellipsis": (lambda t: fill(t[..., 1]), 12 * 4),
    "step": (lambda t: fill(t[1:8:3]), 7 * 8 * 4),
    "new dimension": (lambda t: fill(t[None, 2:4]), 2 * 8 * 4),
    "beyond the end": (lambda t: fill(t[10:40]), 2 * 8 * 4),
    "transpose": (lambda t: fill(t.transpose(0, 1).narrow(0, 2, 2)), 12 * 2 * 4),
    "t": (lambda t: fill(t.t()[1:3]), 12 * 2 * 4),
    "T": (lambda t: fill(t.T[:3]), 12 * 3 * 4),
    "mT": (lambda t: fill(t.mT[:3]), 12 * 3 * 4),
    "permute": (lambda t: fill(t.permute(1, 0)[2]), 12 * 4),
    "permute list": (lambda t: fill(torch.permute(t, [1, 0])[2]), 12 * 4),
    "view": (lambda t: fill(t.view(3, 4, 8)[1]), 4 * 8 * 4),
    "view -1": (lambda t: fill(t.view(-1, 16)[1:2]), 2 * 8 * 4),
    "view list": (lambda t: fill(t.view([2, 6, 8])[1]), 6 * 8 * 4),
    "view of columns": (lambda t: fill(t.view(12, 2, 4)[:, 1]), 12 * 4 * 4),
    "reshape": (lambda t: fill(t.reshape(2, 48)[1]), 6 * 8 * 4),
    "reshape copies": (lambda t: fill(t.t().reshape(-1)), ALL),
    "flatten": (lambda t: fill(t.flatten()[20:24]), 4 * 4),
    "unflatten": (lambda t: fill(t.unflatten(0, (3, 4))[2]), 4 * 8 * 4),
    "unsqueeze": (lambda t: fill(t.unsqueeze(0)[0, 5:6]), 8 * 4),
    "squeeze": (lambda t: fill(t[2:3].squeeze(0)), 8 * 4),
    "expand": (lambda t: fill(t[2:3].expand(4, 8)), 8 * 4),
    "chunk": (lambda t: fill(t.chunk(3)[1]), 4 * 8 * 4),
    "chunk columns": (lambda t: fill(t.chunk(2, dim=-1)[1]), 12 * 4 * 4),
    "torch.chunk": (lambda t: fill(torch.chunk(t, 5, 1)[3]), 12 * 2 * 4),
    "split": (lambda t: fill(t.split(5)[2]), 2 * 8 * 4),
    "split sizes": (lambda t: fill(t.split([2, 3, 7])[1]), 3 * 8 * 4),
    "tensor_split": (lambda t: fill(t.tensor_split(4)[3]), 3 * 8 * 4),
    "unbind": (lambda t: fill(t.unbind()[4]), 8 * 4),
    "unbind columns": (lambda t: fill(t.unbind(1)[4]), 12 * 4),
    "iteration": (lambda t: fill(list(t)[4]), 8 * 4),
    "detach": (lambda t: fill(t.detach()[4]), 8 * 4),
    "data": (lambda t: fill(t.data[4]), 8 * 4),
    "movedim": (lambda t: fill(t.movedim(0, 1)[4]), 12 * 4),
    "swapaxes": (lambda t: fill(t.swapaxes(0, 1)[4]), 12 * 4),
    "diagonal": (lambda t: fill(t.diagonal()), 8 * 8 * 4),
    "select": (lambda t: fill(t.select(1, 4)), 12 * 4),
    "as_strided": (lambda t: fill(t.as_strided((2, 2), (8, 1), 9)), 2 * 2 * 4),
    "view_as": (lambda t: fill(t.view_as(torch.empty(8, 12))[7]), 2 * 8 * 4),
    "expand_as": (lambda t: fill(t[0].expand_as(torch.empty(3, 8))), 8 * 4),
    "to the same": (lambda t: fill(t.to(torch.float32)[4]), 8 * 4),
    "to the cpu": (lambda t: fill(t.to("cpu")[4]), 8 * 4),
    "cpu": (lambda t: fill(t.cpu()[4]), 8 * 4),
    "contiguous": (lambda t: fill(t[2:4].contiguous()), 2 * 8 * 4),
    "contiguous copies": (lambda t: t.t()[1:2].t().contiguous(), 12 * 4),
    "meta": (lambda t: t.to("meta").shape, 0),
    "copy to meta": (lambda t: torch.empty(12, 8, device="meta").copy_(t).shape, 0),
    "shape": (lambda t: (t.shape, t.size(), t.size(0), t.stride(), t.dim(), t.numel()), 0),
    "attributes": (lambda t: (t.dtype, t.device, t.is_contiguous(), len(t), t.nbytes), 0),
    "empty_like": (lambda t: (torch.empty_like(t).shape, t.new_zeros(3)), 0),
    "zeros_like": (lambda t: torch.zeros_like(t), 0),
    "isinstance": (lambda t: isinstance(t, torch.Tensor), 0),
    "to another dtype": (lambda t: t[3].to(torch.bfloat16), 8 * 4),
    "half": (lambda t: t[3:4].half(), 8 * 4),
    "float": (lambda t: t[3].float(), 8 * 4),
    "clone": (lambda t: t[3].clone(), 8 * 4),
    "sum": (lambda t: t[3].sum().item(), 8 * 4),
    "max": (lambda t: t.max(), ALL),
    "arithmetic": (lambda t: t[3] * 2 + 1, 8 * 4),
    "right side": (lambda t: 2 - t[3], 8 * 4),
    "comparison": (lambda t: t[3] == t[3], 2 * 8 * 4),
    "abs": (lambda t: torch.abs(t[3]), 8 * 4),
    "matmul": (lambda t: torch.ones(1, 12) @ t, ALL),
    "cat": (lambda t: torch.cat([t[1:2], t[5:6]]), 2 * 8 * 4),
    "stack": (lambda t: torch.stack((t[1], t[5])), 2 * 8 * 4),
    "repeat_interleave": (lambda t: t[1:2].repeat_interleave(2, 0), 8 * 4),
    "index tensor": (lambda t: t[torch.tensor([1, 3])], ALL),
    "index list": (lambda t: t[[1, 3]], ALL),
    "mask": (lambda t: t[t > 5], ALL),
    "numpy": (lambda t: t[3].numpy().tolist(), 8 * 4),
    "tolist": (lambda t: t[3].tolist(), 8 * 4),
    "item": (lambda t: t[3][2].item(), 4),
    "bool": (lambda t: bool(t[3][2] > 0), 4),
    "dlpack": (lambda t: torch.from_dlpack(t[3]), 8 * 4),
    "storage": (lambda t: t.untyped_storage().nbytes(), ALL),
    "data_ptr": (lambda t: t.data_ptr() != 0, ALL),
    "index_copy": (lambda t: torch.zeros(3, 8).index_copy_(0, torch.tensor([1]), t[3:4]), 8 * 4),
    "setitem": (lambda t: torch.zeros(3, 8).__setitem__(1, t[3]), 8 * 4),
    "non_blocking": (lambda t: torch.zeros(8).copy_(t[3], non_blocking=True), 8 * 4),
    "parameter": (lambda t: torch.nn.Parameter(t[3], requires_grad=False).sum(), 8 * 4),
    "parameter's data": (lambda t: torch.nn.Parameter(torch.zeros(8)).data.copy_(t[3]), 8 * 4),
    "repr": (lambda t: repr(t[3]), 8 * 4),
    "deepcopy": (lambda t: copy.deepcopy(t[3]), 8 * 4),
    "pickle": (lambda t: pickle.loads(pickle.dumps(t[3])).shape, 8 * 4),
    "view of bytes": (lambda t: t[3].view(torch.uint8), 8 * 4),
    "where": (lambda t: torch.where(torch.tensor(True), t[3], t[3]), None),
    "out": (lambda t: torch.add(t[3], 1, out=torch.zeros(8)), 8 * 4),
    "equal": (lambda t: torch.equal(t[3], t[3]), None),
    "allclose": (lambda t: torch.allclose(t[3], t[3]), None),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("use", USES, ids=str)
def test_operations_equal_plain_tensors(path: Path, use: str) -> None:
    act, needed = USES[use]
    model = LazyModel(path, ahead=False)
    assert same(act(model["layers.3.w"]), act(tensors(8)["layers.3.w"]))
    if needed is not None:
        assert model.stats()["bytes_needed"] == needed


@pytest.mark.parametrize("act", [
    lambda t: t[12], lambda t: t[-13], lambda t: t.narrow(0, 10, 3), lambda t: t.narrow(0, 0, -1),
    lambda t: t.narrow(2, 0, 1), lambda t: t.view(5, 5), lambda t: t.view(-1, -1),
    lambda t: t[1, 1, 1], lambda t: t[::-1], lambda t: t.transpose(0, 2), lambda t: t.t().view(-1),
    lambda t: t.chunk(0), lambda t: t.permute(0, 0), lambda t: t.expand(3, 8),
    lambda t: t.as_strided((2, 3), (60, 1), 34), lambda t: t.as_strided((3,), (1,), 10**7),
    lambda t: t[3:5].as_strided((97,), (1,)), lambda t: t.as_strided((2,), (-1,), 9),
    lambda t: torch.zeros(3).copy_(t), lambda t: t.item(), lambda t: t.numpy(1, 2, 3, 4),
])
def test_refusals_equal_torch(path: Path, act: Callable[[Any], Any]) -> None:
    lazy, plain = LazyModel(path)["layers.3.w"], tensors(8)["layers.3.w"]
    with pytest.raises(Exception) as expected:  # noqa: PT011, B017
        act(plain)
    with pytest.raises(type(expected.value)) as found:
        act(lazy)
    words = str(expected.value)
    assert str(found.value).splitlines()[0] == words.splitlines()[0]


def random_step(rng: random.Random, tensor: Any) -> Callable[[Any], Any]:
    rank = tensor.dim()
    dim = rng.randrange(rank) if rank else 0
    size = tensor.shape[dim] if rank else 0
    start = rng.randint(0, size)
    length = rng.randint(0, size - start)
    other = rng.randrange(rank) if rank else 0
    order = rng.sample(range(rank), rank)
    steps: list[Callable[[Any], Any]] = [lambda t: t.unsqueeze(dim), lambda t: t.squeeze(),
                                         lambda t: t.permute(order), lambda t: t.reshape(-1)]
    if rank:
        steps += [
            lambda t: t.narrow(dim, start, length), lambda t: t.transpose(dim, other),
            lambda t: t[start:], lambda t: t[..., ::2], lambda t: t.flatten(0, dim),
            lambda t: t.chunk(2, dim)[-1], lambda t: t.unbind(dim)[0] if size else t,
            lambda t: t.unflatten(dim, (2, -1)) if size and size % 2 == 0 else t,
            lambda t: t.split(2, dim)[-1], lambda t: t.expand(3, *t.shape),
        ]
    return rng.choice(steps)


@pytest.mark.parametrize("seed", range(4))
def test_view_chains_equal_plain_tensors(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    model, plain = LazyModel(path), tensors(8)
    for _ in range(150):
        name = rng.choice(list(plain))
        lazy, own = model[name], plain[name]
        for _ in range(rng.randint(1, 6)):
            step = random_step(rng, own)
            lazy, own = step(lazy), step(own)
            assert tuple(lazy.shape) == tuple(own.shape)
        assert torch.equal(lazy.clone(), own)


def test_view_reads_its_slice_once(path: Path) -> None:
    model = LazyModel(path, ahead=False, mode="load")
    part = model["layers.3.w"].narrow(0, 4, 2)
    assert model.stats() == {"bytes_needed": 0, "bytes_read": 0, "loads": 0, "boxes_ahead": 0}
    for _ in range(3):
        part.sum()
    assert model.stats() == {"bytes_needed": 64, "bytes_read": 64, "loads": 1, "boxes_ahead": 0}
    part[1].sum()  # of bytes that were read already
    assert model.stats()["loads"] == 1


def test_next_layer_is_read_ahead(path: Path) -> None:
    model = LazyModel(path, mode="load")
    for name, tensor in model:
        if name.startswith("layers"):
            fill(tensor.narrow(0, 6, 6))
    stats = model.stats()
    assert stats["bytes_needed"] == 8 * ALL // 2
    assert stats["loads"] == 2 and stats["boxes_ahead"] == 7
    assert stats["bytes_read"] < 8 * ALL  # small gaps are read over


def test_unexpected_tensors_are_not_read_ahead(path: Path) -> None:
    model = LazyModel(path, mode="load", expects=lambda name: name < "layers.3")
    for number in range(3):
        fill(model[f"layers.{number}.w"][:6])
    assert model.stats()["boxes_ahead"] == 2


def test_wrong_guesses_cost_no_byte(path: Path) -> None:
    model, plain = LazyModel(path, mode="load", memory=4 * ALL), tensors(8)
    rng = random.Random(3)
    for number in [0, 1, 2, 5, 3, 7, 6, 4, 1, 0]:
        name = f"layers.{number}.w"
        first = rng.randint(0, 6)
        for part in (slice(0, 6), slice(first, first + 3)):
            assert torch.equal(fill(model[name][part]), plain[name][part])


def test_access_order_is_reused_by_the_next_load(path: Path) -> None:
    first = LazyModel(path, mode="load")
    for number in range(8):
        fill(first[f"layers.{number}.w"][3:])
    again = LazyModel(path, mode="load", habits=first.habits)
    for number in range(8):
        fill(again[f"layers.{number}.w"][3:])
    assert again.stats()["loads"] == 1 and again.stats()["boxes_ahead"] == 8


def test_memory_limit_is_kept(path: Path) -> None:
    """Readahead and the tensor in use are within it."""
    model = LazyModel(path, mode="load", memory=4 * ALL)
    for number in range(8):
        fill(model[f"layers.{number}.w"])
        reads = model._reads
        window, waiting = reads._window, 0
        while window is not None:
            waiting += window.loader.stats()["bytes_requested"]
            window = window.before
        assert waiting + ALL <= 4 * ALL


def test_python_attributes_are_kept(path: Path) -> None:
    tensor = LazyModel(path)["layers.3.w"]
    tensor.shard_id = "q"
    assert isinstance(tensor, LazyTensor) and tensor.shard_id == "q"
    assert tensor.detach() is not tensor


def test_tensors_outlive_the_model(path: Path) -> None:
    with LazyModel(path) as model:
        kept = [tensor for _, tensor in model]
    plain = tensors(8)
    del model
    assert all(torch.equal(t.clone(), p) for t, p in zip(
        kept, (plain[n] for n in LazyModel(path).keys()), strict=True))


def test_threads_read_once_each(path: Path) -> None:
    model = LazyModel(path, mode="load", ahead=False)
    shared = model["layers.1.w"]
    results: list[Any] = []
    barrier = threading.Barrier(8)

    def act() -> None:
        barrier.wait()
        with torch.inference_mode():
            results.append((fill(shared), fill(model["layers.2.w"][2:4])))

    threads = [threading.Thread(target=act) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain = tensors(8)
    assert all(torch.equal(a, plain["layers.1.w"]) and torch.equal(b, plain["layers.2.w"][2:4])
               for a, b in results) and len(results) == 8
    assert model.stats()["bytes_needed"] == ALL + 8 * 2 * 8 * 4


def test_two_loads_learn_the_same_habits(path: Path) -> None:
    """One load may record slices while another one iterates over them."""
    first = LazyModel(path, mode="load")
    fill(first["layers.0.w"][0:1])
    (known,) = first.habits.values()

    class Box(tuple[Any, ...]):
        """Another thread records slices while this one is compared."""

        def __hash__(self) -> int:
            known[(3, 0), (4, COLUMNS)] = None
            return super().__hash__()

    known[Box(((1, 0), (2, COLUMNS)))] = None
    del known[(3, 0), (4, COLUMNS)]
    again = LazyModel(path, mode="load", habits=first.habits)
    assert torch.equal(fill(again["layers.0.w"][0:1]), tensors(8)["layers.0.w"][0:1])
    assert again.stats()["boxes_ahead"] > 8


def test_forked_process_reads_independently(path: Path) -> None:
    model = LazyModel(path, mode="load")
    for number in range(3):
        fill(model[f"layers.{number}.w"])
    child = os.fork()
    if child == 0:
        good = torch.equal(fill(model["layers.4.w"]), tensors(8)["layers.4.w"])
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(fill(model["layers.4.w"]), tensors(8)["layers.4.w"])


def test_errors_name_the_file_and_the_tensor(path: Path) -> None:
    model = LazyModel(path, mode="load")
    lazy = model["layers.7.w"]
    with pytest.raises(KeyError):
        model["layers.9.w"]
    with pytest.raises(SafetensorError):
        LazyModel(path, names=["nothing"])
    with pytest.raises(ValueError, match="positive"):
        LazyModel(path, memory=-1)
    with pytest.raises(SafetensorError, match="device"):
        LazyModel(path, "meta")
    os.truncate(path, path.stat().st_size - 600)
    with pytest.raises(SafetensorError, match=str(path)):
        lazy.sum()


def test_copy_to_meta_is_counted(path: Path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Counter(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None
                               ) -> Any:
            if func is torch.ops.aten.copy_.default and args[0].device.type == "meta":
                seen.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    model = LazyModel(path)
    with Counter():
        torch.empty(4, 8, device="meta").copy_(model["layers.1.w"].narrow(0, 2, 4))
    assert seen == [32] and model.stats()["bytes_needed"] == 0
