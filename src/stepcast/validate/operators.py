"""The operators set: public tables of measured operators on ten GPUs, each row compared with its cost.

Rows of one GPU that share their words (format, kernel, phase) are compared at once, by the function that
``COMPARISONS`` names for their table. Tables are short bursts at locked clocks: costs are those of operators alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from stepcast.cost import serving
from stepcast.cost.collectives.choose import collective_s
from stepcast.cost.collectives.route import route_of
from stepcast.cost.exchange import PHASES, TokenCopies, exchange_s
from stepcast.cost.experts import FusedExpertsFit, RankLoad, balanced_load, fused_experts_s, power_law_load
from stepcast.hardware import Gpu, load_cluster, resolve
from stepcast.hardware.catalog import clusters_of
from stepcast.inputs.operator_tables import OperatorTable, find_operator_tables, read_operator_table
from stepcast.ir.arrays import BoolArray, FloatArray, TextArray
from stepcast.ir.model_parts import Routing
from stepcast.ir.progress import report_progress
from stepcast.ir.types import require
from stepcast.ir.work import CollectiveKind
from stepcast.pytorch.profile import RECIPES, gpu_of
from stepcast.units import MIB, MS, US
from stepcast.validate.scoreboard import MeasuredColumns, Measurements, join_columns

SIDE = 1024  # sides of products from which the hardware, not the launch, decides


class ComparedOperators(NamedTuple):
    """Measured and predicted seconds of rows; *sizes* are their size classes, *dtype* the format they share."""

    measured_s: FloatArray
    predicted_s: FloatArray
    dtype: str
    sizes: TextArray


Comparison = Callable[[OperatorTable, Gpu], Iterator[ComparedOperators]]


def measure_operators(*places: str) -> Measurements:
    """Return the rows of all tables in *places* with their costs; rows without one are counted with the reason."""
    pieces: list[MeasuredColumns] = []
    skipped: Counter[str] = Counter()
    for path in report_progress([path for place in places for path in find_operator_tables(place)]):
        table = read_operator_table(path)
        if table.name not in COMPARISONS:
            skipped[f"{table.name}: no table of this set; known are {', '.join(COMPARISONS)}"] += len(table)
            continue
        words, compare = COMPARISONS[table.name]
        for rows in table.split(("system", "device", "kernel_source", *words.split())):
            try:
                gpu = gpu_of(rows)
                for compared in compare(rows, gpu):
                    timed = (compared.measured_s > 0) & np.isfinite(compared.predicted_s)
                    pieces.append(_label(table.name, gpu.name, compared, timed))
                    if not timed.all():
                        skipped[f"{table.name}: measured as 0 s, or without a cost"] += int((~timed).sum())
            except ValueError as error:
                skipped[f"{table.name}: {error}"] += len(rows)
    joined = join_columns(pieces)
    labels = [joined.tags[tag] for tag in ("table", "dtype", "gpu")] if pieces else []
    names = replace(joined, name=lambda index: "{} {} on {}, row {}".format(*(tag[index] for tag in labels), index))
    return Measurements(names, skipped)


def _label(table: str, gpu: str, compared: ComparedOperators, rows: BoolArray) -> MeasuredColumns:
    sizes = compared.sizes[rows]
    labels: dict[str, str | TextArray] = {"table": table, "gpu": gpu, "dtype": compared.dtype, "size": sizes}
    labels |= {"gpu by table": f"{gpu} {table} {compared.dtype}", "table by size": np.char.add(f"{table} ", sizes)}
    tags = {tag: np.full(len(sizes), label) for tag, label in labels.items()}
    return MeasuredColumns(compared.measured_s[rows], compared.predicted_s[rows], tags, str)


# ---- products and quantisation -------------------------------------------------------------------------

COPIES = 5.0  # sets of weights that the tables' loop goes through


def compare_products(rows: OperatorTable, gpu: Gpu) -> Iterator[ComparedOperators]:
    """Yield linear layers; those in narrow formats quantise their input first."""
    word = rows.word("dtype", "gemm_dtype")
    require(word in RECIPES, f"unknown format {word!r}; known are {', '.join(RECIPES)}")
    m, n, k = (rows.counts(side) for side in "mnk")
    seconds = serving.linear_s(m, n, k, gpu, RECIPES[word], COPIES)
    sizes = np.where(np.minimum(np.minimum(m, n), k) >= SIDE, f"sides from {SIDE}", f"a side below {SIDE}")
    sizes = np.where(m <= 256, "m up to 256", sizes)
    yield ComparedOperators(rows.numbers("latency_ms") * MS, np.asarray(seconds), RECIPES[word], sizes)


def compare_quantisation(rows: OperatorTable, gpu: Gpu) -> Iterator[ComparedOperators]:
    if (word := rows.word("quant_dtype")) != "fp8":
        raise ValueError(f"quantisation to {word!r} has no cost; only fp8 was measured")
    m, k = rows.counts("m"), rows.counts("k")
    seconds = serving.quantize_s(m, k, gpu, "scale" if rows.name == "quantize_scale" else "cast")
    sizes = np.where(m * k < 2.0**20, "below 1 M elements", "from 1 M elements")
    yield ComparedOperators(rows.numbers("latency_ms") * MS, np.asarray(seconds), word, sizes)


# ---- attention -----------------------------------------------------------------------------------------

ATTENTION_FORMATS = {"bfloat16": "bf16", "fp8": "fp8"}


def attention_cost_s(rows: OperatorTable, gpu: Gpu, fit: serving.ServingFit | None = None) -> FloatArray:
    """Return the seconds of the rows of one of the four tables of attention."""
    words = rows.word("attn_dtype", "mla_dtype"), rows.word("kv_cache_dtype")
    require(set(words) <= set(ATTENTION_FORMATS), f"attention in {words[0]!r} with a cache in {words[1]!r} has no cost")
    dtype, cache = (ATTENTION_FORMATS[word] for word in words)
    batch, heads, tokens = rows.counts("batch_size"), rows.counts("num_heads"), rows.counts("isl")
    before = rows.numbers("step", 0.0)
    if rows.name.endswith("_prefill") and before.any():
        raise ValueError("prefill after tokens that are in the cache has no cost")
    if rows.name == "mla_prefill":
        return np.asarray(serving.mla_prefill_s(batch, tokens, heads, gpu, cache, fit=fit))
    if rows.name == "mla_decode":
        return np.asarray(serving.mla_decode_s(batch, tokens + before, heads, gpu, cache, cached=True, fit=fit))
    sizes = heads, rows.counts("num_key_value_heads"), rows.counts("head_dim")
    window = rows.numbers("window_size", 0.0)
    if rows.name == "attention_prefill":
        return np.asarray(serving.prefill_s(batch, tokens, *sizes, gpu, dtype, cache, window, fit=fit))
    return np.asarray(serving.decode_s(batch, tokens + before, *sizes, gpu, cache, window, cached=True, fit=fit))


def compare_attention(rows: OperatorTable, gpu: Gpu) -> Iterator[ComparedOperators]:
    context = rows.counts("isl") + rows.numbers("step", 0.0)
    labels = np.where(context < 1024, "context below 1,024", "context from 1,024")
    cache = ATTENTION_FORMATS.get(rows.word("kv_cache_dtype"), "")
    dtype = f"{ATTENTION_FORMATS.get(rows.word('attn_dtype', 'mla_dtype'), '')}, cache {cache}"
    yield ComparedOperators(rows.numbers("latency_ms") * MS, attention_cost_s(rows, gpu), dtype, labels)


# ---- what runs along the sequence ----------------------------------------------------------------------

CHUNK = 64.0  # tokens of a gated delta rule that are worked on at once
BF16_BYTES = 2.0


def sequence_cost_s(rows: OperatorTable, gpu: Gpu, fit: serving.ServingFit | None = None) -> FloatArray:
    """Return the seconds of convolutions and gated delta rules."""
    source, batch, tokens = rows.word("kernel_source"), rows.counts("batch_size"), rows.counts("num_tokens")
    steps: FloatArray = np.zeros(len(rows))
    if rows.name == "mamba2":
        states = rows.counts("n_groups") * rows.counts("d_state")
        channels = rows.counts("nheads") * rows.counts("head_dim") + 2 * states
    else:
        keys = rows.counts("num_k_heads") * rows.counts("head_k_dim")
        heads, width = rows.counts("num_v_heads"), rows.counts("head_v_dim")
        # The time of this convolution is the same for all widths of the values.
        channels = keys if source == "causal_conv1d_fn" else 2 * keys + heads * width
    if source.startswith("causal_conv1d"):
        sequences, units, moved = batch * channels, tokens * channels, 2 * BF16_BYTES * tokens * channels
    elif source == "chunk_gated_delta_rule":
        steps = np.ceil(rows.counts("seq_len") / CHUNK)
        sequences, units = batch * heads, batch * steps * heads
        moved = BF16_BYTES * tokens * (10 * keys + 6 * heads * width)
    elif source == "fused_recurrent_gated_delta_rule":
        sequences, units = batch * heads, tokens * heads
        moved = 2 * BF16_BYTES * tokens * heads * width * rows.counts("head_k_dim")
    else:
        raise ValueError(f"the kernel {source!r} has no cost")
    return np.asarray(serving.sequence_kernel_s(f"{rows.name}-{source}", sequences, units, moved, gpu, steps, fit))


def compare_sequences(rows: OperatorTable, gpu: Gpu) -> Iterator[ComparedOperators]:
    labels = np.where(rows.counts("num_tokens") < 1024, "below 1,024 tokens", "from 1,024 tokens")
    predicted_s = sequence_cost_s(rows, gpu)
    yield ComparedOperators(rows.numbers("latency_ms") * MS, predicted_s, rows.word("kernel_source"), labels)


# ---- experts -------------------------------------------------------------------------------------------

# Inner widths of the experts of Nemotron 3, whose activation (a squared ReLU) has no gate; tables of vLLM's first
# fused kernel ran them with one.
UNGATED = (1856.0, 2688.0, 5120.0)
GATED_KERNEL = "vllm_fused_moe"
DRAWS = 5  # of a power law that a loop goes through


class ExpertColumns(NamedTuple):
    """Sizes of layers of experts, the loads of their busiest ranks, and the experts that the tables' loops use."""

    tokens: FloatArray
    top_k: FloatArray
    hidden: FloatArray
    inner: FloatArray
    matrices: FloatArray
    load: RankLoad
    recent: FloatArray


