"""A mixture of experts: norm, router, dispatch, experts, combine, and shared experts next to them.

Tokens stay split over tp on their way to the experts (Megatron-Core's all-to-all dispatcher); experts that
are themselves split gather the tokens of their expert-tp group. What a dispatcher sends decides which copies are
made: an all-to-all takes tokens in the order of their experts, DeepEP and HybridEP take each token once and bring
what arrives into that order, an all-gather brings all tokens to all ranks.
"""

from dataclasses import replace

from stepcast.ir.architecture import Architecture
from stepcast.ir.framework import Dispatcher, Framework, Kernels, Modules
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.kernels import FP32, K, Ops, PhaseOps, cast_op, collective, list_kernels, make_layer, stream_op
from stepcast.ir.layers.mlp import activation_ops, mlp_layers, mlp_saved
from stepcast.ir.layers.operators import Linear
from stepcast.ir.layers.sizes import SavedTensor, Sizes, present
from stepcast.ir.layout import Group
from stepcast.ir.model_parts import Experts, LayerParts, Routing
from stepcast.ir.strategy import RecomputeModule as M
from stepcast.ir.strategy import Strategy
from stepcast.ir.tables import constants
from stepcast.ir.types import FP32_BYTES, DType
from stepcast.ir.work import CollectiveKind
from stepcast.ir.workload import Layer, Op, OpPart, Role

MEASURED = constants("experts")


def _saved_rows(sizes: Sizes) -> float:
    """Return the rows at the busiest expert rank."""
    return sizes.outer_share * present(sizes.model.experts).top_k * sizes.strategy.busiest_share


def list_saved(sizes: Sizes, block: LayerParts) -> list[SavedTensor]:
    """Return tokens in the order of the experts, and the experts' own activations.

    Megatron-LM weights inside the activation; a plain loop saves each result before and after its weight.
    """
    experts, model, element = present(sizes.model.experts), sizes.model, sizes.stored.bytes
    rows, width, ways = _saved_rows(sizes), model.expert_width, sizes.strategy.layout.expert_tp_size
    freed = (M.EXPERTS,)
    if sizes.alternates_matmuls:
        routed = experts.top_k / sizes.strategy.outer_ways * sizes.strategy.busiest_share
        widths = routed * (experts.ffn + model.hidden) + experts.shared_ffn / sizes.tp
        return [SavedTensor("outputs of every second matmul", sizes.tokens * widths * element)]
    tensors = [SavedTensor("tokens by expert", rows * ways * width * sizes.matmul_bytes, freed)]
    if not sizes.fused_by_hand:
        tensors.append(SavedTensor("results before and after their weights", rows * width * element * 2, freed))
    if sizes.framework.dispatcher is Dispatcher.ALL_GATHER and sizes.strategy.layout.ep * ways > 1:
        # Tokens as they were gathered, and results before they are scattered: 16 of the 17 MiB a layer that tests of
        # Megatron-LM with this dispatcher take beyond those with another.
        gathered = sizes.outer_share * sizes.strategy.layout.ep * ways * width * element * 2
        tensors.append(SavedTensor("gathered tokens and results", gathered, freed))
    tensors += mlp_saved(sizes, rows * ways, experts.ffn / ways, freed, (M.EXPERTS, M.EXPERT_ACTIVATION))
    router = sizes.outer_share * experts.count * FP32_BYTES * 2
    tensors.append(SavedTensor("router logits and probabilities", router, freed))
    if experts.latent:
        tensors.append(SavedTensor("latent tokens", sizes.outer_share * experts.latent * element, freed))
    if experts.shared_ffn:
        tensors += mlp_saved(sizes, sizes.tokens, experts.shared_ffn / sizes.tp, freed, freed)
    return tensors


def transient_bytes(sizes: Sizes, block: LayerParts) -> float:
    experts, model = present(sizes.model.experts), sizes.model
    ways = sizes.strategy.layout.expert_tp_size
    rows = _saved_rows(sizes) * ways
    if not sizes.fused:  # one expert at a time
        rows /= experts.count
    return rows * (experts.ffn / ways * model.sides + model.expert_width) * sizes.stored.bytes


