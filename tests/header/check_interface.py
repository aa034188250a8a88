#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_interface.py ROOT: checks the rules for all public headers together.

One type is a part of a tensor; one type is called with progress; structs grow by struct_size, which
is their first field, and reserve no words; flags say what is switched on; there are no X-macros;
fastsafetensors.h has at most 57 functions.
"""

from __future__ import annotations

import pathlib
import re
import sys

FUNCTIONS_MAX = 57
# Structs whose layout is fixed: DLPack-like values, a callback's argument, and arrays of constants.
FIXED = {"fst_device", "fst_error", "fst_metadata_entry", "fst_tensor_rename", "fst_load_counter",
         "fst_shard_item", "fst_delta_memory"}
NEGATIVE = re.compile(r"(?:^|_)(?:no|not|without|disable|disabled|ignore|skip|un)_")


def structs_of(text: str) -> dict[str, str]:
    """Return the bodies of structs, without comments, by name."""
    text = re.sub(r"///[^\n]*", "", text)
    return dict((name, body) for body, name in
                re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", text, re.S))


def check_structs(structs: dict[str, str]) -> list[str]:
    """Return what is wrong with structs and their fields."""
    wrong = []
    parts = [name for name, body in structs.items() if "const uint64_t *begin;" in body]
    if parts != ["fst_part"]:
        wrong.append(f"a part of a tensor has the types {parts}, expected fst_part alone")
    for name, body in structs.items():
        if name not in FIXED and not body.strip().startswith("size_t struct_size;"):
            wrong.append(f"{name} does not begin with struct_size")
        if re.search(r"\breserved|\bpadding\w*\[", body):
            wrong.append(f"{name} has reserved fields")
        wrong += [f"{name}.progress is a {kind}" for kind in re.findall(r"(\w+) progress;", body)
                  if kind != "fst_progress_callback"]
        wrong += [f"{name}.{field} is a negative flag" for field in re.findall(r"int (\w+);", body)
                  if NEGATIVE.search(field)]
    return wrong


def main() -> None:
    include = pathlib.Path(sys.argv[1], "include")
    texts = {path: path.read_text() for path in sorted(include.rglob("*.h"))}
    every = "\n".join(texts.values())
    structs = structs_of(every)
    wrong = check_structs(structs)
    if len(structs) < 20:
        wrong.append(f"only {len(structs)} structs were found")
    if re.search(r"#define \w+\([A-Z]\) *\\", every):
        wrong.append("there is an X-macro")
    stable = [text for path, text in texts.items() if path.parent.name == "fastsafetensors"
              and path.name != "experimental.h"]
    count = len(re.findall(r"^(?:FST_API|static inline)", "\n".join(stable), re.M))
    if not 40 <= count <= FUNCTIONS_MAX:
        wrong.append(f"fastsafetensors.h has {count} functions, allowed are {FUNCTIONS_MAX}")
    sys.exit("\n".join(wrong) or 0)


main()
