"""Seconds of one step of a generation engine: tokens in, one forward pass, one sampled token per sequence.

A step is bound by reading weights and cache while batches are small and by matrix units while prompts are
prefilled. Each kernel takes the longer of both and at least its launch inside a CUDA graph (Williams et al.,
Roofline, 2009); kernels follow one another, as the layers of a decoder depend on one another.
"""

import math
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from stepcast.cost.collectives import collective_s
from stepcast.cost.collectives.route import route_of
from stepcast.generation.engine import EngineProfile
from stepcast.generation.placement import GenerationFormats, GenerationLayout, cache_bytes_per_token, state_bytes
from stepcast.hardware import Cluster, job_path
from stepcast.ir.arrays import FloatArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.dtype import DType
from stepcast.ir.model import Model
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.weights import UNQUANTISED, Weight, WeightPart
from stepcast.ir.work import CollectiveKind


@dataclass(frozen=True, slots=True)
class DenseProduct:
    """Products of tokens with a weight matrix (outputs, inputs), *count* of them in a model."""

    outputs: int
    inputs: int
    count: int
    dtype: DType
    weight_bytes: float  # of one element


@dataclass(frozen=True, slots=True)
class MixerCosts:
    """The token mixers of one kind in a model, on one rank."""

    count: int
    window: int | None
    read_bytes: float  # of the cache, for each token of context
    selected: int  # keys at most that sparse attention reads after its indexer, 0: all
    indexed_bytes: float  # that the indexer reads for each token of context
    state_bytes: float  # read and written in each step
    decode_flops: float  # for each token of context
    prefill_flops: float  # for each pair of query and key


@lru_cache(maxsize=2048)
def list_products(model: Model, layout: GenerationLayout, formats: GenerationFormats) -> tuple[DenseProduct, ...]:
    """Return the dense products of a rank; matrices of a part with the same input are one kernel (qkv, gate and up)."""
    counts: dict[tuple[Mixer, FeedForward], int] = {}
    for block in model.blocks:
        kind = block.mixer, block.feed_forward
        counts[kind] = counts.get(kind, 0) + 1
    products: dict[tuple[int, int, DType, float], int] = {}
    for (mixer, feed_forward), count in counts.items():
        merged: dict[tuple[str, int, bool], list[tuple[Weight, int]]] = {}
        for weight in model.block_weights(LayerParts(mixer, feed_forward)):
            if weight.is_multiplied and weight.part is not WeightPart.EXPERTS:
                _, outputs, inputs = weight.matrices_on_rank(
                    layout.tp, layout.ep, layout.expert_tp, model.padded_vocab(layout.tp)
                )
                merged.setdefault((weight.part, inputs, bool(weight.inputs_split)), []).append((weight, outputs))
        for (part, inputs, _), members in merged.items():
            quantised = WeightPart(part) not in UNQUANTISED
            dtype = formats.dense if quantised else DType.BF16
            size = formats.weight_bytes(experts=False) if quantised else DType.BF16.bytes
            key = sum(outputs for _, outputs in members), inputs, dtype, size
            products[key] = products.get(key, 0) + count
    return tuple(DenseProduct(key[0], key[1], count, key[2], key[3]) for key, count in products.items())


