# SPDX-License-Identifier: Apache-2.0
"""The texts of errors, from C, the command and Python, compared with messages.txt.

`UPDATE_MESSAGES=1 pytest test_messages_golden.py` writes messages.txt anew. The
folder of the test is written as DIR.
"""

import ctypes
import json
import os
import pathlib
import struct
import subprocess

import pytest
from conftest import ROOT, write_raw

import fastsafetensors

GOLDEN = pathlib.Path(__file__).with_name("messages.txt")
U8 = '"dtype":"U8","shape":[2],"data_offsets":[0,2]'

# Names of files with the header and data, or all bytes, of each.
BAD_HEADERS = {
    "array": ("[]", b""),
    "no_brace": ('"a"', b""),
    "no_colon": ('{"a" 1}', b""),
    "no_object": ('{"a":1}', b""),
    "unclosed": ('{"a":{' + U8 + "}", b"xx"),
    "text_after": ("{} x", b""),
    "duplicate": ('{"a":{' + U8 + '},"a":{' + U8 + "}}", b"xx"),
    "duplicate_field": ('{"a":{"dtype":"U8",' + U8 + "}}", b"xx"),
    "duplicate_metadata": ('{"__metadata__":{},"__metadata__":{}}', b""),
    "metadata_number": ('{"__metadata__":{"k":1}}', b""),
    "metadata_list": ('{"__metadata__":[]}', b""),
    "unknown_dtype": ('{"a":{"dtype":"X9","shape":[2],"data_offsets":[0,2]}}', b"xx"),
    "no_shape": ('{"a":{"dtype":"U8","data_offsets":[0,2]}}', b"xx"),
    "negative": ('{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}', b"xx"),
    "leading_zero": ('{"a":{"dtype":"U8","shape":[02],"data_offsets":[0,2]}}', b"xx"),
    "huge_number": ('{"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,2]}}',
                    b"xx"),
    "one_offset": ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0]}}', b"xx"),
    "gap": ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', b"xxx"),
    "wrong_size": ('{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}', b"xx"),
    "overflow": ('{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,2]}}',
                 b"xx"),
    "half_bytes": ('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', b"xx"),
    "short_data": ('{"a":{' + U8 + "}}", b"x"),
    "long_data": ('{"a":{' + U8 + "}}", b"xxx"),
    "utf8": (b'{"\xff":{' + U8.encode() + b"}}", b"xx"),
    "bad_escape": ('{"a\\q":{' + U8 + "}}", b"xx"),
    "lone_surrogate": ('{"a\\ud800":{' + U8 + "}}", b"xx"),
    "control": ('{"a\x01":{' + U8 + "}}", b"xx"),
}
OTHER_FILES = {
    "empty": b"",
    "short": b"abc",
    "claims_much": struct.pack("<Q", 1 << 40) + b"{}",
    "claims_more": struct.pack("<Q", 50) + b"{}",
    "zeros": bytes(64),
    "gzip": b"\x1f\x8b\x08" + bytes(40),
    "gguf": b"GGUF" + bytes(40),
    "npy": b"\x93NUMPY\x01\x00" + bytes(40),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(40),
    "elf": b"\x7fELF" + bytes(40),
    "tar": bytes(257) + b"ustar\x0000" + bytes(248),
    "zip": b"PK\x03\x04" + bytes(60),
    "pickle": b"\x80\x02}q\x00." + bytes(30),
    "html": b"<!DOCTYPE html><html></html>",
    "xml": b"<?xml version='1.0'?><Error></Error>",
    "json": b'{"error":"not found"}',
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n",
    "text": b"hello, this is a text\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with damaged files, one valid file and some sets."""
    path = tmp_path_factory.mktemp("messages")
    for name, (header, data) in BAD_HEADERS.items():
        write_raw(path / f"{name}.safetensors", header, data)
    for name, data in OTHER_FILES.items():
        (path / f"{name}.safetensors").write_bytes(data)
    write_raw(path / "good.safetensors", '{"a":{' + U8 + "}}", b"xx")
    (path / "nothing").mkdir()
    indexes = {"missing_shard": {"a": "one.safetensors"}, "outside": {"a": "../x.safetensors"},
               "numbers": {"a": 1}}
    for name, names in indexes.items():
        (path / name).mkdir()
        (path / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (path / "two").mkdir()
    for name in ("x", "y"):
        write_raw(path / "two" / f"{name}.safetensors", '{"a":{' + U8 + "}}", b"xx")
    (path / "bad_manifest").write_text("something else\n")
    (path / "bad_key.pem").write_text("no key\n")
    return path


def check(section, found, folder):
    """Compare one section of messages.txt with the printed messages, or write it."""
    lines = "".join(f"{label}\n    {text.replace(os.fspath(folder), 'DIR')}\n"
                    for label, text in found)
    old = GOLDEN.read_text() if GOLDEN.exists() else ""
    sections = dict(part.split("\n", 1) for part in old.split("## ")[1:])
    if os.environ.get("UPDATE_MESSAGES"):
        sections[section] = lines + "\n"
        GOLDEN.write_text("".join(f"## {name}\n{sections[name]}" for name in sorted(sections)))
    assert sections[section].rstrip("\n").split("\n") == lines.rstrip("\n").split("\n")
    # The file is named once, apart from the one that Python appends to an OSError.
    for label, text in found:
        assert text.count(f"{label.split()[-1]}: ") <= 1, text


class Error(ctypes.Structure):
    """fst_error."""

    _fields_ = [("status", ctypes.c_int), ("os_errno", ctypes.c_int32),
                ("device_code", ctypes.c_int32), ("byte_offset", ctypes.c_uint64),
                ("file", ctypes.c_char * 256), ("tensor", ctypes.c_char * 128),
                ("message", ctypes.c_char * 512)]


def options(name, **values):
    """Return the bytes of an options struct, with the offsets in abi-1.txt."""
    words = [line.split() for line in (ROOT / "tests/header/abi-1.txt").read_text().splitlines()]
    size = next(int(word[2]) for word in words if word[:2] == ["struct", name])
    content = bytearray(size)
    for field, value in {"struct_size": size, **values}.items():
        at, width = next(map(int, word[2:4]) for word in words
                         if word[:2] == ["field", f"{name}.{field}"])
        content[at:at + width] = value.to_bytes(width, "little")
    return ctypes.create_string_buffer(bytes(content), size)


@pytest.fixture(scope="module")
def library():
    """The built C library."""
    for kind in ("test", "release"):
        path = ROOT / "build" / kind / "src/libfastsafetensors.so"
        if path.exists():
            return ctypes.CDLL(os.fspath(path))
    pytest.skip("the C library is not built")


def address(value):
    """Return the address of a struct as a number."""
    return ctypes.addressof(value)


class Calls:
    """Calls C functions and keeps the messages."""

    def __init__(self, library):
        self.library, self.found = library, []

    def call(self, label, function, *arguments):
        """Call a function that must fail."""
        error = Error()
        status = getattr(self.library, function)(*arguments, ctypes.byref(error))
        assert status == error.status != 0, label
        kind = self.library.fst_status_name
        kind.restype = ctypes.c_char_p
        message = error.message.decode()
        if error.file:
            assert message.startswith(error.file.decode() + ": "), message
            assert message.count(error.file.decode()) == 1, message
        self.found.append((label, f"{message} [{kind(status).decode()}]"))

    def open(self, path, given=None):
        """Open a model, which must succeed."""
        model = ctypes.c_void_p()
        path = os.fsencode(path)
        assert self.library.fst_model_open(path, given, ctypes.byref(model), None) == 0
        return model


def test_messages_of_c(library, folder):
    """A message about a file begins with its name and contains it once."""
    calls, out = Calls(library), ctypes.c_void_p()
    result = ctypes.byref(out)
    paths = [f"{name}.safetensors" for name in (*BAD_HEADERS, *OTHER_FILES)]
    for name in [*paths, "absent", "nothing", "missing_shard", "outside", "numbers", "two"]:
        calls.call(f"open {name}", "fst_model_open", os.fsencode(folder / name), None, result)
    good = os.fsencode(folder / "good.safetensors")
    calls.call("open NULL", "fst_model_open", None, None, result)
    calls.call("open without out", "fst_model_open", good, None, None)
    for field, value in {"struct_size": 3, "flags": 1 << 30}.items():
        given = options("fst_open_options", **{field: value})
        calls.call(f"open with {field}", "fst_model_open", good, given, result)
    for label, fields in {
        "a bad manifest": ["manifest"], "a signature only": ["signature"],
        "a bad signature": ["manifest", "signature", "public_key"],
    }.items():
        names = {field: ctypes.create_string_buffer(os.fsencode(folder / "bad_manifest"))
                 for field in fields}
        given = options("fst_open_options", **{k: address(v) for k, v in names.items()})
        calls.call(f"open with {label}", "fst_model_open", good, given, result)
    model = calls.open(folder / "good.safetensors")
    for field, value in {"struct_size": 5, "mode": 9, "order": 9, "dtype": 99, "cache": 9,
                         "part_count": 1, "glob_count": 1, "device": 77}.items():
        convert = {"convert": 1} if field == "dtype" else {}  # otherwise dtype is not read
        given = options("fst_load_options", **{field: value}, **convert)
        calls.call(f"load with {field} {value}", "fst_loader_open", model, given, result)
    given = options("fst_load_options", mode=2, convert=1)
    calls.call("map and convert", "fst_loader_open", model, given, result)
    for at, field in enumerate(("engine", "gds", "ring", "numa", "unified")):
        numbers = [99 if at == i else 0 for i in range(7)]
        tuning = ctypes.create_string_buffer(struct.pack("<Q7i4xQQ", 56, *numbers, 0, 0), 56)
        given = options("fst_load_options", tuning=address(tuning))
        calls.call(f"load with {field} 99", "fst_loader_open", model, given, result)
    calls.call("load NULL", "fst_loader_open", None, None, result)
    number = ctypes.byref(ctypes.c_size_t())
    calls.call("find an absent tensor", "fst_model_find", model, b"zz", ctypes.c_size_t(2), number)
    information = options("fst_tensor_info")
    calls.call("tensor 7 of 1", "fst_model_tensor_info", model, ctypes.c_size_t(7), information)
    for field, value in {"promise": 9, "order": 9, "engine": 9, "compress": 9, "digest": 99,
                         "alignment_bytes": 3, "header_alignment_bytes": 3, "file_count": 100000,
                         "metadata_count": 1, "struct_size": 1}.items():
        given = options("fst_save_options", **{field: value})
        calls.call(f"save with {field} {value}", "fst_writer_open", good, None, ctypes.c_size_t(0),
                   given, result)
    calls.call("unknown device", "fst_device_parse", b"tpu", ctypes.byref(ctypes.c_int64()))
    calls.call("unknown dtype", "fst_dtype_from_name", b"X9", ctypes.c_size_t(2), result)
    library.fst_model_close(model)
    check("C", calls.found, folder)


def test_messages_of_the_command(command, folder):
    """Messages have the form "FILE: what happened [Kind]", or name the wrong option."""
    good, target = "DIR/good.safetensors", "DIR/new.safetensors"
    lines = [
        *(f"verify DIR/{name}.safetensors" for name in BAD_HEADERS),
        *(f"inspect DIR/{name}.safetensors" for name in OTHER_FILES),
        "inspect DIR/absent", "inspect DIR/nothing", "load DIR/two", "verify DIR/missing_shard",
        "nope", "inspct", "load", f"load {good} --budgt 3", f"load {good} --budget x",
        f"load {good} --threads -1", f"load {good} --repeat 0", f"load {good} --mode fast",
        f"load {good} --engine fast", f"load {good} --dtype X9", f"load {good} --device tpu",
        f"load {good} --gds on", f"load {good} --select zz",
        f"load {good} --mode map --engine pread", f"load {good} --mode map --dtype F16",
        f"load {good} --json=1", f"load {good} --dtype", f"load {good} --cache all",
        f"load {good} --numa all", f"load {good} --ring x", "load -", f"bench {good} --repeat 0",
        "cache shrink", "cache prune", "cache list --max 3", "cache prune --max x",
        f"convert {good}", f"convert {good} {target} --alignment 3", f"convert {good} {target} x",
        f"convert {good} {target} --order up", f"convert {good} {target} --dtype X9",
        f"convert {good} {target} --compress=all --decompress",
        f"convert {good} {target} --dtype F16", f"convert {good} DIR/none/x.safetensors",
        f"convert {good} DIR/nothing", f"extract {good} {target}",
        f"extract {good} {target} --select zz", f"split {good} DIR/x",
        f"split {good} DIR/x --size y", f"split {good} DIR/x --count 0",
        f"rescue {good} {target}", f"edit {good}", f"edit {good} --set x",
        f"edit {good} --rename a=*", f"edit {good} --unset k", "edit - --clear",
        f"edit {good} --rename zz=y", "edit DIR/two --clear", f"hash {good} --algorithm md5",
        f"hash {good} --chunk 3", f"hash {good} --write --embed", f"hash {good} --dry-run",
        f"hash {good} --manifest --sums", f"hash {good} --manifest --write",
        f"hash {good} --manifest --chunk 3", f"show {good} zz", f"show {good} a [0:9]",
        f"verify --manifest {good}",
        f"verify --manifest=DIR/bad_manifest {good}", f"verify --signature x {good}",
        f"sign DIR/two --private-key DIR/bad_key.pem", f"diff {good}", f"diff {good} DIR/absent",
        "clean DIR/absent", f"engines {good} x",
    ]  # fmt: skip
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": os.fspath(folder)}
    found = []
    for line in lines:
        words = line.replace("DIR", os.fspath(folder)).split()
        done = subprocess.run([command, *words], capture_output=True, text=True, timeout=60,
                              env=environment, stdin=subprocess.DEVNULL)
        text = done.stderr.strip().removeprefix("fastsafetensors: ")
        if not text:
            pytest.fail(f"{line}: no message")
        found.append((line, "\n    ".join(text.splitlines())))
    check("the command", found, folder)


def test_messages_of_python(folder):
    """The class and the text of exceptions are those of messages.txt."""
    good = folder / "good.safetensors"
    header = fastsafetensors.read_header
    core = fastsafetensors._core
    cases = {
        **{f"read_header {name}": (lambda name=name: header(folder / f"{name}.safetensors"))
           for name in (*BAD_HEADERS, *OTHER_FILES)},
        "read_header absent": lambda: header(folder / "absent"),
        "read_header nothing": lambda: header(folder / "nothing"),
        "read_header 3": lambda: header(3.5),
        "Model missing_shard": lambda: core.Model(os.fspath(folder / "missing_shard")),
        "Model outside": lambda: core.Model(os.fspath(folder / "outside")),
        "Model two": lambda: core.Model(os.fspath(folder / "two")),
        "hash_file md5": lambda: fastsafetensors.hash_file(good, algorithm="md5"),
        "check_manifest good": lambda: fastsafetensors.check_manifest(good),
        "check_manifest bad_manifest": lambda: fastsafetensors.check_manifest(
            good, manifest=folder / "bad_manifest"),
        "edit_header nothing": lambda: fastsafetensors.edit_header(good),
        "edit_header metadata": lambda: fastsafetensors.edit_header(good, metadata={"k": 1}),
        "edit_header renames": lambda: fastsafetensors.edit_header(good, renames={"a": 1}),
        "edit_header absent": lambda: fastsafetensors.edit_header(folder / "absent",
                                                                  metadata={"k": "v"}),
        "edit_header rename zz": lambda: fastsafetensors.edit_header(good, renames={"zz": "b"}),
        "verifying None": lambda: fastsafetensors.verifying(None).__enter__(),
        "sign_folder bad_key": lambda: fastsafetensors.sign_folder(
            folder / "two", folder / "bad_key.pem"),
        "keep_memory -1": lambda: fastsafetensors.keep_memory(-1),
        "keep_memory text": lambda: fastsafetensors.keep_memory("x"),
    }
    found = []
    for label, call in cases.items():
        try:
            call()
        except Exception as error:
            found.append((label, f"{type(error).__name__}: {error}"))
        else:
            pytest.fail(f"{label}: no error")
    check("Python", found, folder)


def test_there_are_many_messages():
    """messages.txt has at least 120 different messages."""
    lines = GOLDEN.read_text().splitlines()
    assert len({line for line in lines if line.startswith("    ")}) >= 120
