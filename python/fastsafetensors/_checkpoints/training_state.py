# SPDX-License-Identifier: Apache-2.0
"""The state of a training: taking the states of named values, and loading them again."""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Mapping, MutableMapping
from typing import Any

from .._torch.torch_installed import torch


class _Rng:
    """The states of Python's, NumPy's and torch's random number generators."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        with contextlib.suppress(ImportError):
            import numpy

            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the states."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"].clone())
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([one.clone() for one in state["cuda"]])


# The random number generators of this process, as something that has a state.
RNG = _Rng()

# Methods that load a dict and nothing else.
_DICT_LOADERS = (torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict,
                 _Rng.load_state_dict)


def states_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to save: state_dict() where there is one."""
    return {name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in state.items()}


def check_state(state: Any) -> None:
    """Raise TypeError for a state that is not a mapping."""
    if not isinstance(state, Mapping):
        raise TypeError("state must be a dict {name: what has a state}, not a "
                        f"{type(state).__name__}")


def step_number(step: Any) -> int:
    """Return a step as an int. TypeError or ValueError if it is not a valid step number."""
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"step must not be negative: {number}")
    return number


def metadata_of(step: int, metric: Any) -> dict[str, str]:
    """Return the metadata of a checkpoint's files. TypeError: the metric is not a number."""
    metadata = {"format": "pt", "step": str(step)}
    if metric is None:
        return metadata
    try:
        if isinstance(metric, (str, bytes)):
            raise TypeError
        return {**metadata, "metric": repr(float(metric))}
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(f"metric must be a number, not {metric!r}") from None


def _loads(target: Any) -> bool:
    return callable(getattr(target, "load_state_dict", None))


def check_targets(state: Mapping[str, Any]) -> None:
    """Raise TypeError for a plain value in a mapping that can't be given a new one."""
    if isinstance(state, MutableMapping):
        return
    for name, target in state.items():
        if not _loads(target) and not isinstance(target, (dict, list)):
            raise TypeError(f"state[{name!r}] is a {type(target).__name__}, and a "
                            f"{type(state).__name__} can't be given another: use a dict")


def check_loaded(state: Mapping[str, Any], loaded: Mapping[str, Any], path: Any) -> None:
    """Raise KeyError or TypeError if what was loaded does not fit the state."""
    missing = sorted(map(str, state.keys() - loaded.keys()))
    if missing:
        raise KeyError(f"{path} has no state of {', '.join(missing)}")
    for name, target in state.items():
        takes_dict = getattr(type(target), "load_state_dict", None) in _DICT_LOADERS
        if takes_dict and not isinstance(loaded[name], dict):
            raise TypeError(f"{path}: the state of {name!r} is a {type(loaded[name]).__name__}, "
                            f"and a {type(target).__name__} loads a dict")


def load_into(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Give the values of a state what was loaded.

    Dicts, lists and tensors are changed in place, where the kind is the same, because the program
    may have them under other names. Other plain values are replaced in `state`.
    """
    for name, target in state.items():
        value = loaded[name]
        if _loads(target):
            target.load_state_dict(value)
        elif isinstance(target, dict) and isinstance(value, dict):
            target.clear()
            target.update(value)
        elif isinstance(target, list) and isinstance(value, list):
            target[:] = value
        elif isinstance(target, torch.Tensor) and _is_alike(target, value):
            with torch.no_grad():
                target.copy_(value)
        elif isinstance(state, MutableMapping):
            state[name] = value


def _is_alike(target: Any, value: Any) -> bool:
    """Whether both are tensors of one shape and dtype."""
    return (isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor)
            and target.shape == value.shape and target.dtype == value.dtype)
