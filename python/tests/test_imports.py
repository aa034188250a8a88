# SPDX-License-Identifier: Apache-2.0
"""What an import of this package imports. Every module takes about 0.2 ms."""

import json
import subprocess
import sys


def modules_after(line):
    code = (f"{line}\nimport json, sys\n"
            "print(json.dumps([name for name in sys.modules if name.startswith('fastsafe')]))")
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


def test_package():
    assert len(modules_after("import fastsafetensors")) <= 6


def test_load_file_needs_no_module_of_saves_and_ranks():
    found = modules_after("from fastsafetensors.torch import load_file")
    unneeded = ("save_handles", "module_weights", "rank_parts", "stream", "readahead", "open")
    assert not [name for name in found if name.rpartition(".")[2] in unneeded]
    assert len(found) <= 30
