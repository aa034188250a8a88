# SPDX-License-Identifier: Apache-2.0
"""The safetensors package and every interface of ours, compared on thousands of files.

The C library, the command, safe_open and SafeTensorsFileLoader must accept or reject each file like
the reference, and return the same names, dtypes, shapes, bytes and metadata. DIFFERENCES lists the
intended differences with their reasons; every entry must occur.
"""

import ctypes
import json
import math
import os
import pathlib
import random
import struct
import subprocess

import pytest
from conftest import ROOT

import fastsafetensors as ours
from fastsafetensors import _core

CASES = 5000
BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8,
        "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16,
        "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
        "U64": 64}
DIFFERENCES = {
    "a name twice": "the specification forbids it; the reference takes the last one",
    "bytes behind the data": "0.5's loaders take them (sub-byte and page-aligned files end so)",
    "a dimension of 2^63 and more": "torch has none (such tensors have no bytes): BufferError",
    "a metadata key twice": "the reference's hash map forgets one; ours keeps the last, as it does",
}
# Headers of these sizes are not generated: test_limits_of_this_reader has one of each.
LIMITS = {
    "more than 4,096 dimensions": "the reference has no limit, and memory for a header is bounded",
    "more than 1,048,576 metadata entries": "likewise; repeated keys count each time",
    "tables above the header's size and 4 MiB": "likewise; headers as writers make them fit",
}
NAMES = ["w", "layers.0.weight", "é", "\U0001f600", "", "a b", "x" * 200, "\x00", "\x7f",
         "__metadata", 'quote"', "back\\slash", "tab\t"]
WRONG_NUMBERS = ["-1", "1.0", "1e0", "01", "18446744073709551616", "18446744073709551615", "true",
                 '"1"', "null", "-0", "[]", "9223372036854775808"]


