# SPDX-License-Identifier: Apache-2.0
"""Parts of a model on the ranks of a group: strategies, DTensors, bytes read and sent."""

import math

import pytest
from test_rank_faults import COMMON, run_ranks

CODE = COMMON + """
from fastsafetensors.sharded import load_model_sharded, load_sharded
from fastsafetensors.torch import save_file
import fastsafetensors.sharded as sharded
from fastsafetensors._ranks import torch_group
expected = torch.load(f"{folder}/expected.pt")
path = f"{folder}/model.safetensors"

def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))

def block(tensor, dim):
    if dim is None:
        return tensor
    n = -(-tensor.shape[dim] // size)
    begin = min(rank * n, tensor.shape[dim])
    return tensor.narrow(dim, begin, min(n, tensor.shape[dim] - begin))

dims = {}
for number, (name, tensor) in enumerate(expected.items()):
    dims[name] = None if not tensor.dim() or number % 3 == 2 else number % tensor.dim()
for strategy in ("slice", "broadcast", "scatter", "auto"):
    got = load_sharded(path, dims, WORLD, strategy=strategy)
    assert list(got) == list(dims)
    for name, dim in dims.items():
        assert same(got[name], block(expected[name], dim)), (strategy, name, dim)
        memory = got[name].untyped_storage().nbytes()
        assert dim is None or memory < 2 * expected[name].nbytes + 9000
    ways = [got.stats[way] for way in ("slice", "broadcast", "scatter")]
    assert sum(ways) == len(dims)
    if strategy == "slice":
        assert ways[0] == len(dims) and got.stats["bytes_sent"] == 0
    if strategy == "scatter":
        assert ways[0] == 0 and ways[2] > 0
    if strategy == "auto":  # all ranks are on one host: its page cache is shared, nothing is sent
        assert ways[0] == len(dims) and got.stats["bytes_sent"] == 0
        assert all(part.is_contiguous() for part in got.values())

# A rank that cannot map the files, or runs on another host.
own_identity = torch_group.own_identity
torch_group.own_identity = lambda: b"other 1 1".ljust(128) if rank == 1 else own_identity()
measure = sharded._Load.speeds
sharded._Load.speeds = lambda load: sharded.Speeds(1e8, 1e10)  # of a slow storage
got = load_sharded(path, dims, dist.new_group())
torch_group.own_identity, sharded._Load.speeds = own_identity, measure
assert size == 1 or got.stats["slice"] < len(dims)
assert all(same(got[name], block(expected[name], dim)) for name, dim in dims.items())
# What one rank writes is seen by no other rank, and not in the file.
for part in got.values():
    part.zero_()
got = load_sharded(path, dims, WORLD)
for part in got.values():
    part.zero_()
dist.barrier()
got = load_sharded(path, dims, WORLD)
assert all(same(got[name], block(expected[name], dim)) for name, dim in dims.items())

# Rows only: what all ranks read together is the model.
rows = {name: 0 for name, tensor in expected.items() if tensor.dim() and tensor.numel() > 1000}
got = load_sharded(path, rows, WORLD, strategy="slice")
read = torch.tensor([got.stats["bytes_read"]])
dist.all_reduce(read)
model_bytes = sum(expected[name].nbytes for name in rows)
assert model_bytes <= read.item() <= 1.1 * model_bytes, (read.item(), model_bytes)
# Sent: one rank reads, all have it.
got = load_sharded(path, rows, WORLD, strategy="scatter")
read = torch.tensor([got.stats["bytes_read"]])
dist.all_reduce(read)
assert read.item() <= 1.1 * model_bytes

mine = rank == 1
try:
    load_sharded(f"{folder}/none", rows, WORLD)
except FileNotFoundError as error:
    assert "none" in str(error)
else:
    raise AssertionError("no error")
# A rank that lacks the files gets its part from those that have them.
for strategy in ("auto", "scatter", "broadcast"):
    got = load_sharded(f"{folder}/none" if mine else path, dims, WORLD, strategy=strategy)
    for name, dim in dims.items():
        assert same(got[name], block(expected[name], dim)), (strategy, name)
    assert not mine or got.stats["bytes_read"] == 0
try:
    load_sharded(f"{folder}/none" if mine else path, rows, WORLD, strategy="slice")
except ValueError as error:
    assert "needs the files on all ranks" in str(error)
else:
    raise AssertionError("no error")
bad = f"{folder}/bad-{size}"
if mine:
    open(bad, "wb").write(b"junk")
from fastsafetensors import SafetensorError
fails(lambda: load_sharded(bad if mine else path, rows, WORLD), "bad", own=SafetensorError)
fails(lambda: load_sharded(path, {"none": 0} if mine else rows, WORLD), "none", own=KeyError)
fails(lambda: load_sharded(path, {"big": 1 if mine else 0}, WORLD),
      "ranks differ in the sharded load")
fails(lambda: load_sharded(path, {"big": 7 if mine else 0}, WORLD), "dimension 7", own=ValueError)
fails(lambda: load_sharded(path, rows, WORLD, strategy="slice" if mine else "scatter"),
      "strategy slice", "strategy scatter")
load_from = sharded.load_from
if rank == 1:
    def fail(*args, **options):
        raise OSError(5, "no bytes")
    sharded.load_from = fail
fails(lambda: load_sharded(path, dims, WORLD), "no bytes", own=OSError)
sharded.load_from = load_from
again()
cut = f"{folder}/cut.safetensors"
for strategy in ("slice", "scatter"):
    import shutil
    if rank == 0:
        shutil.copy(path, cut)
    dist.barrier()
    real = sharded._Load.methods
    def ways(self):
        result = real(self)
        dist.barrier()
        if mine:
            os.truncate(cut, os.path.getsize(cut) // 2)
        dist.barrier()
        return result
    sharded._Load.methods = ways
    try:
        load_sharded(cut, rows, WORLD, strategy=strategy)
    except Exception as error:
        assert "cut" in str(error), error
    else:
        raise AssertionError("no error")
    sharded._Load.methods = real
    again()

# DTensors, by placements, patterns and a tensor-parallel plan; on meshes of one and two dimensions.
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size,))
plan = {"l.*.q": "colwise", "l.*.o": "rowwise", "big": [Shard(1)]}
state = load_model_sharded(path, mesh, plan)
assert set(state) == set(expected)
assert state["l.0.q.weight"].placements == (Shard(0),)
assert state["l.0.o.weight"].placements == (Shard(1),)
assert state["l.0.o.bias"].placements == (Replicate(),)
for name, tensor in state.items():
    assert isinstance(tensor, DTensor) and tensor.shape == expected[name].shape
    assert same(tensor.full_tensor(), expected[name]), name
    reference = distribute_tensor(expected[name], mesh, tensor.placements) \
        if expected[name].is_floating_point() and expected[name].dim() else None
    assert reference is None or same(reference.to_local(), tensor.to_local()), name
if size == 4:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    state = load_model_sharded(path, square, {"big": [Shard(0), Shard(1)]})
    assert same(state["big"].full_tensor(), expected["big"])
    assert list(state["big"].to_local().shape) == [500, 256]
    # Stages of a pipeline: the ranks of each stage load their own tensors.
    stages = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "a", "b"))
    stage, wanted = stages["a", "b"], ("big", "large")[rank // 2]
    save_file({wanted: expected[wanted]}, f"{folder}/stage{rank}.safetensors")
    state = load_model_sharded(f"{folder}/stage{rank}.safetensors", stage, [Shard(0), Shard(1)])
    assert same(state[wanted].full_tensor(), expected[wanted])

def refused(mesh, text):
    try:
        load_model_sharded(path, mesh)
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError("no error")
from torch.distributed.device_mesh import DeviceMesh
if size > 1:
    refused(DeviceMesh("cpu", list(range(size))[::-1]), "must ascend along each dimension")
    alone = DeviceMesh("cpu", [0])
    if rank > 0:
        refused(alone, f"rank {rank} is not on the mesh [0]")

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.ModuleList([Layer()])
with torch.device("meta"):
    net = Net()
load_model_sharded(net, mesh, plan, filename=path)
assert all(isinstance(p.data, DTensor) and not p.is_meta for p in net.parameters())
assert same(net.l[0].q.weight.full_tensor().detach(), expected["l.0.q.weight"])
# Patterns match each name of a tied weight, whichever names the file has.
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64, bias=False)
        self.head.weight = self.emb.weight
tied = torch.arange(512.).reshape(64, 8)
for number, names in enumerate((["emb"], ["head"], ["emb", "head"])):
    for pattern in ("emb.weight", "head"):
        save_file({f"{name}.weight": tied.clone() for name in names}, f"{folder}/tied{rank}.sft")
        net2 = Tied()
        load_model_sharded(net2, mesh, {pattern: [Shard(0)]}, filename=f"{folder}/tied{rank}.sft")
        assert net2.head.weight is net2.emb.weight and net2.emb.weight.placements == (Shard(0),)
        assert same(net2.head.weight.full_tensor().detach(), tied)

try:
    load_model_sharded(net, mesh, plan)
except ValueError as error:
    assert "filename=" in str(error)
else:
    raise AssertionError("no error")
finish()
"""


