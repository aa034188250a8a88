# SPDX-License-Identifier: Apache-2.0
"""Load a module's weights from files: into its own memory, or as new tensors.

After a load every parameter and persistent buffer has the file's values, and tied tensors and views
of others are still tied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from .._base.dtypes import WORDS
from .._base.errors import printable
from .._core import Model
from .._torch.gpu import load_options, stream_of
from .._torch.tensor_memory import (
    Extent,
    extents_of,
    find_covered,
    find_tied,
    overlap_groups,
)
from .._torch.torch_installed import torch as _torch
from .._torch.torch_state import dtype_name, format_box, torch_dtype, torch_shape
from .._torch.torch_tensors import export
from .load import OpenLoad, load_from
from .request import choose_names


def check_module(module: Any) -> None:
    """Raise TypeError for a value that is not a torch module."""
    if not isinstance(module, _torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(module).__name__}")


class ModuleState:
    """A module's parameters and persistent buffers before a load."""

    def __init__(self, module: Any) -> None:
        """Examine the module without changing it."""
        self.module = module
        # The tensor objects themselves; tied ones are identical.
        state = module.state_dict(keep_vars=True)
        self.names = list(state)
        self.tensors = {n: t for n, t in state.items() if isinstance(t, _torch.Tensor)}
        self.extents = extents_of(self.tensors)
        self._slots = [
            (table, key, tensor)
            for part in module.modules()
            for table in (part._parameters, part._buffers)
            for key, tensor in table.items()
            if tensor is not None
        ]

    def takes_direct_reads(self) -> bool:
        """Tell whether the module loads its state without hooks or overrides."""
        base = _torch.nn.Module
        own = {id(tensor) for _, _, tensor in self._slots}
        return (
            type(self.module).load_state_dict is base.load_state_dict
            and all(
                type(part)._load_from_state_dict is base._load_from_state_dict
                and type(part).set_extra_state is base.set_extra_state
                and not part._load_state_dict_pre_hooks
                and not part._load_state_dict_post_hooks
                for part in self.module.modules()
            )
            and all(id(tensor) in own for tensor in self.tensors.values())
        )

    def missing(self, present: Iterable[str], is_assigned: bool) -> set[str]:
        """Names without bytes after the tensors that are `present` were loaded.

        Of tied tensors, only the name that save_model() would keep.
        """
        found = set(present)
        covered = set(self.bases(found)) if is_assigned else find_covered(self.extents, found)
        missing = set(self.names) - found - covered
        tied: dict[str, str] = {}
        with contextlib.suppress(RuntimeError):  # save_model() would keep none of them
            tied = find_tied(self.tensors) if missing else {}
        return {name for name in missing if tied.get(name) not in missing}

    def bases(self, present: Iterable[str]) -> dict[str, str]:
        """{name: a present name whose tensor contains all its bytes}, for missing names."""
        found = set(present)
        rows = [(name, self.extents[name]) for name in sorted(found & self.extents.keys())]
        rows = [(name, extent) for name, extent in rows if extent.is_dense]
        by_memory: dict[Any, list[tuple[str, Extent]]] = {}
        for name, extent in rows:
            by_memory.setdefault(extent.memory, []).append((name, extent))
        result = {}
        for name, extent in self.extents.items():
            for base, outer in by_memory.get(extent.memory, ()) if name not in found else ():
                same = self.tensors[name].dtype is self.tensors[base].dtype
                if same and outer.begin <= extent.begin and extent.end <= outer.end:
                    result[name] = base
                    break
        return result

    def cut_views(self, present: Iterable[str]) -> set[str]:
        """Names that are views of present tensors, not just other names for them."""
        return {name for name, base in self.bases(present).items()
                if self.tensors[name] is not self.tensors[base]}

    def aliases(self, name: str) -> list[str]:
        """Return the other names of a tied tensor."""
        own = self.tensors[name]
        return [other for other, tensor in self.tensors.items() if tensor is own and other != name]

    def is_parameter(self, name: str) -> bool:
        """Tell whether a name is a parameter, not a buffer."""
        return isinstance(self.tensors.get(name), _torch.nn.Parameter)

    def shape_faults(self, file: Model, names: Iterable[str]) -> list[str]:
        """torch's messages for tensors whose shape differs from the file's."""
        faults = []
        for name in names:
            dtype, shape, *_ = file.info(file.find(name))
            found = torch_shape(dtype, shape)
            own = tuple(self.tensors[name].shape)
            if own != found and (own, found) != ((), (1,)):  # torch accepts that, too
                faults.append(
                    f"size mismatch for {name}: copying a param with shape "
                    f"torch.Size({list(found)}) from checkpoint, the shape in current model is "
                    f"{self.tensors[name].shape}."
                )
        return faults

    def assign(self, tensors: dict[str, Any]) -> Any:
        """Replace the module's tensors, under all their names.

        A view of a replaced tensor becomes the same view of the new one. Returns the result of
        load_state_dict().
        """
        complete = dict(tensors)
        for name, base in self.bases(tensors).items():
            complete[name] = self._view(complete, name, base)
        result = self.module.load_state_dict(complete, strict=False, assign=True)
        new: dict[int, Any] = {}
        for table, key, old in self._slots:
            if table[key] is not old:
                new[id(old)] = table[key]
        for table, key, old in self._slots:
            table[key] = new.get(id(old), old)
        return result

    def _view(self, tensors: dict[str, Any], name: str, base: str) -> Any:
        """Return the view of the new `base` that the old tensor `name` is of the old `base`.

        If the new one has other strides, it is copied to the old strides first.
        """
        old, old_base, whole = self.tensors[name], self.tensors[base], tensors[base]
        if old is old_base:
            return whole
        if whole.stride() != old_base.stride():
            packed = _torch.empty_strided(
                whole.shape, old_base.stride(), dtype=whole.dtype, device=whole.device
            )
            whole = tensors[base] = packed.copy_(whole)
        first = self.extents[name].begin - self.extents[base].begin
        offset = whole.storage_offset() + first // old.element_size()
        return whole.as_strided(old.shape, old.stride(), offset)