class Case:
    """A file, and the entries of DIFFERENCES that apply to it."""

    def __init__(self, seed):
        """Make a valid file, and break a rule of the format in some of them."""
        self.random = random.Random(seed)
        self.wanted = set()
        self.entries, self.data = [], b""
        for number in range(self.random.randrange(5)):
            self.add_tensor(number)
        self.add_metadata()
        if self.random.random() < 0.5:
            self.random.shuffle(self.entries)
        text = self.spaced("{") + self.spaced(",").join(self.entries) + self.spaced("}")
        self.header = text.encode("utf-8", "surrogatepass")
        self.length = None
        if self.random.random() < 0.6:
            self.break_it()

    def spaced(self, text):
        """Return the text, sometimes with added whitespace."""
        chance = self.random.random()
        return text if chance < 0.9 else self.random.choice(" \t\r\n") + text + " "

    def word(self, text):
        """Return a JSON string, sometimes with needless escapes."""
        plain = json.dumps(text, ensure_ascii=self.random.random() < 0.5)
        if self.random.random() < 0.1 and text.isalnum():
            return '"\\u%04x%s' % (ord(text[0]), plain[2:])
        return plain

    def add_tensor(self, number):
        """Append a tensor."""
        dtype = self.random.choice(list(BITS))
        shape = [self.random.choice([0, 1, 2, 3, 4, 8]) for _ in range(self.random.randrange(4))]
        bits = math.prod(shape) * BITS[dtype]
        if bits % 8:
            shape.append(8)
            bits *= 8
        begin, end = len(self.data), len(self.data) + bits // 8
        self.data += self.random.randbytes(bits // 8)
        name = self.random.choice(NAMES)
        name = name if name in ("",) and number == 0 else f"{name}{number}"
        fields = [f'{self.word("dtype")}:{self.dtype(dtype)}',
                  f'{self.word("shape")}:{self.numbers(shape)}',
                  f'{self.word("data_offsets")}:{self.numbers([begin, end])}']
        self.random.shuffle(fields)
        if self.random.random() < 0.05:
            fields.append(self.random.choice(['"x":{"y":[1,2.5e3,null]}', '"x":"\\ud83d\\ude00"']))
        entry = "{" + self.spaced(",").join(fields) + "}"
        if self.random.random() < 0.05:
            entry = f'[{self.dtype(dtype)},{self.numbers(shape)},{self.numbers([begin, end])}]'
        self.entries.append(f"{self.word(name)}:{entry}")

    def dtype(self, name):
        """Return a dtype as a string, sometimes as a map, which is only valid with the value
        null."""
        if self.random.random() < 0.95:
            return f'"{name}"'
        value = self.random.choice(["null", "null", "{}", "[]", "0", "true", '""'])
        more = self.random.choice(["", "", "", f',"{name}":null'])
        return self.spaced("{") + f'"{name}"' + self.spaced(":") + value + more + self.spaced("}")

    def numbers(self, values):
        """A list of numbers."""
        return "[" + self.spaced(",").join(map(str, values)) + "]"

    def add_metadata(self):
        """No metadata, one entry, or an invalid one."""
        if self.random.random() < 0.6:
            return
        kind = self.random.randrange(7)
        good = {f"k{i}": self.random.choice(["v", "", "é\n", "\U0001f600"]) for i in range(kind)}
        text = json.dumps(good, ensure_ascii=False)
        if kind == 5:
            text = self.random.choice(["null", '{"a":"x","a":"y"}'])
            self.wanted |= {"a metadata key twice"} if "x" in text else set()
        if kind == 6:
            text = self.random.choice(['{"a":1}', "[]", '{"a":null}', '"a"', '{"a":{}}'])
        self.entries.append(f'"__metadata__":{text}')

    def break_it(self):
        """Break one rule of the format. Some of the changes leave the file valid."""
        ways = [self.break_bytes, self.break_length, self.break_data, self.break_number,
                self.break_text, self.repeat_entry, self.cut, self.break_utf8]
        self.random.choice(ways)()

    def break_bytes(self):
        """Change a byte of the header."""
        at = self.random.randrange(len(self.header))
        byte = self.random.choice(b'"{}[],:x\\0 \x00\xff9-.')
        self.header = self.header[:at] + bytes([byte]) + self.header[at + 1:]

    def break_length(self):
        """Change the length field."""
        length = len(self.header)
        self.length = self.random.choice([0, 1, length - 1, length + 1, length + len(self.data),
                                          100_000_001, 1 << 40, (1 << 64) - 1, (1 << 64) - 8])

    def break_data(self):
        """Remove bytes at the end of the data, or add some."""
        more = self.random.choice([-1, 1, 8, 4096])
        self.data = self.data[:more] if more < 0 else self.data + bytes(more)

    def break_number(self):
        """Replace a number by another one, or by text."""
        text = self.header.decode("utf-8", "surrogatepass")
        places = [i for i, c in enumerate(text) if c.isdigit() and not text[i - 1].isdigit()]
        if not places:
            return
        at = self.random.choice(places)
        end = at
        while end < len(text) and text[end].isdigit():
            end += 1
        new = self.random.choice([*WRONG_NUMBERS, str(int(text[at:end]) + 1), "0"])
        self.header = (text[:at] + new + text[end:]).encode("utf-8", "surrogatepass")

    def break_text(self):
        """Insert text around or within the JSON, which may be invalid there."""
        tail = self.random.choice([b" ", b"\n\t ", b"\0", b"x", b"{}", b",", b"//", b" " * 100])
        head = self.random.choice([b"", b"", b" ", b"\xef\xbb\xbf", b"["])
        self.header = head + self.header + tail

    def repeat_entry(self):
        """Repeat an entry: a field, or a tensor."""
        text = self.header.decode("utf-8", "surrogatepass")
        if len(self.entries) > 0 and text.rstrip().endswith("}"):
            entry = self.random.choice(self.entries)
            body = text.rstrip()[:-1]
            self.header = (body + "," + entry + "}").encode("utf-8", "surrogatepass")
            if not entry.startswith('"__metadata__"'):
                self.wanted.add("a name twice")

    def cut(self):
        """Truncate the file."""
        self.length = len(self.header)
        keep = self.random.randrange(len(self.header) + len(self.data) + 1)
        whole = self.header + self.data
        self.header, self.data = whole[:keep], b""

    def break_utf8(self):
        """Insert text that is not valid UTF-8 or not valid Unicode."""
        at = self.random.randrange(len(self.header))
        piece = self.random.choice([b"\xc0\x80", b"\xed\xa0\x80", b"\xf5", b"\x80", b"\\ud800",
                                    b"\\u12", b"\xf0\x9f\x98\x80", b"\x1f"])
        self.header = self.header[:at] + piece + self.header[at:]

    def bytes(self):
        """Return the bytes of the file."""
        length = len(self.header) if self.length is None else self.length
        return struct.pack("<Q", length) + self.header + self.data


def reference(data, path):
    """{name: (dtype, shape, bytes)} and metadata, or None."""
    import safetensors

    try:
        tensors = dict(safetensors.deserialize(data))
        with safetensors.safe_open(path, framework="np") as f:
            metadata = f.metadata()
    except safetensors.SafetensorError:
        return None
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
            for name, t in tensors.items()}, metadata


