# SPDX-License-Identifier: Apache-2.0
"""Weight deltas: making them, and applying one or a chain of four to a checkpoint's files.

    python benchmarks/delta_benchmark.py [--mib 1016] [--shares 1,5,30] [--runs 3] [--folder DIR]

A BF16 checkpoint in 4 shards (two tensors of 128 MiB, the rest of 4 and 8 MiB, and norms). In each
version a share of the elements, chosen at random, moves by one or two steps of its last place.
Deltas are made by fastsafetensors.deltas (level 1). Receivers, interleaved, each run in a new
process on a fresh copy of the base, with a warm page cache and written-back files:

fastsafetensors  deltas.apply()
live             Delta.prepare() and commit() into tensors in memory; the commit is printed, too
numpy            the method of SGLang's receiver: mapped files, one task per tensor, 2 MiB of frame
                 at a time, XOR and checksum in place (python-zstandard, zlib)
modelexpress     the package's own receiver, reading local files instead of S3

Making is compared with reading both states twice from the page cache, by as many threads; both are
measured for each of the four versions, one after the other.

Every receiver verifies each new tensor; the final files are compared with the sender's state.
Printed are medians [min-max] of seconds, CPU seconds and the peak of anonymous memory.
"""

import argparse
import concurrent.futures
import json
import mmap
import os
import pathlib
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time
import zlib

MIB = 1 << 20
CHAIN = 4


def tensor_sizes(mib):
    """{name: elements} of a checkpoint of about so many MiB."""
    sizes = {}
    if mib >= 512:
        sizes = {"embed.weight": 128 * MIB // 2, "lm_head.weight": 128 * MIB // 2}
    left = mib * MIB - sum(2 * count for count in sizes.values())
    layer = 0
    while left > 0:
        count = (8 if layer % 3 == 0 else 4) * MIB // 2
        sizes[f"layers.{layer}.weight"] = count
        sizes[f"layers.{layer}.norm"] = 4096
        left -= 2 * count + 2 * 4096
        layer += 1
    return sizes


def write_checkpoint(folder, tensors):
    """Four shards and their index."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    names = sorted(tensors, key=lambda name: -tensors[name].nbytes)
    weight_map = {}
    for shard in range(4):
        own = {name: tensors[name] for name in names[shard::4]}
        file = f"model-{shard + 1:05d}-of-00004.safetensors"
        save_file(own, folder / file)
        weight_map.update(dict.fromkeys(own, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def step(tensors, share, generator):
    """The next state: a share of elements moves by one or two steps of its last place."""
    made = {}
    for name, old in tensors.items():
        new = old.copy()
        count = max(1, int(old.size * share / 100))
        places = generator.integers(0, old.size, count)
        new[places] += generator.integers(1, 3, count).astype(new.dtype)
        made[name] = new
    return made


def make_data(folder, mib, share, checksum, encoding):
    """The base, CHAIN deltas and the final state; returns what was measured for each delta."""
    import ml_dtypes  # noqa: F401 - for safetensors' BF16
    import numpy

    from fastsafetensors import deltas

    generator = numpy.random.default_rng(share)
    state = {name: generator.standard_normal(count, numpy.float32).astype("bfloat16").view("uint16")
             for name, count in tensor_sizes(mib).items()}
    write_checkpoint(folder / "base", state)
    made = []
    for version in range(1, CHAIN + 1):
        new = step(state, share, generator)
        write_checkpoint(folder / f"state{version}", new)
        target = folder / f"weight_v{version:06d}"
        old = folder / ("base" if version == 1 else f"state{version - 1}")
        os.sync()
        read = timed(lambda old=old, version=version: read_twice(old, folder / f"state{version}"))
        cpu, begin = time.process_time(), time.perf_counter()
        deltas.make(old, folder / f"state{version}", target, version=f"{version:06d}",
                    base_version=f"{version - 1:06d}", checksum=checksum, encoding=encoding,
                    durable=False)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        size = sum(file.stat().st_size for file in target.iterdir())
        made.append({"size": size, "make": (seconds, cpu), "read": read})
        state = new
        if 1 < version <= CHAIN:
            shutil.rmtree(old)
    return made


def read_twice(*folders):
    """Read both checkpoints twice from the page cache, by as many threads."""
    files = [file for folder in folders for file in folder.glob("*.safetensors")] * 2

    def read(path):
        buffer = bytearray(4 * MIB)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(read, files))


def timed(work):
    """Seconds and CPU seconds of a call."""
    cpu, begin = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - begin, time.process_time() - cpu


# ---- receivers: each applies delta folders to a checkpoint ----

def apply_fastsafetensors(local, folders):
    """Apply by the package."""
    from fastsafetensors import deltas

    deltas.apply(local, *folders, durable=False)  # the others do not wait for the disk


def load_live(local):
    """The checkpoint's tensors in memory, as arrays of bytes."""
    import numpy

    return {name: numpy.fromfile(path, numpy.uint8, end - begin, offset=begin)
            for name, (path, begin, end) in locate_tensors(local).items()}


def apply_live(live, folders):
    """Prepare and commit; returns the seconds of the commit, during which an engine pauses."""
    from fastsafetensors import deltas

    change = deltas.Delta(*folders).prepare(live)
    return timed(change.commit)[0]


def locate_tensors(folder):
    """{tensor: (file, begin, end)}."""
    places = {}
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(size))
        for name, row in header.items():
            if name != "__metadata__":
                begin, end = row["data_offsets"]
                places[name] = (path, 8 + size + begin, 8 + size + end)
    return places


