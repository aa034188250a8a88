# SPDX-License-Identifier: Apache-2.0
"""Loads: relative paths after chdir, open files, messages."""

import copy
import gc
import json
import os
import pickle
import re
import resource
import subprocess
import threading
import time

import numpy as np
import pytest
import torch
from fastsafetensors import (
    ParallelLoader,
    SafeTensorsFileLoader,
    SingleGroup,
    fastsafe_open,
    safe_open,
)
from fastsafetensors.torch import load_file, save_file


@pytest.fixture
def run_command(command):
    """The command with some words."""
    return lambda *words: subprocess.run([command, *map(str, words)], capture_output=True,
                                         text=True)


def test_pickled_handle_opens_from_any_folder(tmp_path, monkeypatch):
    """A relative path means the file that was opened, not one of that name elsewhere."""
    for folder, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / folder).mkdir()
        save_file({"w": torch.tensor([value])}, tmp_path / folder / "m.safetensors")
    monkeypatch.chdir(tmp_path / "one")
    with safe_open("m.safetensors", "pt") as file, safe_open(["m.safetensors"], "pt") as listed:
        part = file.get_slice("w")
        monkeypatch.chdir(tmp_path / "two")
        for same in (copy.deepcopy(file), pickle.loads(pickle.dumps(file)),
                     pickle.loads(pickle.dumps(listed))):
            with same:
                assert same.get_tensor("w").item() == 1.0
        assert pickle.loads(pickle.dumps(part))[:].item() == 1.0


def test_pickled_handle_resolves_links(tmp_path, monkeypatch):
    """"The parent folder of a link to a folder is the parent of its target."""
    (tmp_path / "deep/er").mkdir(parents=True)
    save_file({"w": torch.tensor([1.0])}, tmp_path / "deep/m.safetensors")
    save_file({"w": torch.tensor([2.0])}, tmp_path / "m.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "deep/er")
    monkeypatch.chdir(tmp_path)
    with safe_open("link/../m.safetensors", "pt") as file, copy.deepcopy(file) as same:
        assert file.get_tensor("w").item() == same.get_tensor("w").item() == 1.0


def count_open(folder):
    """Descriptors of files in a folder."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(link).startswith(str(folder)) for link in links)


def test_failed_loader_closes_files(tmp_path):
    """The files are closed at once, not by the garbage collector."""
    save_file({"w": torch.zeros(4)}, tmp_path / "m.safetensors")
    paths = [str(tmp_path / "m.safetensors"), str(tmp_path / "none.safetensors")]
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(FileNotFoundError):
                list(ParallelLoader(None, paths, use_tqdm_on_load=False).iterate_weights())
            with pytest.raises(FileNotFoundError):
                fastsafe_open(paths, device="cpu")
            with pytest.raises(FileNotFoundError):
                SafeTensorsFileLoader(SingleGroup(), "cpu").add_filenames({0: paths})
        assert count_open(tmp_path) == 0
    finally:
        gc.enable()


def test_path_loader_lists_its_arguments(tmp_path):
    """Keywords of the process group's loader are refused with the call that accepts them."""
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(4)}, path)
    for words in ({"device": "cpu"}, {"framework": "pt"}, {"nogds": True}):
        with pytest.raises(TypeError, match="process group"):
            SafeTensorsFileLoader(path, **words)
    with pytest.raises(TypeError, match="process group"):
        SafeTensorsFileLoader(path, "cpu")


def write_odd(path, count, elements):
    """A file of F16 tensors at odd addresses; its values."""
    values = [np.random.randint(0, 1000, elements).astype(np.float16) for _ in range(count)]
    size = 2 * elements
    header = json.dumps({f"t{i}": {"dtype": "F16", "shape": [elements],
                                   "data_offsets": [i * size, (i + 1) * size]}
                         for i in range(count)})
    header += " " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode()
                     + b"".join(value.tobytes() for value in values))
    assert (8 + len(header)) % 2 == 1
    return values


@pytest.mark.parametrize("mode", ["auto", "map", "load"])
def test_misaligned_tensors_are_read_without_the_interpreter(tmp_path, mode):
    """Other threads run while tensors are copied that cannot be views."""
    values = write_odd(tmp_path / "odd.safetensors", 40, 1 << 20)
    beats, stop = [], threading.Event()

    def beat():
        while not stop.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=beat)
    thread.start()
    tensors = load_file(tmp_path / "odd.safetensors", mode=mode)
    stop.set()
    thread.join()
    for i, value in enumerate(values):
        assert np.array_equal(tensors[f"t{i}"].numpy(), value)
    # Counted, not timed: other threads run between 40 waits. A copy that holds the GIL blocks them.
    assert len(beats) > 3 or mode != "map"


