#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""get_receivers.py FOLDER: puts programs that apply weight deltas into a folder, for the tests.

ModelExpress, with what its senders and receivers import (not its GPU and storage libraries), and
the one file of vLLM that loads checkpoint patches. About 360 MB are downloaded and 65 MB kept.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import zipfile

MODELEXPRESS = "modelexpress==0.7.0"
IMPORTED_BY_IT = ["boto3", "google-crc32c", "grpcio", "protobuf<7"]
VLLM = "vllm==0.33.0"
VLLM_FILE = "vllm/model_executor/model_loader/checkpoint_weight_patch.py"
LIMIT_S = 150


def pip(*arguments: str) -> None:
    """Run pip; raise CalledProcessError or TimeoutExpired."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
                   check=True, timeout=LIMIT_S)


def get_vllm(folder: pathlib.Path) -> None:
    """Keep one file of vLLM's package. It imports nothing but torch."""
    pip("download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder), VLLM)
    for wheel in folder.glob("vllm-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(VLLM_FILE)
        (folder / pathlib.PurePath(VLLM_FILE).name).write_bytes(text)
        wheel.unlink()


def main() -> int:
    """Fill the folder."""
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    into = ("install", "-q", "--upgrade", "--target", str(folder))
    try:
        pip(*into, "--no-deps", MODELEXPRESS)
        pip(*into, *IMPORTED_BY_IT)
        get_vllm(folder)
    except (subprocess.SubprocessError, OSError, KeyError) as error:
        print(f"not everything could be had: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
