# SPDX-License-Identifier: Apache-2.0
"""Load safetensors files: alone, or as a group of ranks that share them.

    python examples/load.py a.safetensors b.safetensors             one process
    torchrun --nproc-per-node 2 examples/load.py a.safetensors ...  ranks, files dealt out in turn
    python examples/load.py --device cuda:0 --nogds a.safetensors   straight to a GPU

Each rank reads its own files. get_tensor() gives a tensor to all ranks, get_sharded() a part of it
to each. Without files a small model is made.
"""

import argparse
import os
import pathlib
import tempfile
import time

import torch
import torch.distributed as dist

from fastsafetensors import SafeTensorsFileLoader, SingleGroup


def make_files(folder, count=2):
    """Save a small model in several files and return their paths."""
    from fastsafetensors.torch import save_file

    paths = []
    for number in range(count):
        path = pathlib.Path(folder) / f"part-{number}.safetensors"
        save_file({f"layer.{number}.weight": torch.randn(1000, 512),
                   f"layer.{number}.bias": torch.zeros(1000)}, path)
        paths.append(str(path))
    return paths


def join_group(device):
    """Return the group of a torchrun job, or one for a single process."""
    if "WORLD_SIZE" not in os.environ:
        return SingleGroup()
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return dist.group.WORLD


def deal(paths, ranks):
    """Assign files to ranks round-robin: {rank: [paths]}."""
    return {rank: paths[rank::ranks] for rank in range(ranks)}


def load(group, paths, device, nogds):
    """Load the files and print the tensors of each rank."""
    start = time.perf_counter()
    loader = SafeTensorsFileLoader(group, device, nogds=nogds)
    loader.add_filenames(deal(paths, group.size()))
    buffer = loader.copy_files_to_device()
    total = 0
    for name in loader.get_keys():
        whole = buffer.get_tensor(name)  # on every rank
        part = buffer.get_sharded(name, 0)  # this rank's rows
        total += whole.nbytes
        shape, rows = tuple(whole.shape), tuple(part.shape)
        print(f"rank {group.rank()}: {name} {shape}, {rows} on this rank")
    buffer.close()
    loader.close()
    seconds = time.perf_counter() - start
    print(f"rank {group.rank()}: {total / 1e6:.1f} MB in {seconds:.3f} s")


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nogds", action="store_true", help="no reads straight to the GPU")
    arguments = parser.parse_args()
    group = join_group(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        paths = arguments.files
        if not paths:
            made = [make_files(folder) if group.rank() == 0 else None]
            if group.size() > 1:
                dist.broadcast_object_list(made)
            paths = made[0]
        load(group, paths, arguments.device, arguments.nogds)
        if group.size() > 1:
            dist.barrier()  # rank 0 removes the files
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
