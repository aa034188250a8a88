# SPDX-License-Identifier: Apache-2.0
"""Unsupported platforms, reported before the extension fails to load."""

import sys

if not sys.platform.startswith("linux"):
    raise ImportError(f"fastsafetensors is for Linux, not {sys.platform}")
if "t" in sys.abiflags:
    raise ImportError(
        "fastsafetensors has no build for free-threaded Python, whose stable interface begins with "
        f"3.15: use the ordinary python{sys.version_info.major}.{sys.version_info.minor}"
    )
