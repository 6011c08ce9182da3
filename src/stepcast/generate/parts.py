"""The pieces that every layer is put together from: matmuls with their gradients, norms, collectives."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stepcast.generate.norms import written_norm, written_norm_gradient
from stepcast.generate.sizes import Sizes
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Kernels
from stepcast.ir.group import Group
from stepcast.ir.model_parts import NormKind
from stepcast.ir.strategy import TrainingKind
from stepcast.ir.work import (
    Collective,
    CollectiveKind,
    Elementwise,
    ElementwiseKind,
    GroupedMatmul,
    Matmul,
    elementwise,
)
from stepcast.ir.workload import Layer, Op, OpPart, Role

K = ElementwiseKind
Ops = tuple[Op, ...]
# Bytes read and written for each element of an operand that is turned from bf16 into a scaled format, along
# rows and along columns for the two products that use it. One scale for the whole tensor needs its largest
# magnitude first, scales of blocks do not. NVFP4 has both, and turns rows and Hadamard-transformed columns in
# kernels of their own: three reads (Transformer Engine's recipes and csrc/quantizer.cpp, NVFP4Quantizer).
QUANTISED: dict[DType, tuple[float, float]] = {DType.FP8: (4.0, 2.0), DType.MXFP8: (2.0, 2.0), DType.NVFP4: (6.0, 1.0)}
# The same of an operand that no weight gradient needs, as under LoRA: its columns are left out, and with them
# NVFP4's transform (Transformer Engine's modules, columnwise usage where weights require gradients).
QUANTISED_ROWS: dict[DType, tuple[float, float]] = {
    DType.FP8: (4.0, 1.0),
    DType.MXFP8: (2.0, 1.0),
    DType.NVFP4: (4.0, 0.5),
}
# Share of adding up gradients that the weight gradient's matmul does not hide: products with and without fp32
# accumulation that SimuMax measured on an A100 and a B200 (configs/system).
ACCUMULATE_EXPOSURE = 0.5

MASK_BYTES = 1.0  # of one element in dropout's mask


def layer(role: Role, forward: Ops = (), input_gradient: Ops = (), weight_gradient: Ops = ()) -> Layer:
    """The layer of that *role*, which is its name."""
    return Layer(str(role), forward, input_gradient, weight_gradient, role=role)


def collective(
    name: str, kind: CollectiveKind, size_bytes: int, group: Group, blocking: bool = True, times: int = 1
) -> Op:
    return Op(name, Collective(kind, size_bytes, group, times), blocking, kernels=times)


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix multiply with weights: (rows, inputs) x (inputs, outputs) on this rank.

    *groups* > 0 makes it one grouped kernel over that many experts.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    dtype: DType
    groups: int = 0
    # Whether LoRA puts adapters beside it.
    adapted: bool = True
    # Ranks that each hold a share of the input, or of the output's gradient, quantised before it is gathered.
    gathered: int = 1
    gathered_gradient: int = 1
    bias: bool = False
    # Whether its operands are turned into a scaled format here, or by the matmuls that they come from.
    quantises_input: bool = True
    quantises_gradient: bool = True

    def product(self, m: int, n: int, k: int) -> Matmul | GroupedMatmul:
        if self.groups:
            return GroupedMatmul(m, n, k, self.groups, self.dtype)
        return Matmul(m, n, k, 1, self.dtype)

    def forward(self, sizes: Sizes) -> Ops:
        product = self.product(self.rows, self.outputs, self.inputs)
        own = Op(self.name, product, part=OpPart.PRODUCT)
        cast: Ops = ()
        if self.quantises_input:
            cast = self._quantised(sizes, "input", self.gathered, self.inputs)
        weights = self._weights_cast(sizes, "weight cast", sizes.strategy.weights, sizes.stored)
        return (*cast, *weights, own, *self._adapters(sizes, "forward"))

    def input_gradient(self, sizes: Sizes) -> Ops:
        own = Op(f"{self.name} input gradient", self.product(self.rows, self.inputs, self.outputs))
        cast: Ops = ()
        if self.quantises_gradient:
            cast = self._quantised(sizes, "gradient", self.gathered_gradient, self.outputs)
        return (*cast, own, *self._adapters(sizes, "input gradient"))

    def _quantised(self, sizes: Sizes, what: str, ranks: int, width: int) -> Ops:
        """The share of *ranks* in the format of the matmul; weights are turned once a step, not counted."""
        if self.dtype not in QUANTISED:
            return ()
        rows = self.rows // ranks
        elements = rows * width
        frozen = sizes.strategy.training is TrainingKind.LORA
        read, write = (size * elements for size in (QUANTISED_ROWS if frozen else QUANTISED)[self.dtype])
        work = Elementwise(K.CAST, rows, width, read, write, dtype=sizes.stored)
        return (Op(f"{self.name} quantise {what}", work),)

    def weight_gradient(self, sizes: Sizes) -> Ops:
        """Frozen weights under LoRA have none; their adapters do."""
        if sizes.strategy.training is TrainingKind.LORA:
            return self._adapters(sizes, "weight gradient")
        # A grouped kernel keeps its rows as m: it is they that are divided among the experts.
        work = (
            self.product(self.rows, self.outputs, self.inputs)
            if self.groups
            else Matmul(self.inputs, self.outputs, self.rows, 1, self.dtype)
        )
        own = (*self._turned(sizes), Op(f"{self.name} weight gradient", work))
        widened = self._weights_cast(sizes, "weight gradient cast", sizes.stored, sizes.strategy.weights)
        return (*own, *self._bias_gradient(sizes), *widened, *self._accumulated(sizes))

    def _turned(self, sizes: Sizes) -> Ops:
        """Gathered operands in fp8, of which the weight gradient takes the columns: those of one scale are
        gathered by rows and turned (Transformer Engine's Float8Tensor), others are gathered in both ways.
        """
        if self.dtype is not DType.FP8:
            return ()
        widths = (self.inputs, self.gathered), (self.outputs, self.gathered_gradient)
        return tuple(
            Op(
                f"{self.name} turn gathered {what}",
                Elementwise(K.CAST, self.rows, width, elements, elements, dtype=sizes.stored),
            )
            for what, (width, ranks) in zip(("input", "gradient"), widths, strict=True)
            if ranks > 1 and (elements := float(self.rows * width))
        )

    def _weights_cast(self, sizes: Sizes, what: str, before: DType, after: DType) -> Ops:
        """Autocast turns a weight into the format of its product once in a forward, and its gradient back."""
        if not sizes.strategy.autocast or self.dtype is not sizes.dtype:
            return ()
        rows, columns = self.outputs * max(1, self.groups), self.inputs
        return (cast(sizes, f"{self.name} {what}", rows, columns, before, after),)

    def _bias_gradient(self, sizes: Sizes) -> Ops:
        """The sum over all rows; Transformer Engine's matmul and compilers do it on the way."""
        if not self.bias or not sizes.plain_gradients:
            return ()
        kind = K.COLUMN_SUM if sizes.by_operation else K.OTHER
        work = elementwise(kind, self.rows, self.outputs, 1, 0, sizes.stored)
        added = vector_accumulated(sizes, f"{self.name} bias", self.outputs)
        return (Op(f"{self.name} bias gradient", work), *added)

    def _accumulated(self, sizes: Sizes) -> Ops:
        """The weight gradient added to the sum of the micro-batches before."""
        elements = self.inputs * self.outputs * max(1, self.groups)
        if sizes.strategy.micro_batches == 1 or sizes.framework.kernels is Kernels.COMPILED:
            return ()
        if not sizes.plain_gradients:
            # Added to the flat buffer when the matmul ends, which would else write the training format.
            read, write = sizes.gradient, max(0, sizes.gradient - sizes.element)
            exposed = ACCUMULATE_EXPOSURE * elements
            added = Elementwise(K.ADD, 1, elements, read * exposed, write * exposed, dtype=sizes.stored)
            return (Op(f"{self.name} accumulate", added),)
        if sizes.fused and sizes.gradient > sizes.element:
            # DeepSpeed's BF16_Optimizer.update_hp_grads: a copy in the sum's format, then the addition.
            wide = elementwise(K.ADD, 1, elements, 2, 1, sizes.framework.gradient_dtype)
            narrow_bytes, wide_bytes = float(sizes.element * elements), float(sizes.gradient * elements)
            cast = Elementwise(K.CAST, 1, elements, narrow_bytes, wide_bytes, dtype=sizes.stored)
            return (Op(f"{self.name} widen", cast), Op(f"{self.name} accumulate", wide))
        return (Op(f"{self.name} accumulate", elementwise(K.ADD, 1, elements, 2, 1, sizes.strategy.weights)),)

    def _adapters(self, sizes: Sizes, phase: str) -> Ops:
        """Down to the rank and up again (Hu et al. 2021, section 4.1)."""
        rank = sizes.strategy.lora_rank
        if not rank or not self.adapted:
            return ()
        # Plain layers of Megatron-Core, which stay out of fp8 and fp4 (NeMo's ParallelLinearAdapter).
        dtype = sizes.unquantised
        low = replace(self, outputs=rank, dtype=dtype)
        high = replace(self, inputs=rank, dtype=dtype)
        names = (f"{self.name} lora down", f"{self.name} lora up")
        match phase:
            case "forward":
                works = (low.product(self.rows, rank, self.inputs), high.product(self.rows, self.outputs, rank))
            case "input gradient":
                works = (low.product(self.rows, self.inputs, rank), high.product(self.rows, rank, self.outputs))
            case _:
                works = (low.product(self.inputs, rank, self.rows), high.product(rank, self.outputs, self.rows))
        return tuple(Op(f"{name} {phase}", work) for name, work in zip(names, works, strict=True))


def cast(sizes: Sizes, name: str, rows: int, columns: int, before: DType, after: DType) -> Op:
    """*rows* x *columns* elements of one format in another."""
    elements = float(rows * columns)
    work = Elementwise(K.CAST, rows, columns, before.bytes * elements, after.bytes * elements, False, sizes.stored)
    return Op(name, work)


def vector_accumulated(sizes: Sizes, name: str, *vectors: int) -> Ops:
    """Plain PyTorch adds the gradient of each *vector* to that of the micro-batches before by a kernel."""
    if sizes.fused or sizes.strategy.micro_batches == 1:
        return ()
    work = elementwise(K.ADD, 1, max(1, sum(vectors)), 2, 1, sizes.strategy.weights)
    return (Op(f"{name} accumulate", work, kernels=len(vectors)),)


def norm_kind(sizes: Sizes) -> ElementwiseKind:
    return K.RMS_NORM if sizes.model.norm.kind is NormKind.RMS else K.LAYER_NORM


def norm_layer(
    sizes: Sizes, role: Role, rows: int, after: tuple[str, ...] = (), branches: bool = True, products: int = 1
) -> Layer:
    """A norm over the hidden width; *after* names what its backward waits for.

    *products* read what it makes. Where the stream *branches* before it, its backward ends with the sum of
    both gradients: the norm's and the residual's. Models without norms before their halves branch there, too.
    """
    width = sizes.model.hidden
    forward: Ops = ()
    gradient: Ops = ()
    if sizes.model.pre_norms or not branches:
        forward, gradient = (norm_forward(sizes, "norm", rows, width), norm_backward(sizes, "norm", rows, width))
    if sizes.casts:
        # The input of each product is cast by itself, and each gradient back before they are added up.
        copies = products if sizes.separate else 1
        narrow = cast(sizes, "norm cast", rows, width, sizes.stream, sizes.stored)
        wide = cast(sizes, "norm gradient cast", rows, width, sizes.stored, sizes.stream)
        numbered = [f" {number}" if copies > 1 else "" for number in range(copies)]
        forward += tuple(replace(narrow, name=f"{narrow.name}{number}") for number in numbered)
        gradient = (*(replace(wide, name=f"{wide.name}{number}") for number in numbered), *gradient)
    if branches:
        gradient += (add(sizes, "residual gradient", rows, width),)
    return layer(role, forward, waiting(gradient, after))


def norm_forward(sizes: Sizes, name: str, rows: int, width: int, heads: bool = False) -> Ops:
    """Of the stream, or of *heads*, which are as narrow as products make them."""
    if sizes.by_operation and norm_kind(sizes) is K.RMS_NORM:
        return written_norm(sizes, name, rows, width, sizes.stored if heads else sizes.stream)
    return (Op(name, elementwise(norm_kind(sizes), rows, width, 1, 1, sizes.stream)),)


def norm_backward(sizes: Sizes, name: str, rows: int, width: int, heads: bool = False) -> Ops:
    """Plain PyTorch reads input and gradient again to sum the weight's gradient."""
    if sizes.by_operation and norm_kind(sizes) is K.RMS_NORM:
        narrow = sizes.stored if heads else sizes.stream
        return written_norm_gradient(sizes, name, rows, width, narrow, swapped=heads)
    ops = [Op(f"{name} gradient", elementwise(norm_kind(sizes), rows, width, 2, 1, sizes.stream, backward=True))]
    if not sizes.fused:
        ops.append(Op(f"{name} weight gradient", elementwise(K.OTHER, rows, width, 2, 0, sizes.stream, backward=True)))
        vectors = sizes.model.norm.elements(width) // width
        ops += vector_accumulated(sizes, name, *(width,) * vectors)
    return tuple(ops)


def gated(sizes: Sizes, name: str, rows: int, width: int) -> tuple[Ops, Ops]:
    """*rows* x *width* elements times an activation of as many: one kernel, or one for each operation."""
    dtype = sizes.stored
    if sizes.fused:
        return (
            (Op(name, elementwise(K.SWIGLU, rows, width, 2, 1, dtype)),),
            (Op(f"{name} gradient", elementwise(K.SWIGLU, rows, width, 3, 2, dtype, backward=True)),),
        )
    return (
        (
            Op(f"{name} activation", elementwise(K.SILU, rows, width, 1, 1, dtype)),
            Op(name, elementwise(K.MUL, rows, width, 2, 1, dtype)),
        ),
        (
            Op(f"{name} gradient", elementwise(K.MUL, rows, width, 2, 1, dtype)),
            Op(f"{name} factor gradient", elementwise(K.MUL, rows, width, 2, 1, dtype)),
            Op(f"{name} activation gradient", elementwise(K.SILU, rows, width, 2, 1, dtype, backward=True)),
        ),
    )


def add(sizes: Sizes, name: str, rows: int, width: int, part: OpPart | None = None) -> Op:
    return Op(name, elementwise(K.ADD, rows, width, 2, 1, sizes.stream), part=part)


def residual(sizes: Sizes, rows: int, width: int) -> Op:
    """The branch added to the stream; with dropout in the same kernel, which also writes its mask."""
    elements, stream = rows * width, sizes.stream
    read, write = elements * (stream.bytes + sizes.element), elements * stream.bytes
    if not sizes.framework.dropout or sizes.by_operation:
        # A branch of another format than the stream keeps PyTorch from reading several elements at once.
        kind = K.STRIDED if sizes.by_operation and stream is not sizes.stored else K.ADD
        work = Elementwise(kind, rows, width, read, write, dtype=stream)
    else:
        work = Elementwise(K.DROPOUT, rows, width, read, write + elements * MASK_BYTES, dtype=stream)
    return Op("residual", work, part=OpPart.RESIDUAL)


def dropped(sizes: Sizes, name: str, rows: int, width: int) -> Op:
    """What dropout leaves of *rows* x *width* elements, and a mask of what that is."""
    elements = float(rows * width)
    read, write = elements * sizes.element, elements * (sizes.element + MASK_BYTES)
    return Op(name, Elementwise(K.DROPOUT, rows, width, read, write, dtype=sizes.stored))


def dropped_gradient(sizes: Sizes, name: str, rows: int, width: int) -> Op:
    """The gradient where the mask says so."""
    elements = float(rows * width)
    read, write = elements * (sizes.element + MASK_BYTES), elements * sizes.element
    return Op(name, Elementwise(K.MUL, rows, width, read, write, dtype=sizes.stored))


def with_sums(sizes: Sizes, layer: Layer, products: int) -> Layer:
    """*layer* whose input gets gradients from several *products*, which plain PyTorch adds up one by one."""
    if sizes.fused:
        return layer
    sums = tuple(
        Op(f"input gradient sum {number}", elementwise(K.ADD, sizes.tokens, sizes.model.hidden, 2, 1, sizes.stored))
        for number in range(1, products)
    )
    return replace(layer, input_gradient=(*layer.input_gradient, *sums))


def waiting(ops: Ops, after: tuple[str, ...]) -> Ops:
    """*ops* whose first waits for the non-blocking ops named."""
    return (replace(ops[0], after=ops[0].after + after), *ops[1:]) if ops and after else ops


def renamed(prefix: str, ops: Iterable[Op]) -> Ops:
    """*ops* again under other names, what they wait for included."""
    return tuple(
        replace(op, name=f"{prefix} {op.name}", after=tuple(f"{prefix} {name}" for name in op.after)) for op in ops
    )
