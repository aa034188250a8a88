# SPDX-License-Identifier: Apache-2.0
"""from_pretrained with and without this package: time and peak memory, on models made on the spot.

    python benchmarks/from_pretrained.py [--runs 7] [--folder build/bench/pretrained]

Two architectures with random weights: a Llama of 1 GiB in bfloat16, and a sentence encoder of the
shape of all-MiniLM-L6 (90 MB, float32). Each run is a process of its own, with the file's pages
dropped (cold) or read (hot) before the clock starts. The clock runs from from_pretrained() until
every parameter has been read once: views of a file have cost nothing before that. "other dtype"
asks for float32 of a bfloat16 file. Peak is the largest resident set of the process above what it
was when the clock started; pages of a mapped file count.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

MODELS = ("llama", "minilm")
STATES = ("cold", "hot")


def make_model(kind, folder):
    """Save a model with random weights; return its folder."""
    path = folder / kind
    if (path / "model.safetensors").exists():
        return path
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=10,
            num_attention_heads=16, num_key_value_heads=8, vocab_size=16000)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    else:
        config = transformers.BertConfig(
            hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12,
            vocab_size=30522)
        model = transformers.BertModel(config)
    model.save_pretrained(path, max_shard_size="20GB")
    os.sync()
    return path


def set_state(folder, state):
    """Drop the file's pages, or read them."""
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if state == "hot":
            while os.read(fd, 1 << 24):
                pass
        os.close(fd)


def peak_bytes():
    """Largest resident set since it was reset."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def resident_bytes():
    """Resident set now."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def child(order):
    """One run."""
    import contextlib

    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    folder = pathlib.Path(order["folder"])
    cls = transformers.LlamaForCausalLM if folder.name == "llama" else transformers.BertModel
    cls(cls.config_class(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, vocab_size=8))  # imports
    switch = contextlib.nullcontext()
    if order["ours"]:
        from fastsafetensors.integrations import accelerate_from_pretrained

        switch = accelerate_from_pretrained(converts=order["converts"])
    from compare_loads import hold_ballast

    # Memory that the host has to provide first would be what is measured (docs/benchmarks).
    if order["ballast"]:
        hold_ballast(4 << 30)
    set_state(folder, order["state"])
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    start = time.perf_counter()
    with switch:
        model = cls.from_pretrained(folder, dtype=getattr(torch, order["dtype"]))
    loaded = time.perf_counter() - start
    total = sum(float(p.detach().view(-1)[::1024].float().sum()) for p in model.parameters())
    result = {"load": loaded, "seconds": time.perf_counter() - start,
              "peak": peak_bytes() - before, "sum": total}
    if order["ours"]:
        assert switch.reads, "nothing was read by fastsafetensors"
    print(json.dumps(result))


def row(name, runs):
    """One line of the table."""
    seconds = [r["seconds"] for r in runs]
    peak = statistics.median(r["peak"] for r in runs) / (1 << 20)
    return (f"{name:24}{statistics.median(seconds):10.3f}{min(seconds):10.3f}-{max(seconds):<8.3f}"
            f"{statistics.median(r['load'] for r in runs):10.3f}{peak:12.0f}")


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", default="build/bench/pretrained")
    parser.add_argument("--no-ballast", action="store_true",
                        help="in memory that the host may have to find first")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    root = pathlib.Path(arguments.folder)
    for kind in MODELS:
        folder = make_model(kind, root)
        own = "bfloat16" if kind == "llama" else "float32"
        for state in STATES:
            for dtype in dict.fromkeys((own, "float32")):
                runs = {"safetensors": [], "fastsafetensors": []}
                if dtype != own:
                    runs["converts=True"] = []
                order = list(runs) * arguments.runs
                random.shuffle(order)
                for name in order:
                    job = {"folder": str(folder), "state": state, "dtype": dtype,
                           "ours": name != "safetensors", "converts": name == "converts=True",
                           "ballast": not arguments.no_ballast}
                    done = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)],
                                          capture_output=True, text=True)
                    if done.returncode:
                        print(done.stderr, file=sys.stderr)
                        return 1
                    runs[name].append(json.loads(done.stdout.splitlines()[-1]))
                assert len({r["sum"] for rs in runs.values() for r in rs}) == 1, "bytes differ"
                note = "" if dtype == own else ", other dtype"
                size = sum(p.stat().st_size for p in folder.glob("*.safetensors")) / (1 << 20)
                print(f"\n{kind}, {size:.0f} MiB, {state}{note}")
                print(f"{'':24}{'s':>10}{'spread':>18}{'returned':>10}{'peak, MiB':>12}")
                for name, results in runs.items():
                    print(row(name, results))
                medians = [statistics.median(r["seconds"] for r in rs) for rs in runs.values()]
                print(f"{'x':24}" + "".join(f"{medians[0] / m:10.2f}" for m in medians[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
