# SPDX-License-Identifier: Apache-2.0
"""The vLLM plug-in: ``--load-format fastsafetensors`` reads only the weights a rank needs.

vLLM finds register() through its entry point once this package is installed. Formats:

fastsafetensors          published models;
fastsafetensors_sharded  folders with vLLM's sharded states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ._base.errors import printable, printable_lines

__all__ = ["register"]

_ENGINE_KEYS = ("enable_multithread_load", "num_threads", "enable_weights_track")
_FORMAT = "fastsafetensors"
_registered: dict[str, type] = {}


def register() -> None:
    """Register the load formats "fastsafetensors" and "fastsafetensors_sharded" in vLLM.

    Repeatable. Options in ``--model-loader-extra-config``: threads, memory, mode, plan, gds,
    verify, public_key, progress, and vLLM's own.

    Raises:
        ImportError: vLLM is not installed.
    """
    if _registered:
        return
    try:
        import vllm.model_executor.model_loader as loaders
    except ImportError as error:
        raise ImportError(f"fastsafetensors.vllm needs vllm: {printable_lines(error)}") from error
    for name, kind in _make_loaders().items():
        known = getattr(loaders, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
        known.pop(name, None)  # replacing a format is intended, so no warning
        _registered[name] = loaders.register_model_loader(name)(kind)


def _make_loaders() -> dict[str, type]:
    from vllm.logger import init_logger
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    from ._engine_weights import (
        EngineOptions,
        begun,
        expectation,
        iterate,
        split_options,
    )

    logger = init_logger("vllm.fastsafetensors")

    def take_options(load_config: Any, keys: tuple[str, ...]) -> tuple[EngineOptions, Any]:
        given = load_config.model_loader_extra_config or {}
        if not isinstance(given, dict):
            raise ValueError(f"model_loader_extra_config: an object is expected, not {given!r}")
        options, rest = split_options(given, keys)
        return options, dataclasses.replace(load_config, model_loader_extra_config=rest)

    class FastsafetensorsLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's default loader with lazy tensors."""

        def __init__(self, load_config: Any) -> None:
            """Remove this package's options; vLLM validates its own."""
            self._options, load_config = take_options(load_config, _ENGINE_KEYS)
            load_config = dataclasses.replace(load_config, load_format=_FORMAT)
            super().__init__(load_config)
            self._expects: Any = None
            self._opened: dict[int, Iterator[tuple[str, Any]]] = {}

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            """Iterate over the weights. Layers of other pipeline stages are not expected."""
            self._expects = expectation(model)
            self._opened = {id(source): begun(self._read_source(source))
                            for source in getattr(model, "secondary_weights", ())}
            return begun(super().get_all_weights(model_config, model))

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
            """Iterate over a source's weights, from files that were opened before, if they were.
            """
            return self._opened.pop(id(source), None) or self._read_source(source)

        def _read_source(self, source: Any) -> Iterator[tuple[str, Any]]:
            folder, files, is_safetensors, _ = self._prepare_weights(
                source.model_or_path, source.subfolder, source.revision, source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            if not is_safetensors:
                yield from DefaultModelLoader._get_weights_iterator(self, source)
                return
            if not files:
                raise RuntimeError(f"no safetensors files in {printable(folder)}")
            unused = source.is_unused_weight
            weights = iterate(
                files, self._options, logger, expects=self._expects,
                filter=None if unused is None else lambda name: not unused(name),
                progress=self.load_config.use_tqdm_on_load,
            )
            for name, tensor in weights:
                yield source.prefix + name, tensor

    class FastsafetensorsShardedLoader(ShardedStateLoader):  # type: ignore[misc]
        """vLLM's loader of sharded states, with files read by this package."""

        def __init__(self, load_config: Any) -> None:
            """Remove this package's options; vLLM validates its own."""
            self._options, load_config = take_options(load_config, ("pattern",))
            super().__init__(load_config)

        def iterate_over_files(self, paths: Any) -> Iterator[tuple[str, Any]]:
            """Iterate over the tensors of this rank's files."""
            yield from iterate(paths, self._options, logger)

    return {_FORMAT: FastsafetensorsLoader, f"{_FORMAT}_sharded": FastsafetensorsShardedLoader}
