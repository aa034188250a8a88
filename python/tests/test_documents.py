# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/python.md run, each in a folder and a process of its own."""

import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs/python.md"
EXAMPLES = re.findall(r"^## (.*?)$.*?```python\n(.*?)```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_example(title, code, tmp_path, torch):
    from fastsafetensors.torch import save_file

    save_file({"weight": torch.ones(8, 4), "bias": torch.zeros(8)}, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
