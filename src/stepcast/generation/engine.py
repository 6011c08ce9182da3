"""An engine that generates: its profile, its layout on GPUs, its number formats, its memory and the seconds of a step.

Engine profiles hold the decisions and overheads of vLLM, SGLang and TensorRT-LLM, as data with sources. A step takes
tokens in and samples one token per sequence after one forward pass. Its operators are those of ``cost.serving`` and
``cost.experts``, as public tables measured them one by one. They follow one another, as the layers of a decoder depend
on one another; an engine adds its small kernels and its host.
"""

import tomllib
from collections import Counter
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from msgspec import Struct

from stepcast.cost import serving
from stepcast.cost.collectives.choose import collective_s
from stepcast.cost.collectives.route import route_of
from stepcast.cost.exchange import PHASES, TokenCopies, exchange_s
from stepcast.cost.experts import TILES, RankLoad, fused_experts_s, served_kernel
from stepcast.cost.power import SUSTAINED
from stepcast.cost.price import Number
from stepcast.hardware import Cluster
from stepcast.hardware.catalog import data_names
from stepcast.hardware.cluster import Gpu
from stepcast.hardware.path import job_path
from stepcast.inputs.source import DATA
from stepcast.ir.architecture import UNQUANTISED, WeightPart
from stepcast.ir.arrays import FloatArray
from stepcast.ir.model import Model
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.tables import Amount, Count, Positive, Share, TableError, convert_table
from stepcast.ir.types import DType, Size, dataclass, require
from stepcast.ir.work import CollectiveKind
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
    require(path.is_file(), f"unknown engine {name!r}; choose from {', '.join(known)}, or give a TOML file")
    try:
        return convert_table(tomllib.loads(path.read_text(encoding="utf-8")), EngineProfile)
    except (TableError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


# Recipes of linear layers by the format of weights.
RECIPES = {DType.FP8: "fp8-block", DType.MXFP8: "fp8-block", DType.NVFP4: "nvfp4", DType.FP4: "nvfp4"}


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
    """Number formats of dense weights, routed experts and the KV cache; int4 weights have 4.25 bits with scales.

    Experts in fp4 are those of mxfp4: weights alone, with a scale for 32 (OpenAI's gpt-oss). Those in int4 have a bf16
    scale for 32 where all else is in bf16 (Kimi K2.5).
    """

    dense: DType = DType.BF16
    experts: DType = DType.BF16
    cache: DType = DType.BF16
    int4: bool = False  # weights alone in 4 bits (AWQ, GPTQ); products run in bf16
    int4_experts: bool = False  # the same of experts alone

    def weight_bytes(self, experts: bool) -> float:
        """Return the bytes of one quantised weight with its scales; fp8 has one scale for 128 x 128 weights."""
        dtype = self.experts if experts else self.dense
        scales = {DType.NVFP4: 1 / 16, DType.FP4: 1 / 32, DType.MXFP8: 1 / 32}.get(dtype, 0.0)
        if self.int4_experts and experts:
            return 0.5 + 2 / 32
        return 0.5 + 1 / 32 if self.int4 else dtype.bytes + scales

    @property
    def word(self) -> str:
        """The option that means these formats."""
        if self.int4_experts:
            return "int4-experts"
        return "int4" if self.int4 else "mxfp4" if self.experts is DType.FP4 else str(self.dense)

    def recipe(self, experts: bool) -> str:
        """Return the recipe of linear layers or experts in the words of ``cost.serving``."""
        if experts and self.experts is DType.FP4:
            return "mxfp4-weights"
        in_int4 = self.int4 or (self.int4_experts and experts)
        return "int4-weights" if in_int4 else RECIPES.get(self.experts if experts else self.dense, "bf16")

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
        ends = {"embedding": start == 0, "head": layers.stop == model.layers}
        shard = model.shard_of(layers, tp=layout.tp, ep=layout.ep, expert_tp=layout.expert_tp, **ends)
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
    return GenerationMemory(weights, reserved, free, cache, tuple(sorted(windows.items())), states, gpu.memory_bytes)


# Kernels of the indexer of sparse attention in DeepSeek-V3.2's model.py (2025): three projections, a norm, rotary
# embedding, two Hadamard transforms, two quantisations, the write to the cache, scores and their top-k.
INDEXER_KERNELS = 12
FP8_TOKEN_BYTES = 1.0 + 4.0 / 128.0  # an element, with a scale for each 128
BANDWIDTH = 0.9  # share of the memory bandwidth that norms, states and sampling reach


@lru_cache(maxsize=2048)
def list_products(
    model: Model, layout: GenerationLayout, formats: GenerationFormats
) -> dict[tuple[int, int, str], int]:
    """Return the dense products of a rank as (outputs, inputs, recipe) -> how often a model has them; matrices of a
    part with the same input are one kernel (qkv, gate and up).
    """
    products: Counter[tuple[int, int, str]] = Counter()
    split = layout.tp, layout.ep, layout.expert_tp, model.padded_vocab(layout.tp)
    kinds = Counter((block.mixer, block.feed_forward) for block in model.blocks)
    for (mixer, feed_forward), count in kinds.items():
        merged: Counter[tuple[WeightPart, int, bool]] = Counter()
        for weight in model.block_weights(LayerParts(mixer, feed_forward)):
            if weight.is_multiplied and weight.part is not WeightPart.EXPERTS:
                _, outputs, inputs = weight.matrices_on_rank(*split)
                merged[weight.part, inputs, bool(weight.inputs_split)] += outputs
        for (part, inputs, _), outputs in merged.items():
            recipe = "bf16" if part in UNQUANTISED else formats.recipe(experts=False)
            products[outputs, inputs, recipe] += count
    return dict(products)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding by multi-token prediction: *tokens* drafted in each step, each accepted with a chance of
    *acceptance* if those before it were. DeepSeek-V3 (2024, section 5.4.3) accepts 85 to 90 % of one drafted token.
    """

    tokens: int = 0
    acceptance: float = 0.85

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a sequence gets in a step."""
        return sum(self.acceptance**drafted for drafted in range(self.tokens + 1))


NO_SPECULATION = Speculation()


@dataclass(frozen=True)
class StepTimes:
    """The seconds of steps of one engine, for arrays of batches and contexts."""

    model: Model
    cluster: Cluster
    layout: GenerationLayout
    formats: GenerationFormats
    engine: EngineProfile
    speculation: Speculation = NO_SPECULATION

    @cached_property
    def _mixers(self) -> dict[tuple[Mixer, int | None], int]:
        """Kinds of token mixers, with their windows, and the layers that have them."""
        return Counter((block.mixer, block.window) for block in self.model.blocks if block.mixer is not Mixer.NONE)

    @cached_property
    def _bandwidth(self) -> float:
        return self.cluster.gpu.memory_bandwidth_bytes_per_s * BANDWIDTH

    def tokens_s(self, tokens: FloatArray) -> FloatArray:
        """Return the seconds of everything but attention for *tokens* of one attention rank, without the head."""
        engine, model = self.engine, self.model
        seconds = np.zeros_like(tokens)
        for (outputs, inputs, recipe), count in list_products(self.model, self.layout, self.formats).items():
            seconds += count * self._linear_s(tokens, outputs, inputs, recipe)
        traffic = 12.0 * tokens * model.hidden * DType.BF16.bytes * model.layers / self._bandwidth
        seconds += traffic + engine.small_kernels * engine.kernel_s * model.layers
        expert_layers = model.expert_layers
        if expert_layers:
            seconds += expert_layers * self._experts_s(tokens * self.layout.dp)
        return seconds + self._exchange_s(tokens, expert_layers)

    def _linear_s(self, tokens: FloatArray, outputs: int, inputs: int, recipe: str) -> FloatArray:
        sizes, gpu = (tokens.ravel(), float(outputs), float(inputs)), self.cluster.gpu
        seconds = serving.linear_s(*sizes, gpu, recipe, load=SUSTAINED, substitute=True)
        read_s = outputs * inputs * serving.LINEAR_FORMATS[recipe].weight_bytes / gpu.memory_bandwidth_bytes_per_s
        return np.maximum(np.asarray(seconds).reshape(tokens.shape) * self.engine.product_pace, read_s)

    def _experts_s(self, tokens: FloatArray) -> FloatArray:
        """Return the seconds of the routed experts of one layer on a rank for the *tokens* of all attention ranks.

        A rank reads the weights of the experts that any token chose: with routing close to even,
        1 - (1 - top_k / count) ** tokens of them.
        """
        experts, layout, gpu = self.model.experts, self.layout, self.cluster.gpu
        assert experts is not None
        flat = tokens.ravel()
        rows = flat * experts.top_k / layout.ep
        active = experts.count / layout.ep * (1.0 - (1.0 - experts.top_k / experts.count) ** flat)
        tiles = np.array(TILES, np.float64)
        padded = np.ceil(rows[:, None] / active[:, None] / tiles) * tiles * active[:, None]
        width, inner = float(experts.latent or self.model.hidden), experts.ffn / layout.expert_tp
        word, fit = served_kernel(self.formats.recipe(experts=True), serving.stand_in(gpu.architecture))
        sizes = flat, float(experts.top_k), width, inner, 3.0 if self.model.gated else 2.0
        load = RankLoad(rows, active, padded, experts.count / layout.ep)
        seconds = fused_experts_s("", word, *sizes, load, gpu, fit) - fit.start_s
        launched_s = min(4.0 * self.engine.kernel_s, fit.start_s)  # constants of some kernels have it in *depth_s*
        return seconds.reshape(tokens.shape) * self.engine.expert_pace + launched_s

    def _exchange_s(self, tokens: FloatArray, expert_layers: int) -> FloatArray:
        """Return the seconds of all-reduces after both halves of each layer, or of the exchange around experts."""
        layout, model = self.layout, self.model
        halves = sum(
            (block.mixer is not Mixer.NONE) + (block.feed_forward is not FeedForward.NONE) for block in model.blocks
        )
        seconds = np.zeros_like(tokens)
        size = tokens * model.hidden * DType.BF16.bytes
        if layout.dp > 1 and expert_layers:
            halves -= expert_layers
            gathered_s = 2.0 * self._move_s(CollectiveKind.ALL_GATHER, size * layout.dp, layout.width)
            seconds += expert_layers * np.minimum(gathered_s, self._deepep_s(tokens))
        if layout.tp > 1:
            seconds += halves * self._move_s(CollectiveKind.ALL_REDUCE, size, layout.tp)
        if layout.pp > 1:
            seconds += (layout.pp - 1) * self._move_s(CollectiveKind.ALL_GATHER, size, 2)
        return seconds

    def _deepep_s(self, tokens: FloatArray) -> FloatArray:
        """Return the seconds of dispatch and combine by DeepEP's low-latency kernels, which send a token to each of its
        experts; infinite where ranks share experts.
        """
        experts, layout, cluster = self.model.experts, self.layout, self.cluster
        if experts is None or layout.ep < layout.width:
            return np.full(tokens.shape, np.inf)
        route = route_of(job_path(cluster, layout.width), cluster)
        remote = experts.top_k * (route.nodes - 1) / route.nodes
        copies, width = TokenCopies(experts.top_k, remote, experts.count), float(experts.latent or self.model.hidden)
        arguments, seconds = (copies, route, 1.0, cluster.gpu.architecture), np.zeros_like(tokens)
        for phase, size in zip(PHASES, (FP8_TOKEN_BYTES if self.formats.experts.bytes < 2 else 2.0, 2.0), strict=True):
            seconds += exchange_s("deepep-low-latency", phase, tokens / layout.tp, width, size, *arguments)
        return seconds

    def _move_s(self, kind: CollectiveKind, size: FloatArray, ranks: int) -> FloatArray:
        """Return the seconds of a collective: inside an NVLink domain the engine's own kernels, where all-reduces are
        not faster with NCCL (long prompts), and NCCL outside.
        """
        cluster, is_reduce = self.cluster, kind is CollectiveKind.ALL_REDUCE
        is_outside, link = ranks > cluster.domain_gpus, cluster.node.fabric.link.bandwidth_bytes_per_s
        if is_outside or is_reduce:
            nccl_s = np.asarray(collective_s(kind, size, route_of(job_path(cluster, ranks), cluster)))
            own_s = np.inf if is_outside else serving.custom_reduce_s(size, ranks, cluster.gpu, link)
            return np.minimum(self.engine.reduce_pace * own_s, nccl_s)
        return 2.0 * self.engine.kernel_s + size * (ranks - 1) / ranks / (0.8 * link)

    def attention_s(self, batch: FloatArray, context: FloatArray) -> FloatArray:
        """Return the seconds of the token mixers of a decode step: *batch* sequences of a mean *context*."""
        model, gpu, tp = self.model, self.cluster.gpu, self.layout.tp
        batch, context = np.maximum(batch, 1.0), np.maximum(context, 1.0)
        seconds = np.zeros(np.broadcast(batch, context).shape)
        heads, cache = float(-(-model.heads // tp)), self.formats.cache_word
        for (mixer, window), count in self._mixers.items():
            if mixer is not Mixer.ATTENTION:
                state = 2.0 * batch * state_bytes(model, LayerParts(mixer, FeedForward.NONE), tp)
                seconds += count * (state / self._bandwidth + 2.0 * self.engine.kernel_s)
            elif (latent := model.latent) is not None:
                seen = np.minimum(context, latent.top_keys or np.inf)
                seconds += count * serving.mla_decode_s(batch, seen, heads, gpu, cache)
                if latent.top_keys:  # an indexer in fp8 selects the keys that are read
                    indexed_s = batch * context * (latent.index_dim + 4) / self._bandwidth
                    seconds += count * (indexed_s + INDEXER_KERNELS * self.engine.kernel_s)
            else:
                sizes, limit = (heads, float(-(-model.kv_heads // tp)), float(model.head_dim)), float(window or 0)
                seconds += count * serving.decode_s(batch, context, *sizes, gpu, cache, limit, flash=self.engine.flash)
        return seconds

    def _prefill_s(self, tokens: FloatArray) -> FloatArray:
        """Return the seconds of the token mixers for the first *tokens* of one prompt."""
        model, gpu, tp = self.model, self.cluster.gpu, self.layout.tp
        seconds = np.zeros_like(tokens)
        heads, cache = float(-(-model.heads // tp)), self.formats.cache_word
        for (mixer, window), count in self._mixers.items():
            if mixer is not Mixer.ATTENTION:
                state = state_bytes(model, LayerParts(mixer, FeedForward.NONE), tp)
                seconds += count * tokens * state / 64.0 / self._bandwidth
            elif (latent := model.latent) is not None:
                own = serving.mla_prefill_s(1.0, tokens, heads, gpu, cache)
                if latent.top_keys:
                    own = own * np.minimum(1.0, 2.0 * latent.top_keys / tokens)
                seconds += count * own
            else:
                sizes = heads, float(-(-model.kv_heads // tp)), float(model.head_dim)
                seconds += count * serving.prefill_s(1.0, tokens, *sizes, gpu, "bf16", cache, float(window or 0))
        return seconds

    def head_s(self, sequences: FloatArray) -> FloatArray:
        """Return the seconds of the output projection and sampling for one token of each sequence."""
        model, tp = self.model, self.layout.tp
        seconds = self._linear_s(sequences, -(-model.vocab // tp), model.hidden, "bf16")
        return seconds + 4.0 * sequences * model.vocab * 4.0 / self._bandwidth

    def decode_s(self, batch: FloatArray, context: FloatArray) -> FloatArray:
        """Return the seconds in which each of *batch* sequences of an attention rank gets one token on average.

        Speculation checks all drafted tokens in one step, which reads the cache once; each draft takes a layer more.
        """
        batch, context = np.asarray(batch, np.float64), np.asarray(context, np.float64)
        drafted, tokens = self.speculation.tokens, batch * (1.0 + self.speculation.tokens)
        gpu_s = self.tokens_s(tokens) + self.attention_s(batch, context) + self.head_s(tokens)
        if drafted:
            gpu_s = gpu_s + drafted * (self.tokens_s(batch) / self.model.layers + self.head_s(batch))
        return self._with_host(gpu_s, batch, tokens) / self.speculation.tokens_per_step

    def mixed_s(
        self, batch: FloatArray, context: FloatArray, chunk: FloatArray, before: FloatArray, prompts: Number = 1.0
    ) -> FloatArray:
        """Return the seconds of a step that prefills *chunk* tokens of each of *prompts* and decodes *batch* sequences,
        which may be 0.
        """
        batch, chunk = np.asarray(batch, np.float64), np.asarray(chunk, np.float64)
        tokens, sequences = batch + prompts * chunk, batch + prompts
        # Attention of a chunk is that of all tokens so far at once, less that of those before.
        attention_s = self._prefill_s(before + chunk)
        own_s = np.maximum(attention_s - self._prefill_s(np.maximum(before, 1.0)), 0.0)
        attention_s = np.where(before > 0, own_s, attention_s)
        gpu_s = self.tokens_s(tokens) + prompts * attention_s + self.head_s(sequences)
        gpu_s = gpu_s * self.engine.prefill_pace
        gpu_s = gpu_s + np.where(batch > 0, self.attention_s(batch, np.asarray(context, np.float64)), 0.0)
        return self._with_host(gpu_s, sequences, tokens)

    def _with_host(self, gpu_s: FloatArray, sequences: FloatArray, tokens: FloatArray) -> FloatArray:
        """Return a step with the host's share; outside CUDA graphs the GPU may wait for launches."""
        engine = self.engine
        launched_s = engine.eager_layer_s * self.model.layers
        gpu_s = np.where(tokens > engine.graph_batch, np.maximum(gpu_s, launched_s), gpu_s)
        return gpu_s + engine.step_s + engine.sequence_s * sequences


step_times = lru_cache(maxsize=512)(StepTimes)  # of an engine, built once
