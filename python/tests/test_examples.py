# SPDX-License-Identifier: Apache-2.0
"""The examples, the performance test and the benchmarks run."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*arguments, cwd=None, expect=0, **environment):
    """Run Python on a script; return its output."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True,
                          text=True, timeout=300,
                          env={**os.environ, "TQDM_DISABLE": "1", **environment})
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- load.py, vllm_style_iterator.py ----


def test_load_alone_and_as_ranks(model, torch):
    text = run(EXAMPLES / "load.py", model[0])
    assert "rank 0: large (700, 1000), (700, 1000) on this rank" in text
    text = run("-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / "load.py")
    for rank in (0, 1):
        assert f"rank {rank}: layer.0.weight (1000, 512), (500, 512) on this rank" in text


def test_iterator(sharded, torch):
    text = run(EXAMPLES / "vllm_style_iterator.py")
    assert "24 tensors of 4 files were loaded into the model" in text
    text = run(EXAMPLES / "vllm_style_iterator.py", sharded[0])
    assert text.count("torch.float32") == 9


def test_iterator_refuses_incomplete_models(sharded, tmp_path, torch):
    folder = tmp_path / "set"
    shutil.copytree(sharded[0], folder)
    next(folder.glob("*-00002-of-*")).unlink()
    bare = tmp_path / "bare"  # without the index that would name it
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.json"))
    (tmp_path / "empty").mkdir()
    for path, words in ((folder, "is missing (model-00002-of-00003.safetensors)"),
                        (bare, "1 is missing: number 00002"),
                        (tmp_path / "empty", "no *.safetensors file"),
                        (tmp_path / "none", "No such file")):
        done = subprocess.run([sys.executable, EXAMPLES / "vllm_style_iterator.py", path],
                              capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_iterator_continues_without_gds(sharded, torch, monkeypatch):
    sys.path.insert(0, str(EXAMPLES))
    try:
        import vllm_style_iterator as example
    finally:
        sys.path.pop(0)
    real, asked = example.ParallelLoader, []

    def make(**options):
        asked.append(options["nogds"])
        if not options["nogds"]:
            raise RuntimeError("gds: no direct reads here")
        return real(**options)

    monkeypatch.setattr(example, "ParallelLoader", make)
    files = [str(path) for path in sharded[0].glob("*.safetensors")]
    got = dict(example.weights(files, example.SingleGroup(), "cpu"))
    assert got.keys() == sharded[1].keys() and asked == [False, True]


# ---- the LoRA trainer ----


@pytest.fixture
def trainer(tmp_path, torch):
    """Return a copy of the trainer's folder."""
    for package in ("transformers", "peft", "omegaconf"):
        pytest.importorskip(package)
    return shutil.copytree(EXAMPLES / "lora_trainer", tmp_path / "trainer")


def losses(text):
    """The losses that a run printed, by step."""
    return {int(s): float(v) for s, v in re.findall(r"step (\d+): loss ([\d.]+)", text)}


MODULES = ("base_model", "caches", "checkpoints", "settings", "train", "utils",
           "utils.fast_loading", "utils.plain_checkpoints")


@pytest.fixture
def train(trainer, monkeypatch, capsys):
    """Return a function that runs the trainer in its folder and in this process."""
    monkeypatch.chdir(trainer)
    monkeypatch.syspath_prepend(trainer)
    kept = {name: sys.modules.pop(name, None) for name in MODULES}

    def call(*words, config="config.yaml", expect=0):
        import train as program

        monkeypatch.setattr(sys, "argv", ["train.py", config, *words])
        code = program.main()
        said = capsys.readouterr()
        assert code == expect, said.out + said.err
        return said.out + said.err

    yield call
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update({name: module for name, module in kept.items() if module is not None})


@pytest.mark.parametrize("device", ["cuda:9", "no-such-device", "cpu:x", "meta:"])
def test_missing_device_is_one_line_and_code_2(train, torch, device):
    text = train(f"device={device}", expect=2)
    assert text.startswith("error: config.yaml: device: ") and text.count("\n") == 1


def test_trainer(trainer, train, torch):
    text = train("train.steps=20", "train.save_every=10")
    assert "FastSafeTensors available: True, used: True" in text
    first = losses(text)
    assert first[20] < first[10] < 5.6  # random guessing has a loss of ln 256 = 5.5
    shutil.rmtree(trainer / "run/output/step-20")
    resumed = train("train.steps=20", "train.save_every=10", "train.resume=latest")
    assert "resumed from step 10 of run/output" in resumed
    assert losses(resumed)[20] == first[20]  # as if it had not been interrupted

    import peft
    import transformers
    from safetensors import safe_open

    adapter = trainer / "run/output/adapter"
    with safe_open(adapter / "adapter_model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt", "lora_rank": "16"}
    base = transformers.AutoModelForCausalLM.from_pretrained(trainer / "run/base")
    before = base(torch.zeros(1, 4, dtype=torch.long)).logits
    adapted = peft.PeftModel.from_pretrained(base, adapter)
    assert not torch.equal(adapted(torch.zeros(1, 4, dtype=torch.long)).logits, before)


def test_trainer_without_the_package(trainer, tmp_path):
    block = tmp_path / "blocked/fastsafetensors"
    block.mkdir(parents=True)
    (block / "__init__.py").write_text("raise ImportError('not installed')\n")
    text = run("train.py", "config.yaml", "train.steps=10", cwd=trainer,
               PYTHONPATH=str(block.parent))
    assert "FastSafeTensors available: False, used: False" in text
    same = run("train.py", "config.yaml", "train.steps=10", "output_dir=run/other", cwd=trainer)
    assert "used: True" in same and losses(text) == losses(same)
    plain = run("train.py", "config.yaml", "train.steps=10", "use_fastsafetensors=false",
                "output_dir=run/plain", cwd=trainer)
    assert "used: False" in plain and losses(plain) == losses(same)
    # Checkpoints without the package.
    blocked = {"PYTHONPATH": str(block.parent)}
    words = ["train.py", "config.yaml", "train.save_every=4", "output_dir=run/blocked"]
    whole = run(*words, "train.steps=20", cwd=trainer, **blocked)
    assert sorted(os.listdir(trainer / "run/blocked")) == ["adapter", "step-16.pt", "step-20.pt"]
    again = run(*words, "train.steps=20", "train.resume=16", cwd=trainer, **blocked)
    assert "resumed from step 16" in again and losses(again)[20] == losses(whole)[20]
    assert "no checkpoint '7' can be loaded" in run(
        *words, "train.resume=7", cwd=trainer, expect=2, **blocked)


def test_trainer_reports_configuration_errors(trainer, train, torch):
    config = trainer / "config.yaml"
    good = config.read_text()
    config.write_text(good.replace("texts: texts.txt", ""))
    assert "missing: texts" in train(expect=2)
    config.write_text(good + "unknown_key: 1\n")
    assert "unknown_key" in train(expect=2)
    config.write_text(good)
    assert "lora.rank" in train("lora.rank=0", expect=2)
    assert "no such file" in train(config="none.yaml", expect=2)
    assert "train.steps" in train("train.steps=many", expect=2)
    assert "no complete checkpoint" in train("train.resume=latest", expect=2)

    train("train.steps=2")
    item = trainer / "run/cache/00000.safetensors"
    torch.save({"prompt_embeds": torch.zeros(64, 128), "labels": torch.zeros(64).long()},
               item.with_suffix(".pt"))
    assert "1 items as .safetensors and .pt" in train("train.steps=2")
    item.unlink()
    train("train.steps=2")  # only the .pt file is left
    item.write_bytes(b"damaged")
    assert "00000.safetensors is damaged" in train("train.steps=2", expect=2)
    shutil.move(trainer / "run/base", trainer / "run/first")
    torch.manual_seed(1)
    import transformers

    transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(
        trainer / "run/first")).save_pretrained(trainer / "run/base")
    assert "another base model" in train("train.steps=2", expect=2)


def test_trainer_refuses_damaged_checkpoints(trainer, train):
    train("train.steps=2")
    folder = trainer / "run/output/step-2"
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}

    def resume(*words, which="latest"):
        return train("train.steps=4", f"train.resume={which}", *words, expect=2)

    assert "rank 16" in resume("lora.rank=4")
    assert "'7' can be loaded" in resume(which="7")
    assert "'first' can be loaded" in resume(which="first")
    name = "checkpoint.safetensors"
    (folder / name).write_bytes(kept[name][:-100])
    assert "no complete checkpoint" in resume()
    assert "the file is truncated" in resume(which="2")
    (folder / name).write_bytes(kept[name][:-1] + bytes([kept[name][-1] ^ 1]))
    assert "no complete checkpoint" in resume()
    assert "differs from its" in resume(which="2")
    (folder / name).unlink()
    assert "step-2" in resume(which="2")
    (folder / name).write_bytes(kept[name])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
    assert sorted(os.listdir(trainer / "run/output")) == ["adapter", "step-2"]


