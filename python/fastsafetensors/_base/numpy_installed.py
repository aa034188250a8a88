# SPDX-License-Identifier: Apache-2.0
"""Imports numpy, or raises an error that says what to install. Modules that need numpy use it."""

from __future__ import annotations

try:
    import numpy as numpy
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
    raise ModuleNotFoundError(
        "this part of fastsafetensors needs numpy: pip install numpy ml_dtypes", name="numpy"
    ) from error
