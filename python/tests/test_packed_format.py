# SPDX-License-Identifier: Apache-2.0
"""An independent reader and writer of compressed files, written from docs/FORMAT.md alone, agree
with the library."""

import ctypes
import json
import pathlib
import struct

import numpy as np
import pytest
from conftest import zstd_or_skip

import fastsafetensors.numpy as fst
from fastsafetensors import SafetensorError
from fastsafetensors import safe_open as SafeOpen

ZSTD = zstd_or_skip()
ZSTD.ZSTD_decompress.restype = ZSTD.ZSTD_compress.restype = ctypes.c_size_t

NUMBERS = {"U8": 4, "I16": 11, "F16": 13, "BF16": 14, "F32": 17, "I64": 20}
ELEMENT_BYTES = {"U8": 1, "I16": 2, "F16": 2, "BF16": 2, "F32": 4, "I64": 8}
ROTATED = {"F16", "BF16", "F32"}


def crc32c(data: bytes) -> int:
    """CRC32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def rotate(numbers: np.ndarray, bits: int, left: int) -> np.ndarray:
    """Rotate the bits of numbers left."""
    if left == 0:
        return numbers
    kind = numbers.dtype.type
    return (numbers << kind(left)) | (numbers >> kind(bits - left))


def read_chunk(stored: bytes, dtype: str, true_bytes: int) -> bytes:
    """Return the decoded bytes of a chunk."""
    width = ELEMENT_BYTES[dtype]
    count = stored[0]
    assert count == width
    size = true_bytes // width
    heads = [struct.unpack_from("<BBI", stored, 1 + 6 * k) for k in range(count)]
    planes: dict[int, bytes] = {}
    at = 1 + 6 * count
    for wanted in (2, 0):
        for k, (kind, value, length) in enumerate(heads):
            if kind == 1:
                planes[k] = bytes([value]) * size
            if kind != wanted:
                continue
            at = -(-at // 16) * 16
            data = stored[at : at + length]
            at += length
            if kind == 2:
                room = ctypes.create_string_buffer(size)
                assert ZSTD.ZSTD_decompress(room, size, data, len(data)) == size
                data = room.raw
            planes[k] = data
    numbers = np.zeros(size, f"<u{width}")
    for k in range(count):
        numbers = (numbers << numbers.dtype.type(8 % (8 * width))) | np.frombuffer(
            planes[k], "u1"
        ).astype(numbers.dtype)
    return rotate(numbers, 8 * width, 8 * width - 1 if dtype in ROTATED else 0).tobytes()


def read_file(path: pathlib.Path) -> bytes:
    """Return the bytes of the original file."""
    data = path.read_bytes()
    begin = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:begin])
    header.pop("__metadata__")
    directory = data[begin : begin + header["__packed__"]["shape"][0]]
    magic, version, flags, used, tensors, tables, chunks, true_bytes, original, crc, zero = (
        struct.unpack_from("<8sIIQIIQQQII", directory)
    )
    assert (magic, version, flags, tables, zero) == (b"FSTPACK1", 1, 0, 0, 0)
    assert crc == crc32c(directory[:56] + bytes(4) + directory[60:])
    marks = 64 + 32 * tensors
    made = directory[marks + 8 * chunks : used]
    assert len(made) == original
    own = json.loads(made[8:])
    own.pop("__metadata__", None)
    out = bytearray(true_bytes)
    out[:original] = made
    entries = sorted(header, key=lambda name: header[name]["data_offsets"])
    for index, entry in enumerate(entries[1:]):
        stored = data[
            begin + header[entry]["data_offsets"][0] : begin + header[entry]["data_offsets"][1]
        ]
        if index < tensors:
            name = entry[len("__packed__.") :]
            number, layout, coder, log, zero, size, first, tail = struct.unpack_from(
                "<BBBBIQQQ", directory, 64 + 32 * index
            )
            dtype = own[name]["dtype"]
            assert (number, coder, zero, tail) == (NUMBERS[dtype], 1, 0, 0)
            assert layout == (1 if dtype in ROTATED else 0 if dtype == "U8" else 3)
            parts, at = [], 0
            for i in range(-(-size >> log)):
                length, check = struct.unpack_from("<II", directory, marks + 8 * (first + i))
                true = min(1 << log, size - (i << log))
                piece = stored[at : at + (length & 0x7FFFFFFF)]
                at += len(piece)
                parts.append(piece if length >> 31 else read_chunk(piece, dtype, true))
                assert i > 0 or check == crc32c(parts[-1])
            plain = b"".join(parts)
        else:
            name, plain = entry, stored
        place = original + own[name]["data_offsets"][0]
        out[place : place + len(plain)] = plain
    return bytes(out)


def write_chunk(data: bytes, dtype: str) -> bytes:
    """Return the encoded bytes of a chunk."""
    width = ELEMENT_BYTES[dtype]
    numbers = rotate(np.frombuffer(data, f"<u{width}"), 8 * width, 1 if dtype in ROTATED else 0)
    heads, coded, raw = b"", [], []
    for k in range(width):
        plane = (numbers >> numbers.dtype.type(8 * (width - 1 - k))).astype("u1").tobytes()
        if len(set(plane)) == 1:
            heads += struct.pack("<BBI", 1, plane[0], 0)
            continue
        room = ctypes.create_string_buffer(len(plane) * 2 + 100)
        got = ZSTD.ZSTD_compress(room, len(room), plane, len(plane), 1)
        if got < len(plane):
            heads += struct.pack("<BBI", 2, 0, got)
            coded.append(room.raw[:got])
        else:
            heads += struct.pack("<BBI", 0, 0, len(plane))
            raw.append(plane)
    out = bytes([width]) + heads
    for part in coded + raw:
        out = out.ljust(-(-len(out) // 16) * 16, b"\0") + part
    return out.ljust(-(-len(out) // 16) * 16, b"\0")


def write_file(original: bytes, log: int) -> bytes:
    """The file that a writer makes from the page: every tensor of 64 bytes or more is packed."""
    begin = 8 + struct.unpack_from("<Q", original)[0]
    own = json.loads(original[8:begin])
    metadata = own.pop("__metadata__", {})
    records, marks, blobs, count, header = b"", b"", [], 0, {}
    for name, entry in own.items():
        low, high = entry["data_offsets"]
        data = original[begin + low : begin + high]
        if len(data) < 64:
            continue
        width = ELEMENT_BYTES[entry["dtype"]]
        layout = 1 if entry["dtype"] in ROTATED else 0 if width == 1 else 3
        records += struct.pack(
            "<BBBBIQQQ", NUMBERS[entry["dtype"]], layout, 1, log, 0, len(data), count, 0
        )
        blob = b""
        for at in range(0, len(data), 1 << log):
            part = data[at : at + (1 << log)]
            chunk = write_chunk(part, entry["dtype"])
            is_raw = len(chunk) >= len(part)
            stored = part if is_raw else chunk
            marks += struct.pack("<II", len(stored) | is_raw << 31, crc32c(part))
            blob += stored
            count += 1
        blobs.append((name, blob.ljust(-(-len(blob) // 64) * 64, b"\0")))
    used = 64 + len(records) + len(marks) + begin
    head = struct.pack(
        "<8sIIQIIQQQQ", b"FSTPACK1", 1, 0, used, len(blobs), 0, count, len(original), begin, 0
    )
    directory = (head + records + marks + original[:begin]).ljust(-(-used // 64) * 64, b"\0")
    directory = directory[:56] + struct.pack("<I", crc32c(directory)) + directory[60:]
    data = directory
    header["__metadata__"] = {**metadata, "fst.packed": "1"}
    header["__packed__"] = {
        "dtype": "U8",
        "shape": [len(directory)],
        "data_offsets": [0, len(data)],
    }
    for name, blob in blobs:
        header["__packed__." + name] = {
            "dtype": "U8",
            "shape": [len(blob)],
            "data_offsets": [len(data), len(data) + len(blob)],
        }
        data += blob
    for name, entry in own.items():
        low, high = entry["data_offsets"]
        if high - low >= 64:
            continue
        header[name] = {**entry, "data_offsets": [len(data), len(data) + high - low]}
        data += original[begin + low : begin + high]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def some_arrays() -> dict[str, np.ndarray]:
    """Arrays that shrink, and some that do not."""
    random = np.random.default_rng(5)
    return {
        "float": random.normal(size=(210, 331)).astype("f4"),
        "half": random.normal(size=70001).astype("f2"),
        "many": np.arange(9000, dtype="i8") * 3,
        "short": (np.arange(40000) % 700).astype("i2"),
        "bytes": (np.arange(30000) % 5).astype("u1"),
        "little": np.arange(3, dtype="f4"),
    }


def test_the_independent_reader_reads_our_files(tmp_path):
    """The independent reader reads files that the library writes."""
    plain, packed = tmp_path / "plain.safetensors", tmp_path / "packed.safetensors"
    fst.save_file(some_arrays(), str(plain))
    fst.save_file(some_arrays(), str(packed), compress="all")
    assert packed.stat().st_size < plain.stat().st_size
    assert read_file(packed) == plain.read_bytes()


@pytest.mark.parametrize("log", [16, 18, 20])
def test_the_library_reads_independently_written_files(tmp_path, log):
    """The library reads files that the independent writer writes."""
    plain, packed = tmp_path / "plain.safetensors", tmp_path / "packed.safetensors"
    fst.save_file(some_arrays(), str(plain))
    packed.write_bytes(write_file(plain.read_bytes(), log))
    loaded = fst.load_file(str(packed))
    for name, array in some_arrays().items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)


def test_both_headers_have_the_same_metadata(tmp_path):
    """Readers without support for compressed files see the same metadata as readers with it."""
    plain, packed = tmp_path / "plain.safetensors", tmp_path / "packed.safetensors"
    fst.save_file(some_arrays(), str(plain), metadata={"license": "mit", "note": "n"})
    good = write_file(plain.read_bytes(), 18)
    packed.write_bytes(good)
    assert SafeOpen(str(packed), "np").metadata() == {"license": "mit", "note": "n"}
    begin = 8 + struct.unpack_from("<Q", good)[0]
    for change in ({"license": "gpl"}, {"note": None}, {"more": "x"}):
        header = json.loads(good[8:begin])
        header["__metadata__"] |= change
        header["__metadata__"] = {k: v for k, v in header["__metadata__"].items() if v is not None}
        text = json.dumps(header).encode()
        packed.write_bytes(struct.pack("<Q", len(text)) + text + good[begin:])
        with pytest.raises(SafetensorError, match="metadata differs"):
            fst.load_file(str(packed))
