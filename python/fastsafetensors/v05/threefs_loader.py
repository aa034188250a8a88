# SPDX-License-Identifier: Apache-2.0
"""Loads from 3FS through its reader package, where that is installed."""

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
        self, pg: Any, device: Any = "cpu", mount_point: str = "/mnt/3fs", **kwargs: Any
    ) -> None:
        """Import the reader and prepare the load."""
        import importlib

        try:
            importlib.import_module("fastsafetensor_3fs_reader")
        except ImportError as error:
            raise ModuleNotFoundError(
                "3FS needs the package fastsafetensor-3fs-reader", name="fastsafetensor_3fs_reader"
            ) from error
        super().__init__(pg, device, "3fs", mount_point=mount_point, **kwargs)


class ParallelThreeFSLoader(PipelineParallel):
    """A parallel load of files on 3FS."""

    def __init__(
        self, pg: Any, hf_weights_files: Sequence[Any], device: Any = "cpu", **kwargs: Any
    ) -> None:
        """Prepare the load; keywords are PipelineParallel's, mount_point is the reader's."""
        mount_point = kwargs.pop("mount_point", "/mnt/3fs")
        super().__init__(pg, ThreeFSLoader(pg, device, mount_point), hf_weights_files, **kwargs)
