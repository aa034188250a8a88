# SPDX-License-Identifier: Apache-2.0
"""``python -m fastsafetensors ...``: the command that was installed with this package."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig


def _find_command() -> str | None:
    """Return the command's path: by the package's own list of files, else where scripts go."""
    # Beside the package is where `pip install --target` puts it.
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin")
    candidates = [os.path.join(folder, "fastsafetensors")
                  for folder in (beside, sysconfig.get_path("scripts"))]
    try:
        files = importlib.metadata.files("fastsafetensors") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    own = [os.fspath(file.locate()) for file in files
           if file.name == "fastsafetensors" and file.parent.name == "bin"]
    for path in [*own, *candidates]:
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return os.path.abspath(path)
    return None


def main() -> int:
    """Become the command; return only when there is none."""
    path = _find_command()
    if path is None:
        print("fastsafetensors: the command is not installed beside this package", file=sys.stderr)
        return 4
    os.execv(path, ["fastsafetensors", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