def list_operators(sizes: Sizes, block: LayerParts) -> tuple[Layer, ...]:
    experts = present(sizes.model.experts)
    layers = [_router(sizes, experts), _dispatch(sizes, experts), *_routed(sizes, experts), _combine(sizes, experts)]
    if experts.shared_ffn:
        layers += mlp_layers(sizes, (Role.SHARED_UP, Role.SHARED_DOWN), experts.shared_ffn, ends=False)
        # Shared and routed experts are added up; the backward adds the gradients of both inputs.
        shape = (sizes.outer_tokens, sizes.model.hidden)
        total = build.add_op(sizes, "shared sum", *shape, OpPart.SUM)
        layers.append(make_layer(Role.EXPERTS_SUM, (total,), (build.add_op(sizes, "shared gradient sum", *shape),)))
    return build.surround_with_norms(sizes, Role.EXPERTS_NORM, Role.EXPERTS_POST_NORM, *layers)


def _routed_rows(sizes: Sizes) -> int:
    """Return the rows that arrive at the busiest expert rank."""
    return max(1, round(sizes.outer_tokens * present(sizes.model.experts).top_k * sizes.strategy.busiest_share))


def _dispatch_bytes(sizes: Sizes) -> int:
    return _routed_rows(sizes) * sizes.model.expert_width * sizes.element


def _router(sizes: Sizes, experts: Experts) -> Layer:
    """Return scores in fp32, their softmax and the choice of the best."""
    rows = sizes.outer_tokens
    wide = not sizes.eager_modules or sizes.model.latent is not None
    scores = Linear("router", rows, sizes.model.hidden, experts.count, FP32 if wide else sizes.stored, adapted=False)
    forward, backward, weight = _fused_router(sizes, scores) if sizes.fused else scores.phases(sizes)
    if experts.latent:
        down = Linear("latent down", rows, sizes.model.hidden, experts.latent, sizes.dtype, adapted=False)
        down_forward, down_backward, down_weight = down.phases(sizes)
        forward, backward, weight = forward + down_forward, backward + down_backward, weight + down_weight
    # The host reads how many tokens each expert got, which sizes all that follows, unless the experts'
    # capacity fixes that or the matmuls take their sizes from the GPU.
    counted = sizes.strategy.expert_capacity is None and not sizes.framework.fused_experts
    host_reads = counted and sizes.framework.modules is not Modules.TRANSFORMERS
    choice = stream_op("choice", K.SOFTMAX, rows, experts.count, 2, 1, FP32, kernels=MEASURED["router_kernels"])
    gradient = stream_op("choice gradient", K.SOFTMAX, rows, experts.count, 2, 1, FP32, True)
    return make_layer(Role.ROUTER, (*forward, replace(choice, host_reads=host_reads)), (gradient, *backward), weight)


def _fused_router(sizes: Sizes, scores: Linear) -> PhaseOps:
    """Return Megatron-Core's ``RouterGatingLinearFunction``.

    The forward multiplies what is stored and writes fp32. The backward widens its operands, which Transformer
    Engine then multiplies as TF32, and narrows the result.
    """
    if sizes.stored is FP32:
        return scores.phases(sizes)
    back = replace(scores, dtype=DType.TF32)
    shape = (scores.rows, scores.inputs)
    widen = cast_op("router widen", *shape, sizes.stored, FP32, sizes.stored)
    narrow = cast_op("router narrow", *shape, FP32, sizes.stored, sizes.stored)
    weight = back.weight_gradient(sizes)
    return PhaseOps(
        replace(scores, dtype=sizes.stored).forward(sizes),
        (*back.input_gradient(sizes), narrow),
        (widen, *weight) if weight else (),
    )


def exchange_routing(model: Architecture, strategy: Strategy, framework: Framework) -> Routing | None:
    """Return how tokens choose experts where a library sends each once to a rank; None if each expert gets a copy."""
    if model.experts is None or not framework.dispatcher.sends_once:
        return None
    token_bytes = model.expert_width * strategy.stored.bytes
    return replace(model.experts.routing, library=str(framework.dispatcher), token_bytes=token_bytes)


def _exchange_kind(gathers: bool) -> CollectiveKind:
    return CollectiveKind.ALL_GATHER if gathers else CollectiveKind.REDUCE_SCATTER


