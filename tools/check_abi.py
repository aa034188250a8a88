#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_abi.py CC ROOT [--write]: the binary interface only grows.

Numbers of enums, sizes and offsets of structs and the prototypes of functions in the public headers
(but experimental.h) are compared with tests/header/abi-1.txt. Everything in that file must stay
unchanged. Structs that begin with struct_size may grow, and anything may be added.
--write records the current interface. Use it after an addition.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

HEADERS = ["base", "device", "dtype", "loader", "model", "remote", "tensor", "verify", "version",
           "writer"]
FAKES = {
    "stddef.h": "typedef unsigned long size_t;\n#define NULL ((void *)0)\n",
    "stdint.h": "".join(f"typedef {sign} {c} {prefix}int{bits}_t;\n"
                        for sign, prefix in (("signed", ""), ("unsigned", "u"))
                        for c, bits in (("char", 8), ("short", 16), ("int", 32), ("long", 64)))
    + "typedef unsigned long uintptr_t;\n#define SIZE_MAX (~0ul)\n#define UINT64_MAX (~0ul)\n",
}


def parse(compiler: str, root: pathlib.Path) -> object:
    """Return the syntax tree of the public headers, without the system's own."""
    from pycparser import c_parser

    with tempfile.TemporaryDirectory() as folder:
        for name, text in FAKES.items():
            pathlib.Path(folder, name).write_text(text)
        includes = "".join(f"#include <fastsafetensors/{name}.h>\n" for name in HEADERS)
        text = subprocess.run(
            [compiler, "-E", "-P", "-undef", "-nostdinc", "-I", folder, f"-I{root}/include", "-"],
            input=includes, capture_output=True, text=True, check=True).stdout
    return c_parser.CParser().parse(text)


def declarations(tree: object) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Enumerators, fields of structs, and prototypes, by the tree."""
    from pycparser import c_ast, c_generator

    generator = c_generator.CGenerator()
    numbers: list[str] = []
    structs: dict[str, list[str]] = {}
    functions: list[str] = []
    for node in tree.ext:  # type: ignore[attr-defined]
        kind = node.type.type if isinstance(node.type, c_ast.TypeDecl) else node.type
        if isinstance(kind, c_ast.Enum) and kind.values:
            numbers += [one.name for one in kind.values.enumerators]
        elif isinstance(kind, c_ast.Struct) and kind.decls:
            structs[node.name] = [field.name for field in kind.decls]
        elif isinstance(kind, c_ast.FuncDecl):
            functions.append(generator.visit(node))
        elif isinstance(node, c_ast.Typedef) and node.name.startswith("fst_"):
            functions.append(generator.visit(node))  # callbacks, opaque handles
    return numbers, structs, functions


def measure(compiler: str, root: pathlib.Path) -> list[str]:
    """Return the interface as lines of text."""
    numbers, structs, functions = declarations(parse(compiler, root))
    rows = [f'printf("number {name} %lld\\n", (long long){name});' for name in numbers]
    for struct, fields in structs.items():
        rows.append(f'printf("struct {struct} %zu\\n", sizeof({struct}));')
        rows += [f'printf("field {struct}.{field} %zu %zu\\n", offsetof({struct}, {field}), '
                 f"sizeof((({struct} *)0)->{field}));" for field in fields]
    source = ("#include <fastsafetensors.h>\n#include <stdio.h>\nint main(void) {\n"
              + "\n".join(rows) + "\nreturn 0;\n}\n")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "measure.c")
        path.write_text(source)
        program = pathlib.Path(folder, "measure")
        subprocess.run([compiler, f"-I{root}/include", str(path), "-o", str(program)], check=True)
        lines = subprocess.run([str(program)], capture_output=True, text=True,
                               check=True).stdout.splitlines()
    return lines + [f"declared {' '.join(text.split())}" for text in functions]


def compare(before: list[str], now: list[str]) -> list[str]:
    """Return the changes that are not additions."""
    have = set(now)
    sized = {line.split()[1].split(".")[0] for line in before if ".struct_size 0 " in line}
    values = {tuple(line.split()[:2]): line for line in now}
    faults = []
    for line in before:
        words = line.split()
        if line in have:
            continue
        current = values.get((words[0], words[1]), "gone")
        grown = (words[0] == "struct" and words[1] in sized and current != "gone"
                 and int(current.split()[2]) >= int(words[2]))
        if not grown:
            faults.append(f"{line}: now {current}" if words[0] != "declared" else f"gone: {line}")
    return faults


def main() -> int:
    """Compare, or record."""
    compiler, root = sys.argv[1], pathlib.Path(sys.argv[2])
    baseline = root / "tests/header/abi-1.txt"
    try:
        import pycparser  # noqa: F401
    except ImportError:
        print("pycparser is not installed")
        return 77
    now = measure(compiler, root)
    if "--write" in sys.argv:
        baseline.write_text("\n".join(now) + "\n")
        return 0
    faults = compare(baseline.read_text().splitlines(), now)
    new = [line for line in now if line not in set(baseline.read_text().splitlines())]
    print("\n".join(faults) or f"{len(now)} numbers, offsets, sizes and prototypes; "
          f"{len(new)} of them new (record them with --write)")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
