# SPDX-License-Identifier: Apache-2.0
"""Groups of torch.distributed, whose waits end and name the ranks that are missing."""

from __future__ import annotations

import contextlib
import datetime
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from .._base.errors import shown
from .._base.options import check_timeout
from .._saving.background import Background
from .._torch.torch_installed import torch
from .peers import IDENTITY_BYTES, describe_lost, describe_unheard, host_of, own_identity
from .process_group import ProcessGroupBase, SingleGroup, SingleProcessGroup

_T = TypeVar("_T")
_HOST = torch.device("cpu")
# Descriptions of models with a million tensors are far smaller.
_TEXT_BYTES_MAX = 1 << 30
# Keys of the group's store: a rank's identity, and that it knows of a failed wait.
_IDENTITY_KEY = "fastsafetensors/process of rank {}"
_FAILED_KEY = "fastsafetensors/failed wait of rank {}"
# How long to look for ended processes: they close their connections before the kernel shows it.
_LOOK_SECONDS = 3.0
_STORE_SECONDS = 2.0  # the store may be that of a rank that is stopped
# torch takes 0 for the group's own timeout, and has an error for more than a timedelta holds.
_WAIT_SECONDS_MIN = 0.001
_WAIT_SECONDS_MAX = 1e8  # three years

# The identities of a group's processes, by group.
_identities: weakref.WeakKeyDictionary[Any, list[bytes]] = weakref.WeakKeyDictionary()

