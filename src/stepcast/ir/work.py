"""Work: what an op does, without where or when it runs.

Sizes of collectives follow one rule: ``size_bytes`` is the COMPLETE buffer, which is what one rank holds
after an all-gather, before a reduce-scatter, and on both sides of an all-reduce or all-to-all.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, get_args

from stepcast.ir.layout import Channel, Group, HostWay
from stepcast.ir.recurrent import DeltaRule, RecurrentCells, Scan, SelectiveScan
from stepcast.ir.types import DType, Natural, Quantity, Size, dataclass, require_counts


@dataclass(frozen=True, slots=True)
class Matmul:
    """*batch* products of (m, k) by (k, n)."""

    m: Size
    n: Size
    k: Size
    batch: Size = 1
    dtype: DType = DType.BF16
    swapped: Natural = 0  # operands in whose memory the elements of one sum are not neighbours, as far as it is known

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> float:
        """Bytes of operands read once and the result written once."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class GroupedMatmul:
    """One kernel for many experts: *groups* slices of *m* rows in all, each times its own (k, n) weight.

    *separate*: a kernel for each expert instead, on a few streams (Transformer Engine's GroupedLinear). *skew*: blocks
    of rows over those of equal slices.
    """

    m: Size
    n: Size
    k: Size
    groups: Size
    dtype: DType = DType.BF16
    separate: bool = False
    skew: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> float:
        return (self.m * self.k + self.groups * self.k * self.n + self.m * self.n) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused (flash) attention: scores, softmax and weighted sum in one kernel, never stored."""

    batch: Size
    query_len: Size
    key_len: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    value_dim: Size
    causal: bool = True
    backward: bool = False
    dtype: DType = DType.BF16
    # A tensor says which pairs count: all of them are worked on, and the mask is read.
    masked: bool = False
    drops: bool = False  # some of the probabilities, drawn in the kernel

    @property
    def flops(self) -> float:
        """Executed FLOPs: half of the square when causal; five products backward for two forward.

        Source: Dao, FlashAttention-2 (2023), section 4.1.
        """
        square = self.batch * self.heads * self.query_len * self.key_len * (0.5 if self.causal else 1.0)
        query_key, probability_value = 2.0 * square * self.head_dim, 2.0 * square * self.value_dim
        return 3.0 * query_key + 2.0 * probability_value if self.backward else query_key + probability_value

    @property
    def moved_bytes(self) -> float:
        sizes = self.batch, self.query_len, self.key_len, self.heads, self.kv_heads, self.head_dim, self.value_dim
        return float(attention_bytes(sizes, self.backward, self.dtype.bytes))


def attention_bytes(sizes: Sequence[Any], backward: Any, element_bytes: Any) -> Any:
    """Return the bytes moved by attention of *sizes*, numbers or arrays in the order of its fields.

    Forward reads q, k, v and writes the output. Backward also reads the output and its gradient and writes dq twice
    (an fp32 sum, then rounded); with shared key heads, dk and dv are first written per query head.
    """
    batch, query_len, key_len, heads, kv_heads, head_dim, value_dim = sizes
    queries = batch * query_len * heads * (head_dim + value_dim) * element_bytes
    pairs = batch * key_len * kv_heads * (head_dim + value_dim) * element_bytes
    per_head = (kv_heads < heads) * 2.0 * queries
    return queries + pairs + backward * (3.0 * queries + pairs + per_head)


class ConvolutionPass(StrEnum):
    FORWARD = "forward"
    DATA = "data"  # the gradient of the data, and the forward of a transposed convolution
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Convolution:
    """One pass of a convolution of *inputs* positions, over all samples, to *outputs*: each of these reads a window of
    *taps* positions. A transposed convolution is the one whose gradient it is.
    """

    inputs: Size
    outputs: Size
    in_channels: Size
    out_channels: Size
    taps: Size
    groups: Size = 1
    of: ConvolutionPass = ConvolutionPass.FORWARD
    # The channels of a position are next to each other in memory, or kernels take the data as they are all the same.
    channels_last: bool = False
    dtype: DType = DType.BF16

    @property
    def flops(self) -> float:
        return 2.0 * self.outputs * self.out_channels * (self.in_channels / self.groups) * self.taps

    @property
    def is_depthwise(self) -> bool:
        """Return True if each channel is convolved by itself."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def data_elements(self) -> int:
        """Elements of data and result."""
        return self.inputs * self.in_channels + self.outputs * self.out_channels

    @property
    def weights(self) -> int:
        return self.out_channels * self.in_channels * self.taps // self.groups

    @property
    def moved_bytes(self) -> float:
        return (self.data_elements + self.weights) * self.dtype.bytes


