# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of lazy modules, counters and tied parameters; the memory of a save; a full disk."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from types import MappingProxyType
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")
from fastsafetensors import torch as fast_torch  # noqa: E402
from fastsafetensors.training import RNG, CheckpointManager  # noqa: E402


class Net(torch.nn.Module):
    """A module with a lazy layer, counters of BatchNorm, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.lazy = torch.nn.LazyLinear(8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.lazy(self.embed(rows))))


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Take steps on random rows."""
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randint(0, 20, (6,))).pow(2).mean().backward()
        optimizer.step()


def test_lazy_modules_counters_and_tied_parameters(tmp_path: pathlib.Path) -> None:
    """A run that is resumed with new modules, also with uninitialised ones, goes on as before."""
    torch.manual_seed(3)
    net = Net()
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match="net.lazy.weight: the parameter of a lazy module has"):
            manager.save(1, {"net": net})
        net(torch.arange(4))
        optimizer = torch.optim.AdamW(net.parameters())
        train(net, optimizer, 3)
        manager.save(2, {"net": net, "optimizer": optimizer, "rng": RNG})
        manager.wait()
        wanted = net.state_dict()
        saved = {name: value.clone() for name, value in wanted.items()}
        train(net, optimizer, 2)
        for is_fresh in (False, True):
            other = Net()
            if not is_fresh:
                other(torch.arange(4))
            weight = other.embed.weight
            assert manager.resume({"net": other}, verify=True) == 2
            assert other.embed.weight is weight is other.head.weight
            assert int(other.norm.num_batches_tracked) == 4
            assert all(torch.equal(value, saved[name])
                       for name, value in other.state_dict().items())
            again = torch.optim.AdamW(other.parameters())
            assert manager.resume({"optimizer": again, "rng": RNG}) == 2
            train(other, again, 2)
            for name, value in other.state_dict().items():
                assert torch.equal(value, wanted[name]), (name, is_fresh)
        latest = manager.latest()
        assert latest is not None
        loaded = latest.load()["net"]
        assert loaded["embed.weight"] is loaded["head.weight"]


BUDGET = textwrap.dedent("""
    import pathlib, re, sys, threading, torch
    from fastsafetensors.training import CheckpointManager

    def used():
        text = pathlib.Path("/proc/self/smaps_rollup").read_text()
        return 1024 * sum(int(re.search(rf"^{name}: +([0-9]+) kB", text, re.M)[1])
                          for name in ("Pss_Anon", "Pss_Shmem"))

    state = {"a": {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(64)}}
    with CheckpointManager(sys.argv[1], memory="32MiB", stage=sys.argv[2]) as manager:
        manager.save(0, {"a": {"x": torch.ones(1000)}})
        manager.wait()
        base = most = used()
        may_end = threading.Event()
        def watch():
            global most
            while not may_end.wait(0.001):
                most = max(most, used())
        thread = threading.Thread(target=watch)
        thread.start()
        handle = manager.save(1, state)
        manager.before_step()
        for tensor in state["a"].values():
            tensor.add_(1)
        manager.wait()
        may_end.set()
        thread.join()
        stats = handle.stats
        assert stats["memory_peak_bytes"] <= stats["memory_limit_bytes"] == 32 << 20, stats
        assert stats["bytes_staged"] >= 256 << 20
        assert stats["writer"]["bytes_read"] == 0
        assert most - base <= (32 + 32) << 20, (base, most)
        loaded = manager.latest(verify=True).load()["a"]
        assert all(bool(loaded[f"w{i}"].eq(i).all()) for i in range(64))
    """)


