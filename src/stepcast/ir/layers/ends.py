"""The ends of a model: embedding before the first layer; norm, output projection and loss after the last; and
the modules of multi-token prediction.

Multi-token prediction (DeepSeek-V3, 2024, section 2.2): a module after the last layer looks the next token up,
norms it and the stream, projects both to the hidden width, runs one block and the head again. Several tokens
run modules one after the other; Megatron-Core puts them on the last stage.
"""

from dataclasses import replace

from stepcast.ir.architecture import Architecture, Weight
from stepcast.ir.framework import Kernels, LossKernel
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.kernels import FP32, C, K, collective, list_kernels, list_phases, make_layer, stream_op
from stepcast.ir.layers.kinds import block_weights, count_adapted
from stepcast.ir.layers.lists import list_weights
from stepcast.ir.layers.operators import Linear
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Group
from stepcast.ir.model_parts import PositionKind
from stepcast.ir.strategy import Objective, TrainingKind
from stepcast.ir.tables import constants
from stepcast.ir.workload import Layer, Op, Role

# Kernels an eager host could issue while other code of transformers and peft runs.
MEASURED = constants("ends")
SWITCH_KERNELS, STEP_KERNELS = MEASURED["switch_kernels"], MEASURED["step_kernels"]
LOSS_TOKENS = 256  # of a part of TRL's chunked loss (trl, trainer/sft_trainer.py, _CHUNKED_LM_HEAD_CHUNK_SIZE)


def count_visits(sizes: Sizes, layers: range) -> float:
    """Return the kernels that could be issued while Trainer visits all modules of some *layers* once."""
    adapted = count_adapted(sizes.model, sizes.strategy.lora_targets, layers) if sizes.strategy.lora_rank else 0
    return float(MEASURED["layer_visit"] * len(layers) + MEASURED["adapter_visit"] * adapted)


def next_token_weights(model: Architecture) -> tuple[Weight, ...]:
    """Return the weights of one multi-token-prediction module, its block included, if *model* has any."""
    if not model.next_token_layers:
        return ()
    blocks = [block_weights(model, block.mixer, block.feed_forward) for block in model.next_token_blocks]
    return (*list_weights(model, "mtp"), *(weight for block in blocks for weight in block))


def embedding_layers(sizes: Sizes, tied: bool, layers: range = range(0)) -> tuple[Layer, ...]:
    """Look rows up where this rank holds them and sum them over tp; positions and norm where there are any. *tied*: the
    head of this stage has the same weights; *layers*: those that a training loop visits before.
    """
    model, dtype, width = sizes.model, sizes.stream, sizes.model.word_width
    forward: list[Op] = [stream_op("lookup", K.EMBEDDING, sizes.tokens, width, 1, 1, dtype)]
    if sizes.eager_modules:
        # A training loop that reads the loss of each micro-batch waits for it; masks and angles follow.
        forward[0] = replace(forward[0], host_reads=sizes.framework.loop_kernels > 0)
        kernels = MEASURED["beginning_kernels"] + sizes.framework.loop_kernels
        if sizes.framework.loop_kernels:
            kernels += round(2 * count_visits(sizes, layers))
        forward.append(stream_op("positions and masks", K.OTHER, 1, 1, 1, 1, dtype, kernels=kernels))
    weight: list[Op] = []
    backward: list[Op] = []
    if sizes.tp > 1:
        size = sizes.activation_bytes
        if sizes.strategy.sequence_parallel:
            forward.append(collective("embedding tp reduce-scatter", C.REDUCE_SCATTER, size, Group.TP))
            backward.append(collective("embedding tp all-gather", C.ALL_GATHER, size, Group.TP))
        else:
            forward.append(collective("embedding tp all-reduce", C.ALL_REDUCE, size, Group.TP))
    if model.projects_words:
        project = Linear("project in", sizes.outer_tokens, width, model.hidden, sizes.dtype, adapted=False)
        forward += project.forward(sizes)
        backward += project.input_gradient(sizes)
        weight += project.weight_gradient(sizes)
    if model.position.kind is PositionKind.LEARNED:
        forward.append(build.add_op(sizes, "positions", sizes.outer_tokens, model.hidden))
    if model.embedding_norm:
        norm, norm_gradient = build.norm_ops(sizes, "norm", sizes.outer_tokens, model.hidden)
        forward, backward = [*forward, *norm], [*norm_gradient, *backward]
    if sizes.strategy.training is TrainingKind.FULL:
        weight += list_kernels("lookup gradient", sizes, sizes.tokens, width, dtype, tied=tied)
    return (make_layer(Role.EMBEDDING, tuple(forward), tuple(backward), tuple(weight)),)


