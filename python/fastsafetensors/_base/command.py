# SPDX-License-Identifier: Apache-2.0
"""Find and run the command that was installed with this package."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sysconfig
from typing import Any, NoReturn

from .errors import refuse


def find_command() -> str | None:
    """Return the command's path, from the package's list of files, or from the folder of
    scripts.
    """
    # `pip install --target` puts it next to the package.
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sibling = os.path.join(os.path.dirname(package), "bin")
    candidates = [os.path.join(folder, "fastsafetensors")
                  for folder in (sibling, sysconfig.get_path("scripts"))]
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
    """Run the command and return its JSON output ({} without output). Ctrl-C ends it.

    For another exit code than those in `good` raise the error that the command reports, of the
    class that the library raises for it. FileNotFoundError if the command is not installed.
    """
    path = find_command()
    if path is None:
        raise FileNotFoundError(2, "the command is not installed next to this package",
                                "fastsafetensors")
    done = subprocess.run([path, *arguments], capture_output=True)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {}
    if done.returncode in good:
        return answer
    problems = answer.get("errors") or [{}]
    raise_error(answer.get("error") or problems[0],
                done.stderr.decode(errors="replace").strip()
                or f"the command ended with code {done.returncode}")


def raise_error(failure: dict[str, Any], text: str = "") -> NoReturn:
    """Raise the error that the command's JSON output describes; `text`: if it has no message."""
    number = failure.get("errno")
    if number:
        raise OSError(number, os.strerror(number), failure.get("file"))
    refuse(failure.get("message") or text, failure.get("kind", ""), failure.get("file", ""))
