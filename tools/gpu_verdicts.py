# SPDX-License-Identifier: Apache-2.0
"""Whether the measurements of gpu_check.py reach their targets."""

from __future__ import annotations

from gpu_files import MIB

# Targets as ratios: to the limit, to other loaders, and of memory.
OF_LIMIT, TO_SAFETENSORS, PER_TENSOR_US, SETUP_S, SLACK = 0.9, 4.8, 2.0, 0.05, 1.02


def judge_saves(result: dict, rows: dict) -> list[tuple[str, bool, str]]:
    """Verdicts on saves: they take at most as long as those of others."""
    ours = rows.get("save: ours")
    ratios = {name: rows[name]["median"] / ours["median"]
              for name in ("save: safetensors", "save: torch.save") if ours and name in rows}
    return [(f"{result['title']}: as fast as {name}", ratio >= 1, f"{ratio:.2f} x")
            for name, ratio in ratios.items()]


def judge_scenario(result: dict, bus: float, disk: float) -> list[tuple[str, bool, str]]:
    """Verdicts on one file."""
    verdicts = []
    rows = {row["name"]: row for row in result["rows"]}
    if result["state"] == "saved":
        return judge_saves(result, rows)
    best = rows.get("ours, load_file") or rows.get("ours, the extension") or rows.get("ours")
    if best is None and result.get("failed", {}).get("ours", "").startswith("left out"):
        return []
    if best is None:
        return [(f"{result['title']}: measured", False, "nothing of ours ran")]
    title = f"{result['title']}: {best['name']}"
    limit = bus if result["state"] == "hot" else min(bus, disk or bus)
    speed = result["bytes"] / best["median"] / 1e9
    stats = (rows.get("ours") or {}).get("stats") or {}
    if stats.get("tensors", 0) > 1000:
        extra = (best["median"] - result["bytes"] / bus / 1e9) / stats["tensors"] * 1e6
        verdicts.append((f"{title}: at most {PER_TENSOR_US} us a tensor", extra <= PER_TENSOR_US,
                         f"{extra:.2f} us"))
    elif result["bytes"] > 100 * MIB:
        verdicts.append((f"{title}: {OF_LIMIT} of the limit", speed >= OF_LIMIT * limit,
                         f"{speed:.2f} of {limit:.2f} GB/s"))
    if stats:
        slack = stats["buffer_bytes"] / max(stats["bytes_requested"], 1)
        verdicts.append((f"{result['title']}: device memory", slack <= SLACK, f"{slack:.4f} x"))
    of_safetensors = TO_SAFETENSORS if result["state"] == "hot" else 1.0  # else the disk decides
    for name, factor in (("safetensors", of_safetensors), ("InstantTensor", 1.0),
                         ("torch, pinned copy of a mapping", 1.0), ("Run:ai streamer", 1.0),
                         ("fastsafetensors 0.5", 1.0)):
        if name in rows:
            ratio = rows[name]["median"] / best["median"]
            verdicts.append((f"{title}: {factor} x {name}", ratio >= factor, f"{ratio:.2f} x"))
    return verdicts


def judge(document: dict) -> list[tuple[str, bool, str]]:
    """(what, whether it holds, the figures) for every target that could be measured."""
    limits, verdicts = document["limits"], []
    for result in document["scenarios"] if limits else []:
        verdicts += judge_scenario(result, limits["bus_gbps"], limits.get("disk_gbps", 0))
    for row in document["setup"]:
        if row["name"].startswith("ours"):
            verdicts.append((f"set-up, {row['name']}: at most {SETUP_S * 1e3:.0f} ms",
                             row["seconds"] <= SETUP_S,
                             f"{row['seconds'] * 1e3:.1f} ms [{row['low'] * 1e3:.1f}-"
                             f"{row['high'] * 1e3:.1f}]"))
    return verdicts


def setups(result: dict) -> list[dict]:
    """For each method, how much longer the first load of a process takes than its later ones.

    The device is open before the first load, except in the command's.
    """
    return [{"name": row["name"], "seconds": row["extra"][1], "low": row["extra"][0],
             "high": row["extra"][-1]} for row in result["rows"]
            if row["name"] != "ours" and len(row["extra"]) > 2]
