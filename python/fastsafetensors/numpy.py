# SPDX-License-Identifier: Apache-2.0
"""safetensors files as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as _np

from ._core import Model, Tensor
from ._types import Paths

__all__ = ["load_file"]

# Dtypes that numpy lacks and the ml_dtypes package adds.
_ML_NAMES = {
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def wrap(tensor: Tensor) -> Any:
    """A numpy array on the memory of `tensor`: no bytes are copied.

    bfloat16 and 8-bit floats need the ml_dtypes package (ImportError says so). 4- and 6-bit
    floats, which numpy has no packed form for, come as their bytes, in one dimension.
    """
    if tensor.nbytes == 0:
        array = _np.empty(tensor.shape, dtype=tensor.__array_interface__["typestr"])
    else:
        array = _np.asarray(tensor)
    name = _ML_NAMES.get(tensor.dtype)
    if name is None:
        return array
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"tensor {tensor.name!r} is {tensor.dtype}, which numpy lacks: pip install ml_dtypes"
        ) from error
    return array.view(getattr(ml_dtypes, name))


def export(loader: Any) -> dict[str, Any]:
    """All tensors of a load as {name: numpy array}."""
    tensors: dict[str, Any] = loader.export(wrap, wrap, 0)
    return tensors


def load_file(
    filename: Paths,
    *,
    mode: str = "auto",
    engine: str = "auto",
    threads: int = 0,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Load all tensors of a model: {name: numpy.ndarray} in file order, writable.

    The arguments are those of fastsafetensors.torch.load_file; dtype is the format's name.
    """
    model = Model(filename)
    loader = model.load(mode=mode, engine=engine, threads=threads, dtype=dtype)
    try:
        return export(loader)
    finally:
        loader.close()
        model.close()