def by_extension(path, data):
    """Read the file with the extension that safe_open uses, and the bytes with a load from
    memory."""
    try:
        file = ours.safe_open(path, "np", mode="load")
    except ours.SafetensorError:
        return None
    model = file._model
    loader = model.load(mode="load")
    found = {t.name: (t.dtype, t.shape, ctypes.string_at(t.data_ptr, t.nbytes) if t.nbytes else b"")
             for t in loader}
    loader.close()
    assert file.keys() == sorted(found)
    metadata = file.metadata()
    file.close()
    return found, metadata


class Info(ctypes.Structure):
    """fst_tensor_info."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("name", ctypes.c_void_p),
                ("name_size", ctypes.c_size_t), ("dtype", ctypes.c_int),
                ("rank", ctypes.c_uint32), ("shape", ctypes.POINTER(ctypes.c_uint64)),
                ("elements", ctypes.c_uint64), ("size", ctypes.c_uint64),
                ("file", ctypes.c_uint32), ("offset", ctypes.c_uint64),
                ("stored", ctypes.c_uint64)]


def c_library():
    """Load the shared library with ctypes."""
    for build in ("test", "release"):
        path = ROOT / "build" / build / "src/libfastsafetensors.so"
        if path.exists():
            library = ctypes.CDLL(os.fspath(path))
            library.fst_model_open.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p,
                                               ctypes.c_void_p]
            library.fst_model_tensor_count.restype = ctypes.c_size_t
            library.fst_model_tensor_count.argtypes = [ctypes.c_void_p]
            library.fst_model_tensor_info.argtypes = [ctypes.c_void_p, ctypes.c_size_t,
                                                      ctypes.c_void_p, ctypes.c_void_p]
            library.fst_model_close.argtypes = [ctypes.c_void_p]
            return library
    pytest.skip("the C library is not built")


def by_c(library, path, data):
    """Read the file with the functions of the public headers."""
    model, info = ctypes.c_void_p(), Info(struct_size=ctypes.sizeof(Info))
    if library.fst_model_open(os.fsencode(path), None, ctypes.byref(model), None) != 0:
        assert not model
        return None
    found = {}
    for index in range(library.fst_model_tensor_count(model)):
        assert library.fst_model_tensor_info(model, index, ctypes.byref(info), None) == 0
        name = ctypes.string_at(info.name, info.name_size).decode()
        found[name] = (_core.DTYPES[info.dtype], tuple(info.shape[: info.rank]),
                       data[info.offset: info.offset + info.size])
    library.fst_model_close(model)
    return found


def by_loader(path):
    """Read shapes and bytes of the file with the 0.5-style loader."""
    import torch

    loader = ours.SafeTensorsFileLoader(ours.SingleGroup(), "cpu")
    try:
        loader.add_filenames({0: [os.fspath(path)]})
    except ours.SafetensorError:
        return None
    buffer = loader.copy_files_to_device()
    found = {}
    for name in loader.get_keys():
        tensor = buffer.get_tensor(name)
        flat = tensor.contiguous().reshape(-1)
        found[name] = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    buffer.close()
    loader.close()
    return found


def compare(case, path, data, library, seen):
    """Compare all APIs with the reference. Return our verdict and whether the lenient reader
    differs."""
    expected = reference(data, path)
    mine = by_extension(path, data)
    in_c = by_c(library, path, data)
    assert (mine is None) == (in_c is None)
    if mine is not None:
        assert mine[0] == in_c
    if mine is None and expected is not None:
        assert "a name twice" in case.wanted, (case.header, data)
        seen.add("a name twice")
        expected = None
    elif expected is None:
        assert mine is None, (case.header, data)
    else:
        assert mine[0] == expected[0], case.header
        if mine[1] != expected[1]:
            raise AssertionError((case.header, mine[1], expected[1]))
        if "a metadata key twice" in case.wanted:
            seen.add("a metadata key twice")
    try:
        loaded = by_loader(path)
    except BufferError:
        assert any(size >= 1 << 63 for tensor in mine[0].values() for size in tensor[1])
        seen.add("a dimension of 2^63 and more")
        return mine
    if loaded is not None and mine is None:
        with pytest.raises(ours.SafetensorError) as strict:
            _core.Model(path)
        assert strict.value.tag == "MetadataIncompleteBuffer", case.header
        seen.add("bytes behind the data")
    else:
        assert (loaded is None) == (mine is None), case.header
    if loaded is not None and mine is not None:
        assert loaded == {name: tensor[2] for name, tensor in mine[0].items()}
    return mine


def test_all_apis_agree_with_the_reference(tmp_path, command):
    """Compare five thousand files from a fixed seed. The command checks all of them in few runs."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    library, seen, verdicts = c_library(), set(), {}
    for seed in range(CASES):
        case = Case(seed)
        path = tmp_path / f"{seed}.safetensors"
        data = case.bytes()
        path.write_bytes(data)
        verdicts[path] = compare(case, path, data, library, seen)
    good = sum(found is not None for found in verdicts.values())
    assert CASES * 0.3 < good < CASES * 0.8, good
    assert seen == set(DIFFERENCES), seen
    paths = list(verdicts)
    for begin in range(0, CASES, 500):
        part = paths[begin: begin + 500]
        done = subprocess.run([command, "verify", *part], capture_output=True, text=True,
                              timeout=600, check=False)
        said = {pathlib.Path(line.split(": ")[0]): ": valid" in line
                for line in done.stdout.splitlines() if ".safetensors: " in line}
        assert said == {path: verdicts[path] is not None for path in part}
    for path in paths[::25]:
        if verdicts[path] is None:
            continue
        text = subprocess.run([command, "inspect", "--json", path], capture_output=True,
                              timeout=600, check=True).stdout
        rows = {t["name"]: (t["dtype"], tuple(t["shape"]))
                for t in json.loads(text)["tensors"]}
        assert rows == {n: t[:2] for n, t in verdicts[path][0].items()}


