# SPDX-License-Identifier: Apache-2.0
"""What docs/benchmarks holds, for the picture and the figures of the first page."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/benchmarks"


def newest(pattern: str) -> pathlib.Path:
    """The youngest file of that kind: names end in their date."""
    return sorted(FOLDER.glob(pattern))[-1]


def read_runs(path: pathlib.Path) -> dict[str, dict[str, float]]:
    """{scenario: {who: median seconds}} of a JSON document."""
    document: dict[str, Any] = json.loads(path.read_text())
    return {scenario["title"]: {row["name"]: float(row["median"]) for row in scenario["rows"]}
            for scenario in document["scenarios"]}


def read_starts(path: pathlib.Path) -> dict[tuple[str, str, str], dict[str, list[float]]]:
    """{(section, place, model): {who: [first, second, third start]}}, medians in seconds."""
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 6 or not re.match(r"\d", cells[3]):
            continue
        place, model, who = cells[:3]
        times = [float(cell.split()[0]) for cell in cells[3:6]]
        found.setdefault((section, place, model), {})[who] = times
    return found


def date_of(path: pathlib.Path) -> str:
    """The date that a document's name ends in."""
    match = re.search(r"\d{4}-\d\d-\d\d", path.name)
    return match.group() if match else ""
