"""Seconds of operators as inference engines run them: linear layers with quantised inputs, attention against a cache.

Constants are those of public tables of TensorRT-LLM (``data/fits/operators.toml``, by GPU architecture and number
format), measured in short bursts from CUDA graphs at the full clock. ``cost.matmul`` and ``cost.attention`` hold
the operators of training, fitted apart. All functions take sizes as numbers or arrays of one length.

- ``linear_s``: a linear layer of any number of rows; scaled formats include the quantisation of the input.
- ``quantize_s``: that quantisation by itself.
- ``prefill_s``, ``decode_s``: attention of new tokens, with rotary embedding and the write into the cache, and of one
  token per sequence against a cache. ``mla_prefill_s``, ``mla_decode_s``: the same with DeepSeek's latent cache.

- ``sequence_kernel_s``: causal convolutions and gated delta rules, forward, of prompts and of single tokens.

Products are ``cost.matmul``'s tiles and waves. Attention of new tokens is work per score, the wait for the longest
tile, and a start per query tile (rotary embedding, quantisation and cache write are part of it). Decoding gives each
sequence and key head to a thread block, which takes a time of its own and one per cached token; blocks share the
multiprocessors and the memory. Kernels that serve one query head per block read the cache again for each head.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import numpy as np
from msgspec import Struct, to_builtins

from stepcast.cost.fits import AtLeastOne, MatmulFit, default_fit
from stepcast.cost.matmul import matmul_s
from stepcast.cost.power import Load
from stepcast.cost.price import Number, cached_fraction, matrix_rates
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.cluster import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.tables import Amount, Positive, Share, constants, convert_table
from stepcast.ir.types import DType, FactDict, Facts, require

Fit = TypeVar("Fit")

TRAINING_GPU = "h200"  # on which operators of training were measured
BURST = Load(0.0, repeats=6.0)  # a few calls, as the tables were measured
HEAD_TILE, NARROW_HEAD, WIDE_HEAD = 64.0, 128.0, 256.0
PANEL = 128.0  # columns of weights that a multiprocessor goes through at once
SPLIT_TOKENS = 128.0  # of a context are not divided among thread blocks
# DeepSeek's latent attention: per token and rank one latent vector, part of it with rotary embedding.
LATENT_KEY, LATENT_VALUE, MLA_KEY, MLA_VALUE = 576.0, 512.0, 192.0, 128.0
BF16_BYTES = 2.0
FLASH: dict[str, float] = constants("serving")
WARM_UP_S = 0.008  # of attention under the power limit, as in data/fits/power.toml


class LinearFormat(Struct, frozen=True):
    """A recipe of linear layers: the format of products, bytes of a weight, and the quantisations of the input."""

    product: DType
    weight_bytes: float
    quantise: tuple[str, ...] = ()


LINEAR_FORMATS = convert_table(constants("linear_formats"), dict[str, LinearFormat])


class LinearFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of linear layers in one format: those of products, and around them."""

    product: MatmulFit  # latency_s is that of the launch from a graph
    cached_speedup: AtLeastOne  # of weights that are in the L2 cache
    joule_per_flop: Positive
    warm_up_s: Positive
    quantise_factor: Amount  # time of a block quantisation over that of a cast to fp8
    depth_s: Amount = 0.0  # for a tile to wait for weights that are not in the cache, for each row of them


class QuantizeFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of finding a scale, or of casting by a known one."""

    latency_s: Amount
    bandwidth_efficiency: Share
    cached_speedup: AtLeastOne
    cached_share: Positive  # of the L2 cache that the tensors may fill
    elements_per_clock: Positive
    row_clocks: Amount


class PrefillFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of attention of new tokens."""

    efficiency: Share
    flops_per_score: Amount
    tail: Amount  # share of the longest query tile during which the others wait
    memory_exposure: Amount  # share of reading and writing queries, keys, values and result that nothing hides
    cache_write: Amount  # and of writing the cache
    tile_clocks: Amount  # of a multiprocessor, per query tile of heads 128 wide
    window_margin: Amount  # tiles of keys beyond a window that are worked on
    narrow: Positive  # time per operation of heads below 128, from 256 on and above, over those of 128
    wide: Positive
    widest: Positive
    joule_per_flop: Positive
    latency_s: Amount
    query_tile: Positive = 128.0  # queries that a thread block serves; 64 where shared memory is small
    cached_share: Amount = 0.0  # of the L2 cache from which tensors of this size are read and written instead


class DecodeFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of attention of one token per sequence against a cache."""

    latency_s: Amount
    bandwidth_efficiency: Share
    cached_speedup: AtLeastOne
    cached_share: Positive
    efficiency: Positive  # of the matrix peak
    block_clocks: Amount  # of a block that serves all query heads of a key head
    token_clocks: Amount  # and of each cached token in it, for heads 128 wide
    head_block_clocks: Amount  # of a block that serves one query head
    head_token_clocks: Amount
    most_grouped: Amount  # query heads of a key head that one block can serve
    tile_heads: Positive  # query heads of a key head that a block serves at once
    window_margin: Amount  # tokens beyond a window that are read: its ends are not those of tiles
    lone: Amount  # share of one block's time that nothing hides
    sharpness: Positive  # of the maximum of computing and moving
    divides: bool = True  # a long context among idle multiprocessors; the latent kernels of Ampere and Ada do not


class SequenceFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of a kernel along the sequence."""

    latency_s: Amount
    bandwidth_efficiency: Share
    sequence_clocks: Amount  # of each sequence and channel (or head)
    unit_clocks: Amount  # of each token and channel, or each chunk and head
    step_clocks: Amount  # of each chunk that waits for the one before


class ReduceFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of all-reduces by engines' own kernels: shares are of a GPU's link."""

    start_s: Amount
    rank_s: Amount
    once_share: Positive  # each rank reads the complete buffer of each other
    twice_start_s: Amount
    twice_share: Positive  # each rank adds its part, and all gather the parts


class ServingFit(Struct, frozen=True, eq=False):
    """All constants of one architecture, by number format."""

    linear: Mapping[str, LinearFit]
    quantize: Mapping[str, QuantizeFit]
    prefill: Mapping[str, PrefillFit]
    decode: Mapping[str, DecodeFit]
    mla_prefill: Mapping[str, PrefillFit]
    mla_decode: Mapping[str, DecodeFit]
    sequence: Mapping[str, SequenceFit]
    reduce: Mapping[str, ReduceFit]
    attends_in_cache_format: bool = False  # prefill multiplies in fp8 where the cache is in fp8


@lru_cache(maxsize=1)
def operator_fits() -> tuple[FactDict, dict[str, ServingFit]]:
    """Return the file of fits, and the constants of each measured architecture."""
    table = load_fit("operators")
    return table, {name: serving_fit(entry) for name, entry in table["architecture"].items()}


def serving_fit(entry: Facts) -> ServingFit:
    """Return one architecture's table as constants; what a product does not name is as in training."""
    common = {**to_builtins(default_fit().tensor), "batched": None}
    linear = {name: {**values, "product": common | values["product"]} for name, values in entry["linear"].items()}
    kinds = ("quantize", "prefill", "decode", "mla_prefill", "mla_decode", "sequence", "reduce")
    tables = {kind: entry.get(kind, {}) for kind in kinds}
    follows = entry.get("attends_in_cache_format", False)
    return convert_table({**tables, "linear": linear, "attends_in_cache_format": follows}, ServingFit)


def fit_for(gpu: Gpu) -> ServingFit:
    """Return the constants of the GPU's architecture, or of the one that replaces it."""
    return operator_fits()[1][stand_in(gpu.architecture)]


def stand_in(architecture: str) -> str:
    """Return the measured architecture whose constants are used; the same name where it was measured itself."""
    table, known = operator_fits()
    others = table["stand_in"]
    return architecture if architecture in known else str(others.get(architecture, others["else"]))


