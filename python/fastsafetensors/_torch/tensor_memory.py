# SPDX-License-Identifier: Apache-2.0
"""The memory of torch tensors: addresses, ranges, and which tensors share it."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from .._base.errors import printable
from .torch_installed import torch as _torch

# Classes whose methods are torch's own.
PLAIN = (_torch.Tensor, _torch.nn.Parameter)
# Methods of subclasses may refer to other tensors; within this context they are torch's own.
plainly: Callable[[], Any] = getattr(
    _torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext
)


def settle(tensor: Any) -> Any:
    """Return the plain tensor of a lazy one; others unchanged."""
    made = None if type(tensor) in PLAIN else getattr(type(tensor), "_to_plain", None)
    return tensor if made is None else made(tensor)


def settled(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a dict."""
    return {name: settle(tensor) for name, tensor in tensors.items()}


def storage_ptr(tensor: Any) -> int:
    """Address of the storage that a tensor is a view of; 0 if it has none. As in safetensors."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


def storage_size(tensor: Any) -> int:
    """Size of the storage that a tensor is a view of; 0 if it has none. As in safetensors."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return 0


def _no_memory(name: str, tensor: Any) -> RuntimeError:
    kind = type(tensor).__name__
    text = f"`{printable(name)}` is a {kind} that has no memory for its {tensor.nbytes} bytes"
    if hasattr(tensor, "full_tensor"):
        text = f"`{printable(name)}` is a {kind}, a part of a tensor on several ranks"
        advice = (
            "save `.full_tensor()`, or the whole state with "
            "fastsafetensors.checkpoint.FastSafetensorsWriter (torch.distributed.checkpoint)"
        )
    elif kind == "FakeTensor":
        advice = "it has a shape and no values: make or load the tensor outside of FakeTensorMode"
    elif type(tensor) in PLAIN:
        advice = "its memory was given back, or it exists inside a transformation only"
    else:
        advice = "save the tensors that it is made of, or what it stands for (`.dequantize()`)"
    return RuntimeError(f"{text}: {advice}")


def address_of(name: str, tensor: Any) -> int:
    """Address of a packed tensor's first byte, checked against its storage.

    RuntimeError with advice for tensors without storage (DTensors and other wrappers, fake and
    freed tensors). 0 for tensors without elements.
    """
    try:
        if type(tensor) in PLAIN:
            storage, first = tensor.untyped_storage(), tensor.storage_offset()
        else:
            with plainly():
                storage, first = tensor.untyped_storage(), tensor.storage_offset()
        size = tensor.nbytes
        if size == 0:
            return 0
        begin = first * tensor.itemsize
        address = storage.data_ptr()
        if address and begin + size <= storage.nbytes():
            return int(address + begin)
    except (NotImplementedError, RuntimeError) as error:
        raise _no_memory(name, tensor) from error
    raise _no_memory(name, tensor)


def check_memory(name: str, tensor: Any) -> None:
    """RuntimeError for a tensor on the CPU or a GPU with elements but without storage."""
    known = tensor.device.type in ("cpu", "cuda")
    if known and tensor.numel() and not _plain_storage_ptr(tensor):
        raise _no_memory(name, tensor)


def _plain_storage_ptr(tensor: Any) -> int:
    with plainly():
        return storage_ptr(tensor)


class Extent(NamedTuple):
    """The range of bytes in a storage that a tensor covers.

    is_dense: every byte in the range belongs to the tensor.
    """

    memory: Hashable
    begin: int
    end: int
    is_dense: bool


def elements_overlap(tensor: Any) -> bool:
    """Tell whether several elements have the same memory, as those of an expanded tensor do."""
    steps = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
                   if size > 1)
    reach, is_nested = 1, True
    for step, size in steps:
        is_nested = is_nested and step >= reach
        reach += (size - 1) * step
    if is_nested or not tensor.numel():
        return False
    if steps[0][0] == 0 or reach < tensor.numel():
        return True
    from .torch_installed import torch

    places = torch.arange(reach).as_strided(tensor.shape, tensor.stride())
    return int(places.unique().numel()) < int(tensor.numel())


def extent_of(tensor: Any) -> Extent | None:
    """The extent of a tensor; None if it has no elements, or it is unknown.

    Tensors on the meta device are in a storage without bytes. A wrapper (a DTensor) counts as a
    separate storage.
    """
    if tensor.numel() == 0:
        return None
    item = tensor.element_size()
    if tensor.is_contiguous():
        reach, is_dense = tensor.numel(), True
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((size - 1) * stride for size, stride in steps) + 1
        is_dense = reach == tensor.numel() and not elements_overlap(tensor)
    try:
        if tensor.device.type == "meta":
            memory: Hashable = ("meta", tensor.untyped_storage()._cdata)
            begin = tensor.storage_offset() * item
        else:
            memory, begin = tensor.device, tensor.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    if begin == 0 and tensor.device.type != "meta":
        memory = ("object", id(tensor))
    return Extent(memory, begin, begin + reach * item, is_dense)


def overlap_groups(extents: Mapping[str, Extent]) -> list[set[str]]:
    """Groups of names whose bytes overlap. Disjoint views of one storage do not share bytes."""
    by_memory: dict[Hashable, list[tuple[int, int, str]]] = {}
    for name, extent in extents.items():
        by_memory.setdefault(extent.memory, []).append((extent.begin, extent.end, name))
    return _group(by_memory)


