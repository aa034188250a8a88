# SPDX-License-Identifier: Apache-2.0
"""Training state as tensors and a description: what files of tensors keep of nested state."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ._tensor_memory import storage_ptr
from ._torch_installed import torch

# The tensor that holds the description, as JSON in bytes.
DESCRIPTION = "fastsafetensors.state"
_PLAIN = (str, int, float, bool, type(None))


class _Encoder:
    """Turns nested values into JSON, and puts their tensors aside."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def _tensor(self, tensor: Any, path: str) -> str:
        """The name of a tensor; one that comes twice is kept once."""
        key = (storage_ptr(tensor), tensor.storage_offset(), tensor.dtype, tuple(tensor.shape),
               tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.device)
        if tensor.numel() > 0 and key in self._known:
            return self._known[key]
        name = path
        for number in range(1, len(self.tensors) + 3):
            if name not in self.tensors and name != DESCRIPTION:
                break
            name = f"{path}#{number}"
        self._known[key] = name
        self.tensors[name] = tensor.detach()
        return name

    def encode(self, value: Any, path: str) -> Any:
        """Return JSON that stands for a value."""
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        if isinstance(value, _PLAIN):
            if type(value) not in _PLAIN:
                value = next(kind(value) for kind in (bool, int, float, str)
                             if isinstance(value, kind))
            return value
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, Mapping):
            return {"dict": [[self.encode(key, path), self.encode(item, f"{path}.{key}")]
                             for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [self.encode(item, f"{path}.{at}") for at, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        return self._other(value, path)

    def _other(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            return {"array": self._tensor(torch.from_numpy(value.copy()), path)}
        if kind.__module__ == "numpy" and hasattr(value, "item"):
            return self.encode(value.item(), path)
        raise TypeError(f"{path}: a {kind.__qualname__} can't be saved; tensors, NumPy arrays, "
                        "numbers, str, bytes, None, dicts, lists and tuples of these can")


def encode_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of nested state, with one that describes the rest.

    Raises:
        TypeError: a value that can't be saved; the message has its path.
    """
    encoder = _Encoder()
    described = {str(name): encoder.encode(value, str(name)) for name, value in state.items()}
    text = json.dumps(described).encode()
    return {**encoder.tensors, DESCRIPTION: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def _decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, item), = value.items()
    if kind == "tensor":
        return tensors[item]
    if kind == "array":
        return tensors[item].numpy()
    if kind == "bytes":
        return base64.b64decode(item)
    if kind == "dict":
        return {_decode(key, tensors): _decode(entry, tensors) for key, entry in item}
    if kind in ("list", "tuple"):
        parts = [_decode(entry, tensors) for entry in item]
        return parts if kind == "list" else tuple(parts)
    raise ValueError(f"the checkpoint has a value of an unknown kind {kind!r}")


def _places(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        return
    kind, item = next(iter(value.items()))
    if kind in ("tensor", "array"):
        yield path, item
    elif kind == "dict":
        for key, entry in item:
            yield from _places(entry, f"{path}.{key}")
    elif kind in ("list", "tuple"):
        for at, entry in enumerate(item):
            yield from _places(entry, f"{path}.{at}")


def described_tensors(description: bytes) -> Iterator[tuple[str, str]]:
    """Yield (path in the state, name of its tensor): several paths for a tensor that is shared."""
    for name, value in json.loads(description).items():
        yield from _places(value, name)


def decode_state(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return what encode_state() was given.

    Raises:
        ValueError: tensors that it did not make.
    """
    if DESCRIPTION not in tensors:
        raise ValueError(f"no tensor {DESCRIPTION!r}: this is no checkpoint of CheckpointManager")
    described = json.loads(bytes(tensors[DESCRIPTION].numpy()))
    return {name: _decode(value, tensors) for name, value in described.items()}