def cost_evidence(gpu: Gpu) -> dict[str, str]:
    """Return, by group of operators, whether their constants were measured on this GPU, on its architecture or on
    another, from which they are scaled.
    """
    fit, architecture = default_fit(), gpu.architecture
    entry = operator_fits()[0]["architecture"].get(architecture, {})
    is_here, evidence = gpu.name == TRAINING_GPU, {}
    is_served_here = gpu.name in entry.get("gpus", [])
    for name, is_measured, is_fitted, source in (
        ("training products", is_here or (is_served_here and f"{architecture}-bf16" in fit.tensor_of),
         fit.is_measured("tensor", architecture), "hopper"),
        ("training attention", is_here, fit.is_measured("attention", architecture), "hopper"),
        ("memory-bound kernels", is_here, fit.is_measured("stream", architecture), "hopper"),
        ("serving operators", is_served_here, bool(entry), stand_in(architecture)),
    ):  # fmt: skip
        elsewhere = f"measured on {architecture}" if is_fitted else f"scaled from {source}"
        evidence[name] = "measured" if is_measured else elsewhere
    return evidence


def linear_s(
    m: Number,
    n: Number,
    k: Number,
    gpu: Gpu,
    recipe: str = "bf16",
    copies: float = math.inf,
    load: Load = BURST,
    fit: ServingFit | None = None,
    substitute: bool = False,
) -> Number:
    """Return the seconds of a linear layer (m, k) by (k, n) with bf16 input and result.

    *recipe* is one of LINEAR_FORMATS. *copies* are the sets of weights between two uses of the same: few and small
    ones are then read from the L2 cache (tables were measured with 5). With *substitute*, a format that was not
    measured on the architecture has its own bytes and the constants of bf16.
    """
    require(recipe in LINEAR_FORMATS, f"unknown recipe {recipe!r}; choose from {', '.join(LINEAR_FORMATS)}")
    fit, form = fit or fit_for(gpu), LINEAR_FORMATS[recipe]
    linear_fit = fit.linear.get(recipe) or (fit.linear["bf16"] if substitute else None)
    if linear_fit is None:
        raise ValueError(f"{recipe}: linear layers in this format were not measured on {stand_in(gpu.architecture)}")
    dtype = form.product if form.product in gpu.matrix_flops else gpu.half_format
    rates, rows = matrix_rates(gpu, dtype), np.atleast_1d(np.asarray(m, dtype=np.float64))
    hit = cached_fraction(copies * n * k * form.weight_bytes, gpu, 1.0) if copies < math.inf else 0.0
    bandwidth = rates.bandwidth_bytes_per_s / (1.0 - hit + hit / linear_fit.cached_speedup)
    reached = rates._replace(bandwidth_bytes_per_s=bandwidth)
    seconds = matmul_s(rows, n, k, np.ones(rows.shape), form.weight_bytes, reached, linear_fit.product)
    waiting_s = linear_fit.depth_s * k * np.maximum(1.0, n / (PANEL * gpu.sms))
    seconds = (seconds**4 + waiting_s**4) ** 0.25 if linear_fit.depth_s else seconds
    energy = linear_fit.joule_per_flop, linear_fit.warm_up_s
    product_s: FloatArray = np.asarray(_limit(seconds, 2.0 * rows * n * k, *energy, gpu, dtype, load))
    product_s = product_s + linear_fit.product.latency_s  # of its launch
    quantised_s = sum(quantize_s(m, k, gpu, kind, linear_fit.quantise_factor, fit) for kind in form.quantise)
    return (product_s if isinstance(m, np.ndarray) else float(product_s[0])) + quantised_s


