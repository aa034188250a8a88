# SPDX-License-Identifier: Apache-2.0
"""One set of public names: `__all__`, help(), docs/python.md and the type hints agree."""

import dataclasses
import importlib
import inspect
import itertools
import pathlib
import re
import typing

import pytest
from conftest import ROOT

PACKAGE = ROOT / "python/fastsafetensors"
# Modules that need a framework or an engine that may be missing.
FRAMEWORKS = {"flax", "mlx", "paddle", "tensorflow", "vllm", "sglang"}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem[0] != "_")
PAGE = (ROOT / "docs/python.md").read_text()


# Classes whose objects only the package creates. Programs do not call their constructors.
MADE_HERE = {"Change", "PrefetchLoader", "ShardedTensors", "TensorSlice", "TensorStream"}


def _module(name):
    try:
        return importlib.import_module(f"fastsafetensors.{name}" if name else "fastsafetensors")
    except ImportError:
        if name not in FRAMEWORKS:
            raise
        pytest.skip(f"the framework of {name} is not installed")


def _modules():
    for name in ("", *MODULES):
        if name not in FRAMEWORKS:
            yield name, _module(name)


def _is_of_05(thing):
    return ".v05." in (getattr(thing, "__module__", None) or "")


def _callables():
    """(path, function) of everything public for new programs, methods included."""
    for name, module in _modules():
        for public in module.__all__:
            thing = getattr(module, public)
            if _is_of_05(thing) or not callable(thing) or isinstance(thing, typing.GenericAlias):
                continue
            if inspect.isclass(thing) and not issubclass(thing, tuple):
                is_made_here = dataclasses.is_dataclass(thing) or public in MADE_HERE
                for member, value in vars(thing).items():
                    value = getattr(value, "fget", value)
                    if member[0] == "_" and (member != "__init__" or is_made_here):
                        continue
                    if inspect.isfunction(value):
                        yield f"{name}.{public}.{member}", value
            elif inspect.isfunction(thing):
                yield f"{name}.{public}", thing


@pytest.mark.parametrize("name", MODULES)
def test_each_public_module_lists_its_names(name):
    module = _module(name)
    assert module.__doc__ and isinstance(module.__all__, (list, tuple)), name
    assert len(set(module.__all__)) == len(module.__all__)
    assert [public for public in module.__all__ if not hasattr(module, public)] == []


def test_the_reference_page_lists_the_same_names(torch):
    rows = dict(re.findall(r"^\| `fastsafetensors\.?(\w*)` \| (.*) \|$", PAGE, re.M))
    listed = {name: set(re.findall(r"`(\w+)`", row)) for name, row in rows.items()}
    assert set(listed) == {"", *MODULES}
    for name, module in _modules():
        assert listed[name] == set(module.__all__) - {"__version__"}, name


def _screen(text):
    """The names of the block that begins with load_file, and those of modules, of a text."""
    names = re.findall(r"^ {4}(\w+)\(.*?\) {2,}", text, re.M)
    return names, re.findall(r"^ {4}(\w+) {2,}\S", text, re.M)


def test_names_for_new_programs_fit_a_screen_and_agree(torch):
    import fastsafetensors

    text = inspect.getdoc(fastsafetensors)
    block = text[text.index("What new programs use"):text.index("Checks:")].strip()
    assert len(block.splitlines()) <= 24
    assert block in PAGE
    functions, modules = _screen(block)
    assert len(functions) == 7 and len(modules) == 7
    for name in functions:
        assert name in fastsafetensors.__all__
        assert not _is_of_05(getattr(fastsafetensors, name))
    assert set(modules) <= set(MODULES)
    for name in re.findall(r"(\w+)\(\)", text[text.index("Checks:"):]):
        assert name in {*fastsafetensors.__all__, "install", "help"}, name


def _names_of(hint):
    """Return the words in a type hint that name a class or an alias."""
    return set(re.findall(r"\b[A-Z]\w+", hint if isinstance(hint, str) else ""))


def test_types_in_public_signatures_are_public(torch):
    """No annotation of a public function leads to a class that only a private path has."""
    public = {getattr(module, name) for _, module in _modules() for name in module.__all__
              if inspect.isclass(getattr(module, name))}
    words = {name for _, module in _modules() for name in module.__all__}
    from_elsewhere = {"Any", "None", "Path", "Paths", "Callable", "Iterable", "Iterator", "Mapping",
                      "Sequence", "PathLike", "True", "False"}
    checked = 0
    for where, function in _callables():
        for hint in function.__annotations__.values():
            for word in _names_of(hint) - words - from_elsewhere:
                home = function.__globals__.get(word)
                own = getattr(home, "__module__", "") or ""
                assert not own.startswith("fastsafetensors"), (where, hint)
            checked += 1
        result = function.__globals__.get(str(function.__annotations__.get("return")))
        if inspect.isclass(result) and result.__module__.startswith("fastsafetensors"):
            assert result in public, (where, result)
    assert checked > 200


def test_parameters_have_one_order(torch):
    """Two parameters that may be given by position have the same order everywhere."""
    first = {}
    for where, function in _callables():
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        names = [p.name for p in inspect.signature(function).parameters.values()
                 if p.kind in kinds and p.name not in ("self", "cls")]
        for pair in itertools.combinations(names, 2):
            assert pair[::-1] not in first, (pair, where, first[pair[::-1]])
            first.setdefault(pair, where)
    assert len(first) > 50


