# SPDX-License-Identifier: Apache-2.0
"""The measurements of several processes in gpu_check.py's report, with stand-ins for programs."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from fake_gpu import ROOT


def test_shared_gpus_are_measured_where_they_are(tmp_path, monkeypatch):
    """A MIG instance of a fake nvidia-smi, and the folder of an MPS daemon."""
    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_sharing

    tools, pipes = tmp_path / "bin", tmp_path / "mps"
    tools.mkdir()
    pipes.mkdir()
    (pipes / "control").touch()
    smi = tools / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H (UUID: GPU-4)'; echo 'GPU 1: H (UUID: GPU-5)'\n"
                   "echo '  MIG 1g.10gb  Device  0: (UUID: MIG-1-2-3)'\n")
    command = tools / "load"
    engines = {"engines": [{"name": "cuda", "reason": "2 device(s), the first: H"}]}
    command.write_text(f"""#!/bin/sh
[ $1 = engines ] && echo '{json.dumps(engines)}' && exit
[ -z "${{CUDA_VISIBLE_DEVICES-all}}" ] && echo 'no device' >&2 && exit 1
echo "$CUDA_VISIBLE_DEVICES $3" >> "$LOG"
echo '{{"seconds": 0.5}}'
""")
    for tool in (smi, command):
        tool.chmod(0o755)
    model = tmp_path / "model"
    model.write_bytes(bytes(10_000_000))
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("LOG", os.fspath(tmp_path / "log"))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", os.fspath(pipes))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sharing = gpu_sharing.Sharing(command, "cuda:1", model, [], tmp_path)
    rows = gpu_sharing.measure_sharing(sharing, lambda: True)
    results = [re.sub(r"\b\d+ MiB", "some MiB", row["result"]) for row in rows]
    assert results == [
        "0.02 GB/s to number 1; none visible: no device",
        "at least 0.02 GB/s each, at most some MiB of host memory each",
        "not here: no interpreter has a torch that can use this GPU",
        "0.02 GB/s to one instance", "0.02 GB/s alone, 0.02 GB/s each of two",
        "cuda:0 0.02 GB/s, cuda:1 0.02 GB/s; at once at least 0.02 GB/s each",
        "not here: no interpreter has a torch that can use this GPU"]
    devices = (tmp_path / "log").read_text().splitlines()
    assert devices[:9] == ["GPU-5 cuda:0", *[" cuda:1"] * 8]
    assert devices[9:15] == ["MIG-1-2-3 cuda:0", *[" cuda:1"] * 3, " cuda:0", " cuda:1"]
    assert sorted(devices[15:]) == [" cuda:0", " cuda:1"]
    assert {row["result"] for row in gpu_sharing.measure_sharing(sharing, lambda: False)} == {
        "not here: no time left"}
    command.write_text("#!/bin/sh\necho 'cuda:1: out | of\nmemory' >&2; exit 1\n")
    rows = gpu_sharing.measure_sharing(
        gpu_sharing.Sharing(command, "cuda:1", model, [], None), lambda: True)
    assert rows[2]["result"] == "not here: the extension was not built"
    assert rows[3]["result"] == "failed: RuntimeError: cuda:1: out / of memory"
    monkeypatch.setattr(gpu_sharing, "CELL_S", 0.5)
    command.write_text("#!/bin/sh\nexec sleep 1000\n")
    started = []
    monkeypatch.setattr(sharing, "_start", lambda *words, start=sharing._start: (
        started.append(start(*words)), started[-1])[1])
    assert "timed out after 0.5 seconds" in gpu_sharing.measure_sharing(
        sharing, lambda: True)[1]["result"]
    assert len(started) >= 9 and sharing.started == [] and sharing.outputs == {}
    assert all(process.wait(10) == -signal.SIGKILL for process in started)


def test_cells_of_several_processes_that_fail(tmp_path, monkeypatch):
    """A failure of any kind is a row of its own, and leaves no process."""
    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_sharing

    command = tmp_path / "load"
    engines = {"engines": [{"name": "cuda", "reason": "no driver", "usable": False},
                           {"name": "hip", "reason": "2 device(s), the first: H", "usable": True}]}
    command.write_text(f"""#!/bin/sh
[ $1 = engines ] && echo '{json.dumps(engines)}' && exit
echo noise >&2
[ -z "${{CUDA_VISIBLE_DEVICES-all}}" ] && echo no device && exit 1
head -c 1100000 /dev/zero >&2
head -c 1100000 /dev/zero
echo
echo '{{"seconds": 0.5}}'
""")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H (UUID: GPU-4)'\n")
    for tool in (smi, command):
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    model = tmp_path / "model"
    model.write_bytes(bytes(10_000_000))
    sharing = gpu_sharing.Sharing(command, "gpu", model, [], None)
    rows = {row["name"]: row["result"]
            for row in gpu_sharing.measure_sharing(sharing, lambda: True)}
    assert rows["GPU chosen by its UUID"].endswith("none visible: noise no device")
    assert rows["each GPU, all at once"].startswith("hip:0 0.02 GB/s, hip:1 0.02 GB/s; at once")
    command.write_text("#!/bin/sh\nkill -SEGV $$\n")
    rows = gpu_sharing.measure_sharing(sharing, lambda: True)
    assert rows[0]["result"].startswith("failed: RuntimeError: signal 11 ended it")
    command.write_text("#!/bin/sh\necho '[]'\n")
    rows = gpu_sharing.measure_sharing(sharing, lambda: True)
    assert len(rows) == 7
    assert rows[5]["result"].startswith("failed: TypeError")
    process = sharing._run(["sh", "-c", "sleep 1000 & echo $! && wait"], {})
    output = sharing.outputs[process.pid][0].fileno()
    while not os.fstat(output).st_size:
        time.sleep(0.01)
    child = int(os.pread(output, 20, 0))
    sharing.stop()
    end = time.monotonic() + 10
    while pathlib.Path(f"/proc/{child}/stat").exists() and time.monotonic() < end:
        if " Z " in pathlib.Path(f"/proc/{child}/stat").read_text():
            break
        time.sleep(0.01)
    else:
        assert not pathlib.Path(f"/proc/{child}").exists()


def test_program_that_sends_tensors(tmp_path, monkeypatch):
    """Torch's IPC needs a GPU; the same program sends tensors of the CPU by shared memory."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_sharing

    from fastsafetensors.torch import save_file

    save_file({f"t{i}": torch.arange(1000.0) + i for i in range(3)}, tmp_path / "model")
    program = tmp_path / "program.py"
    program.write_text(gpu_sharing.IPC_PROGRAM)
    done = subprocess.run([sys.executable, program, tmp_path / "model", "cpu"], text=True,
                          capture_output=True, timeout=300, check=False)
    assert done.stdout.startswith("3 tensors are equal; the first took "), done.stderr[-2000:]
    program.write_text(gpu_sharing.ONE_READ_PROGRAM)
    words = [tmp_path / "model", "cpu", "2", tmp_path / "store"]
    done = subprocess.run([sys.executable, program, *words], text=True, capture_output=True,
                          timeout=300, check=False)
    assert re.fullmatch(r"2 GPUs after [\d.]+ s by one read, after [\d.]+ s by 2\n",
                        done.stdout), done.stderr[-2000:]
