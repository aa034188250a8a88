# SPDX-License-Identifier: Apache-2.0
"""Files for the benchmarks: transformer blocks of two sizes, and the state of the page cache."""

import os

LAYERS = 24
PARTS = ("to_q", "to_k", "to_v", "to_out.0")
# name: (hidden size, columns): about 25 and 400 MB of half precision.
SIZES = {"small": (2048, 64), "large": (4096, 512)}


def make_state(kind):
    """{name: tensor} of a transformer's attention weights, random."""
    import torch

    hidden, columns = SIZES[kind]
    generator = torch.Generator().manual_seed(0)
    return {
        f"transformer_blocks.{layer}.attn.{part}.weight":
            torch.randn(hidden, columns, generator=generator).half()
        for layer in range(LAYERS) for part in PARTS
    }


def make_file(kind, folder):
    """Return the path of a file of that size, written if need be."""
    path = folder / f"transformer-{kind}.safetensors"
    if not path.exists():
        from fastsafetensors.fast_loading import save_safetensors

        folder.mkdir(parents=True, exist_ok=True)
        save_safetensors(make_state(kind), path)
    return path


def set_cache(path, cold):
    """Drop a file's pages, or read them."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    while not cold and os.read(fd, 1 << 24):
        pass
    os.close(fd)
