#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of README.md and docs/benchmarks/README.md, and draws their pictures, from the
data in docs/benchmarks and docs/history.

    tools/draw_figure.py [--check]

The newest measurement of each row counts. --check compares and changes nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any
from xml.sax.saxutils import escape

from benchmark_data import ROOT, Row, machine, measurements, newest_rows

COLOURS = {
    "light": {"text": "#1f2328", "faint": "#59636e", "ours": "#1a7f5a", "peer": "#b9c0c7",
              "axis": "#d0d7de", "loss": "#bc4c00"},
    "dark": {"text": "#e6edf3", "faint": "#9198a1", "ours": "#3fb68b", "peer": "#4a525b",
             "axis": "#30363d", "loss": "#f0883e"},
}
# The rows of README.md: the question, and its label.
FIRST_PAGE = {
    ("Views", "disk", "1 GiB", 0):
        "load from disk, page cache empty; memory-mapped (the default), every byte read",
    ("Views", "disk", "1 GiB", 1):
        "start the same program again; memory-mapped, every byte read",
    ("Owned", "disk", "1 GiB", 0): "load from disk, page cache empty; full copy in RAM",
    "1 GiB hot, owned tensors": "load from the page cache; full copy in RAM",
    "open + names of 100,000": "list the names of 100,000 tensors",
    "save 1 GiB, durable": "save 1 GiB and wait until it is on the disk (fsync)",
}
PICTURE = ("Owned", "disk", "1 GiB", 0)
MAPPED = ("Views", "disk", "1 GiB", 0)
CONTENDERS = {
    "ours": "fastsafetensors",
    "safetensors": "safetensors 0.8 + clone()",
    "safetensors-rc": "safetensors 0.9rc1 + clone()",
    "fastsafetensors-0.5": "fastsafetensors 0.5 (PyPI)",
    "runai": "Run:ai streamer 0.17",
}
PEERS = {"fastsafetensors-0.5": "fastsafetensors 0.5", "fastsafetensors 0.5": "fastsafetensors 0.5",
         "Run:ai + clone": "Run:ai", "runai": "Run:ai", "safetensors-rc": "safetensors 0.9rc1",
         "torch.load": "torch.load (.bin)"}
LOADS = {
    "1 GiB hot, owned tensors": "1 GiB, page cache filled by another program, owned memory",
    "1 GiB hot, every byte read":
        "1 GiB, page cache filled by another program, memory-mapped, every byte read",
    "1 GiB hot, views": "1 GiB, page cache filled by another program, memory-mapped, no byte read",
    "4 x 512 MiB cold, owned tensors": "4 files of 512 MiB from disk, owned memory",
    "4 x 512 MiB hot, owned tensors": "4 files of 512 MiB from the page cache, owned memory",
    "400 MB cold, owned tensors": "400 MB from disk, owned memory",
    "400 MB hot, owned tensors": "400 MB from the page cache, owned memory",
    "25 MB hot, owned tensors": "25 MB from the page cache, owned memory",
    "25 MB hot, views": "25 MB from the page cache, memory-mapped, no byte read",
    "20,000 x 1 KB hot": "20,000 tensors of 1 KB from the page cache, memory-mapped",
    "open + names of 10,000": "open a file and list 10,000 names",
    "open + names of 100,000": "open a file and list 100,000 names",
    ("Three tensors", "disk", "1 GiB", 0): "three tensors of a 1 GiB file from disk",
    "half of 512 MiB along dim 0, cold": "half of 512 MiB along dimension 0, from disk",
    "half of 512 MiB along dim 0, hot": "half of 512 MiB along dimension 0, from the page cache",
    "half of 512 MiB along dim 1, cold": "half of 512 MiB along dimension 1, from disk",
    "half of 512 MiB along dim 1, hot": "half of 512 MiB along dimension 1, from the page cache",
}
SAVES = {
    "save 1 GiB, quick": "1 GiB", "save 1 GiB, durable": "1 GiB, fsync",
    "save 1 GiB of page-aligned memory, durable": "1 GiB of page-aligned memory, fsync",
    "save 400 MB, quick": "400 MB", "save 400 MB, durable": "400 MB, fsync",
    "save 25 MB, quick": "25 MB", "save 25 MB, durable": "25 MB, fsync",
    "save 20,000 x 1 KB, quick": "20,000 tensors of 1 KB",
    "save 20,000 x 1 KB, durable": "20,000 tensors of 1 KB, fsync",
}
SECTIONS = {"Views": "memory-mapped", "Owned": "owned memory"}
PLACES = {"disk": "disk", "stranger": "disk, file of another user",
          "readahead 128K": "disk, 128 KiB of readahead", "tmpfs": "tmpfs",
          "fuse": "FUSE (bindfs)", "512 MiB": "disk, cgroup limit of 512 MiB"}
