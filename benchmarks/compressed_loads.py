# SPDX-License-Identifier: Apache-2.0
"""Measures compressed weights: sizes, speed of encoding and decoding per core, and loads from slow
sources.

    python benchmarks/compressed_loads.py [--mib 64] [--rate 500] [--loads 64,256] [FILE..]

Without files the weights are synthetic: 32 Gaussian matrices with different deviations, as BF16,
F16, F32, and FP8 scaled by blocks of 128 x 128. From a FILE (safetensors) all tensors of its most
frequent dtype are used. The table has each size and a lower bound for it, from the entropy of the
byte planes that are encoded (see docs/FORMAT.md). The rates of fastsafetensors come from
build/.../bench_codec (CPU time, one core). They are compared with zstd (levels 1 and 3, without
byte planes) and ZipNN, if installed, by CPU time of the process. Then each model is loaded plain
and compressed, interleaved and repeated up to the sizes of --loads (MiB), from a source with --rate
MB/s (build/.../limited_source) and from the disk with direct I/O. Finally a slice of a tensor is
read, with a count of the bytes, and the safetensors package opens the file.
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
from safetensors import __version__ as safetensors_version
from safetensors import safe_open

from fastsafetensors import safe_open as our_open
from fastsafetensors.torch import save_file

RUNS = 3
CHUNK_BYTES = 1 << 18


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


def planes_of(tensor):
    """Return the byte planes that are encoded separately (see docs/FORMAT.md), as vectors of
    uint8."""
    if tensor.dtype == torch.float8_e5m2:
        return [tensor.view(torch.uint8)]
    if tensor.dtype == torch.float8_e4m3fn:
        rolled = tensor.view(torch.uint8).to(torch.int16)
        rolled = (rolled << 1 | rolled >> 7) & 255
        pairs = rolled[: rolled.numel() // 2 * 2].view(-1, 2)
        return [((pairs[:, 0] & mask) >> shift | (pairs[:, 1] & mask) >> shift << 4).to(torch.uint8)
                for mask, shift in ((0xF0, 4), (0x0F, 0))]
    bits = tensor.element_size() * 8
    whole = tensor.view({16: torch.int16, 32: torch.int32}[bits]).to(torch.int64)
    whole &= (1 << bits) - 1
    rolled = (whole << 1 | whole >> bits - 1) & (1 << bits) - 1
    return [(rolled >> at & 255).to(torch.uint8) for at in range(bits - 8, -1, -8)]


def bound_of(tensor):
    """Percent of the true bytes: the entropy of every plane, chunk by chunk, whole where that is
    95 % or more."""
    bits = size = 0
    for piece in tensor.reshape(-1).split(CHUNK_BYTES // tensor.element_size()):
        for plane in planes_of(piece):
            counts = torch.bincount(plane.int(), minlength=256).double()
            shares = counts[counts > 0] / plane.numel()
            own = float(-(shares * shares.log2()).sum())
            bits += plane.numel() * (own if own < 0.95 * 8 else 8)
            size += plane.numel()
    return 100 * bits / (8 * size)


def rates_of(work, size):
    """Return GB per second of CPU time of all threads, for several runs."""
    rates = []
    for _ in range(RUNS):
        start = time.process_time()
        work()
        rates.append(size / (time.process_time() - start) / 1e9)
    return rates


def measure_ours(build, dtype, raw):
    """Return rows (name, size in percent, encoding rates, decoding rates), one per instruction
    set."""
    rows = collections.defaultdict(lambda: ([], [], []))
    for _ in range(3):
        out = subprocess.run([build / "tests/bench_codec", dtype, raw], capture_output=True,
                             text=True, check=True).stdout
        for line in out.splitlines():
            name, *values = line.split()
            for row, value in zip(rows[name], values, strict=True):
                row.append(float(value))
    return [(f"ours, {name}", sizes[0], encode, decode)
            for name, (sizes, encode, decode) in rows.items()]


def measure_zstd(data, level):
    """Return a row for libzstd without byte planes."""
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compress.restype = library.ZSTD_compressBound.restype = ctypes.c_size_t
    library.ZSTD_decompress.restype = ctypes.c_size_t
    size = len(data)
    library.ZSTD_compressBound.argtypes = [ctypes.c_size_t]
    room = ctypes.create_string_buffer(library.ZSTD_compressBound(size))
    back = ctypes.create_string_buffer(size)
    bound, whole = ctypes.c_size_t(len(room)), ctypes.c_size_t(size)
    encode = rates_of(lambda: library.ZSTD_compress(room, bound, data, whole, level), size)
    got = library.ZSTD_compress(room, bound, data, whole, level)
    stored = ctypes.c_size_t(got)
    decode = rates_of(lambda: library.ZSTD_decompress(back, whole, room, stored), size)
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
    encode = rates_of(lambda: codec.compress(tensor.clone()), size)
    decode = rates_of(lambda: codec.decompress(packed), size)
    return "ZipNN", 100 * len(packed) / size, encode, decode


def make_files(folder, tensor, mib):
    """A plain file and a compressed one of `mib` MiB: the tensor as often as that takes."""
    paths = folder / "plain.safetensors", folder / "packed.safetensors"
    count = max(1, (mib << 20) // tensor.nbytes)
    tensors = {f"layer.{i}.{k}": part.clone() for i in range(count)
               for k, part in enumerate(tensor.chunk(8))}
    for path, compress in zip(paths, (False, True), strict=True):
        save_file(tensors, str(path), compress=compress)
    return paths


def measure_slow(build, rate, paths):
    """Seconds of a plain and of a compressed load from a limited source, and the bytes read."""
    seconds, read = {path: [] for path in paths}, {}
    for _ in range(RUNS):
        out = subprocess.run([build / "bench/limited_source", str(rate), *paths],
                             capture_output=True, text=True, check=True).stdout
        for path, line in zip(paths, out.splitlines(), strict=True):
            seconds[path].append(float(line.split()[0]))
            read[path] = int(line.split()[2])
    return [seconds[path] for path in paths], [read[path] for path in paths]


def forget(path):
    """Remove a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_loads(build, paths, cold):
    """Seconds of plain and compressed loads, cached or not: lists, interleaved."""
    seconds = [[], []]
    for _ in range(RUNS):
        for path, own in zip(paths, seconds, strict=True):
            if cold:
                forget(path)
            else:
                subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
            out = subprocess.run([build / "cli/fastsafetensors", "load", "--json", "--mode", "load",
                                  path], capture_output=True, text=True, check=True).stdout
            own.append(json.loads(out)["seconds"])
    return seconds


