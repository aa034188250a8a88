# SPDX-License-Identifier: Apache-2.0
"""Tensors that read when they are used.

A LazyTensor is a torch.Tensor with the shape, dtype and device of what a file has, and no memory.
Operations that give views give another one, by arithmetic; a copy to the meta device reads nothing;
anything else reads the smallest box that covers the view, once, and goes on with a plain tensor.
What may write to that has a copy of its own: the file's pages are everybody's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from . import _view_geometry as geometry
from ._lazy_reads import Bounds, Stored
from ._lazy_writers import WATCH, WRITES, Watch, address_of, has_no_address, tensors_in, way_of
from ._torch_installed import torch as _torch
from ._torch_modes import outside_modes
from ._view_geometry import View

_Tensor = _torch.Tensor
_plainly = _torch._C.DisableTorchFunctionSubclass
_make = _Tensor._make_wrapper_subclass
# What torch's own code finds at an address that is none is an error then, where it would write.
_forbid = getattr(_torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None)


class Reads(Protocol):
    """Where promises get their bytes from."""

    device: Any
    keeps_promises: bool  # False: what to() gives is a plain tensor

    def read(
        self, stored: Stored, bounds: Bounds, to_copy: bool = False
    ) -> tuple[Any, int | None, bool]:
        """Return (plain tensor, where the stored one begins in it, whether its memory is shared).

        None: it is the box. to_copy: nobody but a copy sees it, so it may serve the next one, too.
        """
        ...

    def convert(self, stored: Stored, view: View, dtype: Any) -> Any:
        """Return a view as another dtype; None: torch has to do it."""


class LazyTensor(_torch.Tensor):  # type: ignore[misc]
    """A view of a stored tensor that is read when it is used. Usable from several threads."""

    _reads: Reads
    _stored: Stored
    _view: View
    # [the plain tensor once it was read, whether its memory is shared], and True where it is no
    # longer what was promised: t_(), and half() of the module that it is a parameter of.
    _cell: list[Any]

    def __new__(cls, data: Any = None, requires_grad: bool = True, **_: Any) -> Any:
        """A plain Parameter, for libraries that put another in a frozen one's place by its type."""
        return _torch.nn.Parameter(data, requires_grad=requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it by arithmetic where it gives a view, else read first."""
        handler = _HANDLERS.get(func)
        if handler is not None:
            own = args[0] if args else None
            if isinstance(own, LazyTensor):
                cell = own._cell
                if cell[0] is not None and handler in (
                        _OF_CHANGED if len(cell) > 2 else _NONE if cell[1] else _VIEW_MAKERS):
                    return func(cell[0], *args[1:], **(kwargs or {}))
                result = handler(func, args, kwargs or {})
                if result is not NotImplemented:
                    return result
        return _compute(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what comes from torch's own code."""
        if func in _ALIASES:
            return _alias(args[0])
        if func is _COPY and args[0].device.type == "meta" and isinstance(args[1], LazyTensor):
            return func(args[0], _twin(args[1]), *args[2:], **(kwargs or {}))
        return _call(func, args, kwargs or {}, way_of(func, kwargs))

    @property
    def _is_param(self) -> bool:  # pyright: ignore
        """Whether it is a Parameter: torch says so of what is not made by its own class."""
        return bool(getattr(self, "_is_parameter", False))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:  # pyright: ignore
        object.__setattr__(self, "_is_parameter", value)
        if value and self.requires_grad:
            _become_parameter(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain tensor; copy.copy() asks for this as well, and may write to it."""
        return _plain_kind(self, _take(self)).__reduce_ex__(protocol)

    def _settle(self) -> Any:
        """The plain tensor, for who saves it."""
        return read(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the bytes."""
        return memo.setdefault(id(self), _plain_kind(self, read(self).detach().clone()))


def make_lazy(reads: Reads, stored: Stored) -> LazyTensor:
    """A promise of all of a tensor, of a dtype that torch has."""
    return _promise(reads, stored, View(stored.shape, stored.pitches, 0))


def _promise(reads: Reads, stored: Stored, view: View) -> LazyTensor:
    made: LazyTensor = _make(
        LazyTensor, view.sizes, strides=view.strides, storage_offset=view.offset,
        dtype=stored.dtype, device=reads.device,
    )
    # One assignment, not four: there are tens of thousands of tensors.
    made.__dict__ = {  # pyright: ignore[reportAttributeAccessIssue]
        "_reads": reads, "_stored": stored, "_view": view, "_cell": [None, False],
    }
    _forbid(made)
    return made


def _another(own: LazyTensor, view: View) -> LazyTensor:
    return _promise(own._reads, own._stored, view)


def _alias(own: LazyTensor) -> LazyTensor:
    """Another promise of the same view, and of the same memory when it is read; no gradient."""
    made = _another(own, own._view)
    made._cell = own._cell
    data = own._cell[0]
    if data is not None and data.requires_grad:
        made._cell = [data.detach(), *own._cell[1:]]
    return made


def read(own: LazyTensor, to_copy: bool = False) -> Any:
    """Return the plain tensor; it is read at the first call. to_copy: it is copied, no more."""
    cell = own._cell
    if cell[0] is not None:
        return cell[0]
    with own._stored.lock:
        if cell[0] is None:
            with outside_modes():
                data, cell[1] = _read_view(own, to_copy)
            cell[0] = data
        return cell[0]


def _take(own: LazyTensor) -> Any:
    """Return the plain tensor on memory that is nobody else's."""
    with own._stored.lock:
        data = read(own)
        if own._cell[1]:
            with outside_modes():
                own._cell[:] = data.clone(), False
        return own._cell[0]


def _plain_kind(own: LazyTensor, data: Any) -> Any:
    """A plain tensor as the Parameter that the promise is, or with its gradient's wish."""
    if own._is_param:
        return _torch.nn.Parameter(data, requires_grad=own.requires_grad)
    return data.requires_grad_(own.requires_grad) if data.is_leaf else data


_OWN_NAMES = {"_reads", "_stored", "_view", "_cell", "_is_parameter"}


def _become_parameter(own: LazyTensor) -> None:
    """Be a plain Parameter from now on, the same object, on the memory that was read for it.

    Gradients, and torch's own code that gathers them (DistributedDataParallel), need one. Where
    torch can't exchange two tensors (before 2.3, or one that a graph holds) it stays what it is.
    """
    exchange = getattr(_torch.utils, "swap_tensors", None)
    if exchange is not None:
        with contextlib.suppress(RuntimeError):
            made = _torch.nn.Parameter(own._cell[0].detach())
            vars(made).update({name: value for name, value in vars(own).items()
                               if name not in _OWN_NAMES})
            exchange(own, made)


def _read_view(own: LazyTensor, to_copy: bool) -> tuple[Any, bool]:
    """(plain tensor, whether its memory is shared)."""
    stored, view = own._stored, own._view
    if 0 in view.sizes:
        return _torch.empty(view.sizes, dtype=stored.dtype, device=own._reads.device), False
    box = geometry.cover(stored.shape, stored.pitches, view)
    data, begin, is_shared = own._reads.read(stored, (box.begin, box.end), to_copy)
    if begin is not None:
        return data.as_strided(view.sizes, view.strides, begin + view.offset), is_shared
    inside = box.view
    if inside is not None:
        data = data.as_strided(inside.sizes, inside.strides, data.storage_offset() + inside.offset)
    return data, is_shared


def _replace(thing: Any, by: Callable[[LazyTensor], Any]) -> Any:
    """Replace promises by what they stand for, in arguments of any nesting."""
    if isinstance(thing, LazyTensor):
        return by(thing)
    if type(thing) in (tuple, list):
        return type(thing)([_replace(part, by) for part in thing])
    if type(thing) is dict:
        return {key: _replace(part, by) for key, part in thing.items()}
    return thing


def _call(func: Any, args: Any, kwargs: Any, way: int) -> Any:
    """Call a function with plain tensors; shared memory stays as it is."""
    shared: set[int] = set()

    def look(own: LazyTensor) -> Any:
        data = read(own)
        if own._cell[1]:
            shared.add(data.untyped_storage().data_ptr())
        return data

    if way != WRITES:
        given = _replace(args, look), _replace(kwargs, look)
        done, result = _watch(func, given, shared) if way == WATCH and shared else (
            True, func(*given[0], **given[1]))
        if done and not (shared and _is_on(result, shared)):
            return result
    promises = [one for one in tensors_in([args, kwargs]) if isinstance(one, LazyTensor)]
    before = [_geometry(_take(own)) for own in promises]
    result = func(*_replace(args, _take), **_replace(kwargs, _take))
    for own, geometry_before in zip(promises, before, strict=True):
        if len(own._cell) == 2 and _geometry(own._cell[0]) != geometry_before:
            own._cell.append(True)
    return result


def _geometry(data: Any) -> tuple[Any, ...]:
    return data.dtype, data.device, data.shape, data.stride()


def _watch(func: Any, given: tuple[Any, Any], shared: set[int]) -> tuple[bool, Any]:
    """(whether it was done, its result): not where it would have written to shared memory."""
    watch = Watch(shared)
    try:
        with watch:
            return True, func(*given[0], **given[1])
    except Exception:
        if watch.found:
            return False, None
        raise


def _is_on(result: Any, addresses: set[int]) -> bool:
    """Tell whether a result has memory of what it was made of: who gets it may write to it."""
    return any(address_of(tensor) in addresses or has_no_address(tensor)
               for tensor in tensors_in(result))


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with plain tensors, but for copies to the meta device."""
    if func is _Tensor.copy_ and len(args) >= 2 and type(args[1]) is LazyTensor:
        target = args[0]
        if type(target) is LazyTensor:
            target = _take(target)
        if not target.is_meta:
            return func(target, read(args[1], True), *args[2:], **kwargs)
        with _plainly():
            return func(*args, **kwargs)  # whoever counts copies sees it on its way
    if func in _LIKE and len(args) == 2 and type(args[1]) is LazyTensor:
        return func(args[0], _twin(args[1]))
    return _call(func, args, kwargs, way_of(func, kwargs))


# Of these the second tensor's shape is all that matters.
_LIKE = {_Tensor.expand_as, _Tensor.view_as, _Tensor.reshape_as}


def _twin(own: LazyTensor) -> Any:
    """A tensor on the meta device of the same geometry."""
    if len(own._cell) > 2:
        return own._cell[0].detach().to("meta")
    count = 1
    for size in own._stored.shape:
        count *= size
    base = _torch.empty(count, dtype=own._stored.dtype, device="meta")
    return base.as_strided(own._view.sizes, own._view.strides, own._view.offset)


# ---- functions that give views, by arithmetic where that is simple ----

_Handler = Callable[[Any, Any, Any], Any]


def _ask_torch(func: Any, args: Any, kwargs: Any) -> Any:
    """Let torch do it on the meta device: what it makes of the twin is made of the promise."""
    own = args[0]
    twin = _twin(own)
    if any(isinstance(part, LazyTensor) for part in args[1:]):
        args = (own, *(_twin(p) if isinstance(p, LazyTensor) else p for p in args[1:]))
    result = func(twin, *args[1:], **kwargs)
    is_many = isinstance(result, (tuple, list))
    made = []
    for part in result if is_many else (result,):
        if not isinstance(part, _Tensor) or part.dtype != own._stored.dtype:
            return NotImplemented
        if part.untyped_storage()._cdata != twin.untyped_storage()._cdata:
            return NotImplemented  # it takes a copy
        view = View(tuple(part.size()), part.stride(), int(part.storage_offset()))
        _check_inside(own._stored, view)
        made.append(_another(own, view))
    return type(result)(made) if is_many else made[0]


def _check_inside(stored: Stored, view: View) -> None:
    """Refuse what goes beyond the tensor, as torch does where there is memory (not on meta)."""
    count = 1
    for size in stored.shape:
        count *= size
    end = 1 + view.offset + sum((n - 1) * s for n, s in zip(view.sizes, view.strides, strict=True))
    if 0 not in view.sizes and end > count:
        raise RuntimeError(
            f"setStorage: sizes {list(view.sizes)}, strides {list(view.strides)}, storage offset "
            f"{view.offset}, and itemsize {stored.element_bytes} requiring a storage size of "
            f"{end * stored.element_bytes} are out of bounds for storage of size "
            f"{count * stored.element_bytes}")


def _by_arithmetic(find: Callable[..., View | None]) -> _Handler:
    """A handler of what `find` makes of a view and the other arguments; torch where it can't."""
    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        own = args[0]
        if not kwargs:
            view = find(own._view, *args[1:])
            if view is not None:
                return _another(own, view)
        return _ask_torch(func, args, kwargs)

    return handle


def _narrow(view: View, *args: Any) -> View | None:
    if len(args) != 3:
        return None
    dim, start, length = args
    if type(dim) is int and type(start) is int and type(length) is int:
        return geometry.narrow(view, dim, start, length)
    return None


def _select(view: View, *args: Any) -> View | None:
    if len(args) != 2 or any(type(number) is not int for number in args):
        return None
    return geometry.select(view, *args)


def _transpose(view: View, *args: Any) -> View | None:
    if len(args) != 2 or any(type(number) is not int for number in args):
        return None
    return geometry.transpose(view, *args)


def _swap_last(view: View) -> View | None:
    return geometry.transpose(view, -1, -2) if len(view.sizes) == 2 else None


def _unsqueeze(view: View, *args: Any) -> View | None:
    return geometry.unsqueeze(view, args[0]) if len(args) == 1 and type(args[0]) is int else None


def _sizes_of(args: Any) -> Any:
    return args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def _reshape(view: View, *args: Any) -> View | None:
    sizes = _sizes_of(args)
    return geometry.reshape(view, sizes) if len(sizes) else None


def _permute(view: View, *args: Any) -> View | None:
    return geometry.permute(view, _sizes_of(args))


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """What numbers, slices, None and an Ellipsis select; for all else the tensor is read."""
    own, key = args
    view = geometry.index(own._view, key)
    return NotImplemented if view is None else _another(own, view)


def _parts(func: Any, args: Any, kwargs: Any) -> Any:
    """unbind(), and the parts that iteration gives."""
    own = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    sizes = own._view.sizes
    if type(dim) is not int or not -len(sizes) <= dim < len(sizes):
        return _ask_torch(func, args, kwargs)
    parts = [_another(own, view) for at in range(sizes[dim])
             if (view := geometry.select(own._view, dim, at)) is not None]
    return iter(parts) if func is _Tensor.__iter__ else tuple(parts)


def _chunk(func: Any, args: Any, kwargs: Any) -> Any:
    own, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim", 0)
    count = args[1] if len(args) > 1 else kwargs.get("chunks")
    sizes = own._view.sizes
    simple = type(dim) is int and type(count) is int and count > 0
    if not simple or not -len(sizes) <= dim < len(sizes) or sizes[dim] == 0:
        return _ask_torch(func, args, kwargs)
    step = -(-sizes[dim] // count)
    made = []
    for first in range(0, sizes[dim], step):
        view = geometry.narrow(own._view, dim, first, min(step, sizes[dim] - first))
        if view is not None:
            made.append(_another(own, view))
    return tuple(made)


def _same(func: Any, args: Any, kwargs: Any) -> Any:
    return _alias(args[0])


def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """By the places in the file: what was read may lie elsewhere."""
    own = args[0]
    data, is_shared = own._cell
    if data is None or is_shared:
        return _ask_torch(func, args, kwargs)
    if View(tuple(data.shape), data.stride(), data.storage_offset()) == own._view:
        return func(data, *args[1:], **kwargs)
    # What was written to is a part: the rest is the file's.
    stored, view = own._stored, own._view
    whole = read(make_lazy(own._reads, stored)).reshape(-1).clone()
    whole.as_strided(view.sizes, view.strides, view.offset).copy_(data)
    return func(whole.as_strided(view.sizes, view.strides, view.offset), *args[1:], **kwargs)


def _own_if_packed(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) > 1 or not geometry.is_packed(args[0]._view):
        return NotImplemented
    return args[0]


def _own_if_there(func: Any, args: Any, kwargs: Any) -> Any:
    """cpu(), float() and the like where nothing changes; to() with a dtype or a device."""
    own = args[0]
    kind = own._reads.device
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
        return _twin(own).to("meta", dtype, copy=True)
    if device is not None and _torch.device(device) != kind:
        return NotImplemented
    if dtype in (None, own._stored.dtype):
        return own if own._reads.keeps_promises else read(own)
    converted = own._reads.convert(own._stored, own._view, dtype) if own._cell[0] is None else None
    return NotImplemented if converted is None else converted


def _without_bytes(func: Any, args: Any, kwargs: Any) -> Any:
    """empty_like() and the like: the elements do not matter."""
    own = args[0]
    return func(_twin(own), *args[1:], **{"device": own._reads.device, **kwargs})


def _attribute(func: Any, args: Any, kwargs: Any) -> Any:
    with _plainly():
        return func(*args, **kwargs)


def _identity(func: Any, args: Any, kwargs: Any) -> Any:
    with _plainly():
        return func(*args, **kwargs)


def _of_data(func: Any, args: Any, kwargs: Any) -> Any:
    """What a tensor has that was read, and a promise has not: a gradient, a count of changes."""
    data = args[0]._cell[0]
    if data is not None:
        return func(data, *args[1:], **kwargs)
    return _identity(func, args, kwargs)


def _type(func: Any, args: Any, kwargs: Any) -> Any:
    """The name of its type, or another type."""
    return NotImplemented if len(args) > 1 or kwargs else func(_torch.empty(
        0, dtype=args[0]._stored.dtype, device=args[0]._reads.device))


def _set_gradient(func: Any, args: Any, kwargs: Any) -> Any:
    """requires_grad_(), of what is a Parameter as well; gradients need memory of one's own."""
    own = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if wanted:
        own._cell = [_take(own).detach().requires_grad_(True), False, *own._cell[2:]]
        if own._is_param:
            _become_parameter(own)
    elif own._cell[0] is not None and own._cell[0].requires_grad:
        own._cell[0].requires_grad_(False)
    return own


def _set_wish(func: Any, args: Any, kwargs: Any) -> None:
    """The setter of requires_grad."""
    _set_gradient(func, args, {})


def _find(names: str) -> list[Any]:
    """torch's functions of these names: methods, module functions and getters of attributes."""
    found = []
    for name in names.split():
        for home in (_Tensor, _torch):
            thing = getattr(home, name, None)
            if thing is not None:
                found.append(getattr(thing, "__get__", thing) if _is_getter(thing) else thing)
    return found


def _is_getter(thing: Any) -> bool:
    return type(thing).__name__ in ("getset_descriptor", "property")


_TABLE: tuple[tuple[str, _Handler], ...] = (
    ("narrow", _by_arithmetic(_narrow)),
    ("select", _by_arithmetic(_select)),
    ("transpose swapaxes swapdims", _by_arithmetic(_transpose)),
    ("t T mT", _by_arithmetic(_swap_last)),
    ("unsqueeze", _by_arithmetic(_unsqueeze)),
    ("view reshape", _by_arithmetic(_reshape)),
    ("permute", _by_arithmetic(_permute)),
    ("__getitem__", _index),
    ("unbind __iter__", _parts),
    ("chunk", _chunk),
    ("squeeze expand expand_as view_as flatten unflatten ravel movedim moveaxis split "
     "split_with_sizes tensor_split hsplit vsplit dsplit diagonal unfold reshape_as",
     _ask_torch),
    ("as_strided", _as_strided),
    ("detach data alias", _same),
    ("contiguous", _own_if_packed),
    ("to cpu", _own_if_there),
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
    func: handler for names, handler in _TABLE for func in _find(names)
}
_HANDLERS[getattr(_Tensor.requires_grad, "__set__")] = _set_wish  # noqa: B009
# Of a tensor that was read these are torch's to do.
_VIEW_MAKERS = {
    handler for names, handler in _TABLE
    if handler not in (_attribute, _identity, _of_data, _set_gradient, _own_if_there, _same,
                       _as_strided, _type, _own_if_packed, _without_bytes, _set_wish)
}
_OF_CHANGED = {handler for _, handler in _TABLE if handler not in (
    _identity, _set_gradient, _same, _set_wish)}
_NONE: set[_Handler] = set()
_COPY = _torch.ops.aten.copy_.default
_ALIASES = {_torch.ops.aten.detach.default, _torch.ops.aten.alias.default}
