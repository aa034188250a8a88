# SPDX-License-Identifier: Apache-2.0
"""The functions of fastsafetensors, or of safetensors and torch if it is not installed.

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
    from fastsafetensors.training import CheckpointManager
except ImportError:
    from safetensors.torch import load_file, save_file

    from .plain_checkpoints import CheckpointManager

    def is_fastsafetensors_available():
        """Return False."""
        return False

    def load_safetensors(path, num_threads=8, device="cpu"):
        """Load a file with safetensors, which ignores num_threads."""
        return load_file(path, device=str(device))

    def save_safetensors(state_dict, path, metadata=None):
        """Save a file with safetensors."""
        save_file(state_dict, path, {"format": "pt"} if metadata is None else metadata)

    def load_embeddings_safetensors(path, device="cpu"):
        """Load a flat dict of tensors."""
        return load_file(path, device=str(device))

    def save_embeddings_safetensors(embeddings, path):
        """Save a flat dict of tensors."""
        save_file(embeddings, path, {"type": "embeddings"})


__all__ = [
    "CheckpointManager",
    "is_fastsafetensors_available",
    "load_embeddings_safetensors",
    "load_safetensors",
    "save_embeddings_safetensors",
    "save_safetensors",
]
