# SPDX-License-Identifier: Apache-2.0
"""torch, or an error that says what to install. Modules that need torch import it from here."""

from __future__ import annotations

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "this part of fastsafetensors needs torch: pip install torch", name="torch"
    ) from error
