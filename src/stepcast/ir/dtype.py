"""Number formats of tensors."""

from enum import StrEnum


class DType(StrEnum):
    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    FP4 = "fp4"
    NVFP4 = "nvfp4"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    BOOL = "bool"

    @property
    def bytes(self) -> float:
        """Bytes of one stored element; block scales of mxfp8 and nvfp4 are not counted."""
        return ELEMENT_BYTES[self]

    @property
    def scaled(self) -> bool:
        """True if numbers are stored relative to a scale: a cast must first find the largest magnitude."""
        return self in SCALED


SCALED = frozenset({DType.FP8, DType.MXFP8, DType.FP4, DType.NVFP4})
# The digits of a name are the bits of an element in memory, where TF32, a way to multiply, is fp32.
BITS = {dtype: int("".join(filter(str.isdigit, dtype))) for dtype in DType if dtype is not DType.BOOL}
ELEMENT_BYTES: dict[DType, float] = {dtype: bits // 8 or bits / 8 for dtype, bits in BITS.items()} | {DType.BOOL: 1}
FP32_BYTES = ELEMENT_BYTES[DType.FP32]