class ElementwiseKind(StrEnum):
    """Kernels that are bound by memory, distinguished because their efficiency differs."""

    ADD = "add"
    MUL = "mul"
    GELU = "gelu"
    SILU = "silu"
    SWIGLU = "swiglu"
    LAYER_NORM = "layer-norm"
    RMS_NORM = "rms-norm"
    SOFTMAX = "softmax"
    ROTARY = "rotary"
    DROPOUT = "dropout"
    MASK = "mask"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross-entropy"
    CONVOLUTION = "convolution"  # causal, along the sequence, each channel by itself
    GROUP_NORM = "group-norm"  # a row in several parts
    OPTIMIZER = "optimizer"
    # AdamW of weights whose gradients and moments are zero, by which a GPU divides in more instructions.
    IDLE_OPTIMIZER = "idle-optimizer"
    LISTED_OPTIMIZER = "listed-optimizer"  # operation by operation, over lists of tensors
    QUANTISED_OPTIMIZER = "quantised-optimizer"  # of 8-bit moments, each looked up and quantised again
    DEQUANTISE = "dequantise"  # of 4-bit or 8-bit weights
    CAST = "cast"
    COPY = "copy"
    FILL = "fill"
    # PyTorch's kernels that work out where each element lies: with an operand that is repeated along rows or
    # columns, or a part of a tensor; with one whose dimensions are swapped; and its torch.cat of such parts.
    BROADCAST = "broadcast"
    STRIDED = "strided"
    TRANSPOSED = "transposed"  # neighbours in one operand that are no neighbours in another
    JOIN = "join"
    ROW_SUM = "row-sum"  # of the elements of each row
    COLUMN_SUM = "column-sum"  # of each column, over all rows
    SCATTER_SUM = "scatter-sum"  # of rows that a few others get, each *columns* wide, in turn
    UNFUSED_LOSS = "unfused-loss"  # the kernels of Megatron-LM's vocab_parallel_cross_entropy, one after the other
    BATCH_NORM = "batch-norm"  # a row is a channel
    LAST_NORM = "last-norm"  # likewise with channels last: a row is a position
    IMAGE_NORM = "image-norm"  # of groups of channels of an image
    GROUP_MOMENTS = "group-moments"  # mean and variance of each group
    POOL = "pool"
    RESIZE = "resize"
    GATHER = "gather"  # rows of a table, a thread block each
    BAG = "bag"  # sums of rows of a table
    ROW_GRADIENT = "row-gradient"  # of those rows, sorted and summed
    ID_GRADIENT = "id-gradient"  # of few rows, one after another
    ATOMIC_SUM = "atomic-sum"  # element by element, into the places that indices name
    SORT = "sort"
    DIGIT = "digit"  # one pass of a sort
    CHOICE = "choice"  # the largest elements of each row
    IRREGULAR = "irregular"  # element by element, from places that other numbers determine
    INNER_SOFTMAX = "inner-softmax"  # over elements that are not neighbours in memory
    ROW_SCAN = "row-scan"  # of each element of a row all elements before it are summed
    NORM_WEIGHT = "norm-weight"  # the gradient of a norm's weight and bias, row after row
    SEQUENCE_LOSS = "sequence-loss"  # a kernel that goes through a sequence step by step (CTC); a row is a step
    SPECTRUM = "spectrum"  # a Fourier transform
    # By a compiler: sums of columns and of rows that fit into registers; elements for which random numbers are drawn.
    FUSED_SUM = "fused-sum"
    FUSED_DROPOUT = "fused-dropout"
    FUSED_LOSS = "fused-loss"  # the logarithm of a sum of exponentials over each row, by a compiler
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Elementwise:
    """A memory-bound kernel over *rows* x *columns* elements (columns = the length that is normalised)."""

    kind: ElementwiseKind
    rows: Size
    columns: Size
    read_bytes: Quantity
    write_bytes: Quantity
    backward: bool = False
    dtype: DType = DType.BF16

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def moved_bytes(self) -> float:
        return self.read_bytes + self.write_bytes


def elementwise(
    kind: ElementwiseKind, rows: int, columns: int, reads: float, writes: float, dtype: DType, backward: bool = False
) -> Elementwise:
    """Return a memory-bound kernel that reads and writes *reads* and *writes* times rows x columns elements."""
    size = rows * columns * dtype.bytes
    return Elementwise(kind, rows, columns, reads * size, writes * size, backward, dtype)