@pytest.fixture
def folder(tmp_path, torch):
    """Return a folder with a model, its tensors, and the files of the other tests."""
    from fastsafetensors.torch import save_file

    torch.manual_seed(0)
    expected = {
        "big": torch.randn(1000, 512), "wide": torch.randn(3, 400_000), "odd": torch.randn(7, 5, 3),
        "l.0.q.weight": torch.randn(64, 64), "l.0.q.bias": torch.randn(64),
        "l.0.o.weight": torch.randn(64, 64), "l.0.o.bias": torch.randn(64),
        "half": torch.randn(333, 77).bfloat16(), "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
        "large": torch.randn(2000, 300).half(), "flags": torch.rand(11) > 0.5,
    }
    expected["missing"] = expected.pop("none")
    save_file(expected, tmp_path / "model.safetensors")
    torch.save(expected, tmp_path / "expected.pt")
    for number in range(4):
        save_file({f"t{number}.a": torch.full((10, 6), number)}, tmp_path / f"{number}.safetensors")
    return tmp_path


UNMATCHED = COMMON + """
import warnings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from fastsafetensors.distributed import load_model_sharded
mesh = init_device_mesh("cpu", (size,))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    load_model_sharded(f"{folder}/model.safetensors", mesh, {"big": [Shard(0)], "bih": [Shard(0)]})
said = [str(one.message) for one in said if "pattern" in str(one.message)]
assert said == ["no tensor matches these patterns of placements: bih"] * (rank == 0), said
finish()
"""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts(folder, size):
    run_ranks(CODE, folder, size)


