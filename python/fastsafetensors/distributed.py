# SPDX-License-Identifier: Apache-2.0
"""Loads a rank's part of a model: read or received, whichever is faster. For torch.

    from fastsafetensors.distributed import load_sharded, load_model_sharded

    parts = load_sharded(folder, {"layers.0.wq": 0, "norm": None}, group)      # tensors
    state = load_model_sharded(folder, mesh, {"layers.*.wq": [Shard(0)]})      # DTensors

Three methods, chosen for each tensor by strategy="auto" or forced:

slice       each rank reads its own part from the files;
broadcast   one rank reads the tensor and sends it to all;
scatter     one rank reads the tensor and sends each rank its part.

A part along dimension 0 is one range of the file, so a slice reads nothing else. Parts along other
dimensions consist of many pieces, and a slice reads over the gaps. "auto" compares those bytes with
sending, using the speed of storage and link, which is measured once per group; all ranks use the
same results.

If all ranks run on one host, "auto" maps local files instead: the page cache reads each byte once
for all ranks, and nothing is sent. Parts along dimension 0 are then views of the file, as those of
load_file(); other parts are copied out of the mapping.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ._base.errors import printable, shown, unknown_tensor
from ._base.lazy_names import lazy_names
from ._base.options import check_timeout, is_bool
from ._base.regular_files import open_regular
from ._core import Model
from ._loading.load import OpenLoad, close_load, load_from
from ._loading.module_weights import ModuleState
from ._loading.open_arguments import check_device
from ._ranks.agreement import Agreement, named
from ._ranks.rank_files import open_on_ranks
from ._ranks.rank_parts import (
    STRATEGIES,
    Cut,
    Part,
    Speeds,
    choose_method,
    find_placements,
    over_read,
    part_at,
    part_of,
    part_on_mesh,
    patterns_without_match,
    places_on,
    tensor_named,
)
from ._ranks.torch_group import group_of_mesh, open_group
from ._torch.gpu import check_present, load_options
from ._torch.torch_installed import torch
from ._torch.torch_state import format_box, torch_dtype, torch_dtype_of, torch_shape
from ._torch.torch_tensors import export, make_item

if TYPE_CHECKING:
    from ._ranks.ranks_async import save_on_ranks_async
    from ._ranks.ranks_save import save_on_ranks
else:
    # Programs that only load do not import what saves, which takes as long as all the rest.
    __getattr__, __dir__ = lazy_names(globals(), {
        "save_on_ranks": "_ranks.ranks_save", "save_on_ranks_async": "_ranks.ranks_async"})

__all__ = [
    "Part",
    "ShardedTensors",
    "Speeds",
    "choose_method",
    "find_placements",
    "load_model_sharded",
    "load_sharded",
    "over_read",
    "part_of",
    "part_on_mesh",
    "save_on_ranks",
    "save_on_ranks_async",
]

# Tensors to send are read and sent in groups of this many bytes, while the next group is read.
_GROUP_BYTES = 64 << 20
_PROBE_BYTES = 8 << 20


class ShardedTensors(dict[str, Any]):
    """A dict of tensor names and this rank's parts.

    `stats`: bytes_read, bytes_sent, and the number of tensors by method.
    """

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.stats: dict[str, int] = {"bytes_read": 0, "bytes_sent": 0, "slice": 0,
                                      "broadcast": 0, "scatter": 0}


_measured: dict[int, Speeds] = {}


class _Load:
    """A call of load_sharded on one rank."""

    def __init__(self, model: Any, cuts: Mapping[str, Cut], pg: Any, strategy: str,
                 readers: list[int], on_gpu: Mapping[str, Any] = {}) -> None:
        """on_gpu: options for loads to this rank's GPU; empty for the CPU."""
        if strategy == "slice" and len(readers) < pg.size():
            raise ValueError(f"strategy slice needs the files on all ranks, not on {readers}")
        self.model, self.cuts, self.pg, self.strategy = model, cuts, pg, strategy
        self.readers, self.on_gpu = readers, on_gpu
        self.agreement = Agreement(pg)
        self.rank, self.ranks = pg.rank(), pg.size()
        self.result = ShardedTensors()

    def info(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """(dtype, torch's shape, bytes) of a tensor."""
        dtype, shape, size, *_ = self.model.info(self.model.find(name))
        return dtype, torch_shape(dtype, shape), size

    def describe(self) -> list[str]:
        """Properties on which all ranks must agree."""
        lines = [f"strategy {self.strategy}"]
        for name, cut in self.cuts.items():
            dtype, shape, size = self.info(name)
            lines.append(f"{name!r} {dtype} {list(shape)} {size} bytes, {cut.description}")
        return lines

    def speeds(self) -> Speeds:
        """Measure storage and link once per group, taking the slowest rank.

        If one rank has no results, all measure again: after a group was destroyed, some ranks might
        use its results for a new one.
        """
        key = id(getattr(self.pg, "real_pg", self.pg))
        known = self.pg.exchange(bytes([key in _measured]), "who has measured the speeds")
        if any(not said[0] for said in known):
            mine = Speeds(self._measure_storage(), self._measure_link())
            said = self.pg.exchange_texts(f"{mine.storage} {mine.link}", "the speeds measured")
            numbers = [tuple(map(float, text.split())) for text in said]
            _measured[key] = Speeds(min(n[0] for n in numbers), min(n[1] for n in numbers))
        return _measured[key]

    def _measure_storage(self) -> float:
        path = self.model.file(self.rank % max(self.model.file_count, 1))[0]
        fd, count = -1, 0
        # The load itself reports errors: the other ranks wait for this measurement.
        with contextlib.suppress(OSError):
            fd = open_regular(path)
        try:
            self.agreement.agree("measuring storage")
            start = time.perf_counter()
            with contextlib.suppress(OSError):
                count = len(os.pread(fd, _PROBE_BYTES, 0))
            return max(count, 1) / max(time.perf_counter() - start, 1e-6)
        finally:
            if fd >= 0:
                os.close(fd)

    def _measure_link(self) -> float:
        data = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
        self.pg.broadcast(data, 0)  # the first one sets up connections
        start = time.perf_counter()
        self.pg.broadcast(data, 0)
        return _PROBE_BYTES / max(time.perf_counter() - start, 1e-6)

    def methods(self) -> dict[str, str]:
        """Choose the method of every tensor."""
        if self.ranks == 1:
            return dict.fromkeys(self.cuts, "slice")
        if len(self.readers) < self.ranks:
            return {name: "broadcast" if cut.is_whole(self.ranks) or self.strategy == "broadcast"
                    else "scatter" for name, cut in self.cuts.items()}
        if self.strategy != "auto":
            whole = "broadcast" if self.strategy == "scatter" else self.strategy
            return {name: whole if cut.is_whole(self.ranks) else self.strategy
                    for name, cut in self.cuts.items()}
        speeds = self.speeds()
        methods = {}
        for name, cut in self.cuts.items():
            dtype, shape, size = self.info(name)
            item = size / max(math.prod(shape), 1)
            over = max(over_read(shape, part, item) for part in cut.parts(self.ranks))
            methods[name] = choose_method(size, over, cut.is_whole(self.ranks), speeds, self.ranks)
        return methods

    def can_map(self) -> bool:
        """Whether this rank can map the files, as "auto" does if all ranks of one host can."""
        # Of a compressed model each rank would decode every tensor.
        if self.strategy != "auto" or not self.cuts or self.model.is_compressed:
            return False
        try:
            loader = self.model.load([next(iter(self.cuts))], mode="auto")
        except Exception:  # the load itself reports it
            return False
        with contextlib.closing(loader):
            return bool(loader.stats()["mode"] == "map")

    def _read_mapped(self) -> None:
        """Map all tensors, as every rank of the host does: together they read each byte once. Then
        copy the parts along inner dimensions, and map the others once more, without the rest of
        their tensors.
        """
        failure: Exception | None = None
        rows = []
        try:
            with self._open_views() as loader:
                for at, (name, cut) in enumerate(self.cuts.items()):
                    part, (dtype, shape, _) = cut.own, self.info(name)
                    whole = make_item(loader, at)
                    if part.shape[1:] != list(shape[1:]):
                        self.result[name] = self._cut(whole, part).clone(
                            memory_format=torch.contiguous_format)
                    elif part.shape != list(shape):
                        rows.append((name, *format_box(dtype, part.begin, part.end)))
                    else:
                        self.result[name] = whole
                loader.wait()
                self._count(loader)
            self.result.update(load_from(self.model, export, rows, mode="auto"))
        except Exception as error:
            failure = error
        self.agreement.agree("reading the files", error=failure)
        self.result.stats["slice"] = len(self.result)
        self._sort()

    def _open_views(self) -> OpenLoad:
        """Load all tensors as views, or together in memory if some can't be views."""
        if self.ranks > 1:
            with contextlib.suppress(Exception):  # the load below reports it
                return OpenLoad(self.model, list(self.cuts), mode="map", share="node")
        return OpenLoad(self.model, list(self.cuts), mode="auto")

    def _part_items(self, names: Iterable[str]) -> list[Any]:
        """Items of a load for this rank's parts."""
        items: list[Any] = []
        for name in names:
            part, (dtype, shape, _) = self.cuts[name].own, self.info(name)
            is_whole = part.shape == list(shape)
            items.append(name if is_whole else (name, *format_box(dtype, part.begin, part.end)))
        return items

    def _sort(self) -> None:
        """Put the result into the order of the request."""
        ordered = {name: self.result[name] for name in self.cuts}
        self.result.clear()
        self.result.update(ordered)

    def run(self, maps: bool) -> ShardedTensors:
        """Read the slices and exchange the rest. maps: all ranks of one host can map the files."""
        if maps:
            if not self.on_gpu:
                self._read_mapped()
                return self.result
            # Through the page cache, so that the ranks together read each byte once. "keep"
            # excludes GPUDirect Storage, by which each rank would read all its bytes.
            self.result.stats["slice"] = len(self.cuts)
            self._read_slices(list(self.cuts), "reading the files", cache="keep")
            return self.result
        methods = self.methods()
        for method in methods.values():
            self.result.stats[method] += 1
        sent = [name for name, method in methods.items() if method != "slice"]
        groups = list(self._groups(sent))
        ahead = self._start(groups[0]) if groups else None
        self._read_slices([name for name, method in methods.items() if method == "slice"])
        for number, group in enumerate(groups):
            current = ahead
            ahead = self._start(groups[number + 1]) if number + 1 < len(groups) else None
            self._exchange(group, current, methods)
        self._sort()
        return self.result

    def _count(self, loader: Any) -> None:
        self.result.stats["bytes_read"] += loader.stats()["bytes_read"]

    def _read_slices(self, names: list[str], what: str = "reading slices", **options: Any) -> None:
        if not names:
            return
        items = self._part_items(names)
        failure: Exception | None = None
        try:
            self.result.update(load_from(self.model, export, items, watch=self._count,
                                         **{"mode": "load", **options, **self.on_gpu}))
        except Exception as error:
            failure = error
        self.agreement.agree(what, error=failure)

    def _groups(self, names: Iterable[str]) -> Iterable[list[tuple[str, int]]]:
        """Divide tensors into groups by size, each with the rank that reads it, in rotation."""
        group: list[tuple[str, int]] = []
        total = 0
        for number, name in enumerate(names):
            size = self.info(name)[2]
            if group and total + size > _GROUP_BYTES * self.ranks:
                yield group
                group, total = [], 0
            group.append((name, self.readers[number % len(self.readers)]))
            total += size
        if group:
            yield group

    def _start(self, group: list[tuple[str, int]]) -> Any:
        """Start reading this rank's tensors of a group; an error is raised in the exchange."""
        own = [name for name, owner in group if owner == self.rank]
        if not own:
            return None
        try:
            return self.model.load(own, mode="load", order="request")
        except Exception as error:
            return error

    def _exchange(self, group: list[tuple[str, int]], loader: Any, methods: dict[str, str]) -> None:
        failure: Exception | None = None
        own: dict[str, Any] = {}
        try:
            if isinstance(loader, Exception):
                raise loader
            if loader is not None:
                loader.wait()
                mine = [name for name, owner in group if owner == self.rank]
                own = {name: make_item(loader, at) for at, name in enumerate(mine)}
                self._count(loader)
                close_load(loader)
        except Exception as error:
            failure = error
        self.agreement.agree("reading tensors to send", error=failure)
        for name, owner in group:
            whole = own.pop(name, None)
            with named(f"{methods[name]} of {name!r} from rank {owner}"):
                if methods[name] == "broadcast":
                    self.result[name] = self._broadcast(name, owner, whole)
                else:
                    self.result[name] = self._scatter(name, owner, whole)

    def _empty(self, name: str, shape: Sequence[int]) -> Any:
        return torch.empty(list(shape), dtype=torch_dtype(self.info(name)[0]))

    def _cut(self, whole: Any, part: Part) -> Any:
        key = tuple(slice(b, e) for b, e in zip(part.begin, part.end, strict=True))
        return whole[key]

    def _broadcast(self, name: str, owner: int, whole: Any) -> Any:
        """Send the owner's tensor to all ranks, which keep their parts."""
        if whole is None:
            whole = self._empty(name, self.info(name)[1])
        if whole.numel():
            self.pg.broadcast(whole, owner)
            if self.rank == owner:
                self.result.stats["bytes_sent"] += whole.nbytes
        cut = self._cut(whole, self.cuts[name].own)
        return whole if cut.shape == whole.shape else cut.clone()

    def _scatter(self, name: str, owner: int, whole: Any) -> Any:
        """Send each rank its part of the owner's tensor."""
        part = self.cuts[name].own
        if self.rank != owner:
            mine = self._empty(name, part.shape)
            if mine.numel():
                self.pg.recv(mine, owner, 0)
            return mine
        for rank, other in enumerate(self.cuts[name].parts(self.ranks)):
            cut = self._cut(whole, other)
            if rank != owner and cut.numel():
                cut = cut.contiguous()
                self.pg.send(cut, rank, 0)
                self.result.stats["bytes_sent"] += cut.nbytes
        return self._cut(whole, part).clone()


def _load_parts(files: Any, make_cuts: Any, group: Any, strategy: str, timeout: float | None,
                failure: Exception | None, on_gpu: Mapping[str, Any] = {}) -> ShardedTensors:
    """Open the model, agree on the request, and load.

    failure: an earlier error of this rank, which all ranks raise. on_gpu: see _Load.
    """
    limit = None
    try:
        limit = check_timeout(timeout)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not "
                             f"{shown(strategy)}")
    except Exception as error:  # the other ranks wait to hear of it
        failure = failure or error
    pg = open_group(group, limit)
    pg.limit_waits()

    def prepare(model: Any, readers: list[int]) -> _Load:
        return _Load(model, make_cuts(model, pg), pg, strategy, readers, on_gpu)

    model, load, maps = open_on_ranks(files, pg, prepare, failure)
    with contextlib.closing(model):
        return load.run(maps)


