# SPDX-License-Identifier: Apache-2.0
"""Groups of processes ("ranks") that load or save together.

Tensors are torch tensors or, for the loaders of fastsafetensors 0.5, its TensorBase.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class ProcessGroupBase(ABC):
    """A process group: ranks count within the group."""

    @abstractmethod
    def size(self) -> int:
        """Return the number of ranks."""

    @abstractmethod
    def rank(self) -> int:
        """Return this process's rank."""

    def limit_waits(self) -> None:  # noqa: B027 - groups without a timeout have nothing to do
        """From now on the timeout is for all waits together, not for each."""

    def wait_for_outcome(self) -> None:  # noqa: B027 - the same
        """From now on ranks wait for what rank 0 does alone, which may take longer than they allow.

        Rank 0 has its timeout once more, the others the group's own for each wait.
        """

    @property
    def has_lost_ranks(self) -> bool:
        """Whether a wait for other ranks has failed."""
        return False

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks run on one host; known after an exchange."""
        return self.size() == 1

    @property
    def has_missed_hosts(self) -> bool:
        """Whether this rank was interrupted in the group's first exchange, and so does not know the
        others' hosts.
        """
        return False

    def exchange(self, message: bytes, what: str) -> list[bytes]:
        """Return every rank's message, all of the same size; `what` is for errors.

        A group that does not support this returns only its own, so its ranks do not agree
        beforehand.
        """
        return [message]

    def exchange_texts(self, text: str, what: str) -> list[str]:
        """Return every rank's text."""
        return [text]

    @abstractmethod
    def broadcast(self, dst: Any, rank: int) -> None:
        """Broadcast rank's dst to all."""

    def begin_broadcast(self, dst: Any, rank: int) -> Callable[[], None]:
        """Start broadcasting rank's dst; the returned function waits for it."""
        self.broadcast(dst, rank)
        return lambda: None

    def scatter(self, dst: Any, scatter_list: list[Any], src: int) -> None:
        """Scatter src's list of tensors."""
        if self.rank() != src:
            self.recv(dst, src, 0)
            return
        for rank, tensor in enumerate(scatter_list):
            if rank != src:
                self.send(tensor, rank, 0)
        buffer = (ctypes.c_char * dst.get_nbytes()).from_address(dst.data_ptr())
        scatter_list[src].copy_to_buffer(memoryview(buffer).cast("B"))

    @abstractmethod
    def send(self, t: Any, dst_rank: int, tag: int) -> None:
        """Send a tensor to a rank."""

    @abstractmethod
    def recv(self, t: Any, src_rank: int, tag: int) -> None:
        """Receive a tensor from a rank."""


class SingleProcessGroup(ProcessGroupBase):
    """The group of a single process."""

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0

    def broadcast(self, dst: Any, rank: int) -> None:
        """Do nothing, because there are no other ranks."""

    def send(self, t: Any, dst_rank: int, tag: int) -> None:
        """Raise, because there are no other ranks."""
        raise RuntimeError("a group of one has no rank to send to")

    def recv(self, t: Any, src_rank: int, tag: int) -> None:
        """Raise, because there are no other ranks."""
        raise RuntimeError("a group of one has no rank to receive from")


class SingleGroup:
    """The process group of a single process.

    For programs written for fastsafetensors 0.5.
    """

    def size(self) -> int:
        """Return the number of ranks: 1."""
        return 1

    def rank(self) -> int:
        """Return the rank: 0."""
        return 0