def head_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """Return final norm, logits and cross entropy over a vocabulary that tensor ranks share."""
    model, width, layers = sizes.model, sizes.model.word_width, []
    if model.final_norm:
        layers.append(build.norm_layer(sizes, Role.FINAL_NORM, build.column_waits(sizes, Role.HEAD), branches=False))
    if model.projects_words:
        project = Linear("project out", sizes.outer_tokens, model.hidden, width, sizes.dtype, adapted=False)
        layers.append(make_layer(Role.HEAD_PROJECTION, *project.phases(sizes)))
    if sizes.strategy.objective is Objective.REWARD:  # one number for each token; the last one counts
        score = Linear("score", sizes.tokens, width, 1, sizes.unquantised, adapted=False)
        return (*layers, build.column_layer(sizes, Role.HEAD, (score,), width=width))
    logits = Linear("logits", sizes.tokens, width, sizes.logits_width, sizes.unquantised, adapted=False)
    if sizes.framework.runs_liger and sizes.strategy.objective is Objective.SFT:
        return (*layers, _chunked_loss_layer(sizes, logits))
    if sizes.framework.chunks_loss and sizes.strategy.objective is Objective.SFT:
        return (*layers, _repeated_loss_layer(sizes, width))
    return (*layers, build.column_layer(sizes, Role.HEAD, (logits,), width=width), _loss_layer(sizes))


def next_token_layers(sizes: Sizes, block: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return one multi-token-prediction module: from the stream and the embedding of the next token through
    its *block* to the norm, head and loss of that token.
    """
    hidden = sizes.model.hidden
    project = Linear("further", sizes.tokens, 2 * hidden, hidden // sizes.tp, sizes.dtype, adapted=False)
    return (
        *embedding_layers(sizes, sizes.model.tied),
        build.norm_layer(sizes, Role.MTP_EMBEDDING_NORM),
        build.norm_layer(sizes, Role.MTP_NORM),
        build.column_layer(sizes, Role.MTP_PROJECTION, (project,), width=2 * hidden),
        *block,
        *head_layers(sizes),
    )


def loss_chunks(tokens: int, width: int, vocab: int) -> int:
    """Return the parts in which Liger multiplies by the output projection: logits of one take about as much as the
    inputs of all (ops/fused_linear_cross_entropy.py: a power of two of tokens in each).
    """
    chunk = 1 << max(0, -(-tokens // -(-vocab // width)) - 1).bit_length()
    return -(-tokens // chunk)


def _chunked_loss_layer(sizes: Sizes, logits: Linear) -> Layer:
    """Return Liger's loss: for each part of the tokens the logits, their gradient, written over them by one kernel, and
    both products with it, all in the forward; the backward scales what was made.
    """
    tokens, vocab, stored = sizes.tokens, sizes.vocab, sizes.stored
    parts = loss_chunks(tokens, logits.inputs, vocab)
    part = replace(logits, rows=-(-tokens // parts))
    ops: list[Op] = []
    for number in range(parts):
        ops += build.rename_ops(f"part {number}", part.forward(sizes))
        ops.append(stream_op(f"part {number} cross entropy", K.FUSED_LOSS, part.rows, vocab, 2, 1, stored, kernels=6))
        ops += build.rename_ops(f"part {number}", part.input_gradient(sizes))
        if sizes.strategy.trains_all_weights:
            ops += build.rename_ops(f"part {number}", part.weight_gradient(sizes))
            ops.append(stream_op(f"part {number} sum", K.ADD, vocab, logits.inputs, 2, 1, stored))
    scaled = stream_op("loss gradient scale", K.MUL, tokens, logits.inputs, 1, 1, stored, kernels=2)
    return make_layer(Role.LOSS, tuple(ops), (scaled,))


def _repeated_loss_layer(sizes: Sizes, width: int) -> Layer:
    """Return TRL's chunked loss. 40 losses on an H200 take from 2 % less to 37 % more time than these operations, the
    median 10 % more.
    """
    rows = min(sizes.tokens, LOSS_TOKENS)
    parts = -(-sizes.tokens // rows)
    product = FP32 if sizes.framework.loss is LossKernel.CHUNKED_FP32 else sizes.stored
    forward, backward, weight = (
        list_kernels(
            name,
            sizes,
            rows,
            sizes.vocab,
            product,
            width=width,
            parts=parts,
            batch=parts,
            product=product,
            widened=sizes.strategy.weights is not FP32,
            narrowed=product is not FP32,
        )
        for name in ("chunked loss", "chunked loss gradient", "chunked loss weight gradient")
    )
    return make_layer(Role.LOSS, forward, backward, weight)


def _loss_layer(sizes: Sizes) -> Layer:
    """Raise logits to fp32; each rank's maximum, exponential sum and target logit are summed over tp.

    Source: Shoeybi et al. 2019, section 3: scalars per token travel instead of logits.
    """
    stored, framework = sizes.stored, sizes.framework
    compiled = framework.kernels is Kernels.COMPILED
    forward, backward = list_phases(
        "loss",
        sizes,
        sizes.tokens,
        sizes.vocab,
        FP32,
        narrow=stored is not FP32,
        compiled=compiled,
        one_pass=sizes.tp == 1 and (compiled or framework.loss is LossKernel.COMPOSER),
        in_place=sizes.fused_by_hand and framework.loss is LossKernel.IN_PLACE,
        capped=sizes.eager_modules and bool(sizes.model.logit_softcap),
    )
    sums = ("maximum", "target logit", "exponential sum") if sizes.tp > 1 else ()
    size = 4 * sizes.tokens
    reduced = tuple(collective(f"loss tp all-reduce {name}", C.ALL_REDUCE, size, Group.TP) for name in sums)
    return make_layer(Role.LOSS, forward + reduced, backward)
