# SPDX-License-Identifier: Apache-2.0
"""Training state as tensors and a description: what files of tensors keep of nested state."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from .._base.errors import printable
from .._torch.tensor_memory import storage_ptr
from .._torch.torch_installed import torch

# The tensor that holds the description, as JSON in bytes.
DESCRIPTION = "fastsafetensors.state"
# In the description: {number of a dict in the state, in depth-first order: its _metadata}.
# torch.nn.Module.state_dict() stores the versions of modules there. Older versions of this package
# read it as one more name of the state.
_METADATA = "fastsafetensors.metadata"
_PLAIN = (str, int, float, bool, type(None))
# As much as the header of a file.
_PATHS_BYTES_MAX = 100_000_000


def _plain_text(text: str) -> str:
    """The characters of a str, also of a subclass whose str() gives others, as enumerations do."""
    return str.__str__(text)


# JSON readers of Python refuse more than 4,300 digits.
_INT_BITS_MAX = 14_000


def _is_unicode(text: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return True
    return False


def order_of(tensor: Any) -> list[int] | None:
    """Return the dimensions in the order of memory, outermost first.

    None: in order, or the elements do not fill a range of memory once. A file has the elements in
    the order of the dimensions.
    """
    strides, shape = tensor.stride(), tensor.shape
    order = sorted(range(len(shape)), key=lambda d: -strides[d])
    expected = 1
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != expected:
            return None
        expected *= shape[d]
    return None if expected == 0 or order == sorted(order) else order


def _in_order(tensor: Any, order: list[int]) -> Any:
    """Return a copy whose dimensions lie in memory as order_of() has found them.

    Fused optimizers of torch pair the elements of a parameter and its state by their place in
    memory, so both must have one order.
    """
    if {*map(repr, order)} != {*map(str, range(tensor.dim()))} or len(order) != tensor.dim():
        raise ValueError(f"the checkpoint has a tensor of {tensor.dim()} dimensions, and an order "
                         "of others")
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


class _Encoder:
    """Turns nested values into JSON, and puts their tensors aside."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.metadata: dict[int, Any] = {}
        self._dict_count = 0
        self._known: dict[tuple[Any, ...], str] = {}

    def _tensor(self, tensor: Any, path: str) -> Any:
        """Return JSON that stands for a tensor: its name, or [name, order of its dimensions]."""
        name = self._name(tensor, path)
        order = order_of(tensor)
        return name if order is None else [name, order]

    def _name(self, tensor: Any, path: str) -> str:
        """The name of a tensor; one that comes twice is kept once."""
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(f"{printable(path)}: the parameter of a lazy module has no values "
                             "yet. Call the module with a batch before its state is saved")
        if not _is_unicode(path):
            raise TypeError(f"{path!r}: a name that is not Unicode can't be saved")
        if tensor.is_nested:
            raise TypeError(f"{printable(path)}: a nested tensor can't be saved: the format has "
                            "only tensors of one shape. Save its parts, unbind()")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{printable(path)}: a sparse tensor can't be saved: make it dense "
                             "first with `.to_dense()`")
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
            if isinstance(value, str):
                return _plain_text(value)
            if isinstance(value, int) and value.bit_length() > _INT_BITS_MAX:
                raise TypeError(f"{printable(path)}: an int of {value.bit_length()} bits can't "
                                "be saved")
            if type(value) not in _PLAIN:
                value = next(kind(value) for kind in (bool, int, float) if isinstance(value, kind))
            return value
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, Mapping):
            if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
                self.metadata[self._dict_count] = getattr(value, "_metadata", None)
            self._dict_count += 1
            return {"dict": [[plain := self.encode(key, path),
                              self.encode(item, _path_below(path, plain))]
                             for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [self.encode(item, f"{path}.{at}") for at, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        return self._other(value, path)

    def _other(self, value: Any, path: str) -> Any:
        kind, numpy = type(value), sys.modules.get("numpy")
        if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
            native = numpy.array(value, value.dtype.newbyteorder("="), subok=False)
            try:
                tensor = torch.from_numpy(native)
            except TypeError:
                words = f"{printable(path)}: an array of {value.dtype} can't be saved"
                raise TypeError(words) from None
            return {"array": self._tensor(tensor, path)}
        if numpy is not None and isinstance(value, numpy.generic):
            plain = value.item()
            if not isinstance(plain, numpy.generic):
                return self.encode(plain, path)
        type_name = printable(kind.__qualname__)
        article = "an" if type_name[0] in "aeiouAEIOU" else "a"
        raise TypeError(f"{printable(path)}: {article} {type_name} can't be saved; tensors, "
                        "NumPy arrays, int, float, bool, str, bytes, None, dicts, lists "
                        "and tuples of these can")


def _path_below(path: str, key: Any) -> str:
    """The path of a dict's value. key: as JSON stands for it."""
    return f"{path}.{_KeyDecoder({}, {}).decode(key)}"


def _encode_named(encoder: _Encoder, name: str, value: Any) -> Any:
    try:
        return encoder.encode(value, name)
    except RecursionError:
        raise TypeError(f"{printable(name)}: contains itself, or is nested too deeply") from None


def encode_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of nested state, with one that describes the rest.

    Raises:
        TypeError: a value that can't be saved, with its path; a name that is not a str.
        ValueError: a name that is reserved.
    """
    with torch.inference_mode(False):  # its tensors have no version counters, which lazy saves need
        return _encode_all(state)


def _encode_all(state: Mapping[str, Any]) -> dict[str, Any]:
    encoder = _Encoder()
    described = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"names of the state must be str, not {name!r}")
        plain = _plain_text(name)
        if plain == _METADATA:
            raise ValueError(f"the state can't have the name {plain!r}: it is reserved")
        described[plain] = _encode_named(encoder, plain, value)
    if encoder.metadata:  # a copy: they may have such metadata themselves, which is left out
        described[_METADATA] = _encode_named(encoder, _METADATA, dict(encoder.metadata))
    text = json.dumps(described).encode()
    return {**encoder.tensors, DESCRIPTION: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def _is_metadata(value: Any) -> bool:
    """Whether it is a _metadata of torch: {name of a module: {"version": ...}}."""
    return value is None or (isinstance(value, dict)
                             and all(isinstance(one, dict) for one in value.values()))


class _Decoder:
    """Makes nested values of JSON and tensors."""

    def __init__(self, tensors: Mapping[str, Any], metadata: dict[int, Any]) -> None:
        self._tensors, self._metadata = tensors, metadata
        self._dict_count = 0
        self._copies: dict[str, tuple[list[int], Any]] = {}

    def decode(self, value: Any) -> Any:
        """Return the value that JSON stands for."""
        if not isinstance(value, dict):
            return value
        (kind, item), = value.items()
        if kind == "tensor":
            return self._tensor(item)
        if kind == "array":
            return self._tensor(item).cpu().numpy()
        if kind == "bytes":
            return base64.b64decode(item)
        if kind == "dict":
            return self._decode_dict(item)
        if kind in ("list", "tuple"):
            parts = [self.decode(entry) for entry in item]
            return parts if kind == "list" else tuple(parts)
        raise ValueError(f"the checkpoint has a value of an unknown kind {kind!r}")

    def _tensor(self, item: Any) -> Any:
        """Return the tensor for what _Encoder._tensor() has returned."""
        if isinstance(item, str):
            return self._tensors[item]
        name, order = item
        if name not in self._copies:  # a tensor that comes twice is one
            self._copies[name] = (order, _in_order(self._tensors[name], order))
        known, copy = self._copies[name]
        if order != known:
            raise ValueError(f"{printable(name)}: a tensor in two orders")
        return copy

    def _decode_dict(self, item: Any) -> Any:
        number = self._dict_count
        self._dict_count += 1
        found: Any = {self.decode(key): self.decode(entry) for key, entry in item}
        if number in self._metadata and _is_metadata(self._metadata[number]):
            found = OrderedDict(found)
            found._metadata = self._metadata[number]
        return found


class _KeyDecoder(_Decoder):
    """Decodes keys for paths, in which tensors are their names."""

    def _tensor(self, item: Any) -> Any:
        return item if isinstance(item, str) else item[0]


def _places(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        return
    (kind, item), = value.items()
    if kind in ("tensor", "array"):
        yield path, item if isinstance(item, str) else item[0]
    elif kind == "dict":
        for key, entry in item:
            yield from _places(entry, _path_below(path, key))
    elif kind in ("list", "tuple"):
        for at, entry in enumerate(item):
            yield from _places(entry, f"{path}.{at}")


def _read_description(tensor: Any) -> Any:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"the tensor {DESCRIPTION!r} does not hold bytes")
    return json.loads(bytes(tensor.cpu().numpy()))


def described_tensors(description: Any) -> list[tuple[str, str]]:
    """Return (path in the state, name of its tensor): several paths for a tensor that is shared.

    Raises:
        ValueError: a description that encode_state() did not make, or paths of more bytes than the
            header of a file may have.
    """
    found, size = [], 0
    try:
        for key, value in _read_description(description).items():
            for path, name in _places(value, key):
                found.append((_plain_text(path), _plain_text(name)))
                size += len(path)
                if size > _PATHS_BYTES_MAX:
                    raise ValueError("the paths have more bytes than the header of a file may have")
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the tensor {DESCRIPTION!r} is damaged: {printable(error)}") from error
    return found


def decode_state(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return what encode_state() was given.

    Raises:
        ValueError: tensors that it did not make.
    """
    if DESCRIPTION not in tensors:
        raise ValueError(f"no tensor {DESCRIPTION!r}: this is no checkpoint of CheckpointManager")
    described = _read_description(tensors[DESCRIPTION])
    metadata = _Decoder(tensors, {}).decode(described.pop(_METADATA, {"dict": []}))
    if not isinstance(metadata, dict):
        raise ValueError(f"{_METADATA}: not a dict")
    decoder = _Decoder(tensors, metadata)
    return {name: decoder.decode(value) for name, value in described.items()}