MODELS = ("25 MB", "100 MB", "300 MB", "1 GiB", "4 shards", "20,000 tensors")
STARTS = ("page cache empty", "started again", "started a third time")


def seconds(value: float) -> str:
    """Return a time with few digits: "0.62 s", "43 ms"."""
    if value >= 0.095:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.00995 else f"{value * 1000:.1f} ms"


def factor(value: float) -> str:
    """Return a speedup: "5.1x". Below 1, fastsafetensors is slower."""
    return f"{value:.1f}x" if value >= 1.095 else f"{value:.2f}x"


def conditions(dates: list[str]) -> str:
    """Machine, dates, versions and command, under the table of README.md."""
    host = machine()
    kernel = host["kernel"].rsplit(".", 1)[0]
    return ("Medians of 3 to 7 runs; each run is a separate process, interleaved with the others. "
            f"Machine: {host['processors']} virtual CPUs ({host['processor']}), {host['memory']} "
            f"of memory, one virtual disk with 8 MiB of readahead, Linux {kernel}. Measured "
            f"{' and '.join(dates)} with torch 2.13 and safetensors 0.8 (full copies: with "
            "`clone()`). Commands: `make bench`, with `GRID=1` or `SAVE=1` for some rows. Fresh "
            "memory is slow on this machine, which costs `clone()` most.")