def _group(by_memory: dict[Hashable, list[tuple[int, int, str]]]) -> list[set[str]]:
    """Names of (begin, end, name) that overlap in one storage."""
    groups = []
    for rows in by_memory.values():
        rows.sort()
        group: set[str] = set()
        reach, last = -1, ""
        for begin, end, name in rows:
            if begin < reach:
                group.update((last, name))
            elif group:
                groups.append(group)
                group = set()
            if end > reach:
                reach = end
            last = name
        if group:
            groups.append(group)
    return groups


def extents_of(tensors: Mapping[str, Any]) -> dict[str, Extent]:
    """{name: extent} of the tensors with an extent."""
    found = ((name, extent_of(tensor)) for name, tensor in tensors.items())
    return {name: extent for name, extent in found if extent is not None}


def find_shared(tensors: Mapping[str, Any]) -> list[set[str]]:
    """Groups of names of tensors that share bytes."""
    by_memory: dict[Hashable, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if type(tensor) in PLAIN and tensor.is_contiguous():  # the usual case, by a shorter path
            try:
                begin, size = tensor.data_ptr(), tensor.nbytes
            except (NotImplementedError, RuntimeError):
                continue
            if begin and size:
                by_memory.setdefault(tensor.device, []).append((begin, begin + size, name))
            continue
        extent = extent_of(tensor)
        if extent is not None and tensor.device.type != "meta":
            by_memory.setdefault(extent.memory, []).append((extent.begin, extent.end, name))
    return _group(by_memory)


def find_covered(extents: Mapping[str, Extent], present: Iterable[str]) -> set[str]:
    """Names whose bytes all belong to tensors that are `present`, so they need not be stored."""
    runs: dict[Hashable, list[list[int]]] = {}
    rows = [extents[name] for name in present if name in extents and extents[name].is_dense]
    for extent in sorted(rows, key=lambda row: row.begin):
        spans = runs.setdefault(extent.memory, [])
        if spans and extent.begin <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], extent.end)
        else:
            spans.append([extent.begin, extent.end])
    return {
        name
        for name, extent in extents.items()
        if any(b <= extent.begin and extent.end <= e for b, e in runs.get(extent.memory, ()))
    }


def _covers_storage(tensor: Any) -> bool:
    return bool(
        tensor.data_ptr() == storage_ptr(tensor) and tensor.nbytes == storage_size(tensor)
    )


def find_tied(state: Mapping[str, Any]) -> dict[str, str]:
    """{name to leave out: name to keep} of tensors that share bytes.

    In each group the first name (sorted) that covers the storage is kept, as in the reference. If
    no tensor covers it, RuntimeError, because saving one would lose the others.
    """
    tied = {}
    by_storage: dict[Any, set[str]] = {}
    for name, tensor in state.items():
        if tensor.device.type != "meta" and storage_ptr(tensor) and storage_size(tensor):
            by_storage.setdefault((tensor.device, storage_ptr(tensor)), set()).add(name)
    for names in by_storage.values():
        group = {name: state[name] for name in names}
        if len(group) < 2 or not find_shared(group):
            continue
        complete = sorted(name for name in group if _covers_storage(group[name]))
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no "
                f"suitable name to keep for saving amongst: {set(group)}. None is covering the "
                "entire storage: saving one would lose what the others hold."
            )
        tied.update({name: complete[0] for name in sorted(group) if name != complete[0]})
    return tied


def find_same(state: Mapping[str, Any]) -> dict[str, str]:
    """{name: first name (sorted)} of identical tensors: same storage, shape, strides and dtype."""
    same: dict[Any, str] = {}
    tied = {}
    for name in sorted(state):
        tensor = state[name]
        if tensor.numel() == 0 or tensor.device.type == "meta" or not storage_ptr(tensor):
            continue
        flags = (tensor.is_conj(), tensor.is_neg())
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)
        kept = same.setdefault(key, name)
        if kept != name:
            tied[name] = kept
    return tied


def _version_of(name: str, tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError as error:  # "Inference tensors do not track version counter"
        raise RuntimeError(
            f"`{printable(name)}` has no version counter, so changes during the save would go "
            "unnoticed: "
            'use stage="copy"'
        ) from error


class watch_changes:  # noqa: N801 - called like a function
    """A function that says whether tensors are what they are now, by torch's counters.

    It notices writes by torch, and storage that was resized or freed. changed: a list, which gets
    the name of a changed tensor, unless views of one storage, which share torch's counter, leave
    open which of them it is.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """Note the counters."""
        self.changed: list[str] = []
        self._seen = [
            (name, tensor, (_version_of(name, tensor), storage_ptr(tensor), storage_size(tensor)))
            for name, tensor in tensors.items()]

    def __call__(self) -> bool:
        """Compare the counters."""
        changed = [(name, then) for name, tensor, then in self._seen
                   if (tensor._version, storage_ptr(tensor), storage_size(tensor)) != then]
        uses = collections.Counter(place for _, _, (_, place, _) in self._seen if changed)
        self.changed += [name for name, (_, place, _) in changed if uses[place] == 1][:1]
        return not changed
