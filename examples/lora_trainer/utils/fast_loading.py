# SPDX-License-Identifier: Apache-2.0
"""fastsafetensors' helpers for training programs, or, where it is missing, safetensors' own.

Programs import from here and run either way; is_fastsafetensors_available() tells which it is.
Without the package, embeddings are saved as a flat dict only.
"""

try:
    from fastsafetensors.fast_loading import (
        is_fastsafetensors_available,
        load_embeddings_safetensors,
        load_safetensors,
        save_embeddings_safetensors,
        save_safetensors,
    )
    from fastsafetensors.torch import save_file_async as save_safetensors_async
except ImportError:
    from safetensors.torch import load_file, save_file

    def is_fastsafetensors_available():
        """Tell whether fastsafetensors is installed: it is not."""
        return False

    def load_safetensors(path, num_threads=8, device="cpu"):
        """Load a file with safetensors; num_threads is not used."""
        return load_file(path, device=str(device))

    def save_safetensors(state_dict, path, metadata=None):
        """Save a file with safetensors."""
        save_file(state_dict, path, {"format": "pt"} if metadata is None else metadata)

    class _Saved:
        """What a save that has ended is waited for by."""

        def wait(self):
            """Do nothing."""

    def save_safetensors_async(state_dict, path, metadata=None):
        """Save a file with safetensors, which has no asynchronous save: it is done on return."""
        save_safetensors(state_dict, path, metadata)
        return _Saved()

    def load_embeddings_safetensors(path, device="cpu"):
        """Load a flat dict of tensors."""
        return load_file(path, device=str(device))

    def save_embeddings_safetensors(embeddings, path):
        """Save a flat dict of tensors."""
        save_file(embeddings, path, {"type": "embeddings"})


__all__ = [
    "is_fastsafetensors_available",
    "load_embeddings_safetensors",
    "load_safetensors",
    "save_embeddings_safetensors",
    "save_safetensors",
    "save_safetensors_async",
]