def test_tensors_that_differ_from_the_saved_ones(tmp_path: pathlib.Path) -> None:
    """Another dtype is converted in place; another shape is an error that changes nothing."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.full((3,), 1.5), "steps": 7, "rows": [1],
                         "count": torch.tensor([300, -1], dtype=torch.int32),
                         "net": torch.nn.Linear(2, 2)})
        manager.wait()
        mine, freed = torch.zeros(3, dtype=torch.float64), torch.zeros(3)
        freed.untyped_storage().resize_(0)
        assert manager.resume(MappingProxyType({"x": mine})) == 1
        assert mine.eq(1.5).all() and mine.dtype == torch.float64
        state = {"steps": 0, "x": torch.zeros(4)}
        with pytest.raises(ValueError, match=r"'x' has the shape \[3\], and that of the .* \[4\]"):
            manager.resume(state)
        assert state["steps"] == 0 and state["x"].eq(0).all()
        for dtype, fits in ((torch.int8, False), (torch.uint8, False), (torch.float32, False),
                            (torch.int64, True), (torch.int32, True)):
            count = torch.zeros(2, dtype=dtype)
            if fits:
                assert manager.resume({"count": count}) == 1
                assert count.tolist() == [300, -1]
                continue
            with pytest.raises(ValueError, match="can't hold its values"):
                manager.resume({"count": count})
        for bad in (torch.zeros(3, dtype=torch.int32), torch.zeros(3, device="meta"), freed):
            with pytest.raises(ValueError, match="can't hold its values|has no memory"):
                manager.resume({"x": bad})
        for fixed in ({"x": [1]}, {"rows": torch.zeros(1)}, {"net": torch.zeros(1)}):
            with pytest.raises(TypeError, match="can't replace a .* in a mappingproxy: use a dict"):
                manager.resume(MappingProxyType(fixed))
            assert manager.resume(dict(fixed)) == 1


@pytest.mark.parametrize("stage", ["copy", "lazy"])
def test_a_save_keeps_to_its_memory(tmp_path: pathlib.Path, stage: str) -> None:
    """256 MiB are saved with memory="32MiB": the process grows by that and 32 MiB at most."""
    subprocess.run([sys.executable, "-c", BUDGET, str(tmp_path), stage], check=True, timeout=600)


FULL = textwrap.dedent("""
    import os, resource, signal, sys, torch
    from fastsafetensors.training import CheckpointManager
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for stage in ("copy", "lazy"):
        with CheckpointManager(sys.argv[1], stage=stage, max_shard_size="1MB") as manager:
            manager.save(1, {"a": {"x": torch.ones(1000)}})
            manager.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            manager.save(2, {"a": {f"x{i}": torch.ones(1 << 18) for i in range(9)}})
            try:
                manager.wait()
            except OSError as error:
                assert "step-2" in str(error), error
            else:
                raise AssertionError("no error")
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert manager.latest(verify=True).step == 1
            assert os.listdir(sys.argv[1]) == ["step-1"], os.listdir(sys.argv[1])
            manager.save(3, {"a": {"x": torch.ones(1000)}})
            manager.wait()
            os.system(f"rm -r {sys.argv[1]}/step-3")
    """)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: pathlib.Path) -> None:
    """In a process whose files may not grow: an error, no folder of the step; the next works."""
    subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], check=True, timeout=600)


def test_values_that_a_narrower_dtype_holds(tmp_path: pathlib.Path) -> None:
    """Finite floats that would become infinite are an error; bools fit into every integer."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.tensor([1e30, 2.0]), "inf": torch.tensor([float("inf"), 3.0]),
                         "bool": torch.tensor([True, False])})
        manager.wait()
        narrow = {"bool": torch.zeros(2, dtype=torch.int8),
                  "inf": torch.zeros(2, dtype=torch.float16)}
        assert manager.resume(narrow) == 1
        assert narrow["bool"].tolist() == [1, 0] and narrow["inf"].tolist() == [float("inf"), 3.0]
        narrow = {"bool": torch.zeros(2), "x": torch.zeros(2, dtype=torch.float16)}
        with pytest.raises(ValueError, match="'x' has the dtype.*can't hold its values"):
            manager.resume(narrow)
        assert narrow["bool"].eq(0).all() and narrow["x"].eq(0).all()


class Distributed(torch.Tensor):
    """A tensor with the attributes by which DTensors are recognised."""

    placements = device_mesh = None


def test_dtensors_are_refused_before_anything_is_loaded(tmp_path: pathlib.Path) -> None:
    """Also those of a module, of an optimizer, and in dicts and lists."""
    module = torch.nn.Linear(2, 2)
    part = torch.zeros(2).as_subclass(Distributed)
    module.register_buffer("part", part)
    optimizer = torch.optim.SGD([torch.zeros(2)])
    optimizer.param_groups[0]["params"] = [part]
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": torch.ones(2), "b": torch.ones(2)})
        manager.wait()
        for target in (module, part, optimizer, {"deep": [part]}):
            state = {"a": torch.zeros(2), "b": target}
            with pytest.raises(TypeError, match=r"state\['b'\] has DTensors"):
                manager.resume(state)
            assert state["a"].eq(0).all()


class Versioned(torch.nn.Linear):
    """A module that notes the version of the state that it loads."""

    _version = 3

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[int | None] = []

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_versions_of_modules(tmp_path: pathlib.Path) -> None:
    """A module loads the version that was saved, as with torch.save(); a state dict keeps it."""
    net = torch.nn.Sequential(Versioned(), torch.nn.Linear(2, 2))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"net": net, "kept": {"a.b": net.state_dict()}, "x": net.state_dict()})
        manager.wait()
        Versioned._version = 4
        try:
            other = torch.nn.Sequential(Versioned(), torch.nn.Linear(2, 2))
            state = {"net": other, "kept": None, "x": other.state_dict()}
            assert manager.resume(state) == 1
        finally:
            Versioned._version = 3
        found = manager.latest()
    assert other[0].seen == [3]
    wanted = net.state_dict()._metadata
    assert state["x"]._metadata == state["kept"]["a.b"]._metadata == wanted
    assert found is not None and found.load()["net"]._metadata == wanted
    assert set(found.load()) == {"net", "kept", "x"}


