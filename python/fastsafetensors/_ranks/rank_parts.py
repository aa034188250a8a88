# SPDX-License-Identifier: Apache-2.0
"""Which part of a tensor a rank has, and how best to read or send it. Pure."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._base.errors import printable, shown
from .._base.representation import with_plain_hints

# How parts of tensors get to their ranks.
STRATEGIES = ("auto", "slice", "broadcast", "scatter")
# Closer pieces of a slice are read together (the loader's rule).
_GAP_BYTES = 64 << 10
# Smaller whole tensors are read by every rank, because a message would take longer.
_SMALL_BYTES = 1 << 20


def block_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Begin and end of a rank's block of ceil(size / ranks), like torch.chunk.

    The last blocks may be short or empty.
    """
    block = -(-size // ranks)
    begin = min(rank * block, size)
    return begin, min(begin + block, size)


@with_plain_hints
class Part(NamedTuple):
    """A rank's part of a tensor: begin and end of each dimension."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def shape(self) -> list[int]:
        """Elements in each dimension."""
        return [e - b for b, e in zip(self.begin, self.end, strict=True)]


class Cut(NamedTuple):
    """How the ranks of a group divide a tensor."""

    description: str  # equal on all ranks
    own: Part  # this rank's
    part_of_rank: Callable[[int], Part]

    def parts(self, ranks: int) -> list[Part]:
        """Return the parts of all ranks."""
        return [self.part_of_rank(rank) for rank in range(ranks)]

    def is_whole(self, ranks: int) -> bool:
        """Whether every rank gets the same part."""
        return self.part_of_rank(0) == self.part_of_rank(ranks - 1)


@with_plain_hints
class Speeds(NamedTuple):
    """Bytes per second: of a rank's reads while all ranks read, and of a broadcast."""

    storage: float
    link: float


@contextlib.contextmanager
def tensor_named(name: str) -> Iterator[None]:
    """Add the tensor's name to errors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{printable(name)}: {printable(error)}") from error


def check_dim(shape: Sequence[int], dim: int) -> None:
    """Raise ValueError if a shape has no such dimension."""
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dimension {dim} is out of range for a tensor of {len(shape)} dimensions")


def part_of(shape: Sequence[int], dim: int | None, rank: int, ranks: int) -> Part:
    """Return the rank's block of ceil(size / ranks) along a dimension, like torch.chunk.

    The last blocks may be short or empty. dim None: the whole tensor.
    """
    begin, end = [0] * len(shape), list(shape)
    if dim is not None:
        check_dim(shape, dim)
        begin[dim], end[dim] = block_of(shape[dim], rank, ranks)
    return Part(tuple(begin), tuple(end))


def over_read(shape: Sequence[int], part: Part, item_bytes: float) -> float:
    """Bytes read for a part, relative to the part's size.

    Gaps of less than 64 KiB between pieces are read over.
    """
    wanted = math.prod(part.shape)
    if wanted == 0:
        return 1.0
    cut = [d for d in range(len(shape)) if part.shape[d] != shape[d]]
    if not cut or cut[-1] == 0:
        return 1.0
    last = cut[-1]  # pieces are contiguous from here on
    inner = math.prod(shape[last + 1 :])
    gap = (shape[last] - part.shape[last]) * inner * item_bytes
    if gap >= _GAP_BYTES:
        return 1.0
    return shape[last] / part.shape[last]


def choose_method(whole_bytes: int, over: float, is_whole: bool, speeds: Speeds, ranks: int) -> str:
    """Choose how a tensor gets to the ranks; the result is the same on all of them.

    A slice costs over / ranks of the tensor at storage speed on each rank. Sending costs reading
    the tensor once, shared among the ranks (each owns every n-th tensor), plus the link: scatter
    sends each other rank's part once, broadcast the whole tensor.
    """
    if whole_bytes <= _SMALL_BYTES:
        return "slice"
    share = whole_bytes / ranks
    if is_whole:
        alone = whole_bytes / speeds.storage
        shared = share / speeds.storage + whole_bytes / speeds.link
        return "slice" if alone <= shared else "broadcast"
    slice_seconds = over * share / speeds.storage
    sent = share / speeds.storage + share * (ranks - 1) / ranks / speeds.link
    return "slice" if slice_seconds <= sent else "scatter"


# transformers' tensor-parallel styles. Others, such as "packed_colwise", divide in other ways.
_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise")
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce",
          "mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "local_params")
_EMBEDDINGS = {"embedding_rowwise": 0, "embedding_colwise": 1}  # {style: dimension}


def _placements_of(style: str, name: str, ndim: int) -> Any:
    """Return [Shard or Replicate] of a style such as "colwise" for a parameter.

    Source: transformers 5.24, distributed/tensor_parallel.py. Columns are the last dimension but
    one of a weight, rows the last one.
    """
    from torch.distributed.tensor import Replicate, Shard

    is_bias = name.rpartition(".")[2] == "bias"
    if style in _EMBEDDINGS:
        return [Shard(_EMBEDDINGS[style])]
    if style in _COLUMNS:
        return [Shard(0 if is_bias else max(ndim - 2, 0))]
    if style in _ROWS and not is_bias:
        return [Shard(max(ndim - 1, 0))]
    if style in (*_ROWS, *_WHOLE):
        return [Replicate()]
    known = ", ".join((*_COLUMNS, *_ROWS, *_EMBEDDINGS, *_WHOLE))
    raise ValueError(f"{printable(name)}: the style {shown(style)} is not one of {known}; give a "
                     "list of placements instead")


def _check_placements(name: str, found: Any) -> list[Any]:
    """Return a parameter's placements as a list. TypeError for anything else."""
    from torch.distributed.tensor.placement_types import Placement

    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    if not is_list or not all(isinstance(one, Placement) for one in found):
        raise TypeError(f"{printable(name)}: placements must be a list such as [Shard(0)], not "
                        f"{shown(found)}")
    return list(found)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern of a plan means a parameter, by its name or by its module's."""
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern of names must be a str, not {shown(pattern)}")
    # The plan of a base model lacks the prefix that a larger model adds.
    return any(fnmatch.fnmatchcase(one, wanted) for one in (name, name.rpartition(".")[0])
               for wanted in (pattern, f"*.{pattern}"))


def find_placements(name: str, described: Any, mesh_dims: int, ndim: int = 2,
                    aliases: Iterable[str] = ()) -> list[Any]:
    """Return the placements of a parameter, one per dimension of the mesh.

    described: placements for all, or {pattern: placements or a style of a tp_plan}. Patterns match
    the parameter's or the module's name as fnmatch does ("[" begins a set of characters); the first
    match counts. Other parameters are replicated. ndim: dimensions of the parameter, for styles.
    aliases: its other names in a module, which patterns may match too.
    Raises ValueError for an unknown style or a wrong number of placements, TypeError for anything
    that is not a list of placements.
    """
    from torch.distributed.tensor import Replicate

    found = described
    if isinstance(described, Mapping):
        names = (name, *aliases)
        found = next((value for pattern, value in described.items()
                      if any(_matches(one, pattern) for one in names)), None)
        if isinstance(found, str):
            found = _placements_of(found, name, ndim)
    if found is None:
        found = [Replicate()] * mesh_dims
    found = _check_placements(name, found)
    if len(found) != mesh_dims:
        raise ValueError(f"{printable(name)}: {len(found)} placements for a mesh of {mesh_dims} "
                         "dimensions")
    return found


def patterns_without_match(described: Any, names: Iterable[str]) -> list[str]:
    """Return the patterns of {pattern: placements} that no name matches.

    The plan of a model family names modules that a model may lack, so its patterns are returned
    only if none has a match.
    """
    if not isinstance(described, Mapping):
        return []
    names = list(names)
    lacking = [pattern for pattern in described
               if not any(_matches(name, pattern) for name in names)]
    own = [pattern for pattern in lacking if not isinstance(described[pattern], str)]
    return lacking if len(lacking) == len(described) else own


def part_on_mesh(shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int],
                 coordinate: Sequence[int]) -> Part:
    """Return the part for a mesh coordinate; each Shard divides the previous result."""
    begin, end = [0] * len(shape), list(shape)
    for placement, size, at in zip(placements, sizes, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or type(placement).__name__ != "Shard":
            raise ValueError(f"placement {placement} can't be read from a file")
        check_dim(shape, placement.dim)
        dim = placement.dim % len(shape)
        first, last = block_of(end[dim] - begin[dim], at, size)
        begin[dim], end[dim] = begin[dim] + first, begin[dim] + last
    return Part(tuple(begin), tuple(end))


def part_at(shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int],
             places: Sequence[Sequence[int]], rank: int) -> Part:
    """Return the part of a rank, whose coordinate on the mesh is places[rank]."""
    return part_on_mesh(shape, placements, sizes, places[rank])


def places_on(mesh: Any) -> dict[int, list[int]]:
    """Return {rank: its coordinate on a mesh}, by rank."""
    if any(bool((mesh.mesh.diff(dim=dim) <= 0).any()) for dim in range(mesh.mesh.dim())):
        raise ValueError(f"the ranks of the mesh must ascend along each dimension, because torch's "
                         f"groups sort them: {mesh.mesh.tolist()}")
    places = {rank: (mesh.mesh == rank).nonzero()[0].tolist()
              for rank in sorted(mesh.mesh.flatten().tolist())}
    if mesh.get_rank() not in places:
        raise ValueError(f"rank {mesh.get_rank()} is not on the mesh {mesh.mesh.tolist()}")
    return places
