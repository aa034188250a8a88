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
Without tensors: read_header(), edit_header() (metadata and names), hash_file(), verify_file().
Verified loads: write_manifest(), then ``verify=True`` of any front, or verifying() around it.
What happened in a load, and why: ``SafeTensorsFileLoader(path).stats``, and on the command line
``fastsafetensors engines FILE``.

A path is a file, an index (``*.safetensors.index.json``) or a folder; where one model is opened, a
list of files does as well. Nothing that is closed invalidates a tensor.
Importing this package imports no framework.
"""

from typing import TYPE_CHECKING, Any

from . import _old_paths
from . import _platform as _platform  # isort: split - before the extension is loaded
from ._core import SafetensorError, keep_memory, trim
from ._core import version as __version__
from ._open import safe_open

# Names that need a framework, or more time than an import may take: found when first asked for.
_LAZY = {
    "AutoLoader": "v05.auto_loader",
    "BudgetInfeasibleError": "v05.batch_plan",
    "DEFAULT_EXPERT_PATTERN": "v05.ep_slice",
    "Digests": "_digests",
    "FilesBufferOnDevice": "v05.file_buffer",
    "Header": "_header",
    "LoaderConfig": "v05.config",
    "ManifestMade": "_verify",
    "ParallelLoader": "v05.parallel_loader",
    "ParallelSaver": "v05.saver",
    "Problem": "_digests",
    "RankError": "_agreement",
    "SafeTensorsFileLoader": "v05.loader",
    "SafeTensorsMetadata": "v05.common",
    "SignedBy": "_verify",
    "SingleGroup": "v05.common",
    "TensorFrame": "v05.common",
    "TensorInfo": "_header",
    "changed_tensors": "_changed",
    "check_manifest": "_verify",
    "edit_header": "_header",
    "expert_parallel_filter": "v05.ep_slice",
    "expert_parallel_filter_from_env": "v05.ep_slice",
    "fastsafe_open": "v05.loader",
    "get_device_numa_node": "v05.common",
    "hash_file": "_digests",
    "live_allocation_bytes": "v05.allocation",
    "live_allocation_count": "v05.allocation",
    "load_config": "v05.config",
    "load_file": "torch",
    "owned_expert_range": "v05.ep_slice",
    "read_header": "_header",
    "save_file": "torch",
    "sign_folder": "_verify",
    "verify_file": "_digests",
    "verifying": "_verify",
    "write_manifest": "_verify",
    "write_sums": "_verify",
}

# Modules of the package that are attributes of it, imported or not.
_MODULES = ("checkpoint", "compat", "distributed", "fast_loading", "integrations", "lazy",
            "numpy", "torch")

__all__ = [
    "AutoLoader",
    "BudgetInfeasibleError",
    "Digests",
    "FilesBufferOnDevice",
    "Header",
    "LoaderConfig",
    "ManifestMade",
    "ParallelLoader",
    "ParallelSaver",
    "Problem",
    "RankError",
    "SafeTensorsFileLoader",
    "SafeTensorsMetadata",
    "SafetensorError",
    "SignedBy",
    "SingleGroup",
    "TensorFrame",
    "TensorInfo",
    "__version__",
    "changed_tensors",
    "check_manifest",
    "edit_header",
    "expert_parallel_filter",
    "expert_parallel_filter_from_env",
    "fastsafe_open",
    "get_device_numa_node",
    "hash_file",
    "keep_memory",
    "live_allocation_bytes",
    "live_allocation_count",
    "load_config",
    "load_file",
    "owned_expert_range",
    "read_header",
    "safe_open",
    "save_file",
    "sign_folder",
    "trim",
    "verify_file",
    "verifying",
    "write_manifest",
    "write_sums",
]

if TYPE_CHECKING:
    from ._agreement import RankError
    from ._changed import changed_tensors
    from ._digests import Digests, Problem, hash_file, verify_file
    from ._header import Header, TensorInfo, edit_header, read_header
    from ._verify import (
        ManifestMade,
        SignedBy,
        check_manifest,
        sign_folder,
        verifying,
        write_manifest,
        write_sums,
    )
    from .torch import load_file, save_file
    from .v05.allocation import live_allocation_bytes, live_allocation_count
    from .v05.auto_loader import AutoLoader
    from .v05.batch_plan import BudgetInfeasibleError
    from .v05.common import (
        SafeTensorsMetadata,
        SingleGroup,
        TensorFrame,
        get_device_numa_node,
    )
    from .v05.config import LoaderConfig, load_config
    from .v05.ep_slice import (
        expert_parallel_filter,
        expert_parallel_filter_from_env,
        owned_expert_range,
    )
    from .v05.file_buffer import FilesBufferOnDevice
    from .v05.loader import SafeTensorsFileLoader, fastsafe_open
    from .v05.parallel_loader import ParallelLoader
    from .v05.saver import ParallelSaver
else:
    # Type checkers see the names above, and find a misspelt one.
    def __getattr__(name: str) -> Any:
        """Import what needs a framework, and modules, when they are asked for."""
        import importlib

        if name in _LAZY:
            value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        elif name in _old_paths.OLD_PATHS or name in _MODULES:
            value = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List what is found when it is asked for, too."""
    modules = {name for name in _old_paths.OLD_PATHS if name.isidentifier() and name[0] != "_"}
    return sorted({*globals(), *_LAZY, *_MODULES, *modules})


_old_paths.install()
