# SPDX-License-Identifier: Apache-2.0
"""Names of a module that are imported on first access, because many programs do not use them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    namespace: dict[str, Any], places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions __getattr__ and __dir__ of a module (PEP 562).

    namespace: the module's globals(). places: {name: module of the package that defines it}.
    """
    package = __name__.partition(".")[0]

    def get(name: str) -> Any:
        """Import a name on first access."""
        if name not in places:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{places[name]}"), name)
        namespace[name] = found
        return found

    def list_names() -> list[str]:
        """List the lazy names too."""
        return sorted({*namespace, *places})

    return get, list_names
