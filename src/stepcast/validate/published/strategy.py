"""The Strategy of a published run: what its row says, else what its framework does unless told otherwise."""

import re
from dataclasses import replace
from typing import TypeVar

from stepcast.ir.dtype import DType
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.schedules import usual_kind
from stepcast.ir.stages import even_layers
from stepcast.ir.strategy import (
    Kernels,
    Recompute,
    RecomputeKind,
    RecomputeModule,
    Sharding,
    Strategy,
    TrainingKind,
)
from stepcast.validate.published.defaults import Defaults, defaults_of
from stepcast.validate.published.recipes import Recipe, Release, recipe_of
from stepcast.validate.published.run import NotComparableError, PublishedRun

Meaning = TypeVar("Meaning")
# Words of the column -> meaning; the first that the text contains decides.
PRECISIONS: tuple[tuple[str, DType], ...] = (
    ("nvfp4", DType.NVFP4),
    ("mxfp8", DType.MXFP8),
    ("fp8-mx", DType.MXFP8),
    ("fp8", DType.FP8),
    ("current-scaling", DType.FP8),
    ("bf16", DType.BF16),
    ("fp16", DType.FP16),
    ("tf32", DType.TF32),
    ("fp32", DType.FP32),
)
SHARDINGS: tuple[tuple[str, Sharding], ...] = (
    ("zero2", Sharding.ZERO_2),
    ("fsdp", Sharding.FSDP),
    ("zero3", Sharding.ZERO_3),
    ("zero1", Sharding.ZERO_1),
    ("none", Sharding.NONE),
)
# Megatron-Core's recompute_modules, and what tables shorten them to.
MODULES: dict[str, RecomputeModule] = {
    "attn": RecomputeModule.CORE,
    "core_attn": RecomputeModule.CORE,
    "mla_up_proj": RecomputeModule.LATENT_UP,
    "layernorm": RecomputeModule.NORMS,
    "norm": RecomputeModule.NORMS,
    "mlp": RecomputeModule.MLP,
    "moe_act": RecomputeModule.EXPERT_ACTIVATION,
    "act": RecomputeModule.EXPERT_ACTIVATION,
    "moe": RecomputeModule.EXPERTS,
}
RELEASE = re.compile(r"(\d\d)\.(\d\d)[. ].*NeMo Container")
WITHIN = re.compile(r"within (\d+)")
# Where a micro-batch is not published and no pipeline asks for small ones: as many sequences as this holds.
USUAL_TOKENS = 16384
LORA_RANK = 16  # Megatron-Bridge's LoRA recipes
# Recipes whose number of chunks some tables leave out (NVIDIA/dgxc-benchmarking, nemotron).
RECIPE_CHUNKS = {("nemotron4-340b", 8): 12, ("nemotron4-340b", 4): 12}


def strategy_of(run: PublishedRun, model: Model, assumptions: list[str]) -> Strategy:
    """How *run* was spread and run; *assumptions* gains what the row leaves open."""
    known = _as_of(run, defaults_of(run.framework))
    assumptions.append(known.about)
    chunks = _chunks(run, model, known, assumptions)
    layout = _layout(run, chunks)
    seq = run.seq or known.seq
    pieces = layout.pp * layout.vpp
    uneven = model.layers % pieces and model.layers >= pieces
    lora = "lora" in run.table.lower()
    micro_batch = _micro_batch(run, seq, assumptions)
    precision = _word(run.precision, PRECISIONS, known.precision, "precision")
    recipe = recipe_of(run, layout, precision, model.layers, _release(run))
    return Strategy(
        layout=layout,
        micro_batch=micro_batch,
        global_batch=_global_batch(run, micro_batch * layout.dp, assumptions),
        seq=seq,
        sequence_parallel=layout.tp > 1 and _stated(run.sequence_parallel, known.sequence_parallel),
        context=known.context,
        schedule=usual_kind(layout.vpp),
        stage_layers=recipe.stage_layers or (even_layers(model.layers, pieces) if uneven else ()),
        sharding=_word(run.sharding, SHARDINGS, known.sharding, "zero_fsdp"),
        recompute=replace(_recompute(run, known, recipe), stops_early=known.stops_early),
        precision=precision,
        gradient_dtype=_gradient_dtype(run, known),
        training=TrainingKind.LORA if lora else TrainingKind.FULL,
        lora_rank=LORA_RANK if lora else 0,
        flash_attention=_stated(run.flash_attention, known.flash_attention),
        overlap=replace(known.overlap, experts=recipe.overlapped_experts or run.overlaps_experts),
        execution=recipe.execution or known.execution,
        kernels=Kernels.PLAIN if run.compiled is False else known.kernels,
        dropout=known.dropout,
        fused_accumulation=known.fused_accumulation,
        boundary_scattered=known.boundary_scattered,
        owners_broadcast=known.owners_broadcast,
        fused_experts=recipe.fused_experts,
        forwarded_experts=recipe.forwarded_experts or run.forwards_experts,
        further_tokens=0 if run.further_tokens is False else _further_tokens(model, recipe),
        reshard=run.reshard,
    )