def _shape_of(model: Any, name: str, ranks: int) -> tuple[int, ...]:
    """torch's shape of a tensor to cut or send; ValueError if torch lacks the dtype."""
    dtype, shape, *_ = model.info(model.find(name))
    if ranks > 1 and torch_dtype_of(dtype, shape) is None:
        raise ValueError(f"{printable(name)}: this torch has no dtype for {dtype}, so ranks "
                         "can't send it")
    return torch_shape(dtype, shape)


def load_sharded(
    filename: Any,
    dims: Mapping[str, int | None],
    group: Any = None,
    *,
    device: Any = "cpu",
    strategy: str = "auto",
    timeout: float | None = None,
) -> ShardedTensors:
    """Load this rank's parts of a model.

    Args:
        filename: a file, an index, a folder, or a list of files. If only some ranks have them (for
            example on a local disk), those read and send; within verifying(), each needs them.
        dims: {name: dimension to divide, or None for the whole tensor on every rank}; blocks as in
            torch.chunk. Equal on all ranks, in the same order.
        group: a torch.distributed group; None: a single process.
        device: of the parts.
        strategy: "auto", "slice", "broadcast" or "scatter".
        timeout: seconds to wait for other ranks, in all; None: the group's timeout for each wait.
            Ranks notice its end one by one: one rank may have its tensors while another raises.

    Returns:
        {name: tensor}, with statistics in `.stats`. With "auto" on one host and the CPU, whole
        tensors and parts along dimension 0 are views of the file, as those of load_file(). Parts
        that this rank reads itself go directly to a GPU; those of other ranks are copied there.

    Raises:
        KeyError: a name that the model lacks.
        RankError: another rank failed, or requested something else or tensors of another shape.
            The bytes are not compared: while a program replaces the model, ranks may load
            different saves.
        TypeError: an argument of another type.
    """

    def make_cuts(model: Model, pg: Any) -> dict[str, Cut]:
        if not isinstance(dims, Mapping):
            raise TypeError(f"dims must be {{name: dimension or None}}, not {type(dims).__name__}")
        cuts = {}
        for name, dim in dims.items():
            if dim is not None and (not isinstance(dim, int) or is_bool(dim)):
                raise TypeError(
                    f"{printable(str(name))}: a dimension must be an int or None, not {shown(dim)}")
            index = model.find(name)
            if index < 0:
                raise unknown_tensor(name, f"{name!r} is not in the model", model.names())
            shape = _shape_of(model, name, pg.size())
            with tensor_named(name):
                part = partial(part_of, shape, dim, ranks=pg.size())
                own = part(pg.rank())
            how = "whole" if dim is None else f"divided along {dim % len(shape)}"
            cuts[name] = Cut(how, own, part)
        return cuts

    failure: Exception | None = None
    on_gpu: dict[str, Any] = {}
    try:
        device = check_device(device)
        check_present(device)
        on_gpu = load_options(device)
    except Exception as error:  # the other ranks wait to hear of it
        failure = error
    result = _load_parts(filename, make_cuts, group, strategy, timeout, failure, on_gpu)
    if not on_gpu or result.stats["slice"] < len(result):
        for name in result:
            result[name] = result[name].to(device)
    return result


