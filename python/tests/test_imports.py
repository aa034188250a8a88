# SPDX-License-Identifier: Apache-2.0
"""What an import of this package imports. Every module takes about 0.2 ms."""

import subprocess
import sys

import pytest


def modules_after(line, before="import sys"):
    code = (f"import sys\n{before}\nbefore = set(sys.modules)\n{line}\n"
            "print(*(set(sys.modules) - before))")
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return found.stdout.split()


def own(names):
    return [name for name in names if name.startswith("fastsafetensors")]


def test_package():
    assert len(own(modules_after("import fastsafetensors"))) <= 6


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_load_file_needs_no_module_of_streams_and_ranks(framework):
    pytest.importorskip(framework)
    names = modules_after(f"from fastsafetensors.{framework} import load_file",
                          f"import {framework}")
    assert not {"pathlib", "json", "difflib"} & set(names)
    found = own(names)
    unneeded = ("serialize", "module_weights", "rank_parts", "stream", "readahead", "open")
    assert not [name for name in found if name.rpartition(".")[2] in unneeded]
    # An import during the first save could be interrupted by a handler that saves.
    assert "fastsafetensors._saving.save_handles" in found
    assert len(found) <= 34


def test_saves_of_exit_handlers_are_awaited():
    """The handler that waits for them is registered before the program's, and so runs after it."""
    line = "import fastsafetensors.fast_loading"
    assert "fastsafetensors._saving.running_saves" in modules_after(line)


def test_load_sharded_needs_no_module_of_saves():
    pytest.importorskip("torch")
    found = own(modules_after("from fastsafetensors.distributed import load_sharded"))
    unneeded = ("ranks_save", "ranks_async", "publish")
    assert not [name for name in found if name.rpartition(".")[2] in unneeded]
    line = "import fastsafetensors.distributed as d; d.save_on_ranks, d.save_on_ranks_async"
    assert "fastsafetensors._ranks.ranks_async" in modules_after(line)
    lists_all = "import fastsafetensors.distributed as d; assert set(d.__all__) <= set(dir(d))"
    assert "fastsafetensors._ranks.ranks_async" not in modules_after(lists_all)
    with pytest.raises(AttributeError, match="'none'"):
        import fastsafetensors.distributed

        fastsafetensors.distributed.none  # noqa: B018