def test_limits_of_this_reader(tmp_path):
    """The reference accepts these headers; this reader rejects them as too large."""
    safetensors = pytest.importorskip("safetensors")

    def verdicts(text):
        data = struct.pack("<Q", len(text)) + text.encode()
        path = tmp_path / "limit.safetensors"
        path.write_bytes(data)
        assert isinstance(safetensors.deserialize(data), list)
        try:
            _core.Model(path)
        except ours.SafetensorError as error:
            return error.tag
        return "taken"

    def tensor(rank):
        shape = ",".join(["0"] * rank)
        return f'{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}}}'

    def metadata(count, key):
        entries = ",".join(f'"{key or number}":""' for number in range(count))
        return '{"__metadata__":{' + entries + "}}"

    most = 1 << 20
    padding = " " * 40_000_000  # so that only the number of entries is too large
    assert verdicts(tensor(4096)) == "taken"
    assert verdicts(tensor(4097)) == "HeaderTooLarge"
    assert verdicts(metadata(most, "") + padding) == "taken"
    assert verdicts(metadata(most + 1, "") + padding) == "HeaderTooLarge"
    assert verdicts(metadata(most + 1, "k") + padding) == "HeaderTooLarge"
    many = ",".join(f'"{i:x}":["U8",[0],[0,0]]' for i in range(500_000))
    assert verdicts("{" + many + "}") == "HeaderTooLarge"
    assert len(LIMITS) == 3


def test_writers_keep_to_the_limits():
    """Saves fail if the file would exceed the limits of the reader."""
    from fastsafetensors._saving.serialize import TensorSpec, deserialize, serialize

    data = ctypes.create_string_buffer(1)
    most = TensorSpec("uint8", [1] * 4096, ctypes.addressof(data), 1)
    assert deserialize(serialize({"a": most}))[0][1]["shape"] == [1] * 4096
    with pytest.raises((ValueError, ours.SafetensorError), match="4,096 dimensions"):
        serialize({"a": TensorSpec("uint8", [1] * 4097, ctypes.addressof(data), 1)})
