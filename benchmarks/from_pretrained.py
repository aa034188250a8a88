# SPDX-License-Identifier: Apache-2.0
"""Measures from_pretrained and similar functions with and without this package: time and peak
memory.

    python benchmarks/from_pretrained.py [--runs 7] [--folder build/bench/pretrained] [--models ..]

The models are generated with random weights: a Llama of 1 GiB in bfloat16 and a sentence encoder of
the shape of all-MiniLM-L6 (90 MB, float32) by transformers, a UNet of 450 MiB by diffusers, a LoRA
adapter of 60 MiB by peft, the Llama by accelerate's load_checkpoint_and_dispatch(), and, the way
that ComfyUI loads a checkpoint, every tensor of one safe_open().

Each run is a separate process. Before the clock starts, the file's pages are dropped (cold), read
(hot), or left as a first start has left them (second). The clock runs from the call until every
parameter has been read once, because memory-mapped tensors cost nothing before that. "other dtype"
requests float32 from a 16-bit file. Peak is the largest increase of the resident set after the
clock started, including pages of mapped files.
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

STATES = ("cold", "second", "hot")
LLAMA = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=10,
             num_attention_heads=16, num_key_value_heads=8, vocab_size=16000)
TINY = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=8)
UNET = dict(block_out_channels=(128, 256, 512, 512), cross_attention_dim=768, layers_per_block=2,
            attention_head_dim=8)


def small_unet():
    """Make a small UNet."""
    import diffusers

    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 32), layers_per_block=1, cross_attention_dim=8, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=4,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))


class Llama:
    """A causal model by transformers."""

    folder, own = "llama", "bfloat16"

    def make(self, path):
        """Save it."""
        import torch
        import transformers

        config = transformers.LlamaConfig(**LLAMA)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(path, max_shard_size="20GB")

    def warm(self):
        """Import everything that is loaded lazily, without a file."""
        import transformers

        self.cls = transformers.LlamaForCausalLM
        self.cls(transformers.LlamaConfig(**TINY))

    def load(self, path, dtype):
        """The parameters."""
        self.model = self.cls.from_pretrained(path, dtype=dtype)
        return self.model.parameters()


class Encoder(Llama):
    """A sentence encoder by transformers."""

    folder, own = "minilm", "float32"

    def make(self, path):
        """Save it."""
        import transformers

        transformers.BertModel(transformers.BertConfig(
            hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12,
            vocab_size=30522)).save_pretrained(path)

    def warm(self):
        """Import everything that is loaded lazily, without a file."""
        import transformers

        self.cls = transformers.BertModel
        sizes = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
        self.cls(transformers.BertConfig(**sizes))


class UNet(Llama):
    """A UNet by diffusers."""

    folder, own = "unet", "float16"

    def make(self, path):
        """Save it."""
        import diffusers

        diffusers.UNet2DConditionModel(**UNET).half().save_pretrained(path)

    def warm(self):
        """Import everything that is loaded lazily, without a file."""
        import diffusers

        small_unet()
        self.cls = diffusers.UNet2DConditionModel

    def load(self, path, dtype):
        """The parameters."""
        self.model = self.cls.from_pretrained(path, torch_dtype=dtype)
        return self.model.parameters()


class Adapter(Llama):
    """A LoRA adapter by peft, for a model that is already loaded."""

    folder, own = "adapter", "float32"
    CONFIG = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                  num_attention_heads=16, num_key_value_heads=16, vocab_size=1000)

    def _base(self):
        import transformers

        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**self.CONFIG))

    def make(self, path):
        """Save it."""
        import peft

        config = peft.LoraConfig(r=128, target_modules="all-linear", init_lora_weights=False)
        peft.get_peft_model(self._base(), config).save_pretrained(path)

    def warm(self):
        """Import everything that is loaded lazily, and the base model."""
        import peft

        self.peft = peft
        self.base = self._base()
        peft.get_peft_model(small_unet(), peft.LoraConfig(r=1, target_modules=["to_q"]))

    def load(self, path, dtype):
        """The adapter's parameters."""
        self.model = self.peft.PeftModel.from_pretrained(self.base, path)
        return (p for name, p in self.model.named_parameters() if "lora_" in name)


class Dispatch(Llama):
    """The Llama by accelerate."""

    def warm(self):
        """Import everything that is loaded lazily, without a file."""
        import accelerate
        import transformers

        self.accelerate = accelerate
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
        with accelerate.init_empty_weights():
            self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))

    def load(self, path, dtype):
        """The parameters."""
        self.accelerate.load_checkpoint_and_dispatch(
            self.model, path, device_map={"": "cpu"}, dtype=dtype)
        return self.model.parameters()


