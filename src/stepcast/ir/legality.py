"""Legality of strategies for a model: each rule in one place, each message with the nearest legal value.

The rules are those of Megatron-Core (``transformer_config.py``, ``parallel_state.py``,
``training/arguments.py``), DeepSpeed (Ulysses) and DualPipe. DeepSpeed's pipelines refuse ZeRO-2 and 3, those
of Megatron-FSDP and torch.distributed.pipelining run them.
"""

from collections.abc import Iterator

from stepcast.ir.framework import MEGATRON_CORE, Framework, Kernels, Offloaded, SsmKernels
from stepcast.ir.layers.kinds import count_adapted
from stepcast.ir.model import Model, pieces
from stepcast.ir.model_parts import FeedForward, Mixer, PositionKind
from stepcast.ir.schedules import SCHEDULES, describe_misfit
from stepcast.ir.strategy import BaseWeights, ContextKind, RecomputeKind, Sharding, Strategy, StrategyError
from stepcast.ir.strategy import RecomputeModule as M
from stepcast.ir.types import DType


def find_problems(model: Model, strategy: Strategy, framework: Framework | None = None) -> Iterator[str]:
    """Yield why *strategy* cannot train *model*, with *framework* if it is given; rules may rely on those before."""
    has_hybrid, has_experts = model.hybrid is not None, model.experts is not None or strategy.layout.ep > 1
    asked = (True, has_hybrid, has_hybrid, True, strategy.layout.cp > 1, has_experts, True, True)
    for rule, is_asked in zip(RULES, asked, strict=True):
        if is_asked:
            yield from filter(None, rule(model, strategy))
    for with_software in SOFTWARE_RULES if framework else ():
        yield from filter(None, with_software(model, strategy, framework or MEGATRON_CORE))


