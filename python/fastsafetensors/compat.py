# SPDX-License-Identifier: Apache-2.0
"""Replaces safetensors by this package, for programs that cannot be changed.

    import fastsafetensors.compat
    fastsafetensors.compat.install()      # `import safetensors.torch` now imports this package
    fastsafetensors.compat.uninstall()

Modules of safetensors that a program has already imported get this package's functions too. Names
that only the safetensors package has are taken from it, if it is installed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["install", "uninstall"]

_MODULES = ("torch", "numpy", "flax", "tensorflow", "mlx", "paddle")
# The version to report if safetensors is not installed.
_EMULATED_VERSION = "0.8.0"
_PACKAGE_NAMES = (
    "SafetensorError", "TensorSpec", "PrefetchLoader", "PySafeSlice", "TensorMeta",
    "_safe_open_handle", "deserialize", "safe_open", "serialize", "serialize_file",
)


def _version() -> str:
    try:
        return importlib.metadata.version("safetensors")
    except importlib.metadata.PackageNotFoundError:
        return _EMULATED_VERSION


def _core_names() -> dict[str, Any]:
    """The names of the safetensors package itself."""
    from . import SafetensorError, safe_open
    from ._loading.open import PrefetchLoader, TensorMeta, TensorSlice, _safe_open_handle
    from ._saving.serialize import TensorSpec, deserialize, serialize, serialize_file

    values = (SafetensorError, TensorSpec, PrefetchLoader, TensorSlice, TensorMeta,
              _safe_open_handle, deserialize, safe_open, serialize, serialize_file)
    return dict(zip(_PACKAGE_NAMES, values, strict=True))


def _private_names(name: str) -> dict[str, Any]:
    """Private names of safetensors.torch that libraries import."""
    if name != "torch":
        return {}
    from ._torch.tensor_memory import find_shared, find_tied
    from ._torch.torch_state import DTYPES_BY_NAME

    def remove_duplicate_names(
        state_dict: dict[str, Any], *, preferred_names: Any = None, discard_names: Any = None
    ) -> dict[str, list[str]]:
        """{name to keep: names to leave out}."""
        groups: dict[str, list[str]] = {}
        for left_out, kept in find_tied(state_dict).items():
            groups.setdefault(kept, [kept]).append(left_out)
        result = {}
        for kept, names in groups.items():
            whole = {n for n in names if state_dict[n].nbytes == state_dict[kept].nbytes}
            keep = min(whole & set(preferred_names or ()) or whole - set(discard_names or ())
                       or whole)
            result[keep] = [name for name in sorted(names) if name != keep]
        return result

    def find_shared_tensors(state_dict: dict[str, Any]) -> list[set[str]]:
        """Groups of names that share memory; others form groups of one."""
        groups = find_shared(state_dict)
        known = {name for group in groups for name in group}
        return groups + [{name} for name in state_dict if name not in known]

    return {
        "_TYPES": dict(DTYPES_BY_NAME),
        "_SIZE": {dtype: dtype.itemsize for dtype in DTYPES_BY_NAME.values()},
        "_find_shared_tensors": find_shared_tensors,
        "_remove_duplicate_names": remove_duplicate_names,
    }


def _names_of(name: str) -> dict[str, Any]:
    """The names of a safetensors module; "" is the package."""
    if not name or name == "_safetensors_rust":
        return {**_core_names(), "__version__": _version()}
    ours = importlib.import_module(f"fastsafetensors.{name}")
    public = {n: getattr(ours, n) for n in ours.__all__}
    return {**_core_names(), **_private_names(name), **public}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds safetensors.torch and similar modules as modules of this package, on import."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for replaced modules."""
        package, _, name = fullname.rpartition(".")
        if package != "safetensors" or name not in (*_MODULES, "_safetensors_rust"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a module with this package's names."""
        name = spec.name.partition(".")[2]
        module = types.ModuleType(spec.name, "fastsafetensors in place of safetensors")
        module.__dict__.update(_names_of(name))
        module.__dict__["__getattr__"] = _fallback(spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, because the names are set."""


class _Installed:
    """What install() has replaced."""

    def __init__(self) -> None:
        self.finder = _Finder()
        names = [n for n in sys.modules if n.partition(".")[0] == "safetensors"]
        self.kept = {name: sys.modules.pop(name) for name in names}
        self.changed: list[tuple[types.ModuleType, str, Any]] = []

    def reach(self) -> None:
        """Set this package's functions in modules that programs have already imported."""
        for full, module in self.kept.items():
            name = full.partition(".")[2]
            if name and name not in _MODULES:
                continue
            for key, value in _names_of(name).items():
                if not key.startswith("_") and hasattr(module, key):
                    self.changed.append((module, key, getattr(module, key)))
                    setattr(module, key, value)

    def undo(self) -> None:
        """Restore everything."""
        for module, key, value in self.changed:
            setattr(module, key, value)
        for name in [n for n in sys.modules if n.partition(".")[0] == "safetensors"]:
            del sys.modules[name]
        sys.modules.update(self.kept)

    def original(self, full: str) -> types.ModuleType:
        """Import a module of the installed safetensors package, under its own name."""
        if full not in self.kept:
            ours = {n: sys.modules.pop(n) for n in list(sys.modules)
                    if n.partition(".")[0] == "safetensors"}
            sys.meta_path.remove(self.finder)
            sys.modules.update(self.kept)
            try:
                importlib.import_module(full)
                self.kept.update({n: m for n, m in sys.modules.items()
                                  if n.partition(".")[0] == "safetensors"})
            finally:
                for name in self.kept:
                    sys.modules.pop(name, None)
                sys.modules.update(ours)
                sys.meta_path.insert(0, self.finder)
        return self.kept[full]


_installed: _Installed | None = None


def _fallback(full: str) -> Callable[[str], Any]:
    """Return a module's __getattr__, which searches the installed package."""

    def find(name: str) -> Any:
        missing = AttributeError(f"module {full!r} has no attribute {name!r}")
        # Names that Python itself queries, and submodules that are not imported.
        if name.startswith("__") or _installed is None or name in _MODULES:
            raise missing
        try:
            return getattr(_installed.original(full), name)
        except (ImportError, AttributeError):
            raise missing from None

    return find


def install() -> None:
    """Replace safetensors by this package in this process. Repeated calls are harmless.

    Names that a program has imported before (`from safetensors.torch import load_file`) are
    unchanged; see fastsafetensors.integrations for libraries that do this.
    """
    global _installed
    if _installed is not None:
        return
    names = _names_of("")
    _installed = _Installed()
    package = types.ModuleType("safetensors", "fastsafetensors in place of safetensors")
    package.__path__ = []
    package.__spec__ = importlib.machinery.ModuleSpec(
        "safetensors", _installed.finder, is_package=True
    )
    package.__dict__.update(names, __getattr__=_fallback("safetensors"))
    sys.modules["safetensors"] = package
    sys.meta_path.insert(0, _installed.finder)
    _installed.reach()


def uninstall() -> None:
    """Undo install()."""
    global _installed
    if _installed is None:
        return
    sys.meta_path.remove(_installed.finder)
    _installed.undo()
    _installed = None
