# SPDX-License-Identifier: Apache-2.0
"""The state of a training: taking the states of named values, and loading them again."""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

from .._base.errors import printable, shown
from .._loading.module_weights import is_dtensor
from .._torch.torch_installed import torch
from .state_codec import order_of


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
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an integer, not {shown(step)}") from None
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
        if isinstance(metric, torch.Tensor):
            metric = metric.detach()  # float() of a loss warns that it requires a gradient
        return {**metadata, "metric": repr(float(metric))}
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(f"metric must be a number, not {shown(metric)}") from None


def _loads(target: Any) -> bool:
    return callable(getattr(target, "load_state_dict", None))


def _has_dtensors(target: Any) -> bool:
    if isinstance(target, torch.nn.Module):
        return any(map(is_dtensor, (*target.parameters(), *target.buffers())))
    if isinstance(target, torch.optim.Optimizer):
        return any(is_dtensor(one) for group in target.param_groups for one in group["params"])
    if isinstance(target, Mapping):
        return any(map(_has_dtensors, target.values()))
    if isinstance(target, (list, tuple)):
        return any(map(_has_dtensors, target))
    return is_dtensor(target)


def check_targets(state: Mapping[str, Any]) -> None:
    """Raise TypeError for DTensors, and for plain values in a mapping that can't be changed."""
    for name, target in state.items():
        if _has_dtensors(target):
            raise TypeError(f"state[{name!r}] has DTensors, which resume() can't load. Use "
                            "torch.distributed.checkpoint for them")
    if isinstance(state, MutableMapping):
        return
    for name, target in state.items():
        if not _loads(target) and not isinstance(target, (dict, list, torch.Tensor)):
            raise TypeError(f"state[{name!r}] is a {type(target).__name__}, and a "
                            f"{type(state).__name__} can't be given another: use a dict")


def check_loaded(state: Mapping[str, Any], loaded: Mapping[str, Any], path: Any) -> None:
    """Raise KeyError, TypeError or ValueError if what was loaded does not fit the state."""
    missing = sorted(map(str, state.keys() - loaded.keys()))
    if missing:
        raise KeyError(f"{printable(path)} has no state of {printable(', '.join(missing))}")
    for name, target in state.items():
        value = loaded[name]
        method = getattr(type(target), "load_state_dict", None)
        if method in _DICT_LOADERS and not isinstance(value, dict):
            raise TypeError(f"{printable(path)}: the state of {name!r} is a "
                            f"{type(value).__name__}, and a {type(target).__name__} loads a dict")
        if _are(torch.Tensor, target, value):
            _check_tensor(f"{printable(path)}: the tensor {name!r}", target, value)
        elif not _loads(target) and not _is_filled_in_place(target, value) and not isinstance(
                state, MutableMapping):
            raise TypeError(f"{printable(path)}: {name!r} is a {type(value).__name__}, which "
                            f"can't replace a {type(target).__name__} in a "
                            f"{type(state).__name__}: use a dict")


def _check_tensor(what: str, target: Any, value: Any) -> None:
    """Raise ValueError if a tensor can't have the values of another one."""
    if target.shape != value.shape:
        raise ValueError(f"{printable(what)} has the shape {list(value.shape)}, and that of the "
                         f"state {list(target.shape)}. Give None in its place to get the saved one")
    if not _can_hold(target.dtype, value.dtype) or _overflows(target.dtype, value):
        raise ValueError(f"{printable(what)} has the dtype {value.dtype}, and that of the state "
                         f"{target.dtype}, which can't hold its values")
    if target.is_meta or (target.layout == torch.strided and target.numel() > 0
                          and target.untyped_storage().nbytes() == 0):
        raise ValueError(f"{printable(what)} can't be loaded: that of the state has no memory")


