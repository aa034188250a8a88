# SPDX-License-Identifier: Apache-2.0
"""The `with` statement for objects that have close()."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing:
    """An object whose `with` block ends with close()."""

    __slots__ = ()

    if TYPE_CHECKING:

        def close(self) -> None:
            """Close it."""

    def __enter__(self: _Self) -> _Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Call close()."""
        self.close()
