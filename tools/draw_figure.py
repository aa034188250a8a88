#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the README's picture from the data in docs/benchmarks, one file for light pages and one for
dark ones, and writes the figures that stand under it.

    tools/draw_figure.py [--check]

Of each kind of data the youngest document counts. --check only compares.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any
from xml.sax.saxutils import escape

from benchmark_data import ROOT, date_of, newest, read_runs, read_starts

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
    "1 GiB hot, owned tensors": "1 GiB from the page cache",
    "4 x 512 MiB cold, owned tensors": "four shards from the disk",
}
# Of starts: the row of the table, and which start.
STARTS = {
    ("Views", "disk", "1 GiB", 0): "1 GiB as views, first start of a program",
    ("Views", "disk", "1 GiB", 1): "1 GiB as views, second start",
    ("Owned", "disk", "1 GiB", 1): "1 GiB as memory of its own, second start",
}
PEERS = {
    "ours": "fastsafetensors (this project)",
    "safetensors + clone": "safetensors 0.8, cloned",
    "fastsafetensors 0.5": "fastsafetensors 0.5",
    "Run:ai": "Run:ai streamer, cloned",
    "runai": "Run:ai streamer, cloned",
    "fastsafetensors-0.5": "fastsafetensors 0.5",
    "torch.load": "torch.load (.bin)",
}
LEFT, WIDTH, BAR, STEP = 236, 424, 14, 20
TOTAL_WIDTH = 820


def peer_of(name: str) -> str | None:
    """The label of a row, or None: it is not drawn."""
    if name == "safetensors":
        return "safetensors 0.8"
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
    groups = [(label, by_title[title]) for title, label in SCENARIOS.items() if title in by_title]
    starts = read_starts(newest("starts-*.md"))
    groups += [(label, [{"name": who, "median": times[number]}
                        for who, times in starts[section, place, model].items()])
               for (section, place, model, number), label in STARTS.items()]
    for label, rows in groups:
        bars, height = draw_scenario(label, rows, top, colours)
        body += bars
        top += height
    machine = document["machine"]
    notes = [f"Seconds, shorter is better; the first {len(SCENARIOS)} groups until every tensor "
             "owns its memory; medians of processes of their own.",
             f"{machine['processors']} processors ({machine['processor']}), {machine['memory']}, "
             "one virtual disk."]
    for note in notes:
        body.append(f'<text x="0" y="{top + 10}" class="faint small">{escape(note)}</text>')
        top += 14
    style = (f"text{{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:"
             f"{colours['text']}}}.title{{font-weight:600;font-size:13px}}.mine{{font-weight:600}}"
             f".faint{{fill:{colours['faint']}}}.small{{font-size:10.5px}}")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {TOTAL_WIDTH} {top + 18}" '
            f'width="{TOTAL_WIDTH}" role="img" aria-label="Load times beside other packages">\n'
            f'<!-- Made by tools/draw_figure.py. -->\n<style>{style}</style>\n'
            + "\n".join(body) + "\n</svg>\n")


def pair(ours: float, theirs: float) -> str:
    """Two times: "0.40 s to 1.60 s", and which is behind when it is ours."""
    unit, scale = ("s", 1.0) if ours >= 0.05 else ("ms", 1000.0)
    digits = 2 if unit == "s" else 0
    behind = " (behind)" if ours > theirs * 1.02 else ""
    return f"{ours * scale:.{digits}f} to {theirs * scale:.{digits}f} {unit}{behind}"


def figures() -> str:
    """The sentences under the picture."""
    files = [newest(pattern) for pattern in ("cpu-*.json", "save-*.json", "starts-*.md")]
    loads, saves = read_runs(files[0]), read_runs(files[1])
    starts = read_starts(files[2])

    def load(title: str, ours: str, theirs: str) -> str:
        return pair(loads[title][ours], loads[title][theirs])

    def start(place: str, number: int) -> str:
        row = starts["Views", place, "1 GiB"]
        return pair(row["ours"][number], row["safetensors"][number])

    cloned = "safetensors + clone"
    durable = saves["save 1 GiB, durable"]
    text = (
        "This to safetensors, medians of processes of their own on 2 virtual processors and one "
        f"virtual disk ({', '.join(sorted({date_of(path) for path in files}))}). Memory of one's "
        f"own: 1 GiB from the disk {load('1 GiB cold, owned tensors', 'ours load', cloned)}, from "
        f"the page cache {load('1 GiB hot, owned tensors', 'ours load', cloned)}. Views: the first "
        f"start of a program {start('disk', 0)}, the second {start('disk', 1)}; with 128 KiB of "
        f"readahead {start('readahead 128K', 0)}, and {start('readahead 128K', 1)}. The names of "
        f"100,000 tensors {load('open + names of 100,000', 'ours names', 'safetensors names')}; a "
        f"durable save of 1 GiB {pair(durable['ours durable'], durable['safetensors + fsync'])}.")
    lines, line = [], ""
    for word in text.split():
        if len(line) + 1 + len(word) > 110:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def page_with_figures(text: str) -> str:
    """The README with its figures as the data has them."""
    begin, end = "<!-- Figures by tools/draw_figure.py: -->\n", "\n<!-- end of figures -->"
    return re.sub(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", lambda _: figures(), text,
                  flags=re.S)


def main() -> int:
    """Write all, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    document = json.loads(newest("cpu-*.json").read_text())
    page = ROOT / "README.md"
    texts = {path: draw(document, theme) for theme, path in TARGETS.items()}
    texts[page] = page_with_figures(page.read_text())
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if arguments.check:
            print(f"{path.relative_to(ROOT)} is not what docs/benchmarks has: run "
                  "tools/draw_figure.py")
        else:
            path.write_text(texts[path])
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
