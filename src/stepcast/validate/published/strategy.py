"""How a published run was spread: what its row says, else what its framework does unless told otherwise."""

import re
from dataclasses import replace
from typing import Any, TypeVar

from stepcast.frameworks.profile import Profile, settle
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Execution, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.schedules import usual_kind
from stepcast.ir.stages import even_layers
from stepcast.ir.strategy import (
    PARAMETER_FORMATS,
    Recompute,
    RecomputeKind,
    RecomputeModule,
    Sharding,
    Strategy,
    TrainingKind,
)
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
# How kernels are issued, by what the column of graphs says; whatever else it says are graphs.
ISSUED = {"none": Execution.EAGER, "blocking": Execution.BLOCKING}
SHARDINGS: tuple[tuple[str, Sharding], ...] = (
    ("zero2", Sharding.ZERO_2),
    ("fsdp", Sharding.FSDP),
    ("zero3", Sharding.ZERO_3),
    ("zero-3", Sharding.ZERO_3),
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
BLOCK = re.compile(r"full block (\d+) layers")
DEFERRED = "wgrad_deferral_limit="
WITHIN = re.compile(r"within (\d+)")
# Where a micro-batch is not published and no pipeline asks for small ones: as many sequences as this holds.
USUAL_TOKENS = 16384
LORA_RANK = 16  # Megatron-Bridge's LoRA recipes


def strategy_of(
    run: PublishedRun, profile: Profile, model: Model, gpu: str, assumptions: list[str]
) -> tuple[Strategy, Framework]:
    """How *run* was spread and run; *assumptions* gains what the row leaves open."""
    assumptions.append(profile.description)
    layout = _layout(run, 1)
    chunks = _chunks(run, model, profile.chunks(model, gpu, layout), assumptions)
    layout = replace(layout, vpp=chunks)
    seq = run.seq or profile.defaults.seq
    micro_batch = _micro_batch(run, seq, assumptions)
    settled = settle(profile, model, gpu, layout, _given(run))
    choices = dict(settled.choices)
    pieces = layout.pp * layout.vpp
    if ends := _ends(run, model.layers, pieces):
        choices["stage_layers"] = ends
    elif not choices.get("stage_layers") and model.layers % pieces:
        choices["stage_layers"] = even_layers(model.layers, pieces)
    if run.overlaps_experts:
        choices["overlap"] = replace(choices["overlap"], experts=True)
    choices["overlap"] = replace(choices["overlap"], **run.overlapped)
    if layout.vpp > 1:
        choices["schedule"] = usual_kind(layout.vpp)
    batch = _global_batch(run, micro_batch * layout.dp, assumptions)
    strategy = replace(settled, choices=choices).strategy(layout, micro_batch, batch, seq)
    return strategy, settled.framework


def _given(run: PublishedRun) -> dict[str, Any]:
    """What the row itself says, by fields of a Strategy or a Framework."""
    stated: dict[str, Any] = {
        "precision": _word(run.precision, PRECISIONS, "precision"),
        "sharding": _word(run.sharding, SHARDINGS, "zero_fsdp"),
        "recompute": _recompute(run),
        "sequence_parallel": run.sequence_parallel,
        "flash_attention": run.flash_attention,
        "kernels": Kernels.PLAIN if run.compiled is False else None,
        "gradient_dtype": _gradient_dtype(run),
        "further_tokens": 0 if run.further_tokens is False else None,
        "reshard": run.reshard,
    }
    if run.lora_rank or "lora" in run.table.lower():
        stated |= {"training": TrainingKind.LORA, "lora_rank": run.lora_rank or LORA_RANK}
        # NeMo keeps the frozen weights quantised, whatever is gathered of trained ones.
        quantised = bool(run.lora_rank)
    else:
        quantised = bool(run.fp8_parameters)
    if quantised and stated.get("precision") in PARAMETER_FORMATS:
        stated["fp8_parameters"] = True
    if {"fp8_act", "fp8_activation"} & set(run.flags):
        stated["fp8_activations"] = True
    if "fp8_dpa" in run.flags:
        stated["fp8_attention"] = True
    if "defer_embedding_wgrad_compute" in run.flags:
        limit = next((flag for flag in run.flags if flag.startswith(DEFERRED)), "")
        stated["deferred_gradients"] = int(limit.removeprefix(DEFERRED) or 0)
    if run.graphs:
        stated["execution"] = ISSUED.get(run.graphs, Execution.GRAPHS)
    return {name: value for name, value in stated.items() if value is not None}


def _ends(run: PublishedRun, layers: int, pieces: int) -> tuple[int, ...]:
    """One layer less beside the embedding, or the loss (Megatron-Core: account_for_embedding)."""
    first, last = (int(f"asym_pp_{end}" in run.flags) for end in ("embed", "loss"))
    share, rest = divmod(layers + first + last, pieces)
    if pieces == 1 or rest or not (first or last):
        return ()
    return (share - first, *(share,) * (pieces - 2), share - last)


def _gradient_dtype(run: PublishedRun) -> DType | None:
    """Composer's PURE reduces in the training precision."""
    if run.sharding.endswith("/PURE"):
        return DType.BF16
    return DType.FP32 if "fp32 grad" in run.sharding else None


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


def _chunks(run: PublishedRun, model: Model, known: tuple[int, bool], assumptions: list[str]) -> int:
    if run.pp == 1:
        return 1
    if run.vpp is not None:
        # The embedding and the loss may each have a piece to themselves.
        if run.pp * run.vpp <= model.layers + 2:
            return run.vpp
        fewer = model.layers // run.pp
        assumptions.append(f"{fewer} chunks per stage instead of {run.vpp}, so that each holds a layer")
        return fewer
    usual, recipe = known
    if recipe:
        assumptions.append(f"{usual} chunks per stage, as the recipe has")
        return usual
    if "interleaved" not in run.schedule.lower():
        return 1
    layers = model.layers // run.pp
    chunks = usual if usual and layers % usual == 0 else 1
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


def _recompute(run: PublishedRun) -> Recompute | None:
    word = run.recompute.lower()
    if not word:
        return None
    if word.startswith("none"):
        return Recompute()
    if found := BLOCK.match(word):
        return Recompute(RecomputeKind.BLOCK, layers=int(found[1]))
    if word.startswith("full"):
        return Recompute(RecomputeKind.FULL)
    if word == "selective" or run.recomputes_by_op:
        return Recompute(RecomputeKind.SELECTIVE)
    named = re.findall(r"\w+", word.removeprefix("selective"))
    if not named or any(name not in MODULES for name in named):
        raise NotComparableError(f"recompute {run.recompute!r} is not known")
    return Recompute(RecomputeKind.SELECTIVE, modules=tuple(MODULES[name] for name in named))


def _word(text: str, words: tuple[tuple[str, Meaning], ...], column: str) -> Meaning | None:
    if not text:
        return None
    for word, meaning in words:
        if word in text.lower():
            return meaning
    if column == "zero_fsdp" and "optimizer" in text.lower():
        return None
    raise NotComparableError(f"{column} {text!r} is not known")
