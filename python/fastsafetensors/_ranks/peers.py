# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a group on this host have exited or are stopped."""

from __future__ import annotations

import os
from pathlib import Path

IDENTITY_BYTES = 128


# A process that ends closes its sockets before /proc shows it as a zombie, so that its peers may
# look in between; this flag is set before both (PF_EXITING of the kernel's sched.h).
_EXITING = 0x4


def _stat_of(pid: int) -> tuple[str, int] | None:
    """Return (state, start time) of a process, or None if it does not exist.

    A process that is ending has state "Z", whatever it still has to release.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        return "Z" if int(fields[6]) & _EXITING else fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def own_host() -> bytes:
    """Return the identity of this host, in which containers count as hosts; b"" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}".encode()
    except OSError:
        return b""


def own_identity() -> bytes:
    """Return the identity of this process and host: IDENTITY_BYTES bytes."""
    stat = _stat_of(os.getpid())
    text = own_host() + f" {os.getpid()} {stat[1] if stat else 0}".encode()
    return text[:IDENTITY_BYTES].ljust(IDENTITY_BYTES, b" ")


def host_of(identity: bytes) -> bytes:
    """Return the host of a process's identity; b"" if unknown."""
    words = identity.split()
    return words[0] if len(words) == 3 else b""


def _state_of(identity: bytes, host: bytes) -> str:
    """Describe the problem of a process on this host; "" if it has none that is known."""
    if not host or host_of(identity) != host:
        return ""
    _, pid, start = identity.split()
    stat = _stat_of(int(pid))
    if stat is None or stat[1] != int(start) or stat[0] in "ZX":
        return "has ended"
    return "is stopped" if stat[0] in "Tt" else ""


def describe_lost(identities: list[bytes]) -> str:
    """Name the ranks of this host that have exited or are stopped; "" if none are known."""
    host = host_of(own_identity())
    found = [f"rank {rank} {state} (process {int(identity.split()[1])})"
             for rank, identity in enumerate(identities) if (state := _state_of(identity, host))]
    return ", ".join(found)


def describe_unheard(identities: list[bytes]) -> str:
    """Name the ranks whose identity is empty; "" if all have one."""
    ranks = [str(rank) for rank, identity in enumerate(identities) if not identity]
    if not ranks:
        return ""
    return f"nothing was heard yet from {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"