# ---- the performance test and the benchmarks ----

TEST = ROOT / "testing/test_fastsafetensors_performance.py"


def test_performance_report(model, torch):
    text = run(TEST, model[0], "--device", "cpu")
    size = model[0].stat().st_size / (1 << 20)
    lines = text.splitlines()
    for line in [
        "=" * 80, "-" * 70, "FASTSAFETENSORS PERFORMANCE TEST", "Test Configuration:",
        "Clearing system file cache...", "TEST 1: Standard safetensors loading",
        "Method: disk->cpu (standard safetensors)", "Device: cpu", "Starting load...",
        "✓ Load completed successfully", f"  Tensors: {len(model[1])}",
        f"  Total elements: {sum(t.numel() for t in model[1].values()):,}",
        "TEST 2: fastsafetensors with GPUDirect loading", "PERFORMANCE COMPARISON SUMMARY",
        f"Size: {size:.2f} MB ({size / 1024:.3f} GB)", "✓ All tests completed successfully",
    ]:
        assert line in lines, line
    assert re.search(r"^  Time: \d+\.\d{3}s$", text, re.M)
    assert re.search(r"^Standard safetensors +\d+\.\d{3} +\d+\.\d{2} *$", text, re.M)
    assert re.search(r"^fastsafetensors \+ GPUDirect +\d+\.\d{3} +\d+\.\d{2} *$", text, re.M)
    assert re.search(r"^Speedup: \d+\.\d{2}x ", text, re.M)
    assert re.search(r"^Time (saved|lost): \d+\.\d{3}s \(\d+\.\d% (improvement|slower)\)$", text,
                     re.M)
    assert re.search(r"^(✓ fastsafetensors is (FASTER|SIMILAR)|✗ fastsafetensors is SLOWER)$", text,
                     re.M)
    second = text[text.index("TEST 2"):]
    assert re.search(r"^Method: disk->cpu \((uring|direct|pread|mmap)", second, re.M)
    if os.geteuid() == 0 and os.access("/proc/sys/vm/drop_caches", os.W_OK):
        assert "✓ File cache cleared successfully" in lines