def test_single_process(folder, torch):
    from fastsafetensors.sharded import load_sharded

    got = load_sharded(folder / "model.safetensors", {"big": 0, "odd": None})
    expected = torch.load(folder / "expected.pt")
    assert torch.equal(got["big"], expected["big"]) and torch.equal(got["odd"], expected["odd"])
    path = folder / "model.safetensors"
    for wrong, words in (({"big": "x"}, "big: a dimension must be"), (["big"], "dims must be"),
                         ({"big": True}, "big: a dimension must be an int or None, not True")):
        with pytest.raises(TypeError, match=words):
            load_sharded(path, wrong)
    with pytest.raises(ValueError, match="^big: dimension 9 is out of range"):
        load_sharded(path, {"big": 9})
    assert load_sharded(path, {}) == {}
    with pytest.raises(KeyError, match="'bih' is not in the model .close matches: big"):
        load_sharded(path, {"bih": 0})
    with pytest.raises(ValueError, match="strategy must be one of"):
        load_sharded(folder / "model.safetensors", {"big": 0}, strategy="x")


@pytest.mark.parametrize("shape, dim", [((4, 6), 2), ((4, 6), -3), ((), 0)])
def test_missing_dimension(torch, shape, dim):
    """A dimension that does not exist is an error with a message, and no other dimension is used
    instead."""
    from torch.distributed.tensor import Shard

    from fastsafetensors._ranks.rank_parts import part_on_mesh

    with pytest.raises(ValueError, match=f"dimension {dim} is out of range"):
        part_on_mesh(shape, [Shard(dim)], [2], [1])


