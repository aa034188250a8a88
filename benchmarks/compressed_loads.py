# SPDX-License-Identifier: Apache-2.0
"""Compressed weights: sizes, encoding and decoding a core, and loads from slow sources.

    python benchmarks/compressed_loads.py [--mib 64] [--rate 500] [--copies 8] [FILE..]

Without files the weights are synthetic: 32 Gaussian matrices, each of a deviation of its own, as
BF16, F16, F32, and FP8 scaled by blocks of 128 x 128. Of a FILE (safetensors) all tensors of its
most frequent dtype are taken. Sizes and rates of ours are build/.../bench_codec's (processor time,
one core); beside them zstd (levels 1 and 3, whole bytes, by libzstd) and ZipNN where it is
installed, by processor time of the process. At last each is loaded plain and compressed, in turns:
from a source that gives --rate MB/s (build/.../limited_source), and --copies times as large from
the disk, past the page cache.
"""

import argparse
import collections
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
from safetensors import safe_open

from fastsafetensors.torch import save_file

RUNS = 5


def make_weights(mib):
    """{dtype's name: (tensor, its torch dtype)}, `mib` MiB of 16-bit elements each."""
    torch.manual_seed(0)
    count = (mib << 19) // 32 // 16384 * 16384
    values = torch.cat([torch.randn(count) * (0.005 * 1.12**i) for i in range(32)])
    blocks = values.view(-1, 128 * 128)
    scaled = blocks / blocks.abs().amax(1, keepdim=True)
    return {
        "BF16": values.bfloat16(),
        "F16": values.half(),
        "F32": values,
        "F8_E4M3": (scaled * 448).to(torch.float8_e4m3fn),
        "F8_E5M2": (scaled * 57344).to(torch.float8_e5m2),
    }


