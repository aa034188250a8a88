# SPDX-License-Identifier: Apache-2.0
"""Type checkers accept every example of the documents, and infer tensors."""

import pathlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT

TYPES = """
import numpy, torch
import fastsafetensors
from fastsafetensors import SafeTensorsFileLoader, fast_loading, safe_open
from fastsafetensors.numpy import load_file as load_arrays
from fastsafetensors.torch import load_file, save_file

tensors: dict[str, torch.Tensor] = load_file("m.st", names=["a"], dtype=torch.bfloat16)
arrays: dict[str, numpy.ndarray] = load_arrays("m.st")
rows: dict[str, torch.Tensor] = fast_loading.load_safetensors("m.st")
save_file(tensors, b"m.st", {"a": "b"}, durable=True)
header: fastsafetensors.Header = fastsafetensors.read_header(["a", "b"])
problems: list[fastsafetensors.Problem] = fastsafetensors.verify_file("m.st")
with safe_open("m.st", framework="pt") as f:
    f.get_slice("a")[1:2, ...]
"""
# Programs with one type error each, which a checker must find.
FAULTS = [
    "from fastsafetensors import load_fil",
    "from fastsafetensors.torch import load_file; load_file('m', nmaes=['a'])",
    "from fastsafetensors.torch import load_file; load_file('m')['a'].no_such_method()",
    "from fastsafetensors.torch import save_file; save_file(['a'], 'm')",
    "import fastsafetensors; fastsafetensors.edit_header('m', {'a': 1})",
]


def _checker(name):
    """The command of a checker in this Python's environment."""
    beside = pathlib.Path(sys.executable).with_name(name)
    if not beside.exists():
        pytest.skip(f"{name} is not installed")
    if name == "mypy":
        return [beside, "--no-error-summary", "--ignore-missing-imports", "--check-untyped-defs"]
    return [beside, "--level", "error", "--pythonpath", sys.executable]


@pytest.fixture(params=["mypy", "basedpyright"])
def check(request, tmp_path):
    """A function that checks files in a separate folder: (exit code, output)."""
    command = _checker(request.param)

    def run(*paths):
        done = subprocess.run([*command, *paths], cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_every_example_of_the_documents(check, tmp_path):
    paths = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
        for number, block in enumerate(blocks):
            paths.append(tmp_path / f"{page.stem.lower()}_{number}.py")
            paths[-1].write_text(block)
    assert len(paths) > 12
    code, said = check(*paths)
    assert code == 0, said


def test_tensors_are_tensors(check, tmp_path, torch):
    (tmp_path / "types_of.py").write_text(TYPES)
    code, said = check("types_of.py")
    assert code == 0, said


def test_type_errors_are_found(check, tmp_path, torch):
    for number, fault in enumerate(FAULTS):
        (tmp_path / f"fault_{number}.py").write_text(fault + "\n")
    code, said = check(*(f"fault_{number}.py" for number in range(len(FAULTS))))
    assert code != 0
    missed = [fault for number, fault in enumerate(FAULTS) if f"fault_{number}.py" not in said]
    assert not missed, said
