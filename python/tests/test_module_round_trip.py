# SPDX-License-Identifier: Apache-2.0
"""Random modules, saved and loaded by every function: all values, or an error.

Modules have ties, views, shared parts, buffers, empty tensors and mixed dtypes; they are loaded in
place, assigned (also to the meta device), and as DTensors, by ours and by the safetensors package.
"""

import collections
import random

from fastsafetensors import fast_loading
from fastsafetensors.sharded import load_model_sharded
from fastsafetensors.torch import load_file, load_model, save_file, save_model

SEEDS = 24


class _Maker:
    """Makes the same module for each call, with different values."""

    def __init__(self, torch, seed):
        self.torch, self.seed = torch, seed

    def __call__(self):
        self.random = random.Random(self.seed)
        self.parameters, self.parts = [], []
        return self._module(0)

    def _tensor(self):
        torch, choose = self.torch, self.random.choice
        dtype = choose([torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.float64])
        shape = choose([(3, 4), (4,), (4, 4), (), (0, 3), (2, 3, 2)])
        return torch.randn(shape).mul(9).to(dtype)

    def _parameter(self):
        torch, kind = self.torch, self.random.random()
        if self.parameters and kind < 0.25:
            return self.random.choice(self.parameters)  # tied
        if self.parameters and kind < 0.35:
            other = self.random.choice(self.parameters)
            if other.dim() == 2 and other.numel():
                return torch.nn.Parameter(other.data.t(), requires_grad=False)
        made = torch.nn.Parameter(self._tensor(), requires_grad=False)
        self.parameters.append(made)
        return made

    def _module(self, depth):
        torch, rnd = self.torch, self.random
        kind = rnd.random()
        if self.parts and kind < 0.15:
            return rnd.choice(self.parts)  # a shared part
        if kind < 0.3:
            return torch.nn.BatchNorm1d(3)
        module = torch.nn.Module()
        for at in range(rnd.randrange(1, 4)):
            setattr(module, f"p{at}", self._parameter())
        if rnd.random() < 0.4:
            buffer = torch.randn(5, 3)
            module.register_buffer("full", buffer)
            cut = rnd.choice([lambda b: b[1:4], lambda b: b.t(), lambda b: b[:, 2], lambda b: b])
            module.register_buffer("cut", cut(buffer))
        if rnd.random() < 0.3:
            module.register_buffer("scratch", torch.randn(2), persistent=False)
        for at in range(rnd.randrange(0, 3) if depth < 3 else 0):
            setattr(module, f"m{at}", self._module(depth + 1))
        self.parts.append(module)
        return module


def _ties(module):
    """Return the groups of names that refer to one object."""
    groups = collections.defaultdict(set)
    for name, tensor in module.state_dict(keep_vars=True).items():
        groups[id(tensor)].add(name)
    return sorted(sorted(group) for group in groups.values())


def _savers(torch):
    import safetensors.torch as reference

    return {
        "save_model": lambda module, path: save_model(module, path),
        "their save_model": lambda module, path: reference.save_model(module, str(path)),
        "sharded": lambda module, path: fast_loading.save_safetensors_sharded(
            module.state_dict(), path, max_shard_size=200),
        "copies": lambda module, path: save_file(
            {name: tensor.clone(memory_format=torch.contiguous_format)
             for name, tensor in module.state_dict().items()}, path),
    }


def _loaders(torch, mesh):
    import safetensors.torch as reference

    def meta(make):
        with torch.device("meta"):
            return make()

    def assigned(place):
        def load(make, path):
            module = meta(make) if place == "meta" else make()
            load_model(module, path, assign=True)
            return module
        return load

    def in_place(load):
        def run(make, path):
            module = make()
            load(module, path)
            return module
        return run

    def spread(make, path):
        module = make()
        load_model_sharded(module, mesh, filename=path)
        return module

    return {
        "in place": in_place(load_model),
        "theirs": in_place(lambda module, path: reference.load_model(module, str(path))),
        "state dict": in_place(lambda module, path: module.load_state_dict(
            fast_loading.load_safetensors_sharded(path) if path.is_dir() else load_file(path))),
        "assigned": assigned("cpu"),
        "from meta": assigned("meta"),
        "spread": spread,
    }


def test_every_value_or_an_error(torch, mesh, tmp_path):
    torch.manual_seed(0)
    done, refused = collections.Counter(), collections.Counter()
    for seed in range(SEEDS):
        make = _Maker(torch, seed)
        source = make()
        expected = {name: t.clone() for name, t in source.state_dict().items()}
        for saver, save in _savers(torch).items():
            path = tmp_path / f"{seed}-{saver}"
            try:
                save(source, path)
            except (RuntimeError, ValueError):
                assert saver.startswith("their"), (seed, saver)  # views that it can't save
                continue
            for loader, load in _loaders(torch, mesh).items():
                try:
                    target = load(make, path)
                except (RuntimeError, KeyError, OSError) as error:
                    refused[loader] += 1
                    known = loader in ("theirs", "state dict", "spread")
                    assert known, (seed, saver, loader, error)
                    continue
                done[saver, loader] += 1
                for name, tensor in target.state_dict().items():
                    value = tensor.full_tensor() if loader == "spread" else tensor
                    assert torch.equal(value, expected[name]), (seed, saver, loader, name)
                assert _ties(target) == _ties(source), (seed, saver, loader)
    for saver in ("save_model", "sharded", "copies"):
        for loader in ("in place", "assigned", "from meta"):
            assert done[saver, loader] == SEEDS
    assert done["their save_model", "in place"] > SEEDS // 2
    assert done["save_model", "theirs"] > SEEDS // 2 and done["save_model", "spread"] > SEEDS // 3