def expert_columns(rows: OperatorTable) -> ExpertColumns:
    tokens, hidden, inner, top_k, experts, tp, ep = (
        rows.counts(name)
        for name in ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    )
    ungated = np.isin(inner, UNGATED) & (rows.word("kernel_source") != GATED_KERNEL)
    sizes = zip(tokens.tolist(), experts.tolist(), top_k.tolist(), ep.tolist(), strict=True)
    if rows.word("distribution") == "balanced":
        draws, loads = 1, [balanced_load(*size) for size in sizes]
    else:
        draws, alpha = DRAWS, float(rows.word("distribution").rpartition("_")[2])
        loads = [power_law_load(count, int(own), int(best), int(ranks), alpha) for count, own, best, ranks in sizes]
    load = RankLoad(*(np.array(column) for column in zip(*loads, strict=True)))
    recent = load.held * (1.0 - (1.0 - np.minimum(1.0, load.active / load.held)) ** draws)
    width, matrices = np.maximum(1.0, inner / tp), np.where(ungated, 2.0, 3.0)
    return ExpertColumns(tokens, top_k, hidden, width, matrices, load, recent)


def expert_cost_s(
    kernel: str, word: str, columns: ExpertColumns, gpu: Gpu, fit: FusedExpertsFit | None = None
) -> FloatArray:
    return fused_experts_s(kernel, word, *columns[:-1], gpu, fit, columns.recent)


