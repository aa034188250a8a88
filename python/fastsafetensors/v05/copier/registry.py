# SPDX-License-Identifier: Apache-2.0
"""Readers by name.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._base.errors import printable
from ..frameworks import FrameworkOpBase, TensorBase
from ..st_types import Device, DType
from .base import CopierInterface

Construct = Callable[[Any, Device, FrameworkOpBase], CopierInterface]
Factory = Callable[..., Construct]

# All of these use the library's pipeline, which chooses the engine.
BUILT_IN = ("gds", "nogds", "unified", "fgds", "3fs")


class CoreCopier(CopierInterface):
    """The library's pipeline; the running load serves as the device buffer."""

    def __init__(self, metadata: Any, device: Device, framework: FrameworkOpBase) -> None:
        """Store the file to read."""
        self._metadata = metadata
        self._framework = framework
        self._options = framework.load_options(device, "auto")
        self._names: list[str] | None = None

    def set_chunk(
        self, byte_ranges: Any, names: Any, allocation_size: int | None = None
    ) -> None:
        """Read only these tensors."""
        self._names = list(names)

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
        """Start reading in the background."""
        names = list(self._metadata.tensors) if self._names is None else self._names
        options = {"mode": "load", "order": "file", **self._options}
        return self._metadata.model.load(names, **options) if names else None

    def wait_io(
        self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> dict[str, TensorBase]:
        """Wait for all bytes; the tensors own their memory."""
        if gbuf is None:
            return {}
        try:
            gbuf.wait()
            tensors = [self._framework.wrap(gbuf.item(i)) for i in range(len(gbuf))]
            names = list(self._metadata.tensors) if self._names is None else self._names
            return dict(zip(names, tensors, strict=True))
        finally:
            gbuf.close()


_factories: dict[str, Factory] = {}
_classes: dict[str, type[CopierInterface]] = dict.fromkeys(BUILT_IN, CoreCopier)


def register_copier_constructor(
    copier_type: str, copier_class: type[CopierInterface] | None = None
) -> Callable[[Factory], Factory]:
    """Register a reader: decorates ``factory(device, **kw) -> construct(metadata, device, op)``."""

    def register(factory: Factory) -> Factory:
        _factories[copier_type] = factory
        if copier_class is not None:
            _classes[copier_type] = copier_class
        return factory

    return register


def _check(copier_type: str) -> None:
    if copier_type not in _factories and copier_type not in BUILT_IN:
        known = [*BUILT_IN, *(name for name in _factories if name not in BUILT_IN)]
        raise KeyError(f"Copier type '{printable(copier_type)}' is not registered. Available "
                       f"types: {known}")


def is_built_in(copier_type: str) -> bool:
    """Tell whether a name means the library's pipeline."""
    return copier_type in BUILT_IN and copier_type not in _factories


def create_copier_constructor(copier_type: str, device: Device, **kwargs: Any) -> Construct:
    """Return the constructor of readers of a type."""
    _check(copier_type)
    if copier_type in _factories:
        return _factories[copier_type](device, **kwargs)
    return CoreCopier


def get_copier_class(copier_type: str) -> type[CopierInterface]:
    """Return the class registered for a type; the interface for an unknown one."""
    return _classes.get(copier_type, CopierInterface)


def copier_class_of(construct: Construct) -> type[CopierInterface]:
    """Return the class that a constructor returns, if annotated."""
    if isinstance(construct, type) and issubclass(construct, CopierInterface):
        return construct
    found = getattr(construct, "copier_class", None)
    return found if isinstance(found, type) else CopierInterface
