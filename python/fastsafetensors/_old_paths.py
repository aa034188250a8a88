# SPDX-License-Identifier: Apache-2.0
"""Import paths of fastsafetensors 0.5: each one is an alias of a current module.

The modules exist only under the new paths; `fastsafetensors.loader` is the same module object as
`fastsafetensors.v05.loader`. The .pyi files in this folder describe them to type checkers.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys

TYPE_CHECKING = False  # type checkers take it for True; importing typing takes 5 ms

if TYPE_CHECKING:
    import types
    from collections.abc import Sequence
    from importlib.abc import Loader, MetaPathFinder

    class _Found(MetaPathFinder, Loader):
        """The interface of the import system."""

else:  # importlib.abc takes longer to import than the rest of this package
    _Found = object

# {old name: new name} within the package; includes modules inside packages.
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
    # 0.5 has one module for each reader; here they are one module.
    **{
        f"copier.{name}": "v05.copier.built_in"
        for name in ("fgds", "gds", "nogds", "threefs", "unified")
    },
    "_planner": "v05.batch_plan",
    "sharded": "distributed",
    "sharded_save": "_ranks.ranks_save",
}
_PACKAGE = __package__ or "fastsafetensors"


def new_path(old: str) -> str | None:
    """Return the new full name for an old one; None if it did not move."""
    package, _, rest = old.partition(".")
    if package != _PACKAGE:
        return None
    if rest in OLD_PATHS:
        return f"{_PACKAGE}.{OLD_PATHS[rest]}"
    head, dot, tail = rest.partition(".")
    return f"{_PACKAGE}.{OLD_PATHS[head]}{dot}{tail}" if head in OLD_PATHS else None


class _Finder(_Found):
    """Finds old names before the path is searched, so that no module is loaded twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for names that have moved."""
        if new_path(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module under its new name."""
        module = importlib.import_module(new_path(spec.name) or "")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module unchanged, under its own name."""
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make old names importable, once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
