# SPDX-License-Identifier: Apache-2.0
"""The memory of tensors that weight deltas are made of, or whose new bytes they write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .. import _core
from .._base.argument_types import Path
from .._base.errors import printable, refuse, shown


def named_tensors(parameter: str, tensors: Any) -> Mapping[str, Any]:
    """Return a mapping, or the state of a torch module. TypeError for something else."""
    if hasattr(tensors, "state_dict"):
        tensors = tensors.state_dict(keep_vars=True)
    if not (hasattr(tensors, "keys") and hasattr(tensors, "__getitem__")):
        raise TypeError(f"{parameter} must be a mapping of names to tensors, or a torch module, "
                        f"not {shown(tensors)}")
    named: Mapping[str, Any] = tensors
    return named


def state_like(old: Path, new: Any) -> Mapping[str, Any]:
    """Return a mapping, or a module's state without tied tensors that the checkpoint `old` lacks.

    All their bytes belong to tensors that the checkpoint has, too.
    """
    state = named_tensors("new", new)
    if not hasattr(new, "state_dict"):
        return state
    known = set(_core.Model(os.fspath(old)).names())
    if state.keys() <= known:
        return state
    from .._torch.tensor_memory import extents_of, find_covered

    extents = extents_of({name: tensor for name, tensor in state.items()
                          if hasattr(tensor, "untyped_storage")})
    tied = find_covered(extents, known) - known
    return {name: tensor for name, tensor in state.items() if name not in tied}


def _settled(name: str, tensor: Any) -> Any:
    """Return a dense torch tensor that has values. TypeError for one of another layout.

    RuntimeError for a DTensor.
    """
    from .._torch.tensor_memory import settle
    from .._torch.torch_installed import torch

    if hasattr(tensor, "full_tensor"):
        raise RuntimeError(f"{printable(name)} is a {type(tensor).__name__}, a part of a tensor on "
                           "several ranks, but deltas are of whole tensors: make() takes what "
                           "`.full_tensor()` returns, and commit() cannot write to parts")
    plain = settle(tensor).detach()
    if plain.is_nested or plain.layout is not torch.strided:
        layout = str(plain.layout).removeprefix("torch.").strip("_")
        kind = "nested" if plain.is_nested else "sparse" if "sparse" in layout else layout
        raise TypeError(f"{printable(name)}: a dense tensor is needed, not a {kind} one")
    if plain.device.type == "meta":
        raise NotImplementedError(f"{printable(name)}: a tensor with values is needed, not one "
                                  "on the meta device")
    return plain


def _packed_array(name: str, tensor: Any) -> Any:
    """Return a packed array in the machine's byte order, a copy if necessary."""
    import numpy

    array = numpy.asarray(tensor)
    if array.dtype.kind not in "biufcV":
        raise TypeError(f"{printable(name)}: a torch tensor or numpy array is needed, not "
                        f"{type(tensor).__name__} of {array.dtype}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return numpy.ascontiguousarray(array)


def memory_rows(tensors: Mapping[str, Any]) -> tuple[list[tuple[str, int, int]], list[Any]]:
    """Rows of a state to read, and the objects that keep it alive (copies where necessary)."""
    rows, kept = [], []
    for name in tensors.keys():  # noqa: SIM118 - iteration may give pairs, as LazyModel's does
        tensor = tensors[name]
        if not isinstance(name, str):
            raise TypeError(f"tensor names must be str, not {shown(name)}")
        if hasattr(tensor, "untyped_storage"):
            from .._torch.tensor_memory import address_of
            from .._torch.torch_state import plain

            memory = plain(_settled(name, tensor))
            address = address_of(name, memory)
        else:
            memory = _packed_array(name, tensor)
            address = memory.__array_interface__["data"][0]
        kept.append(memory)
        rows.append((name, address, memory.nbytes))
    return rows, kept


class Place:
    """Memory into which the new bytes of a tensor are written.

    address, nbytes: of the tensor's memory, or of a copy that finish() copies back.
    """

    def __init__(self, name: str, tensor: Any) -> None:
        """Find the memory. TypeError or ValueError for a tensor that has none to write into."""
        self._tensor: Any = None  # to be copied to
        self._name = name
        if hasattr(tensor, "untyped_storage"):
            self._memory = self._find(name, _settled(name, tensor))
            from .._torch.tensor_memory import address_of

            self.address = address_of(name, self._memory)
        elif hasattr(tensor, "__array_interface__") and hasattr(tensor, "flags"):
            if not (tensor.flags.c_contiguous and tensor.flags.writeable):
                fault = "writable" if tensor.flags.c_contiguous else "contiguous"
                raise ValueError(f"{printable(name)}: the array must be {fault}")
            if not tensor.dtype.isnative:
                raise ValueError(f"{printable(name)}: the array must have the machine's byte "
                                 f"order, not {tensor.dtype.str}")
            self._memory = tensor
            self.address = tensor.__array_interface__["data"][0]
        else:
            raise TypeError(f"{printable(name)}: a torch tensor or numpy array is needed, not "
                            f"{type(tensor).__name__}")
        self.nbytes: int = self._memory.nbytes
        self._place = self._place_of(tensor)

    def _place_of(self, tensor: Any) -> tuple[Any, ...]:
        """Return where the memory of a tensor is, and its size and layout."""
        if not hasattr(tensor, "untyped_storage"):
            return (tensor.__array_interface__["data"], tensor.shape, tensor.strides)
        plain = _settled(self._name, tensor)
        return (plain.data_ptr(), plain.untyped_storage().nbytes(), plain.shape, plain.stride())

    def check(self, tensors: Mapping[str, Any]) -> None:
        """Raise ValueError if the tensor of this name has other memory now."""
        try:
            is_same = self._place_of(tensors[self._name]) == self._place
        except (KeyError, TypeError, AttributeError, RuntimeError):  # gone, or without memory
            is_same = False
        if not is_same:
            raise ValueError(f"{printable(self._name)}: the tensor or its memory was exchanged or "
                             "freed after prepare(). Prepare the change again")

    def _find(self, name: str, tensor: Any) -> Any:
        """Return the tensor, or a packed copy on the CPU if bytes cannot be written into it."""
        from .._torch.tensor_memory import elements_overlap
        from .._torch.torch_state import plain

        if elements_overlap(tensor):
            raise ValueError(f"{printable(name)}: several elements of the tensor have the same "
                             "memory, so that it cannot be written: pass a `.clone()`, or its base")
        memory = plain(tensor)
        if memory is tensor:
            return tensor
        self._tensor = tensor
        return memory.clone() if memory.data_ptr() == tensor.data_ptr() else memory

    def finish(self) -> None:
        """Copy the new bytes to the tensor, if they are in a copy."""
        if self._tensor is not None:
            self._tensor.copy_(self._memory)


def check_kinds(old: Path, tensors: Mapping[str, Any]) -> None:
    """Refuse torch tensors of another dtype or shape than the old checkpoint's.

    Bytes (uint8) may stand for any dtype, and numpy arrays are compared by size only: numpy lacks
    dtypes. Names that the checkpoint lacks are reported later.
    """
    every = ((name, tensors[name]) for name in tensors.keys())  # noqa: SIM118
    known = {name: tensor for name, tensor in every
             if hasattr(tensor, "untyped_storage") and str(tensor.dtype) != "torch.uint8"}
    if not known:
        return
    from .._torch.torch_state import torch_dtype

    model = _core.Model(os.fspath(old))
    for name in model.names():
        dtype, shape, *_ = model.info(model.find(name))
        kind, made = torch_dtype(dtype), known.get(name)
        if kind is None or made is None or made.is_nested:
            continue
        if made.dtype != kind or tuple(made.shape) != tuple(shape):
            refuse(f"{name!r}: the tensor is {dtype} {list(shape)} in the old checkpoint and "
                   f"{made.dtype} {list(made.shape)} in the new state; that needs a full version",
                   "TensorInvalidInfo")