def _exchange(sizes: Sizes, name: str, gathers: bool) -> Ops:
    """Return the exchange of tokens; *gathers*: tokens go to their experts, not back."""
    ep = sizes.strategy.layout.ep
    if ep == 1:
        return ()
    if sizes.framework.dispatcher is not Dispatcher.ALL_GATHER:
        return (collective(f"ep all-to-all {name}", CollectiveKind.ALL_TO_ALL, _dispatch_bytes(sizes), Group.EP),)
    tokens = sizes.outer_tokens * ep
    kind = _exchange_kind(gathers)
    exchange = collective(f"ep {kind} {name}", kind, tokens * sizes.model.expert_width * sizes.element, Group.EP)
    # Probabilities of all experts and the choice among them go with the tokens (MoEAllGatherTokenDispatcher).
    choice_bytes = tokens * present(sizes.model.experts).count * int(FP32_BYTES + 1)
    return (exchange, collective(f"ep {kind} {name} choice", kind, choice_bytes, Group.EP)) if gathers else (exchange,)


def _split_experts(sizes: Sizes, name: str, gathers: bool) -> Ops:
    """Gather the tokens of ranks that split experts, or sum and scatter their results."""
    ways, size, kind = sizes.strategy.layout.expert_tp_size, _dispatch_bytes(sizes), _exchange_kind(gathers)
    if ways == 1:
        return ()
    if sizes.framework.dispatcher is Dispatcher.ALL_GATHER:  # tokens before each expert takes its own
        size = sizes.outer_tokens * sizes.strategy.layout.ep * sizes.model.expert_width * sizes.element
    return (collective(f"{name} expert-tp {kind}", kind, size * ways, Group.EXPERT_TP),)


def _copy_rows(sizes: Sizes, name: str, passes: float = 1.0) -> Op:
    rows, width = _routed_rows(sizes), sizes.model.expert_width
    return stream_op(name, K.COPY, rows, width, passes, passes, sizes.stored, "gradient" in name)


def _permute_passes(sizes: Sizes) -> float:
    """Return the passes of bringing rows into the order of experts, or back: Transformer Engine's, or of a copy."""
    return MEASURED["permute_passes"] if sizes.fused_by_hand else 1.0


def _sorts_first(sizes: Sizes) -> bool:
    """Return True if tokens are copied into the order of their experts before they are sent."""
    return sizes.strategy.layout.ep == 1 or sizes.framework.dispatcher is Dispatcher.ALL_TO_ALL


def _sort(sizes: Sizes, experts: Experts, name: str) -> Ops:
    """Bring what arrives from each rank into the order of this rank's experts, where it has several: in chunks, by a
    permutation after DeepEP, by kernels of HybridEP itself.
    """
    if sizes.framework.dispatcher is Dispatcher.DEEPEP and sizes.strategy.layout.ep > 1:
        return (_copy_rows(sizes, name, _permute_passes(sizes)),)
    sorts_again = sizes.strategy.layout.ep > 1 and (experts.count > sizes.strategy.layout.ep or not _sorts_first(sizes))
    return (_copy_rows(sizes, name),) if sorts_again else ()


def _send(sizes: Sizes, experts: Experts, name: str, order: str, sort: str, back: bool = False) -> Ops:
    """Bring tokens into an order, send them to the ranks of their experts and sort them there; or results *back*."""
    # Transformers' code weighs results where it brings them back into the order of tokens.
    reorders = _sorts_first(sizes) and not (sizes.eager_modules and order.startswith("unpermute"))
    shape = (_routed_rows(sizes), sizes.model.expert_width, sizes.stored)
    compiled = sizes.framework.kernels is Kernels.COMPILED and not sizes.eager_modules
    steps = (
        list_kernels(order, sizes, *shape, passes=_permute_passes(sizes), compiled=compiled) if reorders else (),
        _exchange(sizes, name, gathers=not back),
        _split_experts(sizes, name, gathers=not back),
        _sort(sizes, experts, sort),
    )
    return tuple(op for step in (reversed(steps) if back else steps) for op in step)


def _dispatch(sizes: Sizes, experts: Experts) -> Layer:
    backward = _send(sizes, experts, "dispatch gradient", "permute gradient", "sort gradient", back=True)
    return make_layer(Role.DISPATCH, _send(sizes, experts, "dispatch", "permute", "sort"), backward)


