# SPDX-License-Identifier: Apache-2.0
"""Text from files is escaped before it is printed, so that it can't control a terminal.

Every subcommand runs on files in which each name, key and value is hostile, and its output is
scanned for every character of Unicode's categories Cc, Cf, Zl, Zp, and for bytes that are no text.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import pathlib
import re
import struct
import subprocess
import unicodedata
from collections.abc import Callable

import pytest

# Escape sequences, C0, DEL, C1, marks of direction, line separators, characters without a width.
MARKS = ("\x1b]0;t\x07\x1b[31m\x08\x7f\x9b31m\u061c\u200b\u200d\u200e\u200f\u2028\u2029\u202a"
         "\u202e\u2060\u2066\u2069\ufeff\U000e0041\ufe0f\u034f\u180b\U000e0100")
# Variation selectors and a joiner are marks of other characters (category Mn) without a width.
WIDTHLESS = "\ufe0f\u034f\u180b\U000e0100"
IN_FILES = MARKS + "\0\r\n"  # characters that JSON may contain, but not a path or an argument
BAD = {"Cc", "Cf", "Zl", "Zp", "Cs"}


def is_hidden(character: str) -> bool:
    """Whether a character is unsafe for a terminal."""
    return character in WIDTHLESS or (
        unicodedata.category(character) in BAD and character != "\n")


def write_model(path: str, tensors: dict[str, tuple[str, list[int], bytes]],
                metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file without checks."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, own) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(own)]}
        data += own
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_files() -> list[str]:
    """Models and related files in the working folder; their paths."""
    own = {IN_FILES + "a": ("F32", [2], b"abcdefgh"), IN_FILES + "b": ("F32", [2], b"abcdefgX")}
    plain = {"a": ("F32", [2], b"abcdefgh")}
    write_model("a.safetensors", own, {
        IN_FILES + "k": IN_FILES + "v", "digest.algorithm": IN_FILES,
        "digest.tensor." + IN_FILES: IN_FILES, "digest.file": IN_FILES})
    write_model("b.safetensors", {IN_FILES + "a": ("F16", [4], b"abcdefgh"),
                                  IN_FILES + "c": ("F32", [2], b"zzzzzzzz")}, {IN_FILES: "x"})
    write_model(MARKS + ".safetensors", own)
    write_model("wrong-size.safetensors", {IN_FILES: ("F32", [3], b"abcdefgh")})
    write_model("wrong-dtype.safetensors", {IN_FILES: (IN_FILES, [2], b"abcdefgh")})
    write_model("algorithm.safetensors", plain,
                {"digest.algorithm": MARKS, "digest.tensor.a": MARKS})
    os.mkdir("indexed")
    write_model("indexed/m-1.safetensors", own)
    pathlib.Path("indexed/model.safetensors.index.json").write_text(json.dumps({
        "metadata": {IN_FILES: IN_FILES},
        "weight_map": {IN_FILES + "a": "m-1.safetensors", IN_FILES + "z": "m-1.safetensors",
                       "q": MARKS + ".safetensors"}}))
    os.mkdir("outside")
    pathlib.Path("outside/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"q": "../" + MARKS}}))
    os.mkdir("folder")
    write_model("folder/" + MARKS + ".safetensors", own)
    pathlib.Path("folder/SHA256SUMS").write_text("0" * 64 + "  " + MARKS + "x.safetensors\n")
    for name, beside, text in [
        ("sums", ".sha256", "0" * 64 + "  sums.safetensors\n" + "1" * 64 + "  " + MARKS + "\n"),
        ("kept", ".digest", f"fastsafetensors-digest 1 {MARKS}\ntensor 00 {json.dumps(MARKS)}\n"),
        ("kept2", ".digest", "fastsafetensors-digest 1 xxh3_64\ntensor 0000000000000000 "
         f"{json.dumps(MARKS)}\ntensor 0000000000000000 "
         f"{json.dumps(MARKS, ensure_ascii=False)}\n"),
        ("listed", ".manifest", f"fastsafetensors-manifest 1 {MARKS} 1048576\nfile 5 \"x\"\n"),
    ]:
        write_model(name + ".safetensors", plain)
        pathlib.Path(name + ".safetensors" + beside).write_text(text)
    text = (f"fastsafetensors-manifest 1 sha256 1048576\nfile 0 {json.dumps(MARKS)}\n").encode()
    pathlib.Path("model.manifest").write_bytes(
        text + b"seal " + hashlib.sha256(text).hexdigest().encode() + b"\n")
    pathlib.Path("page.safetensors").write_text("<!doctype html>" + MARKS)
    pathlib.Path("text.safetensors").write_text("hello " + MARKS + "\n")
    pathlib.Path("pointer.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{MARKS}\nsize 12\x1b[31m\n")
    pathlib.Path("bundle.sig").write_text(json.dumps({"a": MARKS}))
    return sorted(name for name in os.listdir() if name.endswith(".safetensors")) + [
        "indexed", "outside", "folder", "bundle.sig"]


def command_lines(file: str) -> list[list[str]]:
    """Every subcommand, with the options that change the output."""
    tensor = MARKS + "a"
    return [
        ["inspect", file], ["inspect", "--metadata", file], ["inspect", "--tree", file],
        ["show", file, tensor], ["verify", file], ["verify", "--hash", file],
        ["verify", "--manifest", file], ["verify", f"--manifest={file}", "folder"],
        ["verify", "--signature", file, "--public-key", file, "."], ["hash", file],
        ["hash", "--sums", file], ["hash", "--manifest", file], ["load", file],
        ["load", "--verify", file], ["load", "--select", tensor, file], ["engines", file],
        ["diff", file, "b.safetensors"], ["diff", "--values", "a.safetensors", file],
        ["edit", "--set", f"{MARKS}={MARKS}", file, "o1"], ["edit", "--unset", MARKS, file, "o2"],
        ["edit", "--rename", f"{MARKS}={MARKS}", file, "o3"],
        ["convert", "--dtype", "BF16", file, "o4.safetensors"],
        ["convert", "--compress=all", file, "o5.safetensors"],
        ["split", "--size", "4", file, "o6"], ["merge", file, "b.safetensors", "o7.safetensors"],
        ["extract", "--select", tensor, file, "o8.safetensors"],
        ["rescue", file, "o9.safetensors"], ["clean", file], ["bench", "--repeat", "1", file],
        ["sign", "--private-key", file, "folder"], ["delta", "show", file],
        ["delta", "apply", file, "folder"], ["cache", "list", "--cache-dir", file],
    ]


FIXED = [
    [MARKS], ["inspect", "--" + MARKS], ["inspect", MARKS], ["load", "--engine", MARKS, "x"],
    ["inspect", "http://127.0.0.1:1/" + MARKS], ["inspect", f"s3://{MARKS}/x"],
    ["convert", "--dtype", MARKS, "a.safetensors", "o"], ["hash", "--algorithm", MARKS, "a"],
    ["cache", "list", "--cache-dir", MARKS], ["cache", MARKS], ["clean", "."], ["help", MARKS],
    ["edit", "--unset", MARKS + "gone", "b.safetensors", "o"],
]


def check(command: str, words: list[str]) -> None:
    """Run the command in the working folder and scan its output."""
    done = subprocess.run([command, *words], capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode in range(5), (words, done.returncode, done.stderr[-300:])
    for output in (done.stdout, done.stderr):
        text = output.decode()  # always UTF-8
        found = [character for character in text if is_hidden(character)]
        assert not found, (words, found[:3], text[:300])
    if "--json" in words and done.stdout:
        try:
            json.loads(done.stdout)
        except ValueError:
            raise AssertionError((words, done.stdout[:300])) from None


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_no_subcommand_prints_raw_file_text(
    json_option: list[str], command: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in write_files():
        for words in command_lines(file):
            check(command, [words[0], *json_option, *words[1:]])
    for words in [one for one in FIXED if not (json_option and one[0] == "help")]:
        check(command, [words[0], *json_option, *words[1:]])


def test_every_subcommand_is_tried(command: str) -> None:
    """New subcommands must be added to the list above."""
    known = subprocess.run([command, "--help"], capture_output=True, text=True).stdout
    tried = {words[0] for words in command_lines("x")}
    listed = {line.split()[0] for line in known.splitlines()
              if line.startswith("  ") and line[2:3].isalpha()}
    assert len(listed) > 10 and listed - tried - {"help"} == set()


def test_wide_characters_keep_the_columns(command: str, tmp_path: pathlib.Path) -> None:
    """Chinese characters and emoji in names take two columns each in tables."""
    path = os.fspath(tmp_path / "m.safetensors")
    names = ["abcdefgh", "\u5c42\u5c42ab", "\U0001f600\u5c42cd", "e\u0301fg"]
    write_model(path, {name: ("U8", [1], b"x") for name in names})
    lines = subprocess.run([command, "inspect", path], capture_output=True,
                           text=True).stdout.splitlines()

    def width(text: str) -> int:
        return sum(0 if unicodedata.combining(one) else
                   2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)

    begins = {width(line[:line.index(" U8 ")]) for line in lines if " U8 " in line and "[" in line}
    assert len(begins) == 1, lines


def calls_of_the_package(path: pathlib.Path) -> list[Callable[[], object]]:
    """Calls that fail because of what two files contain: the file, and other names in it."""
    import torch

    import fastsafetensors
    from fastsafetensors import checkpoint, lazy
    from fastsafetensors.distributed import load_sharded
    from fastsafetensors.torch import load_file, load_model, open_stream

    name, model = IN_FILES + "a", torch.nn.Linear(1, 1)
    near = name + "z"  # names of the file are close
    opened = fastsafetensors.safe_open(path, "pt")
    loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), "cpu")
    loader.add_filenames({0: sorted(map(str, path.parent.glob("parts/*")))})
    return [
        lambda: opened.get_tensor(near), lambda: opened.get_slice(near), lambda: opened[near],
        lambda: lazy.LazyModel(path)[near], lambda: load_file(path, names=[near]),
        lambda: load_model(model, path), lambda: load_model(model, path, strict=True, assign=True),
        lambda: list(open_stream(path, names=[near])), loader.copy_files_to_device,
        lambda: load_sharded(path, {near: 0}), lambda: load_sharded(path, {name: 7}),
        lambda: checkpoint.consolidate(path.parent / "parts", path.parent / "out"),
        *calls_with_other_dtypes(path), *saves_of_loaded_tensors(path),
        lambda: list(fastsafetensors.ParallelLoader(
            None, [os.fspath(path)], device_memory_budget=1).iterate_weights()),
        lambda: resume_other_state(path.parent / MARKS),
    ]


def resume_other_state(folder: pathlib.Path) -> None:
    """Resume from a checkpoint that has a number in place of a module's state."""
    import torch

    from fastsafetensors.training import CheckpointManager

    with CheckpointManager(folder) as manager:
        manager.save(1, {"x": 1})
        manager.wait()
        manager.resume({"x": torch.nn.Linear(1, 1)})