class Checkpoint(Llama):
    """What ComfyUI does with a checkpoint: a state dict of all tensors of one file."""

    def warm(self):
        """Nothing is imported late."""

    def load(self, path, dtype):
        """The state dict's tensors, of the file's dtype: ComfyUI converts when it uses them."""
        import safetensors

        with safetensors.safe_open(path / "model.safetensors", "pt", device="cpu") as opened:
            return [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118


MODELS = {"llama": Llama, "minilm": Encoder, "unet": UNet, "adapter": Adapter,
          "dispatch": Dispatch, "checkpoint": Checkpoint}
ONE_DTYPE = ("adapter", "checkpoint")  # the result has the file's dtype, whatever was requested


def make_model(kind, folder):
    """Save a model with random weights; return its folder."""
    model = MODELS[kind]()
    path = folder / model.folder
    if not list(path.glob("*.safetensors")):
        import torch

        torch.manual_seed(0)
        model.make(path)
        os.sync()
    return path


def set_state(folder, state):
    """Drop the file's pages, or read them; "second" is what the run before has left."""
    if state == "second":
        return
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
    model = MODELS[order["kind"]]()
    model.warm()
    switch = contextlib.nullcontext()
    if order["ours"]:
        from fastsafetensors.integrations import accelerate_from_pretrained

        switch = accelerate_from_pretrained(converts=order["converts"])
    from compare_loads import hold_ballast

    # Without this, the time in which the host provides memory would dominate (docs/benchmarks).
    if order["ballast"]:
        hold_ballast(4 << 30)
    set_state(folder, order["state"])
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    start = time.perf_counter()
    with switch:
        parameters = list(model.load(folder, getattr(torch, order["dtype"])))
    loaded = time.perf_counter() - start
    total = sum(float(p.detach().reshape(-1)[::1024].float().sum()) for p in parameters)
    result = {"load": loaded, "seconds": time.perf_counter() - start,
              "peak": peak_bytes() - before, "sum": total}
    if order["ours"]:
        assert switch.reads, "nothing was read by fastsafetensors"
    print(json.dumps(result))


def row(name, runs):
    """Return one line of the table."""
    seconds = [r["seconds"] for r in runs]
    peak = statistics.median(r["peak"] for r in runs) / (1 << 20)
    return (f"{name:24}{statistics.median(seconds):10.3f}{min(seconds):10.3f}-{max(seconds):<8.3f}"
            f"{statistics.median(r['load'] for r in runs):10.3f}{peak:12.0f}")


def run_child(job):
    """One run in its own process."""
    done = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)],
                          capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(kind, folder, dtype, names, arguments):
    """Runs by state and contender: contenders in turns, a second start behind its own first one."""
    runs = {state: {name: [] for name in names} for state in STATES}
    for _ in range(arguments.runs):
        for name in random.sample(names, len(names)):
            for state in STATES:
                job = {"kind": kind, "folder": str(folder), "state": state, "dtype": dtype,
                       "ours": name != "safetensors", "converts": name != "converts=False",
                       "ballast": not arguments.no_ballast}
                runs[state][name].append(run_child(job))
    sums = {r["sum"] for results in runs.values() for rs in results.values() for r in rs}
    assert len(sums) == 1, "bytes differ"
    return runs


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", default="build/bench/pretrained")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--no-ballast", action="store_true",
                        help="in memory that the host may have to find first")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    for kind in arguments.models:
        folder = make_model(kind, pathlib.Path(arguments.folder))
        own = MODELS[kind].own
        for dtype in dict.fromkeys((own, own if kind in ONE_DTYPE else "float32")):
            names = ["safetensors", "fastsafetensors"] + ["converts=False"] * (dtype != own)
            runs = measure(kind, folder, dtype, names, arguments)
            note = "" if dtype == own else f", {dtype} of {own}"
            size = sum(p.stat().st_size for p in folder.glob("*.safetensors")) / (1 << 20)
            for state, results in runs.items():
                print(f"\n{kind}, {size:.0f} MiB, {state}{note}")
                print(f"{'':24}{'s':>10}{'spread':>18}{'returned':>10}{'peak, MiB':>12}")
                for name in names:
                    print(row(name, results[name]))
                medians = [statistics.median(r["seconds"] for r in results[n]) for n in names]
                print(f"{'x':24}" + "".join(f"{medians[0] / m:10.2f}" for m in medians[1:]),
                      flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
