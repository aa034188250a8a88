# SPDX-License-Identifier: Apache-2.0
"""Loads from 3FS through its reader package, if it is installed.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .loader import BaseSafeTensorsFileLoader
from .parallel_loader import PipelineParallel


class ThreeFSLoader(BaseSafeTensorsFileLoader):
    """A loader of files on 3FS. ModuleNotFoundError without the package fastsafetensor-3fs-reader.

    The package registers its reader under the name "3fs" when it is imported.
    """

    def __init__(
        self,
        pg: Any,
        device: Any = "cpu",
        mount_point: str = "/mnt/3fs",
        debug_log: bool = False,
        disable_cache: bool = True,
        framework: str = "pytorch",
        set_numa: bool = True,
        **kwargs: Any,
    ) -> None:
        """Import the reader and prepare the load."""
        import importlib

        try:
            importlib.import_module("fastsafetensor_3fs_reader")
        except ImportError as error:
            raise ModuleNotFoundError(
                "3FS needs the package fastsafetensor-3fs-reader", name="fastsafetensor_3fs_reader"
            ) from error
        super().__init__(
            pg, device, "3fs", set_numa, disable_cache, framework, mount_point=mount_point, **kwargs
        )
        self.debug_log = self.debug_log or debug_log


class ParallelThreeFSLoader(PipelineParallel):
    """A parallel load of files on 3FS."""

    def __init__(
        self,
        pg: Any,
        hf_weights_files: Sequence[Any],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: Any = "cpu",
        debug_log: bool = False,
        framework: str = "pytorch",
        **kwargs: Any,
    ) -> None:
        """Prepare the load.

        Keywords are those of PipelineParallel; mount_point is for the reader.
        """
        mount_point = kwargs.pop("mount_point", "/mnt/3fs")
        loader = ThreeFSLoader(pg, device, mount_point, debug_log, framework=framework)
        super().__init__(
            pg, loader, hf_weights_files, max_concurrent_producers, queue_size, use_tqdm_on_load,
            **kwargs,
        )