def test_versions_of_dicts_with_equal_paths(tmp_path: pathlib.Path) -> None:
    """Names with dots, and keys of two types with one text, do not mix them up."""
    def versioned(version: int) -> Any:
        found = torch.nn.Linear(1, 1).state_dict()
        found._metadata = {"": {"version": version}}
        return found

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a.b": versioned(1), "a": {"b": versioned(2), 1: versioned(3),
                                                    "1": [versioned(4), {}], (1, "x"): {}},
                         "z": versioned(5)})
        manager.wait()
        found = manager.latest()
    assert found is not None
    state = found.load()
    dicts = [state["a.b"], state["a"]["b"], state["a"][1], state["a"]["1"][0], state["z"]]
    assert [one._metadata[""]["version"] for one in dicts] == [1, 2, 3, 4, 5]
    assert not hasattr(state["a"], "_metadata")


def test_versions_that_have_versions(tmp_path: pathlib.Path) -> None:
    """They are saved without them; those that contain themselves can't be saved."""
    inner = torch.nn.Linear(1, 1).state_dict()
    state = torch.nn.Linear(1, 1).state_dict()
    state._metadata = {"": inner._metadata, "more": inner}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": state})
        manager.wait()
        found = manager.latest()
        assert found is not None
        assert set(found.load()["a"]._metadata["more"]) == {"weight", "bias"}
        state._metadata["self"] = state._metadata
        with pytest.raises(TypeError, match="contains itself"):
            manager.save(2, {"a": state})


def test_a_description_that_holds_no_bytes(tmp_path: pathlib.Path) -> None:
    """It is a damaged checkpoint: the one before is taken."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": 1})
        manager.save(2, {"x": 2})
        manager.wait()
        for text in (torch.tensor(2**31), torch.tensor([[1]], dtype=torch.uint8)):
            fast_torch.save_file({"fastsafetensors.state": text},
                                 tmp_path / "step-2/checkpoint.safetensors",
                                 metadata={"step": "2"})
            assert manager.resume({"x": 0}) == 1


def test_a_reserved_name(tmp_path: pathlib.Path) -> None:
    """The name under which the versions of modules are saved."""
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="is reserved"):
        manager.save(1, {"fastsafetensors.metadata": 1})


def test_a_metric_that_requires_a_gradient(
    tmp_path: pathlib.Path, recwarn: pytest.WarningsRecorder
) -> None:
    """A loss is a number, without a warning of torch."""
    loss = torch.ones(2, requires_grad=True).sum()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": 1}, metric=loss)
        manager.wait()
        found = manager.latest()
    assert found is not None and found.metric == 2.0
    assert [str(one.message) for one in recwarn if "requires_grad" in str(one.message)] == []


@pytest.mark.parametrize("step", [True, False, "1", 1.5, {}])
def test_a_step_that_is_no_integer(tmp_path: pathlib.Path, step: Any) -> None:
    """The error names the argument."""
    with CheckpointManager(tmp_path) as manager:
        for call in (lambda: manager.save(step, {"x": 1}), lambda: manager.should_save(step),
                     lambda: manager.resume({"x": 1}, step=step)):
            with pytest.raises(TypeError, match="step must be an integer"):
                call()


def test_lazy_saves_in_inference_mode(tmp_path: pathlib.Path) -> None:
    """The save's own tensors have version counters there, too."""
    model, array = torch.nn.Linear(3, 3), numpy.ones(3)
    with CheckpointManager(tmp_path, stage="lazy") as manager, torch.inference_mode():
        manager.save(1, {"model": model, "array": array})
    state = {"model": torch.nn.Linear(3, 3), "array": numpy.zeros(3)}
    assert CheckpointManager(tmp_path).resume(state) == 1
    assert numpy.array_equal(state["array"], array)
    assert torch.equal(state["model"].weight, model.weight)


def channels_last() -> Any:
    return torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)


def transposed() -> Any:
    module = torch.nn.Conv2d(3, 8, 3)
    module.weight = torch.nn.Parameter(module.weight.detach().permute(3, 1, 0, 2).contiguous()
                                       .permute(2, 1, 3, 0))
    return module


def in_order() -> Any:
    return torch.nn.Conv2d(3, 8, 3)


def step(model: Any, optimizer: Any) -> None:
    """Train one step of one of these models."""
    model(torch.arange(243.0).view(1, 3, 9, 9).sin()).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("makers", [(channels_last, channels_last), (transposed, transposed),
                                    (channels_last, in_order), (in_order, channels_last),
                                    (transposed, channels_last)])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("is_plain", [False, True])