# Groups in which a wait has failed: which ranks were missing, and why. A late rank's messages are
# still on their way there, and gloo ends the process if the next collective of the group receives
# them.
_broken: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class TorchProcessGroup(ProcessGroupBase):
    """A torch.distributed group; ranks count within the group.

    Waits end with a RankError that says what was awaited, after `timeout` seconds (None: the
    group's own timeout). After a failed wait later ones fail at once, so that the steps that report
    it do not wait again.
    """

    def __init__(self, pg: Any, timeout: float | None = None) -> None:
        """Wrap a group."""
        import torch.distributed as dist

        self.real_pg = pg
        seconds = check_timeout(timeout)
        self._timeout = (None if seconds is None else
                         datetime.timedelta(seconds=min(seconds, _WAIT_SECONDS_MAX)))
        self._seconds_left: float | None = None  # of limit_waits()
        self._is_unlimited = False  # by wait_for_outcome()
        self._count, self._number = int(pg.size()), int(pg.rank())
        nccl = "nccl" in str(dist.get_backend(pg))
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else _HOST

    @property
    def bytes_device(self) -> torch.device:
        """The device of the backend's messages: a GPU for NCCL, else the CPU."""
        return self._device

    def size(self) -> int:
        """Return the number of ranks."""
        return self._count

    def rank(self) -> int:
        """Return this process's rank."""
        return self._number

    def limit_waits(self) -> None:
        """From now on the timeout is for all waits together, not for each."""
        self._seconds_left = None if self._timeout is None else self._timeout.total_seconds()
        self._is_unlimited = False

    def wait_for_outcome(self) -> None:
        """Let rank 0 wait for its timeout once more, and the others for the group's own."""
        self.limit_waits()
        self._is_unlimited = self._number != 0

    @property
    def has_lost_ranks(self) -> bool:
        """Whether a wait for other ranks has failed."""
        return self.real_pg in _broken

    def _limit(self) -> datetime.timedelta | None:
        """Return how long the next wait may take."""
        if self._is_unlimited:
            return None
        if self._seconds_left is None:
            return self._timeout
        return datetime.timedelta(seconds=max(self._seconds_left, _WAIT_SECONDS_MIN))

    def _global(self, rank: int) -> int:
        import torch.distributed as dist

        return int(dist.get_global_rank(self.real_pg, rank))

    def _explain(self, error: Exception, what: str) -> Exception:
        from .agreement import RankError

        reason = _broken.get(self.real_pg)
        if reason is None:
            lost = self._find_lost() or "not all ranks arrived"
            text = str(error).partition("\n")[0] or type(error).__name__
            reason = f"{lost}: {text}"
            _broken[self.real_pg] = reason
        else:
            reason = f"an earlier wait has failed ({reason}): make a new group"
        return RankError(f"rank {self._number} of {self._count} waited for {what}: {reason}")

    def _find_lost(self) -> str:
        """Name the ranks that made a wait fail; "" if none is known.

        A rank whose own wait has failed notes that in the store, and is not named if it then ends.
        """
        _within(_STORE_SECONDS, lambda: self._store().set(_FAILED_KEY.format(self._number), b"1"))
        end = time.monotonic() + _LOOK_SECONDS
        known = _identities.get(self.real_pg)
        failed: list[bytes] = []
        while True:
            known = known or self._published(_IDENTITY_KEY)
            failed = self._published(_FAILED_KEY) or failed  # the store may end with its rank
            others = [b"-" if any(failed[rank : rank + 1]) else one
                      for rank, one in enumerate(known)]
            found = ", ".join(filter(None, (describe_lost(others), describe_unheard(others))))
            if found or not known or time.monotonic() > end:
                return found or _describe_silent(failed)
            time.sleep(0.05)

    def _store(self) -> Any:
        """The group's key-value store. torch has no public function for it."""
        import torch.distributed.distributed_c10d as c10d

        return c10d._world.pg_map[self.real_pg][1]

    def _published(self, key: str) -> list[bytes]:
        """What each rank has put into the store under a key, b"" of others; [] if it can't be read.
        """
        def read() -> list[bytes]:
            store, keys = self._store(), [key.format(rank) for rank in range(self._count)]
            return [bytes(store.get(one)) if store.check([one]) else b"" for one in keys]

        return _within(_STORE_SECONDS, read) or []

    def _begin(self, begin: Callable[[], Any], what: str) -> Callable[[], None]:
        """Start a collective; the returned function waits for it."""
        if self.real_pg in _broken:
            raise self._explain(RuntimeError(), what)
        try:
            work = begin()
        # The group was destroyed, or lost its connections. After any other error, too, the ranks
        # are no longer at the same step.
        except Exception as error:
            raise self._explain(error, what) from error

        def finish() -> None:
            start = time.monotonic()
            try:
                limit = self._limit()
                if limit is None:
                    work.wait()
                else:
                    work.wait(limit)
            except RuntimeError as error:
                raise self._explain(error, what) from error
            finally:
                if self._seconds_left is not None:
                    self._seconds_left -= time.monotonic() - start

        return finish

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        """Run a collective and wait for it."""
        self._begin(begin, what)()

    def exchange(self, message: bytes, what: str) -> list[bytes]:
        """Return every rank's message.

        The first one of a group also has the processes' identities, so that errors can name ranks
        that died.
        """
        what = f"the ranks to agree on {what}"
        if self._count == 1 or self.real_pg in _identities:
            return self._gather(message, what)
        _identities[self.real_pg] = []
        with contextlib.suppress(Exception):  # if a rank is lost before all have exchanged them
            self._store().set(_IDENTITY_KEY.format(self._number), own_identity())
        every = self._gather(own_identity() + message, what)
        _identities[self.real_pg] = [one[:IDENTITY_BYTES] for one in every]
        return [one[IDENTITY_BYTES:] for one in every]

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks run on one host; known after an exchange."""
        hosts = {host_of(identity) for identity in _identities.get(self.real_pg, [])}
        return self._count == 1 or (len(hosts) == 1 and b"" not in hosts)

    @property
    def has_missed_hosts(self) -> bool:
        """Whether this rank was interrupted in the group's first exchange, and so does not know the
        others' hosts.
        """
        return _identities.get(self.real_pg) == []

    def _gather(self, message: bytes, what: str) -> list[bytes]:
        import torch.distributed as dist

        every: list[torch.Tensor] = []

        def begin() -> Any:
            mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
            every.extend(torch.empty_like(mine) for _ in range(self.size()))
            return dist.all_gather(every, mine, group=self.real_pg, async_op=True)

        self._wait(begin, what)
        return [bytes(one.cpu().numpy()) for one in every]

    def exchange_texts(self, text: str, what: str) -> list[str]:
        """Return every rank's text: sizes first, then all of the largest size."""
        data = text.encode(errors="surrogatepass")
        sizes = [int.from_bytes(m, "little")
                 for m in self.exchange(len(data).to_bytes(8, "little"), what)]
        if max(sizes) > _TEXT_BYTES_MAX:
            from .agreement import RankError

            raise RankError(f"too much data for {what} on one rank: {max(sizes)} bytes")
        padded = self.exchange(data.ljust(max(sizes), b"\0"), what)
        return [message[:size].decode(errors="surrogatepass")
                for message, size in zip(padded, sizes, strict=True)]

    def broadcast(self, dst: Any, rank: int) -> None:
        """Broadcast rank's dst to all, as bytes, because backends lack some dtypes."""
        self.begin_broadcast(dst, rank)()

    def begin_broadcast(self, dst: Any, rank: int) -> Callable[[], None]:
        """Start broadcasting rank's dst; the returned function waits for it."""
        import torch.distributed as dist

        flat = bytes_of(dst)
        carrier = flat.to(self._device)
        wait = self._begin(
            lambda: dist.broadcast(carrier, self._global(rank), group=self.real_pg, async_op=True),
            f"{flat.numel()} bytes from rank {rank}",
        )

        def finish() -> None:
            wait()
            if carrier is not flat and self._number != rank:
                flat.copy_(carrier)

        return finish

    def send(self, t: Any, dst_rank: int, tag: int) -> None:
        """Send a tensor's bytes to a rank."""
        import torch.distributed as dist

        data = bytes_of(t).to(self._device)
        self._wait(
            lambda: dist.isend(data, self._global(dst_rank), group=self.real_pg, tag=tag),
            f"rank {dst_rank} to take {data.numel()} bytes",
        )

    def recv(self, t: Any, src_rank: int, tag: int) -> None:
        """Receive a tensor's bytes from a rank."""
        import torch.distributed as dist

        flat = bytes_of(t)
        carrier = torch.empty_like(flat, device=self._device) if self._device != _HOST else flat
        self._wait(
            lambda: dist.irecv(carrier, self._global(src_rank), group=self.real_pg, tag=tag),
            f"{flat.numel()} bytes from rank {src_rank}",
        )
        if carrier is not flat:
            flat.copy_(carrier)


