"""The building blocks of every layer: matmuls with their gradients, norms and collectives.

Tensor parallelism follows Megatron-LM (Shoeybi et al. 2019, section 3): the first matmul of a pair is split by columns,
the second by rows; the forward all-reduces after the second, the backward after the first. With sequence parallelism
(Korthikanti et al. 2022, section 4.2.2) each all-reduce becomes a reduce-scatter and an all-gather, and the backward
gathers the input of the first matmul again for its weight gradient.
"""

from collections.abc import Iterable

from stepcast.ir.framework import Kernels, Modules
from stepcast.ir.layers.kernels import (
    FP32,
    C,
    K,
    Ops,
    PhaseOps,
    Value,
    cast_op,
    collective,
    list_kernels,
    list_phases,
    make_layer,
    moved_op,
    stream_op,
)
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Group
from stepcast.ir.model_parts import NormKind
from stepcast.ir.strategy import BaseWeights, TrainingKind
from stepcast.ir.tables import constants
from stepcast.ir.types import DType, dataclass, replace
from stepcast.ir.work import Elementwise, GroupedMatmul, Matmul
from stepcast.ir.workload import Layer, Op, OpPart, Role

MEASURED = constants("operators")
# Scaled format -> bytes read and written for each element of an operand that is turned into it from bf16; of one that
# no weight gradient needs; and of weights.
QUANTISED: dict[str, tuple[float, float]] = MEASURED["quantised"]
QUANTISED_ROWS: dict[str, tuple[float, float]] = MEASURED["quantised_rows"]
QUANTISED_WEIGHTS: dict[str, tuple[float, float]] = MEASURED["quantised_weights"]
OVERLAP_PARTS: int = MEASURED["overlap_parts"]  # of a product whose result is summed at the same time
# Projections that one product makes, by the names that adapters have.
FUSED_PROJECTIONS = {"qkv": ("query", "key", "value"), "up": ("gate", "up")}


def wait_for(ops: Ops, names: tuple[str, ...]) -> Ops:
    """Return *ops* of which the first waits for the non-blocking ops named."""
    return (replace(ops[0], after=ops[0].after + names), *ops[1:]) if ops and names else ops


