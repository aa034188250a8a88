#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fuzzes the Python code: index expressions of slices, and DLPack.

    python fuzz/fuzz_python.py slices|dlpack --seconds 60 [--seed N]

slices: any index of a slice gives the same result or error as torch gives for the loaded tensor.
dlpack: any export, by any arguments, is refused or gives the same bytes, also to an importer that
is told another version, stream or device, and whatever is dropped first; addresses, shapes and
strides of dlpack_at() that make no sense are refused.
Both print how many cases they tried; a case that fails prints its seed.
"""

import argparse
import gc
import os
import random
import tempfile
import time

import numpy as np
import torch

from fastsafetensors import _core, safe_open
from fastsafetensors.torch import save_file


def make_tensors(random_):
    """Tensors of all ranks and many dtypes."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
              torch.int16, torch.float64, torch.complex64]
    tensors = {}
    for rank in range(6):
        for number in range(3):
            shape = [random_.choice([0, 1, 2, 3, 5, 7]) if number else random_.randrange(1, 6)
                     for _ in range(rank)]
            dtype = random_.choice(dtypes)
            data = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(rank))
            tensors[f"t{rank}{number}"] = data.to(dtype)
    return tensors


def make_part(random_, size):
    """One part of an index."""
    near = [None, -size - 2, -size, -1, 0, 1, size // 2, size - 1, size, size + 3]
    kind = random_.random()
    if kind < 0.35:
        return random_.choice(near[1:])
    if kind < 0.85:
        step = random_.choice([None, None, None, 1, 2, 3, 100])
        return slice(random_.choice(near), random_.choice(near), step)
    if kind < 0.9:
        return Ellipsis
    if kind < 0.93:
        return None
    return random_.choice([slice(None, None, -1), slice(None, None, 0)])


def make_list(random_, size):
    """An index of a kind that is torch's alone; torch itself may crash where others join it."""
    if not size:
        return [True, False, []][random_.randrange(3)]
    some = [random_.randrange(size) for _ in range(random_.randrange(1, 4))]
    return random_.choice([True, False, torch.tensor(0), some])


def outcome(take, key):
    """The result of an index, or the error's class."""
    try:
        return take(key), None
    except (IndexError, ValueError, TypeError, RuntimeError) as error:
        return None, type(error)


def try_slices(random_, file, tensors):
    """Compare one index of one tensor with torch."""
    name = random_.choice(list(tensors))
    tensor = tensors[name]
    if tensor.dim() == 0 and random_.random() < 0.9:
        return
    parts = [make_part(random_, size) for size in tensor.shape]
    parts = parts[: random_.randrange(len(parts) + 1)] or [slice(None)]
    if random_.random() < 0.05:
        parts.append(make_part(random_, 3))
    if random_.random() < 0.05:
        parts = [make_list(random_, tensor.shape[0] if tensor.dim() else 0)]
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        # torch (2.13) crashes on some of these: ours must refuse them.
        assert outcome(lambda k: file.get_slice(name)[k], tuple(parts))[1] is IndexError
        return
    key = parts[0] if len(parts) == 1 and random_.random() < 0.5 else tuple(parts)
    mine, my_error = outcome(lambda k: file.get_slice(name)[k], key)
    theirs, their_error = outcome(lambda k: tensor[k], key)
    if tensor.dim() == 0:
        return  # the reference has a different message for scalars
    if theirs is None:
        assert my_error is not None, (name, tensor.shape, key, their_error)
        return
    assert mine is not None, (name, tensor.shape, key, my_error)
    assert mine.shape == theirs.shape and torch.equal(mine, theirs), (name, tensor.shape, key)


def try_dlpack(random_, model, tensors):
    """One export, one import, or one refusal."""
    name = random_.choice(list(tensors))
    tensor = next(model.load([name], mode=random_.choice(["load", "map"])))
    arguments = {}
    if random_.random() < 0.4:
        arguments["stream"] = random_.choice([None, None, 0, 1, -1, 7, 1 << 70, "x"])
    if random_.random() < 0.4:
        versions = [None, (1, 0), (0, 8), (2, 1), (1,), "x", (1, "a")]
        arguments["max_version"] = random_.choice(versions)
    if random_.random() < 0.3:
        devices = [None, (1, 0), (2, 0), (1, 1), (1 << 40, 0), "cpu"]
        arguments["dl_device"] = random_.choice(devices)
    if random_.random() < 0.3:
        arguments["copy"] = random_.choice([None, True, False, 3])
    if random_.random() < 0.2:
        arguments["as_bytes"] = random_.choice([True, False])
    try:
        capsule = tensor.__dlpack__(**arguments)
    except (BufferError, TypeError, ValueError, OverflowError):
        capsule = None
    kind, number = tensor.__dlpack_device__()
    assert (kind, number) == (1, 0)
    if capsule is not None and random_.random() < 0.7:
        if random_.random() < 0.5:
            del tensor
        found = torch.utils.dlpack.from_dlpack(capsule)
        expected = tensors[name]
        flat = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else torch.empty(0)
                for t in (found, expected)]
        assert torch.equal(*flat), name
    del capsule


def try_dlpack_at(random_):
    """Import a capsule of foreign memory. Valid ones keep their values, others are rejected."""
    owner = np.arange(24, dtype=np.float32)
    shape = random_.choice([[24], [4, 6], [2, 3, 4], [], [-1], [1 << 62], "ab", 5, [1.5]])
    strides = random_.choice([[1], [6, 1], [12, 4, 1], [], [1, 1], [1 << 63], None])
    dtype = random_.choice(["F32", "F32", "F32", "I32", "F99", "", None])
    device = random_.choice([(1, 0), (1, 0), (1,), "cpu", (1 << 40, 0)])
    try:
        capsule = _core.dlpack_at(owner.ctypes.data, shape, strides, dtype, device, owner)
    except (TypeError, ValueError, OverflowError):
        return
    good = (shape, strides) in (([24], [1]), ([4, 6], [6, 1]), ([2, 3, 4], [12, 4, 1]))
    if good and dtype in ("F32", "I32") and random_.random() < 0.5:
        found = torch.utils.dlpack.from_dlpack(capsule)
        assert found.view(torch.int32).flatten().tolist() == owner.view(np.int32).tolist()


def main():
    """Try cases until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["slices", "dlpack"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    tensors = make_tensors(random.Random(1))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        save_file(tensors, path)
        file, model = safe_open(path, "pt", mode="load"), _core.Model(path)
        end, count = time.monotonic() + arguments.seconds, 0
        while time.monotonic() < end:
            seed = count if arguments.seed is None else arguments.seed
            random_ = random.Random(seed)
            try:
                if arguments.what == "slices":
                    try_slices(random_, file, tensors)
                else:
                    try_dlpack(random_, model, tensors)
                    try_dlpack_at(random_)
            except Exception:
                print(f"seed {seed}")
                raise
            count += 1
        file.close()
        model.close()
    gc.collect()
    print(f"{arguments.what}: {count} cases, live buffers {_core.live_buffers()}")
    assert _core.live_buffers() == (0, 0)


if __name__ == "__main__":
    main()
