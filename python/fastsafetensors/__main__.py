# SPDX-License-Identifier: Apache-2.0
"""``python -m fastsafetensors ...``: the command that was installed with this package."""

from __future__ import annotations

import os
import sys

from ._base.command import find_command


def main() -> int:
    """Replace this process by the command. Return only if it is not installed."""
    path = find_command()
    if path is None:
        print("fastsafetensors: the fastsafetensors command is not installed next to this "
              "package", file=sys.stderr)
        return 4
    os.execv(path, ["fastsafetensors", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