def bytes_read():
    """Return the bytes that this process has read by read(2) and similar calls."""
    words = pathlib.Path("/proc/self/io").read_text().split()
    return int(words[words.index("rchar:") + 1])


def measure_slice(paths):
    """Prints what an eighth of a tensor's rows reads of each file, and what others see."""
    for path in paths:
        with our_open(str(path), framework="pt") as file:
            part = file.get_slice("layer.0.0")
            begin = bytes_read()
            got = part[: part.get_shape()[0] // 8].clone()
            read = bytes_read() - begin
        print(f"| an eighth of a tensor of {path.name} | {got.nbytes:,} bytes | {read:,} read |")
    with safe_open(str(paths[1]), "pt") as file:
        names = sorted(file.keys())
        shown = {str(file.get_tensor(name).dtype) for name in names}
    print(f"| safetensors {safetensors_version} | {len(names)} entries: {names[0]}, {names[1]}, .. "
          f"| {', '.join(shown)} |", flush=True)


def told(values, digits=3):
    """Return the median and the range of several runs."""
    return (f"{statistics.median(values):.{digits}f} "
            f"[{min(values):.{digits}f}-{max(values):.{digits}f}]")


def report_loads(options, name, tensor, mib):
    """Print the rows of loads of one size."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = make_files(pathlib.Path(folder), tensor, mib)
        ratio = 100 * paths[1].stat().st_size / paths[0].stat().st_size
        slow, read = measure_slow(options.build, options.rate, paths)
        rows = [(f"{options.rate} MB/s", slow),
                ("cold disk", measure_loads(options.build, paths, True)),
                ("cached", measure_loads(options.build, paths, False))]
        for source, (plain, packed) in rows:
            times = statistics.median(plain) / statistics.median(packed)
            print(f"| {name}, {paths[0].stat().st_size >> 20} MiB | {source} | {told(plain)} s "
                  f"| {told(packed)} s | {times:.2f} x |", flush=True)
        print(f"| | | read {read[0]:,} | {read[1]:,} of {paths[1].stat().st_size:,} bytes "
              f"| {ratio:.1f} % |", flush=True)
        if mib == options.loads[0]:
            measure_slice(paths)


def report(options, name, dtype, tensor):
    """Print the rows of one set of weights."""
    data = bytes(tensor.view(torch.uint8).numpy())
    with tempfile.TemporaryDirectory() as folder:
        raw = pathlib.Path(folder) / "raw"
        raw.write_bytes(data)
        rows = measure_ours(options.build, dtype, raw)
    rows += [measure_zstd(data, level) for level in (1, 3)]
    rows += [row for row in [measure_zipnn(tensor, len(data))] if row]
    print(f"| {name} | entropy of planes | {bound_of(tensor):.2f} % | | |")
    for who, size, encode, decode in rows:
        print(f"| {name} | {who} | {size:.2f} % | {told(encode, 2)} | {told(decode, 2)} |",
              flush=True)
    for mib in options.loads:
        report_loads(options, name, tensor, mib)


def main():
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build/release"))
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--loads", type=lambda text: [int(n) for n in text.split(",") if n],
                        default=[64, 256], help="sizes in MiB; '': none")
    parser.add_argument("--only", help="names of dtypes, separated by commas")
    parser.add_argument("--folder", help="where the files of loads lie")
    parser.add_argument("files", nargs="*")
    options = parser.parse_args()
    print("| weights | by | size | encode GB/s | decode GB/s |\n|---|---|---|---|---|")
    for path in options.files:
        dtype, tensor = take_weights(path)
        report(options, f"{pathlib.Path(path).name} {dtype}", dtype, tensor)
    if not options.files:
        for dtype, tensor in make_weights(options.mib).items():
            if options.only and dtype not in options.only.split(","):
                continue
            report(options, f"synthetic {dtype}", dtype, tensor)


if __name__ == "__main__":
    main()