def check(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> None:
    """Raise a StrategyError if *strategy* cannot train *model*."""
    for problem in find_problems(model, strategy, framework):
        raise StrategyError(problem)


def is_legal(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> bool:
    """Return True if *strategy* can train *model*."""
    try:
        check(model, strategy, framework)
    except StrategyError:
        return False
    return True


def find_recomputable(model: Model) -> set[M]:
    """Return the modules that layers of *model* have and a backward can run again."""
    modules: set[M] = set()
    if any(block.mixer is Mixer.ATTENTION for block in model.block_kinds):
        modules.add(M.CORE)
        if model.latent is not None:
            modules |= {M.LATENT_UP, M.NORMS}
    if any(block.feed_forward is FeedForward.DENSE for block in model.block_kinds):
        modules.add(M.MLP)
    if any(block.feed_forward is FeedForward.EXPERTS for block in model.block_kinds):
        modules |= {M.NORMS, M.EXPERT_ACTIVATION, M.EXPERTS}
    return modules


def nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of *number* closest to *wanted*; the smaller of two equally close."""
    candidates = [ways for ways in range(1, min(number, 2 * target) + 1) if number % ways == 0]
    return min(candidates, key=lambda ways: (abs(ways - target), ways))


def _misfit(degree: str, ways: int, count: int, what: str) -> str:
    """Say that *ways* do not divide the *count* of *what*, and which do; empty where they do."""
    if count % ways == 0:
        return ""
    return f"{degree} {ways} does not divide {what}: the nearest legal {degree} is {nearest_divisor(count, ways)}"


def _tensor(model: Model, strategy: Strategy) -> Iterator[str]:
    tp = strategy.layout.tp
    attention = model.hybrid is None or any(block.mixer is Mixer.ATTENTION for block in model.block_kinds)
    widths = [("heads", model.heads)] if attention else []
    if attention and model.latent is None and tp % model.kv_heads:  # else each serves tp / kv heads ranks
        widths.append(("kv heads", model.kv_heads))
    shared_ffn = model.experts.shared_ffn if model.experts else 0
    for name, width in (*widths, ("ffn", model.ffn), ("the shared experts' ffn", shared_ffn)):
        if width % tp:
            yield _misfit("tp", tp, width, f"{name} {width}")


def _mamba(model: Model, strategy: Strategy) -> Iterator[str]:
    """Check that every rank has complete heads and groups of a Mamba block (Megatron-Core's mamba_mixer.py);
    context-parallel ranks share heads, and either share groups or hold copies (mamba_context_parallel.py).
    """
    hybrid, tp, cp = model.hybrid, strategy.layout.tp, strategy.layout.cp
    if hybrid is None or not any(block.mixer is Mixer.MAMBA for block in model.block_kinds):
        return
    heads, groups = hybrid.mamba_heads, hybrid.groups
    yield _misfit("tp", tp, heads, f"{heads} Mamba heads")
    yield _misfit("tp", tp, groups, f"{groups} Mamba groups")
    heads, groups = heads // tp, groups // tp
    yield _misfit("cp", cp, heads, f"the {heads} Mamba heads of a tensor rank")
    if groups % cp and cp % groups:
        yield (
            f"cp {cp} neither divides nor is a multiple of the {groups} Mamba groups of a tensor rank: "
            f"the nearest legal cp is {nearest_divisor(groups, cp)}"
        )


def _recurrent(model: Model, strategy: Strategy) -> Iterator[str]:
    """Check recurrent mixers: Megatron-Core splits a delta net by heads of keys among tensor and
    context-parallel ranks (core/ssm/gated_delta_net.py); no training software splits Mamba-1 blocks.
    """
    mixers, layout = {block.mixer for block in model.block_kinds}, strategy.layout
    for name, ways in (("tp", layout.tp), ("cp", layout.cp)):
        if Mixer.SELECTIVE in mixers and ways > 1:
            yield f"{name} {ways} cannot split Mamba-1 blocks, no software does: use {name} 1 and dp or ep"
    if Mixer.DELTA in mixers and model.delta is not None:
        heads = model.delta.key_heads
        rank_heads = heads // layout.tp
        yield _misfit("tp", layout.tp, heads, f"the {heads} key heads of delta nets")
        yield _misfit("cp", layout.cp, rank_heads, f"the {rank_heads} key heads of delta nets on a tensor rank")


def _sequence(model: Model, strategy: Strategy) -> Iterator[str]:
    layout, seq = strategy.layout, strategy.seq
    if model.position.kind is PositionKind.LEARNED and seq > model.max_seq:
        yield f"seq {seq} exceeds the model's {model.max_seq} learned positions: use at most {model.max_seq}"
    if seq % layout.cp:
        yield _misfit("cp", layout.cp, seq, f"seq {seq}")
    if not strategy.sequence_parallel:
        if layout.tp > 1 and model.experts is not None:
            # Megatron-Core's MoELayer refuses to train so: all tensor ranks would route the same tokens.
            yield f"experts with tp {layout.tp} need sequence parallelism: switch it on, or use tp 1"
    elif layout.tp == 1:
        yield "sequence parallelism needs tp > 1: switch it off, or use tp 2 or more"
    elif seq // layout.cp % layout.tp:
        step = layout.tp * layout.cp
        yield f"sequence parallelism needs seq {seq} to be a multiple of tp x cp = {step}: use {_multiple(seq, step)}"


def _context(model: Model, strategy: Strategy) -> Iterator[str]:
    cp, tp, seq = strategy.layout.cp, strategy.layout.tp, strategy.seq
    if cp > 1 and strategy.context is ContextKind.ALL_TO_ALL:
        heads = max(1, model.kv_heads // tp)
        yield _misfit("cp", cp, heads, f"the {heads} kv heads of a tensor rank, which a2a exchanges")
    elif cp > 1 and seq % (2 * cp):
        yield (
            f"cp {cp} needs seq {seq} to be a multiple of 2 x cp = {2 * cp}, so that each rank holds "
            f"one slice from either end: use {_multiple(seq, 2 * cp)}"
        )


def _combination(model: Model, strategy: Strategy, framework: Framework) -> Iterator[str]:
    """Check choices that do not go together: one condition each."""
    layout, context, cp = strategy.layout, strategy.context, strategy.layout.cp
    if strategy.lora_rank > model.hidden:
        yield f"lora rank {strategy.lora_rank} exceeds hidden {model.hidden}: use at most {model.hidden}"
    if strategy.lora_rank and not count_adapted(model, strategy.lora_targets):
        yield f"{model.name} has no {', '.join(strategy.lora_targets)} layer to adapt: use other --lora-targets"
    if strategy.mtp_layers and not model.next_token_layers:
        yield f"{model.name} has no multi-token prediction (MTP) module: leave --mtp-layers out"
    if strategy.document and cp > 1 and context is not ContextKind.ALL_TO_ALL:  # rings and scans would need borders
        yield "packed documents are not modelled with context parallelism p2p or allgather; use --cp-comm a2a"
    if strategy.trained_layers > model.layers:
        yield f"{model.name} has {model.layers} layers: train at most as many (--train-layers)"
    # bitsandbytes makes 4-bit and 8-bit weights of linear layers, not of experts stored as one tensor.
    quantised = strategy.base_weights is not BaseWeights.TRAINED
    if quantised and model.experts is not None:
        yield f"experts of {model.name} in {strategy.base_weights} are not modelled; leave --base-weights out"
    if quantised and layout.tp > 1:
        yield "quantised weights are not split over tensor-parallel ranks; use --tp 1"
    if cp > 1 and context is ContextKind.RING and not framework.flash_attention:
        yield "ring attention needs flash attention: switch it on, or use --cp-comm allgather"
    if strategy.autocast and (framework.kernels is Kernels.FUSED or framework.gradient_dtype is not DType.FP32):
        yield "autocast is plain PyTorch's: use plain or compiled kernels, gradients in fp32"
    if strategy.dora and not framework.writes_out:
        yield "DoRA is modelled as peft computes it: use --framework peft"
    if strategy.lora_rank and framework.optimizer.knows_matrices:
        yield f"adapters are not trained by {framework.optimizer.kind}; use adamw or sgd"


def _offload(model: Model, strategy: Strategy, framework: Framework) -> Iterator[str]:
    """Check the offload: hosts update AdamW and SGD alone, states in fp32 or bf16 (Megatron-Core's
    HybridDeviceOptimizer, DeepSpeed's CPUAdam); FSDP's CPUOffload takes all of what ranks split.
    """
    share, optimizer = strategy.offload.optimizer, framework.optimizer
    if not share:
        return
    if optimizer.knows_matrices or optimizer.moment_dtype not in (DType.FP32, DType.BF16):
        yield (
            f"no host updates {optimizer.kind} with moments in {optimizer.moment_dtype}: offload adamw, "
            "sgd or sgd-momentum with moments in fp32 or bf16"
        )
    if framework.offloaded is not Offloaded.WEIGHTS:
        return
    if not strategy.sharding.splits_parameters:
        yield (
            f"{framework.name} offloads the optimizer together with weights that ranks split, and sharding "
            f"is {strategy.sharding}: choose fsdp or zero-3"
        )
    if share < 1:
        yield f"{framework.name} offloads the optimizer as a whole, not {share:g} of it"


def _eager_scans(model: Model, strategy: Strategy, framework: Framework) -> Iterator[str]:
    """Check eager scans: only transformers has a path without mamba-ssm; its heads and tokens are not split."""
    eager = framework.ssm_kernels is SsmKernels.EAGER
    if eager and not framework.writes_out:
        yield (
            f"ssm-kernels eager is the PyTorch path of transformers: {framework.name} with kernels "
            f"{framework.kernels} does not run it; use framework transformers, or ssm-kernels fused"
        )
    if eager and (strategy.layout.tp > 1 or strategy.layout.cp > 1):
        yield "ssm-kernels eager runs all heads and tokens on a rank: use tp 1 and cp 1"


def _experts(model: Model, strategy: Strategy) -> Iterator[str]:
    layout, experts = strategy.layout, model.experts
    if experts is None:
        if layout.ep > 1:
            yield f"ep {layout.ep} needs experts, and {model.name} has none: use ep 1"
        return
    expert_tp, ranks = layout.expert_tp_size, layout.tp * layout.cp * layout.dp
    yield _misfit("ep", layout.ep, experts.count, f"{experts.count} experts")
    yield _misfit("expert tp", expert_tp, experts.ffn, f"the experts' ffn {experts.ffn}")
    if ranks % (layout.ep * expert_tp):
        nearest = nearest_divisor(max(ranks // expert_tp, 1), layout.ep)
        hint = ", or do not split experts (--expert-tp 1)" if expert_tp > 1 and ranks % layout.ep == 0 else ""
        yield (
            f"ep x expert tp = {layout.ep} x {expert_tp} does not divide tp x cp x dp = {ranks}: "
            f"the nearest legal ep is {nearest}{hint}"
        )


def _pipeline(model: Model, strategy: Strategy) -> Iterator[str]:
    layout = strategy.layout
    if layout.vpp > 1 and layout.pp == 1:
        yield f"vpp {layout.vpp} splits pipeline stages into chunks and needs pp > 1: use vpp 1"
    every, recompute = pieces(model, strategy), strategy.recompute  # raises where they do not add up
    if recompute.kind is RecomputeKind.BLOCK:
        smallest = min([len(piece.layers) for piece in every if piece.layers])
        if recompute.layers > smallest:
            yield f"recompute block {recompute.layers} exceeds the {smallest} layers of a stage: use at most {smallest}"
    schedule, batches = strategy.schedule, strategy.micro_batches
    pp, vpp, facts = layout.pp, layout.vpp, SCHEDULES[schedule]
    if pp == 1:
        return
    fewest, alternative = facts.fewest_chunks, " or schedule interleaved" if vpp > 1 else ""
    if vpp < fewest and facts.most_chunks is None:
        yield f"schedule {schedule} needs vpp of {fewest} or more: use vpp {fewest} or schedule 1f1b"
    if not fewest <= vpp <= (facts.most_chunks or vpp):
        yield f"schedule {schedule} runs {fewest} chunk(s) a stage, not vpp {vpp}: use vpp {fewest}{alternative}"
    if facts.whole_rounds and batches % pp:
        yield (
            f"schedule {schedule} needs the {batches} micro-batches to be a multiple of pp {pp}: "
            f"the nearest is {_multiple(batches, pp)}"
        )
    yield describe_misfit(schedule, pp, batches)


def _sharding(model: Model, strategy: Strategy) -> Iterator[str]:
    layout, sharding = strategy.layout, strategy.sharding
    ranks = layout.dp * layout.cp
    if layout.shard and sharding is Sharding.NONE:
        yield f"shard {layout.shard} splits states among ranks and needs sharding: use zero-1 or hybrid-fsdp"
    if layout.shard:
        yield _misfit("shard", layout.shard, ranks, f"dp x cp = {ranks}")
    if sharding is Sharding.HYBRID_FSDP and not layout.shard:
        near = nearest_divisor(ranks, 8)
        yield f"hybrid-fsdp needs --shard, the number of ranks that share one copy of the states: try --shard {near}"
    if model.experts is not None and layout.expert_dp % layout.copies:
        copies = [count for count in range(1, ranks + 1) if ranks % count == 0 and layout.expert_dp % count == 0]
        nearest = min((ranks // count for count in copies), key=lambda ways: (abs(ways - layout.shard_size), ways))
        yield (
            f"shard {layout.shard} makes {layout.copies} copies of the states, which do not divide the "
            f"{layout.expert_dp} replicas of each expert: the nearest legal shard is {nearest}"
        )


def _multiple(number: int, step: int) -> int:
    """Return the multiple of *step* closest to *number*, at least one."""
    return max(1, round(number / step)) * step


RULES = (_tensor, _mamba, _recurrent, _sequence, _context, _experts, _pipeline, _sharding)
SOFTWARE_RULES = (_combination, _offload, _eager_scans)
