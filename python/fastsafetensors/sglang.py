# SPDX-License-Identifier: Apache-2.0
"""The SGLang plug-in: ``--load-format fastsafetensors`` reads only the weights a rank needs.

SGLang finds register() through its entry point once this package is installed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._base.errors import printable_lines

if TYPE_CHECKING:
    from ._engine_weights import EngineOptions

__all__ = ["register"]

_ENGINE_KEYS = ("enable_multithread_load", "num_threads", "enable_gds")
_LOADER = "sglang.srt.model_loader.loader"
_logger = logging.getLogger("sglang.fastsafetensors")


class _State:
    """State that SGLang does not pass to the iterating function: options and model."""

    def __init__(self) -> None:
        self.registered = False
        self.options: EngineOptions | None = None
        self.model = threading.local()


_state = _State()


def register() -> None:
    """Register the load format "fastsafetensors" in SGLang.

    Repeatable. Options in ``--model-loader-extra-config``: threads, memory, mode, plan, gds,
    verify, public_key, progress, and SGLang's own. A reload has no options and uses those of the
    first load.

    Raises:
        ImportError: SGLang is not installed.
    """
    if _state.registered:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        raise ImportError("fastsafetensors.sglang needs sglang: "
                          f"{printable_lines(error)}") from error
    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.fastsafetensors_weights_iterator", _iterate,
        HookType.REPLACE)
    HookRegistry.register(
        f"{_LOADER}._validate_default_loader_extra_config", _validate, HookType.AROUND)
    HookRegistry.register(
        f"{_LOADER}.DefaultModelLoader._get_all_weights", _note_model, HookType.AROUND)
    _state.registered = True


def _validate(original: Any, *, extra_config: Any, load_format: Any) -> Any:
    """Remove this package's options; SGLang validates its own."""
    if getattr(load_format, "value", load_format) != "fastsafetensors":
        return original(extra_config=extra_config, load_format=load_format)
    from ._engine_weights import split_options

    options, rest = split_options(extra_config or {}, _ENGINE_KEYS)
    original(extra_config=rest, load_format=load_format)
    if _state.options is None or extra_config:
        _state.options = options
    return None


def _note_model(original: Any, loader: Any, model_config: Any, model: Any, *more: Any,
                **named: Any) -> Any:
    """Store the model to load for, because a pipeline stage has only some layers."""
    _state.model.last = weakref.ref(model)
    return original(loader, model_config, model, *more, **named)


def _iterate(
    hf_weights_files: list[str], enable_gds: bool = True, drop_cache_after_load: bool = False
) -> Iterator[tuple[str, Any]]:
    """Iterate over (name, tensor) of the files, like SGLang's function."""
    import dataclasses

    from ._engine_weights import EngineOptions, begun, expectation, iterate

    options = _state.options or EngineOptions()
    if not enable_gds:
        options = dataclasses.replace(options, gds="off")
    if not hf_weights_files:
        raise RuntimeError("fastsafetensors: the model has no safetensors files")
    noted = getattr(_state.model, "last", None)
    _state.model.last = None
    return begun(iterate(
        hf_weights_files, options, _logger, expects=expectation(noted() if noted else None),
        cache="bypass" if drop_cache_after_load else "auto",
    ))