def _combine(sizes: Sizes, experts: Experts) -> Layer:
    """Bring results back to the tokens' own ranks, weighted by the router and summed, and add the residual."""
    outer, hidden, latent = sizes.outer_tokens, sizes.model.hidden, PhaseOps()
    if experts.latent:
        latent = Linear("latent up", outer, experts.latent, hidden, sizes.dtype, adapted=False).phases(sizes)
    residual = build.add_op(sizes, "residual", outer, hidden, OpPart.RESIDUAL)
    backward = _send(sizes, experts, "combine gradient", "unpermute gradient", "unsort gradient")
    return make_layer(
        Role.COMBINE,
        (*_send(sizes, experts, "combine", "unpermute", "unsort", back=True), *latent.forward, residual),
        latent.input_gradient + backward,
        latent.weight_gradient,
    )


def _routed(sizes: Sizes, experts: Experts) -> tuple[Layer, Layer]:
    """Return the two grouped matmuls of the experts with what runs around them."""
    layout, model = sizes.strategy.layout, sizes.model
    ways = layout.expert_tp_size
    rows, inner = _routed_rows(sizes) * ways, experts.ffn // ways
    groups, width = max(1, experts.count // layout.ep), model.expert_width
    # transformers' grouped products take the weights as they are: autocast leaves them in fp32.
    transformers = sizes.framework.modules is Modules.TRANSFORMERS
    dtype = sizes.strategy.weights if transformers and sizes.strategy.autocast else sizes.dtype
    separate = sizes.fused_by_hand and not sizes.framework.fused_experts
    skew = sizes.strategy.expert_blocks
    up = Linear("up", rows, width, model.sides * inner, dtype, groups, separate, skew=skew)
    down = Linear("down", rows, inner, width, dtype, groups, separate, skew=skew)
    if sizes.framework.fused_experts:
        # Biases, activation and its gradient run at the end of the matmuls before them, which also quantise
        # their results for the matmuls after them: what arrives from other ranks is left to be quantised
        # (``ForwardGroupedMLP_CuTeGEMMSwiGLU_MXFP8`` and its backward in Transformer Engine).
        up, down = replace(up, quantises_gradient=False), replace(down, quantises_input=False)
        return make_layer(Role.EXPERTS_UP, *up.phases(sizes)), make_layer(Role.EXPERTS_DOWN, *down.phases(sizes))
    eager, per_token = sizes.eager_modules, max(1, rows // sizes.outer_tokens)
    biased, pads = model.biases.mlp and (eager or sizes.fused), dtype.scaled and sizes.fused_by_hand and not eager

    def list_extra_kernels(place: str) -> Ops:
        if not (eager or biased or pads):
            return ()
        return list_kernels(
            f"{place} experts",
            sizes,
            rows,
            width,
            sizes.stored,
            inner=inner,
            first=up.outputs,
            arriving=_routed_rows(sizes),
            per_token=per_token,
            summed=1 / per_token,
            groups=groups,
            weighed=FP32 if experts.wide_weights else sizes.stored,
            wide=experts.wide_weights,
            biased=biased,
            pads=pads,
            once=sizes.framework.dispatcher.sends_once,
        )

    first, last = up.phases(sizes), down.phases(sizes)
    forward, backward = activation_ops(sizes, rows, inner, weighted=True)
    biases = [(_bias_gradient(sizes, linear),) if eager and biased else () for linear in (up, down)]
    return (
        make_layer(
            Role.EXPERTS_UP,
            (*list_extra_kernels("before"), *first.forward, *list_extra_kernels("between"), *forward),
            (
                *backward,
                *list_extra_kernels("backward between"),
                *first.input_gradient,
                *list_extra_kernels("backward before"),
            ),
            (*first.weight_gradient, *biases[0]),
        ),
        make_layer(
            Role.EXPERTS_DOWN,
            (*last.forward, *list_extra_kernels("after")),
            (*list_extra_kernels("backward after"), *last.input_gradient),
            (*last.weight_gradient, *biases[1]),
        ),
    )


def _bias_gradient(sizes: Sizes, linear: Linear) -> Op:
    """Return the gradient of a bias that is looked up for each row: summed over the rows of an expert in turn."""
    rows, groups, strategy = linear.rows, linear.groups, sizes.strategy
    mean = max(1, rows // groups)
    share = min(strategy.largest_expert, strategy.expert_capacity or strategy.largest_expert)
    largest = rows / strategy.busiest_share / groups * share
    in_turn = mean + round(MEASURED["lone_rows"] * max(0.0, largest - mean))
    name, columns = f"{linear.name} bias gradient", linear.outputs * groups
    return stream_op(name, K.SCATTER_SUM, in_turn, columns, mean / in_turn, 0, sizes.stored)