def test_choice(torch):
    """"auto" chooses the method by speed. The formulas of choose_method are checked at their
    limits."""
    from fastsafetensors.sharded import Part, Speeds, choose_method, over_read, part_of

    slow_link, fast_link = Speeds(1e9, 1e8), Speeds(1e9, 1e12)
    big = 1 << 30
    assert choose_method(big, 1.0, False, slow_link, 4) == "slice"
    assert choose_method(big, 1.0, False, fast_link, 4) == "slice"  # no rank reads less than a part
    assert choose_method(big, 4.0, False, fast_link, 4) == "scatter"
    assert choose_method(big, 4.0, False, slow_link, 4) == "slice"
    assert choose_method(big, 1.0, True, fast_link, 4) == "broadcast"
    assert choose_method(big, 1.0, True, slow_link, 4) == "slice"
    assert choose_method(1000, 4.0, True, fast_link, 4) == "slice"  # small: no message
    assert over_read((100, 4096), part_of((100, 4096), 0, 1, 4), 2) == 1.0
    assert over_read((100, 4096), part_of((100, 4096), 1, 1, 4), 2) == 4.0  # 6 KiB gaps are read
    assert over_read((100, 1 << 20), part_of((100, 1 << 20), 1, 1, 4), 2) == 1.0
    assert over_read((3, 2), Part((3, 0), (3, 2)), 4) == 1.0
    for rows in (0, 1, 5, 12):
        cut = [part_of((rows, 3), 0, rank, 4).shape[0] for rank in range(4)]
        chunks = [len(c) for c in torch.arange(rows).chunk(4)] if rows else []
        assert cut == chunks + [0] * (4 - len(chunks)) and sum(cut) == rows
        assert math.prod(part_of((rows, 3), None, 1, 4).shape) == rows * 3


def test_a_plan_of_transformers(torch):
    transformers = pytest.importorskip("transformers")
    from torch.distributed.tensor import Replicate, Shard

    from fastsafetensors.sharded import find_placements

    plan = transformers.LlamaConfig().base_model_tp_plan
    expected = {
        "model.layers.3.self_attn.q_proj.weight": Shard(0),
        "model.layers.3.self_attn.o_proj.weight": Shard(1),
        "model.layers.3.self_attn.o_proj.bias": Replicate(),
        "layers.3.mlp.down_proj.weight": Shard(1),
        "model.layers.3.mlp.up_proj.bias": Shard(0),
        "model.norm.weight": Replicate(),
    }
    for name, placement in expected.items():
        assert find_placements(name, plan, 1) == [placement], name
    assert find_placements("x", None, 2) == [Replicate(), Replicate()]
    for style, ndim, dim in (("colwise", 3, 1), ("rowwise", 3, 2), ("colwise", 1, 0),
                             ("embedding_rowwise", 2, 0), ("embedding_colwise", 2, 1)):
        assert find_placements("experts.w", {"*": style}, 1, ndim) == [Shard(dim)], style
    assert find_placements("a.w", {"a": "moe_tp_experts"}, 1) == [Replicate()]
    assert find_placements("a.down_proj_bias", {"*": "rowwise"}, 1) == [Shard(1)]
    assert find_placements("a.bias", {"*": "rowwise"}, 1, 1) == [Replicate()]
    with pytest.raises(TypeError, match="a pattern of names must be a str, not 1"):
        find_placements("x", {1: [Shard(0)]}, 1)
    with pytest.raises(ValueError, match="2 placements for a mesh of 1"):
        find_placements("x", {"*": [Shard(0), Shard(1)]}, 1)


@pytest.mark.parametrize("style", ["packed_colwise", "packed_rowwise", "colwisse", ""])
def test_unknown_styles(torch, style):
    """A style that is not known is an error, not a copy of the tensor on every rank."""
    from fastsafetensors.distributed import find_placements

    with pytest.raises(ValueError, match=f"a.weight: the style '{style}' is not one of colwise, "):
        find_placements("a.weight", {"a": style}, 1)


@pytest.mark.parametrize("wrong", ["Shard(0)", "0", "[0]", "'colwise'", "{'a': Shard(0)}",
                                   "{'a': 0}", "{'a': [0]}", "{'a': {}}", "b'x'"])
def test_placements_that_are_no_list(torch, wrong):
    from torch.distributed.tensor import Shard

    from fastsafetensors.distributed import find_placements

    with pytest.raises(TypeError, match=r"a.b: placements must be a list such as \[Shard\(0\)\]"):
        find_placements("a.b", eval(wrong, {"Shard": Shard}), 1)


def test_patterns_without_a_match(folder, torch):
    """They are named in a warning; those of a model family's plan only if none has a match."""
    from torch.distributed.tensor import Shard

    from fastsafetensors._ranks.rank_parts import patterns_without_match

    names = ["model.layers.0.up.weight", "norm"]
    assert patterns_without_match({"up": [Shard(0)], "nrom": [Shard(0)]}, names) == ["nrom"]
    assert patterns_without_match({"layers.*.up": "colwise", "head": "rowwise"}, names) == []
    assert patterns_without_match({"upp": "colwise", "head": "rowwise"}, names) == ["upp", "head"]
    assert patterns_without_match([Shard(0)], names) == patterns_without_match(None, names) == []
    run_ranks(UNMATCHED, folder, 2)
