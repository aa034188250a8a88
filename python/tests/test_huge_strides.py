# SPDX-License-Identifier: Apache-2.0
"""Tensors without elements whose strides don't fit into 64 bits, through every API."""

import json
import struct

import pytest
from torch_processes import run_together

pytest.importorskip("torch")

# Runs in a subprocess, because torch has aborted the process for such tensors.
PROGRAM = """
import pathlib, sys
import fastsafetensors
from fastsafetensors import lazy, numpy, torch
path = pathlib.Path(sys.argv[1])
opened = fastsafetensors.safe_open(path, "pt")
loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), "cpu")
loader.add_filenames({0: [str(path)]})
calls = [
    lambda: torch.load_file(path), lambda: torch.load_file(path, mode="load"),
    lambda: torch.load_file(path, dtype="F32"), lambda: torch.load(path.read_bytes()),
    lambda: opened.get_tensor("w"), lambda: opened.get_slice("w")[:0],
    lambda: list(torch.open_stream(path)), lambda: numpy.load_file(path),
    lambda: loader.copy_files_to_device().get_tensor("w"),
    lambda: lazy.LazyModel(path)["w"].sum(), lambda: torch.load_file(path, device="meta"),
]
for number, call in enumerate(calls):
    try:
        call()
    except (BufferError, ValueError, RuntimeError) as error:
        assert len(str(error)) < 200, error
        print(number, type(error).__name__, flush=True)
    else:
        print(number, "loaded", flush=True)
"""


@pytest.mark.parametrize("shape", [[0, 2**62, 8], [0, 2**32, 2**32], [0, 2**63 - 1, 2],
                                   [0, 2, 2**63 - 1], [3, 0, 2**62, 4], [2, 2**32, 0, 2**32],
                                   [3, 2**31, 0, 2**32, 7], [0, 2**63 - 1, 0, 2], [2**63, 0],
                                   [0, 2**62]],
                         ids=str)
def test_strides_that_are_too_large(shape, tmp_path):
    """An error or a tensor, never the end of the process."""
    header = json.dumps({"w": {"dtype": "F16", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    (done,) = run_together(PROGRAM, [[path]], 300)
    assert done.status == 0, done
    said = dict(line.split() for line in done.stdout.splitlines())
    assert len(said) == 11, done.stdout
    large = shape != [0, 2**62]
    numbers = "01349" if shape[0] == 2**63 else "013459"  # its slice is an ordinary tensor
    assert all((said[number] == "BufferError") == large for number in numbers), said
