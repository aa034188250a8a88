# SPDX-License-Identifier: Apache-2.0
"""Weight deltas written and read by numpy and python-zstandard, independently of the library."""

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import zlib

import numpy
import pytest

import fastsafetensors
from fastsafetensors import deltas

try:
    import zstandard
except ImportError:
    zstandard = None

INDEX = "model.safetensors.index.json"


def write_file(path, tensors, metadata=None, dtype="U8"):
    """Write a safetensors file of byte arrays, stored with `dtype` (U8 or BF16)."""
    header, at = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, value in tensors.items():
        shape = list(value.shape) if dtype == "U8" else [*value.shape[:-1], value.shape[-1] // 2]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    data = b"".join(value.tobytes() for value in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_file(path):
    """({name: bytes as an array}, metadata) of a file."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, row in header.items():
        begin, end = row["data_offsets"]
        tensors[name] = numpy.frombuffer(data[8 + size + begin:8 + size + end], numpy.uint8)
    return tensors, metadata


def write_checkpoint(folder, state):
    """A checkpoint of BF16 tensors in two files, with an index."""
    folder.mkdir(parents=True)
    names = sorted(state)
    weight_map = {}
    for part in range(2):
        own = names[part::2]
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        write_file(folder / file, {name: state[name] for name in own}, dtype="BF16")
        weight_map.update(dict.fromkeys(own, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_checkpoint(folder):
    """All tensors of a checkpoint."""
    state = {}
    for path in folder.glob("*.safetensors"):
        state.update(read_file(path)[0])
    return state


def checksum(kind, data):
    """Return the checksum in hexadecimal digits, or None if the package for it is missing."""
    data = bytes(data)
    if kind == "adler32":
        return f"{zlib.adler32(data):08x}"
    try:
        if kind == "blake3":
            import blake3

            return blake3.blake3(data).hexdigest()
        import xxhash

        return xxhash.xxh3_128(data).hexdigest()
    except ImportError:
        return None


def encode(old, new, encoding):
    """The payload of one tensor before compression."""
    if encoding == "xor":
        return numpy.bitwise_xor(old, new).tobytes()
    places = numpy.flatnonzero(old != new).astype("<u4")
    return struct.pack("<I", len(places)) + places.tobytes() + new[places].tobytes()


def write_delta(folder, old, new, version, base, *, encoding="xor", kind="adler32", shards=2,
                change=None):
    """Write a delta as the senders do. `change` may alter the index and the shards' tables.

    change(index, shards): shards is [{"tensors": {name: payload}, "sums": {name: digits}}].
    """
    compressor = zstandard.ZstdCompressor(level=1)
    changed = [name for name in sorted(new) if not numpy.array_equal(old[name], new[name])]
    tables = []
    weight_map = {}
    for shard in range(shards):
        own = changed[shard::shards]
        tables.append({
            "tensors": {name: compressor.compress(encode(old[name], new[name], encoding))
                        for name in own},
            "sums": {name: checksum(kind, new[name].tobytes()) for name in own}})
        weight_map.update(dict.fromkeys(own, f"model-{shard:05d}-of-{shards:05d}.safetensors"))
    index = {"metadata": {"version": version, "base_version": base, "delta_encoding": encoding,
                          "compression_format": "zstd", "checksum_format": kind},
             "weight_map": weight_map}
    if change is not None:
        change(index, tables)
    folder.mkdir(parents=True)
    for shard, table in enumerate(tables):
        arrays = {name: numpy.frombuffer(payload, numpy.uint8)
                  for name, payload in table["tensors"].items()}
        write_file(folder / f"model-{shard:05d}-of-{shards:05d}.safetensors", arrays,
                   table["sums"])
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def apply_by_rules(state, folder):
    """Apply a delta to a state in memory by the rules of SGLang's receiver, and check all
    checksums."""
    index = json.loads((folder / INDEX).read_text())
    metadata = index["metadata"]
    assert metadata["compression_format"] == "zstd"
    assert int(metadata["base_version"]) < int(metadata["version"])
    made = dict(state)
    shards = sorted(set(index["weight_map"].values()))
    for shard in shards:
        entries, sums = read_file(folder / shard)
        assert set(entries) == {name for name, file in index["weight_map"].items()
                                if file == shard}
        for name, stored in entries.items():
            payload = zstandard.ZstdDecompressor().decompress(stored.tobytes())
            new = state[name].copy()
            if metadata["delta_encoding"] == "xor":
                new ^= numpy.frombuffer(payload, numpy.uint8)
            else:
                count = struct.unpack("<I", payload[:4])[0]
                places = numpy.frombuffer(payload, "<u4", count, 4)
                new[places] = numpy.frombuffer(payload, numpy.uint8, count, 4 + 4 * count)
            expected = checksum(metadata["checksum_format"], new)
            assert expected is None or sums[name] == expected
            made[name] = new
    return made


def same(a, b):
    """The same tensors with the same bytes."""
    return a.keys() == b.keys() and all(numpy.array_equal(a[name], b[name]) for name in a)


def digest_folder(folder):
    """Return a digest of all bytes of a folder's tensor files."""
    return hashlib.sha256(b"".join(path.read_bytes()
                                   for path in sorted(folder.glob("*.safetensors")))).hexdigest()


SIZES = {"embed.weight": 700_002, "layers.0.weight": 300_000, "norm": 6, "same": 50_000,
         "empty": 0}


def make_states(count, share=0.04):
    """Make successive states. In each, some bytes of every tensor but one have changed."""
    generator = numpy.random.default_rng(5)
    states = [{name: generator.integers(0, 256, size, numpy.uint8)
               for name, size in SIZES.items()}]
    for _ in range(count - 1):
        new = {name: value.copy() for name, value in states[-1].items()}
        for name in ("embed.weight", "layers.0.weight", "norm"):
            places = generator.integers(0, SIZES[name], max(1, int(SIZES[name] * share)))
            new[name][places] ^= 3
        states.append(new)
    return states


def write_chain(tmp_path, states, **options):
    """Write the deltas between successive states with the independent writer."""
    return [write_delta(tmp_path / f"weight_v{i:06d}", states[i - 1], states[i], f"{i:06d}",
                        f"{i - 1:06d}", **options) for i in range(1, len(states))]


# The limit is set when the journal is there, because it is checked before that.
KILLED = """
import os, resource, signal, sys, threading
from fastsafetensors import deltas

def limit():
    while not os.path.exists(sys.argv[1] + "/.weight_sync/journal"):
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
threading.Thread(target=limit, daemon=True).start()
"""


def kill_in_a_write(local, call, *arguments):
    """Run a call, whose arguments are `sys.argv[1:]`, the first one `local`, in a process that the
    kernel kills at its first write after byte 600,000 of a file."""
    before = local.with_name(f"{local.name}-before")
    shutil.copytree(local, before)
    for _ in range(200):  # the limit may come too late, or too early
        subprocess.run([sys.executable, "-c", KILLED + call, local, *arguments], check=False)
        if deltas.version_of(local).interrupted:
            break
        shutil.rmtree(local)
        shutil.copytree(before, local)
    shutil.rmtree(before)
    assert deltas.version_of(local).interrupted


def expect(tag, call):
    """Check that the call raises SafetensorError with this tag; return its message."""
    with pytest.raises(fastsafetensors.SafetensorError) as caught:
        call()
    assert caught.value.tag == tag, str(caught.value)
    return str(caught.value)
