# SPDX-License-Identifier: Apache-2.0
"""The command that was installed with this package: finding it, and its answers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sysconfig
from typing import Any

from ._core import error_class


def find_command() -> str | None:
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



def ask_command(*arguments: str | bytes, good: tuple[int, ...] = (0,)) -> Any:
    """Run the command and return its answer, parsed from JSON ({} without one); Ctrl-C ends it.

    SafetensorError for an exit code that is not among the good ones, FileNotFoundError where the
    command is not installed.
    """
    path = find_command()
    if path is None:
        raise FileNotFoundError(2, "the command is not installed beside this package",
                                "fastsafetensors")
    done = subprocess.run([path, *arguments], capture_output=True)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {}
    if done.returncode in good:
        return answer
    failure = answer.get("error") or {}
    text = failure.get("message") or done.stderr.decode(errors="replace").strip()
    number = failure.get("errno")
    if number:
        raise OSError(number, os.strerror(number), failure.get("file"))
    raise error_class()(text or f"the command ended with code {done.returncode}")
