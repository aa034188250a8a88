# SPDX-License-Identifier: Apache-2.0
"""Load safetensors models as fast as the hardware allows.

    from fastsafetensors.torch import load_file      # {name: torch.Tensor}
    from fastsafetensors.numpy import load_file      # {name: numpy.ndarray}
    from fastsafetensors.torch import save_file      # all or nothing: the old file or the new

    from fastsafetensors import safe_open            # one tensor or slice at a time
    with safe_open("model.safetensors", framework="pt") as f:
        weight = f.get_tensor("weight")

    from fastsafetensors import SafeTensorsFileLoader
    tensors = SafeTensorsFileLoader("model.safetensors", num_threads=8).load()

A path is a file, an index (``*.safetensors.index.json``) or a folder; where one model is opened, a
list of files does as well. Tensors own their memory: nothing that is closed invalidates them.
Importing this package imports no framework.
"""

from typing import Any

from ._core import SafetensorError, keep_memory, trim
from ._core import version as __version__
from ._open import safe_open
from .loader import SafeTensorsFileLoader

# Names that need a framework, or more time than an import may take: found when first asked for.
_LAZY = {
    "load_file": "torch",
    "save_file": "torch",
    "ParallelSaver": "saver",
}

__all__ = [
    "ParallelSaver",
    "SafeTensorsFileLoader",
    "SafetensorError",
    "__version__",
    "keep_memory",
    "live_allocation_bytes",
    "live_allocation_count",
    "load_file",
    "safe_open",
    "save_file",
    "trim",
]


def __getattr__(name: str) -> Any:
    """Import what needs a framework when it is asked for."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'fastsafetensors' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"fastsafetensors.{module}"), name)
    globals()[name] = value
    return value


def live_allocation_count() -> int:
    """Tensor buffers of this process that are not yet freed."""
    from ._core import live_buffers

    return live_buffers()[0]


def live_allocation_bytes() -> int:
    """Bytes of the tensor buffers that are not yet freed."""
    from ._core import live_buffers

    return live_buffers()[1]