def raise_faults(module: Any, missing: set[str], unexpected: list[str], faults: list[str],
                 strict: bool) -> None:
    """Raise torch's error for a state that does not fit."""
    lines = list(faults)
    if strict and unexpected:
        names = ", ".join(f'"{name}"' for name in sorted(unexpected))
        lines.insert(0, f"Unexpected key(s) in state_dict: {names}")
    if strict and missing:
        names = ", ".join(f'"{name}"' for name in sorted(missing))
        lines.insert(0, f"Missing key(s) in state_dict: {names}")
    if lines:
        title = f"Error(s) in loading state_dict for {type(module).__name__}:"
        raise RuntimeError("\n    ".join(map(printable, [title, *lines])))


# ---- parts of distributed tensors ----


def is_dtensor(tensor: Any) -> bool:
    """Tell whether a tensor is distributed over ranks."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _local_box(name: str, tensor: Any) -> tuple[list[int], list[int]]:
    """Begin and end of this rank's part of a DTensor."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return [0] * tensor.dim(), [0] * tensor.dim()
    from .._ranks.rank_parts import part_on_mesh

    try:
        part = part_on_mesh(tensor.shape, tensor.placements, mesh.mesh.shape, coordinate)
    except ValueError as error:
        raise ValueError(f"{printable(name)}: {printable(error)}") from None
    return list(part.begin), list(part.end)


def _spread(part: Any, like: Any) -> Any:
    """Make a DTensor from this rank's part, placed like another one."""
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    return DTensor.from_local(part.to(mesh.device_type), mesh, like.placements, run_check=False,
                              shape=like.shape, stride=like.stride())


# ---- into the module's own memory ----


def _accepts_bytes(tensor: Any, dtype: str) -> bool:
    """Tell whether the file's bytes can be read directly into a tensor."""
    known = dtype in WORDS and dtype != "F4"
    simple = type(tensor) in (_torch.Tensor, _torch.nn.Parameter)
    if not (known and simple and tensor.numel() and tensor.is_contiguous()):
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or not tensor.data_ptr():
        return False
    if tensor.device.type != "cpu" and not load_options(tensor.device):
        return False
    floats = tensor.dtype.is_floating_point and dtype[0] in "FB" and dtype != "BOOL"
    return bool(floats or torch_dtype(dtype) is tensor.dtype)


def _note_change(tensor: Any) -> None:
    """Notify torch that a tensor's bytes have changed."""
    if tensor.is_inference():
        return  # inference tensors have no version counter
    count = getattr(_torch.autograd.graph, "increment_version", None)
    if count is not None:
        count(tensor)
    else:  # before torch 2.1: an in-place operation on no elements
        tensor.detach().reshape(-1)[:0].zero_()