def apply_numpy(local, folders):
    """The rules and the speed of SGLang's receiver, in numpy and python-zstandard."""
    import numpy
    import zstandard

    places = locate_tensors(local)
    maps = {}
    for path in {place[0] for place in places.values()}:
        with open(path, "r+b") as file:
            maps[path] = mmap.mmap(file.fileno(), 0)
        maps[path].madvise(mmap.MADV_WILLNEED)
    for folder in folders:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        tasks = []
        for shard in sorted(set(index["weight_map"].values())):
            data = (folder / shard).read_bytes()
            size = struct.unpack("<Q", data[:8])[0]
            header = json.loads(data[8:8 + size])
            sums = header.pop("__metadata__")
            for name, row in header.items():
                begin, end = row["data_offsets"]
                tasks.append((name, memoryview(data)[8 + size + begin:8 + size + end], sums[name]))

        def apply_one(task, index=index):
            name, stored, expected = task
            path, begin, end = places[name]
            target = numpy.frombuffer(maps[path], numpy.uint8, end - begin, begin)
            checksum, at = 1, 0
            if index["metadata"]["delta_encoding"] == "overwrite":
                payload = zstandard.ZstdDecompressor().decompress(stored)
                count = struct.unpack("<I", payload[:4])[0]
                positions = numpy.frombuffer(payload, "<u4", count, 4)
                target[positions] = numpy.frombuffer(payload, numpy.uint8, count, 4 + 4 * count)
                checksum = zlib.adler32(target, checksum)
            else:
                reader = zstandard.ZstdDecompressor().stream_reader(stored)
                while piece := reader.read(2 * MIB):
                    block = target[at:at + len(piece)]
                    numpy.bitwise_xor(block, numpy.frombuffer(piece, numpy.uint8), out=block)
                    checksum = zlib.adler32(block, checksum)
                    at += len(piece)
            if f"{checksum:08x}" != expected:
                raise RuntimeError(f"{name}: wrong checksum")

        with concurrent.futures.ThreadPoolExecutor(min(32, os.cpu_count())) as pool:
            list(pool.map(apply_one, tasks))


class LocalObjects:
    """Stands in for modelexpress's S3 client: URIs are file paths."""

    def get(self, uri):
        """The bytes of an object."""
        return pathlib.Path(uri.removeprefix("s3://bucket")).read_bytes()

    def size(self, uri):
        """Its size."""
        return pathlib.Path(uri.removeprefix("s3://bucket")).stat().st_size


def open_modelexpress(local):
    """The package's receiver with `local` as its first full version."""
    from modelexpress_rl.inference import receiver
    from modelexpress_rl.object_storage import ObjectStorageType

    config = receiver.ObjectStorageGeneratorConfig(
        storage_type=ObjectStorageType.S3, initial_base_version_id="000000",
        seed_checkpoint_path=local, refit_checkpoint_dir=local.parent / "modelexpress")
    opened = receiver._LocalCheckpoint(model_name="m", config=config, s3=LocalObjects())
    opened.initialize()
    return opened


def apply_modelexpress(opened, folders):
    """Prepare the chain; returns the folder of the new version."""
    from modelexpress_rl.inference.receiver import WeightPayloadFormat, _S3Version

    chain = []
    for folder in folders:
        index = folder / "model.safetensors.index.json"
        metadata = json.loads(index.read_text())["metadata"]
        chain.append(_S3Version(metadata["version"], metadata["base_version"],
                                WeightPayloadFormat.XOR_DELTA, f"s3://bucket{index}"))
    return opened.prepare_chain(tuple(chain)).path


class AnonymousPeak(threading.Thread):
    """Samples this process's anonymous memory."""

    def __init__(self):
        """Begin with what the process has."""
        super().__init__(daemon=True)
        self.begin = self.peak = self.read()
        self.stopped = threading.Event()

    @staticmethod
    def read():
        """MiB of anonymous memory."""
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) / 1024
        return 0.0

    def run(self):
        """Sample until it is stopped."""
        while not self.stopped.wait(0.005):
            self.peak = max(self.peak, self.read())


