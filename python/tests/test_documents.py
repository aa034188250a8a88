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


def test_every_row_of_the_threat_model_has_its_test():
    root = PAGE.parents[1]
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", (root / "SECURITY.md").read_text(), re.M)
    assert len(rows) > 15
    sources = {path.name: path.read_text() for folder in ("tests", "python/tests")
               for path in (root / folder).rglob("test_*.[cp]*") if path.suffix in (".c", ".py")}
    for row in rows[1:]:
        named = re.findall(r"`(test_\w+\.\w+)::(\w+)`", row)
        assert named or set(row) <= {"-", "|"}, row
        for file, test in named:
            assert f"TEST({test})" in sources[file] or f"def {test}(" in sources[file], (file, test)
