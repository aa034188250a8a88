# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors to load."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .._base.errors import unknown_tensor
from .._base.options import check_callable, name_list
from .._core import Model


def choose_names(
    model: Model, names: Iterable[str] | None, keep: Callable[[str], bool] | None,
    parameter: str = "names",
) -> list[str] | None:
    """Return the names to load, or None for all, without those that `keep` rejects.

    An unknown name is a SafetensorError and a KeyError. parameter: the name of `names` in errors.
    """
    check_callable("filter", keep)
    if names is None and keep is None:
        return None
    known = model.names()
    chosen = known if names is None else name_list(parameter, names)
    for name in chosen if names is not None else ():
        if model.find(name) < 0:
            raise unknown_tensor(name, f"File does not contain tensor {name}", known)
    return [name for name in chosen if keep is None or keep(name)]
