# SPDX-License-Identifier: Apache-2.0
"""help() documents arguments, results and exceptions of every public function."""

import dataclasses
import importlib
import inspect
import re

import pytest

MODULES = ("", ".torch", ".numpy", ".fast_loading", ".distributed", ".integrations")


def _functions(torch):
    """Public functions, except those of fastsafetensors 0.5, which its own documentation
    describes."""
    for name in MODULES:
        module = importlib.import_module(f"fastsafetensors{name}")
        for public in module.__all__:
            thing = getattr(module, public)
            if inspect.isfunction(thing) and ".v05." not in thing.__module__:
                yield thing


def _section(text, title):
    found = re.search(rf"^{title}:\n((?: .*\n|\n)+)", text + "\n", re.M)
    return found[1] if found else ""


def test_arguments_results_and_errors(torch):
    from fastsafetensors.torch import storage_ptr, storage_size

    plain = {storage_ptr, storage_size, importlib.import_module(
        "fastsafetensors.fast_loading").is_fastsafetensors_available}
    seen = 0
    for function in _functions(torch):
        text = inspect.getdoc(function)
        signature = inspect.signature(function)
        if function in plain or function.__module__.endswith(".rank_parts"):
            continue
        listed = re.findall(r"^    (\w+): ", _section(text, "Args"), re.M)
        assert listed == list(signature.parameters), function
        returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
        assert returns == bool(_section(text, "Returns")), function
        saves_like = "errors and promises are" in text.partition("Args:")[0]
        assert _section(text, "Raises") or saves_like, function
        seen += 1
    assert seen > 20


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_listed(module, torch):
    found = importlib.import_module(f"fastsafetensors{module}")
    assert set(found.__all__) <= set(dir(found))
    assert all(getattr(found, name) is not None for name in found.__all__)


def test_view_semantics_are_documented(torch, tmp_path):
    """The two places that say what a load to the CPU gives agree with what it gives."""
    from conftest import ROOT

    from fastsafetensors import _core
    from fastsafetensors.torch import load_file, save_file

    words = "cached or not"
    assert words in inspect.getdoc(load_file)
    assert words in " ".join((ROOT / "docs/python.md").read_text().split())
    save_file({"a": torch.zeros(1 << 20)}, tmp_path / "m.st")
    for mode, got in (("auto", "map"), ("load", "load")):
        assert _core.Model(tmp_path / "m.st").load(mode=mode).stats()["mode"] == got


# Words of other libraries that have one word here: {word: names in which it may occur}.
OTHER_WORDS = {
    "num_threads": {"load_safetensors"}, "max_threads": set(), "nthreads": set(), "fsync": set(),
    "files": set(), "filenames": set(), "paths": set(), "hf_weights_files": set(), "pg": set(),
    "process_group": set(), "keys": {"load_safetensors_mmap"}, "tensor_filter": set(),
    "bar": set(), "callback": set(), "torch_dtype": set(), "cache_dir": set(), "align": set(),
    "path": {"load_safetensors", "load_safetensors_mmap", "save_safetensors",
             "save_embeddings_safetensors", "load_embeddings_safetensors",
             "FastSafetensorsReader", "FastSafetensorsWriter"},
    "model_dir": {"load_safetensors_sharded"},
    "output_dir": {"save_safetensors_sharded", "save_safetensors_sharded_async"},
}


def test_terms_are_consistent(torch):
    """Parameters and documents use one word for one thing, such as threads, filename and group."""
    seen = set()
    for name in (*MODULES, ".checkpoint", ".flax"):
        try:
            module = importlib.import_module(f"fastsafetensors{name}")
        except ModuleNotFoundError:
            continue  # jax
        for public in module.__all__:
            thing = getattr(module, public)
            theirs = ".v05." in getattr(thing, "__module__", "")
            if theirs or not callable(thing) or dataclasses.is_dataclass(thing):
                continue
            try:
                words = set(inspect.signature(thing).parameters)
            except ValueError:
                continue
            wrong = {word for word in words if public not in OTHER_WORDS.get(word, {public})}
            assert not wrong, (name, public, wrong)
            seen |= words
    assert {"threads", "filename", "group", "durable", "names", "filter", "alignment"} <= seen