def read_in_place(file: Model, state: ModuleState, names: list[str], threads: int) -> list[str]:
    """Read tensors into the module's own memory. Return names for which this is not possible.

    Other dtypes are converted while reading, where supported. Tensors that share bytes are copied
    one after the other instead.
    """
    own = {name: state.extents[name] for name in names if name in state.extents}
    shared = {name for group in overlap_groups(own) for name in group}
    groups: dict[tuple[str | None, Any], list[tuple[str, int, int]]] = {}
    rest = []
    for name in names:
        tensor, dtype = state.tensors[name], file.info(file.find(name))[0]
        if name in shared or not _accepts_bytes(tensor, dtype):
            rest.append(name)
            continue
        target = None if torch_dtype(dtype) is tensor.dtype else dtype_name(tensor.dtype)
        place = (name, tensor.data_ptr(), tensor.nbytes)
        groups.setdefault((target, tensor.device), []).append(place)
    for (target, device), items in groups.items():
        options = {"mode": "load", **load_options(device)}
        if "device" in options:
            options["stream"] = stream_of(device)  # it may still use the parameters
        with OpenLoad(file, items, threads=threads, dtype=target, **options) as loader:
            loader.wait()
        # torch does not see these writes, but graphs that saved the old values must.
        for name, _, _ in items:
            _note_change(state.tensors[name])
    return rest


class ModuleLoad:
    """One call of load_model: reads a file's tensors into a module, or assigns them."""

    def __init__(
        self, file: Model, module: Any, assign: bool, threads: int, device: Any,
        assigned: dict[str, Any],
    ) -> None:
        """Examine the module. assigned: options of Model.load() for assigned tensors."""
        self._file, self._state, self._threads = file, ModuleState(module), threads
        self._is_assigned, self._device = assign, device
        self._options = {**assigned, **load_options(device)} if assign else {"mode": "load"}

    def run(
        self, strict: bool, changed: Iterable[str] | None = None
    ) -> tuple[set[str], list[str]]:
        """Load, and return (missing names, unexpected names). RuntimeError if they do not fit.

        changed: read and write only these names, as far as the module has them.
        """
        state, names = self._state, self._file.names()
        if not self._is_assigned and any(t.is_meta for t in state.tensors.values()):
            raise RuntimeError(
                "the model is on the meta device, where there is no memory to load into: pass "
                "assign=True, or give it memory first (`.to_empty(device=..)`)"
            )
        named = choose_names(self._file, changed, None, "changed")
        chosen = set(names if named is None else named)
        if not state.takes_direct_reads():
            return self._leave_to_torch(names, strict, chosen)
        known = [name for name in names if name in state.tensors]
        unexpected = [name for name in names if name not in state.tensors]
        missing = state.missing(known, self._is_assigned)
        faults = state.shape_faults(self._file, known)
        raise_faults(state.module, missing, unexpected, faults, strict)
        known = [name for name in known if name in chosen]
        if self._is_assigned:
            state.assign(self._read(known))
        else:
            whole = [name for name in known if not is_dtensor(state.tensors[name])]
            rest = set(read_in_place(self._file, state, whole, self._threads))
            rest.update(set(known) - set(whole))
            if rest:
                state.module.load_state_dict(
                    self._read([name for name in known if name in rest]), strict=False
                )
        return missing, unexpected

    def _leave_to_torch(
        self, names: list[str], strict: bool, chosen: set[str]
    ) -> tuple[set[str], list[str]]:
        """Pass all tensors, or all changed ones, to modules with hooks that use their state."""
        state, tensors = self._state, self._read([name for name in names if name in chosen])
        if self._is_assigned:
            found, covered = state.assign(tensors), set[str]()
        else:
            found = state.module.load_state_dict(tensors, strict=False)
            covered = find_covered(state.extents, names)
        missing = set(found.missing_keys) - covered - (set(names) - chosen)
        unexpected = list(found.unexpected_keys)
        raise_faults(state.module, missing, unexpected, [], strict)
        return missing, unexpected

    def _read(self, names: list[str]) -> dict[str, Any]:
        """Read tensors for copying or assigning; of DTensors this rank's part."""
        spread = {name: self._state.tensors[name] for name in names
                  if is_dtensor(self._state.tensors.get(name))}
        result = self._load([name for name in names if name not in spread], self._options)
        items = []
        for name, tensor in spread.items():
            dtype = self._file.info(self._file.find(name))[0]
            items.append((name, *format_box(dtype, *_local_box(name, tensor))))
        parts = self._load(items, {"mode": "load"})
        result.update({name: _spread(part, spread[name]) for name, part in parts.items()})
        return result

    def _load(self, items: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        where = self._device if self._is_assigned else "cpu"
        return load_from(self._file, lambda loader: export(loader, where), items,
                         threads=self._threads, **options)
