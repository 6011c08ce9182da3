"""What NVIDIA's performance recipes set for mixtures of experts, which their tables of results leave out.

Source: NVIDIA-NeMo/Megatron-Bridge, ``scripts/performance/configs/*/*workload_base_configs.py`` (the presets
of release 25.11 at commit 0fa501a, those from 26.02 on at commits 01b2977, 06e8da4, 07eea52, 013180a and
0426418) and ``src/megatron/bridge/recipes`` (multi-token prediction, pipeline layouts). Presets change
between releases; where the history of one is not at hand, the nearest known is used.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Execution
from stepcast.ir.strategy import RecomputeModule as M
from stepcast.validate.published.run import PublishedRun

Release = tuple[int, int]
Models = tuple[tuple[str, tuple[str, ...]], ...]  # (start of a model's name, GPUs)
FIRST_PRESETS: Release = (25, 11)
# Transformer Engine's fused grouped MLP came to MXFP8 recipes of these (pull requests 3983, 4173, 4226, 4498
# and 4606). Kimi K2's takes micro-batches of one, and its rows have two.
FUSED_FROM: Release = (26, 6)
FUSED: Models = (
    ("deepseek-v3", ("gb200", "gb300", "b300")),
    ("gpt-oss", ("gb200", "gb300")),
    ("qwen3", ("gb200", "gb300", "b300", "b200")),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of one recipe that no table of results states."""

    recompute: tuple[M, ...] = ()
    fused_experts: bool = False
    overlapped_experts: bool = False
    forwarded_experts: bool = False
    further_tokens: int = 0
    execution: Execution | None = None
    stage_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """What a preset depends on."""

    model: str
    gpu: str
    precision: str
    release: Release

    @property
    def fused(self) -> bool:
        """cutedsl_fused_grouped_mlp, which comes with graphs of whole steps and moe_a2a_overlap."""
        return self.release >= FUSED_FROM and self.precision == "mxfp8" and _among(FUSED, self)


def recipe_of(
    run: PublishedRun, layout: Layout, precision: str, layers: int, release: Release | None
) -> Recipe:
    """The recipe behind a row of Megatron-Bridge; an empty one where none is known."""
    if release is None or not run.framework.lower().startswith("megatron-bridge"):
        return Recipe()
    case = Case(run.model, run.gpu.lower().split("-")[0], precision, release)
    known = next((preset for start, preset in PRESETS if run.model.startswith(start)), None)
    # Megatron-Core exchanges beside a second micro-batch, for which a pipeline needs several chunks.
    overlaps = layout.ep > 1 and (layout.pp == 1 or layout.vpp > 1)
    return Recipe(
        recompute=known(case) if known else (),
        fused_experts=case.fused and layout.ep > 1,
        overlapped_experts=overlaps and case.fused,
        forwarded_experts=_among(FORWARDED, case),
        further_tokens=FURTHER_TOKENS.get(run.model, 0),
        execution=_execution(case) if layout.ep > 1 else None,
        stage_layers=_stage_layers(layers, layout.pp * layout.vpp) if run.model in FILLED_STAGES else (),
    )


def _among(models: Models, case: Case) -> bool:
    return any(case.model.startswith(start) and case.gpu in gpus for start, gpus in models)


def _stage_layers(layers: int, pieces: int) -> tuple[int, ...]:
    """DeepSeek-V3's pipeline layouts: all pieces are full but the last, with the loss and further tokens.

    Where that leaves the last without a layer, the first has one less, for the embedding.
    """
    if pieces == 1:
        return ()
    share = -(-layers // pieces)
    first = share if layers > share * (pieces - 1) else share - 1
    last = layers - first - share * (pieces - 2)
    return (first, *(share,) * (pieces - 2), last) if last >= 0 else ()


def _execution(case: Case) -> Execution:
    """cuda_graph_impl: whole steps with fused experts; all but routed experts; nothing."""
    if case.fused:
        return Execution.GRAPHS
    if _among(UNCAPTURED, case):
        return Execution.EAGER
    return Execution.PARTIAL_GRAPHS


# moe_flex_dispatcher_backend "hybridep" or "deepep" where experts are spread over several NVLink domains.
FORWARDED: Models = (
    ("deepseek-v3", ("h100", "b200", "b300")),
    ("qwen3-30b", ("h100", "b200", "b300")),
    ("nemotron3", ("h100", "b200", "b300")),
)
# Presets without captured graphs (cuda_graph_impl "none" or not given).
UNCAPTURED: Models = (
    ("deepseek-v3", ("b200", "h100")),
    ("gpt-oss", ("b200", "gb200", "h100")),
    ("qwen3", ("h100",)),
    ("qwen3-235b", ("b200", "b300")),
    ("nemotron3-super", ("b200",)),
)
# Models whose recipes give a pipeline layout (set_deepseek_v3_pipeline_model_parallel_layout).
FILLED_STAGES = ("deepseek-v3", "kimi-k2")
# mtp_num_layers.
FURTHER_TOKENS = {"deepseek-v3": 1, "nemotron3-super": 2}


def _deepseek(case: Case) -> tuple[M, ...]:
    if case.gpu == "h100":
        return (M.LATENT_UP, M.MLP)
    if case.release <= FIRST_PRESETS:
        if case.gpu == "gb300" and case.precision != "mxfp8":
            return (M.MLP, M.EXPERT_ACTIVATION)
        return (M.LATENT_UP, M.MLP) if case.gpu == "gb200" and case.precision == "mxfp8" else (M.LATENT_UP,)
    if case.gpu == "gb300":
        if case.precision == "bf16":
            return (M.EXPERT_ACTIVATION,)
        return () if case.fused else (M.LATENT_UP,)
    if case.gpu == "gb200" and case.precision != "bf16" and not case.fused:
        return (M.MLP,)
    return (M.LATENT_UP,)


def _kimi(case: Case) -> tuple[M, ...]:
    return (M.LATENT_UP, M.MLP) if case.gpu == "h100" else (M.LATENT_UP,)


def _gpt_oss(case: Case) -> tuple[M, ...]:
    if case.release <= FIRST_PRESETS or case.fused or case.gpu in ("gb300", "b300"):
        return ()
    return (M.NORMS, M.EXPERT_ACTIVATION)


def _nemotron_nano(case: Case) -> tuple[M, ...]:
    if case.gpu != "h100":
        return ()
    return (M.EXPERTS, M.NORMS) if case.precision == "bf16" else (M.EXPERTS, M.NORMS, M.CORE)


def _nemotron_super(case: Case) -> tuple[M, ...]:
    if case.gpu == "gb200" and case.precision != "nvfp4":
        return (M.NORMS, M.CORE, M.EXPERTS)
    if case.gpu == "b200" and case.precision != "nvfp4":
        return (M.EXPERT_ACTIVATION, M.NORMS, M.CORE)
    return ()


# The first entry that the model's name starts with decides. Qwen3's presets recompute nothing.
PRESETS: tuple[tuple[str, Callable[[Case], tuple[M, ...]]], ...] = (
    ("deepseek-v3", _deepseek),
    ("kimi-k2", _kimi),
    ("gpt-oss", _gpt_oss),
    ("nemotron3-nano", _nemotron_nano),
    ("nemotron3-super", _nemotron_super),
)
