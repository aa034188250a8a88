# SPDX-License-Identifier: Apache-2.0
"""Empty modules that replace an engine's compiled ones, so that its Python code can be imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class _Meta(type):
    """A metaclass whose classes have every requested attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _placeholder(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _placeholder(name: str) -> Any:
    def schema(cls: Any, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    return _Meta(name, (), {
        "__get_pydantic_core_schema__": classmethod(schema), "__call__": call,
        "__init__": lambda self, *args, **kwargs: None,
        "__class_getitem__": classmethod(lambda cls, key: cls),
        "__getattr__": lambda self, name: _placeholder(name)(),
    })


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names or name in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        module = _Stub(spec.name)
        module.__version__ = "9.9.9"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(names: set[str]) -> None:
    """Make these modules, and all below them, importable and empty."""
    sys.meta_path.insert(0, _Finder(names))