def wrap(text: str, width: int = 110) -> str:
    """Break a paragraph into lines."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def headline(rows: dict[Any, Row]) -> str:
    """The first sentence of README.md."""
    mapped, owned = rows[MAPPED], rows[PICTURE]
    return wrap("**fastsafetensors loads a 1 GiB safetensors model from disk in "
                f"{seconds(mapped.ours.median)}, where `safetensors` takes "
                f"{seconds(mapped.safetensors.median)}.** It is a Python package with the API of "
                "`safetensors`, a command-line tool and a C library for Linux, and also saves "
                "models crash-safely. The times are those of the default: memory-mapped tensors, "
                "every byte read. A full copy in RAM (`mode=\"load\"`) takes "
                f"{seconds(owned.ours.median)}, with `safetensors` and `clone()` "
                f"{seconds(owned.safetensors.median)}.")


def series() -> str:
    """The full copy of 1 GiB from disk each time that it was measured."""
    days: dict[str, list[str]] = {}
    for row in measurements()[PICTURE]:
        days.setdefault(row.date, []).append(factor(row.speedup))
    cells = [f"{'/'.join(speedups)} on {day}" for day, speedups in days.items()]
    return wrap("The host is shared, so its speed changes from hour to hour. Speedups of the full "
                f"copy of 1 GiB from disk, as measured: {', '.join(cells)}.")


def first_table(rows: dict[Any, Row]) -> str:
    """The table of README.md with its conditions."""
    lines = ["| on the CPU, 1 GiB unless stated | fastsafetensors | safetensors | speedup |",
             "|---|---|---|---|"]
    for key, label in FIRST_PAGE.items():
        row = rows[key]
        lines.append(f"| {label} | **{seconds(row.ours.median)}** | "
                     f"{seconds(row.safetensors.median)} | {factor(row.speedup)} |")
    dates = sorted({rows[key].date for key in FIRST_PAGE})
    return "\n".join(lines) + "\n\n" + wrap(f"{conditions(dates)} {series()}")


OLD = "fastsafetensors-0.5"
# Rows that README.md names, in lines, if their speedup is below this.
SMALL_SPEEDUP = 2
SMALL: list[tuple[str, list[tuple[str, Any]]]] = [
    ("memory-mapped, from disk, page cache empty", [
        ("25 MB", ("Views", "disk", "25 MB", 0)), ("100 MB", ("Views", "disk", "100 MB", 0)),
        ("1 GiB in four files", ("Views", "disk", "4 shards", 0)),
        ("with 128 KiB of readahead: 1 GiB", ("Views", "readahead 128K", "1 GiB", 0)),
        ("in four files", ("Views", "readahead 128K", "4 shards", 0))]),
    ("memory-mapped, other cases", [
        ("1 GiB that another program has read, every byte read", "1 GiB hot, every byte read"),
        ("1 GiB on FUSE", ("Views", "fuse", "1 GiB", 0)),
        ("1 GiB on FUSE, started again", ("Views", "fuse", "1 GiB", 1)),
        ("25 MB on tmpfs", ("Views", "tmpfs", "25 MB", 0))]),
    ("copied to RAM", [
        ("1 GiB from disk, started again", ("Owned", "disk", "1 GiB", 1)),
        ("1 GiB on tmpfs", ("Owned", "tmpfs", "1 GiB", 0)),
        ("100 MB, 128 KiB of readahead, page cache empty",
         ("Owned", "readahead 128K", "100 MB", 0))]),
]


def small_gains(rows: dict[Any, Row]) -> str:
    """Where fastsafetensors gains little or is slower, for README.md."""
    page = "docs/benchmarks/README.md#where-fastsafetensors-gains-nothing"
    lines = ["**Where it gains less, or is slower** ([all rows with a speedup below 1.1x]"
             f"({page})):", ""]
    for label, parts in SMALL:
        cells = [f"{text} ({factor(rows[key].speedup)})" for text, key in parts
                 if rows[key].speedup < SMALL_SPEEDUP]
        first, *rest = wrap(f"{label}: {'; '.join(cells)}", 106).split("\n")
        lines += [f"- {first}", *(f"  {line}" for line in rest)]
    cells = [f"{label_of(key)} ({factor(row.times[OLD].median / row.ours.median)})"
             for key, row in all_questions(rows)
             if OLD in row.times and row.times[OLD].median < row.ours.median]
    if cells:
        first, *rest = wrap(f"fastsafetensors 0.5 is faster: {'; '.join(cells)}", 106).split("\n")
        lines += [f"- {first}", *(f"  {line}" for line in rest)]
    return "\n".join(lines)


def losses(rows: dict[Any, Row]) -> str:
    """The rows in which fastsafetensors gains less than a tenth, for the benchmark page."""
    found = []
    for key, row in all_questions(rows):
        if row.speedup < 1.1:
            found.append(f"- {label_of(key)}: {seconds(row.ours.median)}, safetensors "
                         f"{seconds(row.safetensors.median)} ({factor(row.speedup)})")
    return "\n".join(found)


def label_of(key: Any) -> str:
    """Return the label of a row."""
    if isinstance(key, str):
        return LOADS.get(key) or f"save {SAVES[key]}"
    section, place, model, number = key
    if key in LOADS:
        return LOADS[key]
    return f"{model}, {SECTIONS[section]}, {PLACES[place]}, {STARTS[number]}"


def all_questions(rows: dict[Any, Row]) -> list[tuple[Any, Row]]:
    """Every row that the benchmark page shows, in its order."""
    keys: list[Any] = [*LOADS]
    keys += [(section, place, model, number) for section in SECTIONS for place in PLACES
             for model in MODELS for number in (0, 1)]
    return [(key, rows[key]) for key in [*keys, *SAVES] if key in rows]


def span(time: Any) -> str:
    """A median with its range."""
    return f"{seconds(time.median)} [{seconds(time.low)}-{seconds(time.high)}]"


def best_other(row: Row) -> tuple[str, float] | None:
    """The fastest of the other loaders, and its time."""
    times = {PEERS[who]: time.median for who, time in row.times.items() if who in PEERS}
    if not times:
        return None
    name = min(times, key=lambda who: times[who])
    return name, times[name]


def slower(rows: dict[Any, Row]) -> str:
    """The rows in which a loader other than safetensors is faster, for the benchmark page."""
    found = []
    for key, row in all_questions(rows):
        other = best_other(row)
        if other and other[1] < row.ours.median:
            found.append(f"- {label_of(key)}: {seconds(row.ours.median)}, {other[0]} "
                         f"{seconds(other[1])} ({factor(other[1] / row.ours.median)})")
    return "\n".join(found)


def table(rows: dict[Any, Row], keys: Any, label: Any, others: bool = True) -> str:
    """A table of the benchmark page."""
    head = "| | fastsafetensors | safetensors | speedup |"
    lines = [head + (" fastest other loader |" if others else "") + " measured |",
             "|---|---|---|---|" + ("---|" if others else "") + "---|"]
    for key in keys:
        if key not in rows:
            continue
        row = rows[key]
        speed = factor(row.speedup) if row.speedup >= 1 else f"**{factor(row.speedup)}**"
        cells = [label(key), span(row.ours), span(row.safetensors), speed]
        other = best_other(row)
        cells += [f"{other[0]}: {seconds(other[1])}" if other else "-"] if others else []
        lines.append(f"| {' | '.join([*cells, row.date])} |")
    return "\n".join(lines)


def starts_table(rows: dict[Any, Row], section: str) -> str:
    """The start times of one kind of memory: first and second start of every place and model."""
    keys = [(section, place, model, number) for place in PLACES for model in MODELS
            for number in (0, 1)]
    return table(rows, keys, lambda key: f"{PLACES[key[1]]}, {key[2]}, {STARTS[key[3]]}")


def bar_chart(title: str, bars: list[tuple[str, float, str, str]], notes: list[str],
              colours: dict[str, str], mark: float = 0) -> str:
    """Horizontal bars on one scale: (label, value, label of the bar, colour)."""
    left, width, step, top = 250, 400, 24, 34
    longest = max(value for _, value, _, _ in bars)
    body = [f'<text x="0" y="16" class="title">{escape(title)}</text>']
    bottom = top + len(bars) * step
    if mark:
        x = left + mark / longest * width
        body.append(f'<line x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom}" '
                    f'stroke="{colours["axis"]}"/>')
    for number, (label, value, text, colour) in enumerate(bars):
        y = top + number * step
        strong = ' class="mine"' if label == CONTENDERS["ours"] else ""
        body += [f'<text x="{left - 8}" y="{y + 13}" text-anchor="end"{strong}>{escape(label)}'
                 '</text>',
                 f'<rect x="{left}" y="{y}" width="{max(2.0, value / longest * width):.1f}" '
                 f'height="17" rx="2" fill="{colours[colour]}"/>',
                 f'<text x="{left + value / longest * width + 6:.1f}" y="{y + 13}">'
                 f'{escape(text)}</text>']
    for note in notes:
        bottom += 15
        body.append(f'<text x="0" y="{bottom}" class="small">{escape(note)}</text>')
    style = ("text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:"
             f"{colours['text']}}}.title{{font-weight:600;font-size:14px}}.mine{{font-weight:600}}"
             f".small{{font-size:10.5px;fill:{colours['faint']}}}")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {bottom + 8}" width="820" '
            f'role="img" aria-label="{escape(title)}">\n<!-- Made by tools/draw_figure.py. -->\n'
            f"<style>{style}</style>\n" + "\n".join(body) + "\n</svg>\n")


def loading_chart(rows: dict[Any, Row], theme: str) -> str:
    """README.md's picture: one load by every loader."""
    row, host = rows[PICTURE], machine()
    times = sorted((row.times[who].median, who) for who in CONTENDERS if who in row.times)
    bars = [(CONTENDERS[who], time, f"{time:.2f} s", "ours" if who == "ours" else "peer")
            for time, who in times]
    notes = [f"Median of separate processes, measured {row.date}. {host['processors']} virtual "
             f"CPUs ({host['processor']}), one virtual disk, torch 2.13. Every tensor owns its "
             "memory."]
    return bar_chart("Load 1 GiB from disk into CPU memory (seconds, shorter is better)", bars,
                     notes, COLOURS[theme])


