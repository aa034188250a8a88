# SPDX-License-Identifier: Apache-2.0
"""Settings of AutoLoader: a JSON file named by the environment, or in the working folder.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field, fields
from typing import Any

from .._base.errors import printable
from .._base.regular_files import read_regular

CONFIG_ENV_VAR = "FASTSAFETENSORS_CONFIG"
DEFAULT_CONFIG_PATH = "./fastsafetensors.json"
_BYTES_MAX = 1 << 20

_logger = logging.getLogger(__name__)

# Groups of settings.
_FLATTENED = ("parallel", "debug")
# Common settings that no loader's section repeats.
_COMMON = ("framework", "debug_log", "set_numa", "disable_cache")

_DEFAULT_SECTIONS: dict[str, dict[str, Any]] = {
    "base": {},
    "3fs": {"mount_point": "/mnt/3fs", "entries": 64, "io_depth": 0, "buffer_size": 64 << 20},
}


@dataclass
class LoaderConfig:
    """What AutoLoader does.

    For programs written for fastsafetensors 0.5.
    """

    loader: str = "base"
    framework: str = "pytorch"
    debug_log: bool = False
    set_numa: bool = True
    disable_cache: bool = True
    use_pipeline: bool = False
    max_concurrent_producers: int = 1
    queue_size: int = 0
    use_tqdm_on_load: bool = True
    max_batch_bytes: int | None = None
    use_chunk_budget_as_allocation_size: bool = False
    device_memory_budget: int | None = None
    _extensions: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Refuse several producers, as 0.5 does."""
        if self.max_concurrent_producers != 1:
            raise ValueError(f"max_concurrent_producers must be 1, not "
                             f"{self.max_concurrent_producers}")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LoaderConfig:
        """Create one from a JSON object. Unknown keys are ignored; a wrong type is a ValueError."""
        if not isinstance(data, dict):
            raise ValueError(f"the configuration must be an object, not {type(data).__name__}")
        flat: dict[str, Any] = {}
        extensions: dict[str, dict[str, Any]] = {}
        for key, value in data.items():
            if key in _FLATTENED and isinstance(value, dict):
                flat.update(value)
            elif isinstance(value, dict):
                extensions[key] = value
            else:
                flat[key] = value
        known = {f.name: f for f in fields(cls) if f.name != "_extensions"}
        chosen = {key: value for key, value in flat.items() if key in known}
        for key, value in chosen.items():
            _check_type(key, known[key].default, value)
        return cls(**chosen, _extensions=extensions)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> LoaderConfig:
        """Read a JSON file."""
        try:
            values = json.loads(read_regular(path, _BYTES_MAX))
        except ValueError as error:
            raise ValueError(f"{printable(os.fspath(path))}: {printable(error)}") from None
        config = cls.from_dict(values)
        _logger.info("Loaded config from JSON: %s", printable(os.fspath(path)))
        return config

    @property
    def extensions(self) -> dict[str, dict[str, Any]]:
        """The sections of loaders by name."""
        return self._extensions

    def get_extension_config(self, name: str) -> dict[str, Any]:
        """Return the section of a loader, with its defaults and without the common settings."""
        merged = {**_DEFAULT_SECTIONS.get(name, {}), **self._extensions.get(name, {})}
        return {key: value for key, value in merged.items() if key not in _COMMON}

    def create_parallel_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for the parallel loader: one batch at a time without use_pipeline."""
        return {
            "max_concurrent_producers": self.max_concurrent_producers,
            "queue_size": self.queue_size if self.use_pipeline else -1,
            "use_tqdm_on_load": self.use_tqdm_on_load,
            "max_batch_bytes": self.max_batch_bytes,
            "use_chunk_budget_as_allocation_size": self.use_chunk_budget_as_allocation_size,
            "device_memory_budget": self.device_memory_budget,
        }


def _check_type(key: str, default: Any, value: Any) -> None:
    """Check that a setting has its default's type; None stands for a number."""
    wanted: type = int if default is None else type(default)
    if default is None and value is None:
        return
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ValueError(f"{printable(key)} must be {wanted.__name__}, not {value!r}")


def load_config() -> LoaderConfig:
    """Return the settings from the named or default file, or the defaults.

    For programs written for fastsafetensors 0.5.
    """
    named = os.environ.get(CONFIG_ENV_VAR)
    if named:
        if not os.path.exists(named):
            raise FileNotFoundError(f"Config file specified by {CONFIG_ENV_VAR} not found: "
                                    f"{printable(named)}")
        return LoaderConfig.from_file(named)
    if os.path.exists(DEFAULT_CONFIG_PATH):
        return LoaderConfig.from_file(DEFAULT_CONFIG_PATH)
    return LoaderConfig()
