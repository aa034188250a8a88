# SPDX-License-Identifier: Apache-2.0
"""Types of arguments and results, for annotations in programs.

Path: a path in any form that os.fsencode() takes. Paths: one model, a path or a list of files.
Progress: what a `progress` argument is called with: bytes done, all bytes, tensors done, all
tensors. Verify: the values of `verify`. The classes are made by functions of this package.
"""

from __future__ import annotations

from ._base.argument_types import Path, Paths
from ._base.progress import Progress
from ._loading.open import PrefetchLoader, TensorMeta, TensorSlice
from ._loading.stream import TensorStream
from ._loading.verified_open import Verify

__all__ = ["Path", "Paths", "PrefetchLoader", "Progress", "TensorMeta", "TensorSlice",
           "TensorStream", "Verify"]
