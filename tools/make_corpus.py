#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed corpus of the fuzz targets: small files, each named for the case that it covers.

Compressed files are made with the command in build/release.
"""

import hashlib
import json
import pathlib
import struct
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent / "fuzz/corpus"
U8 = '"dtype":"U8","shape":[2],"data_offsets":[0,2]'
HEADERS = {
    "empty_object": ("{}", 0),
    "one_tensor": (f'{{"a":{{{U8}}}}}', 2),
    "spaces": (f' {{ "a" : {{ {U8.replace(",", " , ")} }} }}  ', 2),
    "metadata": (f'{{"__metadata__":{{"k":"v","k":"w"}},"a":{{{U8}}}}}', 2),
    "escapes": (f'{{"\\u0061\\n\\ud83d\\ude00":{{{U8}}}}}', 2),
    "array_entry": ('{"a":["U8",[2],[0,2]]}', 2),
    "extra_fields": (f'{{"a":{{{U8},"x":[1.5e3,{{"y":null}},true]}}}}', 2),
    "unordered": (f'{{"b":{{"dtype":"U8","shape":[1],"data_offsets":[2,3]}},"a":{{{U8}}}}}', 3),
    "zero_size": ('{"z":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', 0),
    "sub_byte": ('{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}', 2),
    "hole(fail)": ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', 3),
    "duplicate(fail)": (f'{{"a":{{{U8}}},"a":{{{U8}}}}}', 2),
    "overflow(fail)": ('{"a":{"dtype":"U8","shape":[9223372036854775808,4,0],'
                       '"data_offsets":[0,0]}}', 0),
    "trailing(fail)": (f'{{"a":{{{U8}}}}}', 9),
}
INDICES = {
    "two_files": '{"metadata":{"total_size":4},"weight_map":{"a":"x.safetensors","b":"y"}}',
    "escaped": '{"weight_map":{"\\u0061":"x\\u002esafetensors"}}',
    "leaves(fail)": '{"weight_map":{"a":"../x"}}',
    "no_map(fail)": '{"metadata":{}}',
}

for name, (text, data_bytes) in HEADERS.items():
    path = ROOT / "header" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = text.encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(data_bytes))
for name, text in INDICES.items():
    path = ROOT / "index" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---- folders: see put_entries() in fuzz/fuzz_folder.c ----

NAMES = ["index", "1 of 2", "2 of 2", "1 of 3", "model", "a", "other index", "sub/model",
         "sub/index", "readme", "leftover", "manifest", "file manifest", "sums", "digest", "bundle",
         "lock", "map", "part", "data", "ref", "url"]
KINDS = ["bytes", "model", "folder", "fifo", "link", "twin", "huge"]
MODEL = b'{"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}        '


def entry(name: str, kind: str, content: bytes) -> bytes:
    """One entry of a folder."""
    head = bytes([NAMES.index(name), KINDS.index(kind)])
    return head + struct.pack("<H", len(content)) + content


def write_index(**names: str) -> bytes:
    """Return the text of an index of these tensors and files."""
    return entry("index", "bytes", json.dumps({"weight_map": names}).encode())


FOLDERS = {
    "one_model": entry("model", "model", MODEL),
    "two_shards": write_index(w="model-00001-of-00002.safetensors") + entry(
        "1 of 2", "model", MODEL) + entry("2 of 2", "model", MODEL),
    "missing_shard(fail)": entry("1 of 3", "model", MODEL),
    "url(fail)": write_index(w="http://127.0.0.1/x") + entry("url", "model", MODEL),
    "links": entry("a", "model", MODEL) + entry("model", "link", b"a.safetensors") + entry(
        "1 of 2", "link", b"nowhere") + entry("sub/model", "link", b"."),
    "fifo(fail)": entry("model", "fifo", b""),
    "huge(fail)": entry("model", "huge", b"x"),
    "leftovers": entry("leftover", "bytes", b"x") + entry("model", "model", MODEL),
    "cache": b"".join(entry(name, "bytes", b"fst-cache-map 1\n" + bytes(600))
                      for name in ("map", "part", "data", "ref", "lock")),
    "twins": entry("a", "model", MODEL) + entry("model", "twin", b"x" * 5),
}
for name, content in FOLDERS.items():
    path = ROOT / "folder" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes([16 + 32]) + content)

# ---- verified loads: see fuzz/fuzz_verified.c ----

HEADER = b'{"w":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}     '
FILE = struct.pack("<Q", len(HEADER)) + HEADER + bytes(i * 7 % 256 for i in range(64))
SHA256 = hashlib.sha256(FILE).hexdigest()
HEADER_SHA256 = hashlib.sha256(FILE[:8 + len(HEADER)]).hexdigest()
MANIFEST = (f'fastsafetensors-manifest 1 sha256 65536\nfile {len(FILE)} "model.safetensors"\n'
            f"header {8 + len(HEADER)} {HEADER_SHA256}\nchunk {SHA256}\n")
STATEMENT = json.dumps({
    "_type": "https://in-toto.io/Statement/v1",
    "subject": [{"name": "m", "digest": {
        "sha256": hashlib.sha256(bytes.fromhex(SHA256)).hexdigest()}}],
    "predicateType": "https://model_signing/signature/v1.0",
    "predicate": {"resources": [{"algorithm": "sha256", "digest": SHA256,
                                 "name": "model.safetensors"}],
                  "serialization": {"method": "files", "hash_type": "sha256",
                                    "allow_symlinks": False, "ignore_paths": []}}})
SIDECAR = f'fastsafetensors-digest 1 sha256\nfile {SHA256} "model.safetensors"\n'
VERIFIED = {
    "manifest": (0, b"", MANIFEST), "manifest_of_changed(fail)": (0, b"\x60\x01", MANIFEST),
    "sums": (1, b"", f"{SHA256}  model.safetensors\n"),
    "sums_bsd": (1, b"", f"SHA256 (model.safetensors) = {SHA256}\n"),
    "sums_of_changed(fail)": (1, b"\x60\x01", f"{SHA256} *model.safetensors\n"),
    "kept": (2, b"", SIDECAR), "kept_of_changed(fail)": (2, b"\x60\x01", SIDECAR),
    "statement": (3, b"", STATEMENT), "statement_of_changed(fail)": (3, b"\x60\x01", STATEMENT),
    "url(fail)": (1, b"", f"{SHA256}  http://127.0.0.1/model.safetensors\n"),
}
for name, (kind, change, text) in VERIFIED.items():
    path = ROOT / "verified" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes([kind, len(change) // 2]) + change + text.encode())

# ---- whole compressed files: see fuzz/fuzz_whole_packed.c ----


def write_packed(name: str, flags: int, tensors: dict[str, tuple[str, int]]) -> None:
    """Compress tensors of slowly growing values with the command."""
    command = ROOT.parent.parent / "build/release/cli/fastsafetensors"
    header, data = {}, b""
    for tensor, (dtype, size) in tensors.items():
        own = bytes((i * i >> 9) % 7 if i % 2 else 0x3f for i in range(size))
        count = size // {"F32": 4, "BF16": 2, "U8": 1}[dtype]
        header[tensor] = {"dtype": dtype, "shape": [count],
                          "data_offsets": [len(data), len(data) + size]}
        data += own
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder, "a.safetensors"), pathlib.Path(folder, "b")
        source.write_bytes(struct.pack("<Q", len(text)) + text + data)
        done = subprocess.run([command, "convert", "--compress=all", source, target],
                              capture_output=True)
        if done.returncode:
            return  # not built, or no libzstd to compress with
        path = ROOT / "whole_packed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([flags]) + target.read_bytes())


write_packed("floats", 1, {"w": ("F32", 8192), "b": ("BF16", 4096)})
write_packed("bytes", 0, {"w": ("U8", 5000)})
write_packed("many", 1, {f"t{i}": ("BF16", 1024) for i in range(8)})
write_packed("cut", 3, {"w": ("F32", 4096)})
