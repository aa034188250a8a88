# SPDX-License-Identifier: Apache-2.0
"""Compares verified loads with programs that only hash the file, interleaved.

    python benchmarks/verified_loads.py [--mib 512] [--runs 7] [--folder build/bench]

Loads are to owned memory, cold (pages dropped before) and hot, unverified and with each kind of
digest. The hot ones are compared with build/*/tests/bench_digest_copy, which only copies and hashes
in one pass ("bound"; into new memory, like the load), and with sha256sum, the blake3 package and
model_signing, if installed, which hash the file without loading it.
"""

import argparse
import hashlib
import importlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

from transformer_files import set_cache

DIGESTS = ("xxh3-128", "blake3", "sha256")
ROOT = pathlib.Path(__file__).resolve().parent.parent


def make_model(path, mib):
    """Write a file of 32 MiB tensors with random bytes, and a manifest of each kind next to it."""
    import numpy

    from fastsafetensors import write_manifest
    from fastsafetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    generator = numpy.random.default_rng(0)
    save_file({f"layers.{i}.weight": generator.integers(0, 256, (32 << 20,), numpy.uint8)
               for i in range(max(1, mib // 32))}, path)
    for digest in DIGESTS:
        write_manifest(path, f"{path}.{digest}.manifest", algorithm=digest)


def load(path, digest):
    """Seconds of one load."""
    from fastsafetensors.numpy import load_file

    verify = f"{path}.{digest}.manifest" if digest else False
    start = time.perf_counter()
    tensors = load_file(path, mode="load", verify=verify)
    seconds = time.perf_counter() - start
    del tensors
    return seconds


class Bound:
    """The running program that copies and hashes. It gets one word per measurement."""

    def __init__(self, path):
        """Start it; without one built there are no such rows."""
        found = sorted(ROOT.glob("build/*/tests/bench_digest_copy"), key=os.path.getmtime)
        self._process = subprocess.Popen([found[-1], path], stdin=subprocess.PIPE, text=True,
                                         stdout=subprocess.PIPE, bufsize=1) if found else None

    def ask(self, word):
        """Return the seconds of one pass; None without the program."""
        if self._process is None:
            return None
        self._process.stdin.write(word + "\n")
        return float(self._process.stdout.readline())


def run_program(*command):
    """Seconds of a program, None where it is not there."""
    if shutil.which(command[0]) is None:
        return None
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def run_blake3(path):
    """Seconds of the blake3 package over the mapped file with all processors, or None."""
    try:
        blake3 = importlib.import_module("blake3").blake3
    except ImportError:
        return None
    start = time.perf_counter()
    blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    return time.perf_counter() - start


def run_model_signing(path):
    """Seconds of model_signing's own hash of a folder with this file alone, or None."""
    try:
        hashing = importlib.import_module("model_signing.hashing")
    except ImportError:
        return None
    folder = path.parent / "alone"
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    if not target.exists():
        os.link(path, target)
    start = time.perf_counter()
    hashing.Config().hash(folder)
    return time.perf_counter() - start


def run_hashlib(path):
    """Seconds of one hashlib SHA-256 over the file."""
    start = time.perf_counter()
    with open(path, "rb") as file:
        hashlib.file_digest(file, "sha256")
    return time.perf_counter() - start


def contestants(path, bound):
    """Return [(row, cold, call)], the measurements of each round in order."""
    rows = []
    for cold in (True, False):
        where = "cold" if cold else "hot"
        rows += [(f"{where}: load, {digest or 'unverified'}", cold,
                  lambda digest=digest: load(path, digest)) for digest in (None, *DIGESTS)]
    rows += [(f"hot: bound, {digest}", False, lambda digest=digest: bound.ask(f"fresh-{digest}"))
             for digest in ("none", *DIGESTS)]
    rows += [(f"hot: digest alone, {digest}", False,
              lambda digest=digest: bound.ask(f"only-{digest}")) for digest in DIGESTS]
    rows += [("hot: sha256sum", False, lambda: run_program("sha256sum", path)),
             ("hot: hashlib, sha256", False, lambda: run_hashlib(path)),
             ("hot: blake3 package, all processors", False, lambda: run_blake3(path)),
             ("hot: model_signing, hash", False, lambda: run_model_signing(path))]
    return rows


def measure(path, runs):
    """{row: [seconds]}; the first round warms up and does not count."""
    bound, figures = Bound(path), {}
    for number in range(runs + 1):
        was_cold = True
        for row, cold, call in contestants(path, bound):
            if cold or was_cold:
                set_cache(path, cold)
            was_cold = cold
            seconds = call()
            if number > 0 and seconds is not None:
                figures.setdefault(row, []).append(seconds)
    return figures


def ratio(figures, row, other):
    """Median over the rounds of row / other, and its spread."""
    if row not in figures or other not in figures:
        return None
    each = sorted(a / b for a, b in zip(figures[row], figures[other], strict=True))
    return {"median": statistics.median(each), "min": each[0], "max": each[-1]}


def ratios(figures):
    """Return {name: ratio} of the ratios for which the project has goals."""
    wanted = {}
    for digest in DIGESTS:
        for where in ("cold", "hot"):
            wanted[f"{where}: {digest} / unverified"] = (f"{where}: load, {digest}",
                                                        f"{where}: load, unverified")
        wanted[f"hot: bound / load, {digest}"] = (f"hot: bound, {digest}", f"hot: load, {digest}")
        wanted[f"digest alone / cold load, {digest}"] = (f"hot: digest alone, {digest}",
                                                         f"cold: load, {digest}")
    found = {what: ratio(figures, *pair) for what, pair in wanted.items()}
    return {what: row for what, row in found.items() if row is not None}


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / "bench")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there as well")
    options = parser.parse_args()
    path = options.folder / f"verified-{options.mib}.safetensors"
    make_model(path, options.mib)
    try:
        figures = measure(path, options.runs)
    finally:
        for made in options.folder.rglob(f"{path.name}*"):
            made.unlink()
    for row, seconds in figures.items():
        print(f"{row:<36} {statistics.median(seconds):8.3f} s  [{min(seconds):.3f} - "
              f"{max(seconds):.3f}]  {options.mib / 1024 / statistics.median(seconds):6.2f} GiB/s")
    for what, row in ratios(figures).items():
        print(f"{what:<36} {row['median']:8.2f} x  [{row['min']:.2f} - {row['max']:.2f}]")
    if options.json:
        options.json.write_text(json.dumps({"seconds": figures, "ratios": ratios(figures)}))


if __name__ == "__main__":
    sys.exit(main())