def test_tensors_keep_their_order_in_memory(
    tmp_path: pathlib.Path, makers: Any, optimizer: str, is_plain: bool
) -> None:
    """Fused optimizers pair the elements of a parameter and of its state by their addresses. The
    model that is resumed may have another order than the one that was saved.
    """
    def begin(make: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = make()
        more = {"momentum": 0.9} if optimizer == "SGD" else {}
        return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, fused=True,
                                                      **more)

    first, second = map(begin, makers)
    step(*first)
    shared = torch.arange(6.0).view(2, 3).t()
    array = numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": first[0].state_dict() if is_plain else first[0],
                         "optimizer": first[1], "x": [shared, shared],
                         "narrow": torch.ones(4, 4)[:, :2], "array": array, "empty":
                         torch.empty(2, 0, 3).permute(2, 1, 0)})
    state = {"model": None if is_plain else second[0], "optimizer": second[1], "x": None,
             "narrow": None, "array": None, "empty": None}
    assert CheckpointManager(tmp_path).resume(state) == 1
    if is_plain:
        second[0].load_state_dict(state["model"])
    for model in (first, second):
        step(*model)
    assert torch.allclose(first[0].weight, second[0].weight, rtol=1e-4, atol=1e-5)
    x: Any = state["x"]
    assert x[0] is x[1] and x[0].stride() == (1, 3) and torch.equal(x[0], shared)
    found: Any = state["array"]
    assert found.flags.f_contiguous and numpy.array_equal(found, array)


def test_a_description_with_another_order(tmp_path: pathlib.Path) -> None:
    """A list that does not have each dimension once is an error."""
    from fastsafetensors._checkpoints.state_codec import DESCRIPTION, decode_state

    for order in ("[0]", "[0, 0]", "[1, 2]", "[0, 1, 1]", "[true, 0]", '["0", 1]'):
        text = f'{{"x": {{"tensor": ["x", {order}]}}}}'
        description = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        with pytest.raises(ValueError, match="an order of others"):
            decode_state({"x": torch.zeros(2, 3), DESCRIPTION: description})
    text = '{"x": {"list": [{"tensor": ["x", [0, 1]]}, {"tensor": ["x", [1, 0]]}]}}'
    description = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="in two orders"):
        decode_state({"x": torch.zeros(2, 3), DESCRIPTION: description})


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_are_refused_by_their_path(tmp_path, layout):
    dense = torch.eye(4)
    sparse = {"coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc,
              "bsr": lambda: dense.to_sparse_bsr((2, 2)),
              "bsc": lambda: dense.to_sparse_bsc((2, 2))}[layout]()
    with CheckpointManager(tmp_path) as manager, pytest.raises(
            ValueError, match=r"a\.b: a sparse tensor can't be saved"):
        manager.save(1, {"a": {"b": sparse}})


class FlatState(torch.optim.Optimizer):
    """Keeps state in its own order, flat, and one tensor under two names."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["error"] = state["average"] = torch.zeros(parameter.shape)
                state["followed"] = torch.zeros_like(parameter)
            state["error"].view(-1).add_(parameter.grad.reshape(-1))
            state["followed"].add_(state["error"])
            parameter.sub_(state["followed"], alpha=0.1)


@pytest.mark.parametrize("makers", [(channels_last, channels_last), (channels_last, in_order),
                                    (transposed, channels_last)])
def test_state_with_an_order_of_its_own_keeps_it(tmp_path: pathlib.Path, makers: Any) -> None:
    """Only state that had the order of its parameter follows it."""
    def begin(make: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        return (model := make()), FlatState(model.parameters())

    first, second = map(begin, makers)
    step(*first)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": first[0], "optimizer": first[1]})
    assert CheckpointManager(tmp_path).resume({"model": second[0], "optimizer": second[1]}) == 1
    found = second[1].state[second[0].weight]
    assert found["error"] is found["average"] and found["error"].is_contiguous()
    assert found["followed"].stride() == second[0].weight.stride()
    for model in (first, second):
        step(*model)
    assert torch.allclose(first[0].weight, second[0].weight, rtol=1e-4, atol=1e-5)


def test_metadata_that_torch_cannot_read_is_left_out(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(2, 2)
    found = model.state_dict()
    found._metadata = {"": 5}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": found})
    assert CheckpointManager(tmp_path).resume({"model": model}) == 1


def test_loaded_tensors_lie_where_torch_would_have_them(tmp_path: pathlib.Path) -> None:
    state = {"list": [torch.arange(float(1001 + i)) for i in range(20)]}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
    checkpoint = CheckpointManager(tmp_path).latest()
    assert checkpoint is not None
    loaded = checkpoint.load()["list"]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded)
    assert all(map(torch.equal, loaded, state["list"]))
