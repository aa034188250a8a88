#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the README's picture from a benchmark's data: one file for light pages, one for dark ones.

    tools/draw_figure.py [--check] [DATA.json]

Without DATA, the youngest docs/benchmarks/cpu-*.json. --check only compares.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGETS = {"light": ROOT / "docs/loading-light.svg", "dark": ROOT / "docs/loading-dark.svg"}
COLOURS = {
    "light": {"text": "#1f2328", "faint": "#59636e", "ours": "#1a7f5a", "peer": "#b9c0c7",
              "spread": "#59636e"},
    "dark": {"text": "#e6edf3", "faint": "#9198a1", "ours": "#3fb68b", "peer": "#4a525b",
             "spread": "#9198a1"},
}
# Of each scenario: what is asked, and who is drawn besides ours (by the names in the data).
SCENARIOS = {
    "1 GiB cold, owned tensors": "1 GiB from the disk",
    "1 GiB second start, owned tensors": "1 GiB, the program started again",
    "1 GiB hot, owned tensors": "1 GiB from the page cache",
    "4 x 512 MiB cold, owned tensors": "four shards from the disk",
}
PEERS = {
    "ours": "fastsafetensors (this project)",
    "safetensors + clone": "safetensors 0.8, cloned",
    "fastsafetensors 0.5": "fastsafetensors 0.5",
    "Run:ai": "Run:ai streamer, cloned",
    "torch.load": "torch.load (.bin)",
}
LEFT, WIDTH, BAR, STEP = 236, 424, 14, 20
TOTAL_WIDTH = 820


def peer_of(name: str) -> str | None:
    """The label of a row, or None: it is not drawn."""
    return next((label for key, label in PEERS.items() if name.startswith(key)), None)


def draw_scenario(title: str, rows: list[dict[str, Any]], top: int, colours: dict[str, str],
                  ) -> tuple[list[str], int]:
    """The bars of a scenario, fastest first; ours in colour. Return them and their height."""
    drawn = [(label, row) for row in rows if (label := peer_of(row["name"]))]
    drawn.sort(key=lambda pair: float(pair[1]["median"]))
    ours = next(row["median"] for label, row in drawn if label == PEERS["ours"])
    longest = max(row["median"] for _, row in drawn)
    out = [f'<text x="0" y="{top + 12}" class="title">{escape(title)}</text>']
    for number, (label, row) in enumerate(drawn):
        y = top + 22 + number * STEP
        mine = label == PEERS["ours"]
        width = max(2.0, row["median"] / longest * WIDTH)
        ratio = "" if mine else f"  ({row['median'] / ours:.1f} times ours)"
        out += [
            f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end"'
            f'{" class=" + chr(34) + "mine" + chr(34) if mine else ""}>{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" '
            f'fill="{colours["ours" if mine else "peer"]}"/>',
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 11}" class="faint">'
            f'{row["median"]:.2f} s{ratio}</text>',
        ]
    return out, 22 + len(drawn) * STEP + 14


def draw(document: dict[str, Any], theme: str) -> str:
    """Return the picture."""
    colours = COLOURS[theme]
    by_title = {scenario["title"]: scenario["rows"] for scenario in document["scenarios"]}
    body: list[str] = []
    top = 0
    for title, label in SCENARIOS.items():
        if title not in by_title:
            continue
        bars, height = draw_scenario(label, by_title[title], top, colours)
        body += bars
        top += height
    machine = document["machine"]
    notes = (f"Seconds until every tensor owns its memory, shorter is better; median of "
             f"{document['runs']} runs, each a process of its own. {machine['processors']} "
             f"processors ({machine['processor']}), {machine['memory']}, one virtual disk.")
    body.append(f'<text x="0" y="{top + 10}" class="faint small">{escape(notes)}</text>')
    style = (f"text{{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:"
             f"{colours['text']}}}.title{{font-weight:600;font-size:13px}}.mine{{font-weight:600}}"
             f".faint{{fill:{colours['faint']}}}.small{{font-size:10.5px}}")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {TOTAL_WIDTH} {top + 18}" '
            f'width="{TOTAL_WIDTH}" role="img" aria-label="Load times beside other packages">\n'
            f'<!-- Made by tools/draw_figure.py. -->\n<style>{style}</style>\n'
            + "\n".join(body) + "\n</svg>\n")


def main() -> int:
    """Draw both, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("data", nargs="?", type=pathlib.Path)
    arguments = parser.parse_args()
    data = arguments.data or sorted((ROOT / "docs/benchmarks").glob("cpu-*.json"))[-1]
    document = json.loads(data.read_text())
    stale = False
    for theme, path in TARGETS.items():
        text = draw(document, theme)
        if arguments.check and (not path.exists() or path.read_text() != text):
            print(f"{path.relative_to(ROOT)} is not drawn from {data.name}: run "
                  "tools/draw_figure.py")
            stale = True
        elif not arguments.check:
            path.write_text(text)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
