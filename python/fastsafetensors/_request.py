# SPDX-License-Identifier: Apache-2.0
"""What is to be loaded, and as what: names and dtypes as the fronts take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ._core import DTYPES, Model
from ._errors import unknown_tensor

# Words for dtypes beside the format's own: torch's and numpy's, as text.
_WORDS = {
    "bool": "BOOL",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "bfloat16": "BF16",
    "half": "F16",
    "float": "F32",
    "double": "F64",
    "complex64": "C64",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}


_FLOATS = ("F64", "F32", "F16", "BF16", "F8_", "F4")  # 6-bit floats are not converted


def dtype_word(dtype: Any) -> str | None:
    """Return the format's name of a dtype: its own, torch's, numpy's, or a word of theirs.

    None and "auto" are None: as the file has it. ValueError for anything else.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    text = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    text = text.rpartition(".")[2]
    if text in DTYPES:
        return text
    found = _WORDS.get(text)
    if found is None:
        known = ", ".join([*DTYPES, *_WORDS, "auto"])
        raise ValueError(f"unknown dtype {dtype!r}: the format has no dtype for it, but {known}")
    return found


def choose_names(
    model: Model, names: Iterable[str] | None, keep: Callable[[str], bool] | None
) -> list[str] | None:
    """Return the names to load, None for all: those given, without what `keep` says no to.

    An unknown name is a SafetensorError and a KeyError.
    """
    if names is None and keep is None:
        return None
    if isinstance(names, (str, bytes)):
        raise TypeError(f"names: a list of names is expected, not {names!r}")
    known = model.names()
    chosen = known if names is None else list(dict.fromkeys(names))
    for name in chosen if names is not None else ():
        if model.find(name) < 0:
            raise unknown_tensor(name, f"File does not contain tensor {name}", known)
    return [name for name in chosen if keep is None or keep(name)]


def converted_dtype(source: str, wanted: str | None) -> str:
    """Return the dtype that a load with a wish makes of a tensor's; both are the format's names.

    Floats become any float type, integers wider ones that hold every value; others stay. The rule
    is the loads' own, for those who only need to know.
    """
    if wanted is None or wanted == source:
        return source
    if source.startswith(_FLOATS) and wanted.startswith(_FLOATS):
        return wanted
    if source[0] not in "UI" or wanted[0] not in "UI" or int(wanted[1:]) <= int(source[1:]):
        return source
    return source if (source[0], wanted[0]) == ("I", "U") else wanted
