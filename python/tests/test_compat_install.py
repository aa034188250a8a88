# SPDX-License-Identifier: Apache-2.0
"""compat.install() as used by libraries: module specs, private names, modules imported earlier."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

import fastsafetensors.compat as compat
import fastsafetensors.torch as ours


@pytest.fixture
def installed():
    """Ours in place of safetensors for a test."""
    compat.install()
    yield
    compat.uninstall()


def test_module_has_a_spec(installed):
    for name in ("safetensors", "safetensors.torch"):
        importlib.import_module(name)
        assert importlib.util.find_spec(name) is not None
    import safetensors

    assert safetensors.__version__ == importlib.metadata.version("safetensors")


def test_names_that_libraries_import(installed, torch):
    from safetensors import TensorSpec, safe_open  # noqa: F401
    from safetensors._safetensors_rust import SafetensorError, serialize  # noqa: F401
    from safetensors.numpy import safe_open as third  # noqa: F401
    from safetensors.torch import (
        _SIZE,
        _TYPES,
        _find_shared_tensors,
        _remove_duplicate_names,
        load_file,
    )
    from safetensors.torch import safe_open as second

    import fastsafetensors

    assert load_file is ours.load_file and second is fastsafetensors.safe_open
    assert _TYPES["BF16"] is torch.bfloat16 and _SIZE[torch.bfloat16] == 2
    base = torch.ones(4)
    state = {"a": base, "b": base, "c": torch.ones(2)}
    assert sorted(map(sorted, _find_shared_tensors(state))) == [["a", "b"], ["c"]]
    assert _remove_duplicate_names(state) == {"a": ["b"]}
    assert _remove_duplicate_names(state, discard_names=["a"]) == {"b": ["a"]}
    assert _remove_duplicate_names(state, preferred_names=["b"]) == {"b": ["a"]}
    assert _remove_duplicate_names(state, discard_names=["a", "b"]) == {"a": ["b"]}
    state["b"] = base[:2]  # a part of the other: cannot be kept
    assert _remove_duplicate_names(state, preferred_names=["b"]) == {"a": ["b"]}


def test_names_missing_here_are_taken_from_the_package(installed, torch):
    import safetensors.torch

    assert callable(safetensors.torch._to_ndarray)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        safetensors.torch.nothing  # noqa: B018
    with pytest.raises(ImportError):
        from safetensors.torch import nothing  # noqa: F401
    assert safetensors.torch.load_file is ours.load_file  # ours is in place all the same


def test_already_imported_modules(torch):
    """As ComfyUI has it: `import safetensors.torch` at the top, custom nodes afterwards."""
    import safetensors
    import safetensors.torch

    held, theirs = safetensors, safetensors.torch.load_file
    compat.install()
    try:
        assert held.torch.load_file is ours.load_file
        assert held.safe_open is __import__("fastsafetensors").safe_open
    finally:
        compat.uninstall()
    assert held.torch.load_file is theirs and sys.modules["safetensors"] is held
    assert held.safe_open is not __import__("fastsafetensors").safe_open


@pytest.mark.parametrize("library", ["transformers", "accelerate", "diffusers", "peft"])
def test_libraries_import_and_load(library, tmp_path, torch):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    code = f"""
import fastsafetensors.compat; fastsafetensors.compat.install()
import {library}, importlib.util, torch
assert importlib.util.find_spec("safetensors")
from safetensors.torch import save_file, load_file
import fastsafetensors.torch
assert load_file is fastsafetensors.torch.load_file
save_file({{"w": torch.ones(2)}}, "w.safetensors", metadata={{"format": "pt"}})
if {library!r} == "accelerate":
    from accelerate.utils import load_state_dict
    assert load_state_dict("w.safetensors")["w"].tolist() == [1, 1]
if {library!r} == "transformers":
    from transformers.modeling_utils import load_state_dict
    assert load_state_dict("w.safetensors")["w"].tolist() == [1, 1]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_install_twice_and_uninstall(torch):
    import safetensors

    compat.install()
    compat.install()
    compat.uninstall()
    compat.uninstall()
    assert sys.modules["safetensors"] is safetensors
