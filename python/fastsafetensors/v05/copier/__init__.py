# SPDX-License-Identifier: Apache-2.0
"""Readers of files: the library's own under 0.5's names, and those that programs register."""

from .base import CopierInterface
from .built_in import (
    FgdsFileCopier,
    GdsFileCopier,
    NoGdsFileCopier,
    ThreeFSFileCopier,
    UnifiedMemCopier,
)
from .registry import (
    copier_class_of,
    create_copier_constructor,
    get_copier_class,
    register_copier_constructor,
)

__all__ = [
    "CopierInterface",
    "FgdsFileCopier",
    "GdsFileCopier",
    "NoGdsFileCopier",
    "ThreeFSFileCopier",
    "UnifiedMemCopier",
    "copier_class_of",
    "create_copier_constructor",
    "get_copier_class",
    "register_copier_constructor",
]
