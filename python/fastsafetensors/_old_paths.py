# SPDX-License-Identifier: Apache-2.0
"""Where programs for earlier versions import from: each path is the module that is there now.

The modules themselves are under the new paths only; what was `fastsafetensors.loader` is the very
module `fastsafetensors.v05.loader`. The .pyi files beside this one tell type checkers the same.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder

    class _Found(MetaPathFinder, Loader):
        """What the import system calls."""

else:  # importlib.abc takes longer to import than all the rest of this package
    _Found = object

# {old name: new name}, both within the package; modules inside of packages go with them.
OLD_PATHS = {
    **{
        name: f"v05.{name}"
        for name in (
            "allocation",
            "auto_loader",
            "common",
            "config",
            "copier",
            "cpp",
            "dlpack",
            "ep_slice",
            "file_buffer",
            "frameworks",
            "loader",
            "parallel_loader",
            "saver",
            "st_types",
            "tensor_factory",
            "threefs_loader",
        )
    },
    # 0.5 has a module for each of its readers; here all of them are one.
    **{
        f"copier.{name}": "v05.copier.built_in"
        for name in ("fgds", "gds", "nogds", "threefs", "unified")
    },
    "_planner": "v05.batch_plan",
    "sharded": "distributed",
    "sharded_save": "_ranks_save",
}
_PACKAGE = __package__ or "fastsafetensors"


def new_path(old: str) -> str | None:
    """Return the full new name for a full old one; None for what did not move."""
    package, _, rest = old.partition(".")
    if package != _PACKAGE:
        return None
    if rest in OLD_PATHS:
        return f"{_PACKAGE}.{OLD_PATHS[rest]}"
    head, dot, tail = rest.partition(".")
    return f"{_PACKAGE}.{OLD_PATHS[head]}{dot}{tail}" if head in OLD_PATHS else None


class _Finder(_Found):
    """Finds old names: before the path is searched, so that no module is there twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for names that have moved."""
        if new_path(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module at its new place."""
        module = importlib.import_module(new_path(spec.name) or "")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module as it is, under its own name."""
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Let old names be imported; once a process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
