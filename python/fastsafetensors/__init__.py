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

Going through a model that is read ahead, file by file, alone or in a torch.distributed group:

    from fastsafetensors import ParallelLoader, SingleGroup
    for name, tensor in ParallelLoader(SingleGroup(), sorted_files, device="cpu").iterate_weights():
        ...

A model's own parameters are filled in place, without a second copy of the model:

    from fastsafetensors.torch import load_model, save_model
    missing, unexpected = load_model(model, "model.safetensors")

Whole programs, unchanged: ``fastsafetensors.compat.install()`` puts this package in place of
``safetensors`` for the process. Training programs: ``help(fastsafetensors.fast_loading)`` (sharded
folders, caches of embeddings). Errors: SafetensorError for bad files and names (with ``tag``,
``file``, ``tensor`` and ``byte_offset``), OSErrors of their kind for what the system refuses.
What happened in a load, and why: ``SafeTensorsFileLoader(path).stats``, and on the command line
``fastsafetensors engines FILE``.

A path is a file, an index (``*.safetensors.index.json``) or a folder; where one model is opened, a
list of files does as well. Tensors own their memory: nothing that is closed invalidates them.
Importing this package imports no framework.
"""

from typing import TYPE_CHECKING, Any

from ._core import SafetensorError, keep_memory, trim
from ._core import version as __version__
from ._open import safe_open

# Names that need a framework, or more time than an import may take: found when first asked for.
_LAZY = {
    "AutoLoader": "auto_loader",
    "BudgetInfeasibleError": "_planner",
    "DEFAULT_EXPERT_PATTERN": "ep_slice",
    "FilesBufferOnDevice": "file_buffer",
    "LoaderConfig": "config",
    "ParallelLoader": "parallel_loader",
    "ParallelSaver": "saver",
    "RankError": "_agreement",
    "SafeTensorsFileLoader": "loader",
    "SafeTensorsMetadata": "common",
    "SingleGroup": "common",
    "TensorFrame": "common",
    "expert_parallel_filter": "ep_slice",
    "expert_parallel_filter_from_env": "ep_slice",
    "fastsafe_open": "loader",
    "get_device_numa_node": "common",
    "live_allocation_bytes": "allocation",
    "live_allocation_count": "allocation",
    "load_config": "config",
    "load_file": "torch",
    "owned_expert_range": "ep_slice",
    "save_file": "torch",
}

__all__ = [
    "AutoLoader",
    "BudgetInfeasibleError",
    "FilesBufferOnDevice",
    "LoaderConfig",
    "ParallelLoader",
    "ParallelSaver",
    "RankError",
    "SafeTensorsFileLoader",
    "SafeTensorsMetadata",
    "SafetensorError",
    "SingleGroup",
    "TensorFrame",
    "__version__",
    "expert_parallel_filter",
    "expert_parallel_filter_from_env",
    "fastsafe_open",
    "get_device_numa_node",
    "keep_memory",
    "live_allocation_bytes",
    "live_allocation_count",
    "load_config",
    "load_file",
    "owned_expert_range",
    "safe_open",
    "save_file",
    "trim",
]

if TYPE_CHECKING:
    from ._planner import BudgetInfeasibleError
    from .allocation import live_allocation_bytes, live_allocation_count
    from .auto_loader import AutoLoader
    from .common import (
        SafeTensorsMetadata,
        SingleGroup,
        TensorFrame,
        get_device_numa_node,
    )
    from .config import LoaderConfig, load_config
    from .ep_slice import (
        expert_parallel_filter,
        expert_parallel_filter_from_env,
        owned_expert_range,
    )
    from .file_buffer import FilesBufferOnDevice
    from .loader import SafeTensorsFileLoader, fastsafe_open
    from .parallel_loader import ParallelLoader
    from .saver import ParallelSaver
    from .torch import load_file, save_file


def __getattr__(name: str) -> Any:
    """Import what needs a framework when it is asked for."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'fastsafetensors' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"fastsafetensors.{module}"), name)
    globals()[name] = value
    return value
