# SPDX-License-Identifier: Apache-2.0
"""Prints the benchmark's results as tables, and writes them as one self-contained page."""

from __future__ import annotations

import sys
from typing import Any

MIB = 1 << 20
# Shown for comparison only, because they make no tensors.
YARDSTICKS = {"plain read", "plain write", "plain write + fsync"}


def print_scenario(result: dict[str, Any]) -> None:
    """Print a scenario's table."""
    rows = result["rows"]
    first = rows[0]
    print(f"\r{result['title']:60}")
    for row in sorted(rows, key=lambda r: float(r["median"])):
        ratio = row["median"] / first["median"]
        print(f"  {row['name']:24} {row['median'] * 1e3:9.2f} ms [{row['low'] * 1e3:.2f}-"
              f"{row['high'] * 1e3:.2f}]  cpu {row['cpu']:6.3f} s  peak "
              f"{row['peak'] / MIB:7.0f} MiB  {'' if row is first else f'{ratio:.2f} x ours'}")
    sys.stdout.flush()


def html_report(document: dict[str, Any]) -> str:
    """One self-contained page: bars with their spread, a scenario each."""
    parts = []
    for result in document["scenarios"]:
        rows = sorted(result["rows"], key=lambda r: r["median"])
        longest = max(r["high"] for r in rows)
        bars = []
        for i, row in enumerate(rows):
            y, width = 8 + i * 26, row["median"] / longest * 520
            low, high = row["low"] / longest * 520, row["high"] / longest * 520
            colour = "#1b6e53" if row["name"].startswith("ours") else (
                "#b9b9b9" if row["name"] in YARDSTICKS else "#c98a3a")
            bars.append(
                f'<text x="176" y="{y + 13}" text-anchor="end">{row["name"]}</text>'
                f'<rect x="184" y="{y}" width="{width:.1f}" height="16" fill="{colour}"/>'
                f'<path d="M{184 + low:.1f} {y + 8}H{184 + high:.1f}" stroke="#222"/>'
                f'<text x="{196 + high:.1f}" y="{y + 13}">{row["median"] * 1e3:.2f} ms, cpu '
                f'{row["cpu"]:.2f} s, peak {row["peak"] / MIB:.0f} MiB</text>')
        parts.append(f'<h2>{result["title"]}</h2><svg viewBox="0 0 960 {16 + 26 * len(rows)}">'
                     + "".join(bars) + "</svg>")
    what = document.get("what", "loading to CPU memory")
    facts = ", ".join(f"{k} {v}" for k, v in document["machine"].items())
    return ("<!doctype html><meta charset=utf-8><title>fastsafetensors benchmark</title><style>"
            "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;color:#222}"
            "svg{width:100%;font-size:13px}h2{font-size:1.05em;margin:1.6em 0 .2em}</style>"
            f"<h1>fastsafetensors {document['version']}: {what}</h1>"
            f"<p>Median of {document['runs']} runs, each a process of its own, interleaved; the "
            f"line shows the fastest and the slowest. Shorter is better. {facts}. "
            f"{document['notes']}</p>" + "".join(parts))
