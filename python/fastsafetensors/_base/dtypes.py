# SPDX-License-Identifier: Apache-2.0
"""The table of the format's dtypes, from which all functions take their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._core import DTYPES
from .errors import printable

# {the format's name: torch's, which numpy, ml_dtypes, jax and paddle also use}. 6-bit floats have
# no such name. An element of float4_e2m1fn_x2 is a pair.
WORDS: dict[str, str] = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "BF16": "bfloat16",
    "C64": "complex64",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
NAMES: dict[str, str] = {word: name for name, word in WORDS.items()}

# Common aliases.
_OTHER_WORDS = {
    "half": "F16", "float": "F32", "double": "F64", "fp16": "F16", "fp32": "F32", "fp64": "F64",
}
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_", "F4")  # 6-bit floats are not converted


def bits_of(name: str) -> int:
    """Bits of an element, by the format's name."""
    if name == "BOOL":
        return 8
    return int(name.partition("_")[0].lstrip("BFIUC"))


def dtype_word(dtype: Any) -> str | None:
    """Return the format's name of a dtype, given as the format's, torch's or numpy's, or an alias.

    None and "auto" return None: the file's dtype. ValueError for anything else.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    if dtype is float:  # the type: numpy's and torch's name of it; "float" is torch.float
        return "F64"
    text = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    text = text.rpartition(".")[2]
    for name in (text, text.upper()):
        if name in DTYPES:
            return name
    found = NAMES.get(text) or _OTHER_WORDS.get(text)
    if found is None:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of: {', '.join(DTYPES)}, "
                         f"torch's {', '.join(NAMES)}, and 'auto'")
    return found


def _conversion_targets(source: str) -> str:
    """Describe the supported conversions of a dtype."""
    if source.startswith(_FLOATS):
        return "floats become " + ", ".join(
            name for name in DTYPES if name.startswith(_FLOATS) and name != source)
    wider = [name for name in DTYPES if converted_dtype(source, name) != source]
    return f"{source} becomes {', '.join(wider)}" if wider else f"{source} can't be converted"


def check_dtype(tensors: Iterable[tuple[str, str]], wanted: str | None) -> None:
    """ValueError if a (name, dtype) cannot be converted to the requested dtype.

    A request for a float dtype applies to floats only: ids and masks are left unchanged. 6-bit
    floats cannot be converted. A request for any other dtype applies to every tensor.
    """
    if wanted is None:
        return
    floats_only = wanted.startswith(_FLOATS)
    for name, dtype in tensors:
        if floats_only and not dtype.startswith((*_FLOATS, "F6")):
            continue
        if dtype != wanted and converted_dtype(dtype, wanted) == dtype:
            raise ValueError(
                f"dtype={wanted}: {printable(name)} is {dtype}, which can't become {wanted}: "
                f"{_conversion_targets(dtype)}. Load it without dtype= (names=, filter=)"
            )


def converted_dtype(source: str, wanted: str | None) -> str:
    """Return the dtype of a tensor after a load with a requested dtype, both by the format's names.

    Floats are converted to any float type, integers to wider ones that hold every value; others are
    left unchanged. The same rule as in loads, for code that only needs the result.
    """
    if wanted is None or wanted == source:
        return source
    if source.startswith(_FLOATS) and wanted.startswith(_FLOATS):
        return wanted
    if source[0] not in "UI" or wanted[0] not in "UI" or bits_of(wanted) <= bits_of(source):
        return source
    return source if (source[0], wanted[0]) == ("I", "U") else wanted