def take_weights(path):
    """The tensors of a file's most frequent dtype, as one vector."""
    with safe_open(path, "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    sizes = collections.Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.nbytes
    dtype = sizes.most_common(1)[0][0]
    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32",
             torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
    chosen = [tensor.reshape(-1) for tensor in tensors if tensor.dtype == dtype]
    return names[dtype], torch.cat([tensor.view(torch.uint8) for tensor in chosen]).view(dtype)


def rate_of(work, size):
    """GB a second of processor time of all threads: the median of some runs."""
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return size / statistics.median(seconds) / 1e9


def measure_ours(build, dtype, raw):
    """Rows (who, size in percent, encode, decode) of the codec, by instruction set."""
    out = subprocess.run([build / "tests/bench_codec", dtype, raw], capture_output=True, text=True,
                         check=True).stdout
    return [(f"ours, {name}", float(size), float(encode), float(decode))
            for name, size, encode, decode in (line.split() for line in out.splitlines())]


def measure_zstd(data, level):
    """A row of whole bytes by libzstd."""
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compress.restype = library.ZSTD_compressBound.restype = ctypes.c_size_t
    library.ZSTD_decompress.restype = ctypes.c_size_t
    size = len(data)
    library.ZSTD_compressBound.argtypes = [ctypes.c_size_t]
    room = ctypes.create_string_buffer(library.ZSTD_compressBound(size))
    back = ctypes.create_string_buffer(size)
    bound, whole = ctypes.c_size_t(len(room)), ctypes.c_size_t(size)
    encode = rate_of(lambda: library.ZSTD_compress(room, bound, data, whole, level), size)
    got = library.ZSTD_compress(room, bound, data, whole, level)
    decode = rate_of(lambda: library.ZSTD_decompress(back, whole, room, ctypes.c_size_t(got)), size)
    return f"zstd {level}", 100 * got / size, encode, decode


def measure_zipnn(tensor, size):
    """A row of ZipNN's, or None where it is not installed or does not take the dtype."""
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    try:
        from zipnn import ZipNN

        codec = ZipNN(input_format="torch", bytearray_dtype=names[tensor.dtype], threads=1)
    except (ImportError, KeyError):
        return None
    packed = codec.compress(tensor.clone())
    if not torch.equal(codec.decompress(packed).view(torch.uint8), tensor.view(torch.uint8)):
        return None
    encode = rate_of(lambda: codec.compress(tensor.clone()), size)
    decode = rate_of(lambda: codec.decompress(packed), size)
    return "ZipNN", 100 * len(packed) / size, encode, decode


def measure_slow(build, rate, folder, tensor):
    """Seconds of a plain and of a compressed load from a limited source: lists, in turns."""
    plain, packed = folder / "plain.safetensors", folder / "packed.safetensors"
    parts = {f"layer.{i}": part for i, part in enumerate(tensor.chunk(8))}
    save_file({name: part.clone() for name, part in parts.items()}, str(plain))
    save_file({name: part.clone() for name, part in parts.items()}, str(packed), compress=True)
    seconds = {plain: [], packed: []}
    for _ in range(RUNS):
        out = subprocess.run([build / "bench/limited_source", str(rate), plain, packed],
                             capture_output=True, text=True, check=True).stdout
        for path, line in zip((plain, packed), out.splitlines(), strict=True):
            seconds[path].append(float(line.split()[0]))
    return [seconds[path] for path in (plain, packed)]


def forget(path):
    """Take a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_cold(build, copies, folder, tensor):
    """Seconds of a plain and of a compressed load of what is not cached: lists, in turns."""
    paths = [folder / "plain.safetensors", folder / "packed.safetensors"]
    tensors = {f"layer.{i}": tensor.clone() for i in range(copies)}
    for path, compress in zip(paths, (False, True), strict=True):
        save_file(tensors, str(path), compress=compress)
    seconds = [[], []]
    for _ in range(RUNS):
        for path, own in zip(paths, seconds, strict=True):
            forget(path)
            out = subprocess.run([build / "cli/fastsafetensors", "load", "--json", "--mode", "load",
                                  path], capture_output=True, text=True, check=True).stdout
            own.append(json.loads(out)["seconds"])
    return seconds


def told(seconds):
    """The median and the range of some runs."""
    return f"{statistics.median(seconds):.3f} [{min(seconds):.3f}-{max(seconds):.3f}] s"


def report(options, name, dtype, tensor):
    """Print the rows of one set of weights."""
    data = bytes(tensor.view(torch.uint8).numpy())
    with tempfile.TemporaryDirectory() as folder:
        raw = pathlib.Path(folder) / "raw"
        raw.write_bytes(data)
        rows = measure_ours(options.build, dtype, raw)
        rows += [measure_zstd(data, level) for level in (1, 3)]
        rows += [row for row in [measure_zipnn(tensor, len(data))] if row]
        raw.unlink()
        slow = measure_slow(options.build, options.rate, pathlib.Path(folder), tensor)
        cold = measure_cold(options.build, options.copies, pathlib.Path(folder), tensor)
    for who, size, encode, decode in rows:
        print(f"| {name} | {who} | {size:.2f} % | {encode:.2f} | {decode:.2f} |")
    for source, (plain, packed) in ((f"{options.rate} MB/s", slow), ("cold disk", cold)):
        ratio = statistics.median(p / q for p, q in zip(plain, packed, strict=True))
        print(f"| {name} | {source} | plain {told(plain)} | compressed {told(packed)} "
              f"| {ratio:.2f} x |", flush=True)


def main():
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build/test"))
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("files", nargs="*")
    options = parser.parse_args()
    print("| weights | by | size | encode GB/s | decode GB/s |\n|---|---|---|---|---|")
    for path in options.files:
        dtype, tensor = take_weights(path)
        report(options, f"{pathlib.Path(path).name} {dtype}", dtype, tensor)
    if not options.files:
        for dtype, tensor in make_weights(options.mib).items():
            report(options, f"synthetic {dtype}", dtype, tensor)


if __name__ == "__main__":
    main()
