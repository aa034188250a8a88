# SPDX-License-Identifier: Apache-2.0
"""Tensors that are read when they are used.

A LazyTensor has no memory. View operations create another by arithmetic. Other operations read
the smallest slice that covers the view, once (see LazyView). Those that may write get a private
copy of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from .._torch.torch_installed import torch as _torch
from . import view_arguments
from . import view_geometry as geometry
from .lazy_dtypes import Reads, reinterpret
from .lazy_reads import Stored
from .lazy_view import MAKE_PRIVATE, LazyView, whole_view
from .lazy_writers import (
    ELEMENTS,
    LAYOUT,
    WATCH,
    WRITES,
    Watch,
    address_of,
    find_functions,
    has_no_address,
    memory_needed,
    tensors_in,
    write_kind_of,
)
from .view_geometry import View

_Tensor = _torch.Tensor
_plainly = _torch._C.DisableTorchFunctionSubclass
_make = _Tensor._make_wrapper_subclass
# Code that uses an invalid data pointer then fails instead of writing to memory.
_forbid = getattr(_torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None)


class LazyTensor(_torch.Tensor):  # type: ignore[misc]
    """A view of a stored tensor, read when it is used. Thread-safe."""

    _lazy: LazyView

    def __new__(cls, data: Any = None, requires_grad: bool = True, **_: Any) -> Any:
        """Return a plain Parameter, for libraries that recreate a frozen one by its type."""
        return _torch.nn.Parameter(data, requires_grad=requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Use arithmetic if the result is a view; otherwise read first."""
        handler = _HANDLERS.get(func)
        if handler is not None:
            own = args[0] if args else None
            if isinstance(own, LazyTensor):
                lazy = own._lazy
                if lazy.tensor is not None and handler in (
                        _OF_CHANGED if lazy.has_changed else
                        _NONE if lazy.is_shared else _VIEW_MAKERS):
                    data = lazy.tensor if lazy.has_changed else lazy.make_private_layout()
                    return func(data, *args[1:], **(kwargs or {}))
                result = handler(func, args, kwargs or {})
                if result is not NotImplemented:
                    return result
        return _compute(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle operations from torch's own code."""
        if func in _ALIASES:
            return _alias(args[0])
        if func is _COPY and args[0].device.type == "meta" and isinstance(args[1], LazyTensor):
            return func(args[0], args[1]._lazy.make_meta(), *args[2:], **(kwargs or {}))
        return _call(func, args, kwargs or {}, write_kind_of(func, kwargs))

    @property
    def _is_param(self) -> bool:  # pyright: ignore
        """Whether it is a Parameter, which torch checks by this attribute for subclasses."""
        return bool(getattr(self, "_is_parameter", False))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:  # pyright: ignore
        object.__setattr__(self, "_is_parameter", value)
        if value and self.requires_grad:
            _become_parameter(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain tensor. copy.copy() also calls this, and may write to the result."""
        return _plain_kind(self, self._lazy.make_private()).__reduce_ex__(protocol)

    def _to_plain(self) -> Any:
        """Return the plain tensor, for saving."""
        return self._lazy.read()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the bytes."""
        return memo.setdefault(id(self), _plain_kind(self, self._lazy.read().detach().clone()))


def make_lazy(reads: Reads, stored: Stored) -> LazyTensor:
    """Create a lazy tensor of a whole stored tensor whose dtype torch has."""
    return _new_lazy(whole_view(reads, stored))


def _new_lazy(lazy: LazyView) -> LazyTensor:
    view = lazy.view
    try:
        made: LazyTensor = _make(
            LazyTensor, view.sizes, strides=view.strides, storage_offset=view.offset,
            dtype=lazy.stored.dtype, device=lazy.reads.device,
        )
    except TypeError:
        if max((*view.sizes, *view.strides), default=0) < 1 << 63:
            raise
        # Only tensors without elements have such shapes. Torch's message has a C++ stack.
        raise BufferError("dimensions or strides do not fit into 64 bits") from None
    made._lazy = lazy
    _forbid(made)
    return made


def _view_of(own: LazyTensor, view: View) -> LazyTensor:
    return _new_lazy(LazyView(own._lazy.reads, own._lazy.stored, view))


def _alias(own: LazyTensor) -> LazyTensor:
    """Return another lazy tensor of the same view, sharing memory once read, without gradient."""
    lazy = own._lazy
    if lazy.tensor is not None and lazy.tensor.requires_grad:
        lazy = lazy.with_tensor(lazy.tensor.detach())
    return _new_lazy(lazy)


def _plain_kind(own: LazyTensor, data: Any) -> Any:
    """Return a plain tensor as a Parameter if this one is, or with its requires_grad."""
    if own._is_param:
        return _torch.nn.Parameter(data, requires_grad=own.requires_grad)
    return data.requires_grad_(own.requires_grad) if data.is_leaf else data


_OWN_NAMES = {"_lazy", "_is_parameter"}


def _become_parameter(own: LazyTensor) -> None:
    """Become a plain Parameter, the same object, with the memory that was read for it.

    Required for gradients and for torch code that gathers them (DistributedDataParallel). If torch
    cannot swap two tensors (before 2.3, or referenced by a graph), it stays lazy.
    """
    exchange = getattr(_torch.utils, "swap_tensors", None)
    if exchange is not None:
        with contextlib.suppress(RuntimeError):
            made = _torch.nn.Parameter(own._lazy.tensor.detach())
            vars(made).update({name: value for name, value in vars(own).items()
                               if name not in _OWN_NAMES})
            exchange(own, made)


def _replace(thing: Any, by: Callable[[LazyTensor], Any]) -> Any:
    """Replace lazy tensors by plain ones in arguments of any nesting."""
    if isinstance(thing, LazyTensor):
        return by(thing)
    if type(thing) in (tuple, list):
        return type(thing)([_replace(part, by) for part in thing])
    if type(thing) is dict:
        return {key: _replace(part, by) for key, part in thing.items()}
    return thing


def _call(func: Any, args: Any, kwargs: Any, write_kind: int) -> Any:
    """Call a function with plain tensors, which may be in shared memory."""
    shared: set[int] = set()
    moved: set[int] = set()  # private memory whose elements have another layout

    def describe_view(own: LazyTensor) -> Any:
        data = own._lazy.read()
        if own._lazy.is_shared:
            shared.add(data.untyped_storage().data_ptr())
        elif not own._lazy.has_layout():
            moved.add(data.untyped_storage().data_ptr())
        return data

    need = memory_needed(func)
    if write_kind != WRITES and need in (ELEMENTS, LAYOUT):
        given = _replace(args, describe_view), _replace(kwargs, describe_view)
        done, result = _watch(func, given, shared) if write_kind == WATCH and shared else (
            True, func(*given[0], **given[1]))
        if done and not ((shared or moved) and _is_on(result, shared | moved)):
            return result
    def make_private(own: LazyTensor) -> Any:
        return MAKE_PRIVATE[need](own._lazy)

    lazy_tensors = [one for one in tensors_in([args, kwargs]) if isinstance(one, LazyTensor)]
    before = [_geometry(make_private(own)) for own in lazy_tensors]
    result = func(*_replace(args, make_private), **_replace(kwargs, make_private))
    for own, geometry_before in zip(lazy_tensors, before, strict=True):
        if _geometry(own._lazy.tensor) != geometry_before:
            own._lazy.has_changed = True
    # A function that writes in place returns the tensor that it was given.
    return next((own for own in lazy_tensors if own._lazy.tensor is result), result)


def _geometry(data: Any) -> tuple[Any, ...]:
    return data.dtype, data.device, data.shape, data.stride(), data.storage_offset()


def _watch(func: Any, given: tuple[Any, Any], shared: set[int]) -> tuple[bool, Any]:
    """Return (whether it ran, its result). It is interrupted before it writes to shared memory."""
    watch = Watch(shared)
    try:
        with watch:
            return True, func(*given[0], **given[1])
    except Exception:
        if watch.found:
            return False, None
        raise


def _is_on(result: Any, addresses: set[int]) -> bool:
    """Tell whether a result shares memory with its inputs, because the caller may write to it."""
    return any(address_of(tensor) in addresses or has_no_address(tensor)
               for tensor in tensors_in(result))


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with plain tensors, except for copies to the meta device."""
    if func is _Tensor.copy_ and len(args) >= 2 and type(args[1]) is LazyTensor:
        target = args[0]
        if type(target) is LazyTensor:
            target = target._lazy.make_private()
        if not target.is_meta:
            return func(target, args[1]._lazy.read(True), *args[2:], **kwargs)
        with _plainly():
            return func(*args, **kwargs)  # the caller may be counting copies with a dispatch mode
    if func in _LIKE and len(args) == 2 and type(args[1]) is LazyTensor:
        return func(args[0], args[1]._lazy.make_meta())
    return _call(func, args, kwargs, write_kind_of(func, kwargs))


# For these functions only the second tensor's shape matters.
_LIKE = {_Tensor.expand_as, _Tensor.view_as, _Tensor.reshape_as}


# ---- functions that create views, by arithmetic in simple cases ----

_Handler = Callable[[Any, Any, Any], Any]


def _ask_torch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run torch's function on a meta tensor, and apply the resulting view to the lazy tensor."""
    own = args[0]
    meta_copy = own._lazy.make_meta()
    if any(isinstance(part, LazyTensor) for part in args[1:]):
        if not func.__name__.endswith("_as"):  # the others use its values
            return NotImplemented
        args = (own, *(part._lazy.make_meta() if isinstance(part, LazyTensor) else part
                       for part in args[1:]))
    result = func(meta_copy, *args[1:], **kwargs)
    is_many = isinstance(result, (tuple, list))
    made = []
    for part in result if is_many else (result,):
        if not isinstance(part, _Tensor) or part.is_conj() or part.is_neg():
            return NotImplemented
        if part.untyped_storage()._cdata != meta_copy.untyped_storage()._cdata:
            return NotImplemented  # torch makes a copy
        source = reinterpret(own._lazy.reads, own._lazy.stored, part.dtype)
        if source is None:
            return NotImplemented
        view = View(tuple(part.size()), part.stride(), int(part.storage_offset()))
        view_arguments.check_inside(source[1], view)
        made.append(_new_lazy(LazyView(*source, view)))
    return type(result)(made) if is_many else made[0]


def _by_arithmetic(find: Callable[..., View | None]) -> _Handler:
    """Return a handler for the view that `find` computes from the arguments, or torch's."""
    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        own = args[0]
        if not kwargs:
            view = find(own._lazy.view, *args[1:])
            if view is not None:
                return _view_of(own, view)
        return _ask_torch(func, args, kwargs)

    return handle


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle integers, slices, None and Ellipsis; for other indices the tensor is read."""
    own, key = args
    view = geometry.index(own._lazy.view, key)
    return NotImplemented if view is None else _view_of(own, view)


def _parts(func: Any, args: Any, kwargs: Any) -> Any:
    """unbind(), and iteration."""
    own = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    sizes = own._lazy.view.sizes
    if type(dim) is not int or not -len(sizes) <= dim < len(sizes):
        return _ask_torch(func, args, kwargs)
    parts = [_view_of(own, view) for at in range(sizes[dim])
             if (view := geometry.select(own._lazy.view, dim, at)) is not None]
    return iter(parts) if func is _Tensor.__iter__ else tuple(parts)


def _chunk(func: Any, args: Any, kwargs: Any) -> Any:
    own, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim", 0)
    count = args[1] if len(args) > 1 else kwargs.get("chunks")
    sizes = own._lazy.view.sizes
    simple = type(dim) is int and type(count) is int and count > 0
    if not simple or not -len(sizes) <= dim < len(sizes) or sizes[dim] == 0:
        return _ask_torch(func, args, kwargs)
    step = -(-sizes[dim] // count)
    made = []
    for first in range(0, sizes[dim], step):
        view = geometry.narrow(own._lazy.view, dim, first, min(step, sizes[dim] - first))
        if view is not None:
            made.append(_view_of(own, view))
    return tuple(made)


def _same(func: Any, args: Any, kwargs: Any) -> Any:
    return _alias(args[0])


def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """Computed from offsets in the file, because memory that was read may be elsewhere."""
    own = args[0]
    if own._lazy.tensor is None or own._lazy.is_shared:
        return _ask_torch(func, args, kwargs)
    return func(own._lazy.make_private_stored(), *args[1:], **kwargs)


def _self_if_packed(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) > 1 or not geometry.is_packed(args[0]._lazy.view):
        return NotImplemented
    return args[0]


def _self_if_unchanged(func: Any, args: Any, kwargs: Any) -> Any:
    """cpu(), float() and similar without an effect; to() with a dtype or a device."""
    own, lazy = args[0], args[0]._lazy
    kind = lazy.reads.device
    if func is _Tensor.cpu:
        return own if kind.type == "cpu" and len(args) == 1 and not kwargs else NotImplemented
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for part in args[1:]:
        if isinstance(part, _torch.dtype):
            dtype = part
        elif isinstance(part, (str, _torch.device)):
            device = part
        else:
            return NotImplemented
    if kwargs.keys() - {"device", "dtype", "non_blocking"}:
        return NotImplemented
    if device is not None and _torch.device(device).type == "meta":
        return lazy.make_meta().to("meta", dtype, copy=True)
    if device is not None and _torch.device(device) != kind:
        return NotImplemented
    if dtype in (None, lazy.stored.dtype):
        return own if lazy.reads.stays_lazy else lazy.read()
    if lazy.tensor is not None:
        return NotImplemented
    converted = lazy.reads.convert(lazy.stored, lazy.view, dtype)
    return NotImplemented if converted is None else converted


def _without_bytes(func: Any, args: Any, kwargs: Any) -> Any:
    """empty_like() and similar, which ignore the elements."""
    lazy = args[0]._lazy
    return func(lazy.make_meta(), *args[1:], **{"device": lazy.reads.device, **kwargs})


def _attribute(func: Any, args: Any, kwargs: Any) -> Any:
    with _plainly():
        return func(*args, **kwargs)


def _identity(func: Any, args: Any, kwargs: Any) -> Any:
    """Like _attribute(), also once the tensor has changed."""
    with _plainly():
        return func(*args, **kwargs)


def _of_data(func: Any, args: Any, kwargs: Any) -> Any:
    """State that a tensor only has once read: a gradient, a version counter."""
    data = args[0]._lazy.tensor
    if data is not None:
        return func(data, *args[1:], **kwargs)
    return _identity(func, args, kwargs)


def _type(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the name of its type, or convert to another type."""
    return NotImplemented if len(args) > 1 or kwargs else func(_torch.empty(
        0, dtype=args[0]._lazy.stored.dtype, device=args[0]._lazy.reads.device))


def _set_gradient(func: Any, args: Any, kwargs: Any) -> Any:
    """requires_grad_(), also for a Parameter; gradients need private memory."""
    own = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    before = own._lazy.tensor
    if before is not None and (before.requires_grad or before.grad is not None):
        before.requires_grad_(wanted)  # it keeps its gradient, and its place in graphs
    elif wanted:
        tensor = own._lazy.make_private().detach().requires_grad_(True)
        own._lazy = own._lazy.with_tensor(tensor)
        own._lazy.has_stored = False
        if own._is_param:
            _become_parameter(own)
    return own


def _set_requires_grad(func: Any, args: Any, kwargs: Any) -> None:
    """The setter of requires_grad."""
    _set_gradient(func, args, {})


_TABLE: tuple[tuple[str, _Handler], ...] = (
    ("narrow", _by_arithmetic(view_arguments.narrow)),
    ("select", _by_arithmetic(view_arguments.select)),
    ("transpose swapaxes swapdims", _by_arithmetic(view_arguments.transpose)),
    ("t T mT", _by_arithmetic(view_arguments.swap_last)),
    ("unsqueeze", _by_arithmetic(view_arguments.unsqueeze)),
    ("view reshape", _by_arithmetic(view_arguments.reshape)),
    ("permute", _by_arithmetic(view_arguments.permute)),
    ("__getitem__", _index),
    ("unbind __iter__", _parts),
    ("chunk", _chunk),
    ("squeeze expand expand_as view_as flatten unflatten ravel movedim moveaxis split "
     "split_with_sizes tensor_split hsplit vsplit dsplit diagonal unfold reshape_as "
     "view_as_real view_as_complex real imag", _ask_torch),
    ("as_strided", _as_strided),
    ("detach data alias", _same),
    ("contiguous", _self_if_packed),
    ("to cpu", _self_if_unchanged),
    ("empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full",
     _without_bytes),
    ("requires_grad_", _set_gradient),
    ("type", _type),
    ("shape size stride storage_offset dim ndim ndimension dtype device layout numel nelement "
     "is_contiguous element_size itemsize nbytes is_floating_point is_complex is_cuda is_cpu "
     "is_meta is_sparse is_sparse_csr is_mkldnn is_quantized is_xpu __len__ get_device is_signed "
     "is_inference _is_view is_nested is_conj is_neg names has_names", _attribute),
    ("__hash__", _identity),
    ("is_leaf requires_grad grad grad_fn retains_grad _version output_nr", _of_data),
)
_HANDLERS: dict[Any, _Handler] = {
    func: handler for names, handler in _TABLE for func in find_functions(names)
}
_HANDLERS.update(dict.fromkeys((_torch.ops.aten.view, _torch.ops.aten.view.dtype), _ask_torch))
_HANDLERS[getattr(_Tensor.requires_grad, "__set__")] = _set_requires_grad  # noqa: B009
# Once a tensor was read, torch handles these functions on the plain tensor.
_VIEW_MAKERS = {
    handler for names, handler in _TABLE
    if handler not in (_attribute, _identity, _of_data, _set_gradient, _self_if_unchanged, _same,
                       _as_strided, _type, _self_if_packed, _without_bytes)
}
_OF_CHANGED = {handler for _, handler in _TABLE if handler not in (
    _identity, _set_gradient, _same)}
_NONE: set[_Handler] = set()
_COPY = _torch.ops.aten.copy_.default
_ALIASES = {_torch.ops.aten.detach.default, _torch.ops.aten.alias.default}
