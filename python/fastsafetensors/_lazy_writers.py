# SPDX-License-Identifier: Apache-2.0
"""Which of torch's functions write to what they are given.

The memory of a file's pages is everybody's: who writes to it changes what others read, now and
later. Names and schemas tell of most functions. Those that are made of others (of
torch.nn.functional, of collectives, compiled scripts) are watched while they run: each operator
comes by, and the first that would write ends it, before anything was written.
"""

from __future__ import annotations

import types
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ._torch_installed import torch as _torch

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
# They update statistics, which their schemas do not say.
_HIDDEN = ("batch_norm", "instance_norm")
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
             types.MethodWrapperType)

READS, WRITES, WATCH = range(3)
_known: dict[Any, int] = {}


def operator_writes(operator: Any) -> bool:
    """Tell whether an operator (of one overload) writes to some tensor that it is given."""
    name = operator._schema.name.partition("::")[2]
    return bool(operator._schema.is_mutable) or name.endswith("_") or any(
        part in name for part in _HIDDEN)


def _find_way(func: Any) -> int:
    if isinstance(func, _torch._ops.OpOverload):
        return WRITES if operator_writes(func) else READS
    name = getattr(func, "__name__", "")
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


def way_of(func: Any, kwargs: Any) -> int:
    """READS, WRITES (or hands out where memory lies), or WATCH: it takes watching to know."""
    known = _known.get(func)
    if known is None:
        known = _known[func] = _find_way(func)
    if kwargs and ("out" in kwargs or kwargs.get("inplace")):
        return WRITES
    return known


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Ends the first operator of this thread that would write to memory at some addresses."""

    def __init__(self, addresses: set[int]) -> None:
        """addresses: of storages."""
        super().__init__()
        self.addresses, self.found = addresses, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what is written to; then do it."""
        kwargs = kwargs or {}
        if operator_writes(func):
            written = _written(func._schema, args, kwargs)
            if any(address_of(tensor) in self.addresses for tensor in tensors_in(written)):
                self.found = True
                raise RuntimeError(f"{func} would write to memory that others read")
        return func(*args, **kwargs)


def _written(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """Those of the arguments that are written to: all, where the schema does not say."""
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
    """Tell whether a tensor with elements is made of others (sparse, nested): of which, who knows.
    """
    return tensor.layout is not _torch.strided or (
        type(tensor) is not _Tensor and bool(tensor.numel()) and not tensor.is_meta
        and not address_of(tensor))


def address_of(tensor: Any) -> int:
    """The address of a tensor's storage; 0: it is of a kind without memory."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