class CollectiveKind(StrEnum):
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"


# Each rank keeps one share of the buffer, and the others pass a link.
SPLIT_KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.GATHER,
    CollectiveKind.SCATTER,
)


def bus_factor(kind: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth: the share of the buffer that each link carries (NVIDIA/nccl-tests,
    doc/PERFORMANCE.md; src/gather.cu and src/scatter.cu).
    """
    if kind == CollectiveKind.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in SPLIT_KINDS else 1.0


# Of these one rank brings a share of the buffer; to all others it brings the whole.
GATHERS = (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication in which every rank of the group takes part, *times* of it one after another."""

    kind: CollectiveKind
    size_bytes: int
    group: Group
    times: int = 1

    def __post_init__(self) -> None:
        # Asked again only to tell what is wrong: most of what a strategy changes are collectives.
        if not (type(self.size_bytes) is type(self.times) is int and self.size_bytes >= 0 < self.times):
            require_counts(self, 0, "size_bytes")
            require_counts(self, 1, "times")

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * self.times


class Direction(StrEnum):
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message to or from one peer of the group, *peer_offset* places away."""

    direction: Direction
    size_bytes: Natural
    group: Group = Group.PP
    peer_offset: int = 1


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy between a GPU and the memory of its host."""

    way: HostWay
    size_bytes: Natural

    @property
    def group(self) -> HostWay:
        return self.way


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """The optimizer's update of what a GPU left on its host, which waits for it; bound by memory there.

    *fused*: in one pass, or operation by operation.
    """

    read_bytes: Quantity
    write_bytes: Quantity
    fused: bool = True


@dataclass(frozen=True, slots=True)
class Recorded:
    """Computation of which only the time is known."""

    duration_s: float

    def __post_init__(self) -> None:
        # Spelled out, not through a helper: files hold millions of recorded times.
        if not 0 <= self.duration_s < math.inf:
            raise ValueError(f"duration_s must be a finite number, zero or more, not {self.duration_s!r}")

    @property
    def moved_bytes(self) -> float:
        return 0.0


Compute = (
    Matmul | GroupedMatmul | Convolution | Attention | Scan | DeltaRule | SelectiveScan | RecurrentCells
    | Elementwise | Recorded
)  # fmt: skip
Communication = Collective | Transfer | HostCopy
Work = Compute | HostUpdate | Communication
COMPUTING = frozenset(get_args(Compute))
COMMUNICATING = frozenset(get_args(Communication))
"""Types by themselves: to ask whether something is one of a union takes longer, and everything is asked."""


def group_of(work: Work) -> Channel | None:
    """Return the group whose communication *work* is; None where it computes."""
    return work.group if type(work) in COMMUNICATING else None  # type: ignore[union-attr]


# Memory-bound kernels as libraries write them: how many tensors each reads and writes.

K = ElementwiseKind
# Tensors of rows x columns that the kernel reads and writes; all others read one and write one, and backward
# read the gradient too.
TENSORS: dict[ElementwiseKind, tuple[float, float]] = {
    K.ADD: (2, 1),
    K.MUL: (2, 1),
    K.SWIGLU: (2, 1),
    K.CROSS_ENTROPY: (3, 1),
    K.OPTIMIZER: (4, 3),
    K.FILL: (0, 1),
}
TENSORS_BACKWARD: dict[ElementwiseKind, tuple[float, float]] = {K.SWIGLU: (3, 2)}


def usual_kernel(kind: ElementwiseKind, rows: int, columns: int, dtype: DType, backward: bool = False) -> Elementwise:
    """Return a kernel of *kind* that does nothing else."""
    reads, writes = TENSORS_BACKWARD.get(kind, (2, 1)) if backward else TENSORS.get(kind, (1, 1))
    return elementwise(kind, rows, columns, reads, writes, dtype, backward)


def cast(rows: int, columns: int, dtype: DType, to: DType, backward: bool = False) -> Elementwise:
    """Return a cast from *dtype* to *to*; a format with scales reads twice, once for the largest magnitude."""
    reads, counted_as = (2, to) if to.scaled else (1, dtype)
    elements = rows * columns
    read_bytes, write_bytes = reads * dtype.bytes * elements, to.bytes * elements
    return Elementwise(K.CAST, rows, columns, read_bytes, write_bytes, backward, counted_as)
