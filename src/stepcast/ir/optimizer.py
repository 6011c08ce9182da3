"""Optimizers: the states each stores for a weight, and the bytes an update reads and writes.

- adamw: two moments (Loshchilov and Hutter 2019). 8-bit moments have a scale in fp32 for each block of 256
  (Dettmers et al. 2022; bitsandbytes, ``optim/optimizer.py``).
- sgd: none, or one with momentum (torch.optim.SGD).
- muon: one for the matrices of the layers, whose direction is made orthogonal by products; two, as AdamW, for
  all else (Jordan et al. 2024, github.com/KellerJordan/Muon; torch.optim.Muon).
- adafactor: of the second moment of a matrix the sums of its rows and columns (Shazeer and Stern 2018).
"""

from enum import StrEnum

from stepcast.ir.check import require
from stepcast.ir.dataclass import dataclass
from stepcast.ir.dtype import DType


class OptimizerKind(StrEnum):
    ADAMW = "adamw"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    MUON = "muon"
    ADAFACTOR = "adafactor"


@dataclass(frozen=True, slots=True)
class Passes:
    """The (reads, writes) by an update of each element that it touches."""

    weight: tuple[int, int] = (1, 1)
    gradient: int = 1  # reads
    moments: tuple[int, int] = (0, 0)  # of all moments together
    temporary: tuple[int, int] = (0, 0)  # in the format of the gradient
    narrow: tuple[int, int] = (0, 0)  # in bf16


K = OptimizerKind
# Moments of a weight; those of matrices alone are described where they are counted.
MOMENTS: dict[OptimizerKind, int] = {K.ADAMW: 2, K.SGD: 0, K.SGD_MOMENTUM: 1, K.MUON: 2, K.ADAFACTOR: 1}
# In one kernel each, where there is one.
FUSED: dict[OptimizerKind, Passes] = {
    K.ADAMW: Passes(moments=(2, 2)),
    K.SGD: Passes(),
    K.SGD_MOMENTUM: Passes(moments=(1, 1)),
}
# Operation by operation over lists of tensors: PyTorch's torch/optim/{adam,sgd,_muon,_adafactor}.py.
LISTED: dict[OptimizerKind, Passes] = {
    K.ADAMW: Passes(weight=(2, 2), gradient=2, moments=(5, 3), temporary=(3, 3)),
    K.SGD: Passes(),
    K.SGD_MOMENTUM: Passes(moments=(3, 2)),
    K.MUON: Passes(weight=(2, 2), gradient=2, moments=(2, 1), temporary=(1, 1), narrow=(3, 2)),
    K.ADAFACTOR: Passes(weight=(2, 1), gradient=3, temporary=(6, 5)),
}
# Formats of moments by the names that ask for them; fp16 and fp8 are Megatron-LM's --exp-avg-dtype.
FORMATS = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16, "fp8": DType.FP8, "8bit": DType.INT8}
WIDE = ("fp32", "bf16")
KNOWN_FORMATS: dict[OptimizerKind, tuple[str, ...]] = {
    K.ADAMW: tuple(FORMATS),
    K.SGD: (),
    K.SGD_MOMENTUM: (*WIDE, "8bit"),
    K.MUON: WIDE,
    K.ADAFACTOR: WIDE,
}
BLOCK = 256  # elements of an 8-bit moment that share a scale
ITERATIONS = 5  # of Newton and Schulz: three products each


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer and the states it stores for each parameter."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    moment_dtype: DType = DType.FP32
    # An fp32 copy of the weights where those are less precise.
    master_weights: bool = True
    # Updates all weights in one kernel; without, a temporary as large as one moment exists during the step.
    fused: bool = True
    # The norm of all gradients is computed before the update, to clip them by it.
    clips: bool = True

    def __post_init__(self) -> None:
        known = [FORMATS[name] for name in KNOWN_FORMATS[self.kind] or ("fp32",)]
        require(
            self.moment_dtype in known,
            f"{self.kind} keeps no moments in {self.moment_dtype}; expected {', '.join(map(str, known))}",
        )

    @property
    def moments(self) -> int:
        """Moments of a weight that is no matrix."""
        return MOMENTS[self.kind]

    @property
    def moment_bytes(self) -> float:
        """Bytes of one element of a moment, with its part of a scale."""
        scale = DType.FP32.bytes / BLOCK if self.moment_dtype is DType.INT8 else 0.0
        return self.moment_dtype.bytes + scale

    @property
    def passes(self) -> Passes:
        """The passes of an update; of matrices alone where the optimizer treats them apart."""
        return FUSED[self.kind] if self.fused and self.kind in FUSED else LISTED[self.kind]

    @property
    def knows_matrices(self) -> bool:
        """True if matrices are treated otherwise than the rest."""
        return self.kind in (OptimizerKind.MUON, OptimizerKind.ADAFACTOR)


ADAM = Optimizer()


def parse_optimizer(text: str, master_weights: bool = True, clips: bool = True) -> Optimizer:
    """Return the optimizer that NAME or NAME:FORMAT asks for."""
    name, colon, form = text.partition(":")
    require(name in set(OptimizerKind), f"optimizer {name!r}: expected {', '.join(OptimizerKind)}")
    kind = OptimizerKind(name)
    known = ", ".join(KNOWN_FORMATS[kind])
    require(
        not colon or form in KNOWN_FORMATS[kind],
        f"optimizer {name} has no moments in {form!r}: "
        + (f"expected {known}" if known else f"it has none, give {name} alone"),
    )
    return Optimizer(kind, FORMATS[form or "fp32"], master_weights, clips=clips)
