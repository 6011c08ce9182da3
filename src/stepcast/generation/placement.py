"""A copy of a model for generation: its engine, its layout on GPUs, its number formats, and its memory.

Engine profiles hold the decisions and overheads of vLLM, SGLang and TensorRT-LLM, as data with sources.
"""

import tomllib
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from stepcast.hardware.catalog import data_names
from stepcast.hardware.cluster import Gpu
from stepcast.inputs.source import DATA
from stepcast.ir.model import Model
from stepcast.ir.model_parts import LayerParts, Mixer
from stepcast.ir.tables import Amount, Count, Positive, Share, TableError, convert_table
from stepcast.ir.types import DType, Size, dataclass, require
from stepcast.units import GIB

ENGINES = {"tensorrt-llm": "trtllm", "trt-llm": "trtllm", "tensorrt_llm": "trtllm"}  # other names of engines


class EngineProfile(Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """The decisions of a generation engine that change time or memory; seconds unless the name has a unit.

    *step_s* passes on the host between two steps and is hidden by nothing (scheduling, sampling, input
    preparation); *sequence_s* is added for each sequence of the batch. *request_s* is the way of a request to
    the first step and of its first token back (HTTP, tokenizer, router). *small_kernels* are the launches of a
    layer that are neither products nor attention, *kernel_s* the shortest time of each kernel of a CUDA graph.
    """

    name: str
    memory_share: Share  # of the GPU that weights and cache may fill
    reserved_gib: Amount  # context, graphs and activations, outside that share or inside it as the engine counts
    prefill_tokens: Count  # tokens of one step at most (chunked prefill cuts longer prompts)
    sequences: Count  # running at once at most
    mixes_prefill: bool  # decode tokens ride along in steps that prefill
    graph_batch: Count  # the largest decode batch that runs as a CUDA graph
    step_s: Amount
    sequence_s: Amount
    request_s: Amount
    waves: Positive  # requests of a client that share the queue of all clients' first ones, or of such as stay in step
    kernel_s: Amount
    small_kernels: Amount
    eager_layer_s: Amount  # host time of a layer outside CUDA graphs, which the GPU waits for if it is faster
    flash: bool  # decode attention is flash decoding, not TensorRT-LLM's kernel
    # Times over those of public tables: linear layers, fused experts, all-reduces, and steps that prefill.
    product_pace: Positive
    expert_pace: Positive
    reduce_pace: Positive
    prefill_pace: Positive
    sources: dict[str, str] = {}


@lru_cache(maxsize=16)
def load_engine(name: str) -> EngineProfile:
    """Return the profile *name*, or that of a TOML file."""
    own, known = ENGINES.get(name.lower(), name.lower()), data_names("engines")
    path = DATA / "engines" / f"{own}.toml" if own in known else Path(name)
    if not path.is_file():
        raise ValueError(f"unknown engine {name!r}; choose from {', '.join(known)}, or give a TOML file")
    try:
        return convert_table(tomllib.loads(path.read_text(encoding="utf-8")), EngineProfile)
    except (TableError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


# Recipes of linear layers by the format of weights.
RECIPES = {DType.FP8: "fp8", DType.MXFP8: "fp8-block", DType.NVFP4: "nvfp4", DType.FP4: "nvfp4"}


@dataclass(frozen=True, slots=True)
class GenerationLayout:
    """The GPUs of an engine: *tp* ranks share attention and dense weights, *dp* groups of them serve different
    sequences but share the experts (attention data parallelism), *ep* of the tp x dp ranks hold different experts,
    *pp* pipeline stages. *replicas* engines run independently.
    """

    tp: Size = 1
    pp: Size = 1
    dp: Size = 1
    ep: Size = 1
    replicas: Size = 1

    def __post_init__(self) -> None:
        require(self.width % self.ep == 0, f"ep {self.ep} does not divide tp x dp = {self.width}")

    @property
    def width(self) -> int:
        """GPUs of one pipeline stage."""
        return self.tp * self.dp

    @property
    def expert_tp(self) -> int:
        return self.width // self.ep

    @property
    def engine_gpus(self) -> int:
        return self.width * self.pp

    @property
    def gpus(self) -> int:
        return self.engine_gpus * self.replicas

    def __str__(self) -> str:
        parts = [f"{name} {getattr(self, name)}" for name in ("tp", "pp", "dp", "ep", "replicas")]
        return ", ".join(part for part in parts if not part.endswith(" 1")) or "one GPU"


@dataclass(frozen=True, slots=True)
class GenerationFormats:
    """Number formats of dense weights, routed experts and the KV cache; *bits* of int4 weights are 4.5 with scales."""

    dense: DType = DType.BF16
    experts: DType = DType.BF16
    cache: DType = DType.BF16
    int4: bool = False  # weights alone in 4 bits (AWQ, GPTQ); products run in bf16

    def weight_bytes(self, experts: bool) -> float:
        """Return the bytes of one quantised weight with its scales; fp8 has one scale for 128 x 128 weights."""
        dtype = self.experts if experts else self.dense
        scales = {DType.NVFP4: 1 / 16, DType.FP4: 1 / 32, DType.MXFP8: 1 / 32}.get(dtype, 0.0)
        return 0.5 + 1 / 32 if self.int4 else dtype.bytes + scales

    def recipe(self, experts: bool) -> str:
        """Return the recipe of linear layers or experts in the words of ``cost.serving``."""
        return "int4-weights" if self.int4 else RECIPES.get(self.experts if experts else self.dense, "bf16")

    @property
    def cache_word(self) -> str:
        return "fp8" if self.cache.bytes == 1 else "bf16"


def cache_bytes_per_token(model: Model, block: LayerParts, tp: int, cache: DType) -> float:
    """Return the bytes that one token adds to one rank's KV cache in a layer; 0 where the layer has a state instead.

    Latent attention stores its compressed vector and the shared rotary key on every rank (DeepSeek-V2, 2024,
    section 2.1), and sparse attention the keys of its indexer in fp8 with a scale of four bytes.
    """
    if block.mixer is not Mixer.ATTENTION:
        return 0.0
    if (latent := model.latent) is not None:
        indexer = latent.index_dim + 4 if latent.top_keys else 0
        return (latent.kv_rank + latent.rope_dim) * cache.bytes + indexer
    return 2.0 * -(-model.kv_heads // tp) * model.head_dim * cache.bytes


def state_bytes(model: Model, block: LayerParts, tp: int) -> float:
    """Return the bytes of a sequence's state in a recurrent layer on one rank: fp32, convolution inputs bf16."""
    size = 0
    if block.mixer is Mixer.DELTA and (delta := model.delta) is not None:
        size = delta.value_heads * delta.key_dim * delta.value_dim * 4 + delta.channels * (delta.conv - 1) * 2
    elif block.mixer is Mixer.MAMBA and (hybrid := model.hybrid) is not None:
        convolved = (hybrid.inner + 2 * hybrid.groups * hybrid.state) * (hybrid.conv - 1) * 2
        size = hybrid.inner * hybrid.state * 4 + convolved
    elif block.mixer is Mixer.SELECTIVE and (selective := model.selective) is not None:
        size = selective.inner * (selective.state * 4 + 3 * 2)
    return size / tp


@dataclass(frozen=True, slots=True)
class GenerationMemory:
    """The memory of the fullest GPU of an engine, and the tokens and sequences that fit into its cache."""

    weight_bytes: float
    reserved_bytes: float
    cache_bytes: float
    token_bytes: float  # of the cache, of layers without a window
    window_bytes: tuple[tuple[int, float], ...]  # (window, bytes per token) of layers with one
    sequence_bytes: float  # recurrent states
    gpu_bytes: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """Bytes of weights, reserved memory and cache."""
        return self.weight_bytes, self.reserved_bytes, self.cache_bytes

    def held_bytes(self, tokens: float) -> float:
        """Return the cache of a sequence of *tokens*."""
        windows = sum(min(window, tokens) * size for window, size in self.window_bytes)
        return tokens * self.token_bytes + windows + self.sequence_bytes

    def sequences_that_fit(self, tokens: float) -> float:
        """Return how many sequences of a mean of *tokens* the cache of one attention rank holds."""
        return self.cache_bytes / max(self.held_bytes(tokens), 1.0)


def generation_memory(
    model: Model,
    layout: GenerationLayout,
    formats: GenerationFormats,
    gpu: Gpu,
    engine: EngineProfile,
    memory_share: float | None = None,
) -> GenerationMemory:
    """Return the memory of an engine's GPUs; the cache gets what weights and reserved memory leave."""
    stages = range(0, model.layers, -(-model.layers // layout.pp))
    weights, held = 0.0, list[tuple[float, float, dict[int, float]]]()  # of caches, of states, of windows
    for start in stages:
        layers = range(start, min(start + stages.step, model.layers))
        shard = model.shard_of(
            layers, tp=layout.tp, ep=layout.ep, expert_tp=layout.expert_tp, embedding=start == 0, head=True
        )
        stage_weights = (shard.dense - shard.unquantised) * formats.weight_bytes(experts=False)
        stage_weights += shard.experts * formats.weight_bytes(experts=True)
        stage_weights += shard.unquantised * DType.BF16.bytes
        stage_cache, stage_states, stage_windows = 0.0, 0.0, dict[int, float]()
        for layer in layers:
            block = model.blocks[layer]
            size = cache_bytes_per_token(model, block, layout.tp, formats.cache)
            stage_states += state_bytes(model, block, layout.tp)
            if block.window is None:
                stage_cache += size
            else:
                stage_windows[block.window] = stage_windows.get(block.window, 0.0) + size
        weights = max(weights, stage_weights)
        held.append((stage_cache, stage_states, stage_windows))
    cache, states, windows = max(reversed(held), key=lambda stage: stage[0] + sum(stage[2].values()) + stage[1])
    share, reserved = engine.memory_share if memory_share is None else memory_share, engine.reserved_gib * GIB
    free = max(share * gpu.memory_bytes - weights - reserved, 0.0)
    return GenerationMemory(
        weights, reserved, free, cache, tuple(sorted(windows.items())), states, gpu_bytes=gpu.memory_bytes
    )
