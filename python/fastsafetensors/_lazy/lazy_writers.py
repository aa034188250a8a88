# SPDX-License-Identifier: Apache-2.0
"""Determines which torch functions write to their arguments.

Pages of a file are shared, so writing to them changes what others read. For most functions name and
schema are enough. Composite functions (of torch.nn.functional, collectives, compiled scripts) are
watched while they run: a dispatch mode sees each operator, and the first one that would write
interrupts the call before anything is written.
"""

from __future__ import annotations

import types
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .._torch.torch_installed import torch as _torch

_Tensor = _torch.Tensor
_aten = _torch.ops.aten

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor",
              "lshift", "rshift", "matmul")
_WRITERS = {
    "__set__", "__setitem__", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage",
    "storage", "_typed_storage", "share_memory", *(f"__i{name}__" for name in _OPERATORS),
}
_READERS = {
    *(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")), "__div__", "__rdiv__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__pos__", "__abs__",
    "__invert__", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__len__",
    "__contains__", "__repr__", "__str__", "__format__", "__get__", "tolist", "item", "to",
    "clone", "__deepcopy__", "cpu", "cuda", "float", "half", "double", "bfloat16", "int", "long",
}
# They update statistics, which their schemas do not show.
_HIDDEN = ("batch_norm", "instance_norm")
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
             types.MethodWrapperType)

# They return data pointers, and need only the view's elements.
_EXPORTS = {"numpy", "__array__", "__dlpack__", "data_ptr"}
# They access memory around a view, or make it part of the tensor.
_AROUND = {
    "addbmm_", "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter",
    "diagonal_scatter", "select_scatter", "slice_scatter", "_reshape_alias", "_reshape_alias_copy",
    "resize", "resize_", "resize_as", "resize_as_", "resize_as_sparse_", "set_", "t_", "transpose_",
    "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_",
}
_STORAGES = {"untyped_storage", "storage", "_typed_storage"}

# They check the offset or the strides of their input.
_CHECKERS = {"native_group_norm", "take_along_dim", "view", "view_as_complex"}

READS, WRITES, WATCH = range(3)
# What a function needs of a view's memory: its elements in any layout (ELEMENTS); with the stored
# tensor's strides and offset (LAYOUT); also the rest of that tensor, in memory that torch can
# resize (STORED) or in any memory (STORAGE).
ELEMENTS, LAYOUT, STORED, STORAGE = range(4)
_needs: dict[Any, int] = {}
_known: dict[Any, int] = {}


def operator_writes(operator: Any) -> bool:
    """Tell whether an operator overload writes to one of its tensor arguments."""
    name = operator._schema.name.partition("::")[2]
    return bool(operator._schema.is_mutable) or name.endswith("_") or any(
        part in name for part in _HIDDEN)


def _name_of(func: Any) -> str:
    if isinstance(func, _torch._ops.OpOverload):
        return str(func._schema.name.partition("::")[2])
    return str(getattr(func, "__name__", ""))


def _find_write_kind(func: Any) -> int:
    name = _name_of(func)
    if name in _CHECKERS:
        return WRITES
    if isinstance(func, _torch._ops.OpOverload):
        return WRITES if operator_writes(func) else READS
    if name in _WRITERS or (name.endswith("_") and not name.endswith("__")):
        return WRITES
    if not isinstance(func, _BUILT_IN):
        return WATCH
    if name in _READERS:
        return READS
    packet = getattr(_aten, name, None)
    if packet is None or any(part in name for part in _HIDDEN):
        return WATCH
    overloads = [getattr(packet, one) for one in packet.overloads() if "out" not in one]
    is_reader = bool(overloads) and not any(map(operator_writes, overloads))
    return READS if is_reader else WATCH


def write_kind_of(func: Any, kwargs: Any) -> int:
    """Return READS, WATCH (only running it shows) or WRITES (or needs private memory)."""
    known = _known.get(func)
    if known is None:
        known = _known[func] = _find_write_kind(func)
    if kwargs and ("out" in kwargs or kwargs.get("inplace")):
        return WRITES
    return known


def memory_needed(func: Any) -> int:
    """ELEMENTS, LAYOUT, STORED or STORAGE: the private memory that a function needs."""
    known = _needs.get(func)
    if known is None:
        name = _name_of(func)
        known = (STORED if name in _AROUND else STORAGE if name in _STORAGES
                 else ELEMENTS if name in _EXPORTS else LAYOUT)
        _needs[func] = known
    return known


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Interrupts the first operator of this thread that would write to certain storages."""

    def __init__(self, addresses: set[int]) -> None:
        """addresses: of the storages."""
        super().__init__()
        self.addresses, self.found = addresses, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check which arguments are written, then run the operator."""
        kwargs = kwargs or {}
        if operator_writes(func):
            written = _written(func._schema, args, kwargs)
            if any(address_of(tensor) in self.addresses for tensor in tensors_in(written)):
                self.found = True
                raise RuntimeError(f"{func} would write to shared memory")
        return func(*args, **kwargs)


def _written(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that are written: all, if the schema does not say."""
    if not schema.is_mutable:
        return [*args, *kwargs.values()]
    named = [(kwargs.get(argument.name) if at >= len(args) else args[at], argument.alias_info)
             for at, argument in enumerate(schema.arguments)]
    return [value for value, alias in named if alias is not None and alias.is_write]


def tensors_in(thing: Any) -> list[Any]:
    """The tensors in arguments of any nesting."""
    if isinstance(thing, _Tensor):
        return [thing]
    if isinstance(thing, dict):
        thing = thing.values()
    elif not isinstance(thing, (tuple, list)):
        return []
    return [tensor for part in thing for tensor in tensors_in(part)]


def has_no_address(tensor: Any) -> bool:
    """Tell whether a tensor with elements consists of other tensors (sparse, nested).
    """
    return tensor.layout is not _torch.strided or (
        type(tensor) is not _Tensor and bool(tensor.numel()) and not tensor.is_meta
        and not address_of(tensor))


def address_of(tensor: Any) -> int:
    """The address of a tensor's storage; 0 if its kind has no storage."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def find_functions(names: str) -> list[Any]:
    """torch's functions of these names: methods, module functions and attribute getters."""
    found = []
    for name in names.split():
        for home in (_Tensor, _torch):
            thing = getattr(home, name, None)
            if thing is not None:
                found.append(getattr(thing, "__get__", thing) if _is_getter(thing) else thing)
    return found


def _is_getter(thing: Any) -> bool:
    return type(thing).__name__ in ("getset_descriptor", "property")
