# SPDX-License-Identifier: Apache-2.0
"""Names of dtypes and devices, as the loaders of fastsafetensors 0.5 use them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from .._base.dtypes import bits_of, converted_dtype
from .._base.errors import printable


class DType(Enum):
    """An element type with the format's name as its value. AUTO: the file's dtype."""

    AUTO = "AUTO"
    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C64 = "C64"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"


# Size of an element; half a byte for F4.
DTYPE_SIZES: dict[DType, float] = {
    dtype: bits_of(dtype.value) / 8 if bits_of(dtype.value) % 8 else bits_of(dtype.value) // 8
    for dtype in DType
    if dtype is not DType.AUTO
}


class DeviceType(Enum):
    """A kind of device. GPU is paddle's name for cuda."""

    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"


@dataclass(frozen=True)
class Device:
    """A device: its kind and optionally its index."""

    type: DeviceType = DeviceType.CPU
    index: int | None = None

    def as_str(self) -> str:
        """Return "cpu", "cuda" or "cuda:0"."""
        name = self.type.value
        return name if self.index is None else f"{name}:{self.index}"

    @classmethod
    def from_str(cls, s: str) -> Device:
        """Parse "cpu", "cuda", "cuda:0" or "gpu:0"."""
        name, colon, number = s.partition(":")
        try:
            kind = DeviceType(name)
        except ValueError:
            raise ValueError(f"Unknown device type: {printable(name)}") from None
        if not colon:
            return cls(kind)
        if not number.isascii() or not number.isdigit():
            raise ValueError(f"Invalid index: {printable(number)}")
        return cls(kind, int(number))

    @classmethod
    def of(cls, device: Any) -> Device:
        """Create one from a Device, a string, a number (of a GPU) or a framework device."""
        if isinstance(device, Device):
            return device
        if isinstance(device, int) and not isinstance(device, bool):
            return cls(DeviceType.CUDA, device)
        if isinstance(device, str):
            return cls.from_str(device)
        kind = getattr(device, "type", None)
        if isinstance(kind, str):
            return cls.from_str(str(device))
        raise TypeError(f"a device is a str, an int or a torch.device, not {type(device).__name__}")

    @property
    def is_cpu(self) -> bool:
        """Tell whether it is the CPU."""
        return self.type is DeviceType.CPU


def converted(source: DType, wanted: DType) -> DType:
    """Return a tensor's dtype after a load with a requested dtype, for ranks that only receive."""
    return source if wanted is DType.AUTO else DType(converted_dtype(source.value, wanted.value))