def quantize_s(
    rows: Number, columns: Number, gpu: Gpu, kind: str = "cast", factor: float = 1.0, fit: ServingFit | None = None
) -> Number:
    """Return the seconds to find the scale of a bf16 tensor (``scale``), to cast it to fp8 by a known scale (``cast``)
    or, fused into one kernel, to find and apply scales of blocks (``block``), which takes *factor* casts.
    """
    quantize_fit = (fit or fit_for(gpu)).quantize.get("cast" if kind == "block" else kind)
    if quantize_fit is None:  # not measured apart from the product, whose constants then include it
        return 0.0 * np.asarray(rows) if isinstance(rows, np.ndarray) else 0.0
    elements = rows * columns
    moved = elements * (BF16_BYTES if kind == "scale" else BF16_BYTES + 1.0)
    hit = cached_fraction(moved, gpu, quantize_fit.cached_share)
    memory_s = moved / (gpu.memory_bandwidth_bytes_per_s * quantize_fit.bandwidth_efficiency)
    memory_s = memory_s * (1.0 - hit + hit / quantize_fit.cached_speedup)
    clocks = elements / quantize_fit.elements_per_clock + rows * quantize_fit.row_clocks
    issue_s = clocks / (gpu.sms * gpu.clock_hz)
    seconds = (memory_s**4 + issue_s**4) ** 0.25
    return factor * seconds if kind == "block" else quantize_fit.latency_s + seconds


def prefill_s(
    batch: Number,
    tokens: Number,
    heads: Number,
    kv_heads: Number,
    head_dim: Number,
    gpu: Gpu,
    dtype: str = "bf16",
    cache_dtype: str = "bf16",
    window: Number = 0.0,
    fit: ServingFit | None = None,
) -> Number:
    """Return the seconds of causal attention of *tokens* new tokens per sequence, and of writing them to the cache.

    *dtype* and *cache_dtype* are bf16 or fp8; *window* limits the keys of a query, 0 does not.
    """
    fit = fit or fit_for(gpu)
    if cache_dtype == "fp8" and fit.attends_in_cache_format:
        dtype = "fp8"
    prefill_fit = _of_format(fit.prefill, dtype, gpu)
    written = 2.0 * batch * tokens * kv_heads * head_dim * (1.0 if cache_dtype == "fp8" else BF16_BYTES)
    moved = 2.0 * batch * tokens * (heads + kv_heads) * head_dim * BF16_BYTES
    return _prefill(batch, tokens, heads, head_dim, head_dim, moved, written, window, gpu, dtype, prefill_fit)


def mla_prefill_s(
    batch: Number, tokens: Number, heads: Number, gpu: Gpu, cache_dtype: str = "bf16", fit: ServingFit | None = None
) -> Number:
    """Return the seconds of DeepSeek's attention of new tokens: *heads* of one rank, keys 192 and values 128 wide."""
    prefill_fit = _of_format((fit or fit_for(gpu)).mla_prefill, cache_dtype, gpu)
    moved = 2.0 * batch * tokens * heads * (MLA_KEY + MLA_VALUE) * BF16_BYTES
    return _prefill(batch, tokens, heads, MLA_KEY, MLA_VALUE, moved, 0.0, 0.0, gpu, "bf16", prefill_fit)


def _prefill(
    batch: Number,
    tokens: Number,
    heads: Number,
    key_dim: Number,
    value_dim: Number,
    moved: Number,
    written: Number,
    window: Number,
    gpu: Gpu,
    dtype: str,
    fit: PrefillFit,
) -> Number:
    tile = fit.query_tile
    tiles = np.ceil(tokens / tile)
    rows = tiles * tile
    width = np.where(np.asarray(window) > 0, np.minimum(window, tokens), tokens)
    triangle = 0.5 * (rows + tile)
    window_keys = width - width * (width - 1.0) / (2.0 * tokens) + fit.window_margin * tile
    attended = np.where(np.asarray(window) > 0, np.minimum(window_keys, triangle), triangle)
    head = np.asarray(np.maximum(key_dim, value_dim))
    slower = np.where(head > WIDE_HEAD, fit.widest, np.where(head < NARROW_HEAD, fit.narrow, 1.0))
    slower = np.where((head > NARROW_HEAD) & (head <= WIDE_HEAD), fit.wide, slower)
    peak = gpu.matrix_peak_flops(dtype if dtype in gpu.matrix_flops else gpu.half_format)
    operations = 2.0 * (key_dim + value_dim)
    per_score_s = (operations + fit.flops_per_score) * slower / (peak * fit.efficiency)
    scores = batch * heads * rows * attended
    longest_s = tile * np.minimum(rows, width + tile) * per_score_s * gpu.sms
    compute_s = scores * per_score_s + fit.tail * longest_s
    limited_s = _limit(compute_s, scores * operations, fit.joule_per_flop, WARM_UP_S, gpu, DType.BF16, BURST)
    start_s = batch * heads * tiles * fit.tile_clocks * (key_dim + value_dim) / 256.0 / (gpu.sms * gpu.clock_hz)
    memory_s = (fit.memory_exposure * moved + fit.cache_write * written) / gpu.memory_bandwidth_bytes_per_s
    if fit.cached_share:
        memory_s = memory_s * (1.0 - cached_fraction(moved + written, gpu, fit.cached_share))
    return limited_s + start_s + memory_s + fit.latency_s


