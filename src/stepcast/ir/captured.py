"""A captured program: the work of one step, and the memory it takes."""

from collections import defaultdict
from typing import TypeGuard

from stepcast.ir.recurrent import RecurrentCells
from stepcast.ir.types import DType, Natural, Size, dataclass, require
from stepcast.ir.work import Attention, Convolution, GroupedMatmul, Matmul
from stepcast.ir.workload import Stage, Workload


@dataclass(frozen=True, slots=True)
class LayerPart:
    """The sizes of a layer of the program, in the order of the forward."""

    parameters: Natural = 0
    parameter_bytes: Natural = 0
    gradient_bytes: Natural = 0  # of its parameters, once its backward has run
    reduced_bytes: Natural = 0  # of these, without what the allocator adds to each; 0: not recorded
    kept_bytes: Natural = 0  # made in the forward and read by the backward
    # The most that activations and temporary tensors take while its forward or its backward runs, beyond the
    # saved activations of the layers before it.
    forward_peak_bytes: Natural = 0
    backward_peak_bytes: Natural = 0
    sent_bytes: Natural = 0  # that would be sent where the program is cut before it
    # The parts of these that tensor parallelism splits; and how, a letter for each op of forward | gradient of inputs
    # | gradient of weights: m, n, k or b of a product, h for heads, e for elements, - for ops that every rank
    # runs completely; with + the result is summed over the ranks.
    split_bytes: Natural = 0
    split_kept_bytes: Natural = 0
    split_forward_bytes: Natural = 0
    split_backward_bytes: Natural = 0
    split: str = ""

    def __post_init__(self) -> None:
        require(self.split_bytes <= self.parameter_bytes, "no more can be split than there is")
        require(self.split_kept_bytes <= self.kept_bytes, "no more can be split than is kept")
        require(self.split_forward_bytes <= self.forward_peak_bytes, "no more can be split than a forward has")
        require(self.split_backward_bytes <= self.backward_peak_bytes, "no more can be split than a backward has")


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters that several layers read; the first of them has them."""

    parts: tuple[int, ...]
    size_bytes: Natural
    split_bytes: Natural = 0  # the part of these that tensor parallelism splits

    def __post_init__(self) -> None:
        require(self.split_bytes <= self.size_bytes, "no more can be split than there is")
        distinct = tuple(sorted(set(self.parts)))
        require(len(distinct) > 1 and self.parts == distinct, "layers of a tie differ")


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """Layers whose parameters one call of ``fully_shard`` or FSDP gathers together; units may be nested."""

    first: Natural  # its layers, in the order of the forward
    last: int
    gathered_bytes: Natural  # of its own parameters, without those of inner units
    reduced_bytes: Natural  # of their gradients
    is_freed: bool = True  # after its forward, so that the backward gathers it again

    def __post_init__(self) -> None:
        require(self.first <= self.last, "a unit has layers")


@dataclass(frozen=True, slots=True)
class CapturedMemory:
    """Bytes at the fullest moment of the step, by what holds them."""

    parameters: Natural = 0
    gradients: Natural = 0
    optimizer: Natural = 0
    activations: Natural = 0  # saved by the forward for the backward
    temporary: Natural = 0
    # Of the step, whatever is there at that moment: all gradients, and what the optimizer's update needs.
    all_gradients: Natural = 0
    update: Natural = 0
    unused: Natural = 0  # that PyTorch's allocator reserves beyond the fullest moment

    @property
    def peak(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True, slots=True)
class Captured:
    """One step of a program on one GPU: its workload has one stage, and one part for each layer of it."""

    workload: Workload
    parts: tuple[LayerPart, ...]
    memory: CapturedMemory
    parameters: Natural
    tokens: Size
    batch: Size
    precision: DType = DType.BF16
    compiled: bool = False
    facts: tuple[tuple[str, str], ...] = ()
    ties: tuple[Tie, ...] = ()
    units: tuple[ShardUnit, ...] = ()  # of a script that shards itself
    recomputed_flops: float = 0.0  # of forwards that the backward runs again

    def __post_init__(self) -> None:
        require(len(self.workload.stages) == 1, "a captured program has one stage")
        layers = self.stage.body_layer_count
        require(len(self.parts) == layers, f"{layers} layers need as many parts, not {len(self.parts)}")
        known = all(0 <= part < layers for tie in self.ties for part in tie.parts)
        known &= all(unit.last < layers for unit in self.units)
        require(known, f"a tie and a unit are of some of {layers} layers")

    @property
    def stage(self) -> Stage:
        return self.workload.stages[0]

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.workload.warnings

    @property
    def ops(self) -> int:
        """Kernels of a step."""
        layers = self.stage.counted_layers(self.workload.micro_batches)
        return sum(count * len(layer.all_ops) for layer, count in layers)

    def flops(self, attention: bool = True) -> float:
        """Return the FLOPs of matrix products, recurrent cells and, with *attention*, fused attention, both ways."""
        return sum(count_flops(self.stage, attention).values())


def count_flops(stage: Stage, attention: bool = True) -> dict[DType, float]:
    """Return the FLOPs of matrix products, recurrent cells and, with *attention*, fused attention by their format."""
    flops = defaultdict[DType, float](float)
    for layer, count in stage.counted_layers(1):
        for work in (op.work for op in layer.all_ops):
            if is_product(work) and (attention or not isinstance(work, Attention)):
                flops[work.dtype] += count * work.flops
    return flops


def is_product(work: object) -> TypeGuard[Matmul | GroupedMatmul | Convolution | RecurrentCells | Attention]:
    products = (Matmul, GroupedMatmul, Convolution, RecurrentCells, Attention)
    return isinstance(work, products) and not (isinstance(work, Convolution) and work.is_depthwise)