def compare_experts(rows: OperatorTable, gpu: Gpu) -> Iterator[ComparedOperators]:
    """Yield fused experts of the busiest rank."""
    word, columns = rows.word("moe_dtype"), expert_columns(rows)
    seconds = expert_cost_s(rows.word("kernel_source"), word, columns, gpu)
    labels = np.where(columns.tokens < 256, "below 256 tokens", "from 256 tokens")
    yield ComparedOperators(rows.numbers("latency_ms") * MS, seconds, f"{word}, {rows.word('distribution')}", labels)


MOST_GROUPS = 4  # of nodes that DeepEP's own benchmark limits a token to


def compare_deepep(rows: OperatorTable, gpu: Gpu) -> Iterator[ComparedOperators]:
    """Yield dispatch (in fp8 with its scales) and combine (in bf16), in the normal and the low-latency mode."""
    tokens, hidden, top_k = rows.counts("num_token"), rows.counts("hidden_size"), rows.counts("num_topk")
    nodes, experts = rows.numbers("node_num"), rows.counts("num_experts")
    cluster = load_cluster((clusters_of(gpu.name) or [gpu.name])[0])
    labels = np.char.add(np.char.mod("%d nodes, ", nodes), np.where(tokens < 256, "below 256", "from 256"))
    low = rows.name == "deepep_low_latency"
    library, sms = ("deepep-low-latency", np.ones(len(rows))) if low else ("deepep", rows.counts("dispatch_sms"))
    for phase, element_bytes in zip(PHASES, (1.0 + 4.0 / 128.0, 2.0), strict=True):
        columns = [f"{phase}_avg_t_us"] if low else [f"{phase}_transmit_us", f"{phase}_notify_us"]
        measured_us = np.sum([rows.numbers(name) for name in columns], axis=0)
        predicted_s = np.empty(len(rows))
        for count, best, own in {*zip(nodes.tolist(), top_k.tolist(), experts.tolist(), strict=True)}:
            mine = (nodes == count) & (top_k == best) & (experts == own)
            ranks = int(count) * cluster.node.gpus
            route = route_of(resolve(cluster, range(ranks), active_per_node=cluster.node.gpus), cluster)
            limit = (int(count), MOST_GROUPS) if count > MOST_GROUPS else (1, 1)
            copies = TokenCopies.of(Routing(int(best), -(-int(own) // ranks) * ranks, *limit), route)
            if low:  # once for each expert
                copies = TokenCopies(best, best * (count - 1) / count, own)
            sizes = tokens[mine], hidden[mine], element_bytes
            predicted_s[mine] = exchange_s(library, phase, *sizes, copies, route, sms[mine], gpu.architecture)
        yield ComparedOperators(measured_us * US, predicted_s, phase, labels)


# ---- collectives inside a node -------------------------------------------------------------------------

COLLECTIVES = {"all_gather": CollectiveKind.ALL_GATHER, "all_reduce": CollectiveKind.ALL_REDUCE,
               "reduce_scatter": CollectiveKind.REDUCE_SCATTER, "alltoall": CollectiveKind.ALL_TO_ALL}  # fmt: skip
RECENT = "nccl-2.27"  # the version whose constants its table and later ones are compared with


def compare_collectives(rows: OperatorTable, gpu: Gpu) -> Iterator[ComparedOperators]:
    """Yield collectives of NCCL inside a node, or the custom all-reduces of inference engines."""
    kind = COLLECTIVES.get(rows.word("op_name") or "all_reduce")
    if kind is None:
        raise ValueError(f"unknown collective {rows.word('op_name')!r}")
    sizes_bytes = rows.numbers("message_size") * (1.0 if rows.word("nccl_dtype") == "int8" else 2.0)
    newer = [f"communication.library={RECENT}"] if rows.word("lib_version") >= RECENT.removeprefix("nccl-") else []
    ranks, cluster = int(rows.word("num_gpus")), load_cluster(gpu.name, newer)
    route = route_of(resolve(cluster, range(ranks), active_per_node=min(ranks, cluster.domain_gpus)), cluster)
    if rows.name == "custom_allreduce":
        link = cluster.node.fabric.link.bandwidth_bytes_per_s
        predicted_s = np.asarray(serving.custom_reduce_s(sizes_bytes, ranks, gpu, link))
    else:
        predicted_s = collective_s(kind, sizes_bytes, route, in_place=False)
    labels = np.where(sizes_bytes < MIB, "below 1 MiB", "from 1 MiB")
    yield ComparedOperators(rows.numbers("latency_ms") * MS, predicted_s, f"{kind} of {ranks}", labels)


# By table: the columns whose words the rows that are compared at once share, and the function that compares them.
COMPARISONS: dict[str, tuple[str, Comparison]] = {
    table: (words, compare)
    for tables, words, compare in (
        ("gemm gemm_small", "dtype gemm_dtype", compare_products),
        ("quantize_scale quantize_matrix", "quant_dtype", compare_quantisation),
        ("attention_prefill attention_decode", "attn_dtype mla_dtype kv_cache_dtype", compare_attention),
        ("mla_prefill mla_decode", "attn_dtype mla_dtype kv_cache_dtype", compare_attention),
        ("mamba2 gated_delta_net", "phase", compare_sequences),
        ("experts experts_small", "moe_dtype distribution", compare_experts),
        ("deepep deepep_low_latency", "", compare_deepep),
        ("nccl", "op_name nccl_dtype num_gpus lib_version", compare_collectives),
        ("custom_allreduce", "allreduce_dtype num_gpus implementation", compare_collectives),
    )
    for table in tables.split()
}
