# SPDX-License-Identifier: Apache-2.0
"""tools/check_abi.py accepts additions to the interface and rejects every other change."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("check_abi", ROOT / "tools/check_abi.py")
check_abi = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_abi)
BEFORE = (ROOT / "tests/header/abi-1.txt").read_text().splitlines()


def faults(old, new):
    """Return the output of the check if a line of the interface is replaced."""
    assert old in BEFORE, old
    return check_abi.compare(BEFORE, [new if line == old else line for line in BEFORE])


def line_of(beginning):
    """Return the line with this beginning."""
    return next(line for line in BEFORE if line.startswith(beginning))


def test_breaking_changes_are_found():
    """Numbers, sizes, offsets and prototypes may neither change nor be removed."""
    assert check_abi.compare(BEFORE, BEFORE) == []
    assert faults("number FST_DTYPE_U8 4", "number FST_DTYPE_U8 5")
    assert faults("number FST_E_IO 12", "number FST_E_OTHER 12")
    size = line_of("struct fst_error ")  # it never changes
    assert faults(size, f"struct fst_error {int(size.split()[2]) + 8}")
    offset = line_of("field fst_tensor_view.data ")
    assert faults(offset, offset.replace(".data ", ".bytes "))
    assert faults(line_of("field fst_load_options.mode "), "field fst_load_options.mode 12 4")
    prototype = line_of("declared fst_status fst_save(")
    assert faults(prototype, prototype.replace("size_t", "uint32_t"))


def test_additions_pass():
    """New numbers and functions; structs with struct_size that grow."""
    more = [*BEFORE, "number FST_E_NEW 99", "declared int fst_new(void)"]
    assert check_abi.compare(BEFORE, more) == []
    size = line_of("struct fst_load_options ")
    assert faults(size, f"struct fst_load_options {int(size.split()[2]) + 8}") == []
    assert faults(size, f"struct fst_load_options {int(size.split()[2]) - 8}")
