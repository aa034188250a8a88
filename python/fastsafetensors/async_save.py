# SPDX-License-Identifier: Apache-2.0
"""Saves that run while the program goes on: their handles, and the memory that they use.

    from fastsafetensors.torch import save_file_async

    handle = save_file_async(tensors, "model.safetensors")
    ...                       # tensors may change
    handle.wait()             # raises what went wrong
"""

from __future__ import annotations

from ._saving.save_handles import SaveHandle, SaveProgress, StagingPool, release_staging

__all__ = ["SaveHandle", "SaveProgress", "StagingPool", "release_staging"]
