# SPDX-License-Identifier: Apache-2.0
"""Reads the measurements in docs/benchmarks and docs/history, and keeps the newest of each row."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "docs/benchmarks", ROOT / "docs/history")
STARTS = "compare_starts.py"


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds: median, smallest and largest."""
    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Row:
    """The times of fastsafetensors and the other loaders for one measured case."""
    stamp: str
    command: str
    times: dict[str, Time]  # by the contender's name; "ours" is fastsafetensors

    @property
    def date(self) -> str:
        """The day of the measurement, YYYY-MM-DD."""
        return self.stamp[:10]

    @property
    def ours(self) -> Time:
        """The time of fastsafetensors."""
        return self.times["ours"]

    @property
    def safetensors(self) -> Time:
        """The time of the safetensors package."""
        return self.times["safetensors"]

    @property
    def speedup(self) -> float:
        """How many times as fast as safetensors fastsafetensors is."""
        return self.safetensors.median / self.ours.median


# Scenarios of compare_loads.py that measure the same as a row of compare_starts.py. Only the newer
# of the two measurements is shown.
SAME_QUESTION = {
    "1 GiB cold, owned tensors": ("Owned", "disk", "1 GiB", 0),
    "25 MB cold, owned tensors": ("Owned", "disk", "25 MB", 0),
    "1 GiB cold, every byte read": ("Views", "disk", "1 GiB", 0),
    "1 GiB half cached, owned tensors": ("Owned", "disk", "1 GiB", 3),
    "3 tensors of 1 GiB, cold": ("Three tensors", "disk", "1 GiB", 0),
}
# Contenders of the JSON files that use the safetensors package, with or without a copy.
SAFETENSORS = re.compile(r"safetensors( \+ clone|, all bytes| names| 3 tensors| rows| columns"
                         r"| \+ fsync)?$")


def stamp_of(path: pathlib.Path) -> str:
    """The date in a file's name, and the time of day where it has one: YYYY-MM-DD[-HHMM]."""
    match = re.search(r"\d{4}-\d\d-\d\d(-\d{4})?", path.name)
    return match.group() if match else ""


def newest(paths: Iterable[pathlib.Path]) -> pathlib.Path:
    """The file with the latest date in its name, whatever stands before the date."""
    return max(paths, key=lambda path: (stamp_of(path), path.name))


def files(pattern: str) -> list[pathlib.Path]:
    """All data files of a name pattern, in both folders."""
    return [path for folder in FOLDERS for path in folder.glob(pattern)]


def parse_time(cell: str) -> Time | None:
    """A cell "0.12 [0.11-0.13]" as a time."""
    match = re.fullmatch(r"([\d.]+) \[([\d.]+)-([\d.]+)\]", cell)
    return Time(*(float(part) for part in match.groups())) if match else None


def read_starts(path: pathlib.Path) -> dict[tuple[str, str, str], dict[str, list[Time | None]]]:
    """{(section, place, model): {contender: [first, second, third start, half cached]}}."""
    found: dict[tuple[str, str, str], dict[str, list[Time | None]]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 7 or parse_time(cells[3]) is None:
            continue
        place, model, who = cells[:3]
        found.setdefault((section, place, model), {})[who] = [parse_time(c) for c in cells[3:]]
    return found


def rows_of_starts(path: pathlib.Path) -> dict[Any, Row]:
    """The rows of a file of start times, by (section, place, model, number of the start)."""
    found = {}
    for key, by_name in read_starts(path).items():
        if not {"ours", "safetensors"} <= by_name.keys():
            continue
        for number in range(4):
            times = {who: time for who, all_times in by_name.items()
                     if (time := all_times[number]) is not None}
            if "ours" in times and "safetensors" in times:
                found[(*key, number)] = Row(stamp_of(path), STARTS, times)
    return found


def rows_of_runs(path: pathlib.Path) -> dict[Any, Row]:
    """The rows of a JSON file of compare_loads.py or compare_saves.py, by their question."""
    document = json.loads(path.read_text())
    command = "compare_saves.py" if document.get("what") == "saving" else "compare_loads.py"
    found = {}
    for scenario in document["scenarios"]:
        times = {}
        owned = any(entry["name"] == "ours load" for entry in scenario["rows"])
        for entry in scenario["rows"]:
            name = "ours" if entry["name"].startswith("ours") else entry["name"]
            if SAFETENSORS.match(name) and owned == ("clone" in name):
                name = "safetensors"  # with clone() where fastsafetensors gives owned memory
            times[name] = Time(entry["median"], entry["low"], entry["high"])
        if {"ours", "safetensors"} <= times.keys():
            key = SAME_QUESTION.get(scenario["title"], scenario["title"])
            found[key] = Row(stamp_of(path), command, times)
    return found


def measurements() -> dict[Any, list[Row]]:
    """All measurements of every question, the oldest first."""
    rows: dict[Any, list[Row]] = {}
    measured = [rows_of_starts(path) for path in files("starts-*.md")]
    measured += [rows_of_runs(path) for path in (*files("cpu-*.json"), *files("save-*.json"))]
    for found in measured:
        for key, row in found.items():
            rows.setdefault(key, []).append(row)
    return {key: sorted(found, key=lambda row: row.stamp) for key, found in rows.items()}


def newest_rows() -> dict[Any, Row]:
    """The newest measurement of every question."""
    return {key: max(found, key=lambda row: row.stamp) for key, found in measurements().items()}


def machine() -> dict[str, str]:
    """The machine of the newest series of loads."""
    found: dict[str, str] = json.loads(newest(files("cpu-*.json")).read_text())["machine"]
    return found