# Parameters that few programs need are keyword-only in every function.
BY_KEYWORD = {"alignment", "allocator", "at_exit", "cache", "compress", "dtype", "durable",
              "engine", "gds", "memory", "mode", "names", "filter", "overlap", "pin_memory", "pool",
              "progress", "share", "share_grace", "stage", "strategy", "threads", "verify"}
# StagingPool(memory) and verifying(verify) have no other parameter.
POSITIONS = {("async_save.StagingPool.__init__", "memory"), (".verifying", "verify"),
             ("lazy.LazyTensor.__init__", "dtype"), (".safe_open.read_ahead", "threads")}


def test_rare_parameters_are_keyword_only(torch):
    wrong = {(where, p.name) for where, function in _callables()
             for p in inspect.signature(function).parameters.values()
             if p.name in BY_KEYWORD and p.kind is p.POSITIONAL_OR_KEYWORD}
    assert wrong - POSITIONS == set()
    assert wrong == POSITIONS & wrong


# Keyword parameters have this order everywhere. Those that only one function has come before them.
GROUPS = {
    "what": ("names", "filter", "changed", "version", "base_version"),
    "its form": ("dtype", "alignment", "compress", "encoding", "checksum", "dialect", "level",
                 "filename_pattern", "max_shard_size"),
    "memory": ("backend", "mode", "assign", "stage", "memory", "ready", "pool", "allocator",
               "pin_memory", "share", "share_grace"),
    "reads and writes": ("cache", "engine", "gds", "strategy", "threads", "copy_threads", "nice"),
    "safety": ("verify", "durable", "manifest"),
    "waiting": ("overlap", "at_exit", "timeout", "progress"),
}


def test_parameters_by_keyword_are_grouped(torch):
    order = {name: i for i, name in enumerate(itertools.chain(*GROUPS.values()))}
    seen = set()
    for where, function in _callables():
        names = [p.name for p in inspect.signature(function).parameters.values()
                 if p.kind is p.KEYWORD_ONLY and not where.startswith("remote.")]
        assert names == sorted(names, key=lambda name: order.get(name, -1)), where
        seen |= set(names)
    assert set(order) <= seen


def test_options_are_named_in_signatures(torch):
    """Only functions that override a method of torch or of a trainer accept arbitrary keywords.

    The __init__() that Python gives every Protocol is not counted.
    """
    takes_any = {where for where, function in _callables()
                 if any(p.kind is p.VAR_KEYWORD
                        for p in inspect.signature(function).parameters.values())}
    assert {where for where in takes_any
            if not where.startswith("checkpoint.FastSafetensors")} == {
                "training.trainer_callback", "types.Progress.__init__"}


def _types_of(parameter):
    """Return {function: type} of a parameter in all functions."""
    return {where: p.annotation for where, function in _callables()
            for p in inspect.signature(function).parameters.values() if p.name == parameter}


# A parameter has one type. Functions that accept less, or require more, are listed here.
ONE_TYPE = {"threads": {"int"}, "durable": {"bool"}, "cache": {"str"}, "engine": {"str"},
            "alignment": {"int | str"}, "timeout": {"float | None", "float"},
            "memory": {"int | str", "int | str | None"}, "gds": {"str"},
            "names": {"Iterable[str] | None"}, "filter": {"Callable[[str], bool] | None"},
            "max_shard_size": {"int | str"}, "allocator": {"str"}, "pin_memory": {"bool"},
            "share": {"str"}, "share_grace": {"int"}}


@pytest.mark.parametrize("parameter", ONE_TYPE)
def test_a_parameter_has_one_type(parameter, torch):
    found = _types_of(parameter)
    assert found
    assert {where: hint for where, hint in found.items()
            if hint not in ONE_TYPE[parameter]} == {}


def test_names_of_05_say_so(torch):
    """Top-level names that exist for fastsafetensors 0.5, and its modules."""
    import fastsafetensors

    seen = 0
    for public in fastsafetensors.__all__:
        thing = getattr(fastsafetensors, public)
        if _is_of_05(thing):
            head = "\n".join(inspect.getdoc(thing).splitlines()[:5])
            assert "fastsafetensors 0.5" in head, public
            seen += 1
    assert seen >= 17
    for path in PACKAGE.glob("v05/**/*.py"):
        text = path.read_text()
        assert "0.5" in text[text.index('"""'):][:400].split('"""')[1], path


def test_nothing_is_built_on_the_interface_of_05():
    """It is an adapter: only the package's list of names and old paths know it."""
    for path in PACKAGE.rglob("*.py"):
        if "v05" in path.parts or path.name in ("__init__.py", "_old_paths.py"):
            continue
        assert not re.search(r"^\s*(from|import) \S*v05", path.read_text(), re.M), path


def test_names_of_safetensors_say_so(torch):
    from fastsafetensors import safe_open
    from fastsafetensors.torch import storage_ptr, storage_size
    from fastsafetensors.types import PrefetchLoader, TensorMeta

    for thing in (storage_ptr, storage_size, safe_open.offset_keys, safe_open.get_tensor_meta,
                  safe_open.prefetch, PrefetchLoader, TensorMeta):
        assert "as in safetensors" in inspect.getdoc(thing).splitlines()[0].lower(), thing


def test_the_stub_of_the_extension_has_its_names(torch):
    """_core.pyi declares exactly the names that the C extension has."""
    import ast

    from fastsafetensors import _core

    tree = ast.parse(pathlib.Path(PACKAGE / "_core.pyi").read_text())
    declared = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            declared.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            declared.add(node.target.id)
    real = {name for name in dir(_core) if not name.startswith("__")}
    assert real - declared == set()
    assert declared - real - {"SaveRow"} == set()