def calls_with_other_dtypes(path: pathlib.Path) -> list[Callable[[], object]]:
    """Loads with a dtype that the tensors of the file can't become."""
    from fastsafetensors import numpy
    from fastsafetensors.torch import load_file, open_stream

    return [
        lambda: load_file(path, dtype="I8"), lambda: load_file(path, dtype="I8", share="node"),
        lambda: list(open_stream(path, dtype="I8")), lambda: numpy.load_file(path, dtype="I8"),
    ]


def saves_of_loaded_tensors(path: pathlib.Path) -> list[Callable[[], object]]:
    """Saves that refuse a tensor of the file."""
    import torch

    from fastsafetensors.torch import load_file, save, save_file, save_file_async

    name = IN_FILES + "a"
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    turned = load_file(path)[name].expand(2, 2).T
    shrunk = torch.ones(4)
    shrunk.untyped_storage().resize_(0)
    tensors = (nested, turned, shrunk, torch.ones(2, device="meta"))
    return [functools.partial(write, {name: tensor}, *target) for tensor in tensors
            for write, target in ((save, ()), (save_file, (path.parent / "o",)),
                                  (save_file_async, (path.parent / "o",)))]


def test_exceptions_of_the_package_are_filtered(tmp_path: pathlib.Path) -> None:
    """Of every call that a name of a file can make fail."""
    pytest.importorskip("torch.distributed.checkpoint")
    path = tmp_path / "m.safetensors"
    write_model(os.fspath(path), {IN_FILES + "a": ("F32", [2], b"abcdefgh"),
                                  IN_FILES + "b": ("F32", [2], b"abcdefgX")})
    (tmp_path / "parts").mkdir()
    for number in range(2):  # parts that overlap
        write_model(os.fspath(tmp_path / f"parts/model-{number + 1:05}-of-00002.safetensors"),
                    {IN_FILES + "a": ("F32", [2], b"abcdefgh")}, {"DCP_SHARDING_INFO": json.dumps(
                        {IN_FILES + "a": {"saved_offsets": [0]}})})
    texts = []
    for number, call in enumerate(calls_of_the_package(path)):
        with pytest.raises(Exception) as caught:
            call()
        texts.append(str(caught.value).replace("\n", " ").encode(errors="replace").decode())
        is_escaped = "\\x1b" in texts[-1]  # by repr(), which shows characters without a width
        bad = [one for one in texts[-1]
               if is_hidden(one) and not (is_escaped and one in WIDTHLESS)]
        assert not bad, (number, type(caught.value), texts[-1])
    assert sum("?" in text for text in texts) > len(texts) // 2, texts  # they name the tensor