def test_performance_verdicts_and_refusals(tmp_path, torch, capsys, monkeypatch):
    sys.path.insert(0, str(TEST.parent))
    try:
        import test_fastsafetensors_performance as performance
    finally:
        sys.path.pop(0)
    for pair, word in (((2.0, 1.0), "FASTER"), ((1.0, 2.0), "SLOWER"), ((1.0, 1.01), "SIMILAR")):
        performance.verdict(*pair)
        text = capsys.readouterr().out
        mark = "✗" if word == "SLOWER" else "✓"
        assert f"{mark} fastsafetensors is {word}" in text and "-" not in text
    assert performance.way_of("uring", {}, torch.device("cuda:0")).startswith("disk->cpu->gpu")
    assert performance.way_of("x", {"gds_bytes": 1}, torch.device("cuda:0")) == (
        "disk->gpu (GPUDirect Storage)")

    class Refusing:
        def __init__(self, path):
            pass

        def write_text(self, text):
            raise PermissionError(13, "Permission denied")

    (tmp_path / "x").write_bytes(bytes(10))
    monkeypatch.setattr(performance.pathlib, "Path", Refusing)
    monkeypatch.setattr(performance.time, "sleep", lambda seconds: None)
    performance.clear_cache(tmp_path / "x")
    said = capsys.readouterr().out
    assert "✗ Permission denied. This script requires sudo privileges." in said
    assert ("  Run: sudo python testing/test_fastsafetensors_performance.py <file>") in said
    assert "are evicted" in said

    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\x08\0\0\0\0\0\0\0{      }junk"[:12])
    assert "✗ InvalidHeader" in run(TEST, bad, expect=2)
    assert "no such file" in run(TEST, tmp_path / "none", expect=2)


