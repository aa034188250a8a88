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


@pytest.fixture(scope="module")
def folder(tmp_path_factory, torch):
    """Programs to check: the documents' examples, one with declared types, those with errors."""
    folder = tmp_path_factory.mktemp("typing")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
        for number, block in enumerate(blocks):
            (folder / f"example_{page.stem.lower()}_{number}.py").write_text(block)
    (folder / "types_of.py").write_text(TYPES)
    for number, fault in enumerate(FAULTS):
        (folder / f"fault_{number}.py").write_text(fault + "\n")
    return folder


@pytest.fixture(scope="module", params=["mypy", "basedpyright"])
def errors(request, folder):
    """What a checker says of all programs in one run, because it reads torch for half a minute."""
    paths = sorted(path.name for path in folder.glob("*.py"))
    done = subprocess.run([*_checker(request.param), *paths], cwd=folder, capture_output=True,
                          text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if "error" in line]


def test_every_example_of_the_documents(errors, folder):
    assert len(list(folder.glob("example_*.py"))) > 12
    assert [line for line in errors if "example_" in line] == []


def test_tensors_are_tensors(errors):
    assert [line for line in errors if "types_of" in line] == []


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=FAULTS)
def test_type_errors_are_found(errors, number):
    assert [line for line in errors if f"fault_{number}.py" in line] != []