def run_child(receiver, local, folders):
    """One application, measured; prints JSON."""
    if receiver == "modelexpress":
        opened = open_modelexpress(local)
    elif receiver == "live":
        from fastsafetensors import deltas  # noqa: F401

        live = load_live(local)
    elif receiver == "numpy":
        import numpy  # noqa: F401
        import zstandard  # noqa: F401
    else:
        from fastsafetensors import deltas  # noqa: F401
    os.sync()
    sampler = AnonymousPeak()
    sampler.start()
    commit, result = None, str(local)
    cpu, begin = time.process_time(), time.perf_counter()
    if receiver == "modelexpress":
        result = str(apply_modelexpress(opened, folders))
    elif receiver == "live":
        commit = apply_live(live, folders)
    else:
        {"numpy": apply_numpy, "fastsafetensors": apply_fastsafetensors}[receiver](local, folders)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    sampler.stopped.set()
    print(json.dumps({"seconds": seconds, "cpu": cpu, "mib": sampler.peak - sampler.begin,
                      "commit": commit, "result": result}))
    if receiver == "live":
        (local.parent / "sums").write_text(json.dumps(
            {name: zlib.crc32(tensor) for name, tensor in live.items()}))


def has_modelexpress():
    """Whether the package and what it needs are installed."""
    try:
        from modelexpress_rl.inference import receiver  # noqa: F401
    except ImportError:
        return False
    return True


def measure(receiver, folder, chain, expected):
    """Run one receiver once, in a separate process."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / "base", work / "local")
    os.sync()
    folders = [str(folder / f"weight_v{version:06d}") for version in range(1, chain + 1)]
    done = subprocess.run([sys.executable, __file__, "--child", receiver, str(work / "local"),
                           *folders], check=True, capture_output=True, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    if expected is not None and receiver == "live":
        compare_live(work / "sums", expected)
    elif expected is not None:
        compare(pathlib.Path(row["result"]), expected)
    shutil.rmtree(work, ignore_errors=True)
    return row


def compare(made, expected):
    """The same bytes in every file."""
    for path in expected.glob("*.safetensors"):
        if path.read_bytes() != (made / path.name).read_bytes():
            raise RuntimeError(f"{path.name} differs after the application")


def compare_live(sums, expected):
    """The same bytes in every tensor."""
    made = json.loads(sums.read_text())
    for name, tensor in load_live(expected).items():
        if made[name] != zlib.crc32(tensor):
            raise RuntimeError(f"{name} differs after the application")


def spread(values, digits=2):
    """Median and range."""
    return (f"{statistics.median(values):.{digits}f} "
            f"[{min(values):.{digits}f}-{max(values):.{digits}f}]")


def measure_share(folder, share, arguments):
    """All receivers for one share of changed elements."""
    made = make_data(folder, arguments.mib, share, arguments.checksum, arguments.encoding)
    size = statistics.median(row["size"] for row in made)
    print(f"\n{share} % changed: {size / 1e6:.1f} MB a delta")
    for what, key in (("made in", "make"), ("reading both states twice takes", "read")):
        print(f"  {what} {spread([row[key][0] for row in made], 3)} s, "
              f"CPU {spread([row[key][1] for row in made], 3)} s", flush=True)
    receivers = ["fastsafetensors", "live", "numpy"]
    if has_modelexpress() and (arguments.checksum, arguments.encoding) == ("adler32", "xor"):
        receivers.append("modelexpress")
    for chain in (1, CHAIN):
        rows = {receiver: [] for receiver in receivers}
        for run in range(arguments.runs):
            for receiver in receivers:
                last = folder / f"state{CHAIN}" if chain == CHAIN and run == 0 else None
                rows[receiver].append(measure(receiver, folder, chain, last))
        best = statistics.median(row["seconds"] for row in rows["fastsafetensors"])
        for receiver, own in rows.items():
            middle = statistics.median(row["seconds"] for row in own)
            print(f"  chain of {chain}  {receiver:16s} {spread([r['seconds'] for r in own])} s  "
                  f"CPU {spread([r['cpu'] for r in own])} s  "
                  f"{max(r['mib'] for r in own):.0f} MiB  ratio {best / middle:.2f}"
                  + ("" if own[0]["commit"] is None else
                     f"  commit {spread([r['commit'] for r in own], 3)} s"), flush=True)


def main():
    """Run the requested measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1016)
    parser.add_argument("--shares", default="1,5,30")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--checksum", default="adler32")
    parser.add_argument("--encoding", default="xor")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/bench-deltas"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child[0], pathlib.Path(arguments.child[1]),
                  [pathlib.Path(folder) for folder in arguments.child[2:]])
        return
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, {arguments.mib} MiB, "
          f"{arguments.encoding}, {arguments.checksum}, {arguments.runs} runs")
    folder = arguments.folder.resolve()
    for share in (int(word) for word in arguments.shares.split(",")):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            measure_share(folder, share, arguments)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