def _within(seconds: float, call: Callable[[], _T]) -> _T | None:
    """Return a call's result; None if it fails or takes longer."""
    results: list[_T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    Background(run, waits_at_exit=False).wait(seconds)
    return results[0] if results else None


def _describe_silent(failed: list[bytes]) -> str:
    """Name the only rank without a failed wait; "" if there are several.

    It is late or stuck, unless it waits still for a rank that has given up.
    """
    silent = [rank for rank, is_failed in enumerate(failed) if not is_failed]
    if len(silent) != 1:
        return ""
    return f"rank {silent[0]} is late or stuck: all other ranks have given up waiting"


def bytes_of(tensor: Any) -> torch.Tensor:
    """Return the bytes of a torch tensor, or of 0.5's wrapper of one, as a view."""
    raw = tensor if isinstance(tensor, torch.Tensor) else tensor.get_raw()
    flat: torch.Tensor = raw.view(-1) if raw.dim() else raw.reshape(1)
    return flat.view(torch.uint8)


def open_group(group: Any, timeout: float | None = None) -> ProcessGroupBase:
    """Return a group for None, a SingleGroup or a torch.distributed group.

    timeout: seconds that each wait for other ranks may take; None: the group's own.
    """
    check_timeout(timeout)
    if group is None or isinstance(group, SingleGroup):
        return SingleProcessGroup()
    import torch.distributed as dist

    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return TorchProcessGroup(group, timeout)
    raise TypeError(f"group must be a torch.distributed group or None, not {shown(group)}")


def group_of_mesh(mesh: Any) -> Any:
    """Return the group of a mesh's ranks, or None if torch has none."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = torch.distributed.group.WORLD
    return world if mesh.size() == torch.distributed.get_world_size() else None
