# SPDX-License-Identifier: Apache-2.0
"""The loading functions of fastsafetensors, or safetensors' if it is not installed.

is_fastsafetensors_available() says which. With safetensors, embeddings must be a flat dict.
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
        """Return False."""
        return False

    def load_safetensors(path, num_threads=8, device="cpu"):
        """Load a file with safetensors, which ignores num_threads."""
        return load_file(path, device=str(device))

    def save_safetensors(state_dict, path, metadata=None):
        """Save a file with safetensors."""
        save_file(state_dict, path, {"format": "pt"} if metadata is None else metadata)

    class _Saved:
        """The handle of a save that has ended."""

        def wait(self):
            """Do nothing."""

    def save_safetensors_async(state_dict, path, metadata=None):
        """Save a file with safetensors, which returns when the file is written."""
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
