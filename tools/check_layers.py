#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_layers.py [ROOT]: data flows one way through the modules, each with one interface header.

A file in src/MODULE may include its own module's files, the interface headers of the modules below
it (other/other.h, or what DOORS names), and the public headers of include/. Everything outside of
src/ uses the public headers only; unit tests may see all of src/.
"""

import pathlib
import re
import sys

# Which rooms a room may use; base is open to all. An arrow that is not here is an error.
BELOW = {
    "base": set(),
    "dtype": {"base"},
    "digest": {"base"},
    "codec": {"base", "dtype"},
    "format": {"base", "codec", "digest", "dtype"},
    "plan": {"base", "codec", "digest", "dtype", "format"},
    "net": {"base"},
    "cache": {"base", "digest", "net"},
    "io": {"base", "cache", "digest", "net"},
    "output": {"base", "cache", "digest", "io", "net"},
    "memory": {"base"},
    "gpu": {"base", "memory"},
    "model": {"base", "codec", "digest", "dtype", "format", "net", "io", "memory"},
    "snapshot": {"base", "memory", "gpu"},
    "transfer": {"base", "digest", "dtype", "format", "plan", "io", "memory", "gpu"},
    "loader": {"base", "digest", "dtype", "format", "plan", "io", "memory", "gpu", "model",
               "transfer"},
    "save": {"base", "codec", "digest", "dtype", "format", "net", "plan", "io", "output", "memory",
             "gpu", "model", "snapshot"},
    "delta": {"base", "codec", "digest", "dtype", "format", "io", "output", "model"},
    "verify": {"base", "digest", "dtype", "format", "io", "memory", "model"},
    "api": {"base", "cache", "delta", "digest", "dtype", "format", "net", "io", "memory", "gpu",
            "model", "loader", "save", "snapshot", "verify"},
}
# Interface headers that are not other/other.h, because a public header has that name.
DOORS = {"base": "primitives.h", "dtype": "dtype_info.h", "loader": "load_handle.h",
         "model": "open_model.h", "verify": "folder_check.h"}
# Rooms without system calls and threads: what they may include beyond the language itself.
PURE = {"dtype", "format", "plan"}
PURE_SYSTEM = {"string.h", "stdio.h", "inttypes.h", "stdlib.h", "fnmatch.h", "emmintrin.h",
               "stddef.h", "stdint.h", "stdbool.h", "locale.h", "math.h", "immintrin.h",
               "cpuid.h"}
# Headers of third_party/, for the one module that uses them.
TAKEN_ALONG = ("xxhash.h", "blake3.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def check_room_file(path: pathlib.Path, room: str) -> list[str]:
    """Faults of the includes of one file in src/."""
    faults = []
    for bracket, name in INCLUDE.findall(path.read_text()):
        parts = name.split("/")
        if bracket == "<":
            if room in PURE and name not in PURE_SYSTEM:
                faults.append(f"{path}: a pure room includes <{name}>")
        elif parts[0].startswith("fastsafetensors") or len(parts) == 1:
            own = name in ("fastsafetensors.h", "kernel_texts.h", *TAKEN_ALONG)
            own = own or (path.parent / name).exists()
            if len(parts) == 1 and not own:
                faults.append(f"{path}: {name} is not in its room")
        elif parts[0] not in BELOW[room]:
            faults.append(f"{path}: room {room} may not use room {parts[0]}")
        elif parts[1:] != [DOORS.get(parts[0], parts[0] + ".h")]:
            faults.append(f"{path}: {name} is not the door of {parts[0]}")
    return faults


def read_prose(text: str) -> dict[str, set[str]]:
    """What docs/ARCHITECTURE.md says of the rooms: in a chain each may use all before it."""
    below: dict[str, set[str]] = {room: {"base"} for room in BELOW}
    block = text.split("is the test):", 1)[1].split("```", 2)[1]
    for chain in re.split(r"\n|\s{3,}", block):
        before: set[str] = set()
        for link in chain.split("->"):
            rooms = set(re.findall(r"\w+", link)) & BELOW.keys()
            for room in rooms if before else set():
                below[room] |= before
            before |= rooms
    return below


def check_prose(root: pathlib.Path) -> list[str]:
    """Faults of the prose: it and BELOW agree to the letter."""
    path = root / "docs/ARCHITECTURE.md"
    if not path.exists():
        return []
    said = read_prose(path.read_text())
    return [f"{path}: of {room} it says {sorted(said[room])}, the rule is {sorted(rooms)}"
            for room, rooms in BELOW.items() if said[room] != rooms | {"base"}]


# A function that other files may call: its definition begins its line.
DEFINITION = re.compile(r"^(?!static|typedef|#|extern)[a-z][\w \*]*?\b(fsti_\w+)\([^;{]*\{", re.M)
TABLE = re.compile(r"^const fsti_\w+ (fsti_\w+) = \{", re.M)
# Modules without circles of calls between files. Two still have circles: net and save.
STRAIGHT = tuple(sorted(set(BELOW) - {"net", "save"}))
# Who begins a load, reads, and hands out what is read, know that there is a sink, not which.
SINKLESS = ("pipeline.c", "worker.c", "schedule.c", "file_routes.c")
SINK = re.compile(r"\bfsti_sink_(?:host|view|device)\b")
# What loads ask of the machine and of files before they decide, and the one file that asks.
FACT = re.compile(r"\bfsti_(?:memory_left|memory_available|cpu_count|address_space_left|io_probe|"
                  r"io_check_forced|file_is_cached)\(")
FACTS_HOME = ("loader", "facts.c")


def find_circle(calls: dict[str, set[str]]) -> list[str]:
    """A circle of files, or nothing."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name):], name]
        if name in done:
            return []
        for other in sorted(calls[name]):
            circle = follow(other, [*path, name])
            if circle:
                return circle
        done.add(name)
        return []

    for name in sorted(calls):
        circle = follow(name, [])
        if circle:
            return circle
    return []


def check_straight(root: pathlib.Path, room: str) -> list[str]:
    """A fault when files of a room call each other in a circle."""
    texts = {path.name: path.read_text() for path in sorted((root / "src" / room).glob("*.c"))}
    homes = {symbol: name for name, text in texts.items()
             for symbol in DEFINITION.findall(text) + TABLE.findall(text)}
    calls = {name: {homes[symbol] for symbol in re.findall(r"\bfsti_\w+", text)
                    if homes.get(symbol, name) != name} for name, text in texts.items()}
    faults = [f"{root}/src/{room}/{name}: names {SINK.findall(text)[0]}"
              for name, text in texts.items() if name in SINKLESS and SINK.search(text)]
    if room in ("loader", "transfer"):
        faults += [f"{root}/src/{room}/{name}: asks {FACT.findall(text)[0]}: {FACTS_HOME[1]} does"
                   for name, text in texts.items()
                   if FACT.search(text) and (room, name) != FACTS_HOME]
    circle = find_circle(calls)
    if circle:
        faults.append(f"{root}/src/{room}: a circle of files: {' -> '.join(circle)}")
    return faults


def check_outsider(path: pathlib.Path) -> list[str]:
    """Faults of the includes of a file outside of src/: public headers and its own folder only."""
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
        faults += check_room_file(path, path.parent.name)
    for room in STRAIGHT:
        faults += check_straight(root, room)
    for folder in ("cli", "python/src", "tests/api", "examples/c", "bench", "include"):
        for path in sorted((root / folder).rglob("*.[ch]")):
            count += 1
            faults += check_outsider(path)
    print("\n".join(faults) or f"layers: {count} files")
    return bool(faults or count < 20)


if __name__ == "__main__":
    sys.exit(main())
