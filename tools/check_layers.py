#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_layers.py [ROOT]: data flows one way through the modules, and through the files of each.

A file in src/MODULE may include the files of its own module, the interface headers of the modules
below it (other/other.h, or the name in INTERFACES), and the public headers of include/. Everything
outside of src/ uses the public headers only; unit tests may include all headers of src/.

Within a module there may be no call cycle between files, of any length.
"""

import pathlib
import re
import sys

# The modules that each module may include; base is open to all. Any other include is an error.
BELOW = {
    "base": set(),
    "dtype": {"base"},
    "digest": {"base"},
    "codec": {"base", "dtype"},
    "format": {"base", "codec", "digest", "dtype"},
    "plan": {"base", "codec", "digest", "dtype", "format"},
    "location": {"base"},
    "http": {"base", "location"},
    "store": {"base", "digest", "http", "location"},
    "cache": {"base", "digest", "http", "location", "store"},
    "io": {"base", "cache", "digest", "http", "location", "store"},
    "output": {"base", "cache", "digest", "http", "io", "location", "store"},
    "memory": {"base"},
    "share": {"base", "digest"},
    "gpu": {"base", "memory"},
    "model": {"base", "codec", "digest", "dtype", "format", "http", "io", "location",
              "memory", "store"},
    "snapshot": {"base", "memory", "gpu"},
    "transfer": {"base", "digest", "dtype", "format", "plan", "io", "memory", "gpu", "share"},
    "loader": {"base", "digest", "dtype", "format", "plan", "io", "memory", "gpu", "model",
               "share", "transfer"},
    "save": {"base", "codec", "digest", "dtype", "format", "http", "io", "location", "memory",
             "output", "plan", "store", "gpu", "model", "snapshot"},
    "delta": {"base", "codec", "digest", "dtype", "format", "io", "location", "output", "model"},
    "verify": {"base", "digest", "dtype", "format", "io", "location", "memory", "model",
               "output"},
    "api": {"base", "cache", "delta", "digest", "dtype", "format", "gpu", "http", "io", "location",
            "memory", "store", "model", "loader", "save", "share", "snapshot", "verify"},
}
# Interface headers that are not other/other.h, because a public header has that name.
INTERFACES = {"base": "primitives.h", "dtype": "dtype_info.h", "loader": "load_handle.h",
              "model": "open_model.h", "verify": "folder_check.h"}
# Modules without system calls and threads, and the system headers that they may include.
PURE = {"dtype", "format", "location", "plan"}
PURE_SYSTEM = {"string.h", "strings.h", "stdio.h", "inttypes.h", "stdlib.h", "fnmatch.h",
               "emmintrin.h", "stddef.h", "stdint.h", "stdbool.h", "locale.h", "math.h",
               "immintrin.h", "cpuid.h"}
# Headers of third_party/, for the one module that uses them.
THIRD_PARTY = ("xxhash.h", "blake3.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def check_module_file(path: pathlib.Path, module: str) -> list[str]:
    """Faults of the includes of one file in src/."""
    faults = []
    for bracket, name in INCLUDE.findall(path.read_text()):
        parts = name.split("/")
        if bracket == "<":
            if module in PURE and name not in PURE_SYSTEM:
                faults.append(f"{path}: a pure module includes <{name}>")
        elif parts[0].startswith("fastsafetensors") or len(parts) == 1:
            own = name in ("fastsafetensors.h", "kernel_texts.h", *THIRD_PARTY)
            own = own or (path.parent / name).exists()
            if len(parts) == 1 and not own:
                faults.append(f"{path}: {name} is not in its module")
        elif parts[0] not in BELOW[module]:
            faults.append(f"{path}: module {module} may not use module {parts[0]}")
        elif parts[1:] != [INTERFACES.get(parts[0], parts[0] + ".h")]:
            faults.append(f"{path}: {name} is not the interface header of {parts[0]}")
    return faults


def read_prose(text: str) -> dict[str, set[str]]:
    """The table of docs/ARCHITECTURE.md: in a chain, a module may use all modules before it."""
    below: dict[str, set[str]] = {module: {"base"} for module in BELOW}
    block = text.split("is the test):", 1)[1].split("```", 2)[1]
    for chain in re.split(r"\n|\s{3,}", block):
        before: set[str] = set()
        for link in chain.split("->"):
            modules = set(re.findall(r"\w+", link)) & BELOW.keys()
            for module in modules if before else set():
                below[module] |= before
            before |= modules
    return below


def check_prose(root: pathlib.Path) -> list[str]:
    """Faults where the page and BELOW differ."""
    path = root / "docs/ARCHITECTURE.md"
    if not path.exists():
        return []
    documented = read_prose(path.read_text())
    return [f"{path}: {module} may use {sorted(documented[module])} here, "
            f"but {sorted(modules)} in BELOW"
            for module, modules in BELOW.items() if documented[module] != modules | {"base"}]


def check_interface(root: pathlib.Path, module: str) -> list[str]:
    """Faults of the lines at the start of an interface header that say what its module is."""
    path = root / "src" / module / INTERFACES.get(module, module + ".h")
    if module == "api":  # has no interface header
        return []
    text = path.read_text()
    lines = dict(re.findall(r"^/// (Knows|Does not know|Main types): (.*)\.$", text, re.M))
    faults = [f"{path}: the line '{name}:' is missing"
              for name in ("Knows", "Does not know", "Main types") if name not in lines]
    declared = "".join(header.read_text() for header in [
        *path.parent.glob("*.h"), *(root / "include").rglob("*.h")])
    return faults + [f"{path}: {name} is not declared"
                     for name in lines.get("Main types", "").split(", ")
                     if name and not re.search(rf"(\}} |enum |struct \w+ ){name}\b", declared)]


# Names that other files may use: functions, whose definition begins its line, and variables.
DEFINITION = re.compile(r"^(?!static|typedef|#|extern)[A-Za-z][\w \*]*?\b(fsti?_\w+)"
                        r"(?:\([^;{]*\{|(?:\[[^\]]*\])* = )", re.M)
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
# Call circles that are not repaired yet: the files of each, by module. They may only shrink.
KNOWN_CIRCLES: dict[str, list[set[str]]] = {}
# Files that schedule, read and return data know that there is a sink, but not which kind.
SINKLESS = ("pipeline.c", "worker.c", "schedule.c", "file_routes.c")
SINK = re.compile(r"\bfsti_sink_(?:host|view|device)\b")
# Queries about the machine and files that decisions depend on, and the one file that makes them.
FACT = re.compile(r"\bfsti_(?:memory_left|memory_available|cpu_count|address_space_left|io_probe|"
                  r"io_check_forced|file_is_cached)\(")
FACTS_HOME = ("loader", "facts.c")


def find_calls(texts: dict[str, str]) -> dict[str, dict[str, str]]:
    """For each file of a module, the other files that it calls, each with a name that it uses."""
    texts = {name: COMMENT_OR_STRING.sub(" ", text) for name, text in texts.items()}
    homes = {symbol: name for name, text in texts.items() for symbol in DEFINITION.findall(text)}
    return {name: {homes[symbol]: symbol for symbol in re.findall(r"\bfsti?_\w+", text)
                   if homes.get(symbol, name) != name} for name, text in texts.items()}


def find_path(calls: dict[str, dict[str, str]], start: str, end: str) -> list[str]:
    """Return the shortest path of calls from a file to another or to itself, or an empty list."""
    paths = [[start]]
    seen = set()
    for path in paths:  # grows meanwhile
        for other in sorted(calls[path[-1]]):
            if other == end:
                return [*path, other]
            if other not in seen:
                seen.add(other)
                paths.append([*path, other])
    return []


def find_circles(calls: dict[str, dict[str, str]]) -> list[set[str]]:
    """Return the call cycles: the files of each reach each other by calls."""
    left = [name for name in sorted(calls) if find_path(calls, name, name)]
    circles = []
    while left:
        circles.append({name for name in left if name == left[0] or
                        (find_path(calls, left[0], name) and find_path(calls, name, left[0]))})
        left = [name for name in left if name not in circles[-1]]
    return circles


def check_circles(folder: pathlib.Path, texts: dict[str, str]) -> list[str]:
    """Faults: call cycles between files of a module, except known ones."""
    calls = find_calls(texts)
    known = KNOWN_CIRCLES.get(folder.name, [])
    circles = find_circles(calls)
    on_circles = {name for circle in circles for name in circle}
    faults = [f"{folder}/{name}: is on no call cycle; remove it from KNOWN_CIRCLES"
              for circle in known for name in sorted(circle - on_circles)]
    for circle in circles:
        if any(circle <= files for files in known):
            continue
        paths = [find_path(calls, name, name) for name in sorted(circle)]
        path = min(paths, key=len)
        pairs = zip(path[:-1], path[1:], strict=True)
        steps = [f"{a} -> {b} ({calls[a][b]})" for a, b in pairs]
        faults.append(f"{folder}: a call cycle of files: {', '.join(steps)}")
    return faults


def check_calls(root: pathlib.Path, module: str) -> list[str]:
    """Faults: a call cycle between files of a module, a sink's name, a query in the wrong file."""
    folder = root / "src" / module
    texts = {path.name: path.read_text() for path in sorted(folder.glob("*.c"))}
    faults = [f"{folder}/{name}: names {SINK.findall(text)[0]}"
              for name, text in texts.items() if name in SINKLESS and SINK.search(text)]
    if module in ("loader", "transfer"):
        faults += [f"{folder}/{name}: calls {FACT.findall(text)[0]}, "
                   f"which only {FACTS_HOME[1]} may" for name, text in texts.items()
                   if FACT.search(text) and (module, name) != FACTS_HOME]
    return faults + check_circles(folder, texts)


def check_outside_file(path: pathlib.Path) -> list[str]:
    """Faults of a file outside of src/: it may include public headers and its own folder only."""
    return [
        f"{path}: {name} is not public"
        for bracket, name in INCLUDE.findall(path.read_text())
        if bracket == '"' and "/" in name and not name.startswith("fastsafetensors/")
        and "include" not in (path.parent / name).resolve().parts
    ]


def main() -> int:
    """Check the tree; print the faults."""
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    faults, count = check_prose(root), 0
    for path in sorted((root / "src").rglob("*.[ch]")):
        count += 1
        faults += check_module_file(path, path.parent.name)
    for module in BELOW:
        faults += check_calls(root, module) + check_interface(root, module)
    for folder in ("cli", "python/src", "tests/api", "examples/c", "bench", "include"):
        for path in sorted((root / folder).rglob("*.[ch]")):
            count += 1
            faults += check_outside_file(path)
    known = sum(len(circle) for circles in KNOWN_CIRCLES.values() for circle in circles)
    print("\n".join(faults) or f"layers: {count} files, {len(BELOW)} modules, "
          f"{known} files on known call cycles")
    return bool(faults or count < 20)


if __name__ == "__main__":
    sys.exit(main())