@lru_cache(maxsize=2048)
def list_mixers(model: Model, layout: GenerationLayout, formats: GenerationFormats) -> tuple[MixerCosts, ...]:
    """Return the token mixers of a rank."""
    heads = -(-model.heads // layout.tp)
    mixers: dict[MixerCosts, int] = {}
    for block in model.blocks:
        if block.mixer is Mixer.NONE:
            continue
        read = cache_bytes_per_token(model, block, layout.tp, formats.cache)
        selected, indexed = 0, 0.0
        decode, prefill = 4.0 * heads * model.head_dim, 4.0 * heads * model.head_dim
        if (latent := model.latent) is not None and block.mixer is Mixer.ATTENTION:
            decode = 2.0 * heads * (2 * latent.kv_rank + latent.rope_dim)
            prefill = 2.0 * heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
            if latent.top_keys:
                selected, indexed = latent.top_keys, float(latent.index_dim + 4)
                read -= indexed
        state = state_bytes(model, block, layout.tp)
        if block.mixer is not Mixer.ATTENTION:
            decode = prefill = 0.0
        costs = MixerCosts(0, block.window, read, selected, indexed, state, decode, prefill)
        mixers[costs] = mixers.get(costs, 0) + 1
    return tuple(replace(costs, count=count) for costs, count in mixers.items())


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
    def _products(self) -> tuple[DenseProduct, ...]:
        return list_products(self.model, self.layout, self.formats)

    @cached_property
    def _mixers(self) -> tuple[MixerCosts, ...]:
        return list_mixers(self.model, self.layout, self.formats)

    @cached_property
    def _bandwidth(self) -> float:
        return self.cluster.node.gpu.memory_bandwidth_bytes_per_s * self.engine.bandwidth_share

    def _rate(self, dtype: DType, share: float) -> float:
        gpu = self.cluster.node.gpu
        runs = dtype if dtype.value in gpu.matrix_flops else DType.BF16
        return min(gpu.best_product_flops(runs), gpu.matrix_peak_flops(runs)) * share

    def tokens_s(self, tokens: FloatArray) -> FloatArray:
        """Return the seconds of everything but attention for *tokens* of one attention rank, without the head."""
        engine, model = self.engine, self.model
        seconds = np.zeros_like(tokens)
        for product in self._products:
            seconds += product.count * self._product_s(tokens, product)
        traffic = 12.0 * tokens * model.hidden * DType.BF16.bytes * model.layers / self._bandwidth
        seconds += traffic + engine.small_kernels * engine.kernel_s * model.layers
        expert_layers = sum(block.feed_forward is FeedForward.EXPERTS for block in model.blocks)
        if expert_layers:
            seconds += expert_layers * self._experts_s(tokens * self.layout.dp)
        return seconds + self._exchange_s(tokens, expert_layers)

    def _product_s(self, tokens: FloatArray, product: DenseProduct) -> FloatArray:
        activations = tokens * (product.inputs + product.outputs) * DType.BF16.bytes
        moved = product.outputs * product.inputs * product.weight_bytes + activations
        flops = 2.0 * tokens * product.outputs * product.inputs
        compute_s = flops / self._rate(product.dtype, self.engine.product_share)
        return np.maximum(moved / self._bandwidth, compute_s) + self.engine.product_s

    def _experts_s(self, tokens: FloatArray) -> FloatArray:
        """Return the seconds of the routed experts of one layer on a rank for the *tokens* of all attention ranks.

        A rank reads the weights of the experts that any token chose: with routing close to even,
        1 - (1 - top_k / count) ** tokens of them.
        """
        experts, layout, formats = self.model.experts, self.layout, self.formats
        assert experts is not None
        width = experts.latent or self.model.hidden
        held = experts.count / layout.ep
        matrices = 3 if self.model.gated else 2
        weights = matrices * width * experts.ffn / layout.expert_tp
        hit = held * (1.0 - (1.0 - experts.top_k / experts.count) ** tokens)
        rows = tokens * experts.top_k / layout.ep
        moved = hit * weights * formats.weight_bytes(experts=True) + 4.0 * rows * width * DType.BF16.bytes
        flops = 2.0 * rows * weights
        compute_s = flops / self._rate(formats.experts, self.engine.expert_share)
        return np.maximum(moved / self._bandwidth, compute_s) + 4.0 * self.engine.kernel_s

    @cached_property
    def _domain(self) -> int:
        """GPUs of one NVLink domain."""
        return self.cluster.node.gpus * self.cluster.topology.scale_up_nodes

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
            seconds += expert_layers * 2.0 * self._move_s(CollectiveKind.ALL_GATHER, size * layout.dp, layout.width)
        if layout.tp > 1:
            seconds += halves * self._move_s(CollectiveKind.ALL_REDUCE, size, layout.tp)
        if layout.pp > 1:
            seconds += (layout.pp - 1) * self._move_s(CollectiveKind.ALL_GATHER, size, 2)
        return seconds

    def _move_s(self, kind: CollectiveKind, size: FloatArray, ranks: int) -> FloatArray:
        """Return the seconds of a collective: the engine's own kernels inside an NVLink domain, NCCL outside."""
        if ranks > self._domain:
            return np.asarray(collective_s(kind, size, route_of(job_path(self.cluster, ranks), self.cluster)))
        passes = 2.0 if kind is CollectiveKind.ALL_REDUCE else 1.0
        link = self.cluster.node.fabric.link.bandwidth_bytes_per_s * 0.8
        latency_s = self.engine.reduce_s * (1.0 + 0.1 * math.log2(ranks))
        return latency_s + passes * size * (ranks - 1) / ranks / link

    def attention_s(self, batch: FloatArray, context: FloatArray) -> FloatArray:
        """Return the seconds of the token mixers of a decode step: *batch* sequences of a mean *context*."""
        seconds = np.zeros(np.broadcast(batch, context).shape)
        for mixer in self._mixers:
            seen = context if mixer.window is None else np.minimum(context, mixer.window)
            indexed = seen * mixer.indexed_bytes
            if mixer.selected:
                seen = np.minimum(seen, mixer.selected)
            moved = batch * (seen * mixer.read_bytes + indexed + 2.0 * mixer.state_bytes)
            flops = batch * seen * mixer.decode_flops
            compute_s = flops / self._rate(self.formats.cache, self.engine.attention_share)
            seconds += mixer.count * (np.maximum(moved / self._bandwidth, compute_s) + 2.0 * self.engine.kernel_s)
        return seconds

    def prefill_attention_s(self, tokens: FloatArray, before: FloatArray) -> FloatArray:
        """Return the seconds of the token mixers for *tokens* of one prompt after *before* of it were prefilled."""
        seconds = np.zeros(np.broadcast(tokens, before).shape)
        for mixer in self._mixers:
            pairs = tokens * (before + tokens / 2.0)
            if limit := mixer.window or mixer.selected:
                pairs = np.minimum(pairs, tokens * limit)
            rate = self._rate(self.formats.cache, self.engine.attention_share)
            moved = tokens * (mixer.read_bytes + mixer.state_bytes / 64.0)
            seconds += mixer.count * (pairs * mixer.prefill_flops / rate + moved / self._bandwidth)
        return seconds

    def head_s(self, sequences: FloatArray) -> FloatArray:
        """Return the seconds of the output projection and sampling for one token of each sequence."""
        model, tp = self.model, self.layout.tp
        product = DenseProduct(-(-model.vocab // tp), model.hidden, 1, DType.BF16, DType.BF16.bytes)
        seconds = self._product_s(sequences, product)
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

    def mixed_s(self, batch: FloatArray, context: FloatArray, chunk: FloatArray, before: FloatArray) -> FloatArray:
        """Return the seconds of a step that prefills *chunk* tokens and decodes *batch* sequences, which may be 0."""
        batch, chunk = np.asarray(batch, np.float64), np.asarray(chunk, np.float64)
        gpu_s = self.tokens_s(batch + chunk) + self.prefill_attention_s(chunk, before) + self.head_s(batch + 1.0)
        gpu_s = gpu_s * self.engine.prefill_pace
        gpu_s = gpu_s + np.where(batch > 0, self.attention_s(batch, np.asarray(context, np.float64)), 0.0)
        return self._with_host(gpu_s, batch + 1.0, batch + chunk)

    def _with_host(self, gpu_s: FloatArray, sequences: FloatArray, tokens: FloatArray) -> FloatArray:
        """Return a step with the host's share; outside CUDA graphs the GPU may wait for launches."""
        engine = self.engine
        launched_s = engine.eager_layer_s * self.model.layers
        gpu_s = np.where(tokens > engine.graph_batch, np.maximum(gpu_s, launched_s), gpu_s)
        return gpu_s + engine.step_s + engine.sequence_s * sequences


@lru_cache(maxsize=512)
def step_times(
    model: Model,
    cluster: Cluster,
    layout: GenerationLayout,
    formats: GenerationFormats,
    engine: EngineProfile,
    speculation: Speculation = NO_SPECULATION,
) -> StepTimes:
    """Return the step times of an engine, built once."""
    return StepTimes(model, cluster, layout, formats, engine, speculation)