# Where `name` is that of an argument.
OF_ARGUMENTS = (
    "_base/options.py", "_engine_weights.py", "_loading/open.py", "_saving/save_options.py",
    "_saving/save_handles.py", "deltas.py", "remote.py", "torch.py", "v05/ep_slice.py",
)
# What expressions end with that stand for names, paths and texts of others.
UNKNOWN_TEXTS = ("name", "path", "folder", "key", "file", "filename", "tensor_name", "fqn", "src",
                 "source", "error", "refused", "failure", "what", "gone", "framework", "place")


def is_unknown_text(part: ast.expr, place: str) -> bool:
    """Whether an expression may be a text that was not filtered."""
    shown = ast.unparse(part)
    last = re.split(r"\W", shown)[-1]
    return ("fsdecode(" in shown and not shown.startswith("printable(")) or (
        last in UNKNOWN_TEXTS and shown != "array.dtype.name"
        and not (last == "name" and place in OF_ARGUMENTS))


def test_exceptions_and_log_lines_wrap_names_and_paths() -> None:
    """Plain {name}s and {path}s are only in those of refuse(), RankError and unknown_tensor()."""
    import fastsafetensors

    package = pathlib.Path(fastsafetensors.__file__).parent
    bad = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            parts: list[ast.expr] = []
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(
                    node.exc.func) not in ("RankError", "unknown_tensor"):
                parts = [part.value for part in ast.walk(node.exc)
                         if isinstance(part, ast.FormattedValue) and part.conversion == -1]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                    (".warning", ".error", ".info", ".debug")):
                parts = node.args[1:]
            bad += [f"{place}:{part.lineno}: {ast.unparse(part)}" for part in parts
                    if is_unknown_text(part, place)]
    assert not bad, bad


@pytest.mark.parametrize("text", [chr(code) for code in (*range(32), 127)], ids=ascii)
def test_the_filter_changes_no_other_bytes(text: str) -> None:
    """Python shares the objects of single bytes."""
    from fastsafetensors._base.errors import printable

    assert printable(text) == "?"
    assert text.encode() == bytes(bytearray([ord(text)])) == bytearray([ord(text)])


def test_the_filter_leaves_names_as_they_are() -> None:
    from fastsafetensors._base.errors import printable

    for name in ("model.layers.0.weight", "权重.0", "e\u0301", "😀", "größe", "מודל"):
        assert printable(name) == name
    assert printable("a\ud800b\0") == "a?b?"


def test_messages_of_the_library_are_filtered(tmp_path: pathlib.Path) -> None:
    """Exceptions escape names of files and tensors."""
    import fastsafetensors

    path = tmp_path / (MARKS + ".safetensors")
    write_model(os.fspath(path), {IN_FILES: ("F32", [3], b"abcdefgh")})
    with pytest.raises(fastsafetensors.SafetensorError) as caught:
        fastsafetensors.safe_open(path, "np")
    assert not [one for one in str(caught.value) if is_hidden(one)], str(caught.value)