def decode_s(
    batch: Number,
    context: Number,
    heads: Number,
    kv_heads: Number,
    head_dim: Number,
    gpu: Gpu,
    cache_dtype: str = "bf16",
    window: Number = 0.0,
    cached: bool = False,
    fit: ServingFit | None = None,
    flash: bool = False,
) -> Number:
    """Return the seconds of attention of one token per sequence against *context* cached tokens.

    Constants are those of TensorRT-LLM's kernels; *flash* takes flash decoding instead, which PyTorch, vLLM and SGLang
    use: it reads a cache of grouped heads as fast as any (five sizes on an H200).
    With *cached*, the same small cache is read again and again, and from the L2 cache (as tables are measured).
    """
    kernel = _of_format((fit or fit_for(gpu)).decode, cache_dtype, gpu)
    attended = np.where(np.asarray(window) > 0, np.minimum(context, window + kernel.window_margin), context)
    group = np.asarray(heads / kv_heads)
    alone = (group == 1) | (group > kernel.most_grouped)
    blocks = batch * np.where(alone, heads, kv_heads * np.ceil(group / kernel.tile_heads))
    block = np.where(alone, kernel.head_block_clocks, kernel.block_clocks)
    token = np.where(alone, kernel.head_token_clocks, kernel.token_clocks) * head_dim / 128.0
    element_bytes = 1.0 if cache_dtype == "fp8" else BF16_BYTES
    moved = batch * attended * kv_heads * 2.0 * head_dim * element_bytes
    if flash:
        return FLASH["flash_latency_s"] + moved / (FLASH["flash_efficiency"] * gpu.memory_bandwidth_bytes_per_s)
    flops = 4.0 * batch * attended * heads * head_dim
    return _decode(blocks, attended, block, token, moved, flops, gpu, kernel, cached)


def mla_decode_s(
    batch: Number,
    context: Number,
    heads: Number,
    gpu: Gpu,
    cache_dtype: str = "bf16",
    cached: bool = False,
    fit: ServingFit | None = None,
) -> Number:
    """Return the seconds of DeepSeek's attention of one token per sequence: *heads* of one rank share the latents."""
    kernel = _of_format((fit or fit_for(gpu)).mla_decode, cache_dtype, gpu)
    tiles = np.ceil(np.asarray(heads) / HEAD_TILE)
    element_bytes = 1.0 if cache_dtype == "fp8" else BF16_BYTES
    moved = batch * context * LATENT_KEY * element_bytes
    flops = 2.0 * batch * context * tiles * HEAD_TILE * (LATENT_KEY + LATENT_VALUE)
    return _decode(batch * tiles, context, kernel.block_clocks, kernel.token_clocks, moved, flops, gpu, kernel, cached)