def rename_ops(prefix: str, ops: Iterable[Op]) -> Ops:
    """Return *ops* with *prefix* before their names and before the names that they wait for."""
    return tuple(
        replace(op, name=f"{prefix} {op.name}", after=tuple(f"{prefix} {name}" for name in op.after)) for op in ops
    )


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix multiply with weights: (rows, inputs) x (inputs, outputs) on this rank.

    *groups* > 0 makes it one grouped kernel over that many experts, or a *separate* one for each. *adapted*: LoRA adds
    adapters to it. *gathered* and *gathered_gradient* are the ranks that each hold a share of the input, or of the
    output's gradient, quantised before it is gathered. *quantises_input* and *quantises_gradient*: its operands are
    turned into a scaled format here, not by the matmuls that they come from. *adapter_ways* are the ranks that each
    make a share of the columns that adapters add. *skew*: see `GroupedMatmul`; weight gradients sum over rows instead.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    dtype: DType
    groups: int = 0
    separate: bool = False
    adapted: bool = True
    gathered: int = 1
    gathered_gradient: int = 1
    bias: bool = False
    quantises_input: bool = True
    quantises_gradient: bool = True
    adapter_ways: int = 1
    skew: float = 1.0

    def product(self, m: int, n: int, k: int, skew: float = 1.0) -> Matmul | GroupedMatmul:
        if self.groups:
            return GroupedMatmul(m, n, k, self.groups, self.dtype, self.separate, skew)
        return Matmul(m, n, k, 1, self.dtype)

    def phases(self, sizes: Sizes) -> PhaseOps:
        return PhaseOps(self.forward(sizes), self.input_gradient(sizes), self.weight_gradient(sizes))

    def forward(self, sizes: Sizes) -> Ops:
        matmul = Op(self.name, self.product(self.rows, self.outputs, self.inputs, self.skew), part=OpPart.PRODUCT)
        casts = self._quantise(sizes, "input", self.gathered, self.inputs) if self.quantises_input else ()
        weights = self._cast_weights(sizes, "weight cast", sizes.strategy.weights, sizes.stored)
        if sizes.strategy.base_weights is BaseWeights.INT8 and self.adapted:
            shape = (self.rows, self.inputs, sizes.stored, self.name)
            int8 = list_kernels("int8 product", sizes, *shape, outputs=self.outputs)
            return (*int8, *self._adapters(sizes, "forward"))
        return (*casts, *weights, *self._dequantise(sizes, ""), matmul, *self._adapters(sizes, "forward"))

    def input_gradient(self, sizes: Sizes) -> Ops:
        matmul = Op(f"{self.name} input gradient", self.product(self.rows, self.inputs, self.outputs, self.skew))
        ranks = self.gathered_gradient
        casts = self._quantise(sizes, "gradient", ranks, self.outputs) if self.quantises_gradient else ()
        return (*casts, *self._dequantise(sizes, " again"), matmul, *self._adapters(sizes, "input gradient"))

    def weight_gradient(self, sizes: Sizes) -> Ops:
        """Return the ops of the weight gradient; frozen weights under LoRA have none, their adapters do."""
        if sizes.strategy.training is TrainingKind.LORA:
            return self._adapters(sizes, "weight gradient")
        # A grouped kernel keeps its rows as m: it is they that are divided among the experts.
        shape = (self.rows, self.outputs, self.inputs) if self.groups else (self.inputs, self.outputs, self.rows)
        return (
            *self._transpose_gathered(sizes),
            Op(f"{self.name} weight gradient", self.product(*shape)),
            *self._bias_gradient(sizes),
            *self._cast_weights(sizes, "weight gradient cast", sizes.stored, sizes.strategy.weights),
            *self._accumulate(sizes),
        )

    def _quantise(self, sizes: Sizes, operand: str, ranks: int, width: int) -> Ops:
        """Quantise the share of *ranks*; weights are quantised once a step."""
        if self.dtype not in QUANTISED:
            return ()
        passes = (QUANTISED_ROWS if sizes.strategy.training is TrainingKind.LORA else QUANTISED)[self.dtype]
        return (moved_op(f"{self.name} quantise {operand}", K.CAST, self.rows // ranks, width, *passes, sizes.stored),)

    def _transpose_gathered(self, sizes: Sizes) -> Ops:
        """Transpose gathered fp8 operands, of which the weight gradient takes the columns: those of one scale
        are gathered by rows (Transformer Engine's Float8Tensor), others are gathered in both ways.
        """
        if self.dtype is not DType.FP8:
            return ()
        gathered_ways = self.gathered if self.quantises_input else 1
        operands = ("input", self.inputs, gathered_ways), ("gradient", self.outputs, self.gathered_gradient)
        return tuple(
            moved_op(f"{self.name} turn gathered {operand}", K.CAST, self.rows, width, 1, 1, sizes.stored)
            for operand, width, ranks in operands
            if ranks > 1
        )

    def _cast_weights(self, sizes: Sizes, what: str, before: DType, after: DType) -> Ops:
        """Autocast turns a weight into the format of its product once in a forward, and its gradient back."""
        if not sizes.strategy.autocast or self.dtype is not sizes.dtype:
            return ()
        rows = self.outputs * max(1, self.groups)
        return (cast_op(f"{self.name} {what}", rows, self.inputs, before, after, sizes.stored),)

    def _bias_gradient(self, sizes: Sizes) -> Ops:
        """Sum over all rows; Transformer Engine's matmul and compilers do it on the way."""
        if not self.bias or not sizes.plain_gradients:
            return ()
        kind = K.COLUMN_SUM if sizes.eager_modules else K.OTHER
        total = stream_op(f"{self.name} bias gradient", kind, self.rows, self.outputs, 1, 0, sizes.stored)
        return (total, *accumulate_vectors(sizes, f"{self.name} bias", self.outputs))

    def _accumulate(self, sizes: Sizes) -> Ops:
        """Add the weight gradient to the sum of the micro-batches before, where ranks do not split it first."""
        elements = self.inputs * self.outputs * max(1, self.groups)
        splits = sizes.strategy.sharding.splits_gradients
        alone = sizes.strategy.micro_batches == 1 or splits
        if (alone and sizes.plain_gradients) or sizes.framework.kernels is Kernels.COMPILED:
            return ()
        if not sizes.plain_gradients:
            # Added to the cleared buffer when the matmul ends, which would else write the training format; or written
            # to a buffer that is reduced and split (Megatron-FSDP's overwrite_main_grad, megatron_fsdp.py).
            read, write = 0 if splits else sizes.gradient, max(0, sizes.gradient - sizes.element)
            if not read + write:
                return ()
            exposed = MEASURED[f"{'expert_' if self.groups else ''}accumulate_exposure"] * elements
            added = Elementwise(K.ADD, 1, elements, read * exposed, write * exposed, dtype=sizes.stored)
            return (Op(f"{self.name} accumulate", added),)
        if sizes.fused and sizes.gradient > sizes.element:
            # DeepSpeed's BF16_Optimizer.update_hp_grads: a copy in the sum's format, then the addition.
            wide = sizes.framework.gradient_dtype
            return (
                cast_op(f"{self.name} widen", 1, elements, sizes.stored, wide),
                stream_op(f"{self.name} accumulate", K.ADD, 1, elements, 2, 1, wide),
            )
        return (stream_op(f"{self.name} accumulate", K.ADD, 1, elements, 2, 1, sizes.strategy.weights),)

    def is_adapted(self, sizes: Sizes) -> bool:
        """Return True if LoRA adds adapters to it, or to one of the projections that it fuses."""
        targets = sizes.strategy.lora_targets
        names = FUSED_PROJECTIONS.get(self.name, (self.name,))
        if sizes.separate_projections and not self.groups:  # experts keep gate and up in one tensor
            names = (self.name,)
        return self.adapted and sizes.strategy.lora_rank > 0 and (not targets or any(map(targets.__contains__, names)))

    def _dequantise(self, sizes: Sizes, again: str) -> Ops:
        """Turn frozen weights back into the training format before a product (bitsandbytes, matmul_4bit)."""
        base = sizes.strategy.base_weights
        if base is BaseWeights.TRAINED or not self.adapted:
            return ()
        name, moved = f"{self.name} dequantise{again}", (self.outputs, self.inputs, base.bytes, sizes.element)
        kernels = MEASURED["dequantise_again_kernels" if again else "dequantise_kernels"]
        return (moved_op(name, K.DEQUANTISE, *moved, sizes.stored, kernels=kernels),)

    def _adapters(self, sizes: Sizes, phase: str) -> Ops:
        """Multiply down to the rank and up again (Hu et al. 2021, section 4.1)."""
        rank = sizes.strategy.lora_rank
        if not self.is_adapted(sizes):
            return ()
        # Plain layers of Megatron-Core, which stay out of fp8 and fp4 (NeMo's ParallelLinearAdapter).
        product = replace(self, dtype=sizes.unquantised).product
        rows, inputs, outputs = self.rows, self.inputs, self.outputs // self.adapter_ways
        match phase:
            case "forward":
                works = product(rows, rank, inputs), product(rows, outputs, rank)
            case "input gradient":
                works = product(rows, inputs, rank), product(rows, rank, outputs)
            case _:
                works = product(inputs, rank, rows), product(rank, outputs, rows)
        first, second = Op(f"{self.name} lora down {phase}", works[0]), Op(f"{self.name} lora up {phase}", works[1])
        if sizes.framework.kernels is Kernels.COMPILED or sizes.framework.op_fuser:
            return first, second
        return self._surround_adapters(sizes, phase, first, second)

    def _surround_adapters(self, sizes: Sizes, phase: str, down: Op, up: Op) -> Ops:
        """Return both products with the operations around them, a kernel each."""
        strategy, stored = sizes.strategy, sizes.stored
        casts, dora = sizes.casts_adapter_inputs, strategy.dora
        # Tensor ranks hold a share of each row inside a layer, and a share of the rows outside.
        ways = sizes.tp if strategy.sequence_parallel else 1
        result_rows, rows = (
            self.rows // (ways if width == sizes.model.hidden else 1) for width in (self.outputs, self.inputs)
        )
        values: dict[str, Value] = {
            "result_rows": result_rows,
            "outputs": self.outputs,
            "wide": FP32 if casts else stored,
            "cloned": strategy.base_weights in (BaseWeights.NF4, BaseWeights.NF4_SINGLE),
            "mixed": K.STRIDED if casts else K.MUL,
            "product": K.CAST if casts else K.MUL,
        }

        def list_extra_kernels(name: str, rows: int = rows, columns: int = self.inputs, code: str = "lora") -> Ops:
            return list_kernels(name, sizes, rows, columns, stored, f"{self.name} {code}", **values)

        small = 2 if sizes.framework.fp32_adapters else 0  # casts of both matrices
        peft = sizes.framework.modules is Modules.TRANSFORMERS
        result = (result_rows, self.outputs, "dora")
        if phase == "forward":
            code = MEASURED["peft_code_kernels"] if peft else 0
            products = (replace(down, kernels=1 + code + small), up)
            if dora:
                weights = list_extra_kernels("dora weights", self.outputs, self.inputs, "dora")
                return (*list_extra_kernels("adapters"), *weights, *products, *list_extra_kernels("dora", *result))
            return (*list_extra_kernels("adapters"), *products, *list_extra_kernels("scaled adapters"))
        if phase == "input gradient":
            scaled = (
                list_extra_kernels("dora gradient", *result) if dora else list_extra_kernels("scaled adapters gradient")
            )
            return (*scaled, up, down, *list_extra_kernels("adapters gradient"))
        accumulates = 2 if strategy.micro_batches > 1 else 0
        nodes = MEASURED["peft_node_kernels" if peft else "adapter_node_kernels"]
        return (replace(down, kernels=1 + nodes + small + accumulates), up)


def join_phases(sizes: Sizes, linears: Iterable[Linear]) -> PhaseOps:
    """Return the ops of *linears* that run one after another."""
    phases = [linear.phases(sizes) for linear in linears]
    return PhaseOps(*(tuple(op for ops in column for op in ops) for column in zip(*phases, strict=True)))


def accumulate_vectors(sizes: Sizes, name: str, *vectors: int) -> Ops:
    """Plain PyTorch adds the gradient of each vector to that of the micro-batches before by a kernel."""
    if sizes.fused or sizes.strategy.micro_batches == 1:
        return ()
    width, count = max(1, sum(vectors)), len(vectors)
    return (stream_op(f"{name} accumulate", K.ADD, 1, width, 2, 1, sizes.strategy.weights, kernels=count),)


def gate_ops(sizes: Sizes, rows: int, width: int) -> tuple[Ops, Ops]:
    """Multiply *rows* x *width* elements by an activation of as many: one kernel, or one per operation."""
    fused = sizes.fused or sizes.framework.runs_liger
    return list_phases("mixer gate", sizes, rows, width, sizes.stored, "gate", fused=fused)


def add_op(sizes: Sizes, name: str, rows: int, width: int, part: OpPart | None = None) -> Op:
    return stream_op(name, K.ADD, rows, width, 2, 1, sizes.stream, part=part)


def sum_input_gradients(sizes: Sizes, layer: Layer, products: int) -> Layer:
    """Return *layer* whose input gets gradients from several *products*, which plain PyTorch adds one by one."""
    if sizes.fused:
        return layer
    sums = tuple(
        stream_op(f"input gradient sum {number}", K.ADD, sizes.tokens, sizes.model.hidden, 2, 1, sizes.stored)
        for number in range(1, products)
    )
    return replace(layer, input_gradient=(*layer.input_gradient, *sums))


def tensor_bytes(sizes: Sizes, width: int | None = None) -> int:
    """Return the buffer of a tensor-parallel collective: the tokens of a micro-batch, *width* (hidden) wide."""
    return sizes.tokens * (width or sizes.model.hidden) * sizes.element


def _gathers_quantised(sizes: Sizes, linear: Linear) -> bool:
    """Return True if operands of *linear* are quantised before they are gathered, as Transformer Engine does:
    its buffers of gathers are in fp8 then (module/base.py, initialize_ub). Adapters of LoRA take inputs wide, but have
    gradients of their own.
    """
    engine = sizes.fused_by_hand and (linear.adapter_ways > 1 or not linear.is_adapted(sizes))
    return engine and sizes.strategy.sequence_parallel and linear.dtype in QUANTISED


def _gathered_bytes(sizes: Sizes, linear: Linear, width: int | None = None, gradient: bool = False) -> int:
    """Return the bytes gathered for *linear*. Scales of blocks hold along rows or along columns: of a
    *gradient* both are needed, of an input one forward and the other backward.
    """
    size = tensor_bytes(sizes, width)
    if not _gathers_quantised(sizes, linear):
        return size
    copies = 2 if gradient and linear.dtype is not DType.FP8 else 1
    return round(size / sizes.element * linear.dtype.bytes * copies)


def column_layer(
    sizes: Sizes, role: Role, linears: tuple[Linear, ...], then: Ops = (), gradient: Ops = (), width: int | None = None
) -> Layer:
    """Return matmuls split by columns on inputs of *width*, then what follows on this rank, and its *gradient*."""
    if sizes.framework.kernels is Kernels.COMPILED:  # one cast of the input serves them all
        linears = (linears[0], *(replace(linear, quantises_input=False) for linear in linears[1:]))
    if _gathers_quantised(sizes, linears[0]):
        linears = tuple(replace(linear, gathered=sizes.tp) for linear in linears)
    forward, gradients, weights = join_phases(sizes, linears)
    if sizes.tp == 1:
        return make_layer(role, forward + then, gradient + gradients, weights)
    size, overlaps_gradients = tensor_bytes(sizes, width), sizes.strategy.overlap.tensor_gradients
    if not sizes.strategy.sequence_parallel:
        reduce = collective(f"{role} tp all-reduce", C.ALL_REDUCE, size, Group.TP, blocking=not overlaps_gradients)
        return make_layer(role, forward + then, (*gradient, *gradients, reduce), weights)
    # Not where adapters take the input too, whose norm returns it (Transformer Engine, module/layernorm_linear.py).
    overlap = sizes.strategy.overlap.tensor and not any(linear.is_adapted(sizes) for linear in linears)
    gathered = _gathered_bytes(sizes, linears[0], width)
    gather = collective(f"{role} tp all-gather", C.ALL_GATHER, gathered, Group.TP, blocking=not overlap)
    again = collective(f"{role} tp all-gather again", C.ALL_GATHER, gathered, Group.TP, blocking=not overlaps_gradients)
    # Frozen weights without adapters have no gradient that needs the input.
    repeats: Ops = (again,) if weights else ()
    scatter = collective(f"{role} tp reduce-scatter", C.REDUCE_SCATTER, size, Group.TP, blocking=not overlaps_gradients)
    return make_layer(
        role,
        (gather, *forward, *wait_for(then, (gather.name,) if overlap else ())),
        (*gradient, *repeats, *gradients, scatter),
        wait_for(weights, (again.name,) if overlaps_gradients else ()),
    )


def column_waits(sizes: Sizes, role: Role) -> tuple[str, ...]:
    """Return the names that the backward before a column layer waits for."""
    if sizes.tp == 1 or not sizes.strategy.overlap.tensor_gradients:
        return ()
    return (f"{role} tp {'reduce-scatter' if sizes.strategy.sequence_parallel else 'all-reduce'}",)


def row_layer(sizes: Sizes, role: Role, linear: Linear, ends: bool = True) -> Layer:
    """Return a matmul split by rows, the sum over ranks, and the residual where the branch *ends* here.

    Overlapped, its gradient is gathered during the matmul that takes it (Transformer Engine's ring exchange
    of proj_dgrad and fc2_dgrad, module/base.py, initialize_ub). Adapters make a share of their columns on each rank,
    which becomes a share of the rows by a gather, or an exchange (Megatron-Bridge, peft/utils.py,
    ParallelLinearAdapter: gather_output, all2all_hp2sp), and their gradient likewise.
    """
    sequence, rows, hidden = sizes.strategy.sequence_parallel, sizes.outer_tokens, sizes.model.hidden
    spread = sequence and sizes.fused_by_hand and sizes.tp > 1 and linear.is_adapted(sizes)
    if spread:
        linear = replace(linear, adapter_ways=sizes.tp)
    if _gathers_quantised(sizes, linear):
        linear = replace(linear, gathered_gradient=sizes.tp)
    forward, gradient, weight = linear.phases(sizes)
    tail: Ops = ()
    if ends:
        narrow, drops = sizes.stream is not sizes.stored, sizes.framework.dropout
        tail, gradient_tail = list_phases("branch end", sizes, rows, hidden, sizes.stream, narrow=narrow, drops=drops)
        gradient = gradient_tail + gradient
    if sizes.tp == 1:
        return make_layer(role, forward + tail, gradient, weight)
    size, overlap = tensor_bytes(sizes), sizes.strategy.overlap.tensor
    if spread:
        kind_and_size = (C.ALL_TO_ALL, size // sizes.tp) if sizes.framework.exchanges_adapters else (C.ALL_GATHER, size)
        turn = collective(f"{role} adapters tp {kind_and_size[0]}", *kind_and_size, Group.TP)
        forward, gradient = (*forward, turn), (turn, *gradient)
    kind, word = (C.REDUCE_SCATTER, "reduce-scatter") if sequence else (C.ALL_REDUCE, "all-reduce")
    name = f"{role} tp {word}"
    if overlap:
        # The sum of one part runs during the matmul of the next, so it is issued with the matmul; that of the
        # last part overlaps no matmul.
        last = collective(f"{name} of the last part", kind, size // OVERLAP_PARTS, Group.TP)
        reduce = collective(name, kind, size - size // OVERLAP_PARTS, Group.TP, blocking=False)
        forward = (reduce, *forward, *wait_for((last,), (name,)))
    else:
        forward = (*forward, collective(name, kind, size, Group.TP))
    if sequence:
        gathered = _gathered_bytes(sizes, linear, gradient=True)
        gather = collective(f"{role} tp all-gather", C.ALL_GATHER, gathered, Group.TP, blocking=not overlap)
        gradient = (gather, *gradient)
        weight = wait_for(weight, (gather.name,) if overlap else ())
    return make_layer(role, forward + tail, gradient, weight)


def sequence_tokens(sizes: Sizes) -> int:
    """Return the tokens of a micro-batch where kernels run along the whole sequence."""
    return sizes.tokens * sizes.cp


def exchange_sequence(sizes: Sizes, width: int, phase: str, back: bool = False) -> Ops:
    """Bring a projection of *width* into the order of kernels that run along the whole sequence: exchange it
    with the context-parallel ranks (Megatron-LM, core/ssm/mamba_context_parallel.py), put their slices in the
    order of the sequence, and turn tokens by sequences into sequences by tokens; or the kernels' result *back*.
    """
    ops: list[Op] = []
    end, word = (f" back{phase}", "scanned") if back else (phase, "scan")
    if sizes.cp > 1:
        size = sizes.tokens * width * sizes.element
        ops.append(collective(f"cp all-to-all {word}{phase}", C.ALL_TO_ALL, size, Group.CP))
        ops.append(_copy_sequence(sizes, f"reorder{end}", width))
    if sizes.strategy.micro_batch > 1:
        ops.append(_copy_sequence(sizes, f"transpose{end}", width))
    return tuple(reversed(ops) if back else ops)


def _copy_sequence(sizes: Sizes, name: str, width: int) -> Op:
    return stream_op(name, K.COPY, sequence_tokens(sizes), width // sizes.cp, 1, 1, sizes.stored)


# Norms of a layer: one fused kernel, or each operation of PyTorch's code, with their gradients.


def norm_layer(
    sizes: Sizes, role: Role, after: tuple[str, ...] = (), branches: bool = True, products: int = 1
) -> Layer:
    """Return a norm over the hidden width; *after* names what its backward waits for.

    *products* read its result. Where the stream *branches* before it, its backward ends with the sum of both
    gradients: the norm's and the residual's. Models without norms before their halves branch there, too.
    """
    rows, width = sizes.outer_tokens, sizes.model.hidden
    has_norm = sizes.model.pre_norms or not branches
    forward, gradient = norm_ops(sizes, "norm", rows, width) if has_norm else ((), ())
    if sizes.casts_activations:
        # The input of each product is cast by itself, and each gradient back before they are added up.
        copies = products if sizes.separate_projections else 1
        numbers = [f" {number}" if copies > 1 else "" for number in range(copies)]
        stream, stored = sizes.stream, sizes.stored
        forward += tuple(cast_op(f"norm cast{number}", rows, width, stream, stored, stored) for number in numbers)
        widen = tuple(cast_op(f"norm gradient cast{number}", rows, width, stored, stream, stored) for number in numbers)
        gradient = widen + gradient
    if branches:
        gradient += (add_op(sizes, "residual gradient", rows, width),)
    return make_layer(role, forward, wait_for(gradient, after))


def surround_with_norms(
    sizes: Sizes, before: Role, after: Role, *layers: Layer, waits: tuple[str, ...] = (), products: int = 1
) -> tuple[Layer, ...]:
    """Return the *layers* of one half with its norms: see norm_layer for *waits* and *products*."""
    first = norm_layer(sizes, before, waits, products=products)
    last = (norm_layer(sizes, after, branches=False),) if sizes.model.post_norms else ()
    return (first, *layers, *last)


def norm_ops(sizes: Sizes, name: str, rows: int, width: int, heads: bool = False) -> tuple[Ops, Ops]:
    """Return a norm of the stream, or of *heads*, which are as narrow as products make them, and its backward; plain
    PyTorch reads input and gradient again for the weight's gradient.
    """
    if sizes.writes_out_norms:
        return eager_norm(sizes, name, rows, width, sizes.stored if heads else sizes.stream, swapped=heads)
    kind = K.RMS_NORM if sizes.model.norm.kind is NormKind.RMS else K.LAYER_NORM
    backward: Ops = (stream_op(f"{name} gradient", kind, rows, width, 2, 1, sizes.stream, True),)
    if sizes.framework.runs_liger:  # the weight's gradient, always: sums of each multiprocessor, then their sum
        backward += (stream_op(f"{name} weight gradient", K.OTHER, 1, width, 1, 1, sizes.stream, True, kernels=3),)
    elif not sizes.fused and sizes.trains_norms:
        weight = stream_op(f"{name} weight gradient", K.OTHER, rows, width, 2, 0, sizes.stream, True)
        backward += (weight, *accumulate_vectors(sizes, name, *(width,) * sizes.model.norm.vectors))
    return (stream_op(name, kind, rows, width, 1, 1, sizes.stream),), backward


def eager_norm(sizes: Sizes, name: str, rows: int, width: int, narrow: DType, swapped: bool = False) -> tuple[Ops, Ops]:
    """Return an RMS norm as transformers runs it, and its gradient; *narrow* is the format of the input and of the
    result. *swapped*: the gradient arrives with tokens and heads in another order than the input.
    """
    weighted = FP32 if sizes.model.wide_norms else narrow
    return list_phases(
        "norm",
        sizes,
        rows,
        width,
        FP32,
        name,
        narrow=narrow,
        narrows=narrow is not FP32,
        weighted=weighted,
        wide=weighted is FP32,
        product=K.STRIDED if swapped else K.MUL,
        total=K.STRIDED if swapped else K.ADD,
    )
