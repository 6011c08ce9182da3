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
# TF32 is a way to multiply: tensors in memory stay fp32.
ELEMENT_BYTES: dict[DType, float] = {
    DType.FP64: 8,
    DType.FP32: 4,
    DType.TF32: 4,
    DType.FP16: 2,
    DType.BF16: 2,
    DType.FP8: 1,
    DType.MXFP8: 1,
    DType.FP4: 0.5,
    DType.NVFP4: 0.5,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.BOOL: 1,
}
FP32_BYTES = ELEMENT_BYTES[DType.FP32]
