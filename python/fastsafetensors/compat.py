# SPDX-License-Identifier: Apache-2.0
"""This package in place of safetensors, for programs that can't be changed.

    import fastsafetensors.compat
    fastsafetensors.compat.install()      # from here on `import safetensors.torch` is ours
    fastsafetensors.compat.uninstall()
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

_MODULES = ("torch", "numpy", "flax", "tensorflow", "mlx", "paddle")
_kept: dict[str, types.ModuleType] | None = None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds safetensors.torch and its like as modules of this package, when they are asked for."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the modules that are replaced."""
        package, _, name = fullname.rpartition(".")
        if package != "safetensors" or name not in _MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a module with our module's names."""
        ours = importlib.import_module(spec.name.replace("safetensors", "fastsafetensors", 1))
        module = types.ModuleType(spec.name, ours.__doc__)
        module.__dict__.update({k: v for k, v in vars(ours).items() if not k.startswith("__")})
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the names are there."""


_finder = _Finder()


def _make_package() -> types.ModuleType:
    from . import SafetensorError, __version__, safe_open
    from ._open import _safe_open_handle
    from ._serialize import TensorSpec, deserialize, serialize, serialize_file

    package = types.ModuleType("safetensors", "fastsafetensors in place of safetensors")
    package.__path__ = []
    package.__dict__.update(
        SafetensorError=SafetensorError,
        TensorSpec=TensorSpec,
        __version__=__version__,
        _safe_open_handle=_safe_open_handle,
        deserialize=deserialize,
        safe_open=safe_open,
        serialize=serialize,
        serialize_file=serialize_file,
    )
    return package


def _ours_and_theirs() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "safetensors"]


def install() -> None:
    """Put this package in place of safetensors for the process; twice is fine.

    What a program has imported by name before stays what it was.
    """
    global _kept
    if _kept is not None:
        return
    package = _make_package()
    _kept = {name: sys.modules.pop(name) for name in _ours_and_theirs()}
    sys.modules["safetensors"] = package
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo install(): safetensors is again what it was."""
    global _kept
    if _kept is None:
        return
    sys.meta_path.remove(_finder)
    for name in _ours_and_theirs():
        del sys.modules[name]
    sys.modules.update(_kept)
    _kept = None
