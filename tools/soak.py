#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Thousands of loads and saves of mixed files in one process: memory and descriptors stay level.

    python tools/soak.py [--rounds 10000] [--loaders 24]

A round loads one of several files with one of the APIs, or saves one and reads it back. At the end,
the resident set and the number of open descriptors must equal those after the first tenth of the
rounds. Then --loaders threads load concurrently until each has loaded ten times, and all must
finish.
"""

import argparse
import gc
import os
import pathlib
import random
import sys
import tempfile
import threading
import time

LEVEL_BYTES = 32 << 20  # allocators keep some memory


def resident() -> int:
    """Return the bytes of the resident set."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    """Return the number of open descriptors."""
    return len(os.listdir("/proc/self/fd"))


def make_files(folder: pathlib.Path) -> list[str]:
    """Make files of several kinds: many small tensors, large ones, no tensors, a broken file."""
    import torch

    from fastsafetensors.torch import save_file

    kinds = {
        "small": {f"t{i}": torch.full((16,), i) for i in range(500)},
        "large": {"w": torch.randn(1024, 1024), "v": torch.randn(3, 700_001)},
        "mixed": {"a": torch.randn(100).half(), "b": torch.ones(7, dtype=torch.bool),
                  "c": torch.empty(0, 3), "d": torch.randn(1 << 18)},
        "empty": {},
    }
    for name, tensors in kinds.items():
        save_file(tensors, folder / name)
    (folder / "broken").write_bytes(b"\x10\0\0\0\0\0\0\0{\"a\":1}")
    return [str(folder / name) for name in [*kinds, "broken"]]


def one_round(path: str, choice: random.Random, folder: pathlib.Path) -> None:
    """Load or save a file with one of the APIs."""
    from fastsafetensors import (
        ParallelLoader,
        SafetensorError,
        SafeTensorsFileLoader,
        fastsafe_open,
        safe_open,
    )
    from fastsafetensors.torch import load, load_file, save_file

    way = choice.randrange(8)
    try:
        if way < 3:
            load_file(path, mode=("load", "map", "auto")[way])
        elif way == 3:
            with safe_open(path, "pt") as file:
                for name in file.offset_keys()[: choice.randrange(20)]:
                    file.get_tensor(name)
        elif way == 4:
            for _ in ParallelLoader(None, [path], use_tqdm_on_load=False):
                if choice.random() < 0.05:
                    break
        elif way == 5:
            with fastsafe_open(path) as opened:
                opened.keys()
        elif way == 6:
            SafeTensorsFileLoader(path).load()
        else:
            tensors = load(pathlib.Path(path).read_bytes())
            save_file(tensors, folder / "saved")
            load_file(folder / "saved")
    except SafetensorError:
        if not path.endswith("broken"):
            raise


def soak(rounds: int, folder: pathlib.Path, paths: list[str]) -> bool:
    """Run the rounds. True if memory and descriptors did not grow."""
    choice = random.Random(7)
    level: tuple[int, int] = (0, 0)
    for number in range(rounds):
        one_round(choice.choice(paths), choice, folder)
        if number == rounds // 10:
            gc.collect()
            level = (resident(), descriptors())
    gc.collect()
    end = (resident(), descriptors())
    print(f"{rounds} rounds: {level[0] >> 20} MiB and {level[1]} descriptors after a tenth, "
          f"{end[0] >> 20} MiB and {end[1]} at the end")
    return end[0] <= level[0] + LEVEL_BYTES and end[1] <= level[1]


def together(count: int, path: str) -> bool:
    """Load in concurrent threads. True if all finished and got similar shares of the time."""
    from fastsafetensors.torch import load_file

    ends = [0.0] * count

    def work(index: int) -> None:
        for _ in range(10):
            load_file(path, mode="load")
        ends[index] = time.monotonic() - start

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    done = [end for end in ends if end > 0]
    print(f"{count} loaders at once: {len(done)} finished, first after {min(done):.2f} s, "
          f"last after {max(done):.2f} s")
    return len(done) == count


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--loaders", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        paths = make_files(folder)
        level = soak(arguments.rounds, folder, paths)
        fair = together(arguments.loaders, paths[1])
    print("level" if level else "GROWN", "and", "all finished" if fair else "NOT ALL FINISHED")
    return 0 if level and fair else 1


if __name__ == "__main__":
    sys.exit(main())
