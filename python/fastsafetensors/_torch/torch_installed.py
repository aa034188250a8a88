# SPDX-License-Identifier: Apache-2.0
"""Imports torch, or raises an error that says what to install. Modules that need torch use it."""

from __future__ import annotations

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "this part of fastsafetensors needs torch: pip install torch", name="torch"
    ) from error