def test_a_missing_shard_is_the_errors_file(run_command, tmp_path):
    """The exception's filename is the missing shard."""
    names = {"weight_map": {"a": "x1.safetensors", "b": "x2.safetensors"}}
    save_file({"a": torch.zeros(4)}, tmp_path / "x1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(names))
    with pytest.raises(FileNotFoundError) as caught:
        load_file(tmp_path)
    assert os.path.basename(caught.value.filename) == "x2.safetensors"
    done = run_command("engines", tmp_path)
    assert done.returncode != 0 and "x2.safetensors" in done.stderr


def test_impossible_conversion_is_a_value_error(tmp_path):
    """It is a ValueError, because the request is wrong and not the file."""
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="fill whole bytes"):
        load_file(path, dtype="F4")


def test_command_load_messages(run_command, tmp_path):
    """Bytes that were read are not reported as unread, and no false count is printed."""
    path = tmp_path / "m.safetensors"
    save_file({f"w{i}": torch.zeros(1 << 18) for i in range(8)}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    told = json.loads(run_command("load", "--json", path).stdout)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cold, hot = run_command("load", path).stdout, run_command("load", path).stdout
    if told["bytes_read"] > 0:
        assert "nothing was read" not in cold
    assert "nothing was read" in hot
    assert "chunks were cached" not in run_command("load", "--engine", "pread", path).stdout
    assert run_command("load", "--mode", "map", "--dtype", "BF16", path).returncode == 3
    assert "mode load" in run_command("load", "--ring", "place", path).stdout
    done = run_command("load", "--budget", "1K", path)
    assert done.returncode != 0 and "a larger --budget" in done.stderr
    done = run_command("load", "--json", "--dtype", "I8", path)
    assert done.returncode == 0 and "has no effect" in done.stderr


def test_engines_reports_small_loads(run_command, tmp_path):
    """A small model is read at once, by the calling thread."""
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(3)}, path)
    told = json.loads(run_command("engines", "--json", path).stdout)["engines"]
    load = json.loads(run_command("load", "--json", "--mode", "load", path).stdout)
    of_load = [row["name"] for row in told if "mode load all chunks" in row["reason"]]
    assert of_load == [load["engine"]]


@pytest.mark.parametrize("options", [{}, {"mode": "load"}, {"cache": "bypass"},
                                     {"dtype": "BF16"}], ids=str)
def test_progress_ends_with_the_whole(tmp_path, options):
    """Cold or cached: totals are known from the first call on, and reached by the last one."""
    path = tmp_path / "m.safetensors"
    save_file({f"w{i}": torch.zeros(1 << 20) for i in range(10)}, path)
    for _ in range(2):
        told = []
        load_file(path, progress=lambda *now, told=told: told.append(now), **options)
        assert {(total, tensors) for _, total, _, tensors in told} == {(10 << 22, 10)}, told
        assert told[-1] == (10 << 22, 10 << 22, 10, 10)


def test_progress_is_a_callable(tmp_path):
    """progress accepts a callable or a bool; anything else is an error."""
    save_file({"w": torch.zeros(3)}, tmp_path / "m.safetensors")
    for wrong in (5, "x", object()):
        with pytest.raises(TypeError, match="progress"):
            load_file(tmp_path / "m.safetensors", progress=wrong)


def test_parallel_loader_takes_a_list(tmp_path):
    """A single path is an error, and is not treated as a list of letters."""
    save_file({"w": torch.zeros(3)}, tmp_path / "m.safetensors")
    for one in (str(tmp_path / "m.safetensors"), tmp_path / "m.safetensors"):
        with pytest.raises(TypeError, match="list of files"):
            ParallelLoader(None, one)


def test_command_raises_the_file_limit(command, tmp_path):
    """Whatever the usual limit of a shell; beyond it the error says what to do."""
    for i in range(70):
        save_file({f"w{i}": torch.zeros(3)}, tmp_path / f"s{i:02}.safetensors")

    def load(soft, hard):
        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        return subprocess.run([command, "load", "--json", tmp_path], capture_output=True,
                              text=True, preexec_fn=limit, check=False)

    assert json.loads(load(50, 1000).stdout)["tensors"] == 70
    done = load(50, 50)
    assert done.returncode != 0 and "ulimit -n" in done.stdout


def test_speed_counts_bytes_read(run_command, tmp_path):
    """Views of cached pages do not count as bytes read."""
    path = tmp_path / "m.safetensors"
    save_file({f"w{i}": torch.zeros(1 << 20) for i in range(16)}, path)
    path.read_bytes()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 60 << 20, 0, os.POSIX_FADV_DONTNEED)
    text = run_command("load", path).stdout
    if "GB/s" in text:
        seconds, speed = re.match(r"([\d.]+) s, ([\d.]+) GB/s", text).groups()
        assert float(speed) * max(float(seconds) - 0.0005, 0.0005) < 0.04, text


def test_small_files_have_no_chunk_statistics(run_command, tmp_path):
    """Residency of small files does not influence the load, and is not reported."""
    path = tmp_path / "small.safetensors"
    save_file({"w": torch.zeros(3)}, path)
    assert "chunks were cached" not in run_command("load", "--mode", "load", path).stdout