def _is_integer(dtype: Any) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _can_hold(dtype: Any, other: Any) -> bool:
    """Whether a dtype holds the values of another one, except that floats may be rounded."""
    if dtype == other:
        return True
    if other == torch.bool:
        return bool(torch.can_cast(other, dtype))
    if _is_integer(other):
        wide, narrow = (torch.iinfo(one) if _is_integer(one) else None for one in (dtype, other))
        return (wide is not None and narrow is not None
                and wide.min <= narrow.min and wide.max >= narrow.max)
    return bool(torch.can_cast(other, dtype)) and dtype.itemsize > 1


def _overflows(dtype: Any, value: Any) -> bool:
    """Whether finite floats become infinite in a dtype."""
    if dtype == value.dtype or not (value.is_floating_point() or value.is_complex()):
        return False
    if torch.finfo(dtype).max >= torch.finfo(value.dtype).max:
        return False
    return bool((value.to(dtype).isfinite() != value.isfinite()).any())


def load_into(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Give the values of a state what was loaded and fits, by check_loaded().

    Dicts, lists and tensors are changed in place, where the kind is the same, because the program
    may have them under other names. Other plain values are replaced in `state`.
    """
    saved = _saved_parameters(state, loaded)
    for name, target in state.items():
        value = loaded[name]
        if _loads(target):
            target.load_state_dict(value)
            if isinstance(target, torch.optim.Optimizer):
                _put_in_order(target, saved)
        elif _are(dict, target, value):
            target.clear()
            target.update(value)
            if hasattr(target, "_metadata") and hasattr(value, "_metadata"):
                target._metadata = value._metadata
        elif _are(list, target, value):
            target[:] = value
        elif _are(torch.Tensor, target, value):
            with torch.no_grad():
                target.copy_(value)
        else:
            cast("MutableMapping[str, Any]", state)[name] = value


def _saved_parameters(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[Any, Any]:
    """Return {parameter of a module: the tensor that was saved of it}."""
    return {parameter: loaded[name][key]
            for name, target in state.items()
            if isinstance(target, torch.nn.Module) and isinstance(loaded[name], Mapping)
            for key, parameter in target.named_parameters()
            if isinstance(loaded[name].get(key), torch.Tensor)}


def _put_in_order(optimizer: Any, saved: Mapping[Any, Any]) -> None:
    """Convert optimizer states to the memory format of their parameters, where that has changed.

    Fused optimizers of torch pair the elements of both by their places in memory. State that had
    another order of dimensions than its parameter when it was saved keeps that order. Of parameters
    whose saved tensor is not known, only the state of fused optimizers is changed.
    """
    fused = {parameter for group in optimizer.param_groups if group.get("fused")
             for parameter in group["params"]}
    moved: dict[tuple[int, tuple[int, ...]], Any] = {}  # a tensor that comes twice stays one
    for parameter, values in getattr(optimizer, "state", {}).items():
        before = saved.get(parameter)
        if (not isinstance(values, dict) or not isinstance(parameter, torch.Tensor)
                or torch.nn.parameter.is_lazy(parameter)
                or (before is None and parameter not in fused)):
            continue
        for name, value in values.items():
            if (isinstance(value, torch.Tensor) and value.shape == parameter.shape
                    and value.layout == parameter.layout == torch.strided
                    and value.stride() != parameter.stride()
                    and (before is None or order_of(value) == order_of(before))):
                key = id(value), parameter.stride()
                if key not in moved:
                    like = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                    moved[key] = value, like.copy_(value)  # with the first, whose id stays in use
                values[name] = moved[key][1]


def _are(kind: type, target: Any, value: Any) -> bool:
    """Whether both are of a kind, and the target has no load_state_dict()."""
    return not _loads(target) and isinstance(target, kind) and isinstance(value, kind)


def _is_filled_in_place(target: Any, value: Any) -> bool:
    """Whether both are of one kind whose contents load_into() replaces."""
    return any(_are(kind, target, value) for kind in (dict, list, torch.Tensor))