def _further_tokens(model: Model, recipe: Recipe) -> int:
    return min(1, model.next_token_layers) * recipe.further_tokens


def _as_of(run: PublishedRun, known: Defaults) -> Defaults:
    """Rows that speak of sequence parallelism are of Megatron-LM of 2022 (Korthikanti et al.) or later, which
    adds up gradients in the matmul and sums them over tensor ranks beside it.
    """
    if run.sequence_parallel is None:
        return known
    return replace(known, overlap=replace(known.overlap, tensor_gradients=True), fused_accumulation=True)


def _layout(run: PublishedRun, chunks: int) -> Layout:
    within = WITHIN.search(run.sharding)
    layout = Layout(
        tp=run.tp,
        cp=run.cp or 1,
        ep=run.ep or 1,
        dp=run.dp,
        pp=run.pp,
        vpp=chunks,
        # Recipes of mixtures do not split single experts unless they say so.
        expert_tp=run.expert_tp or (1 if run.ep and run.ep > 1 else 0),
        shard=min(int(within[1]), run.dp) if within else 0,
    )
    if layout.gpus != run.gpus:
        # Some tables count context parallel ranks among dp.
        dp, rest = divmod(run.gpus, layout.tp * layout.cp * layout.pp)
        if rest or not dp:
            raise NotComparableError("tp x cp x pp x dp does not make the number of GPUs")
        layout = replace(layout, dp=dp)
    return layout


def _chunks(run: PublishedRun, model: Model, known: Defaults, assumptions: list[str]) -> int:
    if run.pp == 1:
        return 1
    if run.vpp is not None:
        if run.pp * run.vpp <= model.layers:
            return run.vpp
        # Megatron lets the chunks of embedding and loss hold no layer; ours hold one.
        fewer = model.layers // run.pp
        assumptions.append(f"{fewer} chunks per stage instead of {run.vpp}, so that each holds a layer")
        return fewer
    if found := RECIPE_CHUNKS.get((run.model, run.pp)):
        assumptions.append(f"{found} chunks per stage, as the recipe has")
        return found
    if "interleaved" not in run.schedule.lower():
        return 1
    layers = model.layers // run.pp
    chunks = known.chunks if layers % known.chunks == 0 else 1
    assumptions.append(f"{chunks} chunks per stage")
    return chunks


def _micro_batch(run: PublishedRun, seq: int, assumptions: list[str]) -> int:
    if run.micro_batch is not None:
        return run.micro_batch
    share = max(1, run.global_batch // run.dp)
    fits = max(1, USUAL_TOKENS * (run.cp or 1) // seq)
    found = 1 if run.pp > 1 else max(size for size in range(1, min(share, fits) + 1) if share % size == 0)
    assumptions.append(f"micro-batches of {found}")
    return found


def _global_batch(run: PublishedRun, per_round: int, assumptions: list[str]) -> int:
    """Composer lets the last micro-batch be smaller; ours are alike, and the time is scaled for it."""
    rounded = max(1, round(run.global_batch / per_round)) * per_round
    if rounded != run.global_batch:
        assumptions.append(f"a batch of {rounded}, scaled to {run.global_batch}")
    return rounded


def _recompute(run: PublishedRun, known: Defaults, recipe: Recipe) -> Recompute:
    word = run.recompute.lower()
    if not word and recipe.recompute:
        return Recompute(RecomputeKind.SELECTIVE, modules=recipe.recompute)
    if not word:
        return known.recompute
    if word.startswith("none"):
        return Recompute()
    if word.startswith("full"):
        return Recompute(RecomputeKind.FULL)
    if word == "selective" or run.recomputes_by_op:
        return Recompute(RecomputeKind.SELECTIVE)
    named = re.findall(r"\w+", word.removeprefix("selective"))
    if not named or any(name not in MODULES for name in named):
        raise NotComparableError(f"recompute {run.recompute!r} is not known")
    return Recompute(RecomputeKind.SELECTIVE, modules=tuple(MODULES[name] for name in named))


def _release(run: PublishedRun) -> Release | None:
    """Year and month of the container that a table of Megatron-Bridge's results was made with."""
    found = RELEASE.match(run.table)
    return (int(found[1]), int(found[2])) if found else None


def _gradient_dtype(run: PublishedRun, known: Defaults) -> DType:
    """Composer's PURE reduces in the training precision; a bf16 optimizer accumulates in fp32."""
    if run.sharding.endswith("/PURE"):
        return DType.BF16
    if "fp32 grad" in run.sharding:
        return DType.FP32
    if known.gradient_dtype is DType.FP16 and "bf16" in run.precision.lower():
        return DType.BF16
    return known.gradient_dtype


def _stated(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _word(text: str, words: tuple[tuple[str, Meaning], ...], default: Meaning, column: str) -> Meaning:
    if not text:
        return default
    for word, meaning in words:
        if word in text.lower():
            return meaning
    if column == "zero_fsdp" and "optimizer" in text.lower():
        return default
    raise NotComparableError(f"{column} {text!r} is not known")
