# SPDX-License-Identifier: Apache-2.0
"""How long a sharded load takes on 8 to 1,024 ranks, and what is read, by strategy and storage.

    python bench/scale/simulate.py [--model-gib 140] [--json FILE] [--svg FILE]

A model of costs, fed with figures that were measured (docs/scaling.md says where) or that the kind
of hardware is sold with; every one can be given as an option. The strategies are those of
fastsafetensors.sharded:

slice      every rank reads its 1/n; a host's ranks share its storage link, all hosts the server's.
scatter    every rank reads 1/n as whole tensors and sends (n-1)/n of that to the others.
broadcast  every rank reads 1/n as whole tensors and gets all the rest.

Time is max over stages (they overlap), plus agreement: one round for each group of tensors.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass

GPUS_PER_HOST = 8
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
STRATEGIES = ("slice", "scatter", "broadcast")


@dataclass
class Storage:
    """Bytes a second that a host and that all hosts together get; seconds of a request."""

    name: str
    host: float
    total: float
    latency: float
    streams: int = 64  # requests of a host in flight


@dataclass
class Costs:
    """What was measured or assumed."""

    link: float = 50e9  # bytes a second between hosts, one host's adapters
    local: float = 300e9  # between ranks of a host
    round_seconds: float = 60e-6  # agreement on one host; times log2 of the hosts beyond
    group_bytes: float = 64 << 20  # a round and a message are for this much a rank
    request_bytes: float = 8 << 20
    over: float = 1.0  # bytes that a slice reads, over those it wants


STORAGES = (
    Storage("local NVMe", 12e9, math.inf, 100e-6),
    Storage("shared filesystem", 10e9, 100e9, 500e-6),
    Storage("object store", 6e9, 400e9, 30e-3, 256),
)


def read_seconds(storage, costs, ranks, bytes_a_rank):
    """Time to read that much on every rank at once."""
    hosts = math.ceil(ranks / GPUS_PER_HOST)
    on_host = min(ranks, GPUS_PER_HOST) * bytes_a_rank
    requests = math.ceil(on_host / costs.request_bytes)
    waits = math.ceil(requests / storage.streams) * storage.latency
    return max(on_host / storage.host, hosts * on_host / storage.total, waits) + storage.latency


def rounds_seconds(costs, ranks, model_bytes):
    """Time of all agreements."""
    hosts = math.ceil(ranks / GPUS_PER_HOST)
    rounds = 2 + math.ceil(model_bytes / (costs.group_bytes * ranks))
    return rounds * costs.round_seconds * (1 + math.log2(max(hosts, 1)))


def link_seconds(costs, ranks, sent_a_host, inside_a_host):
    """Time to move that much between hosts and inside of one."""
    hosts = math.ceil(ranks / GPUS_PER_HOST)
    return (sent_a_host / costs.link if hosts > 1 else 0.0) + inside_a_host / costs.local


def simulate(strategy, storage, costs, ranks, model_bytes):
    """(seconds, bytes read by all ranks together, bytes sent)."""
    share = model_bytes / ranks
    hosts = math.ceil(ranks / GPUS_PER_HOST)
    on_host = min(ranks, GPUS_PER_HOST)
    agreed = rounds_seconds(costs, ranks, model_bytes)
    if strategy == "slice":
        read = min(costs.over * share, model_bytes)
        return read_seconds(storage, costs, ranks, read) + agreed, read * ranks, 0.0
    reading = read_seconds(storage, costs, ranks, share)
    if strategy == "scatter":
        out = on_host * share * (hosts - 1) / hosts
        inside = on_host * share / hosts
        sent = model_bytes * (ranks - 1) / ranks
    else:
        # Rings: what comes to a host from others crosses its adapters once.
        out = model_bytes * (hosts - 1) / hosts
        inside = model_bytes
        sent = model_bytes * (ranks - 1)
    moving = link_seconds(costs, ranks, out, inside)
    return max(reading, moving) + min(reading, moving) / 16 + agreed, model_bytes, sent


def table(costs, model_bytes):
    """All results: [{storage, ranks, strategy, seconds, read, sent}]."""
    rows = []
    for storage in STORAGES:
        for ranks in COUNTS:
            for strategy in STRATEGIES:
                seconds, read, sent = simulate(strategy, storage, costs, ranks, model_bytes)
                rows.append({"storage": storage.name, "ranks": ranks, "strategy": strategy,
                             "over": costs.over, "seconds": seconds, "read": read, "sent": sent})
    return rows


def best(rows, storage, ranks):
    """The fastest strategy for parts of tensors (broadcast gives whole ones)."""
    own = [r for r in rows if r["storage"] == storage and r["ranks"] == ranks
           and r["strategy"] != "broadcast"]
    return min(own, key=lambda row: row["seconds"])["strategy"]


def svg(rows, title):
    """A plot of seconds over ranks, both logarithmic, a panel for each storage."""
    width, height, left, top = 300, 220, 50, 40
    # Scatter is drawn before slice and wider, since their lines often coincide.
    colours = {"scatter": ("#d1495b", 5), "slice": ("#1b6ca8", 2), "broadcast": ("#66a182", 2)}
    low = min(r["seconds"] for r in rows) / 1.3
    high = max(r["seconds"] for r in rows) * 1.3

    def x(ranks):
        return left + (math.log2(ranks) - 3) / 7 * (width - left - 10)

    def y(seconds):
        return top + (math.log(high / seconds) / math.log(high / low)) * (height - top - 30)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * 3 + 20}" '
             f'height="{height + 46}" '
             'font-family="sans-serif" font-size="11">',
             '<rect width="100%" height="100%" fill="white"/>',
             f'<text x="{left}" y="16" font-size="13">{title}</text>']
    for number, storage in enumerate(STORAGES):
        parts.append(f'<g transform="translate({number * width},0)">')
        parts.append(f'<text x="{left}" y="34">{storage.name}</text>')
        for ranks in COUNTS[::2] + (1024,):
            parts.append(f'<text x="{x(ranks):.0f}" y="{height - 12}" text-anchor="middle">'
                         f'{ranks}</text>')
        tick = 10 ** math.ceil(math.log10(low))
        while tick < high:
            parts.append(f'<path d="M{left} {y(tick):.1f}H{width - 10}" stroke="#ddd"/>'
                         f'<text x="{left - 4}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} s'
                         '</text>')
            tick *= 10
        for strategy, (colour, thickness) in colours.items():
            points = " ".join(f"{x(r['ranks']):.1f},{y(r['seconds']):.1f}" for r in rows
                              if r["storage"] == storage.name and r["strategy"] == strategy)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" '
                         f'stroke-width="{thickness}"/>')
        parts.append(f'<text x="{left + 60}" y="{height + 4}">number of ranks</text></g>')
    parts.append(f'<text x="{left}" y="{height + 34}">load time in seconds, logarithmic:</text>')
    for number, (strategy, (colour, _)) in enumerate(colours.items()):
        parts.append(f'<text x="{left + 210 + number * 90}" y="{height + 34}" fill="{colour}" '
                     f'font-weight="bold">{strategy}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-gib", type=float, default=140.0)
    for name, value in vars(Costs()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    parser.add_argument("--json")
    parser.add_argument("--svg")
    arguments = parser.parse_args()
    costs = Costs(**{name: getattr(arguments, name) for name in vars(Costs())})
    model_bytes = arguments.model_gib * (1 << 30)
    rows = table(costs, model_bytes)
    for storage in STORAGES:
        print(f"\n{storage.name}: seconds for {arguments.model_gib:g} GiB, a slice reads "
              f"{costs.over:g} x its bytes")
        print(f"{'ranks':>6}" + "".join(f"{s:>12}" for s in STRATEGIES) + f"{'parts by':>12}"
              + f"{'read, GiB':>12}")
        for ranks in COUNTS:
            own = {r["strategy"]: r for r in rows
                   if r["storage"] == storage.name and r["ranks"] == ranks}
            print(f"{ranks:6}" + "".join(f"{own[s]['seconds']:12.2f}" for s in STRATEGIES)
                  + f"{best(rows, storage.name, ranks):>12}"
                  + f"{own['slice']['read'] / (1 << 30):12.0f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)
    if arguments.svg:
        with open(arguments.svg, "w") as file:
            file.write(svg(rows, f"Simulated: {arguments.model_gib:g} GiB model; a slice reads "
                                f"{costs.over:g} times its bytes"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
