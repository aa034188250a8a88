#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_header.py CC ROOT HEADER: checks one public header.

It compiles alone as C11 and C++11 to C++23 without a warning, with FST_STRUCT_INIT of its structs;
the example of its first comment compiles in a function; and each FST_..._COUNT is the number of
values of the enum before it.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# Declarations of the names that the examples use without declaring them.
VARIABLES = """
extern fst_model *model;
extern fst_tensor *tensor;
extern fst_writer *writer;
extern const fst_save_tensor *tensors;
extern const char *path, *folder, *text;
extern const char *const *paths;
extern size_t tensor_count, path_count, size;
extern fst_error error;
"""


def example_of(text: str) -> list[str]:
    """Return the lines of the example: those of the first comment that are indented by four."""
    lines = text.split("\n")[1:]
    comment = lines[:next(i for i, line in enumerate(lines) if not line.startswith("///"))]
    code = [line[8:] for line in comment if line.startswith("///     ") or line == "///"]
    return [line for line in code if not re.match(r"\w+\.h ", line)]


def check_counts(text: str, name: str) -> None:
    """Compare each FST_..._COUNT with the enum before it."""
    pattern = (r"typedef enum \w+ \{(.*?)\} \w+;\n(?:\s*///[^\n]*\n|\s*\n)*"
               r"#define (FST_\w+_COUNT) (\d+)")
    for body, macro, count in re.findall(pattern, text, re.S):
        values = re.findall(r"^\s*FST_\w+ =\s+(\d+)", body, re.M)
        if [int(value) for value in values] != list(range(int(count))):
            sys.exit(f"{name}: {macro} is {count}, the enum has {', '.join(values)}")


def source_of(text: str, header: str) -> str:
    """Return a program with the header, its structs' first values, and its example."""
    example = example_of(text)
    if not 2 <= sum(bool(line.strip()) for line in example) <= 14:
        sys.exit(f"{header}: the first comment has no example of about ten lines")
    structs = re.findall(r"typedef struct (\w+) \{\n\s*size_t struct_size;", text)
    values = "".join(f"    {name} {name}_value = FST_STRUCT_INIT({name}); (void){name}_value;\n"
                     for name in structs)
    body = "".join(f"    {line}\n" for line in example if not line.startswith("#include"))
    return (f"#include <{header}>\n#include <fastsafetensors/experimental.h>\n"
            "#include <fastsafetensors.h>\n#include <stdio.h>\n"
            f"void values(void);\nvoid values(void) {{\n{values}}}\n"
            f"{VARIABLES}int example(void);\nint example(void) {{\n{body}    return 0;\n}}\n")


def compilers(c_compiler: str) -> list[tuple[list[str], str]]:
    """Return command lines and file endings."""
    runs = [([c_compiler, "-std=c11", "-x", "c"], ".c")]
    found = [shutil.which(name) for name in ("g++", "clang++")]
    for cxx in [path for path in found if path]:
        runs += [([cxx, f"-std=c++{year}", "-x", "c++"], ".cc")
                 for year in ("11", "14", "17", "20", "2b")]
    if len(runs) == 1:
        print("no C++ compiler: C++ is not checked")
    return runs


def main() -> None:
    compiler, root, header = sys.argv[1:]
    text = pathlib.Path(root, "include", header).read_text()
    check_counts(text, header)
    with tempfile.TemporaryDirectory() as folder:
        for command, ending in compilers(compiler):
            for name, code in (("alone", f"#include <{header}>\nint main(void) {{ return 0; }}\n"),
                               ("example", source_of(text, header))):
                source = pathlib.Path(folder, name + ending)
                source.write_text(code)
                flags = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{root}/include",
                         "-Wno-unused-but-set-variable", "-Wno-unused-variable"]
                flags += ["-Wpedantic"] if name == "alone" else []
                subprocess.run([*command, *flags, str(source)], check=True)


main()