def speedup_chart(rows: dict[Any, Row], theme: str) -> str:
    """The benchmark page's picture: the speedup of every load on the disk and of every save."""
    keys: list[Any] = [(section, "disk", model, number) for section in SECTIONS
                       for model in MODELS for number in (0, 1)]
    short = {"Views": "mapped", "Owned": "owned"}
    names = {key: f"{short[key[0]]}, {key[2]}, {'again' if key[3] else 'cold'}" for key in keys}
    names |= {key: f"save {text}" for key, text in SAVES.items() if "aligned" not in key}
    bars = [(name, rows[key].speedup, factor(rows[key].speedup),
             "ours" if rows[key].speedup >= 1 else "loss")
            for key, name in names.items() if key in rows]
    return bar_chart("Speedup against safetensors 0.8 (longer is better; the line is 1x)", bars,
                     ['"mapped": memory-mapped, every byte read. "owned": each tensor owns its '
                      'memory. "cold": page cache empty. "again": the same program started again.'],
                     COLOURS[theme], mark=1)


def replace(text: str, name: str, new: str) -> str:
    """The page with the part between the markers of that name replaced."""
    begin, end = f"<!-- {name}: written by tools/draw_figure.py -->\n", f"\n<!-- end of {name} -->"
    pattern = f"(?<={re.escape(begin)}).*?(?={re.escape(end)})"
    if len(re.findall(pattern, text, re.S)) != 1:
        raise SystemExit(f"a page lacks the markers of {name!r}")
    return re.sub(pattern, lambda _: new, text, flags=re.S)


