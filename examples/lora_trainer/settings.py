# SPDX-License-Identifier: Apache-2.0
"""The settings of a run (config.yaml), and their checks."""

from dataclasses import dataclass, field

import torch
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class SettingsError(ValueError):
    """A setting that is missing, unknown or wrong."""


@dataclass
class LoraSettings:
    """The adapter."""

    rank: int = 16
    alpha: int = 32
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])


@dataclass
class TrainSettings:
    """The training."""

    steps: int = 60
    batch_size: int = 8
    learning_rate: float = 3e-3
    save_every: int = 30
    seed: int = 0
    resume: str | None = None


@dataclass
class Settings:
    """All settings. Those without a default are required."""

    base_model: str = MISSING
    cache_dir: str = MISSING
    texts: str = MISSING
    output_dir: str = MISSING
    use_fastsafetensors: bool = True
    fastsafetensors_num_threads: int = 8
    device: str = "cpu"
    lora: LoraSettings = field(default_factory=LoraSettings)
    train: TrainSettings = field(default_factory=TrainSettings)


def load_settings(path, overrides=()):
    """Read a YAML file and `key=value` overrides. SettingsError names an invalid setting."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.load(path),
                                 OmegaConf.from_dotlist(list(overrides)))
        missing = OmegaConf.missing_keys(merged)
        if missing:
            raise SettingsError(f"{path}: missing: {', '.join(sorted(missing))}")
        settings = OmegaConf.to_object(merged)
    except FileNotFoundError:
        raise SettingsError(f"no such file: {path}") from None
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        raise SettingsError(f"{path}: {key}: {str(error).splitlines()[0]}") from None
    for name, value in (("lora.rank", settings.lora.rank), ("train.steps", settings.train.steps),
                        ("train.batch_size", settings.train.batch_size),
                        ("train.save_every", settings.train.save_every),
                        ("fastsafetensors_num_threads", settings.fastsafetensors_num_threads)):
        if value <= 0:
            raise SettingsError(f"{path}: {name}: must be positive, not {value}")
    check_device(path, settings.device)
    return settings


def check_device(path, device):
    """Raise SettingsError for a device that this machine or this torch does not have."""
    try:
        torch.empty(1, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise SettingsError(f"{path}: device: {device!r} is not available: "
                            f"{str(error).splitlines()[0]}") from None