def _decode(
    blocks: Number,
    context: Number,
    block_clocks: Number,
    token_clocks: Number,
    moved: Number,
    flops: Number,
    gpu: Gpu,
    fit: DecodeFit,
    cached: bool,
) -> Number:
    hit = cached_fraction(moved, gpu, fit.cached_share, 4.0) if cached else 0.0
    memory_s = moved / (gpu.memory_bandwidth_bytes_per_s * fit.bandwidth_efficiency)
    memory_s = memory_s * (1.0 - hit + hit / fit.cached_speedup)
    work_s = blocks * (block_clocks + token_clocks * context) / (gpu.sms * gpu.clock_hz)
    compute_s = flops / (gpu.matrix_peak_flops(gpu.half_format) * fit.efficiency)
    most_pieces = np.ceil(context / SPLIT_TOKENS) if fit.divides else 1.0
    pieces = np.clip(gpu.sms / np.asarray(blocks), 1.0, most_pieces)
    lone_s = fit.lone * (block_clocks + token_clocks * context / pieces) / gpu.clock_hz
    longest_s = (memory_s**fit.sharpness + work_s**fit.sharpness + compute_s**fit.sharpness) ** (1.0 / fit.sharpness)
    return fit.latency_s + longest_s + lone_s


def sequence_kernel_s(
    kernel: str,
    sequences: Number,
    units: Number,
    moved: Number,
    gpu: Gpu,
    steps: Number = 0.0,
    fit: ServingFit | None = None,
) -> Number:
    """Return the seconds of one forward kernel along the sequence.

    *kernel* is a name of the fit, such as ``gated_delta_net-chunk_gated_delta_rule``; *sequences* are times channels or
    heads, *units* are tokens times channels or chunks times heads, *steps* the chunks of a sequence, one by one.
    """
    kernel_fit = (fit or fit_for(gpu)).sequence.get(kernel)
    if kernel_fit is None:
        raise ValueError(f"{kernel} was not measured on {stand_in(gpu.architecture)}")
    memory_s = moved / (gpu.memory_bandwidth_bytes_per_s * kernel_fit.bandwidth_efficiency)
    clocks = sequences * kernel_fit.sequence_clocks + units * kernel_fit.unit_clocks
    issue_s = clocks / (gpu.sms * gpu.clock_hz)
    return kernel_fit.latency_s + (memory_s**4 + issue_s**4) ** 0.25 + steps * kernel_fit.step_clocks / gpu.clock_hz


def custom_reduce_s(size_bytes: Number, ranks: int, gpu: Gpu, link_bytes_per_s: float) -> Number:
    """Return the seconds of an all-reduce inside an NVLink domain by the kernels of inference engines: in one step,
    in which each rank reads the buffers of all others, or in two, whichever is faster (TensorRT-LLM, vLLM).
    """
    fit = fit_for(gpu).reduce["custom"]
    once_s = (ranks - 1) * size_bytes / (fit.once_share * link_bytes_per_s)
    twice_s = fit.twice_start_s + 2.0 * (ranks - 1) / ranks * size_bytes / (fit.twice_share * link_bytes_per_s)
    return fit.start_s + fit.rank_s * ranks + np.minimum(once_s, twice_s)


def _of_format(known: Mapping[str, Fit], dtype: str, gpu: Gpu) -> Fit:
    if not known:
        raise ValueError(f"this attention was not measured on {stand_in(gpu.architecture)}")
    return known.get(dtype) or known["bf16"]


def _limit(
    seconds: Number, flops: Number, joule: float, warm_up_s: float, gpu: Gpu, dtype: DType, load: Load
) -> Number:
    """Return *seconds* at the clock that the power limit leaves, by the law that an H200 was measured to follow.

    Work that is kept up draws what training does, which bursts cannot tell: on an H200, products kept up for a second
    took 8 % (fp8: 15 %) longer than by the tables' energy, and 5 % (2 %) longer than by that of training.
    """
    power = default_fit().power.of("hopper")
    if load.busy_s > 0:
        joule = max(joule, default_fit().power.of(gpu.architecture).energy(gpu.architecture, dtype))
    power_share = power.idle_share + flops / seconds * joule / gpu.power_w
    factor = np.maximum(1.0, power_share) ** power.exponent
    busy_s = load.busy_s if load.busy_s > 0 else load.repeats * seconds
    return seconds * (1.0 + (factor - 1.0) / (1.0 + warm_up_s / busy_s))
