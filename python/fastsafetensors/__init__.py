# SPDX-License-Identifier: Apache-2.0
"""Load and save safetensors models as fast as the hardware allows.

What new programs use, here and in fastsafetensors.torch and .numpy:

    load_file(filename)              {name: tensor} of a model
    safe_open(filename, framework)   one tensor, or a part of one, at a time
    open_stream(filename)            a model that is larger than memory, tensor by tensor
    save_file(tensors, filename)     atomic: the old file or the new one
    save_file_async(...)             the same while the program goes on
    load_model(model, filename)      into a torch module's own parameters
    save_model(model, filename)      each shared tensor once

In modules (import fastsafetensors.NAME):

    lazy           tensors that are read when they are used
    remote         settings for URLs: s3, gs, az, hf, https
    distributed    each rank's part of a model
    checkpoint     torch.distributed.checkpoint, and consolidation
    training       checkpoints of a training run
    deltas         weight deltas between versions of a checkpoint
    integrations   transformers, diffusers and others, unchanged

Checks: verify= of every load, write_manifest(), check_manifest(), verify_file(), sign_folder(),
check_signature().
Headers: read_header(), edit_header(). Programs for safetensors: fastsafetensors.compat.install().
Programs for fastsafetensors 0.5 run unchanged; the names that exist for them say so in help().

A path is a file, an index (``*.safetensors.index.json``), a folder or a URL; functions that open
one model also accept a list of files. Tensors stay valid after everything is closed.
Errors: SafetensorError for bad files and names (with ``tag``, ``file``, ``tensor`` and
``byte_offset``), and the matching OSError subclass for failed system calls.
Importing this package imports no framework.
"""

from __future__ import annotations

from . import _old_paths
from ._base import log as _log
from ._base import platform as _platform  # noqa: F401  # isort: split - before the extension
from ._core import SafetensorError, trim
from ._core import version as __version__

TYPE_CHECKING = False  # type checkers take it for True; importing typing takes 5 ms

# Names that need a framework, or take long to import. They are imported on first access.
_LAZY = {
    "AutoLoader": "v05.auto_loader",
    "BudgetInfeasibleError": "v05.batch_plan",
    "DEFAULT_EXPERT_PATTERN": "v05.ep_slice",
    "Digests": "_verify.digests",
    "FilesBufferOnDevice": "v05.file_buffer",
    "Header": "_loading.header",
    "LoaderConfig": "v05.config",
    "ManifestMade": "_verify.manifests",
    "ParallelLoader": "v05.parallel_loader",
    "ParallelSaver": "v05.saver",
    "Problem": "_verify.digests",
    "RankError": "_ranks.agreement",
    "SafeTensorsFileLoader": "v05.loader",
    "SafeTensorsMetadata": "v05.common",
    "SignedBy": "_loading.verified_open",
    "SingleGroup": "v05.common",
    "TensorFrame": "v05.common",
    "TensorInfo": "_loading.header",
    "changed_tensors": "_verify.changed_tensors",
    "check_manifest": "_verify.manifests",
    "check_signature": "_verify.manifests",
    "edit_header": "_loading.header",
    "expert_parallel_filter": "v05.ep_slice",
    "expert_parallel_filter_from_env": "v05.ep_slice",
    "fastsafe_open": "v05.loader",
    "get_device_numa_node": "v05.common",
    "hash_file": "_verify.digests",
    "keep_memory": "_loading.load",
    "live_allocation_bytes": "v05.allocation",
    "live_allocation_count": "v05.allocation",
    "load_config": "v05.config",
    "load_file": "torch",
    "load_model": "torch",
    "open_stream": "torch",
    "owned_expert_range": "v05.ep_slice",
    "read_header": "_loading.header",
    "safe_open": "_loading.open",
    "save_file": "torch",
    "save_file_async": "torch",
    "save_model": "torch",
    "sign_folder": "_verify.manifests",
    "verify_file": "_verify.digests",
    "verifying": "_loading.verified_open",
    "write_manifest": "_verify.manifests",
    "write_sums": "_verify.manifests",
}

# Modules that are attributes of the package, whether imported or not.
_MODULES = ("async_save", "checkpoint", "compat", "deltas", "distributed", "fast_loading",
            "integrations", "lazy", "metrics", "numpy", "remote", "torch", "training", "types")

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
    "check_signature",
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
    "load_model",
    "open_stream",
    "owned_expert_range",
    "read_header",
    "safe_open",
    "save_file",
    "save_file_async",
    "save_model",
    "sign_folder",
    "trim",
    "verify_file",
    "verifying",
    "write_manifest",
    "write_sums",
]

if TYPE_CHECKING:
    from typing import Any

    from ._loading.header import Header, TensorInfo, edit_header, read_header
    from ._loading.load import keep_memory
    from ._loading.open import safe_open
    from ._loading.verified_open import SignedBy, verifying
    from ._ranks.agreement import RankError
    from ._verify.changed_tensors import changed_tensors
    from ._verify.digests import Digests, Problem, hash_file, verify_file
    from ._verify.manifests import (
        ManifestMade,
        check_manifest,
        check_signature,
        sign_folder,
        write_manifest,
        write_sums,
    )
    from .torch import (
        load_file,
        load_model,
        open_stream,
        save_file,
        save_file_async,
        save_model,
    )
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
    # For type checkers, so that they know the names above and find misspelt ones.
    def __getattr__(name: str) -> Any:
        """Import lazy names and modules on first access."""
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
    """List lazy names too."""
    modules = {name for name in _old_paths.OLD_PATHS if name.isidentifier() and name[0] != "_"}
    return sorted({*globals(), *_LAZY, *_MODULES, *modules})


_old_paths.install()
_log.start()