def texts(rows: dict[Any, Row]) -> dict[Any, str]:
    """Every file that is written, with its text."""
    first, second = ROOT / "README.md", ROOT / "docs/benchmarks/README.md"
    page = replace(first.read_text(), "headline", headline(rows))
    page = replace(page, "figures", first_table(rows))
    page = replace(page, "small gains", small_gains(rows))
    bench = second.read_text()
    for name, new in {
            "loads": table(rows, LOADS, label_of),
            "mapped starts": starts_table(rows, "Views"),
            "owned starts": starts_table(rows, "Owned"),
            "saves": table(rows, SAVES, SAVES.__getitem__, others=False),
            "series": series(),
            "losses": losses(rows),
            "slower": slower(rows)}.items():
        bench = replace(bench, name, new)
    found: dict[Any, str] = {first: page, second: bench}
    for theme in COLOURS:
        found[ROOT / f"docs/loading-{theme}.svg"] = loading_chart(rows, theme)
        found[ROOT / f"docs/benchmarks/speedups-{theme}.svg"] = speedup_chart(rows, theme)
    return found


def main() -> int:
    """Write all, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = texts(newest_rows())
    stale = [path for path, text in wanted.items()
             if not path.exists() or path.read_text() != text]
    for path in stale:
        if arguments.check:
            print(f"{path.relative_to(ROOT)} differs from the newest measurements: run "
                  "tools/draw_figure.py")
        else:
            path.write_text(wanted[path])
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