def test_performance_without_the_package(model, tmp_path):
    (tmp_path / "fastsafetensors.py").write_text("raise ImportError('not installed')\n")
    text = run(TEST, model[0], "--device", "cpu", PYTHONPATH=str(tmp_path))
    assert "⚠ Warning: fastsafetensors not available" in text
    assert "  Install with: pip install fastsafetensors" in text
    assert "TEST 2" not in text and "✓ All tests completed successfully" in text


def test_benchmarks(tmp_path, torch):
    folder = ["--folder", tmp_path]
    text = run(ROOT / "benchmarks/loading_benchmark.py", "--runs", "1", "--only",
               "small", *folder)
    assert "FastSafeTensors available: True" in text
    assert re.search(r"^File size: 25\.\d\d MB$", text, re.M)
    assert len(re.findall(r"Average loading time: \d+\.\d{4} seconds", text)) == 4
    assert len(re.findall(r"Throughput: \d+\.\d{2} MB/s", text)) == 4
    small = tmp_path / "transformer-small.safetensors"
    text = run(ROOT / "benchmarks/fastsafetensors_benchmark.py", small, "--runs", "1", "--cold")
    assert re.search(r"^File size: 25\.\d\d MB$", text, re.M)
    assert re.search(r"^Average loading time: \d+\.\d{4} seconds$", text, re.M)
    from safetensors import safe_open

    with safe_open(small, "pt") as f:
        assert f.get_slice("transformer_blocks.23.attn.to_q.weight").get_shape() == [2048, 64]
    assert json.dumps(text)


def test_accelerate_checkpoints(tmp_path):
    """The example resumes from the newest checkpoint."""
    pytest.importorskip("accelerate")
    pytest.importorskip("torch")
    program = [sys.executable, EXAMPLES / "accelerate_checkpoints.py", tmp_path / "run"]
    first = subprocess.run([*program, "25"], check=True, capture_output=True, text=True).stdout
    assert "steps 1 to 25" in first and "checkpoints [10, 20]" in first
    second = subprocess.run([*program, "40"], check=True, capture_output=True, text=True).stdout
    assert "steps 21 to 40" in second


def test_accelerate_checkpoints_of_two_processes(tmp_path):
    """Both resume from what the first has saved."""
    pytest.importorskip("accelerate")
    pytest.importorskip("torch")
    program = ["-m", "torch.distributed.run", "--nproc-per-node", "2",
               EXAMPLES / "accelerate_checkpoints.py", tmp_path / "run"]
    environment = {"ACCELERATE_USE_CPU": "true"}
    assert "checkpoints [10, 20]" in run(*program, "25", **environment)
    text = run(*program, "40", **environment)
    assert "steps 21 to 40" in text and "30, 40]" in text