# ---- DTensor ----

def load_model_sharded(
    model: Any,
    mesh: Any,
    placements: Any = None,
    *,
    filename: Any = None,
    strategy: str = "auto",
    timeout: float | None = None,
) -> dict[str, Any]:
    """Load a model as DTensors. Each rank reads only its own part.

    Args:
        model: the source (files, index, folder), or a module whose parameters and persistent
            buffers then become the DTensors; tied ones stay tied.
        mesh: a DeviceMesh with this rank. If it has several dimensions but not all ranks of the
            job, each rank reads alone, and an error on one is not raised on the others.
        placements: for all tensors, or {pattern of names: placements}; also accepts a
            tensor-parallel plan of transformers ({"layers.*.q_proj": "colwise"}). Other tensors,
            and buffers without a pattern, are replicated. Patterns match each name of a tied
            tensor; the first match counts.
        filename: the source of a module's tensors.
        strategy: "auto", "slice", "broadcast" or "scatter".
        timeout: seconds to wait for other ranks, in all; None: the group's timeout for each wait.
            Ranks notice its end one by one: one rank may have its tensors while another raises.

    Returns:
        {name: DTensor}, of parts as load_sharded() gives them.

    Raises:
        KeyError: names that the files lack.
        RuntimeError: shapes that differ from the module's.
        RankError: as for load_sharded().
        TypeError: an argument of another type.
        ValueError: an unknown style, placements for a mesh of other dimensions, placements other
            than Shard and Replicate, or a mesh without this rank, or whose ranks do not ascend
            along each dimension (torch's collectives would return the parts in another order).

    Warns:
        UserWarning: a pattern that no tensor matches (on one rank; for a plan, if no pattern of it
            has a match).
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, not {shown(mesh)}")
    places = places_on(mesh)
    module = model if isinstance(model, torch.nn.Module) else None
    wanted, failure = None, None
    try:
        if module is not None and filename is None:
            raise ValueError("a module needs filename= to be loaded from")
        wanted = None if module is None else ModuleState(module)
    except Exception as error:  # the other ranks wait to hear of it
        failure = error
    mesh_sizes = list(mesh.mesh.shape)
    group = group_of_mesh(mesh)
    own = list(places).index(mesh.get_rank())
    chosen: dict[str, list[Any]] = {}
    whole: dict[str, tuple[int, ...]] = {}

    def make_cuts(opened: Model, pg: Any) -> dict[str, Cut]:
        names = opened.names() if wanted is None else _names_for(opened, wanted)
        cuts, on_mesh = {}, f"on {mesh.mesh.tolist()}"
        for name in names:
            shape = _shape_of(opened, name, pg.size())
            described = placements
            if wanted is not None and not wanted.is_parameter(name) and not isinstance(
                placements, Mapping
            ):
                described = None
            aliases = () if wanted is None else wanted.aliases(name)
            chosen[name] = find_placements(name, described, len(mesh_sizes), len(shape), aliases)
            whole[name] = shape
            with tensor_named(name):
                part = partial(part_at, shape, chosen[name], mesh_sizes, list(places.values()))
                cuts[name] = Cut(f"{chosen[name]} {on_mesh}", part(own), part)
        return cuts

    source = filename if module is not None else model
    local = _load_parts(source, make_cuts, group, strategy, timeout, failure)
    state: dict[str, Any] = {}
    for name, tensor in local.items():
        moved = tensor.to(mesh.device_type)
        stride = torch.empty(whole[name], device="meta").stride()
        state[name] = DTensor.from_local(moved, mesh, chosen[name], run_check=False,
                                         shape=torch.Size(whole[name]), stride=stride)
    if wanted is not None:
        wanted.assign(state)
    lacking = patterns_without_match(placements, local if wanted is None else wanted.tensors)
    if lacking and own == 0:
        warnings.warn(f"no tensor matches these patterns of placements: "
                      f"{printable(', '.join(lacking))}", stacklevel=2)
    return state


def _names_for(opened: Any, wanted: ModuleState) -> list[str]:
    """Names that the files share with a module. An error if the module would miss some."""
    names = [name for name in opened.names() if name in wanted.tensors]
    lacking = sorted(wanted.missing(names, is_assigned=True) | wanted.cut_views(names))
    if lacking:
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise KeyError(f"missing in the files: {printable(', '.join(lacking[:5]))}{more}")
    faults = wanted.shape_faults(opened, names)
    if faults:
        raise RuntimeError("\n".join(faults))
    return names
