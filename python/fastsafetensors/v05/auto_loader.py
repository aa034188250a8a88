# SPDX-License-Identifier: Apache-2.0
"""AutoLoader: a parallel load whose settings come from a file.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from .._base.closing import Closing
from .._base.errors import printable
from .config import LoaderConfig, load_config
from .loader import SafeTensorsFileLoader, _GroupLoader
from .parallel_loader import PipelineParallel

_logger = logging.getLogger(__name__)

_LOADERS = ("base", "3fs")


class AutoLoader(Closing):
    """Iterate over a model's tensors with settings from FASTSAFETENSORS_CONFIG or
    ./fastsafetensors.json.

    For programs written for fastsafetensors 0.5.

    config: the settings that were found (see fastsafetensors.config).
    """

    def __init__(self, pg: Any, hf_weights_files: Sequence[Any], device: Any = "cpu") -> None:
        """Read the settings and prepare the load."""
        self._config = load_config()
        name = self._config.loader
        if name not in _LOADERS:
            raise ValueError(f"Unknown loader type: '{printable(name)}'. Available: "
                             f"{list(_LOADERS)}")
        section = self._config.get_extension_config(name)
        common: dict[str, Any] = {
            "framework": self._config.framework,
            "set_numa": self._config.set_numa,
        }
        loader: Any
        if name == "3fs":
            from .threefs_loader import ThreeFSLoader

            loader = ThreeFSLoader(pg, device, **section, **common)
        else:
            wishes = SafeTensorsFileLoader.process_extension_config(section)
            loader = _GroupLoader(
                pg, device, debug_log=self._config.debug_log,
                disable_cache=self._config.disable_cache, **wishes, **common,
            )
        self._pipeline = PipelineParallel(
            pg, loader, hf_weights_files, **self._config.create_parallel_kwargs()
        )
        _logger.info("AutoLoader initialized: loader=%s, files=%d",
                     printable(name), len(hf_weights_files))

    def __repr__(self) -> str:
        """Return the chosen loader's repr()."""
        return f"<AutoLoader of {self._pipeline!r}>"

    @property
    def config(self) -> LoaderConfig:
        """The settings that were found."""
        return self._config

    def iterate_weights(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, tensor)."""
        return self._pipeline.iterate_weights()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, tensor)."""
        return self.iterate_weights()

    def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        """Iterate over (name, tensor) without blocking the event loop."""
        return self._pipeline.__aiter__()

    def close(self) -> None:
        """Stop and free everything. Repeated calls are harmless."""
        self._pipeline.close()
